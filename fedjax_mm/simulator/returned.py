"""Checks the results of the functions of tasks, algorithms and assignments, for `preflight.py`."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mm.base import Algorithm, Assignment, Cohort, Contribution, Params
from fedjax_mm.base.sums import Stacked, is_sparse, is_stacked
from fedjax_mm.checks.values import check_alike, check_name, described
from fedjax_mm.simulator.record import RESERVED


def name_of(part: Assignment | Algorithm) -> str:
    """Name of an assignment or algorithm for messages, preferably its factory's."""
    function: Any
    if isinstance(part, Assignment):
        kind, function = "assignment", part.assign
    else:
        kind, function = "algorithm", part.client
    name = getattr(function, "__qualname__", type(function).__name__).split(".<locals>")[0]
    # A method of the package may be built by a function such as `averaging`.
    if part.name and getattr(function, "__module__", "").startswith("fedjax_mm."):
        name = part.name
    return f"the {kind} {name}"


@contextlib.contextmanager
def told(
    part: Algorithm | Assignment, call: str, params: Params = None, update: Any = None
) -> Iterator[None]:
    """Adds a note about the called function to errors that JAX or Python raise in it.

    Args:
      part: the algorithm or the assignment whose function is called.
      call: the call, written as in the function's signature.
      params: the model's parameters, if the function receives a sum of updates.
      update: the sum of updates.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        note = f"in {call} of {name_of(part)}"
        shapes = [jax.tree.map(lambda x: jax.typeof(x).str_short(), x) for x in (params, update)]
        if shapes[0] != shapes[1]:
            note += f", which gets params {shapes[0]} and total.update {shapes[1]}"
        error.add_note(note)
        raise


def two(what: str, found: Any, wanted: str) -> tuple[Any, Any]:
    """Unpacks a function's two results, or raises `TypeError` if it does not return two."""
    if type(found) not in (tuple, list) or len(found) != 2:
        raise TypeError(f"{what} {described(found)}; return two: {wanted}")
    first, second = found
    return first, second


def check_arrays(what: str, tree: Any) -> None:
    """Raises `TypeError` if a leaf of a pytree is neither a number nor an array."""
    for leaf in jax.tree.leaves(tree):
        if not _is_array(leaf):
            raise TypeError(f"{what} {described(leaf)}; give a pytree of arrays")


def _is_array(value: Any) -> bool:
    if isinstance(value, jax.Array | bool | int | float):
        return True
    return isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcV"


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


def check_contribution(what: str, sent: Contribution) -> None:
    """Raises an error if a client's contribution does not consist of arrays of the right kinds."""
    for name in ("update", "report"):
        check_arrays(f"{what} as {name}", getattr(sent, name))
    if sent.update is None:
        raise TypeError(f"{what} as update None; give a pytree of arrays")
    for leaf in jax.tree.leaves(sent.update, is_leaf=is_sparse):
        if is_sparse(leaf) and not jnp.issubdtype(jnp.result_type(leaf.indices), jnp.integer):
            raise TypeError(
                f"{what} a SparseUpdate with indices of {jnp.result_type(leaf.indices)}; scale it "
                "by sums.scale_update, which leaves the indices as they are"
            )
    if is_stacked(sent.update):
        _check_stacked(what, sent.update)
    for name in ("weight", "num_gradients"):
        if not _is_array(value := getattr(sent, name)) or np.shape(value):
            raise TypeError(f"{what} as {name} {described(value)}; give one number")


def _check_stacked(what: str, sent: Stacked) -> None:
    leaves = jax.tree.leaves(sent.update, is_leaf=is_sparse)
    if any(map(is_sparse, leaves)):
        raise TypeError(
            f"{what} a SparseUpdate in a Stacked update; apply sums.dense_update before"
        )
    if np.shape(sent.weight) or np.shape(sent.client):
        raise TypeError(f"{what} a Stacked update with arrays as weight or client; give numbers")


def check_cohort(what: str, cohort: Cohort, num_models: int) -> None:
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
    if cohort.is_known and not -1 <= np.min(cohort.models) <= np.max(cohort.models) < num_models:
        raise ValueError(
            f"{what} returns models {np.min(cohort.models)} ... {np.max(cohort.models)}; there are "
            f"{num_models}, with numbers from 0, and -1 is padding"
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


def check_metrics(what: str, found: Any, allowed: str = "") -> None:
    """Raises an error if a metrics function does not return a dict of real numbers or arrays.

    Args:
      what: the function, for error messages.
      found: its result.
      allowed: a reserved name that it may use.

    Raises:
      TypeError: if it returns anything else.
      ValueError: if a metric's name is reserved or cannot be saved.
    """
    if not isinstance(found, dict):
        raise TypeError(f"{what} returns {described(found)}; return a dict of names and numbers")
    for name, value in found.items():
        check_name("a metric", name)
        if name in RESERVED and name != allowed:
            raise ValueError(f"a metric is called {name!r}, like a part of every result; rename it")
        if isinstance(value, list | tuple | dict):
            raise TypeError(f"the metric {name!r} is a {type(value).__name__}; give an array")
        kind = getattr(value, "dtype", None) or np.asarray(value).dtype
        if jnp.issubdtype(kind, jnp.complexfloating):
            raise TypeError(
                f"the metric {name!r} is of type {kind}; give real numbers, such as the real and "
                "the imaginary part as two metrics"
            )
        if not (jnp.issubdtype(kind, jnp.number) or kind == np.bool_):
            raise TypeError(f"the metric {name!r} is {described(value)}; give a number or an array")


def check_no_repeats(metrics: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Raises `ValueError` if a task's metric has the name of one recorded by the run itself."""
    for name in metrics.keys() & others.keys():
        raise ValueError(f"a metric is called {name!r}, like one that all runs record; rename it")
