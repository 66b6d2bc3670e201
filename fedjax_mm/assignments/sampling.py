"""Uniform draws of cohorts, without replacement."""

import dataclasses
import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from fedjax_mm.base import Cohort, Look, Padded, Sampling, keys
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import Count, TracedCount, check_argument


def uniform_sampling(num_clients: int, cohort_size: int) -> Sampling:
    """Sampling law of a uniform cohort that is redrawn every round."""
    return Sampling(1, cohort_size=cohort_size if cohort_size < num_clients else None)


def draw_cohort(
    rng_key: PRNGKeyArray, num_clients: int, num_models: int | Padded, cohort_size: int
) -> Cohort:
    """Draws a uniform cohort, splits it into M near-equal groups and matches them to models.

    If the number of models is padded, the models are traced.
    """
    cohort_key, order_key = jax.random.split(rng_key)
    cohort = permutation(cohort_key, num_clients, cohort_size)
    if isinstance(num_models, Padded):
        group = part_of(jnp.arange(cohort_size, dtype=jnp.int32), cohort_size, num_models.number)
        order = permutation(order_key, num_models)
        models = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32))
        is_equal = cohort_size % num_models.number == 0
        return Cohort(cohort, jnp.where(is_equal, group, models[group]))
    # Groups of equal size need no shuffled models. The shuffled clients are already matched to
    # models at random.
    if cohort_size % num_models == 0:
        return Cohort.of_rows(cohort.reshape(num_models, -1))
    slots = _padded_slots(cohort_size, num_models)
    groups = jnp.where(slots >= 0, cohort[slots], -1)
    return Cohort.of_rows(groups[permutation(order_key, num_models)])


class Dealt(NamedTuple):
    """Active models, which are numbered first while clients are dealt to them.

    Attributes:
      number: their number, at least 1.
      models: all models, the active ones first.
      active: whether each model is active.
    """

    number: Int[Array, ""]
    models: Int[Array, " models"]
    active: Bool[Array, " models"]

    @classmethod
    def to(cls, active: Bool[Array, " models"]) -> Self:
        """Numbers the active models."""
        order = jnp.argsort(~active, stable=True).astype(jnp.int32)
        return cls(jnp.maximum(jnp.sum(active, dtype=jnp.int32), 1), order, active)

    @property
    def padded(self) -> Padded:
        """The number of active models, bounded by M."""
        return Padded(len(self.models), self.number)

    def named(self, cohort: Cohort) -> Cohort:
        """Replaces numbers from 0 on by the active models."""
        return self.masked(dataclasses.replace(cohort, models=self.models[cohort.models]))

    def masked(self, cohort: Cohort) -> Cohort:
        """Leaves out the clients of inactive models."""
        clients = jnp.where(self.active[cohort.models], cohort.clients, -1)
        return dataclasses.replace(cohort, clients=clients)


def dealt_to(num_models: int | Padded, look: Look) -> Dealt | None:
    """The active models, or None if all always are.

    Raises:
      ValueError: if models come and go, and their number is padded.
    """
    active = look.active()
    if active is None:
        return None
    if isinstance(num_models, Padded):
        raise ValueError("num_models is padded, but models arrive or finish; give a fixed number")
    return Dealt.to(active)


def add_models(
    rng_key: PRNGKeyArray,
    cohort: Cohort,
    num_trained: Int[np.ndarray, " clients"],
    most_models: int,
    number: int | Int[Array, ""],
    num_slots: int,
) -> Cohort:
    """Assigns more models to each client, until client k trains ``min(num_trained[k], M)``."""
    shape = len(cohort.clients), most_models
    # XLA takes ten times longer to compile a draw with two axes than a flat one.
    words = jax.random.bits(keys.processors_key(rng_key), (math.prod(shape),), jnp.uint32)
    # Order the models at random for each client, with its group's model first.
    models = jnp.broadcast_to(jnp.arange(most_models, dtype=jnp.int32), shape)
    is_other = models != jnp.asarray(cohort.models)[:, None]
    order = jnp.lexsort((words.reshape(shape), models >= number, is_other), axis=1).astype(
        jnp.int32
    )
    order = order[:, : num_trained.max()].T
    num_own = jnp.minimum(jnp.asarray(num_trained, jnp.int32)[cohort.clients], number)
    is_trained = jnp.arange(len(order), dtype=jnp.int32)[:, None] < num_own
    clients = jnp.where(is_trained, cohort.clients, -1).ravel()
    # Move padding to the end, and drop slots that no cohort can need.
    slots = jnp.argsort(clients < 0, stable=True)[:num_slots]
    return Cohort(clients[slots], order.ravel()[slots])


def part_of(
    places: Int[Array, " places"], size: int, number: int | Int[Array, ""]
) -> Int[Array, " places"]:
    """Index of each place's part in a split of `size` places.

    The parts are near-equal, and larger ones come first, as in `numpy.array_split`.
    """
    least, num_larger = size // number, size % number
    up_to = num_larger * (least + 1)
    smaller = num_larger + (places - up_to) // least
    return jnp.where(places < up_to, places // (least + 1), smaller).astype(jnp.int32)


def _padded_slots(cohort_size: int, num_models: int) -> Int[np.ndarray, "models group"]:
    """Positions in the cohort, group by group, with smaller groups padded with -1."""
    parts = np.array_split(np.arange(cohort_size, dtype=np.int32), num_models)
    width = len(parts[0])
    return np.stack([np.pad(part, (0, width - len(part)), constant_values=-1) for part in parts])


def cohort_sizes(
    num_clients: int, num_models: int | Padded, cohort_size: int | None
) -> tuple[int, Any, int]:
    """Checks the sizes, and returns the static bound on M, the possibly traced M, and K."""
    if not isinstance(num_models, Padded):
        return num_models, num_models, checks.check_sizes(num_clients, num_models, cohort_size)
    size = check_argument("num_models", num_models.size, Count)
    number = check_argument("num_models", num_models.number, TracedCount)
    cohort_size = checks.check_sizes(num_clients, size, cohort_size)
    if isinstance(number, int):
        checks.check_between("num_models", number, 1, size, "the padded size")
    return size, number, cohort_size


def check_processors(processors: Any, num_clients: int) -> Int[np.ndarray, " clients"]:
    """B_k for all clients.

    Raises:
      ValueError: if `processors` is neither a positive integer nor one per client.
    """
    name = "processors"
    # Do not ask NumPy for the axes of a list, which may hold tracers.
    if not isinstance(processors, list | tuple) and np.ndim(processors) == 0:
        return np.broadcast_to(check_argument(name, processors, Count), num_clients)
    each = list(processors)
    if len(each) != num_clients:
        raise ValueError(f"{name} are {len(each)}; give one number, or {num_clients}, one each")
    return np.array([check_argument(f"{name}[{k}]", one, Count) for k, one in enumerate(each)])


def no_state(rng_key: PRNGKeyArray, look: Look) -> Any:
    """Empty state of a stateless assignment."""
    del rng_key, look
    return ()
