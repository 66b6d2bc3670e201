"""Calls the functions of assignments and algorithms, and checks their results.

Wrappers call the assignment they wrap in the same way as the engine.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from fedjax_mm.base import (
    Algorithm,
    Assignment,
    ClientContext,
    ClientState,
    Cohort,
    Contribution,
    Look,
    ObserveFn,
    Params,
    Round,
    ServerContext,
    ServerState,
    Task,
)
from fedjax_mm.checks import check_alike, described


def assign(
    assignment: Assignment, rng_key: PRNGKeyArray, round: Round, state: Any, look: Look
) -> tuple[Cohort, Any]:
    """Returns the cohort of a round and the assignment's new state, both checked.

    Client numbers are not checked, because tracers have no values.

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
        case [first, _] as found if isinstance(found, tuple | list):  # JAX arrays match too
            raise TypeError(f"{what} returns as cohort {described(first)}; {wanted}")
        case found:
            raise TypeError(f"{what} returns {described(found)}; {wanted}")
    _check_cohort(what, cohort)
    if assignment.observe is None:  # `observe` returns the next state otherwise
        check_state(f"{what} returns", state, new)
    return cohort, new


def observe_inside(assignment: Assignment) -> ObserveFn | None:
    """Returns `observe` for a wrapper that keeps its assignment's state in a field `state`.

    It is None if the assignment has none.
    """
    inner = assignment.observe
    if inner is None:
        return None

    def observe(round: Round, cohort: Cohort, reports: Any, state: Any) -> Any:
        return state._replace(state=inner(round, cohort, reports, state.state))

    return observe


def _check_cohort(what: str, cohort: Cohort) -> None:
    """Raises an error unless a cohort consists of matching arrays."""
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


def start_states(
    algorithm: Algorithm, task: Task, params: Params
) -> tuple[ServerState, ClientState]:
    """Returns the checked initial states of a model's server and of one client.

    Raises:
      TypeError: if `init` returns something else.
    """
    wanted = "the server's state, and one client's state"
    server, client = _two(
        f"{name_of(algorithm)} returns from init", algorithm.init(task, params), wanted
    )
    return server, client


def contribute(
    algorithm: Algorithm,
    context: ClientContext,
    server_state: ServerState,
    client_state: ClientState,
) -> tuple[Contribution, ClientState]:
    """Returns a client's checked contribution and new state.

    Raises:
      TypeError: if the client function returns something else.
      ValueError: if the state's shapes or types have changed.
    """
    what = f"{name_of(algorithm)} returns from client"
    found = algorithm.client(context, server_state, client_state)
    sent, state = _two(what, found, "a Contribution, and the client's state")
    if not isinstance(sent, Contribution):
        raise TypeError(f"{what} {described(sent)}; give a Contribution first, then the state")
    check_state(what, client_state, state)
    weight, num_gradients = jnp.asarray(sent.weight), jnp.asarray(sent.num_gradients, jnp.int32)
    return sent._replace(weight=weight, num_gradients=num_gradients), state


def serve(algorithm: Algorithm, context: ServerContext) -> tuple[Params, ServerState]:
    """Returns a model's checked parameters after the server step, and the new server state.

    Raises:
      TypeError: if the server function returns something else.
      ValueError: if shapes or types have changed.
    """
    what = f"{name_of(algorithm)} returns from server"
    params, state = _two(what, algorithm.server(context), "the parameters, and the server's state")
    check_state(what, context.params, params, "parameters", "the model has")
    check_state(what, context.server_state, state)
    return params, state


def _two(what: str, found: Any, wanted: str) -> tuple[Any, Any]:
    """Returns a function's two results, or raises `TypeError` if it does not return two."""
    if type(found) not in (tuple, list) or len(found) != 2:
        raise TypeError(f"{what} {described(found)}; return two: {wanted}")
    first, second = found
    return first, second


def name_of(part: Assignment | Algorithm) -> str:
    """Returns a part's name for messages, if possible that of its factory."""
    function: Any
    if isinstance(part, Assignment):
        kind, function = "assignment", part.assign
    else:
        kind, function = "algorithm", part.client
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"the {kind} {name.split('.<locals>')[0]}"


def check_state(
    who: str, old: Any, new: Any, what: str = "a state", source: str = "init returned"
) -> None:
    """Raises `ValueError` unless a round keeps the structure, shapes and types of a state."""
    check_alike(f"{who} {what} of another structure than {source}", old, new)
    for one, other in zip(*map(jax.tree.leaves, (old, new)), strict=True):
        before, after = jax.typeof(one), jax.typeof(other)
        is_same = before.weak_type or before.dtype == after.dtype  # `scan` promotes weak types
        if before.shape != after.shape or not is_same:
            raise ValueError(
                f"{who} {after.str_short()} in its {what.removeprefix('a ')} where {source} "
                f"{before.str_short()}; keep shapes and types"
            )
