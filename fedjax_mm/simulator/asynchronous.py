"""Asynchronous runs, in batches of arrivals: train -> add up -> step -> share out.

Arrivals are independent up to the first job that began after one of them. Such a batch is trained
together, and then the servers take their steps in order. The boundaries between batches affect
results only through the order of summation.

A job is trained when it arrives rather than when it begins, and the version it began from is stored
until then. Every job may have begun from a different version, and every model has a current
version, so R + M versions are stored per model structure. Training jobs when they begin and storing
their updates would take the same memory, but only jobs that began since the last step could be
trained together, and the R jobs that are still in progress at the end would be trained in vain.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm import base
from fedjax_mm.asynchrony.dispatch import (
    WINDOW,
    Clock,
    Dispatch,
    between_rounds,
    draws_of,
    first_jobs,
    share_out,
)
from fedjax_mm.asynchrony.lifetimes import Lives
from fedjax_mm.base import Cohort, Contribution, Metrics, Params, Scalar, Task, chunks, keys, sums
from fedjax_mm.base.contract import ACTIVE
from fedjax_mm.simulator.asynchronous_batches import Arrived, Batch, Bounds, next_batch
from fedjax_mm.simulator.record import Counts, Measured, Work, add_counts, measure
from fedjax_mm.simulator.round import State, in_turn, look, start_models
from fedjax_mm.simulator.stacks import Stack, StackState, by_model, over_models
from fedjax_mm.simulator.train import Jobs, Options, SendFn, Start, Trained, train
from fedjax_mm.wrap import zero_message


def names_of_clock(dispatch: Dispatch) -> tuple[str, ...]:
    """Names of the metrics of the clock."""
    lifetimes = (ACTIVE, *(each.recorded for each in dispatch.lifetimes))
    return "time", "steps", "staleness", "at_work", *(lifetimes if dispatch.lifetimes else ())


class Version(NamedTuple):
    """The model version that jobs begin from, with the server's state."""

    params: Params
    server: base.ServerState


class Store(NamedTuple):
    """Versions, buffers and recent updates of the models of one stack.

    Attributes:
      versions: `Version`, ``[places, ...]``, the models' current versions and the jobs' versions.
      buffer: the sum of the contributions since each model's last step, ``[models, ...]``.
      recent: each model's last updates, ``[models, 8, ...]``; ``()`` without reallocation.
    """

    versions: Version
    buffer: Contribution
    recent: Any


class AsyncState(NamedTuple):
    """State of an asynchronous run, apart from its models: the clock, and each stack's store."""

    clock: Clock
    stores: tuple[Store, ...]


class Mixed(NamedTuple):
    """Sum of clients' models, and of the weights by which the server's model is subtracted."""

    models: Params
    weight: Array


class Received(NamedTuple):
    """Contributions of a batch's jobs to the models of one stack.

    Attributes:
      total: the sum of the contributions to each step, and to the step after the batch,
        ``[models, steps + 1, ...]``.
      recent: see `Store`.
    """

    total: Contribution
    recent: Any


def first_store(dispatch: Dispatch, stack: Stack, state: StackState) -> Store:
    """Store of a stack at time 0, which holds only the initial versions."""

    def put(x: Array) -> Array:
        places = jnp.zeros((dispatch.num_places, *x.shape[1:]), x.dtype)
        return places.at[np.array(stack.models)].set(x)

    def zeros(x: Any, *axes: int) -> Array:
        return jnp.zeros((len(stack.models), *axes, *x.shape), x.dtype)

    versions = jax.tree.map(put, Version(state.params, state.server))
    task, first = stack.task_at(jnp.int32(0)), jax.tree.map(itemgetter(0), state)
    client = jax.tree.map(itemgetter(0), first.clients)
    sent = zero_message(stack.algorithm, task, first.params, first.server, client)
    buffered = sent
    if dispatch.sends == "model":
        buffered = sent._replace(update=Mixed(sent.update, jnp.zeros_like(sent.weight)))
    recent = jax.tree.map(lambda x: zeros(x, WINDOW), sent.update) if dispatch.reallocate else ()
    return Store(versions, jax.tree.map(zeros, buffered), recent)


