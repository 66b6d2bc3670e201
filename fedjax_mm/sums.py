"""Sums of contributions: start at zero, add a chunk of clients, finish.

Because the server only sees a sum, clients may be computed one by one, in chunks or all at once, in
the memory of one chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedjax_mm.base import Contribution, Params, Scalar


class SparseUpdate(NamedTuple):
    """The update ``scale * params + sum_i values[i] e_indices[i]`` of a flat parameter array.

    It may stand where an array of `params` would stand in `Contribution.update`. A client that
    touches few coordinates of a large model then costs what it touches, not what the model holds.
    The sum of such updates has no indices: its values are those of all coordinates.
    """

    scale: Float[Array, ""]
    indices: Int[Array, " block"] | tuple[()]
    values: Float[Array, " block"]


def _is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, SparseUpdate)


def scale_update(update: Any, factor: Scalar) -> Any:
    """The update times a number, sparse parts included."""

    def scale(leaf: Any) -> Any:
        if _is_sparse(leaf):
            return SparseUpdate(leaf.scale * factor, leaf.indices, leaf.values * factor)
        return leaf * factor

    return jax.tree.map(scale, update, is_leaf=_is_sparse)


def zero_sum(contribution: Contribution, params: Params) -> Contribution:
    """The empty sum. `contribution` need only have shapes (`jax.eval_shape`)."""

    def zeros(leaf: SparseUpdate, param: Array) -> SparseUpdate:
        return SparseUpdate(leaf.scale, (), jnp.zeros(param.shape, leaf.values.dtype))

    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), contribution)
    return zero._replace(update=_map_sparse(zeros, zero.update, params))


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
        if _is_sparse(leaf):
            values = total.values.at[leaf.indices].add(leaf.values)
            return SparseUpdate(total.scale + leaf.scale.sum(0), (), values)
        return total + leaf.sum(0, dtype=total.dtype)

    return jax.tree.map(add, total, jax.tree.map(select, chunk), is_leaf=_is_sparse)


def finish_sum(total: Contribution, params: Params) -> Contribution:
    """The sum with every sparse part written out as a dense array."""

    def dense(leaf: SparseUpdate, param: Array) -> Array:
        return leaf.scale * param + leaf.values

    return total._replace(update=_map_sparse(dense, total.update, params))


def _map_sparse(function: Callable[[Any, Array], Any], update: Any, params: Params) -> Any:
    """The update with a function of every sparse part and the parameters that it stands for."""
    if not any(map(_is_sparse, jax.tree.leaves(update, is_leaf=_is_sparse))):
        return update  # which need not look like the parameters

    def of_leaf(leaf: Any, param: Array) -> Any:
        return function(leaf, param) if _is_sparse(leaf) else leaf

    return jax.tree.map(of_leaf, update, params, is_leaf=_is_sparse)
