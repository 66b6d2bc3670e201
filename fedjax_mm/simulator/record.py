"""Records of a run: the models' metrics, counts of work, and message sizes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedjax_mm.base import (
    Algorithm,
    ClientState,
    Metrics,
    Params,
    Round,
    ServerState,
    Task,
    keys,
)
from fedjax_mm.base.calls import in_html, in_short
from fedjax_mm.base.chunks import chunk_size_of
from fedjax_mm.checks.annotations import brief
from fedjax_mm.checks.instances import check_instance
from fedjax_mm.checks.values import check_alike
from fedjax_mm.simulator.personal import personal_metrics, personal_per_client
from fedjax_mm.simulator.stacks import Stack, StackState, by_model, over_models
from fedjax_mm.simulator.train import Options
from fedjax_mm.tasks.view import per_client

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trace:
    """Records of a run.

    The first entry of every array describes the state before the recorded rounds.

    Attributes:
      round: ``int32[records]``, the number of completed rounds.
      metrics: the task's metrics by name, each ``float[records, models]`` or, if it is an array
        for each model, ``float[records, models, ...]``.
      client_updates: ``int32[records, models]``, local trainings of participants since the previous
        record. Clients that do not participate are not counted, but their gradients are.
      gradients: ``int32[records, models]``, gradients computed since the previous record. In both
        counts, -1 marks an overflow of 32 bits.
      idle_rounds: ``int32[records, models]``, rounds since the previous record in which the model
        was active and had no participants.
      upload_size: the number of values one client sends per local training of each model.
      download_size: the number of values one client receives per local training of each model.
      mixed_size: the number of values in one message between models, see `Assignment.mix`.
      per_client: names of metrics with one number per client, on the axis after the models axis.
    """

    round: Array
    metrics: dict[str, Array]
    client_updates: Array
    gradients: Array
    idle_rounds: Array
    upload_size: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    download_size: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    per_client: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    mixed_size: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    __repr__ = in_short
    _repr_html_ = in_html


class Counts(NamedTuple):
    """The counts of a `Trace` since the last record, each ``int32[models]``."""

    client_updates: Any
    gradients: Any
    idle_rounds: Any


class Work(NamedTuple):
    """Work since the last record.

    Attributes:
      counts: the part that is recorded.
      staleness: the total staleness of each model's arrived jobs; () in synchronous runs.
    """

    counts: Counts
    staleness: Any = ()


class MessageSizes(NamedTuple):
    """The number of values that one client sends and receives, for each model.

    With `Assignment.mix` also the number of values of a message from one model to another.
    """

    up: tuple[int, ...]
    down: tuple[int, ...]
    mixed: tuple[int, ...] = ()


MESSAGE_BITS = "message_bits"
"""The name of the metric with the bits of one client's message, if updates are compressed."""

RESERVED = (
    *("seed", "round", "model", "client", "diverged", "ended"),
    *(
        *Counts._fields,
        "parameters_up",
        "parameters_down",
        "parameters_mixed",
        "bits_up",
        MESSAGE_BITS,
    ),
)
"""Names that occur in every result, so metrics and axes must not use them."""


class Record(NamedTuple):
    """One entry of a trace, or a run's entries along a leading axis.

    Attributes:
      metrics: the models' metrics, by name.
      counts: the counts since the last record.
      is_finite: False for a model with a non-finite parameter or loss; () outside sweeps.
      is_used: marks the models in use; () if all are in use.
    """

    metrics: dict[str, Any]
    counts: Counts
    is_finite: Any = ()
    is_used: Any = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bundle:
    """A record whose arrays of the same shape and type are stacked, or several such records.

    A loop records a bundle rather than a record, because an accelerator launches a kernel for each
    array that it writes.

    Attributes:
      arrays: ``[parts, ...]``, or ``[records, parts, ...]``.
      places: the array, and the index within it, of each leaf of the record.
      structure: the record's tree structure.
    """

    arrays: list[Array]
    places: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})
    structure: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, record: Record) -> "Bundle":
        """Bundles one record."""
        leaves, structure = jax.tree.flatten(record)
        groups: dict[Any, list[Array]] = {}
        places = []
        for leaf in leaves:
            kind = leaf.shape, leaf.dtype
            group = groups.setdefault(kind, [])
            places.append(([*groups].index(kind), len(group)))
            group.append(leaf)
        return cls([jnp.stack(each) for each in groups.values()], tuple(places), structure)

    def records(self) -> Record:
        """The records ``[records, ...]`` in a loop's bundles."""
        made: Record = self.structure.unflatten([self.arrays[i][:, j] for i, j in self.places])
        return made


