"""Random orders are permutations, and uniform within 4 standard errors."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_mm.base import keys
from fedjax_mm.base.shuffles import RANK_LIMIT, drawn, fold_words, hash_words, permutation, shuffled
from tests.compiling import optimised
from tests.helpers import slow_unless

# Both algorithms, with sizes around their border. 1000 = 32 * 32 - 24 needs cycle walking.
SIZES = [1, 2, 3, 24, RANK_LIMIT, RANK_LIMIT + 1, 1000]


one_permutation = jax.jit(permutation, static_argnums=(1, 2))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from(SIZES))
def test_is_a_permutation(seed, size):
    values = one_permutation(jax.random.key(seed), size)
    assert sorted(values.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [24, 1000])
def test_a_shorter_draw_is_a_prefix(size):
    whole = np.asarray(one_permutation(jax.random.key(3), size))
    np.testing.assert_array_equal(one_permutation(jax.random.key(3), size, 7), whole[:7])


@pytest.mark.parametrize("size", [24, 1000])
def test_draws_do_not_depend_on_precision_or_vmap(size):
    keys = jax.random.split(jax.random.key(0), 5)
    alone = one_permutation(keys[2], size)
    together = np.asarray(jax.jit(jax.vmap(lambda key: permutation(key, size)))(keys))
    np.testing.assert_array_equal(together[2], alone)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(one_permutation(keys[2], size), alone)


def samples(size, length, count, seed=0):
    keys = jax.random.split(jax.random.key(seed), count)
    draw = jax.jit(jax.vmap(lambda key: permutation(key, size, length)))
    with optimised():  # computes longer than it compiles
        return np.asarray(draw(keys))


def largest_z(counts, trials, probability):
    """Largest deviation in standard errors, and a bound for this number of cells.

    The bound is 4 standard errors for one cell, with a Bonferroni correction for more.
    """
    z = np.abs(counts - trials * probability) / np.sqrt(trials * probability * (1 - probability))
    cells = np.size(counts)
    return z.max(), np.sqrt(16 + 2 * np.log(cells))


@pytest.mark.parametrize("size", [5, slow_unless(False, 24), RANK_LIMIT + 1, 1000])
def test_values_are_uniform_at_every_position(size):
    values = samples(size, 3, 60_000)
    for place in range(3):
        counts = np.bincount(values[:, place], minlength=size)
        z, bound = largest_z(counts, len(values), 1 / size)
        assert z < bound, f"place {place}"


@pytest.mark.parametrize("size", [5, slow_unless(False, 24), RANK_LIMIT + 1])
def test_pairs_are_uniform(size):
    values = samples(size, 2, 200_000, seed=1).astype(np.int64)
    counts = np.bincount(values[:, 0] * size + values[:, 1], minlength=size * size)
    counts = counts.reshape(size, size)[~np.eye(size, dtype=bool)]
    z, bound = largest_z(counts, len(values), 1 / (size * (size - 1)))
    assert z < bound


@pytest.mark.parametrize("size", [RANK_LIMIT + 1, 1000])
def test_neighbours_do_not_stay_together(size):
    """Differences of neighbours are uniform, while a weak cipher would prefer some."""
    values = samples(size, 2, 200_000, seed=2).astype(np.int64)
    differences = (values[:, 1] - values[:, 0]) % size
    counts = np.bincount(differences, minlength=size)[1:]
    z, bound = largest_z(counts, len(values), 1 / (size - 1))
    assert z < bound


@pytest.mark.parametrize("size", [24, RANK_LIMIT + 1, slow_unless(False, 1000)])
def test_overlaps_of_cohorts_are_hypergeometric(size):
    """Counts the values below the middle in the first half of the positions."""
    half = size // 2
    inside = (samples(size, half, 20_000, seed=3) < half).sum(axis=1)
    p = half / size
    variance = half * p * (1 - p) * (size - half) / (size - 1)
    assert abs(inside.mean() - half * p) < 4 * np.sqrt(variance / len(inside))
    squared = (inside - half * p) ** 2
    assert abs(squared.mean() - variance) < 4 * squared.std() / np.sqrt(len(inside))


def test_fixed_points_and_cycles():
    """A random permutation has one fixed point on average, with variance one."""
    values = samples(1000, 1000, 4000, seed=4)
    fixed = (values == np.arange(1000)).sum(axis=1)
    assert abs(fixed.mean() - 1) < 4 / np.sqrt(len(fixed))
    assert abs(fixed.var() - 1) < 4 * np.sqrt(3 / len(fixed))  # Var of the sample variance: (4-1)/n


def test_no_array_is_as_large_as_the_population():
    """An array of a billion numbers would exhaust the memory."""
    values = one_permutation(jax.random.key(0), 10**9, 10)
    assert values.dtype == jnp.int32
    assert len(set(values.tolist())) == 10
    assert min(values.tolist()) >= 0
    assert max(values.tolist()) < 10**9


# Draws with a traced size


@functools.partial(jax.jit, static_argnums=1)
def words_of(seed, count):
    return jax.vmap(hash_words)(jax.random.split(jax.random.key(seed), count))


@jax.jit
def shuffled_by_seed(seed, size):
    return shuffled(hash_words(jax.random.key(seed)), jnp.arange(300 + 20), size)


@jax.jit
def drawn_by_seed(seed, size):
    return drawn(hash_words(jax.random.key(seed)), jnp.arange(64), size)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 300))
def test_a_traced_size_gives_a_permutation_padded_with_valid_values(seed, size):
    values = np.asarray(shuffled_by_seed(np.uint32(seed), size))
    assert sorted(values[:size].tolist()) == list(range(size))
    assert values.min() >= 0
    assert values.max() < size


@pytest.mark.parametrize(
    ("size", "per_order"),
    [
        *(slow_unless(size in (1, 2, 5), size, 200) for size in range(1, 6)),
        *(slow_unless(False, *each) for each in ((6, 100), (7, 60))),
    ],
)
def test_orders_of_small_sizes_are_uniform(size, per_order):
    """Chi-square over all size! orders is within 4 standard deviations of its mean."""
    orders = math.factorial(size)
    draw = jax.jit(jax.vmap(lambda w, n: shuffled(w, jnp.arange(size), n), (0, None)))
    values = np.asarray(draw(words_of(size, orders * per_order), size)).astype(np.int64)
    codes, counts = np.unique(values @ size ** np.arange(size), return_counts=True)
    assert len(codes) == orders
    chi_square, freedom = ((counts - per_order) ** 2 / per_order).sum(), orders - 1
    assert abs(chi_square - freedom) <= 4 * np.sqrt(2 * freedom) + 8 * (freedom > 0)


@pytest.mark.parametrize(
    "size", [1, 2, 7, 2**31 - 1, *(slow_unless(False, n) for n in (3, 100, 65_537))]
)
def test_traced_draws_are_uniform(size):
    """Counts in at most 100 cells, with counters instead of keys."""
    values = np.asarray(jax.jit(drawn)(words_of(1, 1)[0], jnp.arange(100_000), size))
    assert values.dtype == np.int32
    assert values.min() >= 0
    assert values.max() < size
    cells = min(size, 100)
    edges = np.ceil(np.arange(cells + 1) * (size / cells))
    counts = np.histogram(values, edges)[0]
    if cells > 1:
        probability = np.diff(edges) / size
        z = (counts - 1e5 * probability) / np.sqrt(1e5 * probability * (1 - probability))
        assert np.abs(z).max() < np.sqrt(16 + 2 * np.log(cells))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 2**31 - 1))
def test_draws_are_words_scaled_exactly(seed, size):
    """A draw is floor(word * size / 2^32). The draw of size 2^31 - 1 gives bounds on the word."""
    small, large = (
        np.asarray(drawn_by_seed(np.uint32(seed), most)).astype(object)
        for most in (size, 2**31 - 1)
    )
    for a, b in zip(small, large, strict=True):  # bounds on the word
        low, high = b * 2**32 // (2**31 - 1), (b + 1) * 2**32 // (2**31 - 1) + 1
        assert low * size >> 32 <= a <= high * size >> 32


def test_neighbouring_counters_and_keys_are_independent():
    words = words_of(2, 1)[0]
    values = np.asarray(jax.jit(drawn)(words, jnp.arange(100_001), 7)).astype(np.int64)
    pairs = np.bincount(values[:-1] * 7 + values[1:], minlength=49)
    z, bound = largest_z(pairs, 100_000, 1 / 49)
    assert z < bound * 1.1  # pairs overlap

    @jax.jit
    @jax.vmap
    def first_two(i):
        return shuffled(fold_words(words, i), jnp.arange(2), 7)

    first = np.asarray(first_two(jnp.arange(100_000)))
    pairs = first[:, 0] * 7 + first[:, 1]
    counts = np.bincount(pairs, minlength=49).reshape(7, 7)[~np.eye(7, dtype=bool)]
    z, bound = largest_z(counts, 100_000, 1 / 42)
    assert z < bound


@jax.jit
def both(words, size):
    return shuffled(words, jnp.arange(40), size), drawn(words, jnp.arange(40), size)


@pytest.mark.parametrize("size", [slow_unless(False, 5), 1000])
def test_traced_draws_do_not_depend_on_precision_or_vmap(size):
    words, sizes = words_of(3, 4), np.array([3, size, 77, 1])
    together = jax.device_get(jax.jit(jax.vmap(both))(words, sizes))
    second = jax.tree.map(lambda x: np.asarray(x)[1], words)
    alone = both(second, np.int32(size))
    with jax.enable_x64(True):
        double = both(second, np.int64(size))
    for a, b, c in zip(together, alone, double, strict=True):
        np.testing.assert_array_equal(a[1], b)
        np.testing.assert_array_equal(c, b)


def test_all_draws_have_different_keys():
    """Covers the start, rounds, models, clients, steps and jobs."""
    seed, models, few = jax.random.key(3), range(3), jnp.arange(3)
    found = [*keys.start_keys(seed, models), keys.assignment_key(keys.round_key(seed, 0))]
    found += map(keys.preparation_key, keys.start_keys(seed, models))
    found += [*keys.metrics_keys(keys.round_key(seed, 0), models)]
    for t in (1, 2):
        now = keys.round_key(seed, t)
        own, of_models = keys.assignment_key(now), keys.model_keys(now, models)
        clients = [keys.client_key(key, k) for key in of_models for k in few]
        found += [keys.groups_key(own), keys.processors_key(own)]
        found += [own, *of_models, *keys.metrics_keys(now, models), *clients]
        found += [*keys.model_keys(keys.delays_key(own), models)]
        found += [jax.random.fold_in(key, e) for key in clients for e in few]
        found += [jax.random.fold_in(keys.noise_key(key), i) for key in clients for i in few]
    for number in few:
        job = keys.job_key(seed, number)
        found += [keys.draw_key(job), keys.delay_key(job), keys.training_key(job)]
    numbers = np.asarray(jax.random.key_data(jnp.stack(found)))
    assert len(np.unique(numbers, axis=0)) == len(found)


def test_keys_depend_on_the_root_seed_and_on_the_number():
    words = [jax.random.key_data(keys.seed_keys(seed, [0, 1])) for seed in (0, 1)]
    assert len(np.unique(np.concatenate(words), axis=0)) == 4
