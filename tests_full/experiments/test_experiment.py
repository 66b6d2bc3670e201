"""Experiment files: accepted values, overrides, and errors."""

from collections import Counter

import jax
import numpy as np
import pytest

from fedjax_mm import Experiment
from fedjax_mm.experiments import axes, tasks
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.methods import Method
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.sweeps.program import programs_of
from tests.compiling import optimised
from tests.experiments.test_experiment import TASKS, image_files, learning, swept


@pytest.mark.parametrize("name", TASKS)
def test_a_task_with_data_is_read_and_built(name):
    experiment = validate(Experiment, learning(TASKS[name] | {"num_clients": 20}))
    assert validate(Experiment, experiment.model_dump()) == experiment
    data = experiment.task.data()
    task = experiment.task.build(data)
    assert (data.num_clients, task.num_clients) == (20, 20)
    assert experiment.task.initial_params() is None
    assert data.kind == ("synthetic" if TASKS[name]["name"] == "synthetic" else "real")
    key = jax.random.key(0)
    with optimised():  # otherwise convolutions of all digits take long
        metrics = jax.jit(lambda task: task.metrics(key, task.init(key)))(task)
    assert np.isfinite(metrics["test_loss"])


def test_validation_loads_no_data(tmp_path, monkeypatch):
    def refuse(*arguments, **settings):
        raise AssertionError

    image_files(tmp_path)
    for kind in (tasks.SyntheticConfig, tasks.DigitsConfig, tasks.IDXConfig):
        monkeypatch.setattr(kind, "data", refuse)
    for task in (*TASKS.values(), {"name": "idx", "directory": str(tmp_path)}):
        validate(Experiment, learning(task))
        validate(Experiment, learning(task) | {"axes": {"learning_rate": [0.1, 0.2]}})


def test_every_point_is_validated_and_built_once(monkeypatch):
    counts = Counter()

    def counted(owner, name):
        function = getattr(owner, name)

        def call(*args):
            counts[name] += 1
            return function(*args)

        monkeypatch.setattr(owner, name, call)

    counted(axes, "validate")
    counted(Method, "build")
    experiment = swept(learning_rate={"start": 0.01, "stop": 1, "num": 20})
    grid = grid_of(experiment)
    assert len(programs_of(grid)) == len(programs_of(grid_of(experiment))) == 1
    assert counts == {"validate": 20, "build": 1 + 20}  # one is that of the file without axes
    built = grid.setup(grid.points[7], 0)
    rate = built.algorithm.call.arguments["local"].learning_rate
    assert rate == grid.axes["learning_rate"][7]
