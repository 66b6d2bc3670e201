"""Courses: how runs go on, in rounds or in arrivals, of which so many count as a round."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm.asynchrony.dispatch import Dispatch
from fedjax_mm.asynchrony.training import (
    arrivals_of,
    async_stacks,
    clock_metrics,
    init_async,
    no_arrivals,
)
from fedjax_mm.base import Assignment, Metrics
from fedjax_mm.checks import tracing
from fedjax_mm.chunks import ClientMap
from fedjax_mm.parts import assign
from fedjax_mm.record import Counts, Sizes, Tally, own_metrics
from fedjax_mm.rounds import look
from fedjax_mm.simulate import State, init, round_of
from fedjax_mm.stacks import Stack, stacks_of
from fedjax_mm.train import Options

if TYPE_CHECKING:
    from fedjax_mm.sweeps.grid import Setup


class Course(NamedTuple):
    """Course of a setup's runs.

    Attributes:
      stacks: the models.
      num_used: models that are there, of M; None is all of them.
      start: the state before round 1, from a key, and no work.
      number: `State.round` after so many rounds.
      advance: computes a round, in the form that `lax.scan` takes.
      metrics: what is recorded beside the tasks' metrics, from the assignment's state and the work
        since the record before.
      most_updates: the most local trainings in a round that begins in a state.
      has_rounds: whether everybody waits for the others' contributions.
    """

    stacks: list[Stack]
    num_used: Any
    start: Callable[[PRNGKeyArray], tuple[State, Tally]]
    number: Callable[[Int[Array, ""]], Int[Array, ""]]
    advance: Callable[[State, None], tuple[State, tuple[Tally, Sizes]]]
    metrics: Callable[[Any, Tally], Metrics | None]
    most_updates: Callable[[State], int]
    has_rounds: bool


def course_of(setup: "Setup", client_map: ClientMap, client_axis: str | None = None) -> Course:
    """Returns the course of a setup's runs; the other arguments are those of `simulate`."""
    tasks, algorithm, rule = setup[:3]
    if isinstance(rule, Dispatch):
        stacks = async_stacks(tasks, algorithm, rule)
        return _arrivals(stacks, setup, rule, client_map, client_axis)
    options = Options(client_map, client_axis, with_reports=False)
    return _rounds(stacks_of(tasks, algorithm, rule), setup, rule, options)


def _rounds(
    stacks: list[Stack], setup: "Setup", assignment: Assignment, options: Options
) -> Course:
    one_round = round_of(stacks, assignment, options.client_map, options.client_axis)

    def start(rng_key: PRNGKeyArray) -> tuple[State, Tally]:
        nothing = Counts(*[jnp.zeros(assignment.num_models, jnp.int32)] * 3)
        return init(rng_key, setup.tasks, setup.algorithm, assignment, setup.params), Tally(nothing)

    def advance(state: State, _: None) -> tuple[State, tuple[Tally, Sizes]]:
        state, (counts, sizes) = one_round(state, None)
        return state, (Tally(counts), sizes)

    def metrics(state: Any, _: Tally) -> Metrics | None:
        return own_metrics(assignment, state)

    @tracing("a round")
    def most_updates(state: State) -> int:
        asked = look(stacks, state.rng_key, state.round, state.models, options)
        cohort, _ = assign(assignment, state.rng_key, state.round, state.assignment, asked)
        return min(cohort.clients.size, assignment.num_clients)

    def number(round: Int[Array, ""]) -> Int[Array, ""]:
        return round

    used = assignment.num_used
    return Course(stacks, used, start, number, advance, metrics, most_updates, has_rounds=True)


def _arrivals(
    stacks: list[Stack],
    setup: "Setup",
    dispatch: Dispatch,
    client_map: ClientMap,
    client_axis: str | None,
) -> Course:
    each = dispatch.arrivals_per_round

    def start(rng_key: PRNGKeyArray) -> tuple[State, Tally]:
        state = init_async(rng_key, setup.tasks, setup.algorithm, dispatch, setup.params)
        return state, no_arrivals(dispatch)

    def number(round: Int[Array, ""]) -> Int[Array, ""]:
        return round * each

    def most_updates(_: State) -> int:
        return each

    advance = arrivals_of(stacks, dispatch, client_map, client_axis, each)
    return Course(
        stacks, None, start, number, advance, clock_metrics, most_updates, has_rounds=False
    )
