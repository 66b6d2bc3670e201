"""Experiment files: accepted values, overrides, and errors."""

import jax
import numpy as np
import pytest

from fedjax_mm import Experiment
from fedjax_mm.experiments.overrides import validate
from tests.compiling import optimised
from tests.experiments.test_experiment import TASKS, learning


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
