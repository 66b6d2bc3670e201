"""The compiled loop: assign -> train -> aggregate -> record.

The only place that adds the client and the model axis. Everything is pure: jit it, vmap it over
seeds and over any number of the task or the algorithm, differentiate it.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm.base import (
    Algorithm,
    Assignment,
    AssignmentState,
    ClientState,
    Contribution,
    Params,
    Round,
    ServerState,
    Task,
)
from fedjax_mm.contribution import add_chunk, finish_sum, zero_sum

ClientMap: TypeAlias = Literal["vmap", "scan"] | int
"""How a group's clients are computed: all at once, one by one, or in chunks of that many."""


class Models(NamedTuple):
    """What the rounds change of the M models; every leaf has a leading models axis."""

    params: Params
    server: ServerState
    clients: ClientState  # second axis: all clients


class State(NamedTuple):
    """All that the next round needs."""

    rng_key: PRNGKeyArray
    round: Int[Array, ""]  # rounds done
    models: Models
    assignment: AssignmentState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trace:
    """What was recorded; the first entry of every array is the state before the recorded rounds.

    Attributes:
      round: ``int32[records]``, rounds done.
      metrics: the task's metrics by name, each ``float[records, models]``.
      client_updates: ``int32[records, models]``, local trainings since the record before.
      gradients: ``int32[records, models]``, gradients computed since the record before; -1 in
        either of the two if there were more than 32 bits hold.
      upload_size: numbers that one client sends up per local training.
      download_size: numbers that one client receives per local training.
    """

    round: Array
    metrics: dict[str, Array]
    client_updates: Array
    gradients: Array
    upload_size: int = dataclasses.field(metadata={"static": True})
    download_size: int = dataclasses.field(metadata={"static": True})


def simulate(
    rng_key: PRNGKeyArray,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm,
    assignment: Assignment,
    num_rounds: int,
    *,
    client_map: ClientMap = "vmap",
    record_every: int = 1,
    params: Params | None = None,
    client_axis: str | None = None,
) -> tuple[State, Trace]:
    """Trains M models for `num_rounds` rounds and records them, from round 0 on.

    Args:
      rng_key: the seed; every draw is keyed by (seed, round, model, client), so that results do not
        depend on `client_map` or on what runs beside.
      tasks: one task that all models learn, or one per model, of equal structure.
      algorithm: how clients train and the server aggregates.
      assignment: who trains what.
      num_rounds: T.
      client_map: "vmap", "scan" or a chunk size: a choice of speed and memory, with equal results
        up to the order of summation.
      record_every: rounds between records; it divides `num_rounds`.
      params: initial parameters, of one model (shared by all) or with a leading models axis; drawn
        by the tasks if None.
      client_axis: inside `jax.shard_map`, the mesh axis whose devices share each group's clients;
        everything else is replicated over it. Take gradients outside of `jax.shard_map`.

    Returns:
      The final state, and the trace with ``1 + num_rounds / record_every`` records.

    Raises:
      ValueError: if arguments do not fit together.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedavg, mfa_rr, quadratic, simulate
      >>> def run(rng_key, learning_rate):
      ...     algorithm = fedavg(learning_rate, local_steps=5)
      ...     return simulate(rng_key, quadratic(24, 4, mu=2e-4), algorithm, mfa_rr(24, 2), 20)[1]
      >>> seeds, rates = jax.random.split(jax.random.key(0), 3), jax.numpy.array([0.05, 0.1])
      >>> sweep = jax.jit(jax.vmap(jax.vmap(run, (0, None)), (None, 0)))
      >>> sweep(seeds, rates).metrics["excess_loss"].shape  # rates, seeds, records, models
      (2, 3, 21, 2)
    """
    state = init(rng_key, tasks, algorithm, assignment, params)
    return advance(
        state,
        tasks,
        algorithm,
        assignment,
        num_rounds,
        client_map=client_map,
        record_every=record_every,
        client_axis=client_axis,
    )


def init(
    rng_key: PRNGKeyArray,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm,
    assignment: Assignment,
    params: Params | None = None,
) -> State:
    """The state before round 1. Arguments as in `simulate`."""
    task, task_axis = _stack(tasks, assignment)
    init_key = jax.random.fold_in(rng_key, 0)
    model_keys = _model_keys(init_key, assignment.num_models)
    drawn = jax.vmap(lambda key, task: task.init(key), (0, task_axis))
    if params is None:
        params = drawn(model_keys, task)
    else:
        params = _per_model(params, jax.eval_shape(drawn, model_keys, task))

    def init_model(task: Task, params: Params) -> tuple[ServerState, ClientState]:
        server, client = algorithm.init(task, params)
        clients = (assignment.num_clients,)
        return server, jax.tree.map(lambda x: jnp.broadcast_to(x, clients + jnp.shape(x)), client)

    server, clients = jax.vmap(init_model, (task_axis, 0))(task, params)
    assignment_state = assignment.init(jax.random.fold_in(init_key, 0))
    return State(rng_key, jnp.asarray(0), Models(params, server, clients), assignment_state)


