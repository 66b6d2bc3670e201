"""The compiled loop: look -> assign -> train -> aggregate -> observe -> record.

Everything is pure: jit it, vmap it over seeds and over any number of the task or the algorithm,
differentiate it. The models axis is in `stacks.py`, the order in which clients are computed in
`chunks.py`, their sums in `sums.py`, every key in `keys.py`, and records in `record.py`.

Models of equal structure make a *stack*, which is computed together. The clients that train one
model in a round make a *group*. A *chunk* is a part of a group that is computed at once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm import base, checks, chunks, keys, sums
from fedjax_mm.base import Algorithm, Assignment, Groups, Look, Params, Round, Task
from fedjax_mm.parts import check_instance, key_of
from fedjax_mm.record import Counts, Record, Sizes, Trace, add_counts, count, make_trace, measure
from fedjax_mm.stacks import (
    Models,
    Order,
    Stack,
    by_model,
    join,
    order_of,
    over_models,
    split,
    stacks_of,
)
from fedjax_mm.tasks.view import appeals, client_losses


class State(NamedTuple):
    """State between two rounds."""

    rng_key: PRNGKeyArray
    round: Int[Array, ""]  # rounds done
    models: Models
    assignment: Any
    order: Order  # of the models in their stacks


class Now(NamedTuple):
    """Current round: its number t, its key, and its groups."""

    round: Round
    rng_key: PRNGKeyArray
    groups: Groups


class How(NamedTuple):
    """Settings of speed and memory; results depend on them only by the order of summation."""

    client_map: chunks.ClientMap
    client_axis: str | None
    with_reports: bool  # whether the assignment observes them


class Trained(NamedTuple):
    """Result of local training, of one client or of groups."""

    total: base.Contribution
    client_states: base.ClientState
    reports: Any


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
      client_map: "auto", "vmap", "scan" or a chunk size. It changes speed and memory, and results
        only by the order of summation.
      record_every: rounds between records; it divides `num_rounds`.
      params: initial parameters: of one model (shared by all), a list with one entry per model, as
        `params_of` returns it, or with a leading models axis; None lets the tasks draw them.
      client_axis: inside `jax.shard_map`, the mesh axis whose devices share each group's clients;
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
    how: dict[str, Any] = {"client_map": client_map, "client_axis": client_axis}
    how["record_every"] = record_every
    return advance(state, tasks, algorithm, assignment, num_rounds, **how)


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
    assigned = assignment.init(keys.assignment_key(keys.round_key(rng_key, 0)))
    return State(rng_key, jnp.asarray(0), models, assigned, order_of(stacks))


def init_models(
    rng_key: PRNGKeyArray, stacks: Sequence[Stack], params: Params | None = None
) -> Models:
    """Returns the models before round 1, from the user's parameters or from the tasks' own."""

    def init_model(algorithm: Algorithm, task: Task, params: Params) -> Models:
        server, client = algorithm.init(task, params)
        own = jax.tree.map(lambda x: jnp.broadcast_to(x, (task.num_clients, *jnp.shape(x))), client)
        return Models(params, server, own)

    def init_stack(stack: Stack, given: Params | None) -> Models:
        each = keys.start_keys(rng_key, stack.models)
        draw = partial(over_models, lambda task, key: task.init(key), stack, each)
        start = draw() if given is None else checks.fit_params(given, jax.eval_shape(draw))
        return over_models(partial(init_model, stack.algorithm), stack, start)

    given = checks.given_params(params, stacks)
    return join([init_stack(*each) for each in zip(stacks, given, strict=True)])


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
        own = assignment.metrics and assignment.metrics(state.assignment)
        measured = measure(stacks, state.rng_key, state.round, state.models, client_map, own)
        return Record(state.round, measured.metrics, jax.tree.map(add_counts, counts))

    def rounds_to_record(state: State, _: None) -> tuple[State, tuple[Record, Sizes]]:
        state, (counts, sizes) = lax.scan(one_round, state, length=record_every)
        return state, (record(state, counts), sizes)

    nothing = jnp.zeros((0, assignment.num_models), jnp.int32)
    first = record(state, Counts(nothing, nothing, nothing))
    state, (rest, sizes) = lax.scan(rounds_to_record, state, length=num_rounds // record_every)
    return state, make_trace(first, rest, sizes, assignment.num_clients)


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
    each = state.order.each(state.models.params, jnp.ndim(state.round))
    if model is None:
        return each
    if model not in range(len(each)):
        raise ValueError(f"model is {model}; the models' numbers are 0 ... {len(each) - 1}")
    return each[model]


def round_of(
    stacks: Sequence[Stack], assignment: Assignment, client_map: chunks.ClientMap, axis: str | None
) -> Callable[[State, None], tuple[State, tuple[Counts, Sizes]]]:
    """Returns a function that runs one round, in the form that `lax.scan` takes."""
    how = How(client_map, axis, assignment.observe is not None)

    def one_round(state: State, _: None) -> tuple[State, tuple[Counts, Sizes]]:
        t, models = state.round + 1, state.models
        rng_key = keys.round_key(state.rng_key, t)
        assign_key, asked = keys.assignment_key(rng_key), look(stacks, models)
        groups, assigned = assignment.assign(assign_key, t, state.assignment, asked)
        now = Now(t, rng_key, groups)
        trained = train(stacks, now, models, how)
        models = aggregate(stacks, now, models, trained)
        assigned = observe(assignment, stacks, now, assigned, trained)
        counted = count(stacks, groups, models, [each.total for each in trained])
        return state._replace(round=t, models=models, assignment=assigned), counted

    return one_round


def look(stacks: Sequence[Stack], models: Models) -> Look:
    """Returns the assignment's questions about the current models."""

    def ask(question: Callable[[Task, Params], Array]) -> Array:
        parts = split(stacks, models)
        return by_model(stacks, [over_models(question, stack, of.params) for stack, of in parts])

    return Look(losses=partial(ask, client_losses), appeals=partial(ask, appeals))


