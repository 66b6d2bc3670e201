"""Compressed updates: errors and bits of the rules, error feedback, and whole runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    fedavg,
    full_participation,
    init,
    simulate,
)
from fedjax_mm.compression import compressed, qsgd, random_k, sign, top_k
from fedjax_mm.privacy import private
from tests.helpers import Precise, Towards
from tests.oracles import wrappers as oracle

N, DIM, ROUNDS = 6, 8, 25


KEY = jax.random.key(2)


VECTOR = jnp.array([3.0, -4.0, 0.0, 12.0])


RULES = {"top_k": top_k(0.25), "random_k": random_k(0.5), "qsgd": qsgd(4), "sign": sign()}


def many(compressor, vector, number=20_000):
    keys = jax.random.split(KEY, number)
    return np.asarray(jax.jit(jax.vmap(compressor.compress, (0, None)))(keys, vector), float)


@pytest.mark.parametrize("levels", [1, 3, 16])
def test_the_variance_of_qsgd_is_below_its_bound(levels):
    vector = jax.random.normal(KEY, (40,))
    squares = ((many(qsgd(levels), vector, 2000) - np.asarray(vector)) ** 2).sum(1)
    bound = min(40 / levels**2, np.sqrt(40) / levels) * float(jnp.sum(vector**2))
    assert squares.mean() < bound


@pytest.mark.parametrize("k", [1, 3, 8])
def test_top_k_matches_the_oracle(k):
    """Ties go to lower indices, and the error is at most that of k random coordinates."""
    rule = top_k(k / 8)
    for seed in range(20):
        vector = np.random.default_rng(seed).integers(-3, 4, 8).astype(np.float32)
        sent = np.asarray(rule.compress(None, jnp.asarray(vector)))
        np.testing.assert_array_equal(sent, oracle.top_k(vector, k))
        assert np.sum((vector - sent) ** 2) <= (1 - k / 8) * np.sum(vector**2) + 1e-6


def test_signs_have_a_known_error():
    sent = np.asarray(sign().compress(None, VECTOR[jnp.array([0, 1, 3])]))
    np.testing.assert_allclose(sent, 19 / 3 * np.array([1, -1, 1]), rtol=1e-6)
    error = np.sum((sent - np.array([3, -4, 12])) ** 2)
    np.testing.assert_allclose(error, 169 - 19**2 / 3, rtol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_zero_is_compressed_to_zero(name):
    np.testing.assert_array_equal(RULES[name].compress(KEY, jnp.zeros(4)), 0)


def test_rules_without_loss_return_the_vector():
    for rule in (top_k(1.0), random_k(1.0), qsgd(2**20)):
        np.testing.assert_allclose(rule.compress(KEY, VECTOR), VECTOR, rtol=1e-5)


def test_sizes_of_messages_in_bits():
    for rule, bits in [
        (top_k(0.1), 10 * (32 + 7)),
        (random_k(0.1), 32 * 10 + 32),
        (qsgd(1), 32 + 100 * 2),
        (qsgd(4), 32 + 100 * 4),
        (sign(), 132),
        (top_k(1e-9), 39),
    ]:
        assert float(rule.bits(100)) == bits


def test_a_single_number_needs_no_index():
    assert float(top_k(0.5).bits(1)) == 32


def test_bits_of_large_models_are_counted():
    for rule in [top_k(1.0), random_k(1.0), qsgd(1), sign()]:
        assert float(rule.bits(200_000_000)) >= 2e8


@pytest.mark.parametrize("name", ["private", "compressed"])
def test_compressing_twice_or_after_clipping_is_refused(name):
    plain = fedavg(0.1, local_steps=1)
    inner = {
        "private": private(plain, clip=1.0, noise_multiplier=0.1, clients_per_round=3),
        "compressed": compressed(plain, sign()),
    }
    with pytest.raises(ValueError, match=f"compressed is around {name}; compress once"):
        compressed(inner[name], sign())


@pytest.mark.parametrize(
    ("rule", "is_bound"),
    [(random_k(0.5), False), (random_k(0.25), False), (qsgd(1), True), (qsgd(16), True)],
)
def test_the_stated_variance_of_a_rule_is_right(rule, is_bound):
    """It is exact for random coordinates, and a bound for QSGD."""
    vector = jax.random.normal(KEY, (40,))
    squares = ((many(rule, vector, 4000) - np.asarray(vector)) ** 2).sum(1)
    mean, bound = squares.mean(), float(rule.variance(40)) * float(jnp.sum(vector**2))
    error = 4 * squares.std() / np.sqrt(len(squares)) + 1e-4
    assert mean <= bound + error
    assert is_bound or mean >= bound - error


@pytest.mark.parametrize(
    ("rule", "warns"),
    [(random_k(0.4), True), (random_k(0.6), False), (qsgd(1), True), (qsgd(8), False)],
)
def test_feedback_that_may_diverge_warns(rule, warns):
    algorithm = compressed(fedavg(0.1, local_steps=1), rule, error_feedback=True)

    def start():
        return init(KEY, Towards(jnp.ones((N, DIM)), DIM), algorithm, full_participation(N))

    if not warns:
        start()
        return
    with pytest.warns(UserWarning, match="error_feedback is True, but the error of a message may"):
        jax.eval_shape(start)


@functools.cache
def targets():
    return np.random.default_rng(5).normal(size=(N, DIM))


@pytest.mark.parametrize(
    ("rule", "compress", "feedback"),
    [
        (top_k(0.25), lambda v: oracle.top_k(v, 2), True),
        (top_k(0.25), lambda v: oracle.top_k(v, 2), False),
        (sign(), oracle.scaled_sign, True),
    ],
)
def test_runs_match_the_oracle(rule, compress, feedback):
    with jax.enable_x64(True):
        task = Precise(jnp.asarray(targets()), DIM)
        algorithm = compressed(fedavg(0.2, local_steps=3), rule, error_feedback=feedback)
        _, trace = simulate(KEY, task, algorithm, full_participation(N), ROUNDS)
        message = oracle.Feedback(compress, N, DIM)
        if not feedback:

            def message(client, update):
                return compress(update)

        groups = [list(range(N))] * ROUNDS
        models = oracle.fedavg(np.ones(DIM), targets(), 0.2, 3, groups, message)
        norms = [np.sqrt(np.sum(w**2)) for w in models]
        np.testing.assert_allclose(trace.metrics["norm"][:, 0], norms, rtol=1e-10)


def test_error_feedback_makes_top_k_converge():
    """Large opposite gradients hide a small one on which all clients agree."""
    pulls = jnp.array([[40.0, 0.0, 2.0], [-20.0, 20.0, 2.0], [-20.0, -20.0, 2.0]])
    task, distance = Precise(pulls, 3), {}
    for feedback in (True, False):
        algorithm = compressed(fedavg(0.002, local_steps=1), top_k(1 / 3), error_feedback=feedback)
        state, _ = simulate(KEY, task, algorithm, full_participation(3), 4000)
        distance[feedback] = float(abs(state.models[0].params["w"][0, 2] - 2))
    assert distance[True] < 0.15
    assert distance[False] > 0.9
