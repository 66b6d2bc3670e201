"""The door of a run: checks the arguments of `simulate` once, before anything is compiled.

Types and numbers are checked first, by `run_of`. Then `rehearse` calls every function of the parts
for one model, one client and one round, on shapes alone. Modules behind this door call the
functions without checks. Tracers have no values, so their values are not checked.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm.asynchrony.dispatch import Dispatch, between_rounds, first_jobs
from fedjax_mm.base import (
    Algorithm,
    Assignment,
    ClientContext,
    ClientState,
    Cohort,
    Contribution,
    Look,
    Metrics,
    Params,
    ServerContext,
    ServerState,
    Task,
    Updates,
)
from fedjax_mm.base.capabilities import AnalyticTask
from fedjax_mm.base.chunks import ClientMap, chunk_size_of, reads
from fedjax_mm.base.cohorts import places_of
from fedjax_mm.base.paths import chosen
from fedjax_mm.base.sums import as_arrays, dense_update, is_stacked
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.instances import check_assignment, check_trained
from fedjax_mm.checks.values import check_alike, described, tracing
from fedjax_mm.data.clients import over_stores, stores_in
from fedjax_mm.simulator.asynchronous import Arrivals, AsyncState, names_of_clock
from fedjax_mm.simulator.mixing import carried, run_metrics, together
from fedjax_mm.simulator.personal import personal_metrics
from fedjax_mm.simulator.record import (
    MESSAGE_BITS,
    MessageSizes,
    check_dims,
    metrics_per_client,
    sizes_of,
)
from fedjax_mm.simulator.returned import (
    check_arrays,
    check_cohort,
    check_contribution,
    check_metrics,
    check_no_repeats,
    check_state,
    name_of,
    told,
    two,
)
from fedjax_mm.simulator.round import Rounds, State, draw_params, look, received
from fedjax_mm.simulator.rows import num_own
from fedjax_mm.simulator.stacks import Stack, StackState, stacks_of
from fedjax_mm.simulator.train import Options
from fedjax_mm.tasks.view import at_round, changes
from fedjax_mm.tasks.with_clients import measures_clients
from fedjax_mm.tools.compiler import check_fusions
from fedjax_mm.wrap import layers, names_of

_IN_MEMORY = "keep them in memory, without client_states"

Run: TypeAlias = Rounds | Arrivals
"""A run in rounds, or an asynchronous one, with the same methods."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Facts:
    """Static facts about a run, which `jax.eval_shape` can return.

    Attributes:
      num_clients: N.
      updates_per_round: the maximum number of local trainings per round.
      slots: the number of slots of a cohort; 0 without cohorts.
      message_sizes: the sizes of each model's messages.
      has_closed_form: whether every task has a closed form of local updates.
      is_synchronous: whether devices can share the clients of a round.
      reads_states: whether a server reads the states of all clients.
      per_client: the names of metrics with one number per client.
      vectorizes: whether a CPU device computes replicas faster under `vmap`. If local trainings
        differ in length, replicas would wait for the longest. If clients are computed in chunks,
        replicas would share the cache, and slices of data would become gathers.
    """

    num_clients: int
    updates_per_round: int
    slots: int
    message_sizes: MessageSizes
    has_closed_form: bool
    is_synchronous: bool
    reads_states: bool
    per_client: tuple[str, ...]
    vectorizes: bool


def preflight(rng_key: PRNGKeyArray, run: Run, *, began: State | None = None) -> Facts:
    """Calls the functions of a run's parts on shapes, and collects the facts about the run.

    Args:
      rng_key: the key of the seed.
      run: the run.
      began: the state from which the run goes on, which is checked too.

    Raises:
      TypeError: as `rehearse`, or if a state is of the other kind of run.
      ValueError: as `rehearse`, or if a state does not fit the run.
    """
    if began is not None:
        _check_kind(run, began)
    at = jnp.asarray(0)
    if began is not None and began.round.dtype == at.dtype:
        at = began.round
    if getattr(jax.config, "jax_disable_jit", False):  # for debuggers, which need values
        facts: Facts = rehearse(run, rng_key, at)
    else:
        facts = jax.eval_shape(partial(rehearse, run), rng_key, at)
    if began is not None:
        _check_began(run, began)
    return facts


