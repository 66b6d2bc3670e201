"""Checks of arguments, before anything is compiled."""

from collections.abc import Sequence
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

T = TypeVar("T")


def check_not_negative(name: str, value: Any) -> None:
    """Raises `ValueError` unless every number in `value` is at least 0 and finite.

    None and schedules pass, and so do traced numbers, as with `check_positive`.
    """
    if value is None or callable(value) or isinstance(value, jax.core.Tracer):
        return
    numbers = np.asarray(value)
    if not np.all(np.isfinite(numbers) & (numbers >= 0)):
        raise ValueError(f"{name} is {value}; it must not be negative")


def check_positive(name: str, value: Any) -> None:
    """Raises `ValueError` unless every number in `value` is positive and finite.

    None and schedules pass, and so do traced numbers: whoever supplies the numbers checks them.
    """
    if value is None or callable(value) or isinstance(value, jax.core.Tracer):
        return
    numbers = np.asarray(value)
    if not np.all(np.isfinite(numbers) & (numbers > 0)):
        raise ValueError(f"{name} is {value}; it must be positive")


def check_count(name: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is a positive whole number; None passes."""
    if value is not None and not (isinstance(value, int | np.integer) and value > 0):
        raise ValueError(f"{name} is {value}; it must be a positive whole number")


class MissingError(ValueError):
    """A task lacks what an algorithm or an assignment asks for."""

    def __init__(self, task: Any, capability: type) -> None:
        """The task, and the protocol that says what is asked for."""
        (wanted, *_) = (capability.__doc__ or "").splitlines()
        super().__init__(f"{type(task).__name__} is not a {capability.__name__}: {wanted}")
        self.capability = capability


def needs(task: Any, capability: type[T]) -> T:
    """The task, if it has what a protocol asks for beyond `Task`; or else `MissingError`."""
    if not isinstance(task, capability):
        raise MissingError(task, capability)
    return task


def check_flags(name: str, flags: Any, size: int | None = None) -> Bool[Array, " clients"]:
    """The array of one bool for each client; or else `ValueError`. It may be traced."""
    flags = jnp.asarray(flags)
    if flags.ndim != 1 or flags.dtype != jnp.bool_:
        raise ValueError(
            f"{name} are {flags.dtype}{list(flags.shape)}; give one bool for each client that "
            "trains"
        )
    if size is not None and len(flags) != size:
        raise ValueError(
            f"{name} has {len(flags)} entries; give one for each of the {size} clients that train"
        )
    return flags


def check_per_client(name: str, tree: Any, num_clients: int) -> None:
    """Raises `ValueError` unless every array has one number for each client."""
    for values in jax.tree.leaves(tree):
        if values.shape != (num_clients,):
            raise ValueError(
                f"{name} has shape {values.shape}; give one number for each of {num_clients} "
                "clients"
            )


def check_tested_clients(num_tested: int, num_clients: int) -> None:
    """Raises `ValueError` unless all clients have examples for testing too."""
    if num_tested != num_clients:
        raise ValueError(
            f"{num_tested} clients have test examples and {num_clients} for training; give every "
            "client its own"
        )


def check_num_unseen(num_unseen: int, num_clients: int) -> None:
    """Raises `ValueError` unless so many clients can be left out."""
    if not 0 <= num_unseen < num_clients:
        raise ValueError(
            f"num_unseen is {num_unseen}; it must lie between 0 and {num_clients - 1}, as there "
            f"are {num_clients} clients"
        )


def check_rounds(num_rounds: int, record_every: int) -> None:
    """Raises `ValueError` unless rounds can be recorded so often."""
    if num_rounds < 1:
        raise ValueError(f"num_rounds is {num_rounds}; it must be at least 1")
    if record_every < 1 or num_rounds % record_every:
        raise ValueError(
            f"record_every is {record_every}; it must be a divisor of num_rounds = {num_rounds}"
        )


def check_client_map(client_map: Any) -> None:
    """Raises `ValueError` unless local trainings can be computed so."""
    is_size = type(client_map) is int and client_map > 0
    if not is_size and client_map not in ("auto", "vmap", "scan"):
        raise ValueError(
            f"client_map is {client_map!r}; it must be 'auto', 'vmap', 'scan' or a positive chunk "
            "size"
        )


def one_each(name: str, items: Any, *, is_one: bool, num_models: int) -> list[Any]:
    """One item per model, from one for all or a sequence; `ValueError` if there are not as many."""
    items = [items] * num_models if is_one else list(items)
    if len(items) != num_models:
        raise ValueError(
            f"there are {len(items)} {name} but the assignment has {num_models} models; give one "
            "for all models or one per model"
        )
    return items


def check_num_clients(of_tasks: Sequence[int], of_assignment: int) -> None:
    """Raises `ValueError` unless tasks have as many clients as the assignment draws from."""
    if set(of_tasks) != {of_assignment}:
        raise ValueError(
            f"the tasks have {sorted(set(of_tasks))} clients to train but the assignment draws "
            f"from {of_assignment}; make them equal"
        )


def given_params(params: Any, stacks: Sequence[Any]) -> list[Any]:
    """Given initial parameters of each stack of models; None where none are given."""
    if params is None or len(stacks) == 1:
        return [params] * len(stacks)
    num_models = sum(len(stack.models) for stack in stacks)
    if not isinstance(params, Sequence) or len(params) != num_models:
        raise ValueError(
            f"the models differ in structure; give a list of {num_models} initial parameters"
        )
    return [
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[m] for m in stack.models))
        for stack in stacks
    ]


def fit_params(params: Any, like: Any) -> Any:
    """Given initial parameters with a models axis: those of one model are shared by all.

    Args:
      params: of one model, or ``[models, ...]``.
      like: shapes ``[models, ...]`` and types of those that the tasks draw.
    """

    def fit(given: Any, wanted: jax.ShapeDtypeStruct) -> Array:
        given = jnp.asarray(given, wanted.dtype)
        if given.shape not in (wanted.shape, wanted.shape[1:]):
            raise ValueError(
                f"initial parameters have shape {given.shape}; give {wanted.shape[1:]} (one model, "
                f"shared by all) or {wanted.shape} (one per model)"
            )
        return jnp.broadcast_to(given, wanted.shape)

    check_alike("initial parameters must have the structure of the task's", params, like)
    return jax.tree.map(fit, params, like)


def check_alike(problem: str, *trees: Any, shapes: bool = False) -> None:
    """Raises `ValueError` with the problem and where it is, unless pytrees have equal structure.

    With `shapes` their arrays must have equal shapes and types too.
    """
    if len(trees) < 2:  # chex refuses
        return
    try:
        chex.assert_trees_all_equal_structs(*trees)
    except AssertionError as error:
        structures = dict.fromkeys(str(jax.tree.structure(tree)) for tree in trees)
        raise ValueError(f"{problem}: {' and '.join(structures)}") from error
    try:
        if shapes:
            chex.assert_trees_all_equal_shapes_and_dtypes(*trees)
    except AssertionError as error:
        raise ValueError(f"{problem}: {error}") from error
