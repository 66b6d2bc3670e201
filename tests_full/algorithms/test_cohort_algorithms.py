"""Pawlik's Algorithms 1 and 2 against the printed loops, and Algorithm 1 against FedAvg."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, full_participation, local_sgd, mfa_rand, prsgd, simulate
from fedjax_mm.tasks import quadratic
from tests.algorithms import method_problems
from tests.helpers import replay, roll_out
from tests.oracles import cohorts as reference_cohorts
from tests.oracles import multi_model as reference

GAMMA, ROUNDS, KEY = 0.05, 6, jax.random.key(method_problems.SEED)

pytestmark = pytest.mark.usefixtures("x64")


@functools.cache
def problem(name):
    """Task, start, flattening function, gradient of (i, x, round, step), tolerance, batch size."""
    rng = np.random.default_rng(0)
    if name == "quadratic":
        dense = reference.dense_quadratic(6, 2, 0.05)
        task, start = quadratic(6, 2, mu=0.05), rng.normal(size=13)

        def gradient(i, x, t, e):
            return reference.client_gradient(dense, i, x)

        return task, start, np.asarray, gradient, {"rtol": 0, "atol": 1e-12}, None
    compared = method_problems.softmax()
    start = rng.normal(size=compared.size)
    of = compared.problem(0, np.zeros(method_problems.N))
    args = compared.start(start[None]), compared.flat, of.gradient
    return compared.task, *args, {"rtol": 0, "atol": 1e-10}, method_problems.BATCH


def trained(algorithm, assignment, task, start, rounds):
    """The final state."""

    def run(task, start):
        state, _ = simulate(KEY, task, algorithm, assignment, rounds, params=start)
        return state

    return jax.jit(run)(task, start)


@pytest.mark.parametrize("interval", [1, 3, 5])
@pytest.mark.parametrize("name", ["quadratic", "logistic regression"])
def test_algorithm_1_matches_the_printed_loop(name, interval):
    """The global model is the mean before the last step. Adding the last steps gives x_bar."""
    task, start, flat, gradient, close, batch_size = problem(name)

    def at_iteration(i, x, t):
        return gradient(i, x, (t - 1) // interval + 1, (t - 1) % interval)

    N, T, x0 = task.num_clients, ROUNDS * interval, flat(jax.tree.map(np.asarray, start))
    x, G = reference_cohorts.algorithm_1(at_iteration, np.ravel(x0), N, T, interval, GAMMA)
    algorithm = prsgd(local_sgd(GAMMA, steps=interval, batch_size=batch_size))
    models = trained(algorithm, full_participation(N), task, start, ROUNDS).models[0]
    (params,), (steps,) = flat(models.params), flat(models.clients)
    np.testing.assert_allclose(params, x[T - 1].mean(0), **close)
    np.testing.assert_allclose(steps, -GAMMA * G[-1], **close)
    np.testing.assert_allclose(params + steps, x[T], **close)
    x_bar = np.mean(x, axis=1)
    for t in range(1, T + 1):  # eq. (13)
        np.testing.assert_allclose(x_bar[t], x_bar[t - 1] - GAMMA * G[t - 1].mean(0), atol=1e-13)


@pytest.mark.parametrize("name", ["quadratic", "logistic regression"])
def test_algorithm_2_matches_the_printed_loop(name):
    """It is FedAvg with full gradients, a uniform cohort and unweighted means."""
    task, start, flat, _, close, _ = problem(name)
    if name == "quadratic":
        dense = reference.dense_quadratic(6, 2, 0.05)
        full = functools.partial(reference.client_gradient, dense)
    else:
        full = method_problems.softmax().problem(0, np.zeros(method_problems.N)).full_gradient
    assignment = mfa_rand(task.num_clients, 1, cohort_size=3)
    cohorts = roll_out(assignment, KEY, ROUNDS)[:, 0]
    algorithm = fedavg(GAMMA, local_steps=4, weighted=False)
    (params,) = flat(trained(algorithm, assignment, task, start, ROUNDS).models[0].params)
    x0 = np.ravel(flat(jax.tree.map(np.asarray, start)))
    expected = reference_cohorts.algorithm_2(full, x0, cohorts, 4, GAMMA)
    np.testing.assert_allclose(params, expected, **close)


def test_algorithm_1_differs_from_fedavg_only_by_the_stale_gradient():
    """With one client it is not stale. With several, models differ by less than the steps."""
    one, task = quadratic(1, 4, mu=0.1), quadratic(6, 2, mu=0.05)

    def last(algorithm, task, rounds):
        start = jnp.ones(task.dim)
        assignment = full_participation(task.num_clients)
        return trained(algorithm, assignment, task, start, rounds).models[0]

    stale = last(prsgd(local_sgd(GAMMA, steps=3)), one, 4)
    plain = last(fedavg(GAMMA, local_steps=3), one, 4)
    np.testing.assert_allclose(stale.params + stale.clients[:, 0], plain.params, rtol=1e-12)
    stale = last(prsgd(local_sgd(GAMMA, steps=3)), task, 4)
    x_bar = stale.params + stale.clients.mean(1)
    plain = last(fedavg(GAMMA, local_steps=3, weighted=False), task, 4).params
    apart = float(jnp.abs(x_bar - plain).max())
    assert 1e-6 < apart < float(jnp.abs(stale.clients).max())


def test_an_absent_client_keeps_its_gradient():
    task, start = quadratic(6, 2, mu=0.05), jnp.ones(13)
    groups = [[[0, 1, 2]], [[3, 4, -1]]]
    state = trained(prsgd(local_sgd(GAMMA, steps=2)), replay(groups, 6), task, start, 2)
    (steps,) = state.models[0].clients
    assert np.all(np.abs(steps[:5]).max(1) > 0)
    np.testing.assert_array_equal(steps[5], 0)
