"""Calls the functions of assignments and algorithms, and checks their results.

Wrappers call the assignment they wrap in the same way as a round does.
"""

import contextlib
from collections.abc import Iterator
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
    """Returns the cohort of a round and the assignment's new state, after checking both.

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
    _check_cohort(what, cohort, assignment.num_models)
    if assignment.observe is None:  # otherwise `observe` returns the next state
        check_state(f"{what} returns", state, new)
    return cohort, new


def _check_cohort(what: str, cohort: Cohort, num_models: int) -> None:
    """Raises an error if a cohort does not consist of matching arrays."""
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
            f"{what} returns no slots; give at least one, with the client -1 if nobody trains"
        )
    for name, kind, types, wanted in (
        ("scale", "floats", (jnp.floating, jnp.integer), shape),
        ("takes_part", "bools", (jnp.bool_,), shape),
        ("num_gradients", "ints", (jnp.integer,), (num_models,)),
    ):
        if (given := getattr(cohort, name)) is None:
            continue
        own = jnp.result_type(given)
        if np.shape(given) != wanted or not any(jnp.issubdtype(own, each) for each in types):
            raise ValueError(
                f"{what} returns as {name} {own}{list(np.shape(given))}; give {kind} of shape "
                f"{wanted}"
            )


def check_weight(task: Task) -> None:
    """Raises `TypeError` if a task's weight of a client is not one number."""
    weight = jax.eval_shape(lambda client: task.weight(client), jnp.int32(0))
    if not hasattr(weight, "shape") or weight.shape:
        raise TypeError(
            f"{type(task).__name__}.weight returns {described(weight)}; return one number, n_k"
        )


def start_states(
    algorithm: Algorithm, task: Task, params: Params
) -> tuple[ServerState, ClientState]:
    """Returns the checked initial states of a model's server and of one client.

    Raises:
      TypeError: if `init` does not return two pytrees of arrays.
    """
    wanted = "the server's state, and one client's state"
    what = f"{name_of(algorithm)} returns from init"
    with _own(algorithm, "init(task, params)"):
        found = algorithm.init(task, params)
    server, client = _two(what, found, wanted)
    _check_arrays(f"{what} as the server's state", server)
    _check_arrays(f"{what} as a client's state", client)
    return server, client


def contribute(
    algorithm: Algorithm,
    context: ClientContext,
    server_state: ServerState,
    client_state: ClientState,
) -> tuple[Contribution, ClientState]:
    """Returns a client's checked contribution and new state.

    Raises:
      TypeError: if the client function does not return a valid contribution and a state.
      ValueError: if the state's shapes or types have changed.
    """
    what = f"{name_of(algorithm)} returns from client"
    with _own(algorithm, "client(context, server_state, client_state)"):
        found = algorithm.client(context, server_state, client_state)
    sent, state = _two(what, found, "a Contribution, and the client's state")
    if not isinstance(sent, Contribution):
        raise TypeError(f"{what} {described(sent)}; give a Contribution first, then the state")
    _check_arrays(f"{what} as a client's state", state)
    check_state(what, client_state, state)
    for name in ("update", "report"):
        _check_arrays(f"{what} as {name}", getattr(sent, name))
    if sent.update is None:
        raise TypeError(f"{what} as update None; give a pytree of arrays")
    for name in ("weight", "num_gradients"):
        if not _is_array(value := getattr(sent, name)) or np.shape(value):
            raise TypeError(f"{what} as {name} {described(value)}; give one number")
    weight, num_gradients = jnp.asarray(sent.weight), jnp.asarray(sent.num_gradients, jnp.int32)
    return sent._replace(weight=weight, num_gradients=num_gradients), state


def serve(algorithm: Algorithm, context: ServerContext) -> tuple[Params, ServerState]:
    """Returns a model's checked parameters after the server step, and the new server state.

    Raises:
      TypeError: if the server function does not return parameters and a state.
      ValueError: if shapes or types have changed.
    """
    what = f"{name_of(algorithm)} returns from server"
    with _own(algorithm, "server(context)", context.params, context.total.update):
        found = algorithm.server(context)
    params, state = _two(what, found, "the parameters, and the server's state")
    _check_arrays(f"{what} as parameters", params)
    _check_arrays(f"{what} as the server's state", state)
    check_state(what, context.params, params, "parameters", "the model has")
    check_state(what, context.server_state, state)
    return params, state


class Hidden:
    """Stand-in for an argument that the server of a wrapped algorithm must not read."""

    def __init__(self, refusal: str, **public: Any) -> None:
        """Stores the message of the error, and the attributes that the server may read."""
        vars(self).update(public, _refusal=refusal)

    def __getattr__(self, name: str) -> Any:
        raise ValueError(self._refusal)


@contextlib.contextmanager
def _own(
    algorithm: Algorithm, call: str, params: Params = None, update: Any = None
) -> Iterator[None]:
    """Adds a note about the called function to errors that JAX or Python raise in it.

    Args:
      algorithm: the algorithm whose function is called.
      call: the call, written as in the function's signature.
      params: the model's parameters, if the function receives a sum of updates.
      update: the sum of updates.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        note = f"in {call} of {name_of(algorithm)}"
        shapes = [jax.tree.map(lambda x: jax.typeof(x).str_short(), x) for x in (params, update)]
        if shapes[0] != shapes[1]:
            note += f", which gets params {shapes[0]} and total.update {shapes[1]}"
        error.add_note(note)
        raise


def _check_arrays(what: str, tree: Any) -> None:
    """Raises `TypeError` if a leaf of a pytree is neither a number nor an array."""
    for leaf in jax.tree.leaves(tree):
        if not _is_array(leaf):
            raise TypeError(f"{what} {described(leaf)}; give a pytree of arrays")


def _is_array(value: Any) -> bool:
    if isinstance(value, jax.Array | bool | int | float):
        return True
    return isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcV"


def _two(what: str, found: Any, wanted: str) -> tuple[Any, Any]:
    """Returns a function's two results, or raises `TypeError` if it does not return two."""
    if type(found) not in (tuple, list) or len(found) != 2:
        raise TypeError(f"{what} {described(found)}; return two: {wanted}")
    first, second = found
    return first, second


def name_of(part: Assignment | Algorithm) -> str:
    """Returns the name of an assignment or algorithm for messages, preferably its factory's."""
    function: Any
    if isinstance(part, Assignment):
        kind, function = "assignment", part.assign
    else:
        kind, function = "algorithm", part.client
    name = getattr(function, "__qualname__", type(function).__name__).split(".<locals>")[0]
    if part.wraps and name.startswith("wrap_"):
        name = part.wraps.name
    return f"the {kind} {name}"


def check_state(
    who: str,
    old: Any,
    new: Any,
    what: str = "a state",
    source: str = "init returned",
    remedy: str = "keep shapes and types",
) -> None:
    """Raises `ValueError` if a round changes the structure, shapes or types of a state."""
    check_alike(f"{who} {what} of another structure than {source}", old, new)
    for one, other in zip(*map(jax.tree.leaves, (old, new)), strict=True):
        before, after = jax.typeof(one), jax.typeof(other)
        is_same = before.weak_type or before.dtype == after.dtype  # `scan` promotes weak types
        if before.shape != after.shape or not is_same:
            raise ValueError(
                f"{who} {after.str_short()} in its {what.removeprefix('a ').removeprefix('an ')} "
                f"where {source} {before.str_short()}; {remedy}"
            )