def _check_kind(run: Run, state: State) -> None:
    is_async = isinstance(run, Arrivals)
    assignment = run.dispatch if isinstance(run, Arrivals) else run.assignment
    if isinstance(state.assignment, AsyncState) != is_async:
        given = ("an asynchronous run", "a run in rounds")[is_async]
        raise TypeError(
            f"state is of {given}, but the assignment is {described(assignment)}; give the "
            "assignment that the state began with"
        )
    if jnp.ndim(state.round):
        raise ValueError(
            f"state is of runs {list(jnp.shape(state.round))}; call advance inside jax.vmap, too"
        )


def _check_began(run: Run, state: State) -> None:
    """Raises `ValueError` if a state differs in structure or shape from the states of a run."""
    alone: Run = run._replace(options=run.options._replace(client_axis=None))
    wanted = jax.eval_shape(alone.start, state.rng_key)
    remedy = "give the tasks, algorithm, assignment and jax_enable_x64 that the state began with"
    given, have = (sum(len(each.models) for each in x.models) for x in (state, wanted))
    if given != have:
        raise ValueError(f"state has {given} models, but the assignment has {have}; {remedy}")
    for what, old, new in (
        ("models", wanted.models, state.models),
        ("an assignment's state", wanted.assignment, state.assignment),
    ):
        check_state("state has", old, new, what, "runs of these tasks have", remedy)


def run_of(
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment | Dispatch,
    params: Params | None = None,
    client_map: ClientMap = "auto",
    client_axis: str | None = None,
) -> Run:
    """Builds a run from the arguments of `simulate`, without calling the parts' functions.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if arguments do not fit together.
    """
    check_fusions()
    options = Options(checks.check_client_map(client_map), checks.check_client_axis(client_axis))
    is_async = isinstance(assignment, Dispatch)
    by = "dispatch" if is_async else "assignment"
    chooses: Any = assignment if is_async else check_assignment(assignment)
    check_trained(tasks, algorithm)
    each = partial(checks.one_each, num_models=chooses.num_models, by=by)
    each_task = each("tasks", tasks, is_one=isinstance(tasks, Task))
    each_algorithm = each("algorithms", algorithm, is_one=isinstance(algorithm, Algorithm))
    checks.check_num_clients([task.num_clients for task in each_task], chooses.num_clients, by)
    stacks = stacks_of(each_task, each_algorithm)
    first = None if params is None else _fitted(params, stacks)
    if not is_async:
        options = options._replace(with_reports=chooses.observe is not None)
        return Rounds(stacks, chooses, options, first)
    if any(changes(stack.task) for stack in stacks):
        raise ValueError(
            "the task changes over rounds, but asynchronous jobs overlap rounds; use an assignment "
            "in rounds, such as mfa_rr"
        )
    return Arrivals(stacks, chooses, options, first)


def _fitted(params: Params, stacks: Sequence[Stack]) -> list[Params]:
    """Fits the user's initial parameters to each stack."""
    rng_key = jax.eval_shape(lambda: jax.random.key(0))
    pairs = zip(stacks, checks.given_params(params, stacks), strict=True)
    return [
        checks.fit_params(given, jax.eval_shape(partial(draw_params, stack), rng_key))
        for stack, given in pairs
    ]


