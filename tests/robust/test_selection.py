"""Sorting by networks, and selection on bits, against XLA's sorts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm.compression import top_k
from fedjax_mm.robust import krum, multi_krum, nearest_neighbor_mixing, trimmed_mean
from fedjax_mm.tools.selection import argsort_rows, kth_largest, sort_rows


def check_rows(x):
    np.testing.assert_array_equal(jax.jit(sort_rows)(x), jnp.sort(x, axis=0))
    np.testing.assert_array_equal(jax.jit(argsort_rows)(x), jnp.argsort(x, axis=0))


def rows(n, d, seed=0):
    """Numbers with ties, infinities and NaNs."""
    rng = np.random.default_rng(seed)
    values = [-np.inf, -1.5, -0.0, 0.0, 1.0, 2.0, 1e30, np.inf, np.nan]
    return jnp.asarray(np.where(rng.random((n, d)) < 0.5, rng.choice(values, (n, d)), 0.1 * n))


@pytest.mark.parametrize("n", [1, 2, 5, 11])
def test_networks_are_stable_sorts(n):
    check_rows(rows(n, 3))


def test_columns_are_sorted_in_blocks():
    check_rows(rows(3, 2500))


def test_gradients_of_a_sort_go_to_the_lower_of_tied_rows():
    x, factors = rows(5, 4, seed=2), jnp.arange(20.0).reshape(5, 4)
    found = jax.grad(lambda x: jnp.sum(sort_rows(x) * factors))(x)
    wanted = jax.grad(lambda x: jnp.sum(jnp.sort(x, axis=0) * factors))(x)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint32", "bfloat16"])
def test_order_statistics_are_found_on_bits(dtype, x64):
    rng = np.random.default_rng(0)
    values = rng.choice([0, 1, 2, 3, 2**31], 40)
    if dtype != "uint32":
        values = np.where(rng.random(40) < 0.5, 1e-30, np.where(values == 3, np.inf, values))
        values[7] = np.nan
    values = jnp.asarray(values, dtype)
    found = jax.jit(jax.vmap(kth_largest, (None, 0)))(values, jnp.arange(1, 41))
    np.testing.assert_array_equal(found.astype(float), jnp.sort(values)[::-1].astype(float))


def test_tied_coordinates_with_the_lower_index_are_kept():
    vector = jnp.array([1.0, -2, 2, 0, -2, 2, 1, 3])
    wanted = [0, -2, 2, 0, 0, 0, 0, 3]
    assert jax.jit(lambda v: top_k(0.375).compress(None, v))(vector).tolist() == wanted


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_tied_updates_with_the_lower_slot_are_kept(offset):
    """The scores are equal, and those from rounded matrix products are not."""
    angles = 2 * np.pi * np.arange(8) / 8
    circle = np.stack([np.round(3 * np.cos(angles)), np.round(3 * np.sin(angles))], 1)
    x = jnp.asarray(circle[[0, 2, 4, 6]].repeat(2, 0) + offset, jnp.float32)
    ones, here = jnp.ones(8), jnp.ones(8, bool)

    def of(rule):
        return jax.jit(lambda x: rule.aggregate(None, x, ones, here, ())[0])(x)

    np.testing.assert_array_equal(of(krum(1)), x[0])
    np.testing.assert_array_equal(of(multi_krum(1, num_selected=2)), x[0])
    mixed = of(nearest_neighbor_mixing(trimmed_mean(0), 5))  # three of four tied neighbors
    own = np.asarray([[x[j] for j in nearest(x, i, 3)] for i in range(8)]).mean((0, 1))
    np.testing.assert_allclose(mixed, own, rtol=1e-6, atol=1e-6)


def nearest(x, i, number):
    return np.argsort(np.sum((x - x[i]) ** 2, axis=1), kind="stable")[:number]
