"""Steps of one round: look -> train -> aggregate -> observe, stack by stack.

The models axis is in `stacks.py`, the order in which clients are computed in `chunks.py`, their
sums in `sums.py`, and every key in `keys.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm import base, checks, chunks, keys, sums
from fedjax_mm.base import Algorithm, Assignment, Groups, Look, Params, Round, Task
from fedjax_mm.parts import after_observing, in_list, in_rows, places_in_rows
from fedjax_mm.stacks import Models, Stack, by_model, is_lockstep, join, over_models, split
from fedjax_mm.tasks.view import appeals, client_losses, client_weights


class CurrentRound(NamedTuple):
    """Current round: its number t, its key, and its groups."""

    round: Round
    rng_key: PRNGKeyArray
    groups: Groups


class Options(NamedTuple):
    """Settings of speed and memory; results depend on them only by the order of summation."""

    client_map: chunks.ClientMap
    client_axis: str | None
    with_reports: bool  # whether the assignment observes them


class Trained(NamedTuple):
    """Result of local training, of one client or of groups."""

    total: base.Contribution
    client_states: base.ClientState
    reports: Any


def look(
    stacks: Sequence[Stack], rng_key: PRNGKeyArray, round: Round, models: Models, options: Options
) -> Look:
    """Returns answers to the assignment's questions about the models as they are after a round."""
    parts, num_models = split(stacks, models), sum(len(each.models) for each in stacks)

    def ask(question: Callable[[Task, Params], Array]) -> Array:
        return by_model(stacks, [over_models(question, stack, of.params) for stack, of in parts])

    def updates() -> base.Updates:
        trial = [stack._replace(algorithm=measuring(stack.algorithm)) for stack in stacks]
        moved = join([of._replace(server=(of.server, of.clients), clients=()) for _, of in parts])
        shape = num_models, stacks[0].task.num_clients
        everybody = Groups(jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape))
        now = CurrentRound(round + 1, keys.round_key(rng_key, round + 1), everybody)
        trained = train(trial, now, moved, options._replace(with_reports=True))
        total = by_model(stacks, [each.total for each in trained])
        norms = by_model(stacks, [each.reports for each in trained]) / total.weight[:, None]
        return base.Updates(norms, total.num_gradients)

    def metric(*names: str) -> Array:
        key, one = keys.round_key(rng_key, round), partial(metric_of, names)

        def of_stack(stack: Stack, models: Models) -> Array:
            each = keys.metrics_keys(key, stack.models)
            return over_models(one, stack, each, models.params)

        return by_model(stacks, [of_stack(*each) for each in parts])

    return Look(
        losses=partial(ask, client_losses),
        appeals=partial(ask, appeals),
        weights=partial(ask, lambda task, _: client_weights(task)),
        updates=updates,
        metric=metric,
    )


def measuring(algorithm: Algorithm) -> Algorithm:
    """Returns the algorithm whose clients only report the norm of what they would send.

    That is the part of the update that the assignment's scale multiplies. The server's state is a
    pair: its own, and the states of all clients.
    """

    def client(
        local: base.LocalProblem, server_state: Any, client_state: base.ClientState
    ) -> tuple[base.Contribution, base.ClientState]:
        server, clients = server_state
        own = jax.tree.map(itemgetter(local.client), clients)

        # Training does not depend on the scale: it is not repeated.
        def send(scale: Array) -> base.Contribution:
            sent, _ = algorithm.client(local._replace(scale=scale), server, own)
            return sums.dense_update(sent._replace(report=()), local.params)

        sent = jax.vmap(send)(jnp.arange(2.0))
        scaled = jax.tree.map(lambda x: x[1] - x[0], sent.update)
        weight, num_gradients = sent.weight[1], sent.num_gradients[1]
        measured = base.Contribution((), weight, num_gradients, optax.tree.norm(scaled))
        return measured, client_state

    def num_steps(task: Task, client: base.Index, server_state: Any) -> int | Int[Array, ""]:
        return algorithm.num_steps(task, client, server_state[0])

    return algorithm._replace(client=client, num_steps=num_steps)


