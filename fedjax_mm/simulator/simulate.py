"""Starts and continues runs of M models on one pool of clients, and reads their parameters.

All functions are pure: you can jit them, differentiate them, and vmap them over seeds and over any
number in the task or the algorithm. Eager calls share a program if they differ only in numbers; see
`base/programs.py`. `preflight.py` checks the arguments, rounds are in
`round.py`, and records in `record.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PRNGKeyArray

from fedjax_mm.asynchrony.dispatch import Dispatch
from fedjax_mm.base import Algorithm, Assignment, Params, Task, chunks
from fedjax_mm.base.programs import compiled
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import brief
from fedjax_mm.checks.instances import check_instance, key_of
from fedjax_mm.simulator.preflight import Facts, Run, preflight, run_of
from fedjax_mm.simulator.record import Bundle, Record, Trace, Work, make_trace
from fedjax_mm.simulator.round import State
from fedjax_mm.simulator.rows import all_rows, own_rows
from fedjax_mm.simulator.stacks import each_params, with_clients

T = TypeVar("T")


@brief
def simulate(
    rng_key: PRNGKeyArray | int,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment | Dispatch,
    num_rounds: int,
    *,
    client_map: chunks.ClientMap = "auto",
    record_every: int = 1,
    params: Params | None = None,
    client_axis: str | None = None,
) -> tuple[State, Trace]:
    """Trains M models for `num_rounds` rounds and records metrics, starting with round 0.

    Args:
      rng_key: a key or an integer seed. Every draw uses a key derived from (seed, round, model,
        client), or from (seed, job), so results do not depend on `client_map` or on other replicas
        of a `vmap`.
      tasks: one task for all models, or one per model. Tasks with equal structure are stacked,
        except for arrays that they share; others are unrolled inside the compiled round.
      algorithm: the method of client training and server aggregation; one for all models, or one
        per model.
      assignment: chooses clients and models. A `Dispatch`, such as that of `asynchrony.fedast`,
        makes training asynchronous. A round is then `arrivals_per_round` arrivals, and reverse-mode
        differentiation is not supported.
      num_rounds: T, the number of rounds.
      client_map: how clients are computed: "vmap" all at once, "scan" one at a time, or a number at
        a time. "auto" computes all at once on accelerators and for tasks with a closed form, and on
        a CPU as many as have 32 KiB of parameters together. A chunk holds clients of all models if
        models share their data, and of one model otherwise. The choice affects speed and memory,
        but affects results only through the order of summation.
      record_every: the number of rounds between records, which must divide `num_rounds`.
      params: the initial parameters: those of one model, shared by all; a list with one entry per
        model, as returned by `params_of`; or arrays with a leading models axis. None lets the tasks
        draw them.
      client_axis: inside `jax.shard_map`, the mesh axis over which local trainings and the states
        of clients are split; everything else is replicated over it, and so is the final state.
        Take gradients outside `jax.shard_map`.

    Returns:
      The final state, and the trace with ``1 + num_rounds / record_every`` records. The trace of an
      asynchronous run has additional metrics; see `fedast`. A model that diverges continues with
      NaN, which `to_dataset` marks in ``diverged``, with a warning for a single run.

    Raises:
      TypeError: if an argument has the wrong type, for example data instead of a task.
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
    # Check these before `init`, which already computes the initial state.
    num_rounds, record_every = checks.check_rounds(num_rounds, record_every)
    client_map = checks.check_client_map(client_map)
    parts = algorithm, assignment, num_rounds, client_map, record_every, client_axis
    return _compiled(_simulate, rng_key, tasks, params, parts)


def _simulate(
    rng_key: PRNGKeyArray,
    tasks: Task | Sequence[Task],
    params: Params | None,
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment | Dispatch,
    num_rounds: int,
    client_map: chunks.ClientMap,
    record_every: int,
    client_axis: str | None,
) -> tuple[State, Trace]:
    run = run_of(tasks, algorithm, assignment, params, client_map, client_axis)
    facts = preflight(rng_key, run)
    return _recorded(run, facts, run.start(rng_key), num_rounds, record_every)


