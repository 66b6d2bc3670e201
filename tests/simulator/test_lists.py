"""Cohorts with traced models, and traced numbers of models."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    Experiment,
    fedavg,
    local_sgd,
    mfa_rand,
    mfa_rr,
    scaffold,
    simulate,
)
from fedjax_mm.assignments.appealing import appealing
from fedjax_mm.base import Cohort, Look, Padded
from fedjax_mm.base.cohorts import by_rows, by_slots, places_of
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks import quadratic
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import MLP, LogisticRegression
from tests.helpers import (
    labelled_data,
    remembering,
    roll_out,
    rounds_of,
    rows_of,
    slow_unless,
)

N, M, T = 7, 3, 6


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
    assignment = appealing(one_each, cohort_size=N, from_round=1)

    @jax.jit
    @jax.vmap
    def draw(key):
        drawn = one_each.assign(jax.random.split(key)[0], 1, (), look)[0]
        return drawn, assignment.assign(key, 1, (), look)[0].clients

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


def test_traced_groups_differ_by_at_most_one_client():
    @jax.jit
    @jax.vmap
    def draw(number):
        return rounds_of(mfa_rand(7, Padded(4, number)), jax.random.key(0), 2)

    for number, rounds in zip(range(1, 5), np.asarray(draw(jnp.arange(1, 5))), strict=True):
        for rows in rounds:
            sizes = [np.sum(row >= 0) for row in rows[:number]]
            assert sum(sizes) == 7
            assert max(sizes) - min(sizes) <= 1


def test_a_padded_number_of_models_rotates_like_a_static_one():
    key = jax.random.key(1)
    padded, static = (roll_out(mfa_rr(6, number), key, 4) for number in (Padded(4, 3), 3))
    for rows, expected in zip(padded, static, strict=True):
        assert [set(row) - {-1} for row in rows[:3]] == [set(row) for row in expected]
