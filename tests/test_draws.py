"""Random orders: permutations always, uniform by statistics at 4 standard errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_mm.draws import RANK_LIMIT, permutation

# Both ways of drawing, on both sides of their border; 1000 = 32 * 32 - 24 needs walking.
SIZES = [1, 2, 3, 24, RANK_LIMIT, RANK_LIMIT + 1, 1000]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from(SIZES))
def test_is_a_permutation(seed, size):
    assert sorted(permutation(jax.random.key(seed), size).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [24, 1000])
def test_a_shorter_draw_is_a_prefix(size):
    whole = permutation(jax.random.key(3), size)
    np.testing.assert_array_equal(permutation(jax.random.key(3), size, 7), whole[:7])


@pytest.mark.parametrize("size", [24, 1000])
def test_draws_do_not_depend_on_precision_or_company(size):
    keys = jax.random.split(jax.random.key(0), 5)
    alone = permutation(keys[2], size)
    np.testing.assert_array_equal(jax.vmap(lambda key: permutation(key, size))(keys)[2], alone)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(permutation(keys[2], size), alone)


def samples(size, length, count, seed=0):
    keys = jax.random.split(jax.random.key(seed), count)
    draw = jax.jit(jax.vmap(lambda key: permutation(key, size, length)))
    return np.asarray(draw(keys))


def largest_z(counts, trials, probability):
    """The largest deviation in standard errors, and the bound for that many cells.

    4 standard errors for one cell; a Bonferroni correction keeps the same error for many.
    """
    z = np.abs(counts - trials * probability) / np.sqrt(trials * probability * (1 - probability))
    cells = np.size(counts)
    return z.max(), np.sqrt(16 + 2 * np.log(cells))


@pytest.mark.parametrize("size", [5, 24, RANK_LIMIT + 1, 1000])
def test_every_value_is_as_likely_at_every_place(size):
    drawn = samples(size, 3, 60_000)
    for place in range(3):
        counts = np.bincount(drawn[:, place], minlength=size)
        z, bound = largest_z(counts, len(drawn), 1 / size)
        assert z < bound, f"place {place}"


@pytest.mark.parametrize("size", [5, 24, RANK_LIMIT + 1])
def test_every_pair_is_as_likely(size):
    drawn = samples(size, 2, 200_000, seed=1).astype(np.int64)
    counts = np.bincount(drawn[:, 0] * size + drawn[:, 1], minlength=size * size)
    counts = counts.reshape(size, size)[~np.eye(size, dtype=bool)]
    z, bound = largest_z(counts, len(drawn), 1 / (size * (size - 1)))
    assert z < bound


@pytest.mark.parametrize("size", [RANK_LIMIT + 1, 1000])
def test_neighbours_do_not_stay_together(size):
    """Differences of consecutive places are uniform; a weak cipher would prefer some."""
    drawn = samples(size, 2, 200_000, seed=2).astype(np.int64)
    differences = (drawn[:, 1] - drawn[:, 0]) % size
    counts = np.bincount(differences, minlength=size)[1:]
    z, bound = largest_z(counts, len(drawn), 1 / (size - 1))
    assert z < bound


@pytest.mark.parametrize("size", [24, RANK_LIMIT + 1, 1000])
def test_cohorts_overlap_as_hypergeometric(size):
    """How many of the first half of the values fall into the first half of the places."""
    half = size // 2
    inside = (samples(size, half, 20_000, seed=3) < half).sum(axis=1)
    p = half / size
    variance = half * p * (1 - p) * (size - half) / (size - 1)
    assert abs(inside.mean() - half * p) < 4 * np.sqrt(variance / len(inside))
    squared = (inside - half * p) ** 2
    assert abs(squared.mean() - variance) < 4 * squared.std() / np.sqrt(len(inside))


def test_fixed_points_and_cycles():
    """A random permutation has one fixed point on average, with variance one."""
    drawn = samples(1000, 1000, 4000, seed=4)
    fixed = (drawn == np.arange(1000)).sum(axis=1)
    assert abs(fixed.mean() - 1) < 4 / np.sqrt(len(fixed))
    assert abs(fixed.var() - 1) < 4 * np.sqrt(3 / len(fixed))  # Var of the sample variance: (4-1)/n


def test_a_large_cohort_costs_only_itself():
    """Ten of a billion clients: no array of a billion is made."""
    drawn = permutation(jax.random.key(0), 10**9, 10)
    assert drawn.dtype == jnp.int32
    assert len(set(drawn.tolist())) == 10
    assert min(drawn.tolist()) >= 0
    assert max(drawn.tolist()) < 10**9
