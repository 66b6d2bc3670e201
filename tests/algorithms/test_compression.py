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
    init,
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
from fedjax_mm.privacy import private
from fedjax_mm.tasks import quadratic
from tests.helpers import Precise, Towards
from tests.oracles import wrappers as oracle

N, DIM, ROUNDS = 6, 8, 25
KEY = jax.random.key(2)
VECTOR = jnp.array([3.0, -4.0, 0.0, 12.0])
RULES = {"top_k": top_k(0.25), "random_k": random_k(0.5), "qsgd": qsgd(4), "sign": sign()}


def many(compressor, vector, number=20_000):
    keys = jax.random.split(KEY, number)
    return np.asarray(jax.jit(jax.vmap(compressor.compress, (0, None)))(keys, vector), float)


@pytest.mark.parametrize("method", [mifa, stalevr, functools.partial(afl, mixture_rate=0.1)])
def test_servers_that_read_the_clients_states_are_refused(method):
    algorithm = compressed(method(local_sgd(0.1, steps=1)), top_k(0.5))
    assignment = mfa_rand(N, 2, unbiased=True)
    with pytest.raises(ValueError, match="server of this method reads the clients' states"):
        simulate(KEY, quadratic(N, 2, mu=0.1), algorithm, assignment, 1)


# Rules


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


@pytest.mark.parametrize(
    ("rule", "bits"),
    [
        (top_k(0.1), 10 * (32 + 7)),
        (random_k(0.1), 32 * 10 + 32),
        (qsgd(1), 32 + 100 * 2),
        (qsgd(4), 32 + 100 * 4),
        (sign(), 132),
        (top_k(1e-9), 39),
    ],
)
def test_sizes_of_messages_in_bits(rule, bits):
    assert float(rule.bits(100)) == bits


def test_a_single_number_needs_no_index():
    assert float(top_k(0.5).bits(1)) == 32


@pytest.mark.parametrize("rule", [top_k(1.0), random_k(1.0), qsgd(1), sign()])
def test_bits_of_large_models_are_counted(rule):
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


# Runs


@pytest.mark.parametrize("rule", [random_k(0.1), random_k(0.4), qsgd(1), top_k(0.1), sign()])
def test_every_rule_learns_by_default(rule):
    """Unbiased rules would diverge with feedback, and the others would stall without it."""
    task, algorithm = quadratic(24, 4, mu=0.1), compressed(fedavg(0.1, local_steps=5), rule)
    state, trace = simulate(KEY, task, algorithm, full_participation(24), 100)
    loss = trace.metrics["excess_loss"][:, 0]
    assert loss[-1] < 0.6 * loss[0]
    assert isinstance(state.models[0].clients.error, tuple) == (rule.variance is not None)


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


def test_error_feedback_preserves_the_sum_of_updates():
    """Sent and unsent parts add up to the update, and a lost message leaves e unchanged."""
    task = Towards(jnp.asarray(targets(), jnp.float32), DIM)
    plain = fedavg(0.2, local_steps=1)
    algorithm = compressed(plain, top_k(0.25))
    state, _ = simulate(KEY, task, algorithm, full_participation(N), 1)
    later, _ = advance(state, task, algorithm, dropping(full_participation(N), 1.0), 2)
    assert state.models[0].clients.error.any()
    np.testing.assert_array_equal(later.models[0].clients.error, state.models[0].clients.error)
    free, _ = simulate(KEY, task, plain, full_participation(N), 1)
    left = state.models[0].clients.error[0].mean(0)
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
