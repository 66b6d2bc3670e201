"""The simulator against the NumPy float64 loops of `reference`, with the same assignments."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mm import fedavg, fedcluster, local_sgd, mfa_rand, mfa_rr, sequential, simulate
from fedjax_mm.base import Batching
from fedjax_mm.schedules import inverse_time, per_frame
from fedjax_mm.tasks import least_squares, quadratic
from tests.helpers import replay, roll_out, slow_unless
from tests.oracles import multi_model as reference

pytestmark = pytest.mark.usefixtures("x64")


N, P, MU, ROUNDS = 24, 4, 2e-4, 60


PROBLEM = reference.dense_quadratic(N, P, MU)


ASSIGNMENTS = {
    **{f"mfa_rand M={m}": mfa_rand(N, m) for m in (1, 2, 5, 12)},
    **{f"mfa_rr M={m}": mfa_rr(N, m) for m in (1, 2, 5, 12)},
    **{f"fedcluster M={m}": fedcluster(N, m) for m in (1, 2, 5, 12)},
    "mfa_rand M=5 K=13": mfa_rand(N, 5, cohort_size=13),
    "mfa_rr M=5 K=13": mfa_rr(N, 5, cohort_size=13),
    "sequential M=3": sequential(N, 3, rounds_per_model=15),
}


# Covers every number of models and every assignment. The other cases are slow.
QUICK = {
    *("mfa_rand M=2", "mfa_rr M=12", "fedcluster M=5"),
    *("mfa_rand M=5 K=13", "mfa_rr M=5 K=13", "sequential M=3"),
}


SCHEDULES = "constant", "decaying", "per frame"


def schedules(num_models):
    """The schedules, in the order of SCHEDULES."""
    decaying, per_round = inverse_time(30.0, 100.0), inverse_time(30.0, 99.0)
    return lambda t: 0.1, decaying, per_frame(per_round, num_models)


def printed_rates(num_models):
    """The same rates as the paper prints them, for t = 1, ..., T."""
    rounds = range(1, ROUNDS + 1)
    return {
        "constant": [0.1 for t in rounds],
        "decaying": [30 / (100 + t) for t in rounds],
        "per frame": [30 / (100 + math.floor((t - 1) / num_models)) for t in rounds],
    }


def error(params, expected):
    """The largest difference relative to the largest parameter."""
    return np.abs(np.asarray(params) - expected).max() / np.abs(expected).max()


def frame_length(name):
    """Rounds in a frame, or until FedCluster has visited all clusters."""
    return int(name.split("M=")[1].split()[0])  # FedCluster's is its number of clusters


def first_models(assignment):
    return np.random.default_rng(0).normal(size=(assignment.num_models, N * P + 1))


@functools.cache
def minimum():
    best = reference.minimizer(PROBLEM)
    return best, reference.global_loss(PROBLEM, best)


@functools.cache
def quadratic_runs(name):
    """The cohorts, final parameters and metrics, from one program for all schedules."""
    assignment, rng_key = ASSIGNMENTS[name], jax.random.key(7)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None, None, None))
    def program(which, rng_key, task, start):
        def schedule(t):
            rates = [each(t) for each in schedules(frame_length(name))]
            return jnp.stack([jnp.asarray(rate, float) for rate in rates])[which]

        algorithm = fedavg(schedule, local_steps=5)
        state, trace = simulate(rng_key, task, algorithm, assignment, ROUNDS, params=start)
        return state.models[0].params, trace.metrics

    task, numbers = quadratic(N, P, mu=MU), np.arange(len(SCHEDULES))
    params, metrics = jax.device_get(program(numbers, rng_key, task, first_models(assignment)))
    return roll_out(assignment, rng_key, ROUNDS), params, metrics


@pytest.mark.parametrize("name", [slow_unless(name in QUICK, name) for name in ASSIGNMENTS])
def test_quadratic(name):
    for schedule in SCHEDULES:
        which = SCHEDULES.index(schedule)
        groups, params, metrics = quadratic_runs(name)
        start = first_models(ASSIGNMENTS[name])
        expected = reference.simulate(
            lambda m, k, w, t, e: reference.client_gradient(PROBLEM, k, w),
            start,
            groups,
            printed_rates(frame_length(name))[schedule],
            5,
        )
        assert error(params[which], expected[-1]) < 1e-12
        # The metrics of some rounds, against differences of dense losses.
        metrics = {key: values[which] for key, values in metrics.items()}
        best, optimum = minimum()
        for t in (0, 1, 2, 20, ROUNDS):
            for m in range(len(start)):
                loss = reference.global_loss(PROBLEM, expected[t, m])
                assert metrics["loss"][t, m] == pytest.approx(loss, rel=1e-12)
                assert metrics["excess_loss"][t, m] == pytest.approx(loss - optimum, rel=1e-9)
                distance = np.linalg.norm(expected[t, m] - best)
                assert metrics["distance"][t, m] == pytest.approx(distance, rel=1e-10)


def regression(num_clients=7, dim=4, seed=0):
    """Features and targets of clients with 1 to 9 examples."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 10, num_clients)
    features = [rng.normal(size=(n, dim)) for n in counts]
    targets = [rng.normal(1.0, 2.0, size=n) for n in counts]
    return features, targets