def rehearse(run: Run, rng_key: PRNGKeyArray, round: Int[Array, ""]) -> Facts:
    """Calls every function of a run's parts once, and returns the facts about the run.

    Call it on shapes alone, as in `preflight`. Clients are computed from the round, because a
    constant would have a value.

    Raises:
      TypeError: if a function returns anything of another type than the contract.
      ValueError: if shapes do not fit.
    """
    try:
        facts: Any = _rehearse(run, rng_key, round)
    except Exception:
        # An error inside a wrapper is that of the part inside, if it fails alone, too.
        failures = (_failure(*fewer, rng_key, round) for fewer in _unwrapped(run))
        first = next((error for error in failures if error is not None), None)
        if first is None:
            raise
    else:
        return facts
    raise first


def _failure(
    run: Run, trains: bool, rng_key: PRNGKeyArray, round: Int[Array, ""]
) -> Exception | None:
    try:
        _rehearse(run, rng_key, round, trains=trains)
    except Exception as error:
        return error
    return None


def _unwrapped(run: Run) -> Iterator[tuple[Run, bool]]:
    """Runs without some wrappers, from the inside out, and whether to train.

    Wrappers of algorithms are left out first, and then those of the assignment. The algorithm may
    need these, and so nobody trains without them.
    """
    algorithms = [layers(stack.algorithm)[:0:-1] for stack in run.stacks]
    for depth in range(max(map(len, algorithms))):
        stacks = [
            stack._replace(algorithm=each[depth]) if depth < len(each) else stack
            for stack, each in zip(run.stacks, algorithms, strict=True)
        ]
        yield run._replace(stacks=stacks), True
    if isinstance(run, Rounds):
        inside = layers(run.assignment)[:0:-1]
        yield from ((run._replace(assignment=each), False) for each in inside)


class _Now(NamedTuple):
    """Numbers without values, as in a run.

    Attributes:
      round: the number of completed rounds.
      next: the number of the next round, or of the next server step.
      client: the index of a client.
    """

    round: Int[Array, ""]
    next: Int[Array, ""]
    client: Int[Array, ""]


class _First(NamedTuple):
    """The first model of a stack, with the states of its server and of one client, and metrics."""

    stack: Stack
    task: Task
    params: Params
    server: ServerState
    client: ClientState
    metrics: Metrics

    @property
    def algorithm(self) -> Algorithm:
        return self.stack.algorithm


def _rehearse(
    run: Run, rng_key: PRNGKeyArray, round: Int[Array, ""], *, trains: bool = True
) -> Facts | None:
    zero = (round * 0).astype(jnp.int32)
    now = _Now(round, round + 1 if isinstance(run, Rounds) else zero + 1, zero)
    # Every function gets another key, as in a run, to satisfy `jax.debug_key_reuse`.
    fold = partial(jax.random.fold_in, rng_key)
    with tracing("the start of a run"):
        firsts = [_start(run, stack, fold(4 + i), now) for i, stack in enumerate(run.stacks)]
    with tracing("the record of a round"):
        firsts = [
            _measured(first, jax.random.fold_in(fold(1), i)) for i, first in enumerate(firsts)
        ]
    with tracing("the start of a run"):
        own = _initial(run, firsts, fold(0), now) if isinstance(run, Rounds) else ()
        if isinstance(run, Rounds):
            _check_mixed(run, firsts)
    with tracing("the record of a round"):
        _check_record(run, firsts, own)
    if isinstance(run, Rounds):
        with tracing("a round"):
            cohort, given = _assign(run, firsts, fold(2), now, own)
            if not trains:
                return None
            trained = [_train(cohort, first, fold(3), now) for first in firsts]
            sent = [each for each, *_ in trained]
            _observe(run.assignment, cohort, [each.report for each in sent], now, own, given)
            mixed = _mixed_size(run, firsts, now, own)
        updates, slots = min(cohort.clients.size, run.assignment.num_clients), cohort.clients.size
    else:
        with tracing("an arrival"):
            _observe_lifetimes(run, firsts, fold(2), now)
            trained = [_train(None, first, fold(3), now) for first in firsts]
            sent = [each for each, *_ in trained]
        updates, slots = run.dispatch.arrivals_per_round, 0
    ups, downs = [each.update for each in sent], [_downloaded(first) for first in firsts]
    sizes = MessageSizes(sizes_of(run.stacks, ups), sizes_of(run.stacks, downs))
    if isinstance(run, Rounds) and run.assignment.mix is not None:
        sizes = sizes._replace(mixed=(mixed,) * run.assignment.num_models)
    if isinstance(run, Rounds) and run.assignment.peers:
        nothing = (0,) * run.assignment.num_models
        sizes = sizes._replace(up=nothing, down=nothing)
    return Facts(
        num_clients=run.stacks[0].num_clients,
        updates_per_round=updates,
        slots=slots,
        message_sizes=sizes,
        has_closed_form=all(isinstance(stack.task, AnalyticTask) for stack in run.stacks),
        is_synchronous=isinstance(run, Rounds),
        reads_states=any(reads for _, reads, _ in trained),
        per_client=metrics_per_client(run.stacks),
        vectorizes=all(
            first.stack.has_equal_steps(first.server)
            and chunk_size_of("auto", first.task, _alike(first.params, 1), updates) is None
            for first in firsts
        ),
    )


