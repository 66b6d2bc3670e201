"""The engine of `simulate` and `sweep`, which computes the rounds or the arrivals of a run.

A round consists of the steps look -> assign -> train -> aggregate -> observe -> count, most of
which are in `rounds.py`. In an asynchronous run, a round consists of `arrivals_per_round` arrivals,
which `asynchrony/` computes.

Models of equal structure form a *stack* and are computed together. The clients that train in a
round form a *cohort*. A *chunk* is the part of a cohort that is computed at once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm import checks, keys
from fedjax_mm.asking import assign, check_weight, start_states
from fedjax_mm.asynchrony.batches import (
    AsyncState,
    arrivals_of,
    clock_metrics,
    first_store,
)
from fedjax_mm.asynchrony.dispatch import Dispatch, first_jobs
from fedjax_mm.base import Algorithm, Assignment, Metrics, Params, Task
from fedjax_mm.chunks import ClientMap
from fedjax_mm.compiler import check_fusions
from fedjax_mm.parts import check_assignment
from fedjax_mm.record import (
    Counts,
    Work,
    add_counts,
    count,
    own_metrics,
)
from fedjax_mm.rounds import CurrentRound, aggregate, look, observe, stacks_at, train_cohort
from fedjax_mm.stacks import Stack, StackState, over_models, stacks_of
from fedjax_mm.tasks.view import changes
from fedjax_mm.train import Options


class State(NamedTuple):
    """State between rounds."""

    rng_key: PRNGKeyArray
    round: Int[Array, ""]  # number of completed rounds
    models: tuple[StackState, ...]  # one per stack
    assignment: Any  # in asynchronous runs, the clock and the stored versions


class Engine(NamedTuple):
    """Compiled parts of a run, built by `engine_of`.

    Attributes:
      stacks: the models.
      start: returns the state before round 1, given a key and initial parameters.
      rounds: runs a static number of rounds from a state, and returns the new state and the
        completed work.
      metrics: returns the metrics that do not come from tasks, given the assignment's state and the
        work since the last record.
      no_work: returns the work before the first round.
      most_updates: returns the maximum number of local trainings in a round, given the prior state.
      is_synchronous: whether training is synchronous.
    """

    stacks: list[Stack]
    start: Callable[[PRNGKeyArray, Params | None], State]
    rounds: Callable[[State, int], tuple[State, Work]]
    metrics: Callable[[Any, Work], Metrics | None]
    no_work: Callable[[], Work]
    most_updates: Callable[[State], int]
    is_synchronous: bool


def engine_of(
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment | Dispatch,
    client_map: ClientMap = "auto",
    client_axis: str | None = None,
) -> Engine:
    """Returns the engine of a run, given the arguments of `simulate`.

    Invalid arguments raise the same errors as in `simulate`.
    """
    check_fusions()
    options = Options(checks.check_client_map(client_map), checks.check_client_axis(client_axis))
    if isinstance(assignment, Dispatch):
        stacks = stacks_of(tasks, algorithm, assignment, by="dispatch")
        return _in_arrivals(stacks, assignment, options)
    stacks = stacks_of(tasks, algorithm, check_assignment(assignment))
    return _in_rounds(stacks, assignment, options)


def _in_rounds(stacks: list[Stack], assignment: Assignment, options: Options) -> Engine:
    """Returns the engine of a synchronous run."""
    options = options._replace(with_reports=assignment.observe is not None)

    @checks.tracing("the start of a run")
    def start(rng_key: PRNGKeyArray, params: Params | None) -> State:
        models = start_models(rng_key, stacks_at(stacks, jnp.int32(0)), params)
        own = assignment.init(keys.assignment_key(keys.round_key(rng_key, 0)))
        return State(rng_key, jnp.asarray(0), models, own)

    @checks.tracing("a round")
    def one_round(state: State) -> tuple[State, Work]:
        t, models = state.round + 1, state.models
        rng_key, current = keys.round_key(state.rng_key, t), stacks_at(stacks, t)
        asked = look(current, state.rng_key, state.round, models, options)
        assign_key = keys.assignment_key(rng_key)
        cohort, own = assign(assignment, assign_key, t, state.assignment, asked)
        now = CurrentRound(t, rng_key, cohort)
        trained = train_cohort(current, now, models, options)
        models = aggregate(current, now, models, trained)
        own = observe(assignment, current, now, own, trained, like=state.assignment)
        return State(state.rng_key, t, models, own), Work(count(current, cohort, trained))

    def one_more(carry: tuple[State, Work], _: None) -> tuple[tuple[State, Work], None]:
        state, work = one_round(carry[0])
        return (state, add_counts(carry[1], work)), None

    def rounds(state: State, number: int) -> tuple[State, Work]:
        if number == 1:
            return one_round(state)
        return lax.scan(one_more, (state, no_work()), length=number)[0]

    def no_work() -> Work:
        return Work(Counts(*[jnp.zeros(assignment.num_models, jnp.int32)] * 3))

    @checks.tracing("a round")
    def most_updates(state: State) -> int:
        asked = look(stacks, state.rng_key, state.round, state.models, options)
        cohort, _ = assign(assignment, state.rng_key, state.round, state.assignment, asked)
        return min(cohort.clients.size, assignment.num_clients)

    return Engine(
        stacks,
        start,
        rounds,
        lambda state, _: own_metrics(assignment, state),
        no_work,
        most_updates,
        is_synchronous=True,
    )


def _in_arrivals(stacks: list[Stack], dispatch: Dispatch, options: Options) -> Engine:
    """Returns the engine of an asynchronous run."""
    if any(changes(stack.task) for stack in stacks):
        raise ValueError(
            "the task changes over rounds, but asynchronous jobs overlap rounds; use an assignment "
            "in rounds, such as mfa_rr"
        )

    @checks.tracing("the start of a run")
    def start(rng_key: PRNGKeyArray, params: Params | None) -> State:
        models = start_models(rng_key, stacks, params)
        if jax.tree.leaves([state.clients for state in models]):
            raise ValueError(
                "the algorithm keeps client states, but asynchronous clients may run several jobs "
                "of one model at once; use an algorithm without client states, such as fedavg"
            )
        stores = tuple(map(partial(first_store, dispatch), stacks, models))
        clock = AsyncState(first_jobs(dispatch, rng_key), stores)
        return State(rng_key, jnp.asarray(0), models, clock)

    @checks.tracing("an arrival")
    def rounds(state: State, number: int) -> tuple[State, Work]:
        arrivals = arrivals_of(stacks, dispatch, options, number * dispatch.arrivals_per_round)
        models, own, work = arrivals(state.rng_key, state.models, state.assignment, no_work())
        return State(state.rng_key, state.round + number, models, own), work

    def no_work() -> Work:
        nothing = jnp.zeros(dispatch.num_models, jnp.int32)
        return Work(Counts(nothing, nothing, nothing), nothing)

    return Engine(
        stacks,
        start,
        rounds,
        clock_metrics,
        no_work,
        lambda _: dispatch.arrivals_per_round,
        is_synchronous=False,
    )


def start_models(
    rng_key: PRNGKeyArray, stacks: Sequence[Stack], params: Params | None
) -> tuple[StackState, ...]:
    """Returns the models before round 1, with parameters given by the user or drawn by tasks."""

    def start_model(stack: Stack, task: Task, params: Params) -> StackState:
        algorithm = stack.algorithm
        check_weight(task)
        server, client = start_states(algorithm, task, params)
        if algorithm.num_steps is not None:
            # Trace `num_steps` here, so that epochs with too many steps fail before round 1.
            jax.eval_shape(partial(algorithm.num_steps, task), jnp.int32(0), server)
        own = jax.tree.map(lambda x: jnp.broadcast_to(x, (task.num_clients, *jnp.shape(x))), client)
        return StackState(params, server, own, stack.models)

    def start_stack(stack: Stack, given: Params | None) -> StackState:
        each = keys.start_keys(rng_key, stack.models)
        draw = partial(over_models, lambda task, key: task.init(key), stack, each)
        first = draw() if given is None else checks.fit_params(given, jax.eval_shape(draw))
        return over_models(partial(start_model, stack), stack, first)

    given = checks.given_params(params, stacks)
    return tuple(map(start_stack, stacks, given))
