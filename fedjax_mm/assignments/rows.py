"""Rows of groups, from choices client by client."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class Pairs(NamedTuple):
    """Choices of a round, one after the other.

    Attributes:
      clients: client numbers, of which -1 is nobody.
      models: the model that each of them trains.
    """

    clients: Int[Array, "*choices"]
    models: Int[Array, "*choices"]


def rows_of(pairs: Pairs, num_models: int, width: int) -> Int[Array, "models width"]:
    """Returns each model's clients in the order of their choice; -1 fills the rows up.

    Clients stand at the front, so that chunks of padding can be skipped.

    Args:
      pairs: a model has at most `width` of them.
      num_models: M.
      width: of the rows.

    Example:
      >>> rows_of(Pairs(jnp.array([4, -1, 2, 0]), jnp.array([1, 0, 1, 0])), 2, 3).tolist()
      [[0, -1, -1], [4, 2, -1]]
    """
    clients, models = pairs
    mine = (models[:, None] == jnp.arange(num_models)) & (clients >= 0)[:, None]
    place = jnp.take_along_axis(jnp.cumsum(mine, axis=0), models[:, None], axis=1)[:, 0] - 1
    # Nobody's place may be -1, which is the last one: a row out of range is dropped.
    row = jnp.where(clients >= 0, models, num_models)
    empty = jnp.full((num_models, width), -1, jnp.int32)
    return empty.at[row, place].set(clients.astype(jnp.int32), mode="drop")
