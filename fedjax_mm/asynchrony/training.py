"""Asynchronous training in simulated time: arrive -> train -> come home -> step -> record.

Which jobs come home, and when, does not depend on what they bring: `arrivals.py` finds the
next ones by numbers alone, of all models at once. Up to the first that began after one of them they
are independent: they are trained together, in a batch, and then the servers' steps are made, in
their order. How arrivals are cut into batches changes results by the order of summation alone.

A job is trained when it comes home, not when it begins, from the version that it was given: a
version is stored as long as a job needs it. Every job may have begun from another one, and every
model has a current one, so that R + M versions are stored, of each structure of models. The other
way, to train a job when it begins and to store its update, takes as much memory, but trains only
what began since the last step together, and trains R jobs that never come home.

Everything is pure: jit it, vmap it over seeds and numbers. Loops are as long as the arrivals say,
so that results cannot be differentiated in reverse.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm import base, checks, chunks, keys, sums
from fedjax_mm.asynchrony.arrivals import Batch, Lanes, next_batch
from fedjax_mm.asynchrony.dispatch import (
    WINDOW,
    Clock,
    Dispatch,
    draws_of,
    first_jobs,
    share_out,
)
from fedjax_mm.base import Algorithm, Contribution, Params, Task, Trace
from fedjax_mm.parts import check_instance, check_trained, key_of
from fedjax_mm.record import Counts, Record, Sizes, make_trace, measure, message_sizes
from fedjax_mm.simulate import State, init_models
from fedjax_mm.stacks import (
    Models,
    Stack,
    by_model,
    join,
    make_stacks,
    order_of,
    over_models,
    split,
)


class Given(NamedTuple):
    """Version of a model that a job begins from, with the server's state."""

    params: Params
    server: base.ServerState


class Store(NamedTuple):
    """Versions, buffers and recent updates of the models of one stack.

    Attributes:
      versions: `Given`, ``[places, ...]``: those that jobs began from, and the current ones.
      buffer: the sum of the contributions since each model's last step, ``[models, ...]``.
      recent: each model's last updates, ``[models, 8, ...]``; ``()`` without reallocation.
    """

    versions: Given
    buffer: Contribution
    recent: Any


class Flight(NamedTuple):
    """State of a run beside its models: the clock, and what is kept for each stack."""

    clock: Clock
    stores: tuple[Store, ...]


class Tally(NamedTuple):
    """Work done since the last record, ``[models]`` each."""

    updates: Int[Array, " models"]
    gradients: Int[Array, " models"]
    staleness: Int[Array, " models"]


def simulate_async(
    rng_key: PRNGKeyArray | int,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    dispatch: Dispatch,
    num_arrivals: int,
    *,
    client_map: chunks.ClientMap = "auto",
    record_every: int = 1,
    params: Params | None = None,
) -> tuple[State, Trace]:
    """Trains M models asynchronously until `num_arrivals` jobs have come home, and records them.

    A job gets the current version of a model, and its client trains as in a round; of the first
    b_m contributions that come home the server makes a step. With FedAvg that does not weigh its
    clients, and a server rate eta_g, that is FedAST: ``w <- w + (eta_g / b_m) sum Delta``.

    Args:
      rng_key: the seed, a key or a whole number. Every draw has a key of (seed, job), so that
        results do not depend on `client_map`, `record_every` or other replicas of a `vmap`.
      tasks: one task that all models learn, or one per model; see `simulate`.
      algorithm: how clients train and the server aggregates, one for all models or one per model,
        such as ``fedavg(0.1, local_steps=5, weighted=False, server_optimizer=optax.sgd(eta_g))``.
        Its clients have no states. Round t of its schedules is the model's next step when the job
        begins.
      dispatch: who works on what; see `fedast`.
      num_arrivals: jobs that come home. The others, as many as are at work, are not trained.
      client_map: "auto", "vmap", "scan" or a number: the most jobs of a model that are computed at
        once. "vmap" is a quarter of R_m.
      record_every: arrivals between records; it divides `num_arrivals`.
      params: initial parameters, as in `simulate`.

    Returns:
      The final state, and a trace whose rounds are arrivals. Beside the tasks' metrics it has
      `time`, the simulated time, equal for all models; `steps`, those of each model's server so
      far; `staleness`, the mean number of steps that a model made during the jobs that came home
      since the record before, or NaN if there were none; and `at_work`, R_m.

    Raises:
      TypeError: if an argument is something else, such as an assignment in place of a `Dispatch`.
      ValueError: if arguments do not fit together.

    Example:
      >>> from fedjax_mm import fedavg
      >>> from fedjax_mm.asynchrony import fedast, simulate_async
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = fedavg(0.1, local_steps=5, weighted=False)
      >>> dispatch = fedast(24, 2, at_work=12, ratio=3)
      >>> state, trace = simulate_async(
      ...     0, quadratic(24, 4, mu=2e-4), algorithm, dispatch, 400, record_every=100)
      >>> trace.metrics["steps"][-1].tolist()
      [52.0, 57.0]

    Reference: Askin, Sharma, Joe-Wong, Joshi, "FedAST: Federated Asynchronous Simultaneous
    Training" (2024).
    """
    num_arrivals, record_every = _check_arrivals(num_arrivals, record_every)
    client_map = checks.check_client_map(client_map)
    state = init_async(rng_key, tasks, algorithm, dispatch, params)
    how: dict[str, Any] = {"client_map": client_map, "record_every": record_every}
    return advance_async(state, tasks, algorithm, dispatch, num_arrivals, **how)