def _downloaded(first: _First) -> Any:
    """Part of the parameters that a client receives."""
    download = first.algorithm.download
    return first.params if download is None else download(first.params)


def _alike(tree: Any, *axes: int) -> Any:
    """Broadcasts arrays along new leading axes."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*axes, *jnp.shape(x))), tree)


def _traced(tree: Any) -> Any:
    """Equal arrays without values, as in a run."""
    return jax.tree.map(lambda x: x[0], _alike(tree, 1))


def _start(run: Run, stack: Stack, rng_key: PRNGKeyArray, now: _Now) -> _First:
    """First model of a stack before round 1."""
    algorithm, task = stack.algorithm, _task_at_start(stack, now)
    weight = task.weight(now.client)
    if not hasattr(weight, "shape") or weight.shape:
        raise TypeError(
            f"{type(task).__name__}.weight returns {described(weight)}; return one number, n_k"
        )
    params = _traced(task.init(rng_key))
    what = f"{name_of(algorithm)} returns from init"
    with told(algorithm, "init(task, params)"):
        found = algorithm.init(task, params)
    server, client = two(what, found, "the server's state, and one client's state")
    check_arrays(f"{what} as the server's state", server)
    check_arrays(f"{what} as a client's state", client)
    if isinstance(run, Arrivals) and jax.tree.leaves(client):
        raise ValueError(
            "the algorithm keeps client states, but asynchronous clients may run several jobs of "
            "one model at once; use an algorithm without client states, such as fedavg"
        )
    server, client = _traced((server, client))
    if algorithm.num_steps is not None:  # refuses epochs with too many steps
        steps = algorithm.num_steps(task, now.client, server)
        if np.shape(steps):
            given = described(steps)
            raise TypeError(f"{name_of(algorithm)} returns from num_steps {given}; give one number")
    return _First(stack, task, params, server, client, {})


def _measured(first: _First, rng_key: PRNGKeyArray) -> _First:
    metrics = first.task.metrics(rng_key, first.params)
    check_metrics(f"metrics of the task {type(first.task).__name__}", metrics)
    return first._replace(metrics=metrics)


def _task_at_start(stack: Stack, now: _Now) -> Task:
    def kinds_of(task: Task) -> Any:
        leaves, structure = jax.tree.flatten(task)
        return structure, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]

    task = stack.task_at(now.client)
    first = at_round(task, now.client)
    if changes(task) and kinds_of(first) != kinds_of(task):
        raise ValueError(
            f"at of {type(task).__name__} returns a task of another structure, shape or type; "
            "return the task with other values"
        )
    return first


def _check_record(run: Run, firsts: Sequence[_First], own: Any) -> None:
    """Raises an error if the metrics of a record do not fit together."""
    of_clients, num_clients = metrics_per_client(run.stacks), run.stacks[0].num_clients
    found: dict[str, set[tuple[int, ...]]] = {}
    for first in firsts:
        metrics = first.metrics
        others = (first.algorithm.metrics or _no_metrics)(first.task, first.params, first.server)
        check_metrics(f"metrics of {name_of(first.algorithm)}", others, MESSAGE_BITS)
        _check_personal(first)
        states = _alike(first.client, num_own(num_clients, run.options.client_axis))
        given = first.algorithm, first.task, first.params, states, run.options
        others = others | personal_metrics(*given)
        check_no_repeats(metrics, others)
        for name, value in (metrics | others).items():
            found.setdefault(name, set()).add(jnp.shape(value))
    for name, shapes in found.items():
        if len(shapes) > 1:
            raise ValueError(
                f"the metric {name!r} has shapes {sorted(shapes)} in different models; make them "
                "equal, or give it several names"
            )
        (shape,) = shapes
        if name in of_clients and shape[:1] != (num_clients,):
            raise ValueError(
                f"the metric {name!r} has shape {shape} but is one of `per_client`; give a number "
                f"for each of {num_clients} clients"
            )
    dims = {name: len(shape) for name, (shape,) in found.items()}
    if isinstance(run, Rounds):
        now = [_models(first, None) for first in firsts], own, run.options.client_map
        others = run_metrics(run.assignment, run.stacks, *now)
        check_metrics(f"metrics of {name_of(run.assignment)}", others)
        for name, value in others.items():
            if jnp.shape(value)[:1] != (run.assignment.num_models,):
                raise ValueError(
                    f"the metric {name!r} of {name_of(run.assignment)} has shape "
                    f"{jnp.shape(value)}; give a number for each of {run.assignment.num_models} "
                    "models"
                )
        of_run = {name: jnp.ndim(value) - 1 for name, value in others.items()}
    else:
        of_run = dict.fromkeys(names_of_clock(run.dispatch), 0)
    check_no_repeats(dims, of_run)
    check_dims(dims | of_run, of_clients)


def _check_personal(first: _First) -> None:
    """Raises an error if personal parameters are not like the global ones."""
    personal = first.algorithm.personal
    if personal is None:
        return
    if first.stack.homes is not None and measures_clients(first.task):
        raise ValueError(
            f"records evaluate the personal models of all clients of {name_of(first.algorithm)}, "
            f"so that their states cannot be in files; {_IN_MEMORY}"
        )
    what = f"{name_of(first.algorithm)} returns from personal"
    with told(first.algorithm, "personal(params, client_state)"):
        found = personal(first.params, first.client)
    check_arrays(f"{what} as parameters", found)
    check_state(what, first.params, found, "parameters", "the model has")


def _check_mixed(run: Rounds, firsts: Sequence[_First]) -> None:
    """Raises `ValueError` if models that are mixed have no parameters of equal shapes."""
    where, models = run.assignment.where, [_models(first, None) for first in firsts]
    for name in ("compressed", "private") if run.assignment.peers else ():
        if any(name in names_of(first.algorithm) for first in firsts):
            raise ValueError(
                f"{name} is about what clients send to a server, but peers send whole models to "
                "each other; leave it out"
            )
    if run.assignment.mix is None:
        return
    for what, each in (
        ("parameters", [chosen(where, state.params) for state in models]),
        ("server states", [[chosen(where, x) for x in carried(state)] for state in models]),
    ):
        one = [jax.tree.map(lambda x: x[0], tree) for tree in each]
        check_alike(
            f"{name_of(run.assignment)} mixes {what} of unlike models; give models of one "
            'structure, or mix a part that they share, by where="trunk"',
            *one,
            shapes=True,
        )
        if what == "parameters" and not jax.tree.leaves(one):
            raise ValueError(f"{name_of(run.assignment)} mixes no parameters; change where")


def _mixed_size(run: Rounds, firsts: Sequence[_First], now: _Now, own: Any) -> int:
    """Mixes the models, and returns how many numbers a model sends to another."""
    assignment, models = run.assignment, [_models(first, None) for first in firsts]
    if assignment.mix is None:
        return 0
    new = together(run.stacks, assignment, [state.params for state in models])
    values = list(zip(*map(carried, models), strict=True))
    others = [together(run.stacks, assignment, each) for each in values]
    for old, each in ((new, new), *((None, each) for each in others)):
        with told(assignment, "mix(round, state, old, new)"):
            made = assignment.mix(now.next, own, old, each)
        what = f"{name_of(assignment)} returns from mix"
        check_state(what, each, made, "parameters", "the models have")
    return sum(math.prod(x.shape[1:]) for x in jax.tree.leaves([new, others]))


def _no_metrics(*_: Any) -> Metrics:
    return {}


def _initial(run: Rounds, firsts: Sequence[_First], rng_key: PRNGKeyArray, now: _Now) -> Any:
    """Returns the assignment's state before round 1."""
    asked = _look(run, firsts, jax.random.fold_in(rng_key, 0), now)
    with told(run.assignment, "init(rng_key, look)"):
        return _traced(run.assignment.init(jax.random.fold_in(rng_key, 1), asked))


