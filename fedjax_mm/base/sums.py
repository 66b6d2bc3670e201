"""Sums of contributions: `zero_sum`, then `add_chunk` per chunk, then `finish_sum`.

The server sees only a sum, so clients can be computed one by one, in chunks or all at once, using
the memory of a single chunk. Only a `Stacked` update is not summed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedjax_mm.base import Contribution, Params, Scalar

__all__ = ["SparseUpdate", "Stacked"]


class SparseUpdate(NamedTuple):
    """The update ``scale * params + sum_i values[i] e_indices[i]`` of a flat parameter array.

    It may replace an array in `Contribution.update`, so that a client that changes few coordinates
    of a large model takes time and memory only for these. A sum of such updates has a value for
    every coordinate and no indices.
    """

    scale: Float[Array, ""]
    indices: Int[Array, " block"] | tuple[()]
    values: Float[Array, " block"]


class Stacked(NamedTuple):
    """An update that is not summed: the server gets those of all slots, along a first axis.

    It replaces the whole `Contribution.update`, for servers that need more than a sum, such as a
    median. The server's ``total.update`` then has arrays ``[slots, ...]``, with one slot for each
    client of the model in the cohort, and takes as much memory; ``total.weight`` is still a sum.

    Attributes:
      update: a pytree of dense arrays. Only its size counts as uploaded.
      weight: the client's weight.
      client: the client, or -1 if it does not participate. In slots that are padding it is -1, and
        the other arrays have any values.
    """

    update: Any
    weight: Float[Array, "*slots"]
    client: Int[Array, "*slots"]


class Joint(NamedTuple):
    """An update and a factor whose sums the server multiplies, so that no wrapper may change them.

    Attributes:
      update: a pytree of arrays or `SparseUpdate`s.
      factor: a number of the client.
    """

    update: Any
    factor: Float[Array, ""]


def unstacked(contribution: Contribution) -> tuple[Contribution, Stacked | tuple[()]]:
    """Splits a contribution into the part that is summed and the update that is not."""
    update = contribution.update
    return (contribution._replace(update=()), update) if is_stacked(update) else (contribution, ())


def is_stacked(update: Any) -> bool:
    """Whether an update is stacked, rather than summed."""
    return isinstance(update, Stacked)


def is_sparse(leaf: Any) -> bool:
    """Whether a part of an update is sparse."""
    return isinstance(leaf, SparseUpdate)


def as_arrays(contribution: Contribution) -> Contribution:
    """Converts the two numbers that a client sends to arrays."""
    weight, number = jnp.asarray(contribution.weight), contribution.num_gradients
    return contribution._replace(weight=weight, num_gradients=jnp.asarray(number, jnp.int32))


def scale_update(update: Any, factor: Scalar) -> Any:
    """Multiplies an update by a number, including its sparse parts."""

    def scale(leaf: Any) -> Any:
        if is_sparse(leaf):
            return SparseUpdate(leaf.scale * factor, leaf.indices, leaf.values * factor)
        return leaf * factor

    return jax.tree.map(scale, update, is_leaf=is_sparse)


def root(square: Array) -> Array:
    """Square root with derivative 0 instead of NaN at 0, for example for an update's norm.

    Example:
      >>> jax.grad(root)(0.0).item(), root(jnp.array(4.0)).item()
      (0.0, 2.0)
    """
    is_positive = square > 0
    # The gradient of a dropped value must be finite, so replace 0 inside the root too. The product
    # keeps NaN.
    return jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, square, 1)), 0 * square)


def zero_sum(contribution: Contribution, params: Params) -> Contribution:
    """Zero sum with the shapes and types of `contribution`."""

    def zeros(leaf: SparseUpdate, param: Array) -> SparseUpdate:
        return SparseUpdate(leaf.scale, (), jnp.zeros(param.shape, leaf.values.dtype))

    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), contribution)
    return zero._replace(update=_map_sparse(zeros, zero.update, params))


def add_chunk(
    total: Contribution,
    chunk: Contribution,
    present: Bool[Array, " chunk"],
    *rows: Int[Array, " chunk"],
) -> Contribution:
    """Adds the contributions ``[chunk, ...]`` of present clients to the sum.

    With rows, such as the clients' models, there is one sum per row.
    """

    def select(leaf: Array) -> Array:
        # 0 * NaN is NaN. Select zeros for absent clients.
        mask = present.reshape(present.shape + (1,) * (leaf.ndim - 1))
        return jnp.where(mask, leaf, jnp.zeros_like(leaf))

    def add(total: Any, leaf: Any) -> Any:
        if is_sparse(leaf):
            place = (*(row[:, None] for row in rows), leaf.indices)
            values = total.values.at[place].add(leaf.values)
            return SparseUpdate(add(total.scale, leaf.scale), (), values)
        if not rows:
            return total + leaf.sum(0, dtype=total.dtype)
        return total.at[rows].add(leaf.astype(total.dtype))

    return jax.tree.map(add, total, jax.tree.map(select, chunk), is_leaf=is_sparse)


def finish_sum(total: Contribution, params: Params) -> Contribution:
    """Converts the sparse parts of a sum to dense arrays."""

    def dense(leaf: SparseUpdate, param: Array) -> Array:
        return leaf.scale * param + leaf.values

    return total._replace(update=_map_sparse(dense, total.update, params))


def dense_update(contribution: Contribution, params: Params) -> Contribution:
    """Converts the sparse parts of a contribution's update to dense arrays.

    Raises:
      ValueError: if the update is `Stacked`, because nothing may change it as one update.
    """
    if is_stacked(contribution.update):
        raise ValueError(
            "the server gets the updates of all clients, not their sum; apply wrappers of the "
            "updates before, as in robust(compressed(algorithm, compressor), rule)"
        )
    alone = jax.tree.map(lambda x: x[None], contribution)
    total = add_chunk(zero_sum(contribution, params), alone, jnp.ones(1, bool))
    return contribution._replace(update=finish_sum(total, params).update)


def with_update(
    contribution: Contribution, params: Params, change: Callable[[Any], Any]
) -> Contribution:
    """Changes a client's dense update, whether it will be summed or stacked."""
    update = contribution.update
    if is_stacked(update):
        return contribution._replace(update=update._replace(update=change(update.update)))
    sent = dense_update(contribution, params)
    return sent._replace(update=change(sent.update))


def _map_sparse(function: Callable[[Any, Array], Any], update: Any, params: Params) -> Any:
    # Do not map over both. A dense update may differ from the parameters in structure.
    if not any(map(is_sparse, jax.tree.leaves(update, is_leaf=is_sparse))):
        return update

    def of_leaf(leaf: Any, param: Array) -> Any:
        return function(leaf, param) if is_sparse(leaf) else leaf

    return jax.tree.map(of_leaf, update, params, is_leaf=is_sparse)
