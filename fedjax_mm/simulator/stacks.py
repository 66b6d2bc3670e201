"""The models axis: models of equal structure are stacked, others are unrolled within a round."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from fedjax_mm.base import Algorithm, ClientState, Cohort, Params, ServerState, Task
from fedjax_mm.base.calls import in_short
from fedjax_mm.base.chunks import reads, vmap_unless_one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackState:
    """State of the models in one stack, with a leading models axis on every leaf.

    Attributes:
      params: the models' parameters.
      server: the server state of each model.
      clients: the states of all clients, along the second axis.
      models: the static indices of the models.
    """

    params: Params
    server: ServerState
    clients: ClientState
    models: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    __repr__ = in_short

    def at(self, rows: Int[np.ndarray, " rows"]) -> "StackState":
        """The state of some of the models."""
        some: StackState = jax.tree.map(itemgetter(rows), self)
        return dataclasses.replace(some, models=tuple(self.models[row] for row in rows))


def each_params(states: Sequence[StackState], axis: int = 0) -> list[Params]:
    """The parameters of every model, in the order of the tasks.

    Args:
      states: the states of all stacks.
      axis: the position of the models axis, which follows any replica axes.
    """

    def at(row: int, params: Params) -> Params:
        return jax.tree.map(lambda x: x[(slice(None),) * axis + (row,)], params)

    found = {
        model: at(row, state.params) for state in states for row, model in enumerate(state.models)
    }
    return [found[model] for model in sorted(found)]


def with_params(states: Sequence[StackState], params: Sequence[Params]) -> tuple[StackState, ...]:
    """Replaces the parameters of each stack in the states."""
    pairs = zip(states, params, strict=True)
    return tuple(dataclasses.replace(state, params=own) for state, own in pairs)


def with_clients(
    states: Sequence[StackState], clients: Sequence[ClientState]
) -> tuple[StackState, ...]:
    """Replaces the states of each stack's clients."""
    pairs = zip(states, clients, strict=True)
    return tuple(dataclasses.replace(state, clients=own) for state, own in pairs)


class Stack(NamedTuple):
    """Models with equal structure and algorithm, which are computed together.

    Attributes:
      models: the indices of the models.
      task: the stacked tasks.
      shared: whether each leaf of the task is shared by all models and has no models axis.
      algorithm: the models' method of client training and server aggregation.
      homes: for each slot of the cohort, the row of its client's state, if only the cohort's
        states are here; None if all are, and client k has row k.
    """

    models: tuple[int, ...]
    task: Task
    shared: Any
    algorithm: Algorithm
    homes: Int[Array, " slots"] | None = None

    @property
    def num_clients(self) -> int:
        """N, which is the same for all models."""
        return self.task.num_clients

    def has_equal_steps(self, server: ServerState) -> bool:
        """Whether all clients take the same number of local steps.

        Args:
          server: the server state of one model; only its shapes matter.
        """
        count, first = self.algorithm.num_steps, jnp.int32(0)
        if count is None:
            return True
        return not reads(partial(count, self.task_at(first)), first, server)

    def rows(self, tree: Any) -> Any:
        """Selects this stack's rows of arrays ``[models, ...]``."""
        return jax.tree.map(itemgetter(np.array(self.models)), tree)

    def as_all(self, states: ClientState) -> ClientState:
        """States in the shape of all clients' states, for servers that do not read them."""
        if self.homes is None:
            return states
        shape = (self.num_clients,)
        return jax.tree.map(lambda x: jnp.broadcast_to(x[0], shape + x.shape[1:]), states)

    def slots(self, cohort: Cohort) -> tuple[Cohort, Int[np.ndarray, " slots"]]:
        """The part of a cohort that trains this stack's models, and its slots.

        Models are numbered by row. If models are traced, all slots are kept, with clients of other
        stacks replaced by padding.
        """
        models = cohort.models if cohort.is_known else jnp.asarray(cohort.models)
        is_mine = models[:, None] == np.array(self.models)
        row = is_mine.argmax(1)
        if cohort.is_known:
            (slots,) = np.nonzero(is_mine.any(1))
            arrays = cohort.clients, cohort.scale, cohort.takes_part
            if len(slots) < len(row):
                arrays = jax.tree.map(itemgetter(slots), arrays)
            clients, scale, takes_part = arrays
            return Cohort(clients, row[slots], scale, takes_part=takes_part), slots
        clients = jnp.where(is_mine.any(1), cohort.clients, -1)
        mine = dataclasses.replace(cohort, clients=clients, models=row, num_gradients=None)
        return mine, np.arange(len(clients))

    def at(self, rows: Int[np.ndarray, " rows"]) -> Self:
        """A stack of some of the models."""
        models = tuple(self.models[row] for row in rows)
        return self._replace(models=models, task=self.task_at(rows))

    def task_at(self, row: Int[Array, ""] | Int[np.ndarray, " rows"]) -> Task:
        """Task of the stack's model at `row`, which may be traced, or of several."""
        return jax.tree.map(lambda x, same: x if same else x[row], self.task, self.shared)


def stacks_of(tasks: Sequence[Task], algorithms: Sequence[Algorithm]) -> list[Stack]:
    """Groups models into stacks, ordered by each stack's first model."""
    # NumPy arrays cannot be indexed by a traced index. Convert them to jax.Array, shared ones only
    # once, and they stay shared.
    arrays: dict[int, Array] = {}
    tasks = jax.tree.map(
        lambda x: arrays.setdefault(id(x), jnp.asarray(x)) if isinstance(x, np.ndarray) else x,
        tasks,
    )
    alike: dict[Any, list[int]] = {}
    for model, (task, how) in enumerate(zip(tasks, algorithms, strict=True)):
        leaves, structure = jax.tree.flatten(task)
        shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        alike.setdefault((structure, shapes, how), []).append(model)
    return [
        Stack(tuple(which), *_stack([tasks[model] for model in which]), algorithms[which[0]])
        for which in alike.values()
    ]


def _stack(tasks: Sequence[Task]) -> tuple[Task, Any]:
    # Compare by identity. Comparing values would read device arrays and fail on tracers.
    shared = jax.tree.map(lambda *leaves: all(x is leaves[0] for x in leaves), *tasks)
    return jax.tree.map(lambda same, *xs: xs[0] if same else jnp.stack(xs), shared, *tasks), shared


def by_model(stacks: Sequence[Stack], trees: Sequence[Any]) -> Any:
    """Arrays ``[models, ...]`` in the order of the models, from one tree per stack."""
    if len(stacks) == 1:
        return trees[0]
    place = np.argsort(np.concatenate([stack.models for stack in stacks]))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts)[place], *trees)


def over_models(function: Any, stack: Stack, *args: Any, one_by_one: bool = False) -> Any:
    """Maps ``function(task, *args)`` over the models of a stack, at once or in turn."""
    if len(stack.models) == 1:
        return vmap_unless_one(1, partial(function, stack.task))(*args)
    if not one_by_one:
        task_axes = jax.tree.map(lambda same: None if same else 0, stack.shared)
        return jax.vmap(function, (task_axes, *(0 for _ in args)))(stack.task, *args)

    def one(model: Int[Array, ""]) -> Any:
        return function(stack.task_at(model), *jax.tree.map(itemgetter(model), args))

    return lax.map(one, jnp.arange(len(stack.models)))
