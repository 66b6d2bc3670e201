"""Results that are merged into a file, run by run, equal those in memory and need less of it."""

import subprocess
import sys
from pathlib import Path

import pytest
import xarray as xr

from fedjax_mm import open_result, save_dataset, sweep
from fedjax_mm.results import dataset as datasets
from fedjax_mm.sweeps import Until, merge, store
from tests.sweeps.test_parts import (
    _quick,  # noqa: F401
    call,
    check_equal,
    folder,  # noqa: F401
    grid,  # noqa: F401
    make,
    pieces,  # noqa: F401
    whole,  # noqa: F401
)

AXES = {"assignment": ["RR", "Rand"], "num_models": [2, 3], "mu": [0.1, 0.2]}


@pytest.fixture
def _large(monkeypatch):
    """Treats all results as large, and writes few runs at a time, in many chunks."""
    monkeypatch.setattr(datasets, "LARGE_BYTES", 0)
    monkeypatch.setattr(store, "_BLOCK_BYTES", 600)
    monkeypatch.setattr(store, "_CHUNK_BYTES", 64)


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize(
    "change", [{}, {"until": Until("excess_loss", at_most=0.3), "keep": None, "first_seed": 5}]
)
def test_a_merge_into_a_file_equals_the_sweep(tmp_path, change):
    """Points differ in their numbers of models, so that some values are absent."""
    mine = make(axes=AXES, num_seeds=3, **change)
    for part in ("1/3", "2/3", "3/3"):
        sweep(mine, part=part, out=tmp_path)
    found, expected = merge(tmp_path, mine, to=tmp_path / "result.nc"), sweep(mine)
    if mine.keep:
        (found, params), (expected, wanted) = found, expected
        for one, other in zip(params, wanted, strict=True):
            xr.testing.assert_identical(xr.DataArray(one), xr.DataArray(other))
    assert found.excess_loss.variable._in_memory is False
    check_equal(found, expected)
    for name in ("config", "seed", "versions"):
        assert found.attrs["manifest"][name] == expected.attrs["manifest"][name]
    save_dataset(expected, tmp_path / "once.nc")
    with xr.open_dataset(tmp_path / "once.nc") as once:
        stored = xr.open_dataset(tmp_path / "result.nc")
        xr.testing.assert_identical(stored.drop_attrs(), once.drop_attrs())


@pytest.mark.usefixtures("_large")
def test_a_large_result_is_shown_and_gets_more_seeds(folder, capsys):
    later = ("--first-seed", 3, "--set", "num_seeds=2")
    words = ("sweep", folder / "grid.toml", "--out", folder / "whole", *later)
    for number in (1, 2):
        assert call(*words, "--part", f"{number}/2") == 0
    assert call("merge", folder / "whole/grid", "--first-seed", 3) == 0
    five = ("sweep", folder / "grid.toml", "--out", folder / "five", "--set", "num_seeds=5")
    assert call(*five) == 0
    found, expected = (open_result(folder / name / "grid") for name in ("whole", "five"))
    check_equal(found, expected)
    assert found.attrs["manifest"]["config"] == expected.attrs["manifest"]["config"]
    found.close()
    expected.close()
    shown = []
    for name in ("whole", "five"):
        capsys.readouterr()
        assert call("show", folder / name / "grid") == 0
        shown.append(capsys.readouterr().out.partition("After")[2].partition("figure")[0])
    assert shown[0] == shown[1]


CHILD = """
import resource
import sys

import jax.numpy as jnp

from fedjax_mm import fedavg, mfa_rr, sweep
from fedjax_mm.results import dataset
from fedjax_mm.sweeps import Grid, Setup, merge
from fedjax_mm.tasks import quadratic, with_metrics

dataset.LARGE_BYTES = 0  # otherwise the merged result would be loaded


def many(task, params):
    return {"many": jnp.sum(params) * jnp.ones(50_000)}


def build(learning_rate):
    task = with_metrics(quadratic(6, 2, mu=0.1), many)
    return Setup(task, fedavg(learning_rate, local_steps=2), mfa_rr(6, 2))


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


grid = Grid(build, {"learning_rate": [0.1, 0.2]}, num_rounds=9, num_seeds=50)
if sys.argv[1:] == ["merge"]:
    sweep(grid, part="1/10", out=".")  # is complete, and traces what a merge needs, too
    before, result = peak(), merge(".", grid, to="result.nc")
    print(result.nbytes / 2**20, peak() - before)
else:
    for part in range(1, 11):
        sweep(grid, part=f"{part}/10", out=".")
"""


def test_a_merge_needs_less_memory_than_the_result(tmp_path):
    """Each of the ten parts has 38 MiB."""
    (tmp_path / "study.py").write_text(CHILD)
    for words in ([], ["merge"]):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "study.py", *words],
            cwd=tmp_path,
            env={"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    size, more = map(float, done.stdout.split())
    print(f"{more:.0f} MiB for a result of {size:.0f} MiB")
    assert size > 380
    assert more < 240