def metric_of(
    names: Sequence[str], task: Task, rng_key: PRNGKeyArray, params: Params
) -> Float[Array, ""]:
    """Returns the first of some metrics that the task has; else raises `ValueError`."""
    metrics = task.metrics(rng_key, params)
    for name in names:
        if name in metrics:
            return metrics[name]
    wanted, there = " or ".join(map(repr, names)), ", ".join(map(repr, metrics)) or "none"
    raise ValueError(
        f"the assignment looks at the metric {wanted}; {type(task).__name__} has {there}: choose "
        "another assignment, or give the task that metric"
    )


def train(
    stacks: Sequence[Stack], now: CurrentRound, models: Models, options: Options
) -> list[Trained]:
    """Trains every model's group; returns the result of each stack."""
    is_only = len(stacks) == 1
    return [train_stack(*each, now, options, is_only) for each in split(stacks, models)]


def train_stack(
    stack: Stack, models: Models, now: CurrentRound, options: Options, is_only: bool
) -> Trained:
    """Trains the groups of a stack's models, as one list or as a row for each model."""
    groups, places = stack.groups(now.groups), None
    is_shared = all(jax.tree.leaves(stack.shared))
    if groups.models is not None and not (is_shared and is_only):
        # Each place of a list would copy the data of its model, and compute each stack: rows.
        places = places_in_rows(groups, len(stack.models))
        groups = in_rows(groups, len(stack.models))
    model_keys = keys.model_keys(now.rng_key, stack.models)
    size = chunks.chunk_size_of(options.client_map, stack.task, models.params, groups.clients.size)
    one = partial(train_group, stack.algorithm, now.round, options, size)
    if groups.models is not None:
        return one(stack, model_keys, groups, models)
    is_chunked = size not in (None, 1) and len(stack.models) > 1
    if is_chunked and is_shared and places is None:
        # A chunk of one model alone is filled by no more than its group: a list fills them all.
        trained, shape = one(stack, model_keys, in_list(groups), models), groups.clients.shape
        reports = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), trained.reports)
        return trained._replace(reports=reports)
    one_by_one = size is not None or not is_lockstep(stack, models)
    trained = over_models(one, stack, model_keys, groups, models, one_by_one=one_by_one)
    if places is None:
        return trained
    listed = jax.tree.map(lambda x: x.at[places].get(mode="fill", fill_value=0), trained.reports)
    return trained._replace(reports=listed)


class _ModelInputs(NamedTuple):
    """Inputs that all clients of one model share."""

    task: Task
    key: PRNGKeyArray
    params: Params
    server_state: base.ServerState


def _model_inputs(task: Task | Stack, key: PRNGKeyArray, models: Models, row: Any) -> _ModelInputs:
    """Returns the inputs of a group's clients, or of those of one row of a stack."""
    given = key, models.params, models.server
    if isinstance(task, Stack):
        return _ModelInputs(task.task_at(row), *jax.tree.map(itemgetter(row), given))
    return _ModelInputs(task, *given)


