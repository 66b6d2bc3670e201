"""Local training: jobs -> chunks -> contributions -> sums.

Rounds and arrivals call client functions only here. A job is one local training. In a round, a
client starts from its model's current version, and its contribution is added to the model's sum. In
asynchronous runs each job has its own version, and a model has one sum per server step.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm import base
from fedjax_mm.base import (
    ClientState,
    Contribution,
    Params,
    Round,
    Scalar,
    ServerState,
    Task,
    chunks,
    sums,
)
from fedjax_mm.base.cohorts import by_rows, by_slots, places_of
from fedjax_mm.base.sums import is_stacked
from fedjax_mm.simulator.rows import (
    gathered,
    read_examples,
    read_rows,
    with_examples,
    write_rows,
)
from fedjax_mm.simulator.stacks import Stack, StackState, over_models


class Options(NamedTuple):
    """Options for speed and memory, which affect results only through the order of summation."""

    client_map: chunks.ClientMap
    client_axis: str | None
    with_reports: bool = False  # whether the assignment reads reports


class Jobs(NamedTuple):
    """Local trainings, ``[slots]`` each.

    Attributes:
      client: the index of the client that trains; -1 is padding.
      model: the row of the model in its stack. A NumPy array is static; None means that all jobs
        train the same model.
      scale: factors that multiply the clients' weights; None means 1.
      takes_part: whether clients participate; None means all do.
      segment: the index of the model's sum to add a contribution to; None if there is only one.
      origin: additional data of a job, for `StartFn`.
      home: the row of the client's state; None if client k has row k.
    """

    client: Any
    model: Any
    scale: Float[Array, " slots"] | None = None
    takes_part: Bool[Array, " slots"] | None = None
    segment: Int[Array, " slots"] | None = None
    origin: Any = ()
    home: Int[Array, " slots"] | None = None

    @property
    def row(self) -> Any:
        """Row of the client's state."""
        return self.client if self.home is None else self.home


class Start(NamedTuple):
    """Inputs of a client's local training: a key, the round, and a version of the model."""

    rng_key: PRNGKeyArray
    round: Round
    params: Params
    server_state: ServerState


StartFn: TypeAlias = Callable[[Any, StackState, Jobs], Start]
"""Maps the data shared by a model's jobs, the model and a job to a client's inputs."""

SendFn: TypeAlias = Callable[[Scalar | None], tuple[Contribution, ClientState]]
"""Runs the client function, given the factor that multiplies the client's weight, if any."""

MessageFn: TypeAlias = Callable[[SendFn, Scalar | None, Params], tuple[Contribution, ClientState]]
"""Maps the client function's result to the client's message and new state."""


class Trained(NamedTuple):
    """Result of local training, for one client or for all jobs.

    Attributes:
      total: the sum of the contributions, ``[models, ...]`` or ``[models, segments, ...]``.
      client_states: the states of all clients, ``[models, clients, ...]``.
      reports: ``[slots, ...]``, in the order of the jobs, with zeros for padding.
      stacked: the updates that are not summed, in the order of the jobs, with the client -1 for
        padding; ``()`` if updates are summed. `train` moves them to the total, ``[models, slots,
        ...]``.
    """

    total: Contribution
    client_states: ClientState
    reports: Any
    stacked: sums.Stacked | tuple[()] = ()

    def with_stacked(self, stacked: Any) -> Self:
        """Moves updates that are not summed to the total."""
        if not is_stacked(self.stacked):
            return self
        return self._replace(total=self.total._replace(update=stacked), stacked=())


def as_it_is(
    send: SendFn, factor: Scalar | None, params: Params
) -> tuple[Contribution, ClientState]:
    """Sends the client function's result unchanged."""
    del params
    return send(factor)


