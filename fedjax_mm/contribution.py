"""Sums of contributions: start at zero, add a chunk of clients, finish.

Because the server only sees a sum, clients may be computed one by one, in chunks or all at once, in
the memory of one chunk.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedjax_mm.base import Contribution, Params, Scalar, SparseUpdate


class _SparseSum(NamedTuple):
    """The sum of many `SparseUpdate`s of one parameter array."""

    scale: Float[Array, ""]
    values: Float[Array, "*shape"]


def _is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, SparseUpdate | _SparseSum)


def scale_update(update: Any, factor: Scalar) -> Any:
    """The update times a number, sparse parts included."""

    def scale(leaf: Any) -> Any:
        if isinstance(leaf, SparseUpdate):
            return SparseUpdate(leaf.scale * factor, leaf.indices, leaf.values * factor)
        return leaf * factor

    return jax.tree.map(scale, update, is_leaf=_is_sparse)


def dense_update(update: Any, params: Params) -> Any:
    """The update with every sparse part written out as a dense array."""

    def dense(leaf: Any, param: Array) -> Array:
        return leaf.scale * param + jnp.zeros_like(param).at[leaf.indices].add(leaf.values)

    if not any(map(_is_sparse, jax.tree.leaves(update, is_leaf=_is_sparse))):
        return update
    return jax.tree.map(
        lambda leaf, param: dense(leaf, param) if _is_sparse(leaf) else leaf,
        update,
        params,
        is_leaf=_is_sparse,
    )


def zero_sum(contribution: Contribution, params: Params) -> Contribution:
    """The empty sum. `contribution` need only have shapes (`jax.eval_shape`)."""

    def zeros(leaf: Any) -> Array:
        return jnp.zeros(leaf.shape, leaf.dtype)

    def sparse_zeros(leaf: Any, param: Array) -> Any:
        if isinstance(leaf, SparseUpdate):
            return _SparseSum(zeros(leaf.scale), jnp.zeros(param.shape, leaf.values.dtype))
        return zeros(leaf)

    total = contribution
    if any(map(_is_sparse, jax.tree.leaves(contribution.update, is_leaf=_is_sparse))):
        update = jax.tree.map(sparse_zeros, contribution.update, params, is_leaf=_is_sparse)
        total = total._replace(update=update)
    return jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, _SparseSum) else zeros(leaf),
        total,
        is_leaf=_is_sparse,
    )


def add_chunk(
    total: Contribution, chunk: Contribution, present: Bool[Array, " chunk"]
) -> Contribution:
    """Adds contributions stacked along a leading chunk axis; absent clients add nothing.

    Absent clients are selected away, not multiplied by 0, because 0 * NaN is NaN.
    """

    def select(leaf: Array) -> Array:
        mask = present.reshape(present.shape + (1,) * (leaf.ndim - 1))
        return jnp.where(mask, leaf, jnp.zeros_like(leaf))

    def add(total: Any, leaf: Any) -> Any:
        if isinstance(leaf, SparseUpdate):
            values = total.values.at[leaf.indices].add(leaf.values)
            return _SparseSum(total.scale + leaf.scale.sum(0), values)
        return total + leaf.sum(0, dtype=total.dtype)

    return jax.tree.map(add, total, jax.tree.map(select, chunk), is_leaf=_is_sparse)


def finish_sum(total: Contribution, params: Params) -> Contribution:
    """The sum with every sparse part written out as a dense array."""

    def dense(leaf: Any, param: Array) -> Array:
        return leaf.scale * param + leaf.values if isinstance(leaf, _SparseSum) else leaf

    if not any(map(_is_sparse, jax.tree.leaves(total.update, is_leaf=_is_sparse))):
        return total
    return total._replace(update=jax.tree.map(dense, total.update, params, is_leaf=_is_sparse))
