"""Batches of arrivals: train -> add up -> step -> share out.

Up to the first job that began after one of them, arrivals are independent. So a batch of them is
trained together, and then the servers make their steps, in their order. The cut into batches
changes results by the order of summation alone.

A job is trained when it arrives, not when it begins. The version that it began from is stored until
then. Every job may have begun from another one, and every model has a current one, so that R + M
versions are stored, of each structure of models. To train a job when it begins, and to store its
update, would take as much memory, but only the jobs that began since the last step could be trained
together, and R jobs that never arrive would be trained for nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm import base, chunks, sums
from fedjax_mm.asynchrony.arrivals import Arrivals, Batch, Bounds, next_batch
from fedjax_mm.asynchrony.dispatch import WINDOW, Clock, Dispatch, Draws, share_out
from fedjax_mm.base import Contribution, Params, Task
from fedjax_mm.record import Counts, Tally
from fedjax_mm.simulate import State
from fedjax_mm.stacks import Models, Stack, by_model, is_lockstep, join, over_models, split


class Version(NamedTuple):
    """Version of a model that jobs begin from, with the server's state."""

    params: Params
    server: base.ServerState


class Store(NamedTuple):
    """Versions, buffers and recent updates of the models of one stack.

    Attributes:
      versions: `Version`, ``[places, ...]``: those that jobs began from, and the current ones.
      buffer: the sum of the contributions since each model's last step, ``[models, ...]``.
      recent: each model's last updates, ``[models, 8, ...]``; ``()`` without reallocation.
    """

    versions: Version
    buffer: Contribution
    recent: Any


class AsyncState(NamedTuple):
    """State of an asynchronous run beside its models: the clock, and a store for each stack."""

    clock: Clock
    stores: tuple[Store, ...]


class Options(NamedTuple):
    """Settings of the training that are known while tracing.

    Attributes:
      num_models: M, of all stacks.
      client_map: as in `simulate_async`.
      client_axis: as in `simulate_async`.
      is_list: whether the jobs of all models are trained as one list, or each model's as a row.
      bounds: the bounds of a batch.
    """

    num_models: int
    client_map: chunks.ClientMap
    client_axis: str | None
    is_list: bool
    bounds: Bounds


class Received(NamedTuple):
    """Contributions of a batch's jobs to the models of one stack.

    Attributes:
      total: the sum of the contributions to each step, and to the step after the batch,
        ``[models, steps + 1, ...]``.
      recent: see `Store`.
    """

    total: Contribution
    recent: Any


def first_store(dispatch: Dispatch, rng_key: PRNGKeyArray, stack: Stack, models: Models) -> Store:
    """Returns a stack's store at time 0: the first versions, and nothing else."""

    def put(x: Array) -> Array:
        places = jnp.zeros((dispatch.num_places, *x.shape[1:]), x.dtype)
        return places.at[np.array(stack.models)].set(x)

    versions = jax.tree.map(put, Version(models.params, models.server))
    number = jnp.int32(0)
    job = Arrivals(*[number] * len(Arrivals._fields))
    train = partial(_contribute, stack.algorithm, versions, rng_key)
    sent = jax.eval_shape(lambda: train(stack.task_at(number), job))

    def zeros(x: Any, *axes: int) -> Array:
        return jnp.zeros((len(stack.models), *axes, *x.shape), x.dtype)

    recent = jax.tree.map(lambda x: zeros(x, WINDOW), sent.update) if dispatch.reallocate else ()
    return Store(versions, jax.tree.map(zeros, sent), recent)