def _assign(
    run: Rounds, firsts: Sequence[_First], rng_key: PRNGKeyArray, now: _Now, own: Any
) -> tuple[Cohort, Any]:
    """Calls `assign` for a round, and returns the cohort and the assignment's new state.

    Raises:
      TypeError: if `assign` does not return a `Cohort` and a state.
      ValueError: if shapes do not fit.
    """
    assignment, asked = run.assignment, _look(run, firsts, jax.random.fold_in(rng_key, 0), now)
    what, wanted = name_of(assignment), "return two from assign: a Cohort, and the state"
    with told(assignment, "assign(rng_key, round, state, look)"):
        answer = assignment.assign(jax.random.fold_in(rng_key, 1), now.next, own, asked)
    match answer:
        case Cohort() as found:
            raise TypeError(f"{what} returns {described(found)} alone; {wanted}")
        case Cohort() as cohort, new:
            pass
        case [first, _] as found if isinstance(found, tuple | list):  # JAX arrays match too
            raise TypeError(f"{what} returns as cohort {described(first)}; {wanted}")
        case found:
            raise TypeError(f"{what} returns {described(found)}; {wanted}")
    check_cohort(what, cohort, assignment.num_models)
    if assignment.observe is None:  # otherwise `observe` returns the next state
        check_state(f"{what} returns", own, new)
    return cohort, new


