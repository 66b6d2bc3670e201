"""Batches of arrivals: train -> add up -> step -> share out.

Up to the first job that began after one of them, arrivals are independent: they are trained
together, in a batch, and then the servers' steps are made, in their order. How arrivals are cut
into batches changes results by the order of summation alone.

A job is trained when it comes home, not when it begins, from the version that it was given: a
version is stored as long as a job needs it. Every job may have begun from another one, and every
model has a current one, so that R + M versions are stored, of each structure of models. The other
way, to train a job when it begins and to store its update, takes as much memory, but trains only
what began since the last step together, and trains R jobs that never come home.
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
from fedjax_mm.asynchrony.arrivals import Arrivals, Batch, Room, next_batch
from fedjax_mm.asynchrony.dispatch import WINDOW, Clock, Dispatch, share_out
from fedjax_mm.base import Contribution, Params, Task
from fedjax_mm.record import Counts, Tally
from fedjax_mm.simulate import State
from fedjax_mm.stacks import Models, Stack, by_model, join, over_models, split


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


class How(NamedTuple):
    """Settings of the training that are known while tracing.

    Attributes:
      num_models: M, of all stacks.
      client_map: as in `simulate_async`.
      client_axis: as in `simulate_async`.
      is_list: whether the jobs of all models are trained as one list, or each model's as a row.
      room: the bounds of a batch.
    """

    num_models: int
    client_map: chunks.ClientMap
    client_axis: str | None
    is_list: bool
    room: Room


class Home(NamedTuple):
    """All that the jobs of a batch bring home to the models of one stack.

    Attributes:
      total: for each step, and for the one that is to come, the sum of the contributions to it,
        ``[models, steps, ...]``.
      recent: see `Store`.
    """

    total: Contribution
    recent: Any


def first_store(dispatch: Dispatch, rng_key: PRNGKeyArray, stack: Stack, models: Models) -> Store:
    """Returns a stack's store at time 0: the first versions, and nothing else."""
    given = Given(models.params, models.server)

    def put(x: Array) -> Array:
        places = jnp.zeros((dispatch.num_places, *x.shape[1:]), x.dtype)
        return places.at[np.array(stack.models)].set(x)

    versions, number = jax.tree.map(put, given), jnp.int32(0)
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
    most: int,
) -> Callable[..., tuple[State, Tally]]:
    """Returns a function that trains the next arrivals together and takes them home."""
    period = dispatch.period
    # Each place of a list would copy the data of its model, and compute each stack: rows instead.
    is_list = len(stacks) == 1 and all(jax.tree.leaves(stacks[0].shared))
    # At most about half of the jobs come home before one that follows them. A list has them all; a
    # row is computed whole, so that a quarter, which most batches fill, wastes less.
    lanes = min(most, -(-max(dispatch.at_work) // (2 if is_list else 4)))
    arrivals = min(most, dispatch.num_jobs, dispatch.num_models * lanes)
    room = Room(arrivals, lanes, min(lanes, dispatch.ratio))
    how = How(dispatch.num_models, client_map, client_axis, is_list, room)

    def one_batch(
        draws: Any, first: Int[Array, ""], carry: tuple[State, Tally]
    ) -> tuple[State, Tally]:
        state, tally = carry
        clock, stores = state.assignment
        done = state.round - first
        limit = most - done
        if dispatch.reallocate:
            limit = jnp.minimum(limit, period - state.round % period)
        clock, batch = next_batch(dispatch, clock, draws, room, done, limit)
        parts = split(stacks, state.models)
        homes = [
            _train(stack, how, models, store, batch)
            for (stack, models), store in zip(parts, stores, strict=True)
        ]
        tally = _add_work(stacks, tally, batch, homes)
        came = [
            _step(stack, batch, models, store, home)
            for (stack, models), store, home in zip(parts, stores, homes, strict=True)
        ]
        models, stores = join([each[0] for each in came]), tuple(each[1] for each in came)
        number = state.round + batch.size
        if dispatch.reallocate:
            clock = _reallocate(stacks, dispatch, clock, stores, number % period == 0)
        return State(state.rng_key, number, models, Flight(clock, stores), state.order), tally

    return one_batch


def _train(stack: Stack, how: How, models: Models, store: Store, batch: Batch) -> Home:
    """Trains those of the arrivals that are jobs of a stack."""
    jobs, job_keys = batch.jobs, batch.keys

    def zeros(x: Array) -> Array:
        return jnp.zeros((len(x), how.room.steps + 1, *x.shape[1:]), x.dtype)

    def train_row(task: Task, job_keys: PRNGKeyArray, jobs: Arrivals, home: Home) -> Home:
        alone = jax.tree.map(lambda x: x[None], home)
        return jax.tree.map(itemgetter(0), train_list(task, job_keys, jobs, alone))

    home = Home(jax.tree.map(zeros, store.buffer), store.recent)
    size = chunks.chunk_size_of(how.client_map, stack.task, models.params, how.room.arrivals)
    train_list = partial(_train_list, stack.algorithm, how, size, store.versions)
    if how.is_list:
        return train_list(stack.task, job_keys, jobs, home)
    model = jnp.where(jobs.number >= 0, jobs.model, how.num_models)
    place, nobody = jnp.arange(len(model)), jnp.full((how.num_models, how.room.lanes), -1)
    at = stack.rows(nobody.at[model, jobs.lane].set(place, mode="drop"))
    alone = jobs._replace(model=jnp.zeros_like(jobs.model))  # each is the first of one
    rows = jax.tree.map(lambda x: jnp.where(at >= 0, x[at], -1), alone)
    server_state = jax.tree.map(itemgetter(0), models.server)
    is_lockstep = chunks.is_lockstep(stack.algorithm, stack.task, server_state)
    one_by_one = size is not None or not is_lockstep
    return over_models(train_row, stack, job_keys[at], rows, home, one_by_one=one_by_one)


def _train_list(
    algorithm: base.Algorithm,
    how: How,
    chunk_size: int | None,
    versions: Given,
    task: Task,
    job_keys: PRNGKeyArray,
    jobs: Arrivals,
    home: Home,
) -> Home:
    """Trains jobs of models that share a task, and adds up what they bring home."""

    def num_steps(client: base.Index, place: Any) -> int | Int[Array, ""]:
        server_state = jax.tree.map(itemgetter(place), versions.server)
        return algorithm.num_steps(task, client, server_state)

    @partial(jax.jit, inline=True)  # one trace for `eval_shape` and for all chunks
    def contribute(i: Int[Array, ""], job: Arrivals) -> Contribution:
        return _contribute(algorithm, versions, job_keys[i], task, job)

    def add_jobs(home: Home, chunk: tuple[Array, Arrivals]) -> tuple[Home, None]:
        present = chunk[1].number >= 0
        # vmap of a while_loop runs as many steps as the longest client takes: padding repeats the
        # chunk's first job, which takes the most.
        i, jobs = jax.tree.map(lambda x: jnp.where(present, x, jnp.maximum(x[0], 0)), chunk)
        together = jax.jit(chunks.vmap_unless_one(len(present), contribute), inline=True)
        sent = chunks.unless_empty(together, present, i, jobs, skip=may_skip)
        total = sums.add_chunk(home.total, sent, present, jobs.model, jobs.part)
        if not jax.tree.leaves(home.recent):
            return Home(total, home.recent), None
        turn = jnp.where(present, jobs.turn, WINDOW)
        came = (jobs.model, turn), jax.vmap(_update)(sent)
        if how.client_axis is not None:
            came = lax.all_gather(came, how.client_axis, tiled=True)
        return Home(total, chunks.put_rows(home.recent, *came)), None

    who = jnp.where(jobs.number >= 0, jobs.client, -1)
    order = chunks.longest_first(num_steps, who, jobs.place)
    may_skip = chunk_size is not None or order is not None
    rows = jnp.arange(len(who)), jobs
    for some in chunks.in_chunks(rows, order, chunk_size, how.client_axis):
        home, _ = lax.scan(add_jobs, home, some)
    if how.client_axis is None:
        return home
    return home._replace(total=lax.psum(home.total, how.client_axis))


def _contribute(
    algorithm: base.Algorithm, versions: Given, key: PRNGKeyArray, task: Task, job: Arrivals
) -> Contribution:
    """Returns what a job brings home, with dense arrays in place of sparse ones."""
    given = jax.tree.map(itemgetter(job.place), versions)
    local = base.LocalProblem(key, job.version + 1, task, job.client, given.params)
    sent, _ = algorithm.client(local, given.server, ())
    return sums.dense_update(sent._replace(report=()), given.params)


def _step(
    stack: Stack, batch: Batch, models: Models, store: Store, home: Home
) -> tuple[Models, Store]:
    """Returns the models of a stack after the servers' steps, and what is kept for them."""
    steps, made, places = stack.rows((batch.steps, batch.made, batch.places))
    total = jax.tree.map(lambda x, y: x.at[:, 0].add(y), home.total, store.buffer)
    nowhere = len(jax.tree.leaves(store.versions)[0])

    def is_missing(carry: tuple[Array, Models, Given]) -> Array:
        return chunks.is_any(carry[0] < made)

    def step(carry: tuple[Array, Models, Given]) -> tuple[Array, Models, Given]:
        part, models, versions = carry
        is_due = part < made

        def of_model(task: Task, is_due: Array, number: Array, total: Any, old: Given) -> Given:
            # A buffer that is not full may be empty, and 0/0 is NaN: ones take its place.
            full = jax.tree.map(lambda x: jnp.where(is_due, x[part], 1), total)
            given = base.Aggregation(number, task, old.params, old.server, (), full)
            new = Given(*stack.algorithm.server(given))
            return jax.tree.map(partial(jnp.where, is_due), new, old)

        old = Given(models.params, models.server)
        new = over_models(of_model, stack, is_due, steps + part + 1, total, old)
        versions = chunks.put_rows(versions, jnp.where(is_due, places[:, part], nowhere), new)
        return part + 1, Models(new.params, new.server, models.clients), versions

    start = jnp.int32(0), models, store.versions
    _, models, versions = lax.while_loop(is_missing, step, start)
    buffer = jax.tree.map(lambda x: x[jnp.arange(len(made)), made], total)
    return models, Store(versions, buffer, home.recent)


def _update(sent: Contribution) -> Params:
    """Returns the update of a contribution without its weight."""
    return jax.tree.map(lambda x: x / sent.weight, sent.update)


def _add_work(stacks: Sequence[Stack], tally: Tally, batch: Batch, homes: Sequence[Home]) -> Tally:
    """Returns the work so far with that of a batch."""
    of_stacks = [jnp.sum(home.total.num_gradients, axis=1, dtype=jnp.int32) for home in homes]
    models, jobs = jnp.arange(len(batch.made)), batch.jobs
    is_models = (jobs.number >= 0)[:, None] & (jobs.model[:, None] == models)
    updates = jnp.sum(is_models, axis=0, dtype=jnp.int32)
    staleness = jnp.sum(jnp.where(is_models, jobs.staleness[:, None], 0), axis=0, dtype=jnp.int32)
    counts = Counts(updates, by_model(stacks, of_stacks), jnp.zeros_like(updates))
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
