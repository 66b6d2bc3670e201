"""Lifetimes of models, and the redistribution of jobs when models finish or arrive.

R_m is the number of jobs of model m, and A are the active models. These rules only count jobs;
`dispatch.py` ends and begins them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.base import Look, keys


class Lifetime(NamedTuple):
    """When models are active, as stated by `finishing` or `arriving`.

    Attributes:
      name: the wrapper's name.
      recorded: the name of the event in records.
      first: returns the event of each model before round 1: the number of completed rounds when the
        model arrived or finished, or NaN before.
      event: ``(round, before, look) -> event`` after a number of rounds, given the one before.
      is_active: ``event -> active``, the active models among those of ``look.active()``.
    """

    name: str
    recorded: str
    first: Callable[[], Array]
    event: Callable[[Any, Array, Look], Array]
    is_active: Callable[[Array], Bool[Array, " models"]]


class Lives(NamedTuple):
    """State of the lifetimes in an asynchronous run.

    Attributes:
      events: the event of each lifetime, from the inside out.
      active: A, the active models.
      replaced: the number of deleted and replaced jobs, without the ones that arrived.
    """

    events: tuple[Float[Array, " models"], ...]
    active: Bool[Array, " models"]
    replaced: Int[Array, ""]


def observed(
    lifetimes: Sequence[Lifetime],
    num_models: int,
    event_of: Callable[[int, Lifetime, Bool[Array, " models"]], Array],
) -> tuple[tuple[Float[Array, " models"], ...], Bool[Array, " models"]]:
    """Events of all lifetimes, and the active models.

    Args:
      lifetimes: the lifetimes, from the inside out.
      num_models: M.
      event_of: returns the event of a lifetime, given its index and the models that may work.
    """
    active, events = jnp.ones(num_models, bool), []
    # From the outside in, because models finish after their arrival.
    for i, each in reversed([*enumerate(lifetimes)]):
        event = jnp.asarray(event_of(i, each, active), float)
        active = active & each.is_active(event)
        events.append(event)
    return (*reversed(events),), active


def given_up(
    targets: Int[Array, " models"],
    leaves: Bool[Array, " models"],
    active: Bool[Array, " models"],
    rng_key: PRNGKeyArray,
) -> Int[Array, " models"]:
    """R_m after some models have left their jobs to the active ones, one after another.

    When model f leaves, model i of A gets ``floor(R_f R_i / sum_A R)`` of its R_f jobs. The rest,
    which are fewer than A, go to different models of A, drawn uniformly.

    Args:
      targets: R_m.
      leaves: the models that leave.
      active: A, without the models that leave.
      rng_key: the key of the assignment's draws in the round.

    Example: the second of three models leaves.
      >>> leaves, active = jnp.array([False, True, False]), jnp.array([True, False, True])
      >>> given_up(jnp.array([6, 4, 2]), leaves, active, jax.random.key(0)).tolist()
      [9, 0, 3]
    """

    def give(model: Int[Array, ""], targets: Array) -> Array:
        held = jnp.where(active, targets, 0)
        given = jnp.where(leaves[model], targets[model], 0)
        shares = given * held // jnp.maximum(jnp.sum(held, dtype=jnp.int32), 1)
        rest = given - jnp.sum(shares, dtype=jnp.int32)
        order = jax.random.permutation(keys.leaving_key(rng_key, model), len(targets))
        is_drawn = active[order] & (jnp.cumsum(active[order], dtype=jnp.int32) <= rest)
        after = targets + shares + jnp.zeros_like(targets).at[order].set(is_drawn)
        return jnp.where(leaves & (jnp.arange(len(targets)) == model), 0, after)

    return lax.fori_loop(0, len(targets), give, targets)


def made_room(
    targets: Int[Array, " models"],
    arrives: Bool[Array, " models"],
    active: Bool[Array, " models"],
    num_jobs: int,
) -> Int[Array, " models"]:
    """R_m after active models have left some of their jobs to new ones.

    Models arrive one after another. A new model gets ``floor(R / |A|)`` jobs, where A includes it,
    from the others in proportion to their R_m. The rest come one by one from the largest R_m. If
    nobody else is active, it gets all R jobs.

    Args:
      targets: R_m, 0 for inactive models.
      arrives: the models that arrive.
      active: A, without the models that arrive.
      num_jobs: R.

    Example: the third of three models arrives.
      >>> arrives, active = jnp.array([False, False, True]), jnp.array([True, True, False])
      >>> made_room(jnp.array([8, 4, 0]), arrives, active, 12).tolist()
      [5, 3, 4]
    """

    def take_one(_: Any, targets: Array) -> Array:
        return targets.at[jnp.argmax(targets)].add(-1)

    def arrive(model: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        targets, size = carry
        held = jnp.sum(targets, dtype=jnp.int32)
        size = size + arrives[model]
        taken = jnp.where(arrives[model], num_jobs // jnp.maximum(size, 1), 0)
        shares = taken * targets // jnp.maximum(held, 1)
        rest = jnp.where(held > 0, taken - jnp.sum(shares, dtype=jnp.int32), 0)
        left = lax.fori_loop(0, rest, take_one, targets - shares)
        return left.at[model].add(taken), size

    size = jnp.sum(active, dtype=jnp.int32)
    return lax.fori_loop(0, len(targets), arrive, (targets, size))[0]
