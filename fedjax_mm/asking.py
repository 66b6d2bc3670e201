"""Asks an assignment who trains what in a round, and checks its answer.

The engine and the assignments that wrap others ask in this way.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from fedjax_mm.base import Assignment, Cohort, Look, Round
from fedjax_mm.checks import check_alike, described


def assign(
    assignment: Assignment, rng_key: PRNGKeyArray, round: Round, state: Any, look: Look
) -> tuple[Cohort, Any]:
    """Returns the cohort of a round and the assignment's new state, both checked.

    The clients' numbers are not checked, because tracers have no values.

    Raises:
      TypeError: if `assign` does not return a `Cohort` and a state.
      ValueError: if shapes do not fit.
    """
    what, wanted = name_of(assignment), "return two from assign: a Cohort, and the state"
    match assignment.assign(rng_key, round, state, look):
        case Cohort() as found:
            raise TypeError(f"{what} returns {described(found)} alone; {wanted}")
        case Cohort() as cohort, new:
            pass
        case [first, _] as found if isinstance(found, tuple | list):  # JAX arrays match, too
            raise TypeError(f"{what} returns as cohort {described(first)}; {wanted}")
        case found:
            raise TypeError(f"{what} returns {described(found)}; {wanted}")
    _check_cohort(what, cohort)
    if assignment.observe is None:  # otherwise `observe` returns the next state
        check_state(f"{what} returns", state, new)
    return cohort, new


def _check_cohort(what: str, cohort: Cohort) -> None:
    """Raises an error unless a cohort consists of arrays that fit each other."""
    numbers: dict[str, Any] = {"clients": cohort.clients, "models": cohort.models}
    for name, given in numbers.items():
        if not isinstance(given, jax.Array | np.ndarray) or given.dtype.kind not in "iu":
            kind = f", {given.dtype}" if hasattr(given, "dtype") else ""
            raise TypeError(
                f"{what} returns as {name} {described(given)}{kind}; give an array of their "
                "numbers, int32[slots]"
            )
    shape = cohort.clients.shape
    if len(shape) != 1 or cohort.models.shape != shape:
        raise ValueError(
            f"{what} returns clients of shape {shape} and models of shape {cohort.models.shape}; "
            "give a client and a model for each slot, or Cohort.of_rows(clients[models, width])"
        )
    if not shape[0]:
        raise ValueError(
            f"{what} returns no slots, room for nobody; give at least one, with the client -1 if "
            "nobody trains"
        )
    if cohort.scale is not None and np.shape(cohort.scale) != shape:
        raise ValueError(
            f"{what} returns a scale of shape {np.shape(cohort.scale)}; give one number for each "
            f"client, {shape}"
        )


def name_of(assignment: Assignment) -> str:
    """Returns an assignment's name for messages, which is that of its factory if it has one."""
    name = getattr(assignment.assign, "__qualname__", type(assignment.assign).__name__)
    return f"the assignment {name.split('.<locals>')[0]}"


def check_state(who: str, old: Any, new: Any) -> None:
    """Raises `ValueError` unless a round keeps the structure, shapes and types of a state."""
    check_alike(f"{who} a state of another structure than init", old, new)
    for one, other in zip(*map(jax.tree.leaves, (old, new)), strict=True):
        before, after = jax.typeof(one), jax.typeof(other)
        is_same = before.weak_type or before.dtype == after.dtype  # `scan` promotes weak types
        if before.shape != after.shape or not is_same:
            raise ValueError(
                f"{who} {after.str_short()} in its state where init returned {before.str_short()}; "
                "keep shapes and types"
            )
