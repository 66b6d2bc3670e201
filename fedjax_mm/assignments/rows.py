"""Rows of groups, from a list of clients and their models."""

import jax.numpy as jnp
from jaxtyping import Array

from fedjax_mm.base import Groups


def in_rows(groups: Groups, num_models: int, width: int | None = None) -> Groups:
    """Returns a list's groups as rows, in the order of the list; -1 fills them up.

    Clients stand at the front, so that chunks of padding can be skipped. Rows stay as they are.

    Args:
      groups: a model has at most `width` clients.
      num_models: M.
      width: of the rows; by default the length of the list.

    Example:
      >>> listed = Groups(jnp.array([4, -1, 2, 0]), models=jnp.array([1, 0, 1, 0]))
      >>> in_rows(listed, 2, 3).clients.tolist()
      [[0, -1, -1], [4, 2, -1]]
    """
    clients, models = groups.clients, groups.models
    if models is None:
        return groups
    mine = (models[:, None] == jnp.arange(num_models)) & (clients >= 0)[:, None]
    place = jnp.take_along_axis(jnp.cumsum(mine, axis=0), models[:, None], axis=1)[:, 0] - 1
    # Nobody's place may be -1, which is the last one: a row out of range is dropped.
    row = jnp.where(clients >= 0, models, num_models)

    def put(values: Array, fill: float) -> Array:
        shape = num_models, len(clients) if width is None else width
        empty = jnp.full(shape, fill, values.dtype)
        return empty.at[row, place].set(values, mode="drop")

    scale = None if groups.scale is None else put(groups.scale, 0)
    return Groups(put(clients.astype(jnp.int32), -1), scale, groups.num_gradients)
