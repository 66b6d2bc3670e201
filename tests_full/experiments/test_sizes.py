"""Experiments that would exhaust memory or take days are refused before any work."""

import re
import time
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import psutil
import pytest

from fedjax_mm.experiments import grid_of as grids
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.experiments.run import gridded
from fedjax_mm.experiments.tasks import SyntheticConfig
from fedjax_mm.sweeps.plan import make_plan


class Loaded(NamedTuple):
    """A stand-in for data with the size that determines the length of an epoch."""

    class Train(NamedTuple):
        max_count: int
        examples: tuple = ()

    train: Train
    kind: str = "synthetic"


MOST, GIB = 2**31 - 1, 2**30
QUADRATIC = {
    "task": {"num_clients": 8},
    "num_models": 2,
    "num_rounds": 12,
    "algorithms": {
        "A": {"assignment": {"name": "mfa_rand"}, "learning_rate": 0.1, "local_steps": 3}
    },
}
SYNTHETIC = QUADRATIC | {"task": {"name": "synthetic", "num_clients": 8}}

TOO_MUCH = {
    "clients' data": (SYNTHETIC, "task.num_clients=300000", "task.num_clients = 300,000"),
    "all clients' data": (SYNTHETIC, f"task.num_clients={MOST}", f"task.num_clients = {MOST:,}"),
    "features": (SYNTHETIC, f"task.dim={MOST}", "take fewer clients or features"),
    "classes": (SYNTHETIC, f"task.num_classes={MOST}", "take fewer clients"),
    "parameters": (QUADRATIC, f"task.num_clients={MOST}", f"{MOST:,}; the parameters take at"),
    "all parameters": (QUADRATIC, "task.num_clients=500000000", "500,000,000; the parameters"),
    "a state": (QUADRATIC, "task.num_clients=100000000", "take fewer clients or models"),
    "seeds": (QUADRATIC, "num_seeds=100000000", "num_seeds = 100,000,000"),
    "a batch": (SYNTHETIC, f"algorithms.A.batch_size={MOST}", f"A: the {MOST:,} rows of a batch"),
    "records": (QUADRATIC, f"num_rounds={MOST}", "record less often (record_every)"),
}
"""Maps a name to an experiment, a setting, and a fragment of the error with a limit of 1 GiB."""


@pytest.mark.parametrize("name", TOO_MUCH)
def test_experiments_beyond_the_memory_limit_are_refused(name):
    values, setting, fragment = TOO_MUCH[name]
    experiment = validate(Experiment, values, [setting])
    before, clock = psutil.Process().memory_info().rss, time.process_time()
    limit = before + GIB
    with (
        pytest.raises(ValueError, match=re.escape(fragment)) as error,
        gridded(experiment, limit) as grid,
    ):
        make_plan(grid, limit=limit, compiles=False)
    text = str(error.value)
    assert "\n" not in text
    assert re.search(r"takes? .*[\d.]+ GiB .*, or allow more memory$", text)
    assert psutil.Process().memory_info().rss - before < GIB / 4
    assert time.process_time() - clock < 10


@pytest.mark.parametrize("settings", [{}, {"generator": "leaf", "dim": 7, "data_seed": 3}])
def test_the_estimated_size_of_data_is_right(settings):
    task = SyntheticConfig(name="synthetic", num_clients=50, **settings)
    data = task.data()
    arrays = [*data.train.examples, *data.test.examples]
    assert task.num_bytes == pytest.approx(sum(np.asarray(x).nbytes for x in arrays), rel=0.01)


RANGE = {"start": 0.1, "stop": 1, "num": 2 * 10**9}
TOO_MANY = {
    "values": ({"learning_rate": RANGE}, "learning_rate.num = 2000000000"),
    "a list": ({"learning_rate": [0.1] * 5001}, "at most 5000 items"),
    "programs": (
        {"num_models": [1, 2, 3] * 30, "local_steps": [1, 2] * 30},
        "axes.num_models of 90 values, axes.local_steps of 60 values make 5,400 programs; at most "
        "5,000",
    ),
    "draws": ({"task.data_seed": "seed"}, "num_seeds = 100,000,000 make 100,000,000 draws"),
}
"""Maps a name to axes and a fragment of the error."""


@pytest.mark.parametrize("name", TOO_MANY)
def test_too_many_points_are_refused(name):
    axes, fragment = TOO_MANY[name]
    seeds = {"num_seeds": 10**8} if name == "draws" else {}
    clock = time.process_time()
    with pytest.raises(ValueError, match=re.escape(fragment)) as error:
        validate(Experiment, (SYNTHETIC if seeds else QUADRATIC) | {"axes": axes} | seeds)
    assert len(str(error.value)) < 500
    assert time.process_time() - clock < 10


def test_too_many_models_are_refused():
    with pytest.raises(ValueError, match=r"num_models = 2147483647: .* 100000"):
        validate(Experiment, QUADRATIC | {"num_models": MOST})


@pytest.mark.parametrize(("epochs", "is_refused"), [(2**31 // 60 + 1, True), (2**31 // 64, False)])
def test_more_local_steps_than_int32_can_count_are_refused(monkeypatch, epochs, is_refused):
    """An overflow of int32 would give a negative number of steps, and no training."""
    loaded = Loaded(Loaded.Train(max_count=600))
    monkeypatch.setattr(grids, "load_data", lambda *_: {"": loaded})
    settings = ["algorithms.A.epochs=" + str(epochs), "algorithms.A.batch_size=10"]
    values = SYNTHETIC | {"algorithms": {"A": {**SYNTHETIC["algorithms"]["A"]}}}
    del values["algorithms"]["A"]["local_steps"]
    experiment = validate(Experiment, values, settings)
    words = "2,147,483,700 local steps; at most 2,147,483,647 can be counted"
    with pytest.raises(ValueError, match=words) if is_refused else nullcontext():
        grid_of(experiment)