def init_async(
    rng_key: PRNGKeyArray | int,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    dispatch: Dispatch,
    params: Params | None = None,
) -> State:
    """Returns the state at time 0, when all jobs begin. Arguments as in `simulate_async`."""
    stacks, rng_key = _stacks_of(tasks, algorithm, dispatch), key_of(rng_key)
    models = init_models(rng_key, stacks, params)
    if jax.tree.leaves(models.clients):
        raise ValueError(
            "the algorithm keeps states of clients, which may have several jobs of a model at a "
            "time; use one that does not, such as fedavg"
        )
    parts, clock = split(stacks, models), first_jobs(dispatch, rng_key)
    stores = tuple(_store(dispatch, rng_key, *each) for each in parts)
    order = order_of(stacks)
    return State(rng_key, jnp.zeros((), jnp.int32), models, Flight(clock, stores), order)


def _stacks_of(
    tasks: Task | Sequence[Task], algorithm: Algorithm | Sequence[Algorithm], dispatch: Dispatch
) -> list[Stack]:
    remedy = "such as fedast(num_clients, num_models, at_work=20, ratio=4)"
    check_instance("dispatch", dispatch, Dispatch, f"give one, {remedy}")
    check_trained(tasks, algorithm)
    sizes = dispatch.num_clients, dispatch.num_models
    return make_stacks(tasks, algorithm, *sizes, by="dispatch")


def _check_arrivals(num_arrivals: Any, record_every: Any) -> tuple[int, int]:
    return checks.check_rounds(num_arrivals, record_every, "num_arrivals")


def _store(dispatch: Dispatch, rng_key: PRNGKeyArray, stack: Stack, models: Models) -> Store:
    """Returns a stack's store at time 0: the first versions, and nothing else."""
    given = Given(models.params, models.server)

    def put(x: Array) -> Array:
        places = jnp.zeros((dispatch.num_places, *x.shape[1:]), x.dtype)
        return places.at[np.array(stack.models)].set(x)

    versions, num_models = jax.tree.map(put, given), len(stack.models)
    nobody = jnp.zeros((num_models, 1), jnp.int32)
    job = Lanes(*[nobody] * len(Lanes._fields))
    sent = jax.eval_shape(partial(_train, stack, rng_key, 1), versions, job)

    def zeros(x: Any, *axes: int) -> Array:
        return jnp.zeros((num_models, *axes, *x.shape[2:]), x.dtype)

    recent = jax.tree.map(lambda x: zeros(x, WINDOW), sent.update) if dispatch.reallocate else ()
    return Store(versions, jax.tree.map(zeros, sent), recent)


