"""Synchronous rounds: look -> assign -> train -> aggregate -> observe -> mix -> count.

Models of equal structure form a *stack* and are computed together. The clients that train in a
round form a *cohort*. A *chunk* is the part of a cohort that is computed at once. Local training is
in `train.py`, the models axis in `stacks.py`, and all keys in `base/keys.py`. Asynchronous runs
have arrivals instead of rounds, in `asynchronous.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm import base
from fedjax_mm.base import (
    Assignment,
    Cohort,
    Contribution,
    Look,
    Params,
    Round,
    Scalar,
    Task,
    keys,
    sums,
)
from fedjax_mm.base.calls import in_html, in_short
from fedjax_mm.base.contract import ACTIVE
from fedjax_mm.simulator.mixing import mix, run_metrics
from fedjax_mm.simulator.record import Counts, Measured, Work, add_counts, measure
from fedjax_mm.simulator.rows import all_rows, num_own
from fedjax_mm.simulator.stacks import Stack, StackState, by_model, over_models
from fedjax_mm.simulator.train import (
    Jobs,
    MessageFn,
    Options,
    SendFn,
    Start,
    Trained,
    as_it_is,
    train,
)
from fedjax_mm.tasks.view import appeals, at_round, changes, client_losses, client_weights


class State(NamedTuple):
    """State between rounds."""

    rng_key: PRNGKeyArray
    round: Int[Array, ""]  # number of completed rounds
    models: tuple[StackState, ...]  # one per stack
    assignment: Any  # in asynchronous runs, the clock and the stored versions

    def __repr__(self) -> str:
        return in_short(self)

    def _repr_html_(self) -> str:
        return in_html(self)


class Rounds(NamedTuple):
    """A synchronous run.

    Attributes:
      stacks: the models.
      assignment: chooses the cohorts.
      options: the options of the run.
      params: the initial parameters of each stack, ``[models, ...]``; None lets tasks draw them.
    """

    stacks: list[Stack]
    assignment: Assignment
    options: Options
    params: list[Params] | None = None

    def with_homes(self, homes: Int[Array, " slots"]) -> Self:
        """A run whose states have only rows of the next cohort's clients, see `Stack.homes`."""
        return self._replace(stacks=[stack._replace(homes=homes) for stack in self.stacks])

    def start(self, rng_key: PRNGKeyArray) -> State:
        """State before round 1."""
        zero = jnp.int32(0)
        stacks = stacks_at(self.stacks, zero)
        models = start_models(rng_key, stacks, self.params, self.options.client_axis)
        asked = look(stacks, rng_key, zero, models, self.options)
        own = self.assignment.init(keys.assignment_key(keys.round_key(rng_key, 0)), asked)
        return State(rng_key, jnp.asarray(0), models, own)

    def one_round(self, state: State) -> tuple[State, Work]:
        """Computes the next round, and returns its work."""
        t, assignment, models = state.round + 1, self.assignment, state.models
        rng_key, stacks = keys.round_key(state.rng_key, t), stacks_at(self.stacks, t)
        asked = look(stacks, state.rng_key, state.round, models, self.options)
        assign_key = keys.assignment_key(rng_key)
        cohort, own = assignment.assign(assign_key, t, state.assignment, asked)
        now = CurrentRound(t, rng_key, cohort)
        trained = train_cohort(stacks, now, models, self.options)
        active = self.active(own)
        new = aggregate(stacks, now, models, trained, active, self.options.client_axis)
        own = observe(assignment, stacks, now, own, trained)
        models = mix(assignment, stacks, t, own, models, new, self.active)
        return State(state.rng_key, t, models, own), Work(count(stacks, cohort, trained, active))

    def active(self, own: Any) -> Bool[Array, " models"]:
        """Active models, given the state of the assignment after its choice."""
        metrics = self.assignment.metrics(own) if self.assignment.metrics else {}
        return metrics[ACTIVE] > 0 if ACTIVE in metrics else jnp.ones(self.num_models, bool)

    @property
    def num_models(self) -> int:
        """M."""
        return sum(len(stack.models) for stack in self.stacks)

    def rounds(self, state: State, number: int) -> tuple[State, Work]:
        """Computes a static number of rounds, and returns their work."""
        return in_turn(self.one_round, state, self.no_work(), number)

    def no_work(self) -> Work:
        """Work before round 1."""
        return Work(Counts(*[jnp.zeros(self.assignment.num_models, jnp.int32)] * 3))

    def measure(self, state: State, work: Work) -> Measured:
        """Evaluates all models after a round."""
        del work
        now = state.models, state.assignment, self.options.client_map
        own = run_metrics(self.assignment, self.stacks, *now)
        at = stacks_at(self.stacks, state.round), state.rng_key, state.round, state.models
        return measure(*at, self.options, own, self.assignment.measured)