class Arrivals(NamedTuple):
    """An asynchronous run, whose rounds are `arrivals_per_round` arrivals each.

    Attributes:
      stacks: the models.
      dispatch: the dispatch rule.
      options: the options of the run.
      params: the initial parameters of each stack, ``[models, ...]``; None lets tasks draw them.
    """

    stacks: list[Stack]
    dispatch: Dispatch
    options: Options
    params: list[Params] | None = None

    def start(self, rng_key: PRNGKeyArray) -> State:
        """State at time 0."""
        models = start_models(rng_key, self.stacks, self.params, self.options.client_axis)
        stores = tuple(map(partial(first_store, self.dispatch), self.stacks, models))
        clock = AsyncState(first_jobs(self.dispatch, rng_key), stores)
        return State(rng_key, jnp.asarray(0), models, clock)

    def rounds(self, state: State, number: int) -> tuple[State, Work]:
        """Computes a static number of rounds, and returns their work."""
        if self.dispatch.lifetimes:
            return in_turn(self.one_round, state, self.no_work(), number)
        arrivals = number * self.dispatch.arrivals_per_round
        models, own, work = compute_arrivals(self, state, arrivals)
        return State(state.rng_key, state.round + number, models, own), work

    def one_round(self, state: State) -> tuple[State, Work]:
        """Lets models arrive and finish, computes the next round, and returns its work."""
        asked = look(self.stacks, state.rng_key, state.round, state.models, self.options)
        each = state.assignment.clock, state.rng_key, state.round, asked
        clock = between_rounds(self.dispatch, *each)
        state = state._replace(assignment=state.assignment._replace(clock=clock))
        models, own, work = compute_arrivals(self, state, self.dispatch.arrivals_per_round)
        return State(state.rng_key, state.round + 1, models, own), work

    def no_work(self) -> Work:
        """Work before the first arrival."""
        nothing = jnp.zeros(self.dispatch.num_models, jnp.int32)
        return Work(Counts(nothing, nothing, nothing), nothing)

    def measure(self, state: State, work: Work) -> Measured:
        """Evaluates all models after a round, and the clock with the work since the last record."""
        own = clock_metrics(self.dispatch, state.assignment.clock, work)
        at = state.rng_key, state.round, state.models
        return measure(self.stacks, *at, self.options, own)


class _Progress(NamedTuple):
    """Loop state of a run: models, clock and stores, the arrivals so far, and their work."""

    models: tuple[StackState, ...]
    own: AsyncState
    done: Int[Array, ""]
    work: Work


def compute_arrivals(
    run: Arrivals, state: State, number: int
) -> tuple[tuple[StackState, ...], AsyncState, Work]:
    """Computes the next `number` arrivals, and returns the models, the clock and the work.

    Without active models nothing arrives.
    """
    stacks, dispatch = run.stacks, run.dispatch
    options = run.options._replace(with_reports=dispatch.reallocate)
    bounds = _bounds(stacks, dispatch, number)
    first, period = state.assignment.clock, state.assignment.clock.period
    before = first.num_arrived
    numbers = first.next_number(before) + jnp.arange(number, dtype=jnp.int32)
    draws = draws_of(dispatch, state.rng_key, numbers)
    wanted = number if first.active is None else jnp.where(jnp.any(first.active), number, 0)

    def is_missing(now: _Progress) -> Array:
        # Loop until all replicas are done. Finished ones compute only empty batches, which change
        # nothing.
        return chunks.is_any(now.done[None] < wanted)

    def one_batch(now: _Progress) -> _Progress:
        (clock, stores), limit = now.own, wanted - now.done
        if dispatch.reallocate:
            limit = jnp.minimum(limit, period - (before + now.done) % period)
        clock, batch = next_batch(dispatch, clock, draws, bounds, now.done, limit)
        parts = list(zip(stacks, now.models, stores, strict=True))
        received = [_receive(dispatch, *part, options, bounds, batch) for part in parts]
        work = add_counts(now.work, _work(stacks, batch, received))
        both = zip(parts, received, strict=True)
        stepped = [_step(*part, state.rng_key, batch, new) for part, new in both]
        models, stores = zip(*stepped, strict=True)
        done = now.done + batch.size
        if dispatch.reallocate:
            is_due = (before + done) % period == 0
            clock = _reallocate(stacks, dispatch, clock, stores, is_due)
        return _Progress(models, AsyncState(clock, stores), done, work)

    start = _Progress(state.models, state.assignment, jnp.int32(0), run.no_work())
    models, own, _, work = lax.while_loop(is_missing, one_batch, start)
    return models, own, work


