"""BODS: its Gaussian process against scikit-learn, its plans against a loop, its trade-off."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from fedjax_mm import mfa_rand
from fedjax_mm.asynchrony import bods, on_clock, planning, shifted_exponential
from fedjax_mm.base import keys
from tests.helpers import NOTHING_TO_SEE, slow_unless
from tests.oracles import planning as oracle

N, M, K, SEED = 20, 2, 4, 5
SHAPE = M, K
LAW = shifted_exponential(N, mean=1.0, slow_factor=3.0, fast_factor=0.5)


@pytest.fixture(autouse=True)
def single_thread():
    """Limits BLAS to one thread, because threads of parallel tests wait for each other."""
    with threadpool_limits(limits=1, user_api="blas"):
        yield


def plans(count, seed):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(N)[: M * K].reshape(SHAPE) for _ in range(count)])


def overlaps_of(one, other):
    each = [[oracle.as_vector(plan, N) for plan in some] for some in (one, other)]
    return jnp.asarray(np.array(each[0]) @ np.array(each[1]).T, jnp.int32)


# The Gaussian process


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("number", [1, 7, planning.MEMORY])
def test_posterior_and_improvement_match_scikit_learn(number):
    """Includes cases with few plans, and a candidate that is one of them."""
    kept, candidates = plans(planning.MEMORY, 0), plans(20, 1)
    candidates[3] = kept[0]
    costs = np.random.default_rng(2).gamma(2.0, 3.0, planning.MEMORY)
    is_kept = jnp.arange(planning.MEMORY) < number
    overlaps, cross = overlaps_of(kept, kept), overlaps_of(candidates, kept)
    mean, deviation = planning.posterior(overlaps, cross, jnp.asarray(costs), is_kept, SHAPE)
    X = [oracle.as_vector(plan, N) for plan in kept[:number]]
    vectors = [oracle.as_vector(plan, N) for plan in candidates]
    expected = oracle.predict(X, costs[:number], vectors, planning.NOISE)
    np.testing.assert_allclose(mean, expected[0], rtol=1e-10)
    np.testing.assert_allclose(deviation, expected[1], rtol=1e-8)
    best = costs[:number].min()
    found = planning.expected_improvement(mean, deviation, best)
    np.testing.assert_allclose(found, oracle.improvement(*expected, best), rtol=1e-7, atol=1e-12)


def test_equal_plans_are_stable_in_single_precision():
    same = np.repeat(plans(1, 0), planning.MEMORY, axis=0)
    overlaps = overlaps_of(same, same)
    costs = jnp.arange(planning.MEMORY, dtype=jnp.float32)
    everything = jnp.ones(planning.MEMORY, bool)
    mean, deviation = planning.posterior(overlaps, overlaps[:2], costs, everything, SHAPE)
    # The matrix is all ones plus NOISE on its diagonal; its condition magnifies rounding errors.
    condition = planning.MEMORY / planning.NOISE
    room = condition * np.finfo(np.float32).eps * costs.std()
    np.testing.assert_allclose(mean, costs.mean(), rtol=0, atol=room)
    assert (deviation >= 0).all()
    assert np.isfinite(planning.expected_improvement(mean, deviation, 0.0)).all()


def test_no_improvement_is_expected_without_uncertainty():
    found = planning.expected_improvement(jnp.array([-1.0, 1.0]), jnp.zeros(2), 0.0)
    np.testing.assert_array_equal(found, 0)


@pytest.mark.usefixtures("x64")
def test_the_variance_of_counts_is_exact_after_many_rounds():
    """Counts near a million differ by a few and include the plan's own round."""
    rng, number = np.random.default_rng(0), 5_000_000
    candidates, off = plans(6, 1), rng.integers(-3, 4, (M, N))
    off[:, 0] -= off.sum(1)
    counts = number * K // N + off
    expected = [
        np.var(counts + oracle.as_vector(plan, N).reshape(M, N), axis=1).sum()
        for plan in candidates
    ]
    with jax.enable_x64(False):
        given = jnp.asarray(counts, jnp.int32), jnp.int32(number), jnp.asarray(candidates)
        found = planning.variances(*given)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# Runs


def roll(assignment, num_rounds, key):
    """The plans and the final time."""

    def one_round(state, t):
        at = keys.assignment_key(keys.round_key(key, t))
        cohort, state = assignment.assign(at, t, state, NOTHING_TO_SEE)
        return state, cohort.clients.reshape(M, -1)

    state, clients = jax.lax.scan(
        one_round, assignment.init(key, NOTHING_TO_SEE), jnp.arange(1, num_rounds + 1)
    )
    return clients, state.own


ROUNDS = planning.MEMORY + 16