def train(
    stack: Stack,
    state: StackState,
    jobs: Jobs,
    start: StartFn,
    options: Options,
    *,
    shared: Any = (),
    num_segments: int | None = None,
    most_per_model: int | None = None,
    message: MessageFn = as_it_is,
    keeps_states: bool = True,
) -> Trained:
    """Trains the jobs of a stack's models and sums their contributions.

    Jobs are computed either as one list, whose chunks mix models, or as rows with one model each,
    in parallel or sequentially. A list requires that all models share their data, because otherwise
    each slot would copy its model's data.

    Args:
      stack: the models.
      state: the state of the models.
      jobs: the local trainings.
      start: makes a client's inputs.
      options: the options of the run.
      shared: per-model data for `start`, ``[models, ...]``.
      num_segments: the number of sums per model; None means one, which may hold sparse updates.
      most_per_model: a static upper bound on the jobs of a model, if the jobs' models are traced.
      message: makes a client's message.
      keeps_states: whether to store the clients' new states.
    """
    size = chunks.chunk_size_of(options.client_map, stack.task, state.params, len(jobs.client))
    how = _How(stack, start, options, size, num_segments, message, keeps_states)
    is_known, num_models = isinstance(jobs.model, np.ndarray), len(stack.models)
    is_mixed = not is_known or size not in (None, 1)
    if num_models > 1 and is_mixed and all(jax.tree.leaves(stack.shared)):
        mixed = jobs._replace(model=jnp.asarray(jobs.model))
        trained = _train_list(how, _Models(stack.task_at, shared, state), mixed)
        if not is_stacked(trained.stacked):
            return trained
        places = places_of(jobs.client, jobs.model, num_models, most_per_model)
        return trained.with_stacked(by_rows(trained.stacked, places))

    def train_row(task: Task, jobs: Jobs, shared: Any, model: StackState) -> Trained:
        return _train_list(how, _Models(lambda _: task, shared, model), jobs)

    places = places_of(jobs.client, jobs.model, num_models, most_per_model)
    rows = by_rows(jobs._replace(model=None), places)
    one_by_one = size is not None or not stack.has_equal_steps(_one_of(state.server))
    trained = over_models(train_row, stack, rows, shared, state, one_by_one=one_by_one)
    trained = trained._replace(reports=by_slots(trained.reports, places, len(jobs.client)))
    return trained.with_stacked(trained.stacked)


class _How(NamedTuple):
    """Static settings for training a list of jobs, as in `train`."""

    stack: Stack
    start: StartFn
    options: Options
    chunk_size: int | None
    num_segments: int | None
    message: MessageFn
    keeps_states: bool


class _Models(NamedTuple):
    """Models trained by a list of jobs: all models of a stack, or one without a models axis."""

    task_at: Callable[[Any], Task]
    shared: Any
    state: StackState

    def begin(self, start: StartFn, job: Jobs) -> tuple[Task, Start]:
        """A client's task and its inputs."""
        shared, model = self.shared, dataclasses.replace(self.state, clients=())
        if row := _row(job):
            shared, model = jax.tree.map(itemgetter(row), (shared, model))
        return self.task_at(job.model), start(shared, model, job)


def _first_of(tree: Any) -> Any:
    return jax.tree.map(itemgetter(0), tree)


def _one_of(tree: Any) -> Any:
    """Shapes of one model's entry in arrays ``[models, ...]``."""
    return jax.eval_shape(_first_of, tree)


def _row(jobs: Jobs) -> tuple[Any, ...]:
    """Index of the jobs' models, which is empty without a models axis."""
    return () if jobs.model is None else (jobs.model,)