def in_turn(
    one_round: Callable[[State], tuple[State, Work]], state: State, no_work: Work, number: int
) -> tuple[State, Work]:
    """Computes a static number of rounds one by one, and returns their work."""

    def one_more(carry: tuple[State, Work], _: None) -> tuple[tuple[State, Work], None]:
        state, work = one_round(carry[0])
        return (state, add_counts(carry[1], work)), None

    if number == 1:
        return one_round(state)
    return lax.scan(one_more, (state, no_work), length=number)[0]


class CurrentRound(NamedTuple):
    """The number, the key and the cohort of the current round."""

    round: Round
    rng_key: PRNGKeyArray
    cohort: Cohort


def start_models(
    rng_key: PRNGKeyArray,
    stacks: Sequence[Stack],
    params: Sequence[Params] | None,
    client_axis: str | None,
) -> tuple[StackState, ...]:
    """Models before round 1, with parameters given by the user or drawn by tasks."""

    def start_model(stack: Stack, task: Task, params: Params) -> StackState:
        server, client = stack.algorithm.init(task, params)
        size = num_own(task.num_clients, client_axis) if stack.homes is None else 1
        own = jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *jnp.shape(x))), client)
        return StackState(params, server, own, stack.models)

    drawn = [draw_params(stack, rng_key) for stack in stacks] if params is None else params
    pairs = zip(stacks, drawn, strict=True)
    return tuple(over_models(partial(start_model, stack), stack, first) for stack, first in pairs)


def draw_params(stack: Stack, rng_key: PRNGKeyArray) -> Params:
    """Draws the initial parameters of a stack's models, given the key of the seed."""
    each = keys.start_keys(rng_key, stack.models)
    return over_models(lambda task, key: task.init(key), stack, each)


def stacks_at(stacks: Sequence[Stack], round: Round) -> list[Stack]:
    """Stacks with the tasks of a round."""
    at = partial(at_round, round=round)

    def of_stack(stack: Stack) -> Stack:
        if not changes(stack.task):
            return stack
        if all(jax.tree.leaves(stack.shared)):
            return stack._replace(task=at(stack.task))
        # Arrays shared by models have no models axis, either before or after `at`.
        axes = jax.tree.map(lambda same: None if same else 0, stack.shared)
        return stack._replace(task=jax.vmap(at, (axes,), axes)(stack.task))

    return list(map(of_stack, stacks))


def look(
    stacks: Sequence[Stack],
    rng_key: PRNGKeyArray,
    round: Round,
    states: Sequence[StackState],
    options: Options,
) -> Look:
    """Functions with which the assignment can evaluate the models after a round."""
    num_models = sum(len(stack.models) for stack in stacks)

    def ask(question: Callable[[Task, Params], Array]) -> Array:
        parts = zip(stacks, states, strict=True)
        return by_model(stacks, [over_models(question, stack, of.params) for stack, of in parts])

    def updates() -> base.Updates:
        num_clients = stacks[0].num_clients
        clients = jnp.arange(num_clients, dtype=jnp.int32)
        shape = num_models, num_clients
        everybody = Cohort.of_rows(jnp.broadcast_to(clients, shape), jnp.ones(shape))
        now = CurrentRound(round + 1, keys.round_key(rng_key, round + 1), everybody)
        how = options._replace(with_reports=True)
        trained = train_cohort(stacks, now, states, how, message=_norm_alone, keeps_states=False)
        total = by_model(stacks, [each.total for each in trained])
        norms = by_model(stacks, [each.reports.reshape(-1, num_clients) for each in trained])
        return base.Updates(norms / total.weight[:, None], total.num_gradients)

    def metric(*names: str) -> Array:
        key, one = keys.round_key(rng_key, round), partial(metric_of, names)

        def of_stack(stack: Stack, state: StackState) -> Array:
            each = keys.metrics_keys(key, stack.models)
            return over_models(one, stack, each, state.params)

        return by_model(stacks, list(map(of_stack, stacks, states)))

    return Look(
        losses=partial(ask, client_losses),
        appeals=partial(ask, appeals),
        weights=partial(ask, lambda task, _: client_weights(task)),
        updates=updates,
        metric=metric,
    )


def _norm_alone(send: SendFn, factor: Scalar | None, params: Params) -> tuple[Contribution, Any]:
    """Reports the norm of the part of an update that is proportional to the assignment's factor."""
    del factor

    # The update is affine in the scale, and its values at 0 and 1 determine it. Training does not
    # depend on the scale, so it is not repeated.
    def dense(scale: Array) -> Contribution:
        return sums.dense_update(send(scale)[0]._replace(report=()), params)

    sent = jax.vmap(dense)(jnp.arange(2.0))
    scaled = jax.tree.map(lambda x: x[1] - x[0], sent.update)
    norm = sums.root(optax.tree.norm(scaled, squared=True))
    return Contribution((), sent.weight[1], sent.num_gradients[1], norm), ()


