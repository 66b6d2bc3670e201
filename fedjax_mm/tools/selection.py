"""Sorting and selection adapted to the device.

XLA's sort compares one pair of numbers after the other on CPUs. There rows are sorted by a bitonic
network instead, each stage of which compares half of the rows with the other half by vector
instructions, and a single order statistic is found by bisection on the bits of numbers. Other
devices have fast sorts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

_MOST_ROWS = 512
"""The number of rows up to which networks are used, because their compile time grows."""

_COLUMNS = 2048
"""The number of columns that are sorted at once, so that they stay in the cache."""


@jax.custom_jvp
def sort_rows(x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """Equals ``jnp.sort(x, axis=0)``, except for the order of zeros of both signs.

    Example:
      >>> sort_rows(jnp.array([[3.0, 1.0], [jnp.nan, 0.0], [2.0, 5.0]])).tolist()
      [[2.0, 0.0], [3.0, 1.0], [nan, 5.0]]
    """
    if not _has_network(x):
        return jnp.sort(x, axis=0)
    return _by_columns(lambda block: _network(_padded(block)[None], _exceeds)[0, : len(x)], x)


@sort_rows.defjvp
def _sort_rows_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    order = argsort_rows(primals[0])
    found, tangent = (jnp.take_along_axis(x, order, axis=0) for (x,) in (primals, tangents))
    return found, tangent


def argsort_rows(x: Float[Array, "n d"]) -> Int[Array, "n d"]:
    """Equals ``jnp.argsort(x, axis=0)``, in which ties go to the lower row.

    Example:
      >>> argsort_rows(jnp.array([[3.0, 1.0], [2.0, 0.0], [2.0, 5.0]])).tolist()
      [[1, 1], [2, 0], [0, 2]]
    """
    if not _has_network(x):
        return jnp.argsort(x, axis=0)

    def sort(block: Array) -> Array:
        keys = _padded(block)
        rows = lax.broadcasted_iota(kind, keys.shape, 0)
        pairs = jnp.stack([lax.bitcast_convert_type(keys, kind), rows])
        return _network(pairs, partial(_exceeds_or_follows, x.dtype))[1, : len(x)]

    kind = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    return _by_columns(sort, x).astype(jnp.arange(0).dtype)


def kth_largest(values: Num[Array, " d"], k: int | Int[Array, ""]) -> Num[Array, ""]:
    """Equals ``jnp.sort(values)[d - k]`` for floats of positive sign and for unsigned integers.

    Example:
      >>> float(kth_largest(jnp.array([3.0, 4.0, 0.0, 12.0]), 2))
      4.0
    """
    if jax.default_backend() != "cpu":
        return jnp.sort(values)[values.size - k]
    # The bits of floats of positive sign, read as an integer, increase with the float.
    bits = lax.bitcast_convert_type(values, f"uint{8 * values.dtype.itemsize}")
    one = jnp.ones((), bits.dtype)
    most = 8 * values.dtype.itemsize - (not jnp.issubdtype(values.dtype, jnp.integer))

    def step(i: Array, found: Array) -> Array:
        larger = found | (one << (most - 1 - i).astype(bits.dtype))
        is_reached = jnp.sum(bits >= larger, dtype=jnp.int32) >= k
        return jnp.where(is_reached, larger, found)

    return lax.bitcast_convert_type(lax.fori_loop(0, most, step, one ^ one), values.dtype)


def _has_network(x: Array) -> bool:
    return jax.default_backend() == "cpu" and len(x) <= _MOST_ROWS


def _by_columns(sort: Callable[[Array], Array], x: Array) -> Array:
    rows, columns = x.shape
    if columns <= _COLUMNS:
        return sort(x)
    count = -(-columns // _COLUMNS)
    padded = jnp.pad(x, ((0, 0), (0, count * _COLUMNS - columns)))
    blocks = padded.reshape(rows, count, _COLUMNS).swapaxes(0, 1)
    return lax.map(sort, blocks).swapaxes(0, 1).reshape(rows, -1)[:, :columns]


def _padded(x: Array) -> Float[Array, "m d"]:
    """Rows, filled up to a power of two by NaNs, which come last."""
    size = 1 << (len(x) - 1).bit_length()
    return jnp.pad(x, ((0, size - len(x)), (0, 0)), constant_values=jnp.nan)


def _network(
    x: Num[Array, "k m d"], exceeds: Callable[[Array, Array], Array]
) -> Num[Array, "k m d"]:
    """Sorts rows of k arrays alike by Batcher's bitonic network, for m a power of two.

    The arrays are stacked, because XLA compiles a kernel for each array and stage.

    Args:
      x: the arrays.
      exceeds: whether numbers come after others, given k arrays of both.
    """
    k, m, d = x.shape
    for run in (2**i for i in range(1, m.bit_length())):  # the length of sorted runs
        for j in (run >> i for i in range(1, run.bit_length())):  # the distance of a pair
            # Two sorted runs are merged. The second is read backwards, so that runs are increasing.
            step = -1 if 2 * j == run else 1
            pairs = x.reshape(k, m // (2 * j), 2, j, d)
            first, second = pairs[:, :, 0], pairs[:, :, 1, ::step]
            is_swapped = exceeds(first, second)
            low, high = (
                jnp.where(is_swapped, *each) for each in ((second, first), (first, second))
            )
            x = jnp.stack([low, high[:, :, ::step]], axis=2).reshape(k, m, d)
    return x


def _exceeds(first: Array, second: Array) -> Array:
    a, b = first[0], second[0]
    return (a > b) | jnp.isnan(a)


def _exceeds_or_follows(dtype: Any, first: Array, second: Array) -> Array:
    a, b = (lax.bitcast_convert_type(x[0], dtype) for x in (first, second))
    is_above = (a > b) | (jnp.isnan(a) & ~jnp.isnan(b))
    is_below = (a < b) | (jnp.isnan(b) & ~jnp.isnan(a))
    return is_above | (~is_below & (first[1] > second[1]))