@brief
def init(
    rng_key: PRNGKeyArray | int,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment | Dispatch,
    params: Params | None = None,
) -> State:
    """Makes the state before round 1 from the arguments of `simulate`."""
    return _compiled(_init, rng_key, tasks, params, (algorithm, assignment))


def _init(
    rng_key: PRNGKeyArray,
    tasks: Task | Sequence[Task],
    params: Params | None,
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment | Dispatch,
) -> State:
    run = run_of(tasks, algorithm, assignment, params)
    preflight(rng_key, run)
    return run.start(rng_key)


def _compiled(
    function: Callable[..., T], rng_key: Any, tasks: Any, params: Any, parts: tuple[Any, ...]
) -> T:
    rng_key = key_of(rng_key)
    if not checks.are_moderate(params):
        return function(rng_key, tasks, params, *parts)
    return compiled(function, (rng_key, tasks, params), parts)


@brief
def advance(
    state: State,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment | Dispatch,
    num_rounds: int,
    *,
    client_map: chunks.ClientMap = "auto",
    record_every: int = 1,
    client_axis: str | None = None,
) -> tuple[State, Trace]:
    """Runs `num_rounds` more rounds from a state.

    The first record is that of the given state. Arguments and errors are those of `simulate`.
    Use `join_traces` to append the trace to the previous one.
    """
    check_instance("state", state, State, "give the first of the two that simulate returns")
    num_rounds, record_every = checks.check_rounds(num_rounds, record_every)
    parts = algorithm, assignment, num_rounds, client_map, record_every, client_axis
    return compiled(_advance, (state, tasks), parts)


def _advance(
    state: State,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment | Dispatch,
    num_rounds: int,
    client_map: chunks.ClientMap,
    record_every: int,
    client_axis: str | None,
) -> tuple[State, Trace]:
    run = run_of(tasks, algorithm, assignment, None, client_map, client_axis)
    facts = preflight(state.rng_key, run, began=state)
    return _recorded(run, facts, _over_clients(own_rows, run, state), num_rounds, record_every)


def _recorded(
    run: Run, facts: Facts, state: State, num_rounds: int, record_every: int
) -> tuple[State, Trace]:
    """Computes some rounds, and the trace that starts at the given state."""

    @partial(jax.jit, inline=True)
    def record(state: State, work: Work) -> Record:
        return Record(run.measure(state, work).metrics, work.counts)

    def rounds_to_record(state: State, _: None) -> tuple[State, Bundle]:
        state, work = run.rounds(state, record_every)
        return state, Bundle.of(record(state, work))

    rounds = state.round + jnp.arange(0, num_rounds + 1, record_every, dtype=jnp.int32)
    first = record(state, run.no_work())
    state, rest = lax.scan(rounds_to_record, state, length=num_rounds // record_every)
    later, sizes = rest.records(), facts.message_sizes
    trace = make_trace(rounds, first, later, sizes, facts.per_client)
    return _over_clients(all_rows, run, state), trace


def _over_clients(rows: Callable[..., Any], run: Run, state: State) -> State:
    """Maps `own_rows` or `all_rows` over the states of clients."""
    parts = zip(run.stacks, state.models, strict=True)
    axis = run.options.client_axis
    each = [rows(own.clients, stack.num_clients, axis, 1) for stack, own in parts]
    return state._replace(models=with_clients(state.models, each))


@brief
def params_of(state: State, model: int | None = None) -> Params:
    """One model's parameters in a state, or a list of the parameters of all models.

    Args:
      state: the state returned by `simulate` or `advance`. Parameters keep its leading axes from
        `jax.vmap`, such as seeds and points.
      model: the index of the model in the order of the tasks. None returns a list in the same
        order, which `simulate` accepts as `params`.

    Raises:
      ValueError: if no model has that index.

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