def metric_of(
    names: Sequence[str], task: Task, rng_key: PRNGKeyArray, params: Params
) -> Float[Array, ""]:
    """First of several named metrics that the task has."""
    metrics = task.metrics(rng_key, params)
    return next(metrics[name] for name in names if name in metrics)


def train_cohort(
    stacks: Sequence[Stack],
    now: CurrentRound,
    states: Sequence[StackState],
    options: Options,
    *,
    message: MessageFn = as_it_is,
    keeps_states: bool = True,
) -> list[Trained]:
    """Trains the cohort of a round and returns each stack's result."""

    def start(model_key: PRNGKeyArray, model: StackState, job: Jobs) -> Start:
        key = keys.client_key(model_key, job.client)
        return Start(key, now.round, model.params, model.server)

    def of_stack(stack: Stack, state: StackState) -> Trained:
        mine, slots = stack.slots(now.cohort)
        home = None if stack.homes is None else stack.homes[slots]
        jobs = Jobs(mine.clients, mine.models, mine.scale, mine.takes_part, home=home)
        shared = keys.model_keys(now.rng_key, stack.models)
        how: Any = {"shared": shared, "message": message, "keeps_states": keeps_states}
        return train(stack, state, jobs, start, options, **how)

    return list(map(of_stack, stacks, states))


def aggregate(
    stacks: Sequence[Stack],
    now: CurrentRound,
    states: Sequence[StackState],
    trained: Sequence[Trained],
    active: Bool[Array, " models"],
    client_axis: str | None,
) -> tuple[StackState, ...]:
    """Applies the server step to every model.

    Models without participants are unchanged unless they are active and their algorithm has
    `steps_idle`.
    """

    def of_stack(stack: Stack, state: StackState, trained: Trained) -> StackState:
        def of_model(
            task: Task,
            key: PRNGKeyArray,
            size: Array,
            active: Array,
            trained: Trained,
            model: StackState,
        ) -> StackState:
            is_trained = active if stack.algorithm.steps_idle else size > 0
            # The sums of an idle model are 0. Replace them with 1, because the gradient of 0/0 is
            # NaN even if `where` discards the value.
            total = jax.tree.map(lambda x: jnp.where(is_trained, x, 1), trained.total)
            old, states = (model.params, model.server), trained.client_states
            server_key = keys.server_key(key)
            # XLA removes this gather if the server does not read the states.
            everybody = stack.as_all(all_rows(states, task.num_clients, client_axis))
            given = base.ServerContext(now.round, task, *old, everybody, total, server_key)
            new = stack.algorithm.server(given)
            params, server_state = jax.tree.map(partial(jnp.where, is_trained), new, old)
            return StackState(params, server_state, states, stack.models)

        trained = trained._replace(reports=())  # reports have no models axis
        each = keys.model_keys(now.rng_key, stack.models)
        rows = stack.rows(sizes), stack.rows(active)
        return over_models(of_model, stack, each, *rows, trained, state)

    sizes = now.cohort.sizes(sum(len(stack.models) for stack in stacks))
    return tuple(map(of_stack, stacks, states, trained))


def observe(
    assignment: Assignment,
    stacks: Sequence[Stack],
    now: CurrentRound,
    state: Any,
    trained: list[Trained],
) -> Any:
    """The assignment's state after `observe`, or unchanged if it has no `observe`."""
    if assignment.observe is None:
        return state
    reports = [each.reports for each in trained]
    if now.cohort.is_known:
        order = np.argsort(np.concatenate([stack.slots(now.cohort)[1] for stack in stacks]))
        all_reports = jax.tree.map(lambda *each: jnp.concatenate(each)[order], *reports)
    else:  # a slot's report is 0 except in its model's stack
        all_reports = jax.tree.map(lambda *each: reduce(jnp.add, each), *reports)
    return assignment.observe(now.round, *received(now.cohort, all_reports), state)


def received(cohort: Cohort, reports: Any) -> tuple[Cohort, Any]:
    """Cohort and reports without the clients that do not participate."""
    if cohort.takes_part is None:
        return cohort, reports
    takes_part = cohort.participates()

    def received(x: Array) -> Array:
        return jnp.where(takes_part.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))

    clients = jnp.where(takes_part, jnp.asarray(cohort.clients), -1)
    return dataclasses.replace(cohort, clients=clients), jax.tree.map(received, reports)


def count(
    stacks: Sequence[Stack],
    cohort: Cohort,
    trained: Sequence[Trained],
    active: Bool[Array, " models"],
) -> Counts:
    """Counts the work of one round, per model."""
    participants = cohort.sizes(sum(len(stack.models) for stack in stacks))
    gradients = cohort.num_gradients
    if gradients is None:
        gradients = by_model(stacks, [each.total.num_gradients for each in trained])
    return Counts(participants, gradients, (active & (participants == 0)).astype(jnp.int32))
