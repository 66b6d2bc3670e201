"""Mixing of models after a round, and the metrics of models that mix."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedjax_mm.base import Assignment, Metrics, Mixed, Params, Round, Task
from fedjax_mm.base.chunks import ClientMap, chunk_size_of
from fedjax_mm.base.cohorts import places_of
from fedjax_mm.base.paths import chosen, replaced
from fedjax_mm.simulator.stacks import Stack, StackState, by_model, over_models, with_params
from fedjax_mm.tasks.view import client_losses, client_weights
from fedjax_mm.tasks.with_clients import measures_clients


def mix(
    assignment: Assignment,
    stacks: Sequence[Stack],
    round: Round,
    own: Any,
    before: Sequence[StackState],
    after: Sequence[StackState],
    active: Callable[[Any], Bool[Array, " models"]],
) -> tuple[StackState, ...]:
    """Models after the assignment has mixed them, given those before and after a round."""
    if assignment.mix is None:
        return tuple(after)
    mixes, where = partial(assignment.mix, round, own), assignment.where

    def mixed(old: Params | None, each: Sequence[Params]) -> list[Params]:
        new = together(stacks, assignment, each)
        made = jax.tree.map(partial(_if, active(own)), mixes(old, new), new)
        rows = [made] if len(stacks) == 1 else [stack.rows(made) for stack in stacks]
        return [replaced(where, x, row) for x, row in zip(each, rows, strict=True)]

    old = together(stacks, assignment, [state.params for state in before])
    states = with_params(after, mixed(old, [state.params for state in after]))
    values = [mixed(None, each) for each in zip(*map(carried, after), strict=True)]
    each = zip(states, zip(*values, strict=True), strict=True) if values else ()
    return tuple(_carrying(*pair) for pair in each) or states


def together(stacks: Sequence[Stack], assignment: Assignment, each: Sequence[Params]) -> Params:
    """The parameters that are mixed, ``[models, ...]``, from those of each stack."""
    return by_model(stacks, [chosen(assignment.where, params) for params in each])


def carried(state: StackState) -> list[Params]:
    """The values of a stack's server states that are mixed, too."""
    return [x.value for x in jax.tree.leaves(state.server, is_leaf=_is_mixed) if _is_mixed(x)]


def _carrying(state: StackState, values: Sequence[Params]) -> StackState:
    structure: Any
    leaves, structure = jax.tree.flatten(state.server, is_leaf=_is_mixed)
    new = iter(values)
    server = structure.unflatten([Mixed(next(new)) if _is_mixed(x) else x for x in leaves])
    return dataclasses.replace(state, server=server)


def _is_mixed(x: Any) -> TypeGuard[Mixed]:
    return isinstance(x, Mixed)


def _if(active: Array, new: Array, old: Array) -> Array:
    return jnp.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def run_metrics(
    assignment: Assignment,
    stacks: Sequence[Stack],
    states: Sequence[StackState],
    own: Any,
    client_map: ClientMap,
) -> Metrics:
    """The assignment's metrics, and those of models that mix.

    ``consensus_error`` is the squared distance of each model's mixed parameters from their mean
    over models. If all parameters are mixed, ``mean_model_loss`` is the loss of that mean in the
    model's task. ``own_loss`` is the mean loss of the clients that may train the model, weighted by
    n_k, at its parameters.
    """
    metrics = assignment.metrics(own) if assignment.metrics else {}
    if assignment.mix is None:
        return metrics
    all_params = together(stacks, assignment, [state.params for state in states])
    mean = jax.tree.map(lambda x: jnp.mean(x, 0), all_params)
    squares = jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2, range(1, x.ndim)), all_params, mean)
    metrics |= {"consensus_error": jax.tree.reduce(jnp.add, squares)}
    if not all(measures_clients(stack.task) for stack in stacks):
        return metrics

    def own_loss(task: Any, clients: Array, params: Params) -> Float[Array, ""]:
        loss = jax.vmap(partial(task.client_loss, params))(jnp.maximum(clients, 0))
        weight = jnp.where(clients >= 0, jax.vmap(task.weight)(jnp.maximum(clients, 0)), 0)
        return jnp.sum(weight * loss) / jnp.sum(weight)

    def mean_loss(task: Task, _: Params) -> Float[Array, ""]:
        weight = client_weights(task)
        return jnp.sum(weight * client_losses(task, mean)) / jnp.sum(weight)

    if (clients := _own_clients(assignment)) is not None:

        def of_stack(stack: Stack, state: StackState) -> Float[Array, " models"]:
            size = chunk_size_of(client_map, stack.task, state.params, len(stack.models))
            mine = stack.rows(clients), state.params
            return over_models(own_loss, stack, *mine, one_by_one=size is not None)

        metrics["own_loss"] = by_model(stacks, list(map(of_stack, stacks, states)))
    if assignment.where is None:
        pairs = zip(stacks, states, strict=True)
        each = [over_models(mean_loss, stack, state.params) for stack, state in pairs]
        metrics["mean_model_loss"] = by_model(stacks, each)
    return metrics


def _own_clients(assignment: Assignment) -> Int[Array, "models width"] | None:
    """The clients that may train each model, padded with -1, or None for all clients."""
    if assignment.peers:
        return jnp.arange(assignment.num_models)[:, None]
    if assignment.eligible is None:
        return None
    models, clients = np.nonzero(assignment.eligible)
    places = places_of(clients, models, assignment.num_models)
    return jnp.where(places >= 0, jnp.asarray(clients)[places], -1)