def _look(run: Run, firsts: Sequence[_First], rng_key: PRNGKeyArray, now: _Now) -> Look:
    """Functions that evaluate the models, and refuse metrics that a model does not have."""
    models = [_models(first, run.options.client_axis) for first in firsts]
    asked = look(run.stacks, rng_key, now.round, models, run.options)
    in_files = (first.stack.homes is not None and jax.tree.leaves(first.client) for first in firsts)
    if isinstance(run, Rounds) and any(in_files):
        asked = asked._replace(updates=partial(_refuse_updates, run.assignment))
    return asked._replace(metric=partial(_metric, firsts, asked))


def _refuse_updates(assignment: Assignment) -> Updates:
    raise ValueError(
        f"{name_of(assignment)} looks at the updates of all clients, which need all their states, "
        f"so that they cannot be in files; {_IN_MEMORY}, or use another one, such as mfa_rand"
    )


def _observe_lifetimes(
    run: Arrivals, firsts: Sequence[_First], rng_key: PRNGKeyArray, now: _Now
) -> None:
    """Lets models of an asynchronous run arrive and finish."""
    clock_key, look_key = jax.random.split(rng_key)
    clock = first_jobs(run.dispatch, clock_key)
    between_rounds(run.dispatch, clock, clock_key, now.round, _look(run, firsts, look_key, now))