def train(stacks: Sequence[Stack], now: Now, models: Models, how: How) -> list[Trained]:
    """Trains every model's group, stack by stack."""

    def train_stack(stack: Stack, models: Models) -> Trained:
        groups, model_keys = stack.rows(now.groups), keys.model_keys(now.rng_key, stack.models)
        size = chunks.chunk_size_of(how.client_map, stack.task, models.params, groups.clients.size)
        server_state = jax.tree.map(itemgetter(0), models.server)
        is_lockstep = chunks.is_lockstep(stack.algorithm, stack.task, server_state)
        one_by_one = size is not None or not is_lockstep
        one = partial(train_group, stack.algorithm, now.round, how, size)
        return over_models(one, stack, model_keys, groups, models, one_by_one=one_by_one)

    return [train_stack(*each) for each in split(stacks, models)]


def train_group(
    algorithm: Algorithm,
    round: Round,
    how: How,
    chunk_size: int | None,
    task: Task,
    model_key: PRNGKeyArray,
    group: Groups,
    model: Models,
) -> Trained:
    """Trains one group: returns the sum of its contributions, new client states and reports.

    With a client axis, every device of the axis trains a share of the group.
    """
    # Memory does not grow with the group: `chunk_size` clients at a time are computed and added up,
    # and of the states of all clients only the participants' rows are written.
    size = len(group.clients)

    @partial(jax.jit, inline=True)  # one trace for `eval_shape` and for all chunks
    def contribute(client: base.Index, scale: Any, client_state: base.ClientState) -> Trained:
        key, scale = keys.client_key(model_key, client), 1.0 if scale is None else scale
        local = base.LocalProblem(key, round, task, client, model.params, scale)
        sent, client_state = algorithm.client(local, model.server, client_state)
        report = sent.report if how.with_reports else ()
        return Trained(sent._replace(report=()), client_state, report)

    def add_clients(so_far: Trained, rows: tuple[Array, Groups]) -> tuple[Trained, None]:
        place, (number, scale) = rows
        present = number >= 0
        # vmap of a while_loop runs as many steps as the longest client takes: padding repeats the
        # chunk's first client, which takes the most.
        client = jnp.where(present, number, jnp.maximum(number[0], 0))
        states = jax.tree.map(itemgetter(client), so_far.client_states)
        together = jax.jit(chunks.vmap_unless_one(len(client), contribute), inline=True)
        new = chunks.unless_empty(together, present, client, scale, states, skip=may_skip)
        # Index -1 would write to the last client; an index out of range is dropped.
        home = jnp.where(present, client, task.num_clients), jnp.where(present, place, size)
        came = home, (new.client_states, new.reports)
        if how.client_axis is not None and jax.tree.leaves(came[1]):
            came = lax.all_gather(came, how.client_axis, tiled=True)
        put = map(chunks.put_rows, (so_far.client_states, so_far.reports), *came)
        return Trained(sums.add_chunk(so_far.total, new.total, present), *put), None

    order = chunks.longest_first(algorithm, task, model.server, group.clients)
    may_skip = chunk_size is not None or order is not None
    one = jax.eval_shape(contribute, *jax.tree.map(itemgetter(0), (*group, model.clients)))
    reports = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), one.reports)
    trained = Trained(sums.zero_sum(one.total, model.params), model.clients, reports)
    for some in chunks.in_chunks((jnp.arange(size), group), order, chunk_size, how.client_axis):
        trained, _ = lax.scan(add_clients, trained, some)
    total = sums.finish_sum(trained.total, model.params)
    total = total if how.client_axis is None else lax.psum(total, how.client_axis)
    return trained._replace(total=total)


def aggregate(stacks: Sequence[Stack], now: Now, models: Models, trained: list[Trained]) -> Models:
    """Applies the server's step to every model; a model that nobody trained is not changed."""

    def of_stack(stack: Stack, models: Models, trained: Trained) -> Models:
        def of_model(task: Task, group: Groups, trained: Trained, model: Models) -> Models:
            is_trained = jnp.any(group.clients >= 0)
            # An idle model's sums are 0, and the gradient of 0/0 is NaN even where `jnp.where`
            # drops the value: ones take their place.
            total = jax.tree.map(lambda x: jnp.where(is_trained, x, 1), trained.total)
            old, states = (model.params, model.server), trained.client_states
            given = base.Aggregation(now.round, task, *old, states, total)
            new = stack.algorithm.server(given)
            params, server_state = jax.tree.map(partial(jnp.where, is_trained), new, old)
            return Models(params, server_state, states)

        return over_models(of_model, stack, stack.rows(now.groups), trained, models)

    parts = zip(split(stacks, models), trained, strict=True)
    return join([of_stack(*each, came_back) for each, came_back in parts])


def observe(
    assignment: Assignment, stacks: Sequence[Stack], now: Now, state: Any, trained: list[Trained]
) -> Any:
    """Returns the assignment's state after it observed the reports, if it observes any."""
    if assignment.observe is None:
        return state
    reports = [each.reports for each in trained]
    checks.check_alike("the models' algorithms report differently, but one observes all", *reports)
    return assignment.observe(now.round, now.groups, by_model(stacks, reports), state)
