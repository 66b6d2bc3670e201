"""The quadratic's block structure compared with dense linear algebra."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm.base import Batching
from fedjax_mm.tasks import quadratic
from tests.oracles import multi_model as reference

SIZES = [(24, 4, 2e-4), (1, 3, 0.1), (7, 2, 1e-8)]
every_size = pytest.mark.parametrize(("num_clients", "block_size", "mu"), SIZES)
pytestmark = pytest.mark.usefixtures("x64")


@every_size
def test_losses_gradients_and_metrics(num_clients, block_size, mu):
    task = quadratic(num_clients, block_size, mu=mu)
    problem = reference.dense_quadratic(num_clients, block_size, mu)
    w = np.random.default_rng(0).normal(size=task.dim)
    loss_and_gradient = jax.jit(jax.value_and_grad(task.loss))
    for k in range(num_clients):
        loss, gradient = loss_and_gradient(jnp.asarray(w), jnp.int32(k))
        assert loss == pytest.approx(reference.client_loss(problem, k, w), rel=1e-12)
        np.testing.assert_allclose(
            gradient, reference.client_gradient(problem, k, w), rtol=1e-12, atol=1e-13
        )
    metrics = jax.jit(task.metrics)(jax.random.key(0), jnp.asarray(w))
    loss = reference.global_loss(problem, w)
    optimum = reference.global_loss(problem, reference.minimizer(problem))
    assert metrics["loss"] == pytest.approx(loss, rel=1e-12)
    assert metrics["excess_loss"] == pytest.approx(loss - optimum, rel=1e-11)


@every_size
def test_minimizer_and_optimum(num_clients, block_size, mu):
    task = quadratic(num_clients, block_size, mu=mu)
    problem = reference.dense_quadratic(num_clients, block_size, mu)
    # The error of a dense solve grows with the condition number, which is up to 4 / (N mu).
    tolerance = 1e-14 * max(10, 4 / (num_clients * mu))
    np.testing.assert_allclose(
        task.minimizer, reference.minimizer(problem), rtol=tolerance, atol=1e-15
    )
    optimum = reference.global_loss(problem, reference.minimizer(problem))
    assert task.optimum == pytest.approx(optimum, rel=tolerance)


@every_size
def test_minimizer_solves_the_tridiagonal_system(num_clients, block_size, mu):
    task = quadratic(num_clients, block_size, mu=mu)
    w = np.pad(np.asarray(task.minimizer), 1)
    residual = (2 + num_clients * mu) * w[1:-1] - w[:-2] - w[2:] - np.eye(1, task.dim)[0]
    assert np.abs(residual).max() < 4e-15 * max(1, num_clients * mu)


def test_minimizer_in_single_precision():
    double = np.asarray(quadratic(24, 4, mu=2e-4).minimizer)
    with jax.enable_x64(False):
        single = np.asarray(quadratic(24, 4, mu=2e-4).minimizer)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, double, rtol=3e-6)


@every_size
def test_constants(num_clients, block_size, mu):
    task = quadratic(num_clients, block_size, mu=mu)
    problem = reference.dense_quadratic(num_clients, block_size, mu)
    strong_convexity, smoothness, heterogeneity = reference.constants(problem)
    assert task.smoothness == pytest.approx(smoothness, rel=1e-12)
    assert task.strong_convexity == pytest.approx(strong_convexity, rel=1e-10, abs=1e-14)
    assert task.heterogeneity == pytest.approx(heterogeneity, rel=1e-7, abs=1e-13)


@every_size
def test_closed_form_of_local_steps(num_clients, block_size, mu):
    """Includes eta mu > 1, for which log(1 - eta mu) would be NaN."""
    task = quadratic(num_clients, block_size, mu=mu)
    problem = reference.dense_quadratic(num_clients, block_size, mu)
    w = np.random.default_rng(0).normal(size=task.dim)
    for learning_rate in (0.1, 30.0):
        for k in (0, num_clients // 2, num_clients - 1):
            update = task.local_sgd(jnp.asarray(w), jnp.int32(k), learning_rate, 5)
            dense = update.scale * w + jnp.zeros(task.dim).at[update.indices].add(update.values)
            local = reference.full_gradient_steps(
                lambda w, e, k=k: reference.client_gradient(problem, k, w), w, learning_rate, 5
            )
            np.testing.assert_allclose(
                dense, local - w, rtol=1e-11, atol=1e-13 * np.abs(local).max()
            )


def test_memory_of_a_million_clients_is_linear():
    """A dense A_k would need 10^19 numbers, but the task holds one array of N p + 1."""
    task = jax.eval_shape(lambda mu: quadratic(10**6, 4, mu=mu), jnp.float32(1e-4))
    assert sum(leaf.size for leaf in jax.tree.leaves(task)) == 4 * 10**6 + 3


def test_minibatches_are_refused():
    with pytest.raises(ValueError, match="batch_size is 10; the quadratic has no examples"):
        quadratic(4, 2, mu=0.1).batch(jax.random.key(0), jnp.int32(0), jnp.int32(0), Batching(10))


def test_single_precision_avoids_cancellation():
    """The excess loss is a quadratic form, and the decay is not a difference from 1."""
    double = quadratic(24, 4, mu=2e-4)
    with jax.enable_x64(False):
        task = quadratic(24, 4, mu=2e-4)
        noise = np.random.default_rng(0).normal(size=task.dim).astype(np.float32)
        w = task.minimizer + 1e-4 * noise
        excess = task.metrics(jax.random.key(0), w)["excess_loss"]
        decay = task.local_sgd(w, jnp.int32(3), 0.1, 5).scale
        assert (excess.dtype, decay.dtype) == (np.float32, np.float32)
    exact = double.metrics(jax.random.key(0), jnp.asarray(np.asarray(w, np.float64)))["excess_loss"]
    assert float(excess) == pytest.approx(float(exact), rel=1e-2)
    assert float(decay) == pytest.approx(math.expm1(5 * math.log1p(-0.1 * 2e-4)), rel=1e-6)
