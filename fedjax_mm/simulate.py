"""The compiled loop: assign -> train -> aggregate -> record.

The only place that adds the client and the model axis. Everything is pure: jit it, vmap it over
seeds and over any number of the task or the algorithm, differentiate it.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from fedjax_mm.base import (
    Algorithm,
    AnalyticTask,
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
from fedjax_mm.kinds import (
    Kind,
    Models,
    axis_of,
    have_equal_steps,
    in_order,
    is_lockstep,
    join,
    kinds_of,
    over_models,
    split,
    vmap_unless_one,
)

ClientMap: TypeAlias = Literal["auto", "vmap", "scan"] | int
"""How local trainings are computed: those of all models at once, one by one, or, model by model, in
chunks of that many; "auto" chooses by the device and the size of a model."""

_CHUNK_BYTES = 32 * 2**10  # parameters of clients that one CPU device trains at once


class State(NamedTuple):
    """All that the next round needs."""

    rng_key: PRNGKeyArray
    round: Int[Array, ""]  # rounds done
    models: Models
    assignment: AssignmentState


class Counts(NamedTuple):
    """What was done since the last record, ``int32[models]`` each; see `Trace`."""

    client_updates: Any
    gradients: Any
    idle_rounds: Any


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
      idle_rounds: ``int32[records, models]``, rounds since the record before in which nobody
        trained the model.
      upload_size: numbers that one client sends up per local training of each model.
      download_size: numbers that one client receives per local training of each model.
    """

    round: Array
    metrics: dict[str, Array]
    client_updates: Array
    gradients: Array
    idle_rounds: Array
    upload_size: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    download_size: tuple[int, ...] = dataclasses.field(metadata={"static": True})


