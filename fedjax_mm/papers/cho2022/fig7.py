"""Figure 7: mean test and training losses over the rounds."""

from collections.abc import Iterator

import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.claims import within
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.cho2022.comparison import draw, item, judged, unattacked
from fedjax_mm.papers.cho2022.grid import Comparison, clustered
from fedjax_mm.papers.rulings import Ruling, ruling

_METHODS = ("FedAvg", "MaxFL")
_NEARLY = 10.0  # allowed difference, in percent of the larger loss


def losses(result: xr.Dataset, settings: Comparison) -> xr.DataArray:
    """Losses averaged over clients, ``(examples, algorithm, seed, round)``."""
    both = unattacked(judged(result))[["loss", "train_loss"]].to_array("examples")
    return both.assign_coords(examples=["test", "training"])


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Ruling]:
    """Judges the largest difference between test and training losses over a run's records."""
    largest = unattacked(measured["largest difference"]).reindex(algorithm=list(_METHODS))
    yield ruling("nearly-identical", within(largest, margin=_NEARLY, form=".1f"))


def figure(result: xr.Dataset, measured: xr.Dataset, settings: Comparison) -> Figure:
    """Draws test losses as solid lines and training losses as dashed lines."""
    mean, error = estimate(losses(result, settings))
    test, training = zip(mean, error, strict=True)
    lines = plots.lines(*test, "-?", label="test, ")
    lines += plots.lines(*training, "--?", label="training, ")
    return draw([[plots.Panel("mean loss over clients", "round", "loss", lines)]], settings)


_SETTINGS = clustered(
    *_METHODS, learning_rates=(0.05,), local_steps=(30,), batch_sizes=(64,), record_every=5
)

ITEMS = (item("maxfl-fig7", _SETTINGS, ("accuracy",), rules, figure=figure),)
"""Figure 7."""
