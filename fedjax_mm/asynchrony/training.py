"""Asynchronous training in simulated time: arrive -> train -> step -> record.

Which jobs arrive, and when, does not depend on what they learn: `arrivals.py` finds the next ones
from times and numbers alone, of all models at once, and `batches.py` trains them.

Everything is pure: jit it, vmap it over seeds and numbers. Loops are as long as the arrivals say,
so that results cannot be differentiated in reverse.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PRNGKeyArray

from fedjax_mm import checks, chunks
from fedjax_mm.asynchrony.batches import AsyncState, batches_of, first_store
from fedjax_mm.asynchrony.dispatch import Dispatch, draws_of, first_jobs
from fedjax_mm.base import Algorithm, Metrics, Params, Task, Trace
from fedjax_mm.parts import check_instance, check_trained, key_of
from fedjax_mm.record import Counts, Record, Sizes, Tally, make_trace, measure, message_sizes
from fedjax_mm.simulate import State, init_models
from fedjax_mm.stacks import Stack, make_stacks


def simulate_async(
    rng_key: PRNGKeyArray | int,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    dispatch: Dispatch,
    num_arrivals: int,
    *,
    client_map: chunks.ClientMap = "auto",
    record_every: int = 1,
    params: Params | None = None,
    client_axis: str | None = None,
) -> tuple[State, Trace]:
    """Trains M models asynchronously until `num_arrivals` jobs have arrived, and records them.

    A job gets the current version of a model, and its client trains as in a round; of every b_m
    contributions that arrive the server makes a step. With FedAvg that does not weigh its
    clients, and a server rate eta_g, that is FedAST: ``w <- w + (eta_g / b_m) sum Delta``.

    Args:
      rng_key: the seed, a key or a whole number. Every draw has a key of (seed, job), so that
        results do not depend on `client_map`, `record_every` or other replicas of a `vmap`.
      tasks: one task that all models learn, or one per model; see `simulate`.
      algorithm: how clients train and the server aggregates, one for all models or one per model,
        such as ``fedavg(0.1, local_steps=5, weighted=False, server_optimizer=optax.sgd(eta_g))``.
        Its clients have no states. Round t of its schedules is the model's next step when the job
        begins.
      dispatch: who works on what; see `fedast`.
      num_arrivals: jobs that arrive. Those still at work then are not trained.
      client_map: "auto", "vmap", "scan" or a number: the most jobs that are computed at once, of
        all models if they share their task, else of each. "vmap" is all that arrive before one
        that follows them.
      record_every: arrivals between records; it divides `num_arrivals`.
      params: initial parameters, as in `simulate`.
      client_axis: as in `simulate`: inside `jax.shard_map`, the mesh axis whose devices share the
        jobs that are computed together.

    Returns:
      The final state, and a trace whose rounds are arrivals. Beside the tasks' metrics it has
      `time`, the simulated time, equal for all models; `steps`, those of each model's server so
      far; `staleness`, the mean number of steps that a model made during the jobs that arrived
      since the record before, or NaN if there were none; and `at_work`, R_m.

    Raises:
      TypeError: if an argument is something else, such as an assignment in place of a `Dispatch`.
      ValueError: if arguments do not fit together.

    Example:
      >>> from fedjax_mm import fedavg
      >>> from fedjax_mm.asynchrony import fedast, simulate_async
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = fedavg(0.1, local_steps=5, weighted=False)
      >>> dispatch = fedast(24, 2, at_work=12, ratio=3)
      >>> state, trace = simulate_async(
      ...     0, quadratic(24, 4, mu=2e-4), algorithm, dispatch, 400, record_every=100)
      >>> trace.metrics["steps"][-1].tolist()
      [52.0, 57.0]

    Reference: Askin, Sharma, Joe-Wong, Joshi, "FedAST: Federated Asynchronous Simultaneous
    Training" (2024).
    """
    num_arrivals, record_every = _check_arrivals(num_arrivals, record_every)
    client_map = checks.check_client_map(client_map)
    state = init_async(rng_key, tasks, algorithm, dispatch, params)
    return advance_async(
        state,
        tasks,
        algorithm,
        dispatch,
        num_arrivals,
        client_map=client_map,
        record_every=record_every,
        client_axis=client_axis,
    )


def init_async(
    rng_key: PRNGKeyArray | int,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    dispatch: Dispatch,
    params: Params | None = None,
) -> State:
    """Returns the state at time 0, when all jobs begin. Arguments as in `simulate_async`."""
    stacks, rng_key = async_stacks(tasks, algorithm, dispatch), key_of(rng_key)
    models = init_models(rng_key, stacks, params)
    if jax.tree.leaves([state.clients for state in models]):
        raise ValueError(
            "the algorithm keeps states of clients, which may have several jobs of a model at a "
            "time; use one that does not, such as fedavg"
        )
    stores = tuple(map(partial(first_store, dispatch, rng_key), stacks, models))
    clock = AsyncState(first_jobs(dispatch, rng_key), stores)
    return State(rng_key, jnp.zeros((), jnp.int32), models, clock)


def async_stacks(
    tasks: Task | Sequence[Task], algorithm: Algorithm | Sequence[Algorithm], dispatch: Dispatch
) -> list[Stack]:
    """Returns the models in stacks; errors are those of `stacks_of`."""
    remedy = "such as fedast(num_clients, num_models, at_work=20, ratio=4)"
    check_instance("dispatch", dispatch, Dispatch, f"give one, {remedy}")
    check_trained(tasks, algorithm)
    sizes = dispatch.num_clients, dispatch.num_models
    return make_stacks(tasks, algorithm, *sizes, by="dispatch")


def _check_arrivals(num_arrivals: Any, record_every: Any) -> tuple[int, int]:
    return checks.check_rounds(num_arrivals, record_every, "num_arrivals")


def state_bytes(
    tasks: Task | Sequence[Task], algorithm: Algorithm | Sequence[Algorithm], dispatch: Dispatch
) -> int:
    """Returns the bytes of one seed's state, without computing anything.

    Most of it are versions of models: R + M of each structure of models, as many as jobs may need.
    Reallocation keeps 8 updates of each model. A batch needs more: the parameters of the jobs that
    are trained together, several times (see `client_map`), and a sum for each step of a model that
    the batch makes, at most R_m / b_m.

    Args:
      tasks: as in `simulate_async`.
      algorithm: as in `simulate_async`.
      dispatch: as in `simulate_async`.

    Example:
      >>> from fedjax_mm import fedavg
      >>> from fedjax_mm.asynchrony import fedast, state_bytes
      >>> from fedjax_mm.tasks import quadratic
      >>> dispatch = fedast(24, 2, at_work=12, ratio=3, reallocate=False)
      >>> of_all = state_bytes(quadratic(24, 4, mu=0.1), fedavg(0.1, local_steps=5), dispatch)
      >>> (24 + 2) * 97 * 4, of_all  # versions of 97 numbers; and all
      (10088, 12576)
    """
    shapes = jax.eval_shape(lambda: init_async(0, tasks, algorithm, dispatch))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def advance_async(
    state: State,
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    dispatch: Dispatch,
    num_arrivals: int,
    *,
    client_map: chunks.ClientMap = "auto",
    record_every: int = 1,
    client_axis: str | None = None,
) -> tuple[State, Trace]:
    """Trains from a state until `num_arrivals` more jobs have arrived; it is the first record.

    Arguments as in `simulate_async`; `join_traces` makes one trace of this one and the one before.
    """
    remedy = "give the first of the two that simulate_async returns"
    check_instance("state", state, State, remedy)
    check_instance("state.assignment", state.assignment, AsyncState, remedy)
    num_arrivals, record_every = _check_arrivals(num_arrivals, record_every)
    client_map = checks.check_client_map(client_map)
    stacks = async_stacks(tasks, algorithm, dispatch)
    arrivals = arrivals_of(stacks, dispatch, client_map, client_axis, record_every)

    @partial(jax.jit, inline=True)
    def record(state: State, tally: Tally) -> Record:
        own = clock_metrics(state.assignment, tally)
        measured = measure(stacks, state.rng_key, state.round, state.models, client_map, own)
        return Record(state.round, measured.metrics, tally.counts)

    def to_record(state: State, _: None) -> tuple[State, tuple[Record, Sizes]]:
        state, (tally, sizes) = arrivals(state, None)
        return state, (record(state, tally), sizes)

    first = record(state, no_arrivals(dispatch))
    state, (rest, sizes) = lax.scan(to_record, state, length=num_arrivals // record_every)
    return state, make_trace(stacks, first, rest, sizes)


def arrivals_of(
    stacks: Sequence[Stack],
    dispatch: Dispatch,
    client_map: chunks.ClientMap,
    client_axis: str | None,
    number: int,
) -> Callable[[State, None], tuple[State, tuple[Tally, Sizes]]]:
    """Returns a function that trains so many arrivals, in the form that `lax.scan` takes."""
    one_batch = batches_of(stacks, dispatch, client_map, client_axis, number)

    @checks.tracing("an arrival")
    def arrivals(state: State, _: None) -> tuple[State, tuple[Tally, Sizes]]:
        first = state.round
        numbers = dispatch.num_jobs + first + jnp.arange(number, dtype=jnp.int32)
        draws = draws_of(dispatch, state.rng_key, numbers)

        def is_missing(carry: tuple[State, Tally]) -> Array:
            # A replica that has all waits for others: a batch of no arrivals changes nothing.
            return chunks.is_any(carry[0].round[None] < first + number)

        start = state, no_arrivals(dispatch)
        state, tally = lax.while_loop(is_missing, partial(one_batch, draws, first), start)
        up = message_sizes(stacks, [store.buffer.update for store in state.assignment.stores])
        down = message_sizes(stacks, [each.params for each in state.models])
        return state, (tally, Sizes(up, down))

    return arrivals


def no_arrivals(dispatch: Dispatch) -> Tally:
    """Returns the work before the first arrival."""
    nothing = jnp.zeros(dispatch.num_models, jnp.int32)
    return Tally(Counts(nothing, nothing, nothing), nothing)


def clock_metrics(own: AsyncState, tally: Tally) -> Metrics:
    """Returns what is recorded of the clock, and of the work since the record before."""
    clock = own.clock
    return {
        "time": jnp.full(clock.steps.shape, clock.time),
        "steps": clock.steps.astype(float),
        # 0 / 0 where there are none
        "staleness": tally.staleness / tally.counts.client_updates,
        "at_work": clock.targets.astype(float),
    }
