"""Exact moments against closed forms, worked numbers, enumeration in NumPy, and simulation."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mm import full_participation, local_sgd, mfa_rand, mfa_rr, simulate
from fedjax_mm.tasks import least_squares, quadratic
from fedjax_mm.theory import exact
from tests.methods import VARIANTS
from tests.oracles import moments as oracle
from tests.oracles import multi_model
from tests.oracles.maxfl import Problem

pytestmark = pytest.mark.usefixtures("x64")
N, E, T, RATE = 4, 2, 3, 0.1
MOMENTUM, SERVER_MOMENTUM, SERVER_RATE = 0.6, 0.5, 0.7


class Server:
    """A server's SGD with momentum on minus the mean."""

    def __init__(self):
        self.m = 0.0

    def __call__(self, w, step):
        self.m = SERVER_MOMENTUM * self.m - step
        return w - SERVER_RATE * self.m


@functools.cache
def examples():
    """Clients with 3 examples of 2 features each."""
    rng = np.random.default_rng(3)
    return [rng.normal(size=(3, 2)) for _ in range(N)], [rng.normal(size=3) + 2 for _ in range(N)]


def regression():
    """Least squares, as a task and as the oracle's problem, with the loss F."""
    features, targets = examples()
    dense = multi_model.LeastSquares(features, targets, 0.1)

    def gradient(k, w, *_):
        return multi_model.least_squares_gradient(dense, k, w)

    def loss(k, w):
        return multi_model.least_squares_client_loss(dense, k, w)

    problem = Problem(gradient, gradient, loss, np.array([3] * N), np.zeros(N))
    task = least_squares(features, targets, ridge=0.1)
    return task, problem, lambda w: multi_model.least_squares_loss(dense, w), 2


def blocks():
    """The quadratic, whose clients send sparse updates."""
    dense = multi_model.dense_quadratic(N, 2, 0.1)

    def gradient(k, w, *_):
        return multi_model.client_gradient(dense, k, w)

    problem = Problem(gradient, gradient, lambda k, w: 0.0, np.ones(N), np.zeros(N))
    return quadratic(N, 2, mu=0.1), problem, lambda w: multi_model.global_loss(dense, w), 2 * N + 1


LAWS = {
    "mfa_rand": (lambda: mfa_rand(N, 2), lambda: oracle.fresh(N, 2, T)),
    "mfa_rand of unequal sizes": (lambda: mfa_rand(N, 3), lambda: oracle.fresh(N, 3, T)),
    "mfa_rr": (lambda: mfa_rr(N, 2), lambda: oracle.frames(N, 2, T)),
    "mfa_rr of unequal sizes": (lambda: mfa_rr(N, 3), lambda: oracle.frames(N, 3, T)),
    "all": (lambda: full_participation(N), lambda: oracle.fresh(N, 1, T)),
}


def linear_method(name, momentum=None, server=None):
    """A method of the table with momentum, and the loop."""
    row = VARIANTS[name]
    local = local_sgd(RATE, steps=E, momentum=momentum)
    chosen = {} if server is None else {"server_optimizer": optax.sgd(SERVER_RATE, SERVER_MOMENTUM)}
    known = inspect.signature(row.factory).parameters
    given = {**row.numbers, **row.choices}
    return (
        row.factory(local, **{k: x for k, x in given.items() if k in known}, **chosen),
        row,
        given,
    )


def check_by_enumeration(name, law, make=regression, momentum=None, server=None):
    """Compares three rounds with the method's NumPy loop over all cohorts."""
    (assignment, draws), (task, problem, loss, dim) = LAWS[law], make()
    algorithm, row, given = linear_method(name, momentum, server)
    start = np.linspace(-1, 1.5, dim)
    found = exact(task, algorithm, assignment(), T, params=jnp.asarray(start))

    def run(cohorts):
        how = {"momentum": momentum or 0.0} | ({} if server is None else {"server": Server()})
        w = row.loop(problem._replace(**how), start, cohorts, lambda t: RATE, E, **given)
        return w[0] if isinstance(w, tuple) else w

    expected = oracle.enumerate_moments(draws(), run, loss, T)
    covariance = expected.second[-1] - np.outer(expected.mean[-1], expected.mean[-1])
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.covariance, covariance, rtol=1e-7, atol=1e-11)
    np.testing.assert_allclose(found.loss, expected.value, rtol=1e-10)


def test_moments_equal_those_of_all_cohorts():
    check_by_enumeration("fedavg", "mfa_rand", blocks)


def check_by_simulation(name, law, make=regression, num_seeds=2000, rounds=5, **more):
    """Means of simulated losses and squared distances are within 4 standard errors."""
    task, _, _, dim = make()
    algorithm, *_ = linear_method(name, **more)
    assignment = LAWS[law][0]()
    start = jnp.linspace(-1, 1.5, dim)
    found = exact(task, algorithm, assignment, rounds, params=start)

    @jax.jit
    @jax.vmap
    def run(key):
        params = jnp.broadcast_to(start, (assignment.num_models, dim))
        _, trace = simulate(key, task, algorithm, assignment, rounds, params=params)
        return trace.metrics["loss"], trace.metrics["distance"] ** 2

    measured = run(jax.random.split(jax.random.key(7), num_seeds))
    for samples, expected in zip(measured, (found.loss, found.squared_distance), strict=True):
        mean, error = samples.mean(0), samples.std(0, ddof=1) / num_seeds**0.5
        away = jnp.abs(mean - expected[:, None])
        assert (away <= 4 * error + 1e-9).all(), (name, law, away / error)
        assert law == "all" or error[-1].min() > 0


def test_simulated_means_are_exact():
    check_by_simulation("scaffold", "mfa_rr")
