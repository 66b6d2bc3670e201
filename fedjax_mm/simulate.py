"""The compiled loop: look -> assign -> train -> aggregate -> observe -> record.

Everything is pure: jit it, vmap it over seeds and over any number of the task or the algorithm,
differentiate it. The models axis is in `stacks.py`, the steps of a round in `rounds.py`, and
records in `record.py`.

Models of equal structure make a *stack*, which is computed together. The clients that train one
models in a round make a *cohort*. A *chunk* is a part of it that is computed at once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm import checks, chunks, keys
from fedjax_mm.base import Algorithm, Assignment, Params, Task, Trace
from fedjax_mm.parts import assign, check_instance, key_of
from fedjax_mm.record import (
    Counts,
    Record,
    Sizes,
    add_counts,
    count,
    make_trace,
    measure,
    own_metrics,
)
from fedjax_mm.rounds import CurrentRound, aggregate, look, observe, train_cohort
from fedjax_mm.stacks import Stack, StackState, each_params, over_models, stacks_of
from fedjax_mm.train import Options


class State(NamedTuple):
    """State between two rounds."""

    rng_key: PRNGKeyArray
    round: Int[Array, ""]  # rounds done
    models: tuple[StackState, ...]  # one for each stack
    assignment: Any


def simulate(
    rng_key: PRNGKeyArray | int,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment,
    num_rounds: int,
    *,
    client_map: chunks.ClientMap = "auto",
    record_every: int = 1,
    params: Params | None = None,
    client_axis: str | None = None,
) -> tuple[State, Trace]:
    """Trains M models for `num_rounds` rounds and records them, beginning with round 0.

    Args:
      rng_key: the seed, a key or a whole number. Every draw has a key of (seed, round, model,
        client), so that results do not depend on `client_map` or on other replicas of a `vmap`.
      tasks: one task that all models learn, or one per model. Tasks of equal structure are stacked,
        except for the arrays that they share; others are unrolled inside the compiled round.
      algorithm: how clients train and the server aggregates; one for all models, or one per model.
      assignment: who trains what.
      num_rounds: T.
      client_map: "auto", "vmap", "scan" or a chunk size, of all models' clients if these share
        their data, else of one model's. It changes speed and memory, and results only by the order
        of summation.
      record_every: rounds between records; it divides `num_rounds`.
      params: initial parameters: of one model (shared by all), a list with one entry per model, as
        `params_of` returns it, or with a leading models axis; None lets the tasks draw them.
      client_axis: inside `jax.shard_map`, the mesh axis whose devices share the cohort's clients;
        everything else is replicated over it. Take gradients outside of `jax.shard_map`.

    Returns:
      The final state, and the trace with ``1 + num_rounds / record_every`` records.

    Raises:
      TypeError: if an argument is something else, such as data in place of a task.
      ValueError: if arguments do not fit together.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedavg, mfa_rr, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> def run(rng_key, learning_rate):
      ...     algorithm = fedavg(learning_rate, local_steps=5)
      ...     return simulate(rng_key, quadratic(24, 4, mu=2e-4), algorithm, mfa_rr(24, 2), 20)[1]
      >>> seeds, rates = jax.random.split(jax.random.key(0), 3), jax.numpy.array([0.05, 0.1])
      >>> sweep = jax.jit(jax.vmap(jax.vmap(run, (0, None)), (None, 0)))
      >>> sweep(seeds, rates).metrics["excess_loss"].shape  # rates, seeds, records, models
      (2, 3, 21, 2)
    """
    # Before `init`, which computes.
    num_rounds, record_every = checks.check_rounds(num_rounds, record_every)
    client_map = checks.check_client_map(client_map)
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
    rng_key: PRNGKeyArray | int,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment,
    params: Params | None = None,
) -> State:
    """Returns the state before round 1. Arguments as in `simulate`."""
    stacks, rng_key = stacks_of(tasks, algorithm, assignment), key_of(rng_key)
    models = init_models(rng_key, stacks, params)
    with checks.tracing("the start of a run"):
        assigned = assignment.init(keys.assignment_key(keys.round_key(rng_key, 0)))
    return State(rng_key, jnp.asarray(0), models, assigned)


@checks.tracing("the start of a run")
def init_models(
    rng_key: PRNGKeyArray, stacks: Sequence[Stack], params: Params | None = None
) -> tuple[StackState, ...]:
    """Returns the models before round 1, from the user's parameters or from the tasks' own."""

    def init_model(stack: Stack, task: Task, params: Params) -> StackState:
        algorithm = stack.algorithm
        server, client = algorithm.init(task, params)
        if algorithm.num_steps is not None:
            # Trace it here, because epochs with too many steps should fail before the first round.
            jax.eval_shape(partial(algorithm.num_steps, task), jnp.int32(0), server)
        own = jax.tree.map(lambda x: jnp.broadcast_to(x, (task.num_clients, *jnp.shape(x))), client)
        return StackState(params, server, own, stack.models)

    def init_stack(stack: Stack, given: Params | None) -> StackState:
        each = keys.start_keys(rng_key, stack.models)
        draw = partial(over_models, lambda task, key: task.init(key), stack, each)
        start = draw() if given is None else checks.fit_params(given, jax.eval_shape(draw))
        return over_models(partial(init_model, stack), stack, start)

    given = checks.given_params(params, stacks)
    return tuple(map(init_stack, stacks, given))


def advance(
    state: State,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment,
    num_rounds: int,
    *,
    client_map: chunks.ClientMap = "auto",
    record_every: int = 1,
    client_axis: str | None = None,
) -> tuple[State, Trace]:
    """Runs `num_rounds` more rounds from a state, which is the first record; see `simulate`.

    `join_traces` makes one trace of this one and the one before.
    """
    check_instance("state", state, State, "give the first of the two that simulate returns")
    num_rounds, record_every = checks.check_rounds(num_rounds, record_every)
    client_map = checks.check_client_map(client_map)
    stacks = stacks_of(tasks, algorithm, assignment)
    one_round = round_of(stacks, assignment, client_map, client_axis)

    @partial(jax.jit, inline=True)
    def record(state: State, counts: Counts) -> Record:
        own = own_metrics(assignment, state.assignment)
        measured = measure(stacks, state.rng_key, state.round, state.models, client_map, own)
        return Record(state.round, measured.metrics, jax.tree.map(add_counts, counts))

    def rounds_to_record(state: State, _: None) -> tuple[State, tuple[Record, Sizes]]:
        state, (counts, sizes) = lax.scan(one_round, state, length=record_every)
        return state, (record(state, counts), sizes)

    nothing = jnp.zeros((0, assignment.num_models), jnp.int32)
    first = record(state, Counts(nothing, nothing, nothing))
    state, (rest, sizes) = lax.scan(rounds_to_record, state, length=num_rounds // record_every)
    return state, make_trace(stacks, first, rest, sizes)


def params_of(state: State, model: int | None = None) -> Params:
    """Returns a model's parameters in a state, or a list of all models' in the order of the tasks.

    Args:
      state: from `simulate` or `advance`; leading axes of `jax.vmap`, such as seeds and points, are
        those of the parameters too.
      model: its number, from 0, as that of its task; None returns the list, which `simulate` takes
        as `params`.

    Raises:
      ValueError: if there is no such model.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedavg, mfa_rr, params_of, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> task, algorithm = quadratic(6, 4, mu=0.1), fedavg(0.1, local_steps=5)
      >>> state, _ = simulate(jax.random.key(0), task, algorithm, mfa_rr(6, 2), 20)
      >>> params_of(state, 0).shape
      (25,)
      >>> again, _ = simulate(
      ...     jax.random.key(1), task, algorithm, mfa_rr(6, 2), 20, params=params_of(state))
    """
    check_instance("state", state, State, "give the first of the two that simulate returns")
    each = each_params(state.models, jnp.ndim(state.round))
    if model is None:
        return each
    if model not in range(len(each)):
        raise ValueError(f"model is {model}; the models' numbers are 0 ... {len(each) - 1}")
    return each[model]


def round_of(
    stacks: Sequence[Stack], assignment: Assignment, client_map: chunks.ClientMap, axis: str | None
) -> Callable[[State, None], tuple[State, tuple[Counts, Sizes]]]:
    """Returns a function that runs one round, in the form that `lax.scan` takes."""
    options = Options(client_map, axis, with_reports=assignment.observe is not None)

    @checks.tracing("a round")
    def one_round(state: State, _: None) -> tuple[State, tuple[Counts, Sizes]]:
        t, models = state.round + 1, state.models
        rng_key = keys.round_key(state.rng_key, t)
        assign_key = keys.assignment_key(rng_key)
        asked = look(stacks, state.rng_key, state.round, models, options)
        cohort, assigned = assign(assignment, assign_key, t, state.assignment, asked)
        now = CurrentRound(t, rng_key, cohort)
        trained = train_cohort(stacks, now, models, options)
        models = aggregate(stacks, now, models, trained)
        assigned = observe(assignment, stacks, now, assigned, trained, like=state.assignment)
        counted = count(stacks, cohort, models, [each.total for each in trained])
        return state._replace(round=t, models=models, assignment=assigned), counted

    return one_round
