"""Compressed updates: errors and bits of the rules, error feedback, and whole runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    advance,
    afl,
    fedavg,
    full_participation,
    local_sgd,
    mfa_rand,
    mifa,
    scaffold,
    simulate,
    stalevr,
    to_dataset,
)
from fedjax_mm.availability import dropping
from fedjax_mm.compression import compressed, qsgd, random_k, sign, top_k
from fedjax_mm.tasks import quadratic
from tests.algorithms.test_compression import DIM, KEY, RULES, VECTOR, N, many, targets
from tests.helpers import Towards


@pytest.mark.parametrize("method", [mifa, stalevr, functools.partial(afl, mixture_rate=0.1)])
def test_servers_that_read_the_clients_states_are_refused(method):
    algorithm = compressed(method(local_sgd(0.1, steps=1)), top_k(0.5))
    assignment = mfa_rand(N, 2, unbiased=True)
    with pytest.raises(ValueError, match="server of this method reads the clients' states"):
        simulate(KEY, quadratic(N, 2, mu=0.1), algorithm, assignment, 1)


@pytest.mark.parametrize(
    ("rule", "variance"), [(random_k(0.5), 169), (qsgd(1), 78), (qsgd(4), 4.875), (qsgd(13), 0)]
)
def test_random_rules_are_unbiased_with_a_known_error(rule, variance):
    sent, vector = many(rule, VECTOR), np.asarray(VECTOR)
    error = sent.std(0) / np.sqrt(len(sent))
    assert (abs(sent.mean(0) - vector) <= 4 * error + 1e-6).all()
    squares = ((sent - vector) ** 2).sum(1)
    bound = 4 * squares.std() / np.sqrt(len(sent))
    assert abs(squares.mean() - variance) <= bound + 1e-4


@pytest.mark.parametrize("rule", [random_k(0.1), random_k(0.4), qsgd(1), top_k(0.1), sign()])
def test_every_rule_learns_by_default(rule):
    """Unbiased rules would diverge with feedback, and the others would stall without it."""
    task, algorithm = quadratic(24, 4, mu=0.1), compressed(fedavg(0.1, local_steps=5), rule)
    state, trace = simulate(KEY, task, algorithm, full_participation(24), 100)
    loss = trace.metrics["excess_loss"][:, 0]
    assert loss[-1] < 0.6 * loss[0]
    assert isinstance(state.models[0].clients.own, tuple) == (rule.variance is not None)


def test_error_feedback_preserves_the_sum_of_updates():
    """Sent and unsent parts add up to the update, and a lost message leaves e unchanged."""
    task = Towards(jnp.asarray(targets(), jnp.float32), DIM)
    plain = fedavg(0.2, local_steps=1)
    algorithm = compressed(plain, top_k(0.25))
    state, _ = simulate(KEY, task, algorithm, full_participation(N), 1)
    later, _ = advance(state, task, algorithm, dropping(full_participation(N), 1.0), 2)
    assert state.models[0].clients.own.any()
    np.testing.assert_array_equal(later.models[0].clients.own, state.models[0].clients.own)
    free, _ = simulate(KEY, task, plain, full_participation(N), 1)
    left = state.models[0].clients.own[0].mean(0)
    np.testing.assert_allclose(
        state.models[0].params["w"][0] + left, free.models[0].params["w"][0], rtol=1e-5
    )


@pytest.mark.parametrize("name", RULES)
def test_bits_are_counted(name):
    task, algorithm = Towards(jnp.ones((N, DIM)), DIM), fedavg(0.1, local_steps=1)
    _, trace = simulate(KEY, task, compressed(algorithm, RULES[name]), mfa_rand(N, 2), 4)
    bits = float(RULES[name].bits(DIM))
    np.testing.assert_array_equal(trace.metrics["message_bits"], bits)
    result = to_dataset(trace)
    np.testing.assert_array_equal(result.bits_up, result.client_updates * bits)
    mixed = [compressed(algorithm, RULES[name]), algorithm]
    result = to_dataset(simulate(KEY, [task, task], mixed, mfa_rand(N, 2), 4)[1])
    np.testing.assert_array_equal(result.bits_up[-1], [12 * bits, 12 * 32 * DIM])
    assert "bits_up" not in to_dataset(simulate(KEY, task, algorithm, mfa_rand(N, 2), 1)[1])


@pytest.mark.parametrize("client_map", ["scan", 4])
def test_client_maps_agree(client_map):
    task = Towards(jnp.asarray(targets(), jnp.float32), DIM)
    algorithm = compressed(fedavg(0.2, local_steps=1), random_k(0.25))
    runs = [
        simulate(KEY, task, algorithm, mfa_rand(N, 2), 4, client_map=each)[0].models[0]
        for each in ("vmap", client_map)
    ]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), *runs)


def test_methods_with_states_and_sparse_updates_are_compressed():
    """SCAFFOLD's two vectors are compressed as one, and the quadratic's updates are sparse."""
    rule, task = top_k(0.2), quadratic(N, 3, mu=0.1)
    for algorithm in (scaffold(local_sgd(0.1, steps=2)), fedavg(0.1, local_steps=2)):
        _, trace = simulate(KEY, task, compressed(algorithm, rule), full_participation(N), 40)
        loss = trace.metrics["excess_loss"][:, 0]
        assert loss[-1] < 0.5 * loss[0]


def test_shares_can_vary_without_recompiling_and_runs_continue():
    task = Towards(jnp.asarray(targets(), jnp.float32), DIM)

    @jax.jit
    def run(share, levels):
        first = compressed(fedavg(0.2, local_steps=1), top_k(share))
        second = compressed(fedavg(0.2, local_steps=1), qsgd(levels))
        parts = [task, task], [first, second], mfa_rand(N, 2)
        whole, trace = simulate(KEY, *parts, 5)
        state, _ = advance(simulate(KEY, *parts, 2)[0], *parts, 3)
        return whole.models[0].params, state.models[0].params, trace.metrics["message_bits"]

    shares, levels = jnp.array([0.25, 1.0]), jnp.array([1, 7])
    whole, later, bits = jax.vmap(run)(shares, levels)
    jax.tree.map(np.testing.assert_array_equal, whole, later)
    np.testing.assert_array_equal(bits[:, 0], [[2 * 35, 32 + 8 * 2], [8 * 35, 32 + 8 * 4]])
    run(0.5, 2), run(0.75, 3)
    assert run._cache_size() == 1