def make_trace(
    rounds: Array, first: Record, rest: Record, sizes: MessageSizes, per_client: tuple[str, ...]
) -> Trace:
    """Joins the first record of a run with the later ones into a trace."""
    whole = jax.tree.map(lambda start, later: jnp.concatenate([start[None], later]), first, rest)
    made = whole.counts._asdict()
    return Trace(
        rounds,
        whole.metrics,
        **made,
        upload_size=sizes.up,
        download_size=sizes.down,
        per_client=per_client,
        mixed_size=sizes.mixed,
    )


@brief
def join_traces(first: Trace, *later: Trace) -> Trace:
    """Joins the traces of a run and its continuations.

    The first record of each continuation is dropped, because it repeats the last record before it.

    Args:
      first: the trace returned by `simulate` or `advance`.
      later: traces returned by `advance`, each from the final state of the previous run. Leading
        axes from `jax.vmap` must match those of `first`.

    Raises:
      ValueError: if a trace does not begin at the last round of the previous one, or if traces
        differ in structure.

    Example:
      >>> import jax
      >>> from fedjax_mm import advance, fedavg, join_traces, mfa_rr, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> run = quadratic(6, 4, mu=0.1), fedavg(0.1, local_steps=5), mfa_rr(6, 2)
      >>> state, first = simulate(jax.random.key(0), *run, 20)
      >>> state, later = advance(state, *run, 10)
      >>> whole = join_traces(first, later)
      >>> whole.round.shape, whole.gradients[:, 0].sum().item()
      ((31,), 450)
    """
    for trace in (first, *later):
        check_instance("a trace", trace, Trace, "give the second of the two that simulate returns")
    axis = jnp.ndim(first.round) - 1  # records follow the replica axes

    def join(one: Trace, other: Trace) -> Trace:
        check_alike("the traces are of different runs", one, other)
        ends = one.round[..., -1], other.round[..., 0]
        if not any(isinstance(x, jax.core.Tracer) for x in ends) and np.any(ends[0] != ends[1]):
            raise ValueError(
                f"a trace ends in round {np.max(ends[0])}, but the next begins in round "
                f"{np.max(ends[1])}; give those of `simulate` and of `advance` from its state"
            )
        # The first record of a continuation repeats the last one without its counts.
        rest = jax.tree.map(lambda x: lax.slice_in_dim(x, 1, None, axis=axis), other)
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis), one, rest)

    return reduce(join, later, first)


class Measured(NamedTuple):
    """Metrics of the models by name, and whether their parameters and losses are finite."""

    metrics: dict[str, Float[Array, " models ..."]]
    is_finite: Bool[Array, " models"]


