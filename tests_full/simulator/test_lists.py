"""Cohorts with traced models, and traced numbers of models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import (
    bandit,
    fedavg,
    mfa_rand,
    mfa_rr,
    run,
    simulate,
)
from fedjax_mm.assignments.appealing import appealing
from fedjax_mm.base import Padded
from fedjax_mm.base.programs import TracedInt
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.sweeps import Grid, Setup
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.sweeps.sweep import sweep
from fedjax_mm.sweeps.until import Until
from fedjax_mm.tasks import quadratic, requiring
from tests.helpers import (
    Measured,
    Towards,
    roll_out,
    rounds_of,
)
from tests.simulator.test_lists import experiment


@pytest.mark.parametrize("assignment", [mfa_rand, mfa_rr])
@pytest.mark.parametrize(
    ("sizes", "room", "cohort"),
    [((1, 3, 8), 8, 13), ((1, 3, 8), 8, 24), ((129, 150), 150, 300)],
    ids=str,
)
def test_a_traced_number_of_models_draws_the_same_cohorts(assignment, sizes, room, cohort):
    """24 clients form equal groups for some numbers of models, and 13 only for one model."""
    num_clients, key = (24 if room == 8 else 310), jax.random.key(3)

    @jax.jit
    @jax.vmap
    def draw(number):
        padded = assignment(num_clients, Padded(room, number), cohort_size=cohort)
        return rounds_of(padded, key, 9)

    for number, actual in zip(sizes, draw(jnp.array(sizes)), strict=True):
        expected = roll_out(assignment(num_clients, number, cohort_size=cohort), key, 9)
        for rows, right in zip(np.asarray(actual), expected, strict=True):
            assert [set(row) - {-1} for row in rows[:number]] == [set(row) - {-1} for row in right]
            assert (rows[number:] == -1).all()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawing(Towards):
    """A task with a random metric, as after fine-tuning."""

    def metrics(self, rng_key, params):
        return {"draw": jax.random.uniform(rng_key)}


def test_draws_of_metrics_do_not_depend_on_the_number_of_models():
    """They depend neither on the static bound nor on the other models."""
    task, algorithm = Drawing(jnp.arange(6.0)), fedavg(0.1, local_steps=1)

    @jax.jit
    def draws():
        numbers = 3, Padded(5, 3), 2
        runs = [simulate(0, task, algorithm, mfa_rr(6, number), 2)[1] for number in numbers]
        return [trace.metrics["draw"] for trace in runs]

    three, padded, two = draws()
    np.testing.assert_array_equal(padded[:, :3], three)
    np.testing.assert_array_equal(two, three[:, :2])
    assert len(np.unique(padded)) == padded.size


def test_bandits_observe_clients_that_participate():
    task = requiring(Measured(jnp.arange(6.0)), jnp.full(6, 99.0))
    assignment = appealing(bandit(6, 2, cohort_size=2), cohort_size=6, from_round=1)
    run = jax.jit(lambda key: simulate(key, task, fedavg(0.1, local_steps=1), assignment, 4)[1])
    assert run(jax.random.key(0)).client_updates.sum(0).tolist() == [8, 8]


def test_padding_models_do_not_affect_a_sweep():
    """One program has M as an argument, and targets ignore the models from M on.

    These do not diverge, as the first model does at the largest rate.
    """
    task = quadratic(12, 2, mu=0.05)

    def build(num_models, learning_rate):
        used = num_models if isinstance(num_models, TracedInt) else None
        padded = num_models if used is None else Padded(4, used)
        algorithm = fedavg(learning_rate, local_steps=3)
        return Setup(task, algorithm, mfa_rr(12, padded), num_models=used)

    axes = {"num_models": [1, 3, 4], "learning_rate": [0.1, 0.3, 1e6]}
    target = Until("distance", at_most=0.7 * float(jnp.linalg.norm(task.minimizer)))
    how = {"num_rounds": 20, "num_seeds": 2, "until": target}
    apart, params_apart = sweep(Grid(build, axes, **how), keep="params")
    one, params = sweep(Grid(build, axes, together=["num_models"], **how), keep="params")
    xr.testing.assert_allclose(one, apart, rtol=1e-5)
    xr.testing.assert_equal(one.diverged, apart.diverged)
    for each, other in zip(params, params_apart, strict=True):
        np.testing.assert_allclose(each, other, rtol=1e-5)
    ended = one.ended.sel(learning_rate=[0.1, 0.3])
    assert ended.max() > ended.min() > 0
    assert (one.diverged > 0).any()
    assert np.isnan(one.distance.sel(num_models=3).values).any()


BOTH = ["num_models", "local_steps"]


def test_axes_of_models_and_steps_share_a_program():
    """They also do so if two devices share each list."""
    axes = {"num_models": [1, 3], "local_steps": [3]}
    joined = experiment(together=BOTH, axes=axes)
    assert len(programs_of(grid_of(joined))) == 2  # one for each algorithm
    together = [run(joined, Execution(split=split)) for split in (None, "clients")]
    assert len(programs_of(grid_of(experiment(together=[])))) == 8
    apart = run(experiment(together=[], axes=axes))
    for each in together:
        xr.testing.assert_allclose(each, apart, rtol=1e-5, atol=1e-7)