def simulate(
    rng_key: PRNGKeyArray,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment,
    num_rounds: int,
    *,
    client_map: ClientMap = "auto",
    record_every: int = 1,
    params: Params | None = None,
    client_axis: str | None = None,
) -> tuple[State, Trace]:
    """Trains M models for `num_rounds` rounds and records them, from round 0 on.

    Args:
      rng_key: the seed; every draw is keyed by (seed, round, model, client), so that results do not
        depend on `client_map` or on what runs beside.
      tasks: one task that all models learn, or one per model. Tasks of equal structure are stacked,
        but for the arrays that they share; others are unrolled inside the compiled round.
      algorithm: how clients train and the server aggregates; one for all models, or one per model.
      assignment: who trains what.
      num_rounds: T.
      client_map: "auto", "vmap", "scan" or a chunk size: a choice of speed and memory, with equal
        results up to the order of summation.
      record_every: rounds between records; it divides `num_rounds`.
      params: initial parameters, of one model (shared by all) or with a leading models axis; drawn
        by the tasks if None. Where models differ in structure, a list with those of each model.
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
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment,
    params: Params | None = None,
) -> State:
    """The state before round 1. Arguments as in `simulate`."""
    kinds = kinds_of(tasks, algorithm, assignment)
    init_key = jax.random.fold_in(rng_key, 0)
    model_keys = _model_keys(init_key, assignment.num_models)
    given = _given_params(params, kinds)
    models = join([_init_kind(model_keys, *each) for each in zip(kinds, given, strict=True)])
    assignment_state = assignment.init(jax.random.fold_in(init_key, 0))
    return State(rng_key, jnp.asarray(0), models, assignment_state)


def _init_kind(model_keys: PRNGKeyArray, kind: Kind, params: Params | None) -> Models:
    """The models of one kind before round 1."""
    model_keys, task_axis = model_keys[np.array(kind.models)], axis_of(kind.shared)
    drawn = jax.vmap(lambda key, task: task.init(key), (0, task_axis))
    if params is None:
        params = drawn(model_keys, kind.task)
    else:
        params = _per_model(params, jax.eval_shape(drawn, model_keys, kind.task))

    def init_model(task: Task, params: Params) -> tuple[ServerState, ClientState]:
        server, client = kind.algorithm.init(task, params)
        clients = (task.num_clients,)
        return server, jax.tree.map(lambda x: jnp.broadcast_to(x, clients + jnp.shape(x)), client)

    server, clients = jax.vmap(init_model, (task_axis, 0))(kind.task, params)
    if kind.algorithm.start is not None:
        keys = jax.vmap(jax.random.fold_in, (0, None))(model_keys, 1)
        start = partial(_start_clients, kind, kind.algorithm.start)
        clients = over_models(start, kind, keys, params, clients, one_by_one=True)
    return Models(params, server, clients)


def _start_clients(
    kind: Kind,
    start: Any,
    task: Task,
    model_key: PRNGKeyArray,
    params: Params,
    clients: ClientState,
) -> ClientState:
    """The states of all clients of one model before round 1."""
    numbers = jnp.arange(task.num_clients)
    keys = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(model_key, numbers))

    def of_client(row: tuple[Array, Int[Array, ""], ClientState]) -> ClientState:
        words, client, state = row
        key = jax.random.wrap_key_data(words, impl=jax.random.key_impl(model_key))
        return start(key, task, client, params, state)

    models = jax.tree.map(lambda x: x[None], params)
    chunk_size = chunk_size_of("auto", kind, models, task.num_clients)
    return lax.map(of_client, (keys, numbers, clients), batch_size=chunk_size or task.num_clients)


def advance(
    state: State,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment,
    num_rounds: int,
    *,
    client_map: ClientMap = "auto",
    record_every: int = 1,
    client_axis: str | None = None,
) -> tuple[State, Trace]:
    """`num_rounds` more rounds from a state. Arguments and result as in `simulate`."""
    kinds = kinds_of(tasks, algorithm, assignment)
    _check_rounds(num_rounds, record_every)
    _check_client_map(client_map)

    def one_round(state: State, _: None) -> tuple[State, Counts]:
        t = state.round + 1
        key = jax.random.fold_in(state.rng_key, t)
        groups, assignment_state = assignment.assign(
            jax.random.fold_in(key, 0), t, state.assignment
        )
        parts = zip(kinds, split(state.models, kinds), strict=True)
        begun = [_begin_kind(kind, t, old) for kind, old in parts]
        if assignment.select is not None:
            select_key = jax.random.fold_in(key, 1 + assignment.num_models)
            groups = assignment.select(select_key, t, groups, _appeal(kinds, begun))
        model_keys = _model_keys(key, assignment.num_models)
        models, gradients = [], []
        for kind, old in zip(kinds, begun, strict=True):
            which = np.array(kind.models)
            new, computed = _train_kind(
                kind, t, client_map, client_axis, model_keys[which], groups[which], old
            )
            models.append(new)
            gradients.append(computed)
        participants = jnp.sum(groups >= 0, axis=1, dtype=jnp.int32)
        is_idle = (participants == 0).astype(jnp.int32)
        counts = Counts(participants, in_order(kinds, gradients), is_idle)
        return State(state.rng_key, t, join(models), assignment_state), counts

    def record(state: State) -> tuple[Array, dict[str, Array]]:
        return state.round, measure(state, tasks, algorithm, assignment, client_map=client_map)

    def rounds_to_record(state: State, _: None) -> tuple[State, Any]:
        state, counts = lax.scan(one_round, state, length=record_every)
        return state, (record(state), jax.tree.map(_count, counts))

    nothing = jnp.zeros(assignment.num_models, jnp.int32)
    first = record(state), Counts(nothing, nothing, nothing)
    state, rest = lax.scan(rounds_to_record, state, length=num_rounds // record_every)
    (rounds, metrics), counts = jax.tree.map(
        lambda start, later: jnp.concatenate([start[None], later]), first, rest
    )
    upload_size, download_size = _message_sizes(kinds, state)
    made = Counts(*counts)._asdict()
    return state, Trace(
        rounds, metrics, **made, upload_size=upload_size, download_size=download_size
    )


def _begin_kind(kind: Kind, round: Round, models: Models) -> Models:
    """The models of one kind at the beginning of a round."""
    if kind.algorithm.begin is None:
        return models
    begin = partial(kind.algorithm.begin, round)
    return models._replace(server=over_models(begin, kind, *models, one_by_one=False))


def _appeal(kinds: Sequence[Kind], models: Sequence[Models]) -> Bool[Array, "models clients"]:
    """Which models appeal to which clients."""

    def of_kind(kind: Kind, models: Models) -> Bool[Array, "models clients"]:
        if kind.algorithm.appeal is None:
            raise ValueError(
                "the assignment lets clients stay away, but the algorithm does not tell what "
                "appeals to them; wrap it with `requiring`"
            )
        return over_models(kind.algorithm.appeal, kind, *models, one_by_one=False)

    return in_order(kinds, [of_kind(*each) for each in zip(kinds, models, strict=True)])


def measure(
    state: State,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment,
    *,
    client_map: ClientMap = "auto",
) -> dict[str, Float[Array, " models"]]:
    """The tasks' metrics of all models; NaN where a model's task does not have one."""
    kinds = kinds_of(tasks, algorithm, assignment)
    # Beside the keys of the round's models, of its assignment and of who stays away.
    key = jax.random.fold_in(state.rng_key, state.round)
    model_keys = _model_keys(
        jax.random.fold_in(key, 2 + assignment.num_models), assignment.num_models
    )
    measured = []
    for kind, models in zip(kinds, split(state.models, kinds), strict=True):
        one_by_one = chunk_size_of(client_map, kind, models.params, len(kind.models)) is not None
        keys = model_keys[np.array(kind.models)]
        measured.append(_measure_kind(kind, keys, models, one_by_one=one_by_one))
    names = dict.fromkeys(name for metrics in measured for name in metrics)

    def of_kind(name: str, metrics: dict[str, Array], kind: Kind) -> Array:
        return metrics[name] if name in metrics else jnp.full(len(kind.models), jnp.nan)

    return {
        name: in_order(kinds, [of_kind(name, *each) for each in zip(measured, kinds, strict=True)])
        for name in names
    }


def _measure_kind(
    kind: Kind, model_keys: PRNGKeyArray, models: Models, *, one_by_one: bool
) -> dict[str, Array]:
    """The algorithm's metrics, if it has its own, or else the task's, of what it puts out."""
    output, metrics = kind.algorithm.output, kind.algorithm.metrics

    def of_model(task: Task, key: PRNGKeyArray, model: Models) -> dict[str, Array]:
        params = model.params if output is None else output(model.params, model.server)
        if metrics is None:
            return task.metrics(params)
        return metrics(key, task, params, model.clients)

    return over_models(of_model, kind, model_keys, models, one_by_one=one_by_one)


def are_finite(
    state: State,
    metrics: Mapping[str, Array],
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment,
) -> Bool[Array, " models"]:
    """Whether all parameters of each model are, and its loss, if its task has one."""
    kinds = kinds_of(tasks, algorithm, assignment)

    def of_kind(kind: Kind, models: Models) -> Bool[Array, " models"]:
        leaves = jax.tree.leaves(models.params)
        finite = [jnp.isfinite(x).reshape(len(x), -1).all(1) for x in leaves]
        keys = _model_keys(state.rng_key, len(kind.models))
        measure_kind = partial(_measure_kind, kind, keys, one_by_one=False)
        if "loss" in jax.eval_shape(measure_kind, models):
            finite.append(jnp.isfinite(metrics["loss"][np.array(kind.models)]))
        return functools.reduce(jnp.logical_and, finite)

    parts = zip(kinds, split(state.models, kinds), strict=True)
    return in_order(kinds, [of_kind(kind, models) for kind, models in parts])


def _train_kind(
    kind: Kind,
    round: Round,
    client_map: ClientMap,
    client_axis: str | None,
    model_keys: PRNGKeyArray,
    groups: Int[Array, "models group"],
    models: Models,
) -> tuple[Models, Int[Array, " models"]]:
    """One round of the models of one kind, and the gradients computed for each."""
    chunk_size = chunk_size_of(client_map, kind, models.params, groups.size)
    one_by_one = chunk_size is not None or not is_lockstep(kind, models)
    part = partial(train, kind.algorithm, round, chunk_size, client_axis)
    args = model_keys, groups, models
    total, clients = over_models(part, kind, *args, one_by_one=one_by_one)
    models = models._replace(clients=clients)
    participants = jnp.sum(groups >= 0, axis=1, dtype=jnp.int32)
    models = jax.vmap(partial(aggregate, kind.algorithm, round))(participants, total, models)
    return models, total.num_gradients


def train(
    algorithm: Algorithm,
    round: Round,
    chunk_size: int | None,
    client_axis: str | None,
    task: Task,
    model_key: PRNGKeyArray,
    group: Int[Array, " group"],
    model: Models,
) -> tuple[Contribution, ClientState]:
    """The sum of one group's contributions to one model, and the clients' new states.

    Clients are computed `chunk_size` at a time and added up as they come, so that memory does not
    grow with the group. Where they take different numbers of local steps, those with the most come
    first, few at a time, so that at most twice the steps that count are computed (by one replica:
    where replicas are vmapped, all take the steps of the longest). Their states come
    home by rows: only participants' rows move. With a client axis every device of it trains a share
    of the group, and rows and sums are put together.
    """
    num_steps = _steps_of(algorithm, task, model.server, group)
    if num_steps is not None:
        group = group[jnp.argsort(-num_steps)]
    if client_axis is not None:
        group = _share(group, client_axis)
    # As plain words: keys that a scan is fed are falsely called reused by JAX's checker under vmap.
    keys = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(model_key, group))

    def contribute(
        client: Int[Array, ""], key: UInt32[Array, " words"], client_state: ClientState
    ) -> tuple[Contribution, ClientState]:
        key = jax.random.wrap_key_data(key, impl=jax.random.key_impl(model_key))
        return algorithm.client(key, round, task, client, model.params, model.server, client_state)

    def add_clients(
        carry: tuple[Contribution, ClientState], chunk: tuple[Int[Array, " chunk"], Array]
    ) -> tuple[tuple[Contribution, ClientState], None]:
        (total, clients), (numbers, keys) = carry, chunk
        present = numbers >= 0
        # Padding does what the first client of its chunk does: it never takes more steps.
        row = jnp.where(present, numbers, jnp.maximum(numbers[0], 0))
        states = jax.tree.map(lambda x: x[row], clients)
        together = vmap_unless_one(len(row), contribute, (0, 0, 0))
        contributions, states = _unless_empty(together, present, row, keys, states, skip=may_skip)
        # Padding writes nowhere: out of range is dropped, where -1 would wrap to the last client.
        home = jnp.where(present, numbers, task.num_clients)
        if client_axis is not None and jax.tree.leaves(states):
            home, states = lax.all_gather((home, states), client_axis, tiled=True)
        clients = jax.tree.map(lambda x, new: x.at[home].set(new, mode="drop"), clients, states)
        return (add_chunk(total, contributions, present), clients), None

    one_state = jax.tree.map(lambda x: x[0], model.clients)
    contribution, _ = jax.eval_shape(contribute, jnp.int32(0), keys[0], one_state)
    total, clients = zero_sum(contribution, model.params), model.clients
    may_skip = chunk_size is not None or num_steps is not None
    first, sizes = 0, chunks_of(len(group), chunk_size or len(group), growing=num_steps is not None)
    for size, count in sizes:
        rows = slice(first, first + size * count)
        chunks = _in_chunks(group[rows], size, -1), _in_chunks(keys[rows], size, 0)
        (total, clients), _ = lax.scan(add_clients, (total, clients), chunks)
        first += size * count
    total = finish_sum(total, model.params)
    return total if client_axis is None else lax.psum(total, client_axis), clients


def _unless_empty(function: Any, present: Bool[Array, " chunk"], *args: Any, skip: bool) -> Any:
    """``function(*args)``, or zeros where a chunk is all padding, as an idle model's chunks are."""
    if not skip:
        return function(*args)
    shapes = jax.eval_shape(function, *args)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.cond(jnp.any(present), lambda: function(*args), lambda: nothing)