def _train_list(how: _How, models: _Models, jobs: Jobs) -> Trained:
    """Trains a list of jobs of one model, or of all models in a stack.

    With a client axis, every device of the axis trains a share of the list.
    """
    # Compute and sum `chunk_size` clients at a time, and write only participants' rows of the
    # client states. Memory then does not grow with the list.
    num_slots, axis, states = len(jobs.client), how.options.client_axis, models.state.clients
    nobody = how.stack.num_clients + (0 if axis is None else lax.axis_size(axis))

    @partial(jax.jit, inline=True)  # traces once for `eval_shape` and all chunks
    def train_one(job: Jobs, state: ClientState, examples: list[Any]) -> Trained:
        return _train_one(how, models, job, state, examples)

    def add_jobs(so_far: Trained, chunk: tuple[Array, Jobs]) -> tuple[Trained, None]:
        slot, jobs = chunk
        present = jobs.client >= 0
        jobs = chunks.repeat_first(present, jobs)
        known = so_far.client_states if how.keeps_states else states
        # Use an out-of-range index, which is dropped, because -1 would write to the last client.
        row = *_row(jobs), jnp.where(present, jobs.row, nobody)
        asked = gathered(row, axis) if jax.tree.leaves(states) else None
        own = read_rows(known, (*_row(jobs), jobs.row), axis, asked)
        examples = read_examples(task, jobs.client)
        new = chunks.compute_chunk(train_one, present, jobs, own, examples, skip=may_skip)
        kept = write_rows(so_far.client_states, row, new.client_states, axis, asked)
        place, made = jnp.where(present, slot, num_slots), (new.reports, new.stacked)
        if jax.tree.leaves(made):
            place, made = gathered((place, made), axis)
        by_slot = chunks.put_rows((so_far.reports, so_far.stacked), place, made)
        sum_of = _row(jobs) if how.num_segments is None else (*_row(jobs), jobs.segment)
        total = sums.add_chunk(so_far.total, new.total, present, *sum_of)
        return Trained(total, kept, *by_slot), None

    order = _longest_first(how, models, jobs)
    may_skip = how.chunk_size is not None or order is not None
    # All models of a list share their data, so that the task of the first one has those of all.
    first = _first_of(jobs)
    task = models.task_at(first.model)
    state = jax.tree.map(itemgetter((0,) * (1 + len(_row(jobs)))), states)
    examples = jax.eval_shape(lambda: _first_of(read_examples(task, first.client[None])))
    one = jax.eval_shape(train_one, first, state, examples)
    made = one.reports, one.stacked
    reports, stacked = jax.tree.map(lambda x: jnp.zeros((num_slots, *x.shape), x.dtype), made)
    if is_stacked(stacked):
        stacked = stacked._replace(client=stacked.client - 1)
    each_model = jax.vmap if _row(jobs) else lambda function: function
    total = each_model(partial(_zero_sums, how.num_segments, one.total))(models.state.params)
    trained = Trained(total, states if how.keeps_states else (), reports, stacked)
    listed = jnp.arange(num_slots), jobs
    for some in chunks.in_chunks(listed, order, how.chunk_size, axis):
        trained, _ = lax.scan(add_jobs, trained, some)
    total = trained.total
    if how.num_segments is None:  # finish here, because XLA fuses it only without axes of length 1
        total = each_model(sums.finish_sum)(total, models.state.params)
    return trained._replace(total=total if axis is None else lax.psum(total, axis))


def _longest_first(how: _How, models: _Models, jobs: Jobs) -> Int[Array, " slots"] | None:
    """Sorts the slots in decreasing order of local steps, or returns None if steps are equal."""
    count, server = how.stack.algorithm.num_steps, models.state.server
    server = _one_of(server) if _row(jobs) else server
    if count is None or how.stack.has_equal_steps(server):
        return None

    def num_steps(job: Jobs) -> base.Steps:
        task, began = models.begin(how.start, job)
        return count(task, job.client, began.server_state)

    return chunks.longest_first(num_steps, jobs.client, jobs)


def _train_one(
    how: _How, models: _Models, job: Jobs, state: ClientState, examples: list[Any]
) -> Trained:
    """Trains one client, given its examples if they are divided over devices."""
    task, began = models.begin(how.start, job)
    task = with_examples(task, examples)
    given = began.rng_key, began.round, task, job.client, began.params
    takes_part = True if job.takes_part is None else job.takes_part

    def send(factor: Scalar | None) -> tuple[Contribution, ClientState]:
        context = base.ClientContext(*given, factor, takes_part)
        sent, new = how.stack.algorithm.client(context, began.server_state, state)
        return sums.as_arrays(sent), new

    sent, new = how.message(send, job.scale, began.params)
    reports = sent.report if how.options.with_reports else ()
    total, stacked = sums.unstacked(sent._replace(report=()))
    return Trained(total, new if how.keeps_states else (), reports, stacked)


def _zero_sums(num_segments: int | None, one: Contribution, params: Params) -> Contribution:
    """Zero sums of a model."""
    zero = sums.zero_sum(one, params)
    if num_segments is None:
        return zero
    return jax.tree.map(lambda x: jnp.zeros((num_segments, *x.shape), x.dtype), zero)