def batches_of(
    stacks: Sequence[Stack],
    dispatch: Dispatch,
    client_map: chunks.ClientMap,
    client_axis: str | None,
    num_arrivals: int,
) -> Callable[..., tuple[State, Tally]]:
    """Returns a function that trains the next batch on the way to so many arrivals."""
    period = dispatch.period
    # Each place of a list would copy the data of its model, and compute each stack: rows instead.
    is_list = len(stacks) == 1 and all(jax.tree.leaves(stacks[0].shared))
    # At most about half of the jobs arrive before one that follows them. A list has room for them
    # all. A row is computed whole: room for a quarter, which most batches fill, wastes less.
    per_model = min(num_arrivals, -(-max(dispatch.at_work) // (2 if is_list else 4)))
    most = min(num_arrivals, dispatch.num_jobs, dispatch.num_models * per_model)
    bounds = Bounds(most, per_model, min(per_model, dispatch.ratio))
    options = Options(dispatch.num_models, client_map, client_axis, is_list, bounds)

    def one_batch(
        draws: Draws, first: Int[Array, ""], carry: tuple[State, Tally]
    ) -> tuple[State, Tally]:
        state, tally = carry
        clock, stores = state.assignment
        done = state.round - first
        limit = num_arrivals - done
        if dispatch.reallocate:
            limit = jnp.minimum(limit, period - state.round % period)
        clock, batch = next_batch(dispatch, clock, draws, bounds, done, limit)
        parts = [
            (*part, store) for part, store in zip(split(stacks, state.models), stores, strict=True)
        ]
        received = [_train(*part, options, batch) for part in parts]
        tally = _add_work(stacks, tally, batch, received)
        stepped = [_step(*part, batch, new) for part, new in zip(parts, received, strict=True)]
        models, stores = join([each[0] for each in stepped]), tuple(each[1] for each in stepped)
        number = state.round + batch.size
        if dispatch.reallocate:
            clock = _reallocate(stacks, dispatch, clock, stores, number % period == 0)
        return State(state.rng_key, number, models, AsyncState(clock, stores), state.order), tally

    return one_batch


def _train(stack: Stack, models: Models, store: Store, options: Options, batch: Batch) -> Received:
    """Trains the jobs of a batch whose models are in a stack."""
    jobs, job_keys, bounds = batch.jobs, batch.keys, options.bounds

    def zeros(x: Array) -> Array:
        return jnp.zeros((len(x), bounds.steps + 1, *x.shape[1:]), x.dtype)

    def train_row(task: Task, job_keys: PRNGKeyArray, jobs: Arrivals, old: Received) -> Received:
        alone = jax.tree.map(lambda x: x[None], old)
        return jax.tree.map(itemgetter(0), train_list(task, job_keys, jobs, alone))

    nothing = Received(jax.tree.map(zeros, store.buffer), store.recent)
    size = chunks.chunk_size_of(options.client_map, stack.task, models.params, bounds.arrivals)
    train_list = partial(_train_list, stack.algorithm, options, size, store.versions)
    if options.is_list:
        return train_list(stack.task, job_keys, jobs, nothing)
    model = jnp.where(jobs.number >= 0, jobs.model, options.num_models)
    empty = jnp.full((options.num_models, bounds.per_model), -1)
    at = stack.rows(empty.at[model, jobs.rank].set(jnp.arange(len(model)), mode="drop"))
    alone = jobs._replace(model=jnp.zeros_like(jobs.model))  # a row is a list of one model
    rows = jax.tree.map(lambda x: jnp.where(at >= 0, x[at], -1), alone)
    one_by_one = size is not None or not is_lockstep(stack, models)
    return over_models(train_row, stack, job_keys[at], rows, nothing, one_by_one=one_by_one)


def _train_list(
    algorithm: base.Algorithm,
    options: Options,
    chunk_size: int | None,
    versions: Version,
    task: Task,
    job_keys: PRNGKeyArray,
    jobs: Arrivals,
    received: Received,
) -> Received:
    """Trains jobs of models that share a task, and adds what they contribute."""

    def num_steps(client: base.Index, place: Any) -> int | Int[Array, ""]:
        server_state = jax.tree.map(itemgetter(place), versions.server)
        return algorithm.num_steps(task, client, server_state)

    @partial(jax.jit, inline=True)  # one trace for `eval_shape` and for all chunks
    def contribute(i: Int[Array, ""], job: Arrivals) -> Contribution:
        return _contribute(algorithm, versions, job_keys[i], task, job)

    def add_jobs(old: Received, chunk: tuple[Array, Arrivals]) -> tuple[Received, None]:
        present = chunk[1].number >= 0
        i, jobs = chunks.repeat_first(present, chunk)
        sent = chunks.compute_chunk(contribute, present, i, jobs, skip=may_skip)
        total = sums.add_chunk(old.total, sent, present, jobs.model, jobs.step)
        if not jax.tree.leaves(old.recent):
            return Received(total, old.recent), None
        slots = jobs.model, jnp.where(present, jobs.slot, WINDOW)
        new = slots, jax.vmap(_unweighted_update)(sent)
        if options.client_axis is not None:
            new = lax.all_gather(new, options.client_axis, tiled=True)
        return Received(total, chunks.put_rows(old.recent, *new)), None

    clients = jnp.where(jobs.number >= 0, jobs.client, -1)
    order = chunks.longest_first(num_steps, clients, jobs.place)
    may_skip = chunk_size is not None or order is not None
    rows = jnp.arange(len(clients)), jobs
    for some in chunks.in_chunks(rows, order, chunk_size, options.client_axis):
        received, _ = lax.scan(add_jobs, received, some)
    if options.client_axis is None:
        return received
    return received._replace(total=lax.psum(received.total, options.client_axis))


def _contribute(
    algorithm: base.Algorithm, versions: Version, key: PRNGKeyArray, task: Task, job: Arrivals
) -> Contribution:
    """Returns the contribution of a job, with dense arrays in place of sparse ones."""
    given = jax.tree.map(itemgetter(job.place), versions)
    local = base.LocalProblem(key, job.version + 1, task, job.client, given.params)
    sent, _ = algorithm.client(local, given.server, ())
    return sums.dense_update(sent._replace(report=()), given.params)


def _step(
    stack: Stack, models: Models, store: Store, batch: Batch, received: Received
) -> tuple[Models, Store]:
    """Returns the models of a stack after the servers' steps, and the store after them."""
    steps_before, new_steps, places = stack.rows(
        (batch.steps_before, batch.new_steps, batch.places)
    )
    total = jax.tree.map(lambda x, y: x.at[:, 0].add(y), received.total, store.buffer)
    nowhere = len(jax.tree.leaves(store.versions)[0])

    def is_missing(carry: tuple[Array, Models, Version]) -> Array:
        return chunks.is_any(carry[0] < new_steps)

    def step(carry: tuple[Array, Models, Version]) -> tuple[Array, Models, Version]:
        i, models, versions = carry
        is_due = i < new_steps

        def of_model(task: Task, is_due: Array, number: Array, total: Any, old: Version) -> Version:
            # A buffer that is not full may be empty, and 0/0 is NaN: ones take its place.
            full = jax.tree.map(lambda x: jnp.where(is_due, x[i], 1), total)
            given = base.Aggregation(number, task, old.params, old.server, (), full)
            new = Version(*stack.algorithm.server(given))
            return jax.tree.map(partial(jnp.where, is_due), new, old)

        old = Version(models.params, models.server)
        new = over_models(of_model, stack, is_due, steps_before + i + 1, total, old)
        versions = chunks.put_rows(versions, jnp.where(is_due, places[:, i], nowhere), new)
        return i + 1, Models(new.params, new.server, models.clients), versions

    start = jnp.int32(0), models, store.versions
    _, models, versions = lax.while_loop(is_missing, step, start)
    buffer = jax.tree.map(lambda x: x[jnp.arange(len(new_steps)), new_steps], total)
    return models, Store(versions, buffer, received.recent)


def _unweighted_update(sent: Contribution) -> Params:
    """Returns the update of a contribution without its weight."""
    return jax.tree.map(lambda x: x / sent.weight, sent.update)


def _add_work(
    stacks: Sequence[Stack], tally: Tally, batch: Batch, received: Sequence[Received]
) -> Tally:
    """Returns the work so far with that of a batch."""
    gradients = [jnp.sum(each.total.num_gradients, 1, dtype=jnp.int32) for each in received]
    models, jobs = jnp.arange(len(batch.new_steps)), batch.jobs
    is_model = (jobs.number >= 0)[:, None] & (jobs.model[:, None] == models)
    updates = jnp.sum(is_model, axis=0, dtype=jnp.int32)
    staleness = jnp.sum(jnp.where(is_model, jobs.staleness[:, None], 0), axis=0, dtype=jnp.int32)
    counts = Counts(updates, by_model(stacks, gradients), jnp.zeros_like(updates))
    return jax.tree.map(jnp.add, tally, Tally(counts, staleness))


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
