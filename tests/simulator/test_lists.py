"""Cohorts with traced models, and traced numbers of models."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import (
    Experiment,
    bandit,
    fedavg,
    local_sgd,
    mfa_rand,
    mfa_rr,
    run,
    scaffold,
    simulate,
)
from fedjax_mm.assignments.appealing import appealing
from fedjax_mm.base import Cohort, Look, Padded
from fedjax_mm.cohorts import by_rows, by_slots, places_of
from fedjax_mm.experiments.grid import grid_of
from fedjax_mm.sweeps import Grid, Setup
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.program import OneOf
from fedjax_mm.sweeps.structures import programs_of
from fedjax_mm.sweeps.sweep import sweep
from fedjax_mm.sweeps.until import Until
from fedjax_mm.tasks import quadratic, requiring
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import MLP, LogisticRegression
from tests.helpers import (
    Measured,
    Towards,
    labelled_data,
    remembering,
    roll_out,
    rounds_of,
    rows_of,
    slow_unless,
)

N, M, T = 7, 3, 6


@pytest.mark.parametrize("strategy", [mfa_rand, mfa_rr])
@pytest.mark.parametrize(
    ("sizes", "room", "cohort"),
    [(range(1, 9), 8, 13), (range(1, 9), 8, 24), ([129, 140, 150], 150, 300)],
    ids=str,
)
def test_a_traced_number_of_models_draws_the_same_cohorts(strategy, sizes, room, cohort):
    """24 clients form equal groups for some numbers of models, and 13 only for one model."""
    num_clients, key = (24 if room == 8 else 310), jax.random.key(3)

    @jax.jit
    @jax.vmap
    def draw(number):
        padded = strategy(num_clients, Padded(room, number), cohort_size=cohort)
        return rounds_of(padded, key, 9)

    for number, actual in zip(sizes, draw(jnp.array(sizes)), strict=True):
        expected = roll_out(strategy(num_clients, number, cohort_size=cohort), key, 9)
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


def test_a_number_of_models_above_the_static_bound_is_refused():
    with pytest.raises(
        ValueError, match="num_models is 9; it must lie between 1 and the padded size = 8"
    ):
        mfa_rand(24, Padded(8, 9))
    with pytest.raises(ValueError, match="num_models is 30, more than the clients there are"):
        mfa_rr(24, Padded(30, 2))


def listed(assignment):
    """The same assignment, with traced models."""

    def assign(rng_key, round, state, look):
        cohort, state = assignment.assign(rng_key, round, state, look)
        return dataclasses.replace(cohort, models=jnp.asarray(cohort.models)), state

    return assignment._replace(assign=assign)


@functools.cache
def mixed():
    """An MLP, a logistic regression with other classes, and the MLP again."""
    data, other = labelled_data(N), labelled_data(N, num_classes=2, seed=1)
    module = MLP(3, hidden=(4,))
    second = classification(other, LogisticRegression(2))
    return [classification(data, module), second, classification(data, module)]


@pytest.mark.parametrize(
    ("algorithm", "client_map"),
    [
        slow_unless(each in (("scaffold", 2),), *each)
        for each in itertools.product(("scaffold", "epochs"), ("vmap", "scan", 2))
    ],
)
def test_a_list_trains_like_its_rows(algorithm, client_map, x64):
    """Compares states, reports, counts and sums. The longest clients are computed first.

    If models have different data or networks, a list is computed as rows.
    """
    how = {
        "scaffold": scaffold(local_sgd(0.2, steps=2, batch_size=2)),
        "epochs": fedavg(local_sgd(0.2, epochs=2, batch_size=2)),
    }[algorithm]
    inner = remembering(mfa_rand(N, M, cohort_size=5), T, 2)

    @jax.jit
    def both(rng_key, tasks):
        # Chunks of several clients turn rows into a list, too, but "scan" keeps the rows.
        maps = "scan" if client_map == 2 else client_map, client_map
        return [
            simulate(rng_key, tasks, how, assignment, T, client_map=how_many)
            for assignment, how_many in zip((inner, listed(inner)), maps, strict=True)
        ]

    tasks = mixed()[0] if algorithm == "scaffold" else mixed()
    (rows, trace), (state, of_list) = both(jax.random.key(0), tasks)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-13)
    jax.tree.map(close, state.models, rows.models)
    jax.tree.map(close, state.assignment, rows.assignment)
    jax.tree.map(close, of_list, trace)
    assert trace.client_updates.sum() == 5 * T


@pytest.mark.parametrize("is_known", [False, True])
def test_slots_survive_the_conversion_to_rows(is_known):
    """Padding has a place only if the models are static."""
    clients, models = jnp.array([4, -1, 2]), np.array([1, 0, 1])
    models = models if is_known else jnp.asarray(models)
    places = places_of(clients, models, 2, None if is_known else 2)
    assert places.tolist() == [[1, -1] if is_known else [-1, -1], [0, 2]]
    rows = by_rows((clients, jnp.array([0.5, 9.0, 2.0])), places)
    assert rows[0].tolist() == [[-1, -1], [4, 2]]
    assert rows[1][1].tolist() == [0.5, 2.0]
    assert by_slots(rows[0], places, 3).tolist() == [4, -1 if is_known else 0, 2]


def test_static_models_survive_cond_scan_and_vmap():
    """They are part of the tree structure. As arrays they would be traced."""
    cohort = Cohort.of_rows(jnp.array([[4, -1], [0, 2]]), jnp.ones((2, 2)))
    seen = []

    @jax.jit
    @jax.vmap
    def run(number):
        chosen = jax.lax.cond(
            number > 0, lambda: cohort, lambda: jax.tree.map(jnp.negative, cohort)
        )

        def step(state, _):
            seen.append(state.models)
            return state, state

        return jax.lax.scan(step, chosen, length=3)

    last, every = run(jnp.arange(2))
    assert all(isinstance(each, np.ndarray) for each in (*seen, last.models, every.models))
    traced = Cohort(jnp.arange(2), jnp.zeros(2, jnp.int32))
    fetched, shape = jax.device_get(traced), jax.tree.structure(traced)
    assert jax.tree.structure(fetched) == shape, "arrays of a fetched state are NumPy's"
    assert last.models.tolist() == [0, 0, 1, 1]
    assert every.clients.shape == (2, 3, 4)
    np.testing.assert_array_equal(last.clients[1], cohort.clients)


def test_clients_of_a_list_opt_out_of_models_without_appeal():
    appeals = jnp.arange(M)[:, None] == jnp.arange(N) % M  # one model for each client
    look = Look(losses=None, appeals=lambda: appeals)
    one_each = mfa_rand(N, Padded(M, jnp.int32(2)))
    strategy = appealing(one_each, cohort_size=N, from_round=1)

    @jax.jit
    @jax.vmap
    def draw(key):
        drawn = one_each.assign(jax.random.split(key)[0], 1, (), None)[0]
        return drawn, strategy.assign(key, 1, (), look)[0].clients

    drawn, stays = draw(jax.random.split(jax.random.key(0), 5))
    rows = stays.reshape(5, M, -1)
    given = map(np.asarray, (drawn.clients, drawn.models, rows))
    for clients, models, rows in zip(*given, strict=True):
        expected = {(c, m) for c, m in zip(clients, models, strict=True) if c % M == m}
        assert {(c, m) for m in range(M) for c in rows[m] if c >= 0} == expected


def test_a_slot_without_a_model_is_padding():
    """The model is then -1, even if the slot has a client."""
    cohort = Cohort(jnp.arange(4), jnp.array([0, 0, 1, -1]))
    assert jax.jit(lambda: cohort.sizes(2))().tolist() == [2, 1]
    assert rows_of(cohort, 2).tolist() == [[0, 1, -1, -1], [2, -1, -1, -1]]


def test_bandits_observe_clients_that_participate():
    task = requiring(Measured(jnp.arange(6.0)), jnp.full(6, 99.0))
    strategy = appealing(bandit(6, 2, cohort_size=2), cohort_size=6, from_round=1)
    run = jax.jit(lambda key: simulate(key, task, fedavg(0.1, local_steps=1), strategy, 4)[1])
    assert run(jax.random.key(0)).client_updates.sum(0).tolist() == [8, 8]


@pytest.mark.parametrize("models", [[0, 1, 1], jnp.zeros(3)], ids=["a list", "floats"])
def test_models_of_a_list_must_be_an_integer_array(models):
    assignment = mfa_rand(N, M)._replace(assign=lambda *args: (Cohort(jnp.arange(3), models), ()))
    with pytest.raises(TypeError, match=r"returns as models .*numbers, int32\[slots\]"):
        simulate(0, quadratic(N, 2, mu=0.1), fedavg(0.1, local_steps=1), assignment, 1)


@pytest.mark.parametrize(
    "change", [{"clients": jnp.zeros((2, 3), jnp.int32)}, {"models": jnp.zeros(4, jnp.int32)}]
)
def test_a_list_without_a_model_for_each_client_is_refused(change):
    given = {"clients": jnp.arange(3), "models": jnp.zeros(3, jnp.int32)} | change
    assignment = mfa_rand(N, M)._replace(assign=lambda *args: (Cohort(**given), ()))
    with pytest.raises(ValueError, match="give a client and a model for each slot"):
        simulate(0, quadratic(N, 2, mu=0.1), fedavg(0.1, local_steps=1), assignment, 1)


def test_padding_models_do_not_affect_a_sweep():
    """One program has M as an argument, and targets ignore the models from M on.

    These do not diverge, as the first model does at the largest rate.
    """
    task = quadratic(12, 2, mu=0.05)

    def build(num_models, learning_rate):
        used = num_models.number if isinstance(num_models, OneOf) else None
        padded = num_models if used is None else Padded(max(num_models.values), used)
        algorithm = fedavg(learning_rate, local_steps=3)
        return Setup(task, algorithm, mfa_rr(12, padded), num_models=used)

    axes = {"num_models": [1, 3, 4], "learning_rate": [0.1, 0.3, 1e6]}
    target = Until("distance", at_most=0.7 * float(jnp.linalg.norm(task.minimizer)))
    how = {"num_rounds": 20, "num_seeds": 2, "until": target}
    apart, params_apart = sweep(Grid(build, axes, **how), keep="params")
    one, params = sweep(
        Grid(build, axes, together={"num_models": lambda _: 0}, **how), keep="params"
    )
    xr.testing.assert_allclose(one, apart, rtol=1e-5)
    xr.testing.assert_equal(one.diverged, apart.diverged)
    for each, other in zip(params, params_apart, strict=True):
        np.testing.assert_allclose(each, other, rtol=1e-5)
    ended = one.ended.sel(learning_rate=[0.1, 0.3])
    assert ended.max() > ended.min() > 0
    assert (one.diverged > 0).any()
    assert np.isnan(one.distance.sel(num_models=3).values).any()


# Axes of files


def experiment(**changes):
    settings = {
        "task": {"name": "quadratic", "num_clients": 8, "block_size": 2},
        "num_rounds": 12,
        "num_seeds": 2,
        "algorithms": {
            "MFA-Rand": {"learning_rate": 0.1, "assignment": {"name": "mfa_rand"}},
            "MFA-RR": {
                "learning_rate": {"schedule": "inverse_time", "beta": 3.0, "gamma": 9.0}
                | {"per": "frame"},
                "assignment": {"name": "mfa_rr"},
            },
        },
        "axes": {"num_models": [1, 3], "local_steps": [1, 3]},
    }
    for method in settings["algorithms"].values():
        method |= {"local_steps": 1}
    return Experiment.model_validate(settings | changes)


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


def test_steps_share_a_program_by_default():
    """Numbers of models do not, because a list of clients takes longer than rows."""
    assert len(programs_of(grid_of(experiment()))) == 4
    assert len(programs_of(grid_of(experiment(together=["num_models"])))) == 4


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"together": ["mu"]}, "'mu', which is not an axis; the axes are num_models, local_steps"),
        (
            {"together": ["num_models"], "task": {"name": "digits", "num_clients": 8}},
            "'num_models', whose values cannot share a program; only local_steps and num_models",
        ),
        (
            {"together": ["num_models"], "axes": {}, "num_models": 2},
            "'num_models', which is not an axis; the axes are none",
        ),
    ],
)
def test_other_axes_are_refused(changes, why):
    with pytest.raises(ValueError, match=f"together has {why}"):
        experiment(**changes)


CHANGES = {
    "another method": {
        "algorithms": {
            "A": {"name": "fedprox", "mu": 0.1, "learning_rate": 0.1, "local_steps": 1}
            | {"assignment": {"name": "mfa_rr"}}
        }
    },
    "another assignment": {"assignment": {"name": "bandit", "cohort_size": 4}},
    "a task without a closed form": {"task": {"name": "digits", "num_clients": 8}},
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_methods_tasks_and_assignments_have_separate_programs(name):
    given = {"algorithms": {"A": {"learning_rate": 0.1, "local_steps": 1}}} | CHANGES[name]
    given = {"assignment": {"name": "mfa_rr"}} | given
    programs = programs_of(grid_of(experiment(**given)))
    assert len(programs) == (2 if name == "another assignment" else 4)