def train_group(
    algorithm: Algorithm,
    round: Round,
    options: Options,
    chunk_size: int | None,
    task: Task | Stack,
    model_key: PRNGKeyArray,
    group: Groups,
    model: Models,
) -> Trained:
    """Trains one group: returns the sum of its contributions, new client states and reports.

    With a client axis, every device of the axis trains a share of the group. A list of the clients
    of all models takes a stack in place of the task; the keys, the models and the sums that are
    returned then have a models axis.
    """
    # Memory does not grow with the group: `chunk_size` clients at a time are computed and added up,
    # and of the states of all clients only the participants' rows are written.
    size, is_list = len(group.clients), isinstance(task, Stack)
    each_model = jax.vmap if is_list else lambda function: function
    inputs = partial(_model_inputs, task, model_key, model)

    def index(row: Any, client: Any) -> Any:
        """Returns where a client's state is among those of all clients."""
        return (row, client) if is_list else client

    def num_steps(client: base.Index, row: Any) -> int | Int[Array, ""]:
        given = inputs(row)
        return algorithm.num_steps(given.task, client, given.server_state)

    @partial(jax.jit, inline=True)  # one trace for `eval_shape` and for all chunks
    def contribute(client: base.Index, row: Any, scale: Any, state: base.ClientState) -> Trained:
        (task, key, params, server_state), scale = inputs(row), 1.0 if scale is None else scale
        key = keys.client_key(key, client)
        local = base.LocalProblem(key, round, task, client, params, scale)
        sent, state = algorithm.client(local, server_state, state)
        return Trained(sent._replace(report=()), state, sent.report if options.with_reports else ())

    def add_clients(so_far: Trained, chunk: tuple[Array, Groups]) -> tuple[Trained, None]:
        place, (number, scale, _, row) = chunk
        present = number >= 0
        client, row = chunks.repeat_first(present, (number, row))
        states = jax.tree.map(itemgetter(index(row, client)), so_far.client_states)
        new = chunks.compute_chunk(contribute, present, client, row, scale, states, skip=may_skip)
        # Index -1 would write to the last client; an index out of range is dropped.
        written = jnp.where(present, client, task.num_clients)
        rows = index(row, written), jnp.where(present, place, size)
        added = rows, (new.client_states, new.reports)
        if options.client_axis is not None and jax.tree.leaves(added[1]):
            added = lax.all_gather(added, options.client_axis, tiled=True)
        old = so_far.client_states, so_far.reports
        put = [chunks.put_rows(*each) for each in zip(old, *added, strict=True)]
        of_model = (row,) if is_list else ()
        return Trained(sums.add_chunk(so_far.total, new.total, present, *of_model), *put), None

    order = chunks.longest_first(num_steps, group.clients, group.models)
    may_skip = chunk_size is not None or order is not None
    state = jax.tree.map(itemgetter(index(0, 0)), model.clients)
    first = jax.tree.map(itemgetter(0), (group.clients, group.models, group.scale))
    one = jax.eval_shape(contribute, *first, state)
    reports = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), one.reports)
    nothing = each_model(partial(sums.zero_sum, one.total))(model.params)
    trained = Trained(nothing, model.clients, reports)
    for some in chunks.in_chunks((jnp.arange(size), group), order, chunk_size, options.client_axis):
        trained, _ = lax.scan(add_clients, trained, some)
    total = each_model(sums.finish_sum)(trained.total, model.params)
    total = total if options.client_axis is None else lax.psum(total, options.client_axis)
    return trained._replace(total=total)


def aggregate(
    stacks: Sequence[Stack], now: CurrentRound, models: Models, trained: list[Trained]
) -> Models:
    """Applies the server's step to every model.

    A model that nobody trained is not changed, unless its algorithm says so.
    """

    def of_stack(stack: Stack, models: Models, trained: Trained) -> Models:
        def of_model(task: Task, size: Array, trained: Trained, model: Models) -> Models:
            is_trained = stack.algorithm.steps_idle or size > 0
            # An idle model's sums are 0, and the gradient of 0/0 is NaN even where `jnp.where`
            # drops the value: ones take their place.
            total = jax.tree.map(lambda x: jnp.where(is_trained, x, 1), trained.total)
            old, states = (model.params, model.server), trained.client_states
            given = base.Aggregation(now.round, task, *old, states, total)
            new = stack.algorithm.server(given)
            params, server_state = jax.tree.map(partial(jnp.where, is_trained), new, old)
            return Models(params, server_state, states)

        trained = trained._replace(reports=())  # those of a list have no models axis
        return over_models(of_model, stack, stack.rows(sizes), trained, models)

    sizes = now.groups.sizes(sum(len(stack.models) for stack in stacks))
    parts = zip(split(stacks, models), trained, strict=True)
    return join([of_stack(*part, new) for part, new in parts])


def observe(
    assignment: Assignment,
    stacks: Sequence[Stack],
    now: CurrentRound,
    state: Any,
    trained: list[Trained],
    *,
    like: Any,
) -> Any:
    """Returns the assignment's state after it observed the reports, if it observes any."""
    if assignment.observe is None:
        return state
    reports = [each.reports for each in trained]
    checks.check_alike("the models' algorithms report differently, but one observes all", *reports)
    if now.groups.models is None:
        all_reports = by_model(stacks, reports)
    else:  # zeros of the stacks that a client does not train
        all_reports = jax.tree.map(lambda *each: reduce(jnp.add, each), *reports)
    given = (now.round, now.groups, all_reports, state)
    return after_observing(assignment, *given, like=like)
