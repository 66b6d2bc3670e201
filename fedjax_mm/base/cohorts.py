"""Cohorts, and their conversion to rows of slots, one per model, and back.

For static models the conversion is usually a reshape.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedjax_mm.base.calls import in_short

Numbers: TypeAlias = Int[Array, " slots"] | Int[np.ndarray, " slots"]
"""A number for each slot of a cohort."""

Places: TypeAlias = Int[Array, "models width"] | Int[np.ndarray, "models width"]
"""For each model, the numbers of its clients or slots."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Cohort:
    """Clients that train in a round, and the model that each of them trains.

    A NumPy array of models is static. If each model has a row of slots, as in `of_rows`, rows are
    computed in parallel. Static models are part of the pytree's structure, and stay static in
    states and in `jax.lax.cond`. Traced models cost one local training per slot, regardless of
    how clients are distributed over models.

    Attributes:
      clients: client indices; -1 in any slot is padding and contributes nothing. A client may train
        several models, each at most once.
      models: model indices; -1 is padding.
      scale: factors that multiply the clients' weights, such as 1/p in unbiased sampling; None
        means 1.
      num_gradients: all gradients of the round, including those computed to choose clients; None
        counts the cohort's gradients.
      takes_part: whether each client participates; None means all do. The others train and their
        gradients count, but their weight is 0.
      is_known: whether models are static.

    Example:
      >>> cohort = Cohort.of_rows(jnp.array([[4, -1], [0, 2]]))
      >>> cohort.clients.tolist(), cohort.models.tolist(), cohort.sizes(2).tolist()
      ([4, -1, 0, 2], [0, 0, 1, 1], [1, 2])
    """

    clients: Int[Array, " slots"] | Int[np.ndarray, " slots"]
    models: Int[Array, " slots"] | Int[np.ndarray, " slots"]
    scale: Float[Array, " slots"] | None = None
    num_gradients: Int[Array, " models"] | None = None
    takes_part: Bool[Array, " slots"] | None = None
    is_known: bool = dataclasses.field(init=False)

    __repr__ = in_short

    def __post_init__(self) -> None:
        """Stores whether models are static, because the type of the array may change later.

        For example, even traced models become NumPy arrays when a state is fetched from a device.
        """
        object.__setattr__(self, "is_known", isinstance(self.models, np.ndarray))

    @classmethod
    def of_rows(
        cls,
        clients: Int[Array, "models width"] | Int[np.ndarray, "models width"],
        scale: Float[Array, "models width"] | None = None,
        num_gradients: Int[Array, " models"] | None = None,
        takes_part: Bool[Array, "models width"] | None = None,
    ) -> Self:
        """Builds a cohort from one row of clients per model."""
        shape = getattr(clients, "shape", ())
        if len(shape) != 2:
            given = f"of shape {shape}" if shape else f"of type {type(clients).__name__}"
            raise ValueError(
                f"clients are {given}; give an array of one row for each model, as in "
                "clients[None] for one model"
            )
        models = np.repeat(np.arange(len(clients), dtype=np.int32), clients.shape[1])
        scale, takes_part = jax.tree.map(jnp.ravel, (scale, takes_part))
        return cls(clients.ravel(), models, scale, num_gradients, takes_part)

    def tree_flatten(self) -> tuple[tuple[Any, ...], bytes | None]:
        """Returns the arrays, and static models as bytes."""
        known = np.asarray(self.models, np.int32).tobytes() if self.is_known else None
        models = None if self.is_known else self.models
        return (self.clients, models, self.scale, self.num_gradients, self.takes_part), known

    @classmethod
    def tree_unflatten(cls, models: bytes | None, fields: Sequence[Any]) -> Self:
        """Rebuilds the cohort from its leaves, which JAX may have replaced by other objects."""
        cohort, (clients, given, *rest) = object.__new__(cls), fields
        given = given if models is None else np.frombuffer(models, np.int32)
        names = [field.name for field in dataclasses.fields(cls)]
        for name, value in zip(names, (clients, given, *rest, models is not None), strict=True):
            object.__setattr__(cohort, name, value)
        return cohort

    def participates(self) -> Bool[Array, " slots"]:
        """Returns, for each slot, whether its client participates."""
        is_there = (jnp.asarray(self.clients) >= 0) & (self.models >= 0)
        return is_there if self.takes_part is None else is_there & self.takes_part

    def sizes(self, num_models: int) -> Int[Array, " models"]:
        """Number of participants of each model."""
        counted = self.participates().astype(jnp.int32)
        width = len(counted) // num_models
        rows = np.repeat(np.arange(num_models), width)
        if self.is_known and np.array_equal(self.models, rows):
            return counted.reshape(num_models, width).sum(1)
        return jnp.zeros(num_models, jnp.int32).at[self.models].add(counted, mode="drop")


class Sampling(NamedTuple):
    """How an assignment samples clients independently of their data.

    Privacy accounting uses this.

    Attributes:
      most_models: the maximum number of models that a client trains in a round, each once.
      rate: the maximum probability that a client participates in a round, if clients and rounds are
        independent; otherwise 1, which is always valid.
      cohort_size: the maximum number of participants per round, if they are a uniform subset that
        is redrawn every round; otherwise None.
    """

    most_models: int
    rate: float = 1.0
    cohort_size: int | None = None


def places_of(
    clients: Numbers, models: Numbers, num_models: int, width: int | None = None
) -> Places:
    """Slots of each model, in order, as rows padded with -1.

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
    # Padding gets a row that is out of range and thus dropped. -1 would write to the last model.
    row = jnp.where((clients >= 0) & (models >= 0), models, num_models)
    mine = row[:, None] == jnp.arange(num_models)
    before = jnp.take_along_axis(jnp.cumsum(mine, axis=0), models[:, None], axis=1)[:, 0] - 1
    empty = jnp.full((num_models, width or len(models)), -1, jnp.int32)
    return empty.at[row, before].set(slots, mode="drop")


def _is_reshape(places: Places) -> bool:
    return isinstance(places, np.ndarray) and bool((places.ravel() == np.arange(places.size)).all())


def by_rows(tree: Any, places: Places) -> Any:
    """Gathers arrays ``[slots, ...]`` into rows ``[models, width, ...]``, padded with -1."""
    if _is_reshape(places):
        return jax.tree.map(lambda x: x.reshape(*places.shape, *x.shape[1:]), tree)
    # Only an out-of-range index gets the fill value. -1 would read the last slot.
    where = jnp.where(places >= 0, places, jnp.iinfo(jnp.int32).max)

    def get(x: Array) -> Array:
        return x.at[where].get(mode="fill", fill_value=False if x.dtype == bool else -1)

    return jax.tree.map(get, tree)


def by_slots(tree: Any, places: Places, num_slots: int) -> Any:
    """Scatters rows ``[models, width, ...]`` to arrays ``[slots, ...]``, zero in other slots."""

    def put(x: Array) -> Array:
        flat = x.reshape(places.size, *x.shape[2:])
        if _is_reshape(places):
            return flat
        where = jnp.where(places >= 0, places, num_slots).ravel()
        return jnp.zeros((num_slots, *flat.shape[1:]), flat.dtype).at[where].set(flat, mode="drop")

    return jax.tree.map(put, tree)