@functools.cache
def drawn():
    """The candidates and the delays of all pairs in each round."""

    def of_round(t):
        key = keys.assignment_key(keys.round_key(jax.random.key(SEED), t))
        pool, places = planning.draw_candidates(key, N, SHAPE)
        model_keys = keys.model_keys(keys.delays_key(key), jnp.arange(M))

        def of_pair(m, k):
            return LAW(keys.client_key(model_keys[m], k), m, k)

        pairs = jax.vmap(jax.vmap(of_pair, (None, 0)), (0, None))(jnp.arange(M), jnp.arange(N))
        return pool[places], pairs

    return jax.device_get(jax.jit(jax.vmap(of_round))(jnp.arange(1, ROUNDS + 1)))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("learn", "alpha"),
    [
        ("cost", 0.25),
        ("time", 0.25),
        slow_unless(False, "cost", 1.0),
        slow_unless(False, "time", 1.0),
    ],
)
def test_every_plan_is_the_best_of_its_round(learn, alpha):
    """The run is longer than the memory, and clients train one model at a time."""
    assignment = bods(N, M, cohort_size=K, delay=LAW, alpha=alpha, learn=learn)
    clients, time = jax.jit(functools.partial(roll, assignment, ROUNDS))(jax.random.key(SEED))
    candidates, delays = drawn()
    is_chosen = (candidates == np.asarray(clients)[:, None]).all((2, 3))
    assert is_chosen.any(1).all()
    assert is_chosen[0, 0]
    choices = is_chosen.argmax(1)
    regrets = oracle.run(
        candidates.tolist(),
        choices.tolist(),
        lambda t, m, k: delays[t - 1, m, k],
        N,
        alpha=alpha,
        learn=learn,
        memory=planning.MEMORY,
        noise=planning.NOISE,
    )
    assert max(regrets) < 1e-9
    assert len(set(choices.tolist())) > ROUNDS / 4
    expected = np.asarray(clients).tolist()
    longest = [
        max(delays[t, m, k] for m, its in enumerate(plan) for k in its)
        for t, plan in enumerate(expected)
    ]
    np.testing.assert_allclose(time, sum(longest), rtol=1e-6)
    each = np.sort(np.asarray(clients).reshape(ROUNDS, -1), axis=1)
    assert (np.diff(each, axis=1) > 0).all()


LONG, SEEDS = 150, 16


@functools.cache
def program(learn):
    """Compiles one program for all alpha."""

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(alpha):
        if learn == "nothing":
            assignment = on_clock(mfa_rand(N, M, cohort_size=M * K), LAW)
        else:
            assignment = bods(N, M, cohort_size=K, delay=LAW, alpha=alpha, learn=learn)
        seeds = jax.random.split(jax.random.key(1), SEEDS)
        return jax.vmap(functools.partial(roll, assignment, LONG))(seeds)

    chex.clear_trace_counter()
    return run


@functools.cache
def outcomes(learn, alpha=0.0):
    """The variance of the final counts and the mean duration of a round, for each seed."""
    clients, time = program(learn)(alpha)
    counts = (np.asarray(clients)[..., None] == np.arange(N)).sum((1, 3))
    return counts.var(2).sum(1), np.asarray(time) / LONG


def is_less(one, other):
    """Whether the mean is smaller by more than 4 standard errors of the difference."""
    error = np.sqrt((one.var(ddof=1) + other.var(ddof=1)) / SEEDS)
    return one.mean() + 4 * error < other.mean()


@pytest.mark.slow
def test_plans_for_time_make_rounds_shorter_than_random_plans():
    (_, learnt), (_, random) = outcomes("cost", 1.0), outcomes("nothing")
    assert is_less(learnt, random)


@pytest.mark.slow
def test_growing_costs_are_learnt_too_late_for_fairness():
    """Plans are less fair than random ones, even with alpha = 0."""
    assert is_less(outcomes("nothing")[0], outcomes("cost", 0.0)[0])


@pytest.mark.slow
def test_computed_fairness_is_almost_perfect():
    variances = outcomes("time", 0.0)[0]
    assert is_less(variances, outcomes("nothing")[0] / 10)
    assert variances.mean() < 2


@pytest.mark.slow
def test_learning_only_times_trades_fairness_for_time():
    fair, mixed, fast = (outcomes("time", alpha) for alpha in (0.0, 0.25, 1.0))
    assert is_less(fast[1], outcomes("nothing")[1])
    assert is_less(fast[1], fair[1])
    assert is_less(fair[0], mixed[0])
    assert is_less(mixed[0], fast[0])
    assert is_less(mixed[0], outcomes("cost", 0.25)[0])


def test_replicas_never_factor_a_batch_of_matrices_on_cpus():
    """jaxlib factors a batch in the threads that run the program, which can deadlock."""
    matrices = jnp.broadcast_to(jnp.eye(8), (2, 3, 8, 8))
    given = matrices, jnp.ones((2, 3, 8)), jnp.ones((2, 3, 5, 8))
    together = jax.jit(jax.vmap(jax.vmap(planning.predict)))
    text = together.lower(*given).as_text()
    calls = [line for line in text.splitlines() if "lapack_" in line or "blas_" in line]
    assert calls
    for line in calls:
        assert "3x8x8" not in line
    chex.assert_trees_all_close(together(*given), (jnp.full((2, 3, 5), 8.0),) * 2, rtol=1e-6)
