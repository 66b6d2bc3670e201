"""Converts cohorts to rows of slots, one per model, and back.

For static models this is usually a reshape.
"""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

Numbers: TypeAlias = Int[Array, " slots"] | Int[np.ndarray, " slots"]
Places: TypeAlias = Int[Array, "models width"] | Int[np.ndarray, "models width"]


def places_of(
    clients: Numbers, models: Numbers, num_models: int, width: int | None = None
) -> Places:
    """Returns the slots of each model, in order, as rows padded with -1.

    Padding comes last, so that chunks of padding can be skipped. The result is a NumPy array if
    `models` is.

    Args:
      clients: client indices; negative ones are padding.
      models: the model that each client trains; negative ones are padding.
      num_models: M.
      width: for traced models, the width of rows, an upper bound on a model's clients; defaults to
        the number of slots.

    Example:
      >>> clients, models = jnp.array([4, -1, 2, 0]), jnp.array([1, 0, 1, 0])
      >>> places_of(clients, models, 2, 3).tolist()
      [[3, -1, -1], [0, 2, -1]]
      >>> places_of(clients, np.array([0, 0, 1, 1]), 2).tolist()
      [[0, 1], [2, 3]]
    """
    if isinstance(models, np.ndarray):
        each = [np.flatnonzero(models == model) for model in range(num_models)]
        longest = max(map(len, each))
        return np.stack([np.pad(x, (0, longest - len(x)), constant_values=-1) for x in each])
    slots = jnp.arange(len(models), dtype=jnp.int32)
    # Use a row that is out of range and thus dropped, because -1 would write to the last model.
    row = jnp.where((clients >= 0) & (models >= 0), models, num_models)
    mine = row[:, None] == jnp.arange(num_models)
    before = jnp.take_along_axis(jnp.cumsum(mine, axis=0), models[:, None], axis=1)[:, 0] - 1
    empty = jnp.full((num_models, width or len(models)), -1, jnp.int32)
    return empty.at[row, before].set(slots, mode="drop")


def _is_reshape(places: Places) -> bool:
    return isinstance(places, np.ndarray) and bool((places.ravel() == np.arange(places.size)).all())


def by_rows(tree: Any, places: Places) -> Any:
    """Returns arrays ``[models, width, ...]`` from arrays ``[slots, ...]``, padded with -1."""
    if _is_reshape(places):
        return jax.tree.map(lambda x: x.reshape(*places.shape, *x.shape[1:]), tree)
    # Use an out-of-range index to get the fill value, because -1 would read the last slot.
    where = jnp.where(places >= 0, places, jnp.iinfo(jnp.int32).max)

    def get(x: Array) -> Array:
        return x.at[where].get(mode="fill", fill_value=False if x.dtype == bool else -1)

    return jax.tree.map(get, tree)


def by_slots(tree: Any, places: Places, num_slots: int) -> Any:
    """Returns arrays ``[slots, ...]`` from arrays ``[models, width, ...]``, zero in other slots."""

    def put(x: Array) -> Array:
        flat = x.reshape(places.size, *x.shape[2:])
        if _is_reshape(places):
            return flat
        where = jnp.where(places >= 0, places, num_slots).ravel()
        return jnp.zeros((num_slots, *flat.shape[1:]), flat.dtype).at[where].set(flat, mode="drop")

    return jax.tree.map(put, tree)