def test_least_squares_constants():
    features, targets = regression()
    task = least_squares(features, targets, ridge=0.3)
    problem = reference.LeastSquares(features, targets, 0.3)
    w = reference.least_squares_minimizer(problem)
    np.testing.assert_allclose(task.minimizer, w, rtol=1e-12)
    assert task.optimum == pytest.approx(reference.least_squares_loss(problem, w), rel=1e-12)
    other = w + np.arange(4)
    metrics = jax.jit(task.metrics)(jax.random.key(0), other)
    assert metrics["loss"] == pytest.approx(reference.least_squares_loss(problem, other), rel=1e-12)


def row_numbers(targets):
    """Indices of examples within their clients, to be used as examples."""
    return jnp.asarray(np.concatenate([np.arange(len(each)) for each in targets]))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _drawn_rows(store, how, num_steps):
    def rows(t, m, k, e):
        key = jax.random.key(5)
        for number in (t, m + 1, k):
            key = jax.random.fold_in(key, number)
        places, weights = store.batch(key, k, e, how)
        return store.take(places), weights

    for axis in reversed(range(4)):
        rows = jax.vmap(rows, [0 if i == axis else None for i in range(4)])
    return rows(*map(jnp.arange, (13, 3, 7, num_steps)))


def drawn_rows(store, how, num_steps):
    """Rows and weights that clients draw with key 5, ``[rounds, models, clients, steps]``."""
    return jax.device_get(_drawn_rows(store, how, num_steps))


@functools.cache
def minibatches(batch_size, weighted):
    """A compiled run whose cohorts are an argument."""
    algorithm = fedavg(local_sgd(0.05, steps=6, batch_size=batch_size), weighted=weighted)

    def run(rng_key, task, groups, start):
        given = replay(groups, 7)
        return simulate(rng_key, task, algorithm, given, len(groups), params=start)[0]

    return jax.jit(run)


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("make", [mfa_rand, mfa_rr])
def test_minibatches_and_unequal_weights(make, batch_size):
    """The oracle uses the rows that the task draws for each round, model, client and step."""
    features, targets = regression()
    task = least_squares(features, targets, ridge=0.3)
    problem = reference.LeastSquares(features, targets, 0.3)
    groups = roll_out(make(7, 3, cohort_size=5), jax.random.key(5), 12)
    start = np.random.default_rng(2).normal(size=(3, 4))

    numbered = dataclasses.replace(task.data, examples=row_numbers(targets))
    places = None if batch_size is None else drawn_rows(numbered, Batching(batch_size), 6)[0]

    def gradient(m, k, w, t, e):
        chosen = None if batch_size is None else places[t, m, k, e]
        return reference.least_squares_gradient(problem, k, w, chosen)

    for weighted in (True, False):
        state = minibatches(batch_size, weighted)(jax.random.key(5), task, groups, start)
        expected = reference.simulate(
            gradient,
            start,
            groups,
            [0.05] * len(groups),
            6,
            weights=np.array([len(t) for t in targets], float) if weighted else None,
        )
        assert error(state.models[0].params, expected[-1]) < 1e-12


def test_server_momentum_follows_each_model():
    """FedAvgM by hand: v <- 0.9 v + mean update, w <- w + 0.5 v, per model, untouched when idle."""
    assignment, rng_key = sequential(N, 2, rounds_per_model=3), jax.random.key(0)
    task = quadratic(N, P, mu=0.05)
    algorithm = fedavg(0.1, local_steps=2, server_optimizer=optax.sgd(0.5, momentum=0.9))

    @jax.jit
    def run(rng_key, task):
        return simulate(rng_key, task, algorithm, assignment, 9)[0]

    state = run(rng_key, task)
    problem = reference.dense_quadratic(N, P, 0.05)
    w, v = np.zeros((2, N * P + 1)), np.zeros((2, N * P + 1))
    for t in range(1, 10):
        m = (t - 1) // 3 % 2
        locals_ = [
            reference.full_gradient_steps(
                lambda w, e, k=k: reference.client_gradient(problem, k, w), w[m], 0.1, 2
            )
            for k in range(N)
        ]
        v[m] = 0.9 * v[m] + np.mean(locals_, axis=0) - w[m]
        w[m] = w[m] + 0.5 * v[m]
    assert error(state.models[0].params, w) < 1e-12