def state_bytes(
    tasks: Task | Sequence[Task], algorithm: Algorithm | Sequence[Algorithm], dispatch: Dispatch
) -> int:
    """Returns the memory of one seed's state before it is made; nothing is computed.

    Most of it are versions of models: R + M of each structure of models, as many as jobs may need.
    Reallocation keeps 8 updates of each model. A batch needs more: the parameters of the jobs that
    are trained together, several times; see `client_map`.

    Args:
      tasks: as in `simulate_async`.
      algorithm: as in `simulate_async`.
      dispatch: as in `simulate_async`.

    Example:
      >>> from fedjax_mm import fedavg
      >>> from fedjax_mm.asynchrony import fedast, state_bytes
      >>> from fedjax_mm.tasks import quadratic
      >>> dispatch = fedast(24, 2, at_work=12, ratio=3, reallocate=False)
      >>> of_all = state_bytes(quadratic(24, 4, mu=0.1), fedavg(0.1, local_steps=5), dispatch)
      >>> (24 + 2) * 97 * 4, of_all  # versions of 97 numbers; and all
      (10088, 12376)
    """
    shapes = jax.eval_shape(lambda: init_async(0, tasks, algorithm, dispatch))
    arrays = [
        x for x in jax.tree.leaves(shapes) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]
    return sum(x.size * x.dtype.itemsize for x in arrays)