def _models(first: _First, client_axis: str | None) -> StackState:
    """State of a stack whose models all equal its first."""
    models = first.stack.models
    num_rows = num_own(first.task.num_clients, client_axis)
    params, server = _alike((first.params, first.server), len(models))
    return StackState(params, server, _alike(first.client, len(models), num_rows), models)


def _metric(firsts: Sequence[_First], asked: Look, *names: str) -> Array:
    """The first of several metrics that every model has, or a `ValueError`."""
    for first in firsts:
        found = first.metrics
        if not found.keys() & set(names):
            wanted, there = " or ".join(map(repr, names)), ", ".join(map(repr, found)) or "none"
            raise ValueError(
                f"the assignment looks at the metric {wanted}; {type(first.task).__name__} has "
                f"{there}: choose another assignment, or give the task that metric"
            )
        if shape := jnp.shape(next(found[name] for name in names if name in found)):
            raise ValueError(
                f"the assignment looks at {' or '.join(map(repr, names))}, an array {list(shape)} "
                "for each model; give a metric that is a number"
            )
    return asked.metric(*names)


def _train(
    cohort: Cohort | None, first: _First, rng_key: PRNGKeyArray, now: _Now
) -> tuple[Contribution, bool, ServerContext]:
    """Trains one client, and takes the server step.

    Returns:
      The client's dense update, whether the server reads the states of all clients, and its
      context.
    """
    has_factor = cohort is not None and cohort.scale is not None
    may_miss = cohort is not None and cohort.takes_part is not None
    client_key, server_key = jax.random.split(jax.random.fold_in(rng_key, first.stack.models[0]))
    # The factor and `takes_part` have values exactly when they have values in `train.py`.
    context = ClientContext(
        *(client_key, now.next, first.task, now.client, first.params),
        factor=now.client + jnp.ones(()) if has_factor else None,
        takes_part=now.client >= 0 if may_miss else True,
    )
    sent = _contribute(first, context)
    if is_stacked(sent.update):
        message, total = sent.update.update, _stacked(cohort, first, sent._replace(report=()))
    else:
        total = dense_update(sent._replace(report=()), first.params)
        message = total.update
    states = _alike(first.client, first.task.num_clients)
    given = now.next, first.task, first.params, first.server, states, total, server_key
    seen = ServerContext(*given)
    _serve(first, seen)

    def serve(states: ClientState) -> Any:
        return first.algorithm.server(seen._replace(client_states=states))

    is_read = bool(jax.tree.leaves(states)) and reads(serve, states)
    return total._replace(update=message, report=sent.report), is_read, seen


def reads_examples(run: Run, rng_key: PRNGKeyArray, round: Int[Array, ""]) -> bool:
    """Whether a function other than those of clients and of metrics may read clients' examples.

    Call it on shapes alone, for a run that passes `rehearse`.
    """
    if isinstance(run, Rounds) and run.assignment.mix is not None:
        return True  # its metrics evaluate each model on clients of its own
    zero = (round * 0).astype(jnp.int32)
    now, fold = _Now(round, zero + 1, zero), partial(jax.random.fold_in, rng_key)
    firsts = [_start(run, stack, fold(4 + i), now) for i, stack in enumerate(run.stacks)]
    cohort = None
    if isinstance(run, Rounds):
        firsts = [_measured(first, fold(1)) for first in firsts]
        cohort, _ = _assign(run, firsts, fold(2), now, _initial(run, firsts, fold(0), now))

    def is_read(first: _First) -> bool:
        *_, seen = _train(cohort, first, fold(3), now)
        algorithm = first.algorithm

        def compute(examples: list[Any]) -> Any:
            each = iter(examples)
            task = over_stores(
                lambda store: dataclasses.replace(store, examples=next(each)), first.task
            )
            metrics = algorithm.metrics or _no_metrics
            made = [algorithm.server(seen._replace(task=task)), task.init(fold(5))]
            made += [algorithm.init(task, first.params), metrics(task, first.params, first.server)]
            if algorithm.num_steps is not None:
                made.append(algorithm.num_steps(task, now.client, first.server))
            return made

        return reads(compute, [store.examples for store in stores_in(first.task)])

    return any(map(is_read, firsts))


