"""The models axis: which models are computed together, and how functions of one map over them."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from fedjax_mm.base import Algorithm, Assignment, ClientState, Params, ServerState, Task


class Models(NamedTuple):
    """What the rounds change of the M models; every leaf has a leading models axis.

    Where models differ in structure, each field is a tuple with one entry for each kind of them.
    """

    params: Params
    server: ServerState
    clients: ClientState  # second axis: all clients


class Kind(NamedTuple):
    """Models of equal structure that train alike: computed together, whatever their data.

    Attributes:
      models: their numbers, from 0.
      task: their tasks, stacked.
      shared: for each leaf of the task whether all of them share it, without a models axis.
      algorithm: how their clients train and the server aggregates.
    """

    models: tuple[int, ...]
    task: Task
    shared: Any
    algorithm: Algorithm


def kinds_of(
    tasks: Task | Sequence[Task], algorithm: Algorithm | Sequence[Algorithm], assignment: Assignment
) -> list[Kind]:
    """The models by kind, in the order of their first ones."""
    is_one_task, is_one_algorithm = isinstance(tasks, Task), isinstance(algorithm, Algorithm)
    models = range(assignment.num_models)
    each_task = _one_each("tasks", [tasks for _ in models] if is_one_task else tasks, models)
    each_algorithm = _one_each(
        "algorithms", [algorithm for _ in models] if is_one_algorithm else algorithm, models
    )
    pairs = zip(each_task, each_algorithm, strict=True)
    sizes = {task.num_clients - algorithm.num_unseen for task, algorithm in pairs}
    if sizes != {assignment.num_clients}:
        raise ValueError(
            f"the tasks have {sorted(sizes)} clients to train but the assignment draws from "
            f"{assignment.num_clients}; make them equal"
        )
    alike: dict[Any, list[int]] = {}
    for model in models:
        leaves, structure = jax.tree.flatten(each_task[model])
        shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        alike.setdefault((structure, shapes, each_algorithm[model]), []).append(model)
    return [
        Kind(tuple(which), *_stack([each_task[model] for model in which]), each_algorithm[which[0]])
        for which in alike.values()
    ]


def _one_each(name: str, items: Any, models: Sequence[int]) -> list[Any]:
    if len(items) != len(models):
        raise ValueError(
            f"there are {len(items)} {name} but the assignment has {len(models)} "
            "models; give one for all models or one per model"
        )
    return list(items)


def _stack(tasks: Sequence[Task]) -> tuple[Task, Any]:
    """Tasks of equal structure as one; arrays that are the same object in all stay single."""
    shared = jax.tree.map(lambda *leaves: all(x is leaves[0] for x in leaves), *tasks)
    stacked = jax.tree.map(
        lambda same, *leaves: leaves[0] if same else jnp.stack(leaves), shared, *tasks
    )
    return stacked, shared


def axis_of(shared: Any) -> Any:
    """Where the models axis is, for `jax.vmap`."""
    return jax.tree.map(lambda same: None if same else 0, shared)


def over_models(function: Any, kind: Kind, *args: Any, one_by_one: bool) -> Any:
    """``function(task, *args)`` of every model of a kind, all at once or one by one."""
    if len(kind.models) == 1:
        return vmap_unless_one(1, partial(function, kind.task), [0 for _ in args])(*args)
    if not one_by_one:
        return jax.vmap(function, (axis_of(kind.shared), *(0 for _ in args)))(kind.task, *args)

    def one(model: Int[Array, ""]) -> Any:
        task = jax.tree.map(lambda x, same: x if same else x[model], kind.task, kind.shared)
        return function(task, *jax.tree.map(lambda x: x[model], args))

    return lax.map(one, jnp.arange(len(kind.models)))


def vmap_unless_one(
    size: int, function: Callable[..., Any], in_axes: Sequence[int | None]
) -> Callable[..., Any]:
    """`jax.vmap` over a leading axis; of length 1 it is taken off, so that branches stay branches.

    So do convolutions, which a batch of kernels, be it of one, would make loops of.
    """
    if size > 1:
        return jax.vmap(function, in_axes)

    def call(*args: Any) -> Any:
        each = [
            arg if axis is None else jax.tree.map(itemgetter(0), arg)
            for arg, axis in zip(args, in_axes, strict=True)
        ]
        return jax.tree.map(lambda x: jnp.asarray(x)[None], function(*each))

    return call


def split(models: Models, kinds: Sequence[Kind]) -> list[Models]:
    """The models of each kind."""
    if len(kinds) == 1:
        return [models]
    return [Models(*parts) for parts in zip(*models, strict=True)]


def join(parts: Sequence[Models]) -> Models:
    """The inverse of `split`."""
    return parts[0] if len(parts) == 1 else Models(*zip(*parts, strict=True))


def in_order(kinds: Sequence[Kind], values: Sequence[Array]) -> Array:
    """One value per model, from those of each kind."""
    place = np.argsort(np.concatenate([kind.models for kind in kinds]))
    return jnp.concatenate(values)[place] if len(kinds) > 1 else values[0]


def is_lockstep(kind: Kind, models: Models) -> bool:
    """Whether all clients take the same number of local steps, known before anything runs."""
    server_state = jax.tree.map(itemgetter(0), models.server)
    return have_equal_steps(kind.algorithm, kind.task, server_state)


def have_equal_steps(algorithm: Algorithm, task: Task, server_state: ServerState) -> bool:
    """The same of one model."""
    if algorithm.num_steps is None:
        return True
    return isinstance(algorithm.num_steps(task, jnp.int32(0), server_state), int)
