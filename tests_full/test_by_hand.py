"""The handwritten scripts that `benchmarks/shell.py` times compute the same results as ours."""

import numpy as np

from benchmarks.by_hand import figure_3, grid
from fedjax_mm.experiments.run import run
from fedjax_mm.papers import ITEMS
from fedjax_mm.sweeps import Execution


def agree(first, second, atol=0.0):
    """Whether means over the first axis agree within four standard errors plus `atol`."""
    error = np.sqrt(sum(x.var(0, ddof=1) / len(x) for x in (first, second)))
    return np.all(np.abs(first.mean(0) - second.mean(0)) <= 4 * error + atol)


def test_figure_3_by_hand():
    """Compares the initial losses and the last 200 rounds of each algorithm."""
    item = ITEMS["mfa-fig3"]
    ours = item.make(item.settings, Execution())
    for name, theirs in figure_3.both().items():
        mine = ours.excess_loss.sel(algorithm=name).transpose("seed", "round", "model").values
        assert theirs.shape == mine.shape == (20, 1001, 12)
        np.testing.assert_allclose(theirs[:, 0], mine[:, 0], rtol=1e-5)
        assert agree(*(np.log10(x[:, -200:]).mean((1, 2)) for x in (theirs, mine)))


def test_grid_by_hand():
    """Compares final metrics with a tolerance, because test images and partitions differ."""
    theirs, dims = grid.grid()[:, :, -1].mean(2), ("learning_rate", "seed", "round", "model")
    ours = run(grid.__file__.replace("grid.py", "grid.toml")).isel(algorithm=0)
    np.testing.assert_allclose(ours.learning_rate, grid.RATES)
    for i, name in enumerate(grid.NAMES):
        mine = ours[name].transpose(*dims).values[:, :, -1].mean(-1)
        assert theirs[..., i].shape == mine.shape == (20, 3)
        assert agree(theirs[..., i].T, mine.T, 0.06 if "loss" in name else 0.04)