def _stacked(cohort: Cohort | None, first: _First, sent: Contribution) -> Contribution:
    """The total of a round with updates that are not summed."""
    if cohort is None:
        raise ValueError(
            f"the server of {name_of(first.algorithm)} needs the updates of all participants at "
            "once, but an asynchronous run adds each to a sum when it arrives; use an assignment "
            "in rounds, such as mfa_rr"
        )
    mine, _ = first.stack.slots(cohort)
    places = places_of(mine.clients, mine.models, len(first.stack.models))
    return sent._replace(update=_alike(sent.update, places.shape[1]))


def _contribute(first: _First, context: ClientContext) -> Contribution:
    """Calls the client function, and returns the contribution.

    Raises:
      TypeError: if the client function does not return a valid contribution and a state.
      ValueError: if the state's shapes or types have changed.
    """
    algorithm = first.algorithm
    what = f"{name_of(algorithm)} returns from client"
    with told(algorithm, "client(context, server_state, client_state)"):
        found = algorithm.client(context, first.server, first.client)
    sent, state = two(what, found, "a Contribution, and the client's state")
    if not isinstance(sent, Contribution):
        raise TypeError(f"{what} {described(sent)}; give a Contribution first, then the state")
    check_arrays(f"{what} as a client's state", state)
    check_state(what, first.client, state)
    check_contribution(what, sent)
    return as_arrays(sent)


def _serve(first: _First, context: ServerContext) -> None:
    """Takes a server step.

    Raises:
      TypeError: if the server function does not return parameters and a state.
      ValueError: if shapes or types have changed.
    """
    algorithm = first.algorithm
    what = f"{name_of(algorithm)} returns from server"
    with told(algorithm, "server(context)", context.params, context.total.update):
        found = algorithm.server(context)
    params, state = two(what, found, "the parameters, and the server's state")
    check_arrays(f"{what} as parameters", params)
    check_arrays(f"{what} as the server's state", state)
    check_state(what, context.params, params, "parameters", "the model has")
    check_state(what, context.server_state, state)

    def step(states: ClientState) -> Any:
        return algorithm.server(context._replace(client_states=states))

    if first.stack.homes is not None and reads(step, context.client_states):
        raise ValueError(
            f"the server of {name_of(algorithm)} reads the states of all clients in every round, "
            f"so that they cannot be in files; {_IN_MEMORY}, or use an algorithm whose server "
            "reads only sums, such as scaffold or mifa(..., memory='clients')"
        )


def _observe(
    assignment: Assignment,
    cohort: Cohort,
    reports: Sequence[Any],
    now: _Now,
    before: Any,
    chosen: Any,
) -> None:
    """Lets an assignment observe a round, given its states before and after `assign`."""
    if assignment.observe is None:
        return
    words = "the models' algorithms report differently, but one observes all"
    check_alike(words, *reports)
    for first, *others in zip(*map(jax.tree.leaves, reports), strict=True):
        shapes = {np.shape(each) for each in (first, *others)}
        if len(shapes) > 1:
            raise ValueError(f"{words}: arrays of shapes {' and '.join(map(str, sorted(shapes)))}")
    each = jax.tree.map(jnp.zeros_like, _alike(reports[0], len(cohort.clients)))
    new = assignment.observe(now.next, *received(cohort, each), chosen)
    check_state(f"{name_of(assignment)} returns from observe", before, new)