def _bounds(stacks: Sequence[Stack], dispatch: Dispatch, number: int) -> Bounds:
    """Static bounds of a batch of at most `number` arrivals."""
    # Use rows rather than a list if models share no data, because each slot of a list would copy
    # the data of its model and compute every stack.
    is_list = len(stacks) == 1 and all(jax.tree.leaves(stacks[0].shared))
    # At most about half of the jobs arrive before one of their replacements, and a list has room
    # for that many. Rows are computed with their padding, and most batches fill only a quarter, so
    # a row has room for a quarter.
    per_model = min(number, -(-max(dispatch.at_work) // (2 if is_list else 4)))
    most = min(number, dispatch.num_jobs, dispatch.num_models * per_model)
    return Bounds(most, per_model, min(per_model, dispatch.ratio))


def _train(
    dispatch: Dispatch,
    stack: Stack,
    state: StackState,
    versions: Version,
    options: Options,
    bounds: Bounds,
    arrivals: Arrived,
    job_keys: PRNGKeyArray,
) -> Trained:
    """Trains the arrivals whose models are in a stack."""

    def start(_: Any, model: StackState, job: Jobs) -> Start:
        del model
        number, version, place = job.origin
        began = jax.tree.map(itemgetter(place), versions)
        return Start(job_keys[number], version + 1, began.params, began.server)

    numbers = jnp.arange(len(arrivals.client), dtype=jnp.int32)
    mine = _of_stack(stack, arrivals)
    segment, num_segments = arrivals.step, bounds.steps + 1
    if arrivals.is_used is not None:
        # Add updates that are too stale to a sum that no step reads.
        segment = jnp.where(arrivals.is_used, segment, num_segments)
        num_segments += 1
    factors: Any = None
    if dispatch.weight is not None:
        factors = jax.vmap(dispatch.weight)(jnp.maximum(arrivals.staleness, 0))
    jobs = Jobs(
        mine.clients,
        mine.models,
        scale=factors,
        segment=segment,
        origin=(numbers, arrivals.version, arrivals.place),
    )
    how: Any = {"num_segments": num_segments, "most_per_model": bounds.per_model}
    message = _dense
    if dispatch.weight is not None or dispatch.sends == "model":
        message = partial(_by_staleness, dispatch.sends == "model")
    return train(stack, state, jobs, start, options, **how, message=message)


def _of_stack(stack: Stack, arrivals: Arrived) -> Cohort:
    clients = jnp.where(arrivals.number >= 0, arrivals.client, -1)
    return stack.slots(Cohort(clients, arrivals.model))[0]


def _dense(
    send: SendFn, factor: Scalar | None, params: Params
) -> tuple[Contribution, base.ClientState]:
    """Sends a dense update, because jobs' versions differ, and reports it divided by its weight."""
    sent, state = send(factor)
    sent = sums.dense_update(sent._replace(report=()), params)
    return sent._replace(report=jax.tree.map(lambda x: x / sent.weight, sent.update)), state


def _by_staleness(
    is_model: bool, send: SendFn, factor: Scalar | None, params: Params
) -> tuple[Contribution, base.ClientState]:
    """Multiplies the update but not its weight in the mean, or sends the client's model."""
    sent, state = _dense(send, None, params)
    found: Any = jax.tree.structure(sent.update)
    if found != jax.tree.structure(params):
        raise ValueError(
            "weight and sends of fedast are for updates that are changes of the parameters, but "
            "the algorithm sends more, such as a second sum; use another one, such as fedavg"
        )
    factor = jnp.asarray(1.0 if factor is None else factor, sent.weight.dtype)
    moved = sent.update
    if is_model:
        moved = jax.tree.map(lambda x, w: x + sent.weight.astype(w.dtype) * w, moved, params)
    update = jax.tree.map(lambda x: factor.astype(x.dtype) * x, moved)
    if is_model:
        update = Mixed(update, factor * sent.weight)
    return sent._replace(update=update), state


def _receive(
    dispatch: Dispatch,
    stack: Stack,
    state: StackState,
    store: Store,
    options: Options,
    bounds: Bounds,
    batch: Batch,
) -> Received:
    """Trains a batch, and stores the most recent updates of a stack's models."""
    arrivals, mine = batch.jobs, _of_stack(stack, batch.jobs)
    how = options, bounds, arrivals, batch.keys
    trained = _train(dispatch, stack, state, store.versions, *how)
    if not options.with_reports:
        return Received(trained.total, store.recent)
    slots = jnp.asarray(mine.models), jnp.where(mine.clients >= 0, arrivals.slot, WINDOW)
    return Received(trained.total, chunks.put_rows(store.recent, slots, trained.reports))


def _step(
    stack: Stack,
    state: StackState,
    store: Store,
    rng_key: PRNGKeyArray,
    batch: Batch,
    received: Received,
) -> tuple[StackState, Store]:
    """Applies the server steps to a stack's models and its store."""
    steps_before, new_steps, places = stack.rows(
        (batch.steps_before, batch.new_steps, batch.places)
    )
    total = jax.tree.map(lambda x, y: x.at[:, 0].add(y), received.total, store.buffer)
    nowhere = len(jax.tree.leaves(store.versions)[0])

    def is_missing(carry: tuple[Array, Version, Version]) -> Array:
        return chunks.is_any(carry[0] < new_steps)

    def step(carry: tuple[Array, Version, Version]) -> tuple[Array, Version, Version]:
        i, old, versions = carry
        is_due = i < new_steps

        def of_model(
            task: Task, model: Array, is_due: Array, number: Array, total: Any, old: Version
        ) -> Version:
            # An empty buffer gets weight 1. 0/0 would be NaN.
            full = jax.tree.map(lambda x: jnp.where(is_due, x[i], 1), total)
            full = _against(old.params, full)
            key = keys.step_key(rng_key, model, number)
            given = base.ServerContext(number, task, old.params, old.server, (), full, key)
            new = Version(*stack.algorithm.server(given))
            return jax.tree.map(partial(jnp.where, is_due), new, old)

        each = jnp.array(stack.models, jnp.int32), is_due, steps_before + i + 1
        new = over_models(of_model, stack, *each, total, old)
        versions = chunks.put_rows(versions, jnp.where(is_due, places[:, i], nowhere), new)
        return i + 1, new, versions

    start = jnp.int32(0), Version(state.params, state.server), store.versions
    _, new, versions = lax.while_loop(is_missing, step, start)
    state = dataclasses.replace(state, params=new.params, server=new.server)
    buffer = jax.tree.map(lambda x: x[jnp.arange(len(new_steps)), new_steps], total)
    return state, Store(versions, buffer, received.recent)


def _against(params: Params, total: Contribution) -> Contribution:
    """Turns a sum of models into one of changes of the current model."""
    if not isinstance(total.update, Mixed):
        return total
    models, weight = total.update
    changes = jax.tree.map(lambda x, w: x - weight.astype(w.dtype) * w, models, params)
    return total._replace(update=changes)


def _work(stacks: Sequence[Stack], batch: Batch, received: Sequence[Received]) -> Work:
    """Counts the work of a batch."""
    gradients = [jnp.sum(each.total.num_gradients, 1, dtype=jnp.int32) for each in received]
    models, jobs = jnp.arange(len(batch.new_steps)), batch.jobs
    is_model = (jobs.number >= 0)[:, None] & (jobs.model[:, None] == models)
    updates = jnp.sum(is_model, axis=0, dtype=jnp.int32)
    staleness = jnp.sum(jnp.where(is_model, jobs.staleness[:, None], 0), axis=0, dtype=jnp.int32)
    counts = Counts(updates, by_model(stacks, gradients), jnp.zeros_like(updates))
    return Work(counts, staleness)


def clock_metrics(dispatch: Dispatch, clock: Clock, work: Work) -> Metrics:
    """Metrics of the clock and of the work since the last record."""
    lifetimes: tuple[Array, ...] = ()
    if isinstance(clock.lives, Lives):
        lifetimes = clock.lives.active.astype(float), *clock.lives.events
    each = (
        jnp.full(clock.steps.shape, clock.time),
        clock.steps.astype(float),
        work.staleness / work.counts.client_updates,  # 0 / 0 is NaN for a model without arrivals
        clock.targets.astype(float),
        *lifetimes,
    )
    return dict(zip(names_of_clock(dispatch), each, strict=True))


def _reallocate(
    stacks: Sequence[Stack],
    dispatch: Dispatch,
    clock: Clock,
    stores: Sequence[Store],
    is_due: Array,
) -> Clock:
    """Updates R_m in the clock, if this is due and active models have enough updates."""

    def share() -> Array:
        each = [jax.vmap(relative_variance)(store.recent) for store in stores]
        return share_out(dispatch, clock, by_model(stacks, each))

    has_enough = clock.arrived >= WINDOW
    is_known = jnp.all(has_enough if clock.active is None else has_enough | ~clock.active)
    return clock._replace(targets=lax.cond(is_due & is_known, share, lambda: clock.targets))


def relative_variance(updates: Params) -> Float[Array, ""]:
    """``mean_i |Delta_i - mean Delta|^2 / |mean Delta|^2`` of updates ``[i, ...]``."""
    leaves = jax.tree.leaves(updates)
    means = [jnp.mean(x, axis=0) for x in leaves]
    spread = sum(jnp.sum((x - y) ** 2) / len(x) for x, y in zip(leaves, means, strict=True))
    return jnp.asarray(spread / sum(jnp.sum(y**2) for y in means))
