"""Power-of-choice and Oort against plain loops, and their limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import Experiment, fedavg, local_sgd, oort, power_of_choice, run, simulate
from fedjax_mm.assignments.informed import scores
from fedjax_mm.availability import finishing
from fedjax_mm.base import Look
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.tasks import least_squares
from tests.helpers import rows_of
from tests.oracles import informed as oracle

pytestmark = pytest.mark.usefixtures("x64")

N, M = 9, 3
RNG = np.random.default_rng(0)
WEIGHTS = RNG.integers(1, 9, (M, N)).astype(float)
LOSSES = RNG.uniform(0.1, 3.0, (M, N))
LOOK = Look(losses=lambda: jnp.asarray(LOSSES), weights=lambda: jnp.asarray(WEIGHTS))


def chosen(cohort):
    """The clients of every model, in the order in which they were chosen."""
    return [[int(k) for k in row if k >= 0] for row in rows_of(cohort, M)]


@pytest.mark.parametrize(
    ("size", "candidates", "active"),
    [
        (7, 4, None),
        (7, 3, [True, True, True]),
        (3, 1, None),
        (9, 9, None),
        (7, 5, [True, False, True]),
        (5, 5, [False, True, False]),
    ],
)
def test_power_of_choice_agrees_with_its_loop(size, candidates, active):
    look = LOOK if active is None else LOOK._replace(active=lambda: jnp.array(active))
    assignment = power_of_choice(N, M, cohort_size=size, candidates=candidates)
    choose = jax.jit(lambda key, t: assignment.assign(key, t, (), look)[0])
    for t in range(1, 9):
        key = jax.random.key(t)
        lots = np.asarray(jax.random.gumbel(key, (M, N), jnp.float32), float)
        how = size, candidates, active or [True] * M
        expected = oracle.power_of_choice(t, WEIGHTS, LOSSES, lots, *how)
        found = chosen(choose(key, t))
        assert found == expected
        everybody = [k for row in found for k in row]
        assert len(everybody) == len(set(everybody)) == size


@pytest.mark.parametrize("name", ["power_of_choice", "oort"])
def test_active_models_get_equally_many_clients_over_their_turns(name):
    """Of seven clients, each of two models gets four in every other round."""
    look = LOOK._replace(active=lambda: jnp.array([True, False, True]))
    assignment = {
        "power_of_choice": lambda: power_of_choice(N, M, cohort_size=7, candidates=8),
        "oort": lambda: oort(N, M, cohort_size=7),
    }[name]()
    state = assignment.init(jax.random.key(0), look)
    choose = jax.jit(lambda t: assignment.assign(jax.random.key(t), t, state, look)[0])
    sizes = [choose(t).sizes(M).tolist() for t in range(1, 5)]
    assert sizes == [[4, 0, 3], [3, 0, 4]] * 2


def test_all_candidates_give_the_worst_clients_and_few_ignore_losses():
    worst = power_of_choice(N, cohort_size=4, candidates=N)
    look = Look(losses=lambda: jnp.asarray(LOSSES[:1]), weights=lambda: jnp.asarray(WEIGHTS[:1]))
    cohort, _ = worst.assign(jax.random.key(0), 1, (), look)
    assert cohort.clients.tolist() == np.argsort(-LOSSES[0])[:4].tolist()
    alone = power_of_choice(N, cohort_size=1, candidates=1)
    draws = jax.vmap(lambda key: alone.assign(key, 1, (), look)[0].clients[0])
    number = 20_000
    found = np.bincount(draws(jax.random.split(jax.random.key(1), number)), minlength=N) / number
    p = WEIGHTS[0] / WEIGHTS[0].sum()
    assert np.all(np.abs(found - p) < 4 * np.sqrt(p * (1 - p) / number))


@pytest.mark.parametrize("timed", [False, True])
def test_oort_agrees_with_its_loop(timed):
    """Over rounds in which clients are new, then known, with reports of their own."""
    durations = RNG.uniform(0.5, 3.0, N)
    how = {"exploration": 0.8, "exploration_decay": 0.9, "least_exploration": 0.2}
    how |= {"uncertainty": 0.3}
    time = {"durations": durations, "preferred_duration": 1.0} if timed else {}
    assignment = oort(N, M, cohort_size=5, **how, **time)
    state = assignment.init(jax.random.key(0), LOOK)
    utility, last = np.zeros((M, N)), np.zeros((M, N), int)
    choose = jax.jit(lambda key, t, state: assignment.assign(key, t, state, LOOK))
    kinds = set()
    for t in range(1, 40):
        key = jax.random.key(t)
        lots = np.asarray(jax.random.gumbel(key, (2, M, N), jnp.float32), float)
        share = max(0.8 * 0.9**t, 0.2)
        times = {"durations": durations, "T": 1.0} if timed else {}
        given = t, WEIGHTS, utility, last, lots, 5
        expected = oracle.oort(*given, share=share, uncertainty=0.3, **times)
        cohort, state = choose(key, t, state)
        assert chosen(cohort) == expected
        kinds |= {bool(last[m, k]) for m in range(M) for k in expected[m]}
        losses = np.random.default_rng(t).uniform(0.1, 2.0, len(cohort.clients))
        state = assignment.observe(t, cohort, {"loss": jnp.asarray(losses)}, state)
        for m, k, loss in zip(cohort.models, cohort.clients.tolist(), losses, strict=True):
            if k >= 0:
                utility[m, k], last[m, k] = WEIGHTS[m, k] * loss, t
    np.testing.assert_allclose(state.utility, utility)
    assert kinds == {True, False}


def test_scores_have_the_numbers_computed_by_hand():
    """A bonus of .214597 after round 100 for a client that trained in round 10."""
    found = scores(jnp.array([[1.0, 1.0]]), jnp.array([[10, 10]]), 100, 0.1)
    np.testing.assert_allclose(found, [[0.214597] * 2], atol=1e-6)


def test_oort_draws_clients_by_their_scores():
    """With exploration off, two known clients are drawn in proportion to their scores."""
    assignment = oort(3, cohort_size=1, exploration=0.0, least_exploration=0.0, uncertainty=0.1)
    state = assignment.init(jax.random.key(0), LOOK)
    utility, last = jnp.array([[1.0, 2.0, 4.0]]), jnp.full((1, 3), 5, jnp.int32)
    state = state._replace(utility=utility, last=last)
    look, number = Look(weights=lambda: jnp.ones((1, 3))), 20_000
    draws = jax.vmap(lambda key: assignment.assign(key, 20, state, look)[0].clients[0])
    found = np.bincount(draws(jax.random.split(jax.random.key(1), number)), minlength=3) / number
    p = np.asarray(scores(utility, last, 20, 0.1))[0]
    p = p / p.sum()
    assert np.all(np.abs(found - p) < 4 * np.sqrt(p * (1 - p) / number))


def problem():
    """Clients with losses of their own."""
    rng = np.random.default_rng(0)
    features = [rng.normal(size=(3, 2)) for _ in range(6)]
    return least_squares(features, [rng.normal(1 + k, 1.0, 3) for k in range(6)], ridge=0.1)


@pytest.mark.parametrize("name", ["power_of_choice", "oort"])
def test_a_run_trains_and_a_finished_model_rests(name):
    how = {"cohort_size": 4} | ({"candidates": 5} if name == "power_of_choice" else {})
    assignment = {"power_of_choice": power_of_choice, "oort": oort}[name](6, 2, **how)
    algorithm, task = fedavg(local_sgd(0.1, steps=2)), problem()
    _, trace = simulate(0, task, algorithm, assignment, 12)
    assert trace.client_updates[1:].tolist() == [[2, 2]] * 12
    assert bool(jnp.all(trace.metrics["loss"][-1] < trace.metrics["loss"][0]))
    target = float(trace.metrics["loss"][4, 0])
    done = finishing(assignment, "loss", at_most=jnp.array([target, -1.0]))
    _, trace = simulate(0, task, algorithm, done, 12)
    updates = trace.client_updates[1:]
    assert updates[0].tolist() == [2, 2]
    assert updates[-1].tolist() == [0, 4]


def test_a_file_names_them():
    tables = [
        {"name": "power_of_choice", "cohort_size": 4, "candidates": 6},
        {"name": "oort", "cohort_size": 4, "durations": [1.0] * 10, "preferred_duration": 2.0},
    ]
    settings = {
        "task": {"name": "digits", "num_clients": 10},
        "num_models": 2,
        "num_rounds": 3,
        "num_seeds": 1,
        "algorithms": {
            table["name"]: {
                "learning_rate": 0.1,
                "local_steps": 2,
                "batch_size": 5,
                "assignment": table,
            }
            for table in tables
        },
    }
    result = run(validate(Experiment, settings))
    assert (result.client_updates.isel(round=-1) == 6).all()
