"""Rates of agreement and floors of decentralised SGD, against those of the linear iterations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, local_sgd, peers, simulate
from fedjax_mm.tasks import least_squares, mean_estimation
from fedjax_mm.theory import spectral_gap
from fedjax_mm.topologies import (
    mixing,
    mixing_matrix,
    network,
    random_regular,
    ring,
    server,
    star,
    torus,
)

pytestmark = pytest.mark.usefixtures("x64")

N, ROUNDS, SEEDS = 8, 300, 2000
RATES = (0.05, 0.2)
CURVATURES = np.array([1, 2, 1, 3, 1, 2, 1, 4.0])
CENTERS = np.arange(8.0)


def weighted():
    """A symmetric W of five models with unlike weights."""
    W = np.zeros((5, 5))
    for i, j, weight in ((0, 1, 0.3), (1, 2, 0.2), (2, 3, 0.4), (3, 4, 0.1), (4, 0, 0.25)):
        W[i, j] = W[j, i] = weight
    return W + np.diag(1 - W.sum(1))


GRAPHS = {
    "ring": (ring(), 8, (1 + 2 * np.cos(2 * np.pi / 8)) / 3),
    "torus": (torus(4), 16, 3 / 5),
    "star": (star(), 8, 7 / 8),
    "complete": (server("models"), 8, 0.0),
    "regular": (random_regular(4), 20, None),
    "weighted": (network(weighted()), 5, np.sort(np.abs(np.linalg.eigvalsh(weighted())))[-2]),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_gossip_agrees_at_the_rate_of_the_second_eigenvalue(name):
    net, size, second = GRAPHS[name]
    zeros, start = np.zeros(size), np.random.default_rng(0).normal(size=size)
    idle = fedavg(lambda t: 0.0, local_steps=1)
    _, trace = simulate(
        0, mean_estimation(zeros, zeros), idle, mixing(peers(size), net), 100, params=start
    )
    error = np.asarray(trace.metrics["consensus_error"].mean(1))
    expected = 1 - spectral_gap(mixing_matrix(net, size))
    if second is not None:
        assert expected == pytest.approx(second, abs=1e-9)
    t = np.flatnonzero(error > 1e-20 * error[0])[-1]  # above rounding
    if t == 0:
        assert expected < 1e-9
    else:
        assert t > 20
        assert error[t] / error[t - 1] == pytest.approx(expected**2, rel=0.01)


MATRICES = [mixing_matrix(net, N) for net in (ring(), star(), random_regular(3))]


def examples():
    """Two targets of each client, whose means are the centers: F_i = a_i (x - b_i)^2 / 2."""
    roots = np.sqrt(CURVATURES)
    spread = np.linspace(0.5, 2, N)
    features = [np.full((2, 1), root) for root in roots]
    targets = [
        np.array([b - s, b + s]) * root for b, s, root in zip(CENTERS, spread, roots, strict=True)
    ]
    return features, targets, CURVATURES * spread  # standard deviations of gradients


def on_grid(batch_size=None, combine="after", num_seeds=1):
    """Models and their consensus error after all rounds, ``[matrices, rates, seeds]``."""
    features, targets, _ = examples()
    task = least_squares(features, targets, ridge=1e-15)

    def last(W, rate, rng_key):
        how = mixing(peers(N), network(W), combine=combine)
        sgd = fedavg(local_sgd(rate, steps=1, batch_size=batch_size))
        state, trace = simulate(rng_key, task, sgd, how, ROUNDS, record_every=ROUNDS)
        return state.models[0].params[:, 0], trace.metrics["consensus_error"][-1].mean()

    run = last
    for axes in ((None, None, 0), (None, 0, None), (0, None, None)):
        run = jax.vmap(run, axes)
    keys = jax.random.split(jax.random.key(0), num_seeds)
    return jax.jit(run)(jnp.asarray(MATRICES), jnp.asarray(RATES), keys)


def fixed_point(W, rate, combine):
    """The solution of ``x = W (x - rate A (x - b))``, or of ``x = W x - rate A (x - b)``."""
    step = np.diag(rate * CURVATURES)
    pull = W @ step if combine == "after" else step
    return np.linalg.solve(np.eye(N) - W + pull, pull @ CENTERS)


def spread(x):
    return np.mean((x - x.mean()) ** 2)


@pytest.mark.parametrize("combine", ["after", "before"])
def test_the_floor_of_decentralised_sgd_is_its_fixed_point(combine):
    models, error = on_grid(combine=combine)
    for i, W in enumerate(MATRICES):
        for j, rate in enumerate(RATES):
            fixed = fixed_point(W, rate, combine)
            np.testing.assert_allclose(models[i, j, 0], fixed, rtol=1e-6)
            np.testing.assert_allclose(error[i, j, 0], spread(fixed), rtol=1e-5)


@pytest.mark.parametrize("combine", ["after", "before"])
def test_noise_adds_the_stationary_covariance_to_the_floor(combine):
    """``S = H S H' + G Q G'`` with ``x <- H x + G (b + noise)``, exact for quadratics."""
    models, error = on_grid(1, combine, SEEDS)
    _, _, deviations = examples()
    project = np.eye(N) - 1 / N
    for i, W in enumerate(MATRICES):
        for j, rate in enumerate(RATES):
            step, noise = np.diag(rate * CURVATURES), rate * np.diag(deviations)
            H, G = (W - W @ step, W @ noise) if combine == "after" else (W - step, noise)
            flat = np.linalg.solve(np.eye(N * N) - np.kron(H, H), (G @ G.T).ravel())
            covariance = flat.reshape(N, N)
            fixed = fixed_point(W, rate, combine)
            floor = spread(fixed) + np.trace(project @ covariance) / N
            assert floor > 1.02 * spread(fixed)  # noise matters
            of_mean = (models[i, j].mean(1) - fixed.mean()) ** 2
            variance = np.sum(covariance) / N**2
            for found, exact in ((error[i, j], floor), (of_mean, variance)):
                standard_error = np.std(found, ddof=1) / np.sqrt(SEEDS)
                assert abs(np.mean(found) - exact) < 3 * standard_error