def measure(
    stacks: list[Stack],
    rng_key: PRNGKeyArray,
    round: Round,
    states: Sequence[StackState],
    options: Options,
    own: Metrics,
    number: int | None = None,
) -> Measured:
    """Evaluates all models' metrics after a round, with NaN for metrics that a task lacks.

    Args:
      stacks: the models, with the tasks of the round.
      rng_key: the key of the seed.
      round: t.
      states: the models' states.
      options: the options of the run.
      own: metrics ``[models, ...]`` that do not come from the tasks.
      number: the number of models of a stack with metrics of its task; None means all.
    """

    def all_finite(tree: Any) -> Bool[Array, ""]:
        return jnp.all(jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]))

    def of_model(
        algorithm: Algorithm,
        task: Task,
        key: PRNGKeyArray,
        params: Params,
        server: ServerState,
        clients: ClientState,
    ) -> Measured:
        metrics = task.metrics(key, params)
        of_algorithm = algorithm.metrics(task, params, server) if algorithm.metrics else {}
        of_algorithm |= personal_metrics(algorithm, task, params, clients, options)
        known = (params, metrics["loss"]) if "loss" in metrics else params
        return Measured(metrics | of_algorithm, all_finite(known))

    def of_stack(stack: Stack, state: StackState) -> Measured:
        size = len(stack.models)
        if number is None or size <= number:
            return of_all_models(stack, state)
        rows = np.linspace(0, size - 1, number).astype(int)
        some = of_all_models(stack.at(rows), state.at(rows))
        metrics = jax.tree.map(
            lambda x: jnp.full((size, *x.shape[1:]), jnp.nan, x.dtype).at[rows].set(x), some.metrics
        )
        is_finite = jax.vmap(all_finite)(state.params).at[rows].set(some.is_finite)
        return Measured(metrics, is_finite)

    def of_all_models(stack: Stack, state: StackState) -> Measured:
        chunk_size = chunk_size_of(options.client_map, stack.task, state.params, len(stack.models))
        key = keys.metrics_keys(keys.round_key(rng_key, round), stack.models)
        each = key, state.params, state.server, state.clients
        one = partial(of_model, stack.algorithm)
        return over_models(one, stack, *each, one_by_one=chunk_size is not None)

    metrics, finite = zip(*map(of_stack, stacks, states), strict=True)

    def of_all(name: str) -> Array:
        shape = next(each[name].shape[1:] for each in metrics if name in each)
        each = [
            given[name] if name in given else jnp.full((len(stack.models), *shape), jnp.nan)
            for given, stack in zip(metrics, stacks, strict=True)
        ]
        return by_model(stacks, each)

    names = dict.fromkeys(name for each in metrics for name in each)
    return Measured({name: of_all(name) for name in names} | own, by_model(stacks, finite))


def own_dims(name: str, number: int, is_per_client: bool) -> tuple[str, ...]:
    """Names of a metric's dimensions after the model dimension."""
    return tuple("client" if is_per_client and i == 0 else f"{name}_{i}" for i in range(number))


def check_dims(
    dims: Mapping[str, int], of_clients: Sequence[str], axes: Mapping[str, Any] | None = None
) -> None:
    """Raises `ValueError` if a dimension of a metric has the name of a metric or axis.

    xarray would take a metric of this name for the coordinates of the dimension.

    Args:
      dims: the number of each metric's dimensions after the model dimension, by name.
      of_clients: the names of metrics with one number per client.
      axes: the axes of a sweep.
    """
    for name, number in dims.items():
        for dim in own_dims(name, number, name in of_clients):
            if dim in dims or dim in (axes or {}):
                kind = "a metric" if dim in dims else "an axis"
                raise ValueError(
                    f"{kind} is called {dim!r}, like a dimension of the metric {name!r}; rename it"
                )


def metrics_per_client(stacks: Sequence[Stack]) -> tuple[str, ...]:
    """Names of all metrics with one number per client."""
    of_tasks = (name for stack in stacks for name in per_client(stack.task))
    personal = (
        name for stack in stacks for name in personal_per_client(stack.algorithm, stack.task)
    )
    return tuple(dict.fromkeys([*of_tasks, *personal]))


def add_counts(done: T, new: T) -> T:
    """Adds two pytrees of counts, with -1 for sums that overflow int32."""

    # int32 wraps around silently. Other counts are nonnegative, and -1 marks an overflow.
    def add(done: Array, new: Array) -> Array:
        new = new.astype(jnp.int32)
        total = done + new
        return jnp.where((done < 0) | (new < 0) | (total < done), -1, total)

    total: T = jax.tree.map(add, done, new)
    return total


def sizes_of(stacks: Sequence[Stack], trees: Sequence[Any]) -> tuple[int, ...]:
    """Number of values of each model, given those of one model of each stack."""
    each = [sum(math.prod(x.shape) for x in jax.tree.leaves(tree)) for tree in trees]
    of = {model: size for stack, size in zip(stacks, each, strict=True) for model in stack.models}
    return tuple(of[model] for model in sorted(of))