def advance(
    state: State,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm,
    assignment: Assignment,
    num_rounds: int,
    *,
    client_map: ClientMap = "vmap",
    record_every: int = 1,
    client_axis: str | None = None,
) -> tuple[State, Trace]:
    """`num_rounds` more rounds from a state. Arguments and result as in `simulate`."""
    task, task_axis = _stack(tasks, assignment)
    _check_rounds(num_rounds, record_every)
    chunk_size = _chunk_size(client_map)

    def one_round(state: State, _: None) -> tuple[State, tuple[Array, Array]]:
        t, models = state.round + 1, state.models
        key = jax.random.fold_in(state.rng_key, t)
        groups, assignment_state = assignment.assign(
            jax.random.fold_in(key, 0), t, state.assignment
        )
        part = partial(train, algorithm, t, chunk_size, client_axis)
        over_models = jax.vmap(part, (0, task_axis, 0, 0))
        total, clients = over_models(_model_keys(key, assignment.num_models), task, groups, models)
        models = models._replace(clients=clients)
        participants = jnp.sum(groups >= 0, axis=1, dtype=jnp.int32)
        models = jax.vmap(partial(aggregate, algorithm, t))(participants, total, models)
        counts = participants, total.num_gradients
        return State(state.rng_key, t, models, assignment_state), counts

    def record(state: State) -> tuple[Array, dict[str, Array]]:
        return state.round, measure(state, tasks, assignment)

    def rounds_to_record(state: State, _: None) -> tuple[State, Any]:
        state, counts = lax.scan(one_round, state, length=record_every)
        return state, (record(state), jax.tree.map(_count, counts))

    nothing = jnp.zeros(assignment.num_models, jnp.int32)
    first = record(state), (nothing, nothing)
    upload_size, download_size = _message_sizes(algorithm, task, task_axis, state)
    state, rest = lax.scan(rounds_to_record, state, length=num_rounds // record_every)
    (rounds, metrics), (client_updates, gradients) = jax.tree.map(
        lambda start, later: jnp.concatenate([start[None], later]), first, rest
    )
    return state, Trace(rounds, metrics, client_updates, gradients, upload_size, download_size)


def measure(
    state: State, tasks: Task | Sequence[Task], assignment: Assignment
) -> dict[str, Float[Array, " models"]]:
    """The tasks' metrics of all models."""
    task, task_axis = _stack(tasks, assignment)
    over_models = jax.vmap(lambda task, params: task.metrics(params), (task_axis, 0))
    return over_models(task, state.models.params)


def train(
    algorithm: Algorithm,
    round: Round,
    chunk_size: int | None,
    client_axis: str | None,
    model_key: PRNGKeyArray,
    task: Task,
    group: Int[Array, " group"],
    model: Models,
) -> tuple[Contribution, ClientState]:
    """The sum of one group's contributions to one model, and the clients' new states.

    Clients are computed `chunk_size` at a time and added up as they come, so that memory does not
    grow with the group. Their states come home by rows: only participants' rows move. With a client
    axis every device of it trains a share of the group, and rows and sums are put together.
    """
    if client_axis is not None:
        group = _share(group, client_axis)
    chunk_size = min(chunk_size or len(group), len(group))
    padding = -len(group) % chunk_size
    chunks = jnp.pad(group, (0, padding), constant_values=-1).reshape(-1, chunk_size)

    def contribute(
        client: Int[Array, ""], client_state: ClientState
    ) -> tuple[Contribution, ClientState]:
        key = jax.random.fold_in(model_key, client)
        return algorithm.client(key, round, task, client, model.params, model.server, client_state)

    def add_clients(
        carry: tuple[Contribution, ClientState], chunk: Int[Array, " chunk"]
    ) -> tuple[tuple[Contribution, ClientState], None]:
        total, clients = carry
        present = chunk >= 0
        row = jnp.where(present, chunk, 0)
        states = jax.tree.map(lambda x: x[row], clients)
        contributions, states = jax.vmap(contribute)(row, states)
        # Padding writes nowhere: out of range is dropped, where -1 would wrap to the last client.
        home = jnp.where(present, chunk, task.num_clients)
        if client_axis is not None and jax.tree.leaves(states):
            home, states = lax.all_gather((home, states), client_axis, tiled=True)
        clients = jax.tree.map(lambda x, new: x.at[home].set(new, mode="drop"), clients, states)
        return (add_chunk(total, contributions, present), clients), None

    one_state = jax.tree.map(lambda x: x[0], model.clients)
    contribution, _ = jax.eval_shape(contribute, jnp.int32(0), one_state)
    start = zero_sum(contribution, model.params), model.clients
    (total, clients), _ = lax.scan(add_clients, start, chunks)
    total = finish_sum(total, model.params)
    return total if client_axis is None else lax.psum(total, client_axis), clients


def _share(group: Int[Array, " group"], client_axis: str) -> Int[Array, " share"]:
    """This device's part of a group; parts are equally long, and padded."""
    num_devices = lax.axis_size(client_axis)
    share_size = -(-len(group) // num_devices)
    group = jnp.pad(group, (0, share_size * num_devices - len(group)), constant_values=-1)
    return group.reshape(num_devices, share_size)[lax.axis_index(client_axis)]


def aggregate(
    algorithm: Algorithm,
    round: Round,
    num_participants: Int[Array, ""],
    total: Contribution,
    model: Models,
) -> Models:
    """The server's step of one model; a model that nobody trained stays as it is."""
    old = model.params, model.server
    # An idle model's total is replaced, so that no 0/0 is selected away: its gradient would be NaN.
    total = jax.tree.map(lambda x: jnp.where(num_participants > 0, x, jnp.ones_like(x)), total)
    new = algorithm.server(round, *old, total)
    params, server = jax.tree.map(lambda x, y: jnp.where(num_participants > 0, x, y), new, old)
    return Models(params, server, model.clients)


def _count(counts: Int[Array, "rounds models"]) -> Int[Array, " models"]:
    """The sum over rounds, or -1 if it may not fit: a wrong number would look like a right one."""
    fits = counts.sum(0, dtype=jnp.float32) < 2**31 - 2**10
    return jnp.where(fits, counts.sum(0), -1)


def _model_keys(rng_key: PRNGKeyArray, num_models: int) -> PRNGKeyArray:
    """One key per model; number 0 is kept for the assignment."""
    return jax.vmap(lambda model: jax.random.fold_in(rng_key, model))(1 + jnp.arange(num_models))


def _stack(tasks: Task | Sequence[Task], assignment: Assignment) -> tuple[Task, int | None]:
    """The tasks as one pytree, and its models axis: None if all models learn the same task."""
    if isinstance(tasks, Task):
        task, axis, sizes = tasks, None, {tasks.num_clients}
    else:
        if len(tasks) != assignment.num_models:
            raise ValueError(
                f"there are {len(tasks)} tasks but the assignment has {assignment.num_models} "
                "models; give one task for all models or one per model"
            )
        sizes = {task.num_clients for task in tasks}
        try:
            task, axis = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tasks), 0
        except ValueError as error:
            raise ValueError(
                "the tasks differ in structure or array shapes; give tasks of equal structure"
            ) from error
    if sizes != {assignment.num_clients}:
        raise ValueError(
            f"the tasks have {sorted(sizes)} clients but the assignment draws from "
            f"{assignment.num_clients}; make them equal"
        )
    return task, axis


def _per_model(params: Params, shapes: Params) -> Params:
    """Given initial parameters with a models axis: shared ones are broadcast."""

    def fit(given: Any, wanted: jax.ShapeDtypeStruct) -> Array:
        given = jnp.asarray(given, wanted.dtype)
        if given.shape not in (wanted.shape, wanted.shape[1:]):
            raise ValueError(
                f"initial parameters have shape {given.shape}; give {wanted.shape[1:]} (one model, "
                f"shared by all) or {wanted.shape} (one per model)"
            )
        return jnp.broadcast_to(given, wanted.shape)

    given, wanted = str(jax.tree.structure(params)), str(jax.tree.structure(shapes))
    if given != wanted:
        raise ValueError(f"initial parameters have the structure {given}; the task has {wanted}")
    return jax.tree.map(fit, params, shapes)


def _message_sizes(
    algorithm: Algorithm, task: Task, task_axis: int | None, state: State
) -> tuple[int, int]:
    """Numbers that one client sends up and receives per local training, from shapes alone."""

    def message(task: Task, model: Models) -> tuple[Any, Params]:
        client, client_state = jnp.int32(0), jax.tree.map(lambda x: x[0], model.clients)
        contribution, _ = algorithm.client(
            state.rng_key, 1, task, client, model.params, model.server, client_state
        )
        return finish_sum(zero_sum(contribution, model.params), model.params).update, model.params

    messages = jax.eval_shape(jax.vmap(message, (task_axis, 0)), task, state.models)
    up, down = (
        sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(message)) for message in messages
    )
    return up, down


def _check_rounds(num_rounds: int, record_every: int) -> None:
    if num_rounds < 1:
        raise ValueError(f"num_rounds is {num_rounds}; it must be at least 1")
    if record_every < 1 or num_rounds % record_every:
        raise ValueError(
            f"record_every is {record_every}; it must be a divisor of num_rounds = {num_rounds}"
        )


def _chunk_size(client_map: ClientMap) -> int | None:
    """Clients computed at once; None means all."""
    if client_map == "vmap":
        return None
    if client_map == "scan":
        return 1
    if type(client_map) is int and client_map > 0:
        return client_map
    raise ValueError(
        f"client_map is {client_map!r}; it must be 'vmap', 'scan' or a positive chunk size"
    )
