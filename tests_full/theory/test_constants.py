"""Exact and estimated constants of tasks, compared with dense linear algebra."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, full_participation
from fedjax_mm.simulator.simulate import advance, init
from fedjax_mm.tasks import least_squares, quadratic
from fedjax_mm.theory.constants import (
    estimate_curvature,
    estimate_noise,
    exact_constants,
    example_gradients,
    extreme_eigenvalues,
    gradient_bound,
    heterogeneity,
)
from tests.helpers import slow_unless
from tests.oracles import multi_model as reference

compiled_quadratic = jax.jit(
    lambda num_clients, block_size, mu: quadratic(num_clients, block_size, mu=mu),
    static_argnums=(0, 1),
)
SIZES = [(24, 4, 2e-4), (24, 4, 0.05), (5, 4, 2e-4), (1, 6, 0.01), (3, 1, 1.0)]


@pytest.mark.parametrize(("num_clients", "block_size", "mu"), SIZES)
def test_exact_constants_equal_those_of_dense_matrices(num_clients, block_size, mu):
    problem = reference.dense_quadratic(num_clients, block_size, mu)
    hessians = problem.A + mu * np.eye(problem.A.shape[1])
    eigenvalues = np.linalg.eigvalsh(hessians)
    minimizer = np.linalg.solve(hessians.mean(0), problem.b.mean(0))
    optima = [-b @ np.linalg.solve(h, b) / 2 for h, b in zip(hessians, problem.b, strict=True)]
    optimum = -problem.b.mean(0) @ minimizer / 2
    with jax.enable_x64(True):
        constants = exact_constants(compiled_quadratic(num_clients, block_size, mu))
    assert {constant.known for constant in constants} == {"exact"}
    expected = eigenvalues.min(), eigenvalues.max(), optimum - np.mean(optima), optimum, minimizer
    for constant, value in zip(constants, expected, strict=True):
        np.testing.assert_allclose(constant.value, value, rtol=1e-10, atol=1e-10)
        assert constant.error == 0


def trajectory(task, num_rounds=6):
    """The global parameters of one model after every round."""
    algorithm, assignment = fedavg(0.1, local_steps=5), full_participation(task.num_clients)

    @jax.jit
    def points(task):
        def one_round(state, _):
            after, _ = advance(state, task, algorithm, assignment, 1)
            return after, after.models[0].params[0]

        start = init(jax.random.key(3), task, algorithm, assignment)
        return jax.lax.scan(one_round, start, length=num_rounds)[1]

    return points(task)


@pytest.mark.parametrize(
    ("num_clients", "block_size", "mu", "x64"),
    [  # every size once, other cases are slow
        slow_unless((number % 2 == 0) == x64, *size, x64)
        for number, size in enumerate(SIZES)
        for x64 in (False, True)
    ],
)
def test_curvature_is_estimated_to_one_percent(num_clients, block_size, mu, x64):
    with jax.enable_x64(x64):
        task = compiled_quadratic(num_clients, block_size, mu)
        estimates = estimate_curvature(jax.random.key(1), task, trajectory(task))
        exact = exact_constants(task)[:2]
    for estimate, constant in zip(estimates, exact, strict=True):
        assert estimate.known == "estimate"
        np.testing.assert_allclose(estimate.value, constant.value, rtol=0.01)
        assert estimate.error < 1e-3


@functools.partial(jax.jit, static_argnums=2)
def eigenvalues_of(matrix, start, num_steps):
    return extreme_eigenvalues(lambda v: matrix @ v, start, num_steps)


@pytest.mark.parametrize("num_steps", [4, 12, 40])
def test_residuals_bound_the_error(num_steps):
    rng = np.random.default_rng(num_steps)
    matrix = rng.standard_normal((40, 40))
    matrix = matrix + matrix.T
    with jax.enable_x64(True):
        ends, errors = jax.device_get(eigenvalues_of(matrix, rng.standard_normal(40), num_steps))
    eigenvalues = np.linalg.eigvalsh(matrix)
    assert np.all(np.abs(ends[:, None] - eigenvalues).min(1) <= errors + 1e-10)
    assert ends[0] >= eigenvalues[0] - 1e-10
    assert ends[1] <= eigenvalues[-1] + 1e-10
    if num_steps == 40:
        np.testing.assert_allclose(ends, eigenvalues[[0, -1]], rtol=1e-10)


def test_an_invariant_start_ends_the_iteration():
    """No spurious eigenvalue 0 appears when the basis cannot grow."""
    matrix, start = np.diag([2.0, 3.0, 5.0, 5.0]), np.array([1.0, 0.0, 0.0, 1.0])
    ends, errors = eigenvalues_of(matrix, start, 4)
    np.testing.assert_allclose(ends, [2.0, 5.0], rtol=1e-6)
    np.testing.assert_allclose(errors, 0, atol=1e-6)


def test_the_gradient_bound_is_the_largest_on_the_trajectory():
    problem = reference.dense_quadratic(6, 3, 0.05)
    with jax.enable_x64(True):
        task = compiled_quadratic(6, 3, 0.05)
        points = trajectory(task)
        bound = gradient_bound(task, points)
    largest = max(
        np.linalg.norm(reference.client_gradient(problem, k, w))
        for w in np.asarray(points)
        for k in range(6)
    )
    np.testing.assert_allclose(bound.value, largest, rtol=1e-12)
    assert bound.known == "estimate"


def regression(rng, counts):
    clients = [(rng.standard_normal((n, 3)), rng.standard_normal(n)) for n in counts]
    return clients, least_squares(*zip(*clients, strict=True), ridge=0.1)


def test_the_noise_of_examples_is_bounded_by_a_line():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        clients, task = regression(rng, [4, 9, 2])
        points = jnp.asarray(rng.standard_normal((5, 3)))
        squares, largest = map(np.asarray, example_gradients(task, points))
        beta_1, beta_2 = estimate_noise(task, points)
    for p, w in enumerate(np.asarray(points)):
        for k, (x, y) in enumerate(clients):
            gradients = (x @ w - y)[:, None] * x + 0.1 * w
            np.testing.assert_allclose(squares[p, k], np.sum(gradients.mean(0) ** 2), rtol=1e-10)
            np.testing.assert_allclose(largest[p, k], np.sum(gradients**2, 1).max(), rtol=1e-10)
    assert np.all(largest <= beta_1.value + beta_2.value * squares + 1e-9)
    # and the line touches the largest
    assert np.isclose(np.max(largest - beta_2.value * squares), beta_1.value)
    assert beta_2.value >= 1
    assert min(beta_1.value, beta_1.error) >= 0


def test_constants_of_quadratic_losses_are_exact():
    clients, _ = regression(np.random.default_rng(0), [4, 3])
    problem = reference.LeastSquares(*map(list, zip(*clients, strict=True)), 0.1)
    weights = np.array([4, 3]) / 7
    hessians = [x.T @ x / len(x) + problem.ridge * np.eye(x.shape[1]) for x in problem.features]
    curvature = np.linalg.eigvalsh(hessians)
    own = [
        np.linalg.solve(A, x.T @ y / len(y))
        for A, x, y in zip(hessians, problem.features, problem.targets, strict=True)
    ]
    losses = [reference.least_squares_client_loss(problem, k, w) for k, w in enumerate(own)]
    best = reference.least_squares_minimizer(problem)
    optimum = reference.least_squares_loss(problem, best)
    expected = curvature.min(), curvature.max(), optimum - weights @ losses, optimum, best
    with jax.enable_x64(True):
        _, task = regression(np.random.default_rng(0), [4, 3])
        found = exact_constants(task)
    for constant, value in zip(found, expected, strict=True):
        np.testing.assert_allclose(constant.value, value, rtol=1e-8)


@pytest.mark.parametrize("x64", [False, True])
def test_heterogeneity_of_equal_losses_is_never_below_0(x64):
    def heterogeneity_of(seed):
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(6, 4)), rng.normal(size=6)
        return exact_constants(least_squares([x, x, x], [y, y, y], ridge=1e-9)).Gamma.value

    with jax.enable_x64(x64):
        found = np.array([heterogeneity_of(seed) for seed in range(20)])
        alone = [exact_constants(compiled_quadratic(1, 6, mu)).Gamma.value for mu in (0.01, 0.3, 2)]
    assert min(found.min(), *alone) >= 0
    assert max(found.max(), *alone) < (1e-12 if x64 else 1e-5)


def test_heterogeneity_of_quadratics_equals_that_of_dense_matrices():
    problem = reference.dense_quadratic(5, 2, 0.1)
    minimizer = reference.minimizer(problem)
    gradients = [reference.client_gradient(problem, k, minimizer) for k in range(5)]
    differences = np.linalg.eigvalsh(problem.A - problem.A.mean(0))
    with jax.enable_x64(True):
        found = heterogeneity(compiled_quadratic(5, 2, 0.1))
    expected = np.sqrt(np.mean(np.square(np.linalg.norm(gradients, axis=1))))
    np.testing.assert_allclose(found.zeta.value, expected, rtol=1e-10)
    np.testing.assert_allclose(found.delta.value, np.abs(differences).max(), rtol=1e-10)
    assert {(x.known, x.error) for x in found} == {("exact", 0.0)}
    assert found.H.value == 0


@jax.tree_util.register_static
class Scalars:
    """Two clients with losses of one parameter."""

    num_clients = 2

    def __init__(self, loss):
        self.loss = loss

    def init(self, rng_key):
        return jnp.zeros(1)

    def weight(self, client):
        return jnp.ones(())

    def batch(self, rng_key, client, step, how):
        return client


def test_other_losses_need_points_and_are_estimated():
    def loss(params, client):
        return (1.0 + client) * params[0] ** 3 / 6 + params[0] ** 2 / 2

    task = Scalars(loss)
    with pytest.raises(ValueError, match="not known to be quadratic; give points"):
        heterogeneity(task)
    with pytest.raises(ValueError, match="Scalars does not know its constants"):
        exact_constants(task)
    found = heterogeneity(task, jnp.array([[0.5], [0.2], [0.0], [0.1]]))
    values = [float(x.value) for x in found]
    np.testing.assert_allclose(values, [0, 0.25, 2], atol=1e-6)  # (1 + k) w differs by w / 2
    assert {x.known for x in found} == {"estimate"}
    assert found.zeta.error == 0
