"""Models that mix: worked numbers and refusals."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import edges, fedavg, gradient_tracking, local_sgd, mfa_rand, peers, simulate, theory
from fedjax_mm.compression import compressed, top_k
from fedjax_mm.privacy import epsilon
from fedjax_mm.results.dataset import to_dataset
from fedjax_mm.tasks import least_squares, mean_estimation
from fedjax_mm.topologies import cloud, directed, mixing, mixing_matrix, ring, server

pytestmark = pytest.mark.usefixtures("x64")

IDLE = fedavg(lambda t: 0.0, local_steps=1)
RING = mixing(peers(8), ring())
B = np.arange(8.0)


def test_a_ring_agrees_at_the_rate_of_its_second_eigenvalue():
    _, trace = simulate(0, mean_estimation(B, B), IDLE, RING, 60, params=jnp.asarray(B))
    error = trace.metrics["consensus_error"].mean(1)
    np.testing.assert_allclose(error[:3], [5.25, 2.361111, 1.447531], atol=1e-6)
    rate = (1 - theory.spectral_gap(mixing_matrix(ring(), 8))) ** 2
    np.testing.assert_allclose([error[60] / error[59], rate], 0.647603, rtol=1e-6)
    _, few = simulate(0, mean_estimation(B, B), IDLE, mixing(peers(8, measured=2), ring()), 1)
    is_measured = np.isfinite(few.metrics["loss"]).tolist()
    assert is_measured == [[True] + 6 * [False] + [True]] * 2
    assert np.isfinite(few.metrics["own_loss"]).all()
    result = to_dataset(trace)
    assert (result.parameters_mixed.isel(round=-1) == 120).all()
    assert not result.parameters_up.any()


RATES = {
    0.1: [3.185632, 2.729883, 2.850762, 3.255229, 3.744771, 4.149238, 4.270117, 3.814368],
    0.01: None,
}


@pytest.mark.parametrize(("rate", "error"), [(0.1, 0.293333), (0.01, 0.005376)])
def test_the_floor_of_decentralised_sgd(rate, error):
    task = mean_estimation(B, B)  # (w - b)^2, with curvature 2
    sgd = fedavg(rate / 2, local_steps=1)
    state, trace = simulate(0, task, sgd, RING, 4000, record_every=4000)
    assert abs(trace.metrics["consensus_error"][-1].mean() - error) < 1e-6
    assert abs(state.models[0].params.mean() - 3.5) < 1e-6
    if RATES[rate]:
        np.testing.assert_allclose(state.models[0].params, RATES[rate], atol=1e-6)
    tracked = gradient_tracking(local_sgd(rate / 2))
    how = mixing(peers(8), ring(), combine="before")
    state, _ = simulate(0, task, tracked, how, 4000, record_every=4000)
    np.testing.assert_allclose(state.models[0].params, 3.5, atol=1e-9)
    first, _ = simulate(0, task, sgd, how, 1, params=jnp.zeros(8))
    np.testing.assert_allclose(first.models[0].params, rate * B, atol=1e-12)  # not mixed yet


def test_unlike_curvatures_bias_the_mean():
    a = np.array([1, 2, 1, 3, 1, 2, 1, 4.0])
    roots = np.sqrt(a)[:, None]
    task = least_squares(roots[:, None], roots * B[:, None], ridge=1e-15)
    sgd = fedavg(0.1, local_steps=1)
    state, _ = simulate(0, task, sgd, RING, 2000, record_every=2000)
    wanted = [3.955088, 2.971384, 2.863852, 3.338545, 4.001318, 4.707233, 5.283030, 4.880961]
    np.testing.assert_allclose(state.models[0].params[:, 0], wanted, atol=2e-6)


def test_push_sum_weighs_out_what_a_directed_graph_favours():
    net = mixing(peers(3), directed([(0, 1), (1, 2), (2, 0), (0, 2)]))
    task, start = mean_estimation(np.zeros(3), np.zeros(3)), jnp.array([1.0, 2, 6])
    for rounds, z in ((1, [4, 1.6, 3.25]), (2, [3.470588, 2.56, 2.897959]), (90, [3, 3, 3])):
        state, trace = simulate(0, task, IDLE, net, rounds, params=start)
        np.testing.assert_allclose(state.models[0].params, z, atol=1e-6)
    np.testing.assert_allclose(state.assignment.own.mass[1], [1, 2 / 3, 4 / 3], atol=1e-6)
    assert trace.metrics["messages"][-1].tolist() == [180, 90, 90]


def test_what_mixing_refuses():
    task, sgd = mean_estimation(B, B), fedavg(0.1, local_steps=1)
    refused = {
        "mixes already": lambda: mixing(RING, cloud()),
        "peers send whole models to each other": lambda: simulate(
            0, task, compressed(sgd, top_k(0.5)), RING, 1
        ),
        "epsilon is infinite: the assignment mixes models": lambda: epsilon(
            mixing(mfa_rand(8, 2), server()), noise_multiplier=1.0, num_rounds=3, delta=1e-5
        ),
        "for which push-sum has no weights": lambda: simulate(
            0, task, gradient_tracking(local_sgd(0.1)), mixing(peers(8), directed([(0, 1)])), 1
        ),
        "give each of 8 clients one of 0 ... 2": lambda: edges(8, 3, edge_of=[0] * 8),
    }
    for words, call in refused.items():
        with pytest.raises(ValueError, match=words.replace("...", r"\.\.\.")):
            call()