def advance_async(
    state: State,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    dispatch: Dispatch,
    num_arrivals: int,
    *,
    client_map: chunks.ClientMap = "auto",
    record_every: int = 1,
) -> tuple[State, Trace]:
    """Waits for `num_arrivals` more jobs from a state, which is the first record.

    Arguments as in `simulate_async`; `join_traces` makes one trace of this one and the one before.
    """
    remedy = "give the first of the two that simulate_async returns"
    check_instance("state", state, State, remedy)
    check_instance("state.assignment", state.assignment, Flight, remedy)
    num_arrivals, record_every = _check_arrivals(num_arrivals, record_every)
    client_map = checks.check_client_map(client_map)
    stacks = _stacks_of(tasks, algorithm, dispatch)
    nothing = Tally(*[jnp.zeros(dispatch.num_models, jnp.int32)] * 3)
    one_batch = _batches_of(stacks, dispatch, client_map, record_every)

    @partial(jax.jit, inline=True)
    def record(state: State, tally: Tally) -> Record:
        clock: Clock = state.assignment.clock
        own = {
            "time": jnp.full(dispatch.num_models, clock.time),
            "steps": clock.steps.astype(float),
            "staleness": tally.staleness / tally.updates,  # 0 / 0 where there are none
            "at_work": clock.targets.astype(float),
        }
        measured = measure(stacks, state.rng_key, state.round, state.models, client_map, own)
        counts = Counts(tally.updates, tally.gradients, jnp.zeros_like(tally.updates))
        return Record(state.round, measured.metrics, counts)

    @checks.tracing("an arrival")
    def to_record(state: State, _: None) -> tuple[State, Record]:
        first = state.round
        numbers = dispatch.num_jobs + first + jnp.arange(record_every, dtype=jnp.int32)
        draws = draws_of(dispatch, state.rng_key, numbers)

        def is_missing(carry: tuple[State, Tally]) -> Array:
            return carry[0].round < first + record_every

        state, tally = lax.while_loop(
            is_missing, partial(one_batch, draws, first), (state, nothing)
        )
        return state, record(state, tally)

    first = record(state, nothing)
    state, rest = lax.scan(to_record, state, length=num_arrivals // record_every)
    stores = state.assignment.stores
    up = message_sizes(stacks, [store.buffer.update for store in stores])
    down = message_sizes(stacks, [models.params for _, models in split(stacks, state.models)])
    return state, make_trace(first, rest, Sizes(up, down), dispatch.num_clients)


def _batches_of(
    stacks: Sequence[Stack], dispatch: Dispatch, client_map: chunks.ClientMap, most: int
) -> Callable[..., tuple[State, Tally]]:
    """Returns a function that trains the next arrivals together and takes them home."""
    period = dispatch.period

    def width_of(stack: Stack, models: Models) -> int | None:
        return chunks.chunk_size_of(client_map, stack.task, models.params, dispatch.num_jobs)

    def one_batch(
        draws: Any, first: Int[Array, ""], carry: tuple[State, Tally]
    ) -> tuple[State, Tally]:
        state, tally = carry
        clock, stores = state.assignment
        parts = split(stacks, state.models)
        sizes = [width_of(*each) for each in parts]
        at_once = [min(most, size or -(-max(dispatch.at_work) // 4)) for size in sizes]
        widths = np.zeros(dispatch.num_models, np.int32)
        for stack, width in zip(stacks, at_once, strict=True):
            widths[np.array(stack.models)] = width
        done = state.round - first
        limit = most - done
        if dispatch.reallocate:
            limit = jnp.minimum(limit, period - state.round % period)
        clock, batch = next_batch(
            dispatch, clock, draws, jnp.asarray(widths), max(at_once), done, limit
        )
        trained = []
        for stack, store, width, size in zip(stacks, stores, at_once, sizes, strict=True):
            lanes = jax.tree.map(lambda x, w=width: x[:, :w], stack.rows(batch.lanes))
            train = partial(_train, stack, state.rng_key, width, one_by_one=size is not None)
            trained.append(train(store.versions, lanes))
        home = [
            _come_home(stack, dispatch, batch, models, store, sent)
            for (stack, models), store, sent in zip(parts, stores, trained, strict=True)
        ]
        models, stores = join([each[0] for each in home]), tuple(each[1] for each in home)
        tally = _add_work(stacks, tally, batch, trained)
        number = state.round + batch.size
        if dispatch.reallocate:
            clock = _reallocate(stacks, dispatch, clock, stores, number % period == 0)
        return State(state.rng_key, number, models, Flight(clock, stores), state.order), tally

    return one_batch


def _train(
    stack: Stack,
    rng_key: PRNGKeyArray,
    width: int,
    versions: Given,
    lanes: Lanes,
    *,
    one_by_one: bool = False,
) -> Contribution:
    """Returns the contributions of a stack's jobs, ``[models, lanes, ...]``; they are dense."""

    def train_model(task: Task, lanes: Lanes) -> Contribution:
        def contribute(job: Lanes) -> Contribution:
            given = jax.tree.map(lambda x: x[job.place], versions)
            key = keys.training_key(keys.job_key(rng_key, job.number))
            local = base.LocalProblem(key, job.version + 1, task, job.client, given.params)
            sent, _ = stack.algorithm.client(local, given.server, ())
            return dense(sent._replace(report=()), given.params)

        present = lanes.number >= 0
        # vmap of a while_loop runs as many steps as the longest client takes: padding repeats the
        # first job.
        jobs = jax.tree.map(lambda x: jnp.where(present, x, jnp.maximum(x[0], 0)), lanes)
        together = jax.jit(chunks.vmap_unless_one(width, contribute), inline=True)
        return chunks.unless_empty(together, present, jobs, skip=one_by_one)

    return over_models(train_model, stack, lanes, one_by_one=one_by_one)


def dense(sent: Contribution, params: Params) -> Contribution:
    """Returns a contribution with dense arrays in place of the sparse parts of its update."""
    alone = jax.tree.map(lambda x: jnp.asarray(x)[None], sent)
    total = sums.add_chunk(sums.zero_sum(sent, params), alone, jnp.ones(1, bool))
    return sums.finish_sum(total, params)


def _come_home(
    stack: Stack,
    dispatch: Dispatch,
    batch: Batch,
    models: Models,
    store: Store,
    sent: Contribution,
) -> tuple[Models, Store]:
    """Returns the models of a stack after a batch, and what is kept for them."""
    in_stack = np.full(dispatch.num_models, -1, np.int32)
    in_stack[np.array(stack.models)] = np.arange(len(stack.models))
    width = sent.weight.shape[1]
    lanes = jax.tree.map(lambda x: x[:, :width], stack.rows(batch.lanes))

    def add_up(buffer: Contribution, row: Any, part: Any) -> Contribution:
        """The sum of the contributions to a model's step, with what was in the buffer before."""
        is_in = (lanes.number[row] >= 0) & (lanes.part[row] == part)

        def add(before: Array, x: Array) -> Array:
            mask = is_in.reshape(-1, *(1 for _ in x.shape[2:]))
            before = jnp.where(part == 0, before[row], 0)
            return before + jnp.sum(jnp.where(mask, x[row], 0), axis=0, dtype=x.dtype)

        return jax.tree.map(add, buffer, sent)

    def step(row: Int[Array, ""], step: Any, carry: tuple[Models, Given]) -> tuple[Models, Given]:
        models, versions = carry
        total = add_up(store.buffer, row, step.part)
        old = jax.tree.map(lambda x: x[row], Given(models.params, models.server))
        task = stack.task_at(row) if len(stack.models) > 1 else stack.task
        given = base.Aggregation(step.number, task, old.params, old.server, (), total)
        new = Given(*stack.algorithm.server(given))
        params, server = _put((models.params, models.server), row, tuple(new))
        return Models(params, server, models.clients), _put(versions, step.place, new)

    def next_step(j: Int[Array, ""], carry: tuple[Models, Given]) -> tuple[Models, Given]:
        one = jax.tree.map(lambda x: x[j], batch.steps)
        row = jnp.asarray(in_stack)[one.model]
        if len(stack.models) == dispatch.num_models:
            return step(row, one, carry)
        return lax.cond(row >= 0, lambda: step(row, one, carry), lambda: carry)

    models, versions = lax.fori_loop(0, batch.num_steps, next_step, (models, store.versions))
    rows = jnp.arange(len(stack.models))
    buffer = jax.vmap(partial(add_up, store.buffer))(rows, stack.rows(batch.made))
    recent = store.recent
    if dispatch.reallocate:
        # Of more updates than are kept the last ones.
        left = jnp.sum(lanes.number >= 0, axis=1, keepdims=True) - jnp.arange(width)
        turn = jnp.where((left > 0) & (left <= WINDOW), lanes.turn % WINDOW, WINDOW)
        recent = _put(recent, (rows[:, None], turn), jax.vmap(jax.vmap(_update))(sent))
    return models, Store(versions, buffer, recent)


def _put(tree: Any, at: Any, new: Any) -> Any:
    return jax.tree.map(lambda x, y: x.at[at].set(y, mode="drop"), tree, new)


def _update(sent: Contribution) -> Params:
    """Returns the update of a contribution without its weight."""
    return jax.tree.map(lambda x: x / sent.weight, sent.update)


def _add_work(
    stacks: Sequence[Stack], tally: Tally, batch: Batch, trained: Sequence[Contribution]
) -> Tally:
    """Returns the work so far with that of a batch."""

    def gradients(stack: Stack, sent: Contribution) -> Array:
        present = stack.rows(batch.lanes.number)[:, : sent.num_gradients.shape[1]] >= 0
        return jnp.sum(jnp.where(present, sent.num_gradients, 0), axis=1, dtype=jnp.int32)

    of_stacks = [gradients(*each) for each in zip(stacks, trained, strict=True)]
    present = batch.lanes.number >= 0
    updates = jnp.sum(present, axis=1, dtype=jnp.int32)
    staleness = jnp.sum(jnp.where(present, batch.lanes.staleness, 0), axis=1, dtype=jnp.int32)
    return Tally(
        tally.updates + updates,
        tally.gradients + by_model(stacks, of_stacks),
        tally.staleness + staleness,
    )


def _reallocate(
    stacks: Sequence[Stack],
    dispatch: Dispatch,
    clock: Clock,
    stores: Sequence[Store],
    is_due: Array,
) -> Clock:
    """Returns the clock with new R_m, if they are due and all models have enough updates."""

    def share() -> Array:
        each = [jax.vmap(relative_variance)(store.recent) for store in stores]
        return share_out(dispatch, clock.targets, by_model(stacks, each))

    is_known = jnp.all(clock.arrived >= WINDOW)
    return clock._replace(targets=lax.cond(is_due & is_known, share, lambda: clock.targets))


def relative_variance(updates: Params) -> Float[Array, ""]:
    """Returns ``mean_i |Delta_i - mean Delta|^2 / |mean Delta|^2`` of updates ``[i, ...]``."""
    leaves = jax.tree.leaves(updates)
    means = [jnp.mean(x, axis=0) for x in leaves]
    spread = sum(jnp.sum((x - y) ** 2) / len(x) for x, y in zip(leaves, means, strict=True))
    return jnp.asarray(spread / sum(jnp.sum(y**2) for y in means))
