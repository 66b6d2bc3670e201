"""Private training: clipped updates, one Gaussian noise per round and model, adaptive clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    advance,
    fedavg,
    mfa_rand,
    mfa_rr,
    noisy,
    simulate,
)
from fedjax_mm.compression import compressed, qsgd
from fedjax_mm.privacy import AdaptiveClip, private
from fedjax_mm.tasks import quadratic
from tests.helpers import Towards
from tests.privacy.test_private import DIM, KEY, TARGETS, N, fed


def test_numbers_can_vary_without_recompiling_and_runs_continue():
    task = Towards(jnp.asarray(TARGETS, jnp.float32), DIM)

    @jax.jit
    def run(clip, noise, expected, rate):
        rule = AdaptiveClip(rate=rate, count_noise=3.0)
        how = {"clip": clip, "noise_multiplier": noise, "clients_per_round": expected}
        algorithm = private(fed(), **how, adaptive=rule)
        parts = task, algorithm, mfa_rand(N, 2)
        whole, _ = simulate(KEY, *parts, 5)
        state, _ = advance(simulate(KEY, *parts, 2)[0], *parts, 3)
        return whole.models[0].params, state.models[0].params

    values = jnp.array([[1.0, 0.5, 4.0, 0.1], [2.0, 0.1, 8.0, 0.3]])
    whole, later = jax.vmap(run)(*values.T)
    jax.tree.map(np.testing.assert_array_equal, whole, later)
    alone = [run(*each)[0]["w"] for each in values]
    np.testing.assert_allclose(whole["w"], alone, rtol=1e-5, atol=1e-6)
    assert run._cache_size() == 1


@pytest.mark.parametrize("client_map", ["scan", 3])
def test_client_maps_agree_for_models_of_different_structure(client_map):
    tasks = [Towards(jnp.asarray(TARGETS, jnp.float32), DIM), quadratic(N, 2, mu=0.1)]
    algorithm = private(fed(), clip=1.0, noise_multiplier=0.3, clients_per_round=4)
    runs = [
        simulate(KEY, tasks, algorithm, mfa_rr(N, 2), 4, client_map=each)[0].models
        for each in ("vmap", client_map)
    ]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), *runs)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda algorithm: private(algorithm, clip=0.05, noise_multiplier=0.4, clients_per_round=3),
        lambda algorithm: noisy(algorithm, jnp.ones(4, bool)),
        lambda algorithm: compressed(algorithm, qsgd(2)),
    ],
    ids=["private", "noisy", "qsgd"],
)
@pytest.mark.usefixtures("x64")
def test_gradients_are_finite_if_an_update_is_zero(wrap):
    """Clients 2 to 4 have no linear part, so they send 0 in round 1 from a start at 0."""
    task = quadratic(4, 2, mu=0.1)

    @jax.jit
    def end(rate):
        algorithm, assignment = wrap(fedavg(rate, local_steps=2)), mfa_rand(4, 1)
        _, trace = simulate(KEY, task, algorithm, assignment, 2)
        return trace.metrics["excess_loss"][-1, 0]

    difference = (end(0.3 + 1e-6) - end(0.3 - 1e-6)) / 2e-6
    np.testing.assert_allclose(jax.grad(end)(0.3), difference, rtol=1e-4)
