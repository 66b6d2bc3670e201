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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm import base, chunks, keys, sums
from fedjax_mm.asynchrony.arrivals import Batch, Lanes, next_batch
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


def first_store(dispatch: Dispatch, rng_key: PRNGKeyArray, stack: Stack, models: Models) -> Store:
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


def batches_of(
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
        clock, batch = next_batch(dispatch, clock, draws, widths, done, limit)
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