def _steps_of(
    algorithm: Algorithm, task: Task, server_state: ServerState, group: Int[Array, " group"]
) -> Int[Array, " group"] | None:
    """The local steps of each client, 0 for padding; None if all take as many."""
    if algorithm.num_steps is None or have_equal_steps(algorithm, task, server_state):
        return None
    steps = jax.vmap(algorithm.num_steps, (None, 0, None))(
        task, jnp.maximum(group, 0), server_state
    )
    return jnp.where(group >= 0, steps, 0)


def chunks_of(group_size: int, chunk_size: int, *, growing: bool) -> list[tuple[int, int]]:
    """Sizes of chunks, and how many there are of each; `growing` begins with small ones.

    A chunk takes as long as its first client. Beginning at place r it costs, with w clients, at
    most the steps of the w clients up to place r. Where each size has at least as many clients as
    the next size is large, every client is so charged at most twice: at most twice the steps that
    count are computed, whatever their distribution.

    Example:
      >>> chunks_of(100, 25, growing=True)
      [(1, 4), (4, 7), (25, 3)]
    """
    chunk_size = -(-group_size // -(-group_size // chunk_size))  # as many chunks, equally large
    size, sizes, done = 1 if growing else chunk_size, [], 0
    while done < group_size:
        larger = min(4 * size, chunk_size) if 8 * size < chunk_size else chunk_size
        enough = group_size - done if size == chunk_size else min(larger, group_size - done)
        sizes.append((size, -(-enough // size)))
        done, size = done + sizes[-1][0] * sizes[-1][1], larger
    return sizes


def _in_chunks(array: Array, size: int, fill: int) -> Array:
    """A leading axis cut into chunks, the last one filled up."""
    padding = [(0, -len(array) % size)] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, padding, constant_values=fill).reshape(-1, size, *array.shape[1:])


def _share(group: Int[Array, " group"], client_axis: str) -> Int[Array, " share"]:
    """This device's part of a group, every so many-th client; parts are equally long, and padded.

    Dealt out in turn, so that devices get as many long local trainings.
    """
    num_devices = lax.axis_size(client_axis)
    group = jnp.pad(group, (0, -len(group) % num_devices), constant_values=-1)
    return group.reshape(-1, num_devices)[:, lax.axis_index(client_axis)]


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


def _given_params(params: Params | None, kinds: Sequence[Kind]) -> list[Params | None]:
    """Given initial parameters of each kind."""
    if params is None or len(kinds) == 1:
        return [params] * len(kinds)
    num_models = sum(len(kind.models) for kind in kinds)
    if not isinstance(params, Sequence) or len(params) != num_models:
        raise ValueError(
            f"the models differ in structure; give a list of {num_models} initial parameters"
        )
    return [
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[m] for m in kind.models))
        for kind in kinds
    ]


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


def _message_sizes(kinds: Sequence[Kind], state: State) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers that one client sends up and receives per local training, from shapes alone."""
    sizes: dict[int, tuple[int, int]] = {}
    for kind, models in zip(kinds, split(state.models, kinds), strict=True):

        def message(task: Task, model: Models, kind: Kind = kind) -> tuple[Any, Params]:
            client_state = jax.tree.map(itemgetter(0), model.clients)
            contribution, _ = kind.algorithm.client(
                state.rng_key, 1, task, jnp.int32(0), model.params, model.server, client_state
            )
            total = finish_sum(zero_sum(contribution, model.params), model.params)
            return total.update, model.params

        messages = jax.vmap(message, (axis_of(kind.shared), 0))
        up, down = (
            sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(each))
            for each in jax.eval_shape(messages, kind.task, models)
        )
        sizes |= dict.fromkeys(kind.models, (up, down))
    up_sizes, down_sizes = zip(*(sizes[model] for model in sorted(sizes)), strict=True)
    return up_sizes, down_sizes


def _check_rounds(num_rounds: int, record_every: int) -> None:
    if num_rounds < 1:
        raise ValueError(f"num_rounds is {num_rounds}; it must be at least 1")
    if record_every < 1 or num_rounds % record_every:
        raise ValueError(
            f"record_every is {record_every}; it must be a divisor of num_rounds = {num_rounds}"
        )


def _check_client_map(client_map: ClientMap) -> None:
    is_size = type(client_map) is int and client_map > 0
    if not is_size and client_map not in ("auto", "vmap", "scan"):
        raise ValueError(
            f"client_map is {client_map!r}; it must be 'auto', 'vmap', 'scan' or a positive chunk "
            "size"
        )


def chunk_size_of(
    client_map: ClientMap, kind: Kind, params: Params, num_clients: int
) -> int | None:
    """Clients computed at once, model by model; None means all clients of all models."""
    if isinstance(client_map, int):
        return client_map
    if client_map != "auto":
        return 1 if client_map == "scan" else None
    if jax.default_backend() != "cpu" or isinstance(kind.task, AnalyticTask):
        return None
    model_bytes = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in jax.tree.leaves(params))
    chunk_size = max(1, _CHUNK_BYTES // max(1, model_bytes))
    return chunk_size if chunk_size < num_clients else None
