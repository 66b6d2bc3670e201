"""A sweep as a plan: its runs, the compiled programs they need, their batches and their memory.

Numbers are arguments, structure is closure: axes of floats become, beside the seeds, one replica
axis of a compiled program; every other axis makes programs of its own.
"""

import dataclasses
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from numbers import Real
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm.base import Algorithm, AnalyticTask, Assignment, Params, Task
from fedjax_mm.checks import check_count
from fedjax_mm.chunks import ClientMap, chunk_size_of, is_lockstep, vmap_unless_one
from fedjax_mm.record import Counts, Sizes, measure
from fedjax_mm.simulate import State, init, look, round_of
from fedjax_mm.stacks import split, stacks_of
from fedjax_mm.sweeps.devices import Layout, agree, layout
from fedjax_mm.sweeps.until import Until

_RESERVED = (
    *("seed", "round", "model", "diverged", "ended", "prepared"),
    *(*Counts._fields, "parameters_up", "parameters_down"),
)
_ABSENT: Any = None  # in place of what a program is told anew: no leaf of a pytree
_BUFFER_BYTES = 64 * 2**10  # records of one replica that a segment keeps on the device
_CACHE_BYTES = 512 * 2**10  # states of replicas that one CPU device works on at a time


class Setup(NamedTuple):
    """What `simulate` needs.

    Attributes:
      tasks: one for all models, or one per model.
      algorithm: how clients train and the server aggregates; one for all models, or one per model.
      assignment: who trains what.
      params: initial parameters; drawn by the tasks if None.
    """

    tasks: Task | Sequence[Task]
    algorithm: Algorithm | Sequence[Algorithm]
    assignment: Assignment
    params: Params | None = None


@dataclasses.dataclass(frozen=True)
class Grid:
    """All points of a sweep, each with all seeds; `sweep` explains the fields."""

    build: Callable[..., Setup]
    axes: Mapping[str, Sequence[Any]]
    num_rounds: int
    num_seeds: int = 1
    seed: int = 0
    shared: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    per_seed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    record_every: int = 1
    client_map: ClientMap = "auto"
    prepare: Callable[..., Any] | None = None
    until: Until | None = None

    def __post_init__(self) -> None:
        if self.until is not None:
            self.until.check()
        check_count("num_rounds", self.num_rounds)
        check_count("num_seeds", self.num_seeds)
        check_count("record_every", self.record_every)
        if self.num_rounds % self.record_every:
            raise ValueError(
                f"record_every is {self.record_every}; it must divide {self.num_rounds} rounds"
            )
        plain = {  # arrays on devices would not count as floats
            name: np.asarray(values) if isinstance(values, jax.Array) else values
            for name, values in self.axes.items()
        }
        object.__setattr__(self, "axes", plain)
        for name, values in self.per_seed.items():
            if np.ndim(values) != 1 or len(values) != self.num_seeds:
                raise ValueError(
                    f"per_seed[{name!r}] has shape {np.shape(values)}; give one number for each of "
                    f"{self.num_seeds} seeds"
                )
        for name, values in self.axes.items():
            if name in (*_RESERVED, *self.shared, *self.per_seed):
                is_argument = name in self.shared or name in self.per_seed
                what = "an argument in shared or per_seed" if is_argument else "every result's own"
                raise ValueError(f"an axis is called {name!r}, as {what}; rename it")
            if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
                raise ValueError(f"the axis {name!r} is {values!r}; give a list of values")
            if len(values) == 0:
                raise ValueError(f"the axis {name!r} has no values; give at least one")
            if self.is_numeric(name) and not np.all(np.isfinite(np.asarray(values, float))):
                raise ValueError(f"the axis {name!r} has values that are not finite: {values}")
            for value in values:
                if " at 0x" in str(label_of(value)):
                    raise ValueError(
                        f"the axis {name!r} has {value!r}, whose name differs in every process; "
                        "give it a __name__, or use a string that build looks up"
                    )
            label, count = Counter(map(label_of, values)).most_common(1)[0]
            if count > 1:
                raise ValueError(
                    f"the axis {name!r} has {label!r} twice; drop one, or give it another __name__"
                )

    def is_numeric(self, name: str) -> bool:
        """Whether an axis is of floats, counts among them or not: arguments of one program."""
        values = self.axes[name]
        kinds = {np.asarray(v).dtype.kind if isinstance(v, Real) else "O" for v in values}
        return "f" in kinds and kinds <= {"f", "i", "u"}

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, and the number of seeds."""
        return *(len(values) for values in self.axes.values()), self.num_seeds

    @property
    def num_records(self) -> int:
        """Records after the first, which is of the start."""
        return self.num_rounds // self.record_every

    @cached_property
    def root(self) -> np.ndarray:
        """The data of the key that all draws come from."""
        return np.asarray(jax.random.key_data(jax.random.key(self.seed)))

    @cached_property
    def programs(self) -> list["Program"]:
        """One per structure, in the order of the axes."""
        structural = [name for name in self.axes if not self.is_numeric(name)]
        choices = itertools.product(*(range(len(self.axes[name])) for name in structural))
        return [Program(self, dict(zip(structural, choice, strict=True))) for choice in choices]


class Replica(NamedTuple):
    """What is carried of a replica: its state without the key and the round, and counts.

    `since` counts what was done since the last record; `prepared` is what the grid's `prepare` made
    of the replica before the first round. If the grid has a target, `has_ended` tells whether a
    record met it, and `total` counts what was done up to the last record.
    """

    state: State
    since: Counts
    prepared: Any
    has_ended: Any
    total: Counts | None


class Record(NamedTuple):
    """What is recorded of a replica, ``[models]`` each; see `Trace`.

    `is_finite` tells whether a model's parameters and its loss are.
    """

    metrics: dict[str, Any]
    counts: Counts
    is_finite: Any


class Program:
    """The runs of a grid that differ in numbers and seeds only: one compilation.

    Each of these runs is a replica; they are numbered in the order of the grid's axes and seeds.

    Attributes:
      grid: the grid that it is a part of.
      fixed: the value on each structural axis.
      index: where each replica stands on every axis and in the seeds, ``int[replicas]`` each.
      numbers: the values on the numeric axes and of the seeds, ``[replicas]`` each.
      message_sizes: of each model, once the program has been traced.
    """

    message_sizes: Sizes

    def __init__(self, grid: Grid, choice: Mapping[str, int]) -> None:
        """The program of one choice: a position on each structural axis."""
        self.grid = grid
        self.fixed = {name: grid.axes[name][i] for name, i in choice.items()}
        positions = [
            [choice[name]] if name in choice else range(len(values))
            for name, values in grid.axes.items()
        ]
        mesh = np.meshgrid(*positions, range(grid.num_seeds), indexing="ij")
        self.index = tuple(each.ravel() for each in mesh)
        self.numbers = {
            name: np.asarray(grid.axes[name], jnp.result_type(float))[index]
            for name, index in zip(grid.axes, self.index, strict=False)
            if name not in choice
        }
        of_seeds = {name: np.asarray(values) for name, values in grid.per_seed.items()}
        self.numbers |= {name: values[self.index[-1]] for name, values in of_seeds.items()}

    def __len__(self) -> int:
        """The number of replicas."""
        return len(self.index[-1])

    @property
    def label(self) -> str:
        """The structure in words."""
        values = {name: label_of(value) for name, value in self.fixed.items()}
        algorithm = [str(values.pop("algorithm"))] if "algorithm" in values else []
        return ", ".join(algorithm + [f"{name}={value}" for name, value in values.items()]) or "run"

    def prepare(self, rng_key: PRNGKeyArray, numbers: Any, shared: Any) -> Any:
        """What is computed once for a replica, before its first round."""
        if self.grid.prepare is None:
            return ()
        return self.grid.prepare(rng_key, **self.fixed, **numbers, **shared)

    def setup(self, numbers: Any, shared: Any, prepared: Any) -> Setup:
        """What one replica simulates."""
        more = {} if self.grid.prepare is None else {"prepared": prepared}
        setup = self.grid.build(**self.fixed, **numbers, **shared, **more)
        if not isinstance(setup, Setup):
            raise ValueError(
                f"build returned {type(setup).__name__}; return Setup(tasks, algorithm, assignment)"
            )
        return setup

    def start(self, rng_key: PRNGKeyArray, numbers: Any, shared: Any) -> Replica:
        """Before round 1."""
        prepared = self.prepare(rng_key, numbers, shared)
        setup = self.setup(numbers, shared, prepared)
        state = init(rng_key, *setup)._replace(rng_key=_ABSENT, round=_ABSENT)
        nothing = Counts(*[jnp.zeros(setup.assignment.num_models, jnp.int32)] * 3)
        target = (None, None) if self.grid.until is None else (jnp.zeros((), bool), nothing)
        return Replica(state, nothing, prepared, *target)

    def advance(
        self,
        client_axis: str | None,
        rng_key: PRNGKeyArray,
        numbers: Any,
        replica: Replica,
        round: Int[Array, ""],
        shared: Any,
    ) -> Replica:
        """One more round of one replica."""
        tasks, algorithm, assignment, _ = self.setup(numbers, shared, replica.prepared)
        stacks = stacks_of(tasks, algorithm, assignment)
        one_round = round_of(stacks, assignment, self.grid.client_map, client_axis)
        state = replica.state._replace(rng_key=rng_key, round=round)
        state, (counts, self.message_sizes) = one_round(state, None)
        since = jax.tree.map(_add_counts, replica.since, counts)
        state = state._replace(rng_key=_ABSENT, round=_ABSENT)
        return replica._replace(state=state, since=since)

    def measure(
        self,
        rng_key: PRNGKeyArray,
        numbers: Any,
        replica: Replica,
        round: Int[Array, ""],
        shared: Any,
    ) -> Record:
        """The record of one replica."""
        tasks, algorithm, assignment, _ = self.setup(numbers, shared, replica.prepared)
        stacks, models = stacks_of(tasks, algorithm, assignment), replica.state.models
        measured = measure(stacks, rng_key, round, models, self.grid.client_map)
        return Record(measured.metrics, replica.since, measured.is_finite)

    @cached_property
    def _traced(self) -> "_Traced":
        """One replica's start and first record, traced: what is known before compiling."""
        facts: dict[str, Any] = {}

        def first_record(rng_key: Any, numbers: Any, round: Any, shared: Any) -> Any:
            replica = self.start(rng_key, numbers, shared)
            tasks, algorithm, assignment, _ = self.setup(numbers, shared, replica.prepared)
            stacks, models = stacks_of(tasks, algorithm, assignment), replica.state.models
            view = look(stacks, models)
            groups, _ = assignment.assign(rng_key, round, replica.state.assignment, view)
            facts["updates"] = min(groups.clients.size, assignment.num_clients)
            facts["has_closed_form"] = all(isinstance(each.task, AnalyticTask) for each in stacks)
            facts["vectorizes"] = all(
                is_lockstep(stack.algorithm, stack.task, jax.tree.map(itemgetter(0), each.server))
                and chunk_size_of("auto", stack.task, each.params, facts["updates"]) is None
                for stack, each in split(stacks, models)
            )
            return replica, self.measure(rng_key, numbers, replica, round, shared)

        key = jax.eval_shape(lambda: jax.random.key(0))
        numbers = {name: x[0] for name, x in self.numbers.items()}
        shapes = jax.eval_shape(first_record, key, numbers, np.int32(0), self.grid.shared)
        if self.grid.until is not None:
            self.grid.until.check_metric(shapes[1].metrics, Counts._fields)
        return _Traced(*shapes, **facts)

    @property
    def replica(self) -> Replica:
        """Shapes and types of what the rounds change of one replica."""
        return self._traced.replica

    @property
    def record(self) -> Record:
        """Shapes and types of one record of one replica."""
        return self._traced.record

    @property
    def updates_per_round(self) -> int:
        """The most local trainings of one replica in a round."""
        return self._traced.updates

    @property
    def has_closed_form(self) -> bool:
        """Whether the task brings its own local updates."""
        return self._traced.has_closed_form

    @property
    def vectorizes(self) -> bool:
        """Whether replicas gain from being computed side by side on a CPU device.

        Where local trainings differ in length they would wait for the longest; where clients are
        computed in chunks already they would share the cache, and slices of data become gathers.
        """
        return self._traced.vectorizes

    @property
    def num_models(self) -> int:
        """M."""
        return len(self.record.counts.client_updates)

    @property
    def records_kept(self) -> int:
        """The most records that a segment can make."""
        return max(1, min(self.grid.num_records, _BUFFER_BYTES // num_bytes(self.record)))

    def inputs(self, where: Layout, replicas: np.ndarray, replica: Any = None) -> tuple[Any, ...]:
        """The arguments of `segment` for some replicas, on their devices."""
        if replica is None:
            replica = self.no_replicas(len(replicas))
        seeds = self.index[-1][replicas].astype(np.int32)
        numbers = {name: x[replicas] for name, x in self.numbers.items()}
        everywhere = without_keys(self.grid.shared), self.control(0, 0)
        return *where.put((seeds, numbers, replica), 0), *where.put(everywhere, None)

    def no_replicas(self, size: int) -> Replica:
        """Zeros in place of so many replicas, keys as plain arrays."""
        plain = jax.eval_shape(without_keys, self.replica)
        empty: Replica = jax.tree.map(lambda x: np.zeros((size, *x.shape), x.dtype), plain)
        return empty

    def control(self, done: int, count: int) -> Any:
        """What tells `segment` which rounds to compute."""
        return self.grid.root, np.int32(done), np.int32(count)

    def segment(
        self,
        client_axis: str | None,
        seeds: Any,
        numbers: Any,
        replica: Replica,
        shared: Any,
        control: Any,
    ) -> tuple[Replica, Record, Record]:
        """Some more rounds of a share of the replicas; the compiled program.

        Args:
          client_axis: see `simulate`.
          seeds: ``int[replicas]``.
          numbers: the swept numbers, ``float[replicas]`` each.
          replica: of the replicas; anything before the first round.
          shared: the grid's shared arguments of `build`.
          control: the root key's data, the rounds done, and how many more to compute.

        Returns:
          The new replica; the record of the start, ``[replicas, models]``, if these are the first
          rounds; and those made in them, ``[kept, replicas, models]``. Once all replicas have ended
          no more rounds are computed, and their records are zeros.
        """
        root, done, count = control
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.wrap_key_data(root), seeds)
        shared, every = _with_keys(shared, self.grid.shared), self.grid.record_every
        until = self.grid.until

        def start() -> Replica:
            each = vmap_unless_one(len(seeds), lambda key, number: self.start(key, number, shared))
            return each(keys, numbers)

        def over_replicas(function: Any, replica: Replica, round: Any) -> Any:
            each = vmap_unless_one(len(seeds), lambda *each: function(*each, round, shared))
            return each(keys, numbers, replica)

        def one_round(i: Any, carry: tuple[Replica, Record]) -> tuple[Replica, Record]:
            replica, records = carry
            replica = over_replicas(partial(self.advance, client_axis), replica, done + i)

            def measure() -> Record:
                return over_replicas(self.measure, replica, done + i + 1)

            if every == 1:
                is_record, record = True, measure()
            else:  # what stands in the record's place until it is due is never read
                is_record = (done + i + 1) % every == 0
                record = lax.cond(is_record, measure, lambda: nothing)
            row = (done + i) // every - done // every
            records = jax.tree.map(lambda rows, new: rows.at[row].set(new), records, record)
            since = jax.tree.map(lambda x: jnp.where(is_record, 0, x), replica.since)
            replica = end(replica._replace(since=since), record, is_record)
            return replica, records

        def end(replica: Replica, record: Record, is_record: Any) -> Replica:
            if until is None:
                return replica
            counts = jax.tree.map(lambda new: jnp.where(is_record, new, 0), record.counts)
            total = jax.tree.map(_add_counts, replica.total, counts)
            is_met = until.is_met(record.metrics | total._asdict())
            return replica._replace(has_ended=replica.has_ended | (is_record & is_met), total=total)

        def rounds(carry: tuple[Replica, Record]) -> tuple[Replica, Record]:
            if until is None:
                return lax.fori_loop(0, count, one_round, carry)

            def goes_on(now: Any) -> Any:
                i, (replica, _) = now
                return (i < count) & ~jnp.all(replica.has_ended)

            def step(now: Any) -> Any:
                return now[0] + 1, one_round(*now)

            return lax.while_loop(goes_on, step, (jnp.int32(0), carry))[1]

        replica = _with_keys(replica, self.replica)
        replica = lax.cond(done == 0, start, lambda: replica)
        kept = (self.records_kept, len(seeds))
        records = jax.tree.map(lambda x: jnp.zeros(kept + x.shape, x.dtype), self.record)
        nothing = jax.tree.map(lambda x: x[0], records)
        before = lax.cond(
            done == 0, lambda: over_replicas(self.measure, replica, done), lambda: nothing
        )
        replica, records = rounds((end(replica, before, done == 0), records))
        return without_keys(replica), before, records


class _Traced(NamedTuple):
    """What tracing a program tells; its properties explain the fields."""

    replica: Replica
    record: Record
    updates: int
    has_closed_form: bool
    vectorizes: bool


class Compiled(NamedTuple):
    """A compiled program.

    Attributes:
      program: what was compiled.
      batch_size: the replicas that it computes at once, on all devices together.
      call: `Program.segment` on all devices.
      num_bytes: memory of its arguments, results and temporaries, and of a batch's records.
    """

    program: Program
    batch_size: int
    call: Callable[..., Any]
    num_bytes: float

    @property
    def num_batches(self) -> int:
        """How often the program runs from start to end."""
        return -(-len(self.program) // self.batch_size)

    def replicas(self, batch: int) -> np.ndarray:
        """The replicas of a batch; the last one is padded with copies of the last replica."""
        first = batch * self.batch_size
        return np.minimum(np.arange(first, first + self.batch_size), len(self.program) - 1)

    def updates_per_round(self, batch: int) -> int:
        """The most local trainings of a batch in a round, without its padding."""
        return len(np.unique(self.replicas(batch))) * self.program.updates_per_round

    def label(self, batch: int) -> str:
        """The batch in words."""
        return self.program.label + (
            f", batch {batch + 1} of {self.num_batches}" if self.num_batches > 1 else ""
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a sweep is going to do.

    Attributes:
      grid: the runs.
      where: the devices.
      compiled: the programs.
      compile_seconds: of all programs together.
      process_bytes: memory of this process, the programs included, before the first run.
      limit: the memory that may be used, in bytes: on accelerators that of one device.
    """

    grid: Grid
    where: Layout
    compiled: list[Compiled]
    compile_seconds: float
    process_bytes: int
    limit: float

    @cached_property
    def batches(self) -> list[tuple[Compiled, int]]:
        """All batches in their order."""
        return [(each, batch) for each in self.compiled for batch in range(each.num_batches)]

    @property
    def client_updates(self) -> int:
        """The most local trainings in all."""
        return self.grid.num_rounds * sum(
            each.updates_per_round(batch) for each, batch in self.batches
        )

    @property
    def is_split(self) -> bool:
        """Whether a program's runs would not have fitted all at once."""
        room = self.limit - (self.num_bytes - self.batch_bytes if self.where.is_cpu else 0)
        return any(each.num_bytes * each.num_batches > room for each in self.compiled)

    @property
    def result_bytes(self) -> int:
        """Memory of the labelled result."""
        return _result_bytes(self.grid, [each.program for each in self.compiled])

    @property
    def batch_bytes(self) -> float:
        """Memory of the largest batch."""
        return max(each.num_bytes for each in self.compiled)

    @property
    def num_bytes(self) -> float:
        """The estimated peak: this process, the largest batch and the result."""
        return self.process_bytes + self.batch_bytes + self.result_bytes


def make_plan(
    grid: Grid,
    *,
    split: Literal["replicas", "clients"] | None = None,
    limit: float | None = None,
    batch_sizes: Sequence[int] | None = None,
    report: Callable[[str], None] = lambda _: None,
    approve: Callable[[Mapping[str, str]], None] | None = None,
) -> Plan:
    """Compiles the programs of a grid, with as many replicas at once as do well and fit.

    Args:
      grid: what to compute.
      split: the devices' axis, see `layout`. If None it is the replica axis wherever clients have
        closed forms: adding up their sparse updates over devices takes longer than making them.
      limit: bytes of memory; by default 60 % of what is free.
      batch_sizes: one for each program, to repeat an earlier plan.
      report: told what is being done.
      approve: called with the text of every program by its label, before they are compiled.

    Raises:
      ValueError: if one replica on each device, or the result, does not fit.
    """
    programs = grid.programs
    metrics = {name for program in programs for name in program.record.metrics}
    for name in metrics & grid.axes.keys():
        raise ValueError(f"an axis is called {name!r}, as one of the task's metrics; rename it")
    if split is None and any(program.has_closed_form for program in programs):
        split = "replicas"
    where = layout(len(programs[0]), axis=split)
    room, limit = _room(grid, programs, where, limit)
    clock = time.perf_counter()
    if batch_sizes is None:
        batch_sizes = [_batch_size(program, where, room) for program in programs]
    report(f"compiling {len(programs)} program{'s'[: len(programs) > 1]}")
    lowered = [_lower(*each, where) for each in zip(programs, batch_sizes, strict=True)]
    if approve:
        approve({p.label: each.as_text() for p, each in zip(programs, lowered, strict=True)})
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        calls = list(threads.map(lambda each: each.compile(), lowered))
    compiled = [
        _fit(Compiled(program, size, call, _num_bytes_of(call, program, size, where)), where, room)
        for program, size, call in zip(programs, batch_sizes, calls, strict=True)
    ]
    seconds = time.perf_counter() - clock
    return Plan(grid, where, compiled, seconds, psutil.Process().memory_info().rss, limit)


def _room(
    grid: Grid, programs: list[Program], where: Layout, limit: float | None
) -> tuple[float, float]:
    """Bytes for a batch, and the limit that they come from."""
    if where.is_cpu:
        used = psutil.Process().memory_info().rss
        limit = used + 0.6 * psutil.virtual_memory().available if limit is None else limit
        room = limit - used - _result_bytes(grid, programs)
    else:
        device = where.mesh.local_devices[0]
        limit = 0.75 * device.memory_stats()["bytes_limit"] if limit is None else limit
        room = limit
    room = -agree(-room)[0]  # processes must choose alike
    if room <= 0:
        result, used = _result_bytes(grid, programs), psutil.Process().memory_info().rss
        raise ValueError(
            f"the result takes {_in_gib(result)} and this process already {_in_gib(used)}, but "
            f"{_in_gib(limit)} may be used; record less often (record_every), or allow more memory"
        )
    return room, limit


def _batch_size(program: Program, where: Layout, room: float) -> int:
    """Replicas at once: what fits, and on CPUs what caches hold; batches of nearly equal size."""
    state, record = num_bytes(program.replica), num_bytes(program.record)
    most = room / (3 * state + (2 * program.records_kept + program.grid.num_records) * record)
    if where.is_cpu:
        per_device = _CACHE_BYTES // max(1, state) if program.vectorizes else 1
        most = min(most, where.padded(1) * max(1, per_device))
    num_batches = -(-len(program) // max(1, int(most)))
    return where.padded(-(-len(program) // num_batches))


def jitted(program: Program, where: Layout) -> Any:
    """`Program.segment` on all devices, of what `Program.inputs` returns; not yet traced."""
    segment = where.over(
        partial(program.segment, where.client_axis),
        in_axes=(0, 0, 0, None, None),
        out_axes=(0, 0, 1),
    )
    return jax.jit(segment, donate_argnums=2)


def _lower(program: Program, size: int, where: Layout) -> Any:
    """A program traced for a number of replicas at once."""
    return jitted(program, where).lower(*program.inputs(where, np.zeros(size, int)))


def _num_bytes_of(call: Any, program: Program, size: int, where: Layout) -> float:
    """What a compiled program needs; NaN where the backend does not say."""
    analysis = call.memory_analysis()
    if analysis is None:
        return math.nan
    names = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    used = sum(getattr(analysis, name) for name in names) - analysis.alias_size_in_bytes
    if not where.is_cpu:
        return used
    records = (program.grid.num_records + 1) * num_bytes(program.record)
    return used * len(where.mesh.local_devices) + size * records


def _fit(compiled: Compiled, where: Layout, room: float) -> Compiled:
    """The compiled program; with fewer replicas if it turned out not to fit."""
    if not compiled.num_bytes > room:
        return compiled
    program, size = compiled.program, compiled.batch_size
    if size == where.padded(1):
        raise ValueError(
            f"{program.label}: {size} replicas, the fewest at once, take "
            f"{_in_gib(compiled.num_bytes)} and {_in_gib(room)} are left for them; record less "
            "often (record_every), or allow more memory"
        )
    smaller = where.padded(max(1, int(0.9 * size * room / compiled.num_bytes) - where.padded(1)))
    call = _lower(program, smaller, where).compile()
    needed = _num_bytes_of(call, program, smaller, where)
    return _fit(Compiled(program, smaller, call, needed), where, room)


def seed_keys(seed: int, num_seeds: int) -> jax.Array:
    """The keys of a point's seeds; replica i has the same key however many there are."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(num_seeds))


def num_bytes(tree: Any) -> int:
    """The memory of arrays, or of arrays of given shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _result_bytes(grid: Grid, programs: list[Program]) -> int:
    """The labelled result: metrics, counts, their sums in 64 bits, and copies while it is made."""
    cells = math.prod(grid.shape) * (grid.num_records + 1)
    metrics = {name: x.dtype.itemsize for p in programs for name, x in p.record.metrics.items()}
    return cells * max(p.num_models for p in programs) * (sum(metrics.values()) + 3 * 4 + 8 * 8)


def _in_gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def label_of(value: Any) -> Any:
    """An axis value as a coordinate: plain values as they are, others by name or in words."""
    if isinstance(value, str | bool | int | float | np.generic):
        return value
    return getattr(value, "__name__", str(value))


def without_keys(tree: Any) -> Any:
    """Random keys as plain arrays, which can be saved."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def _with_keys(tree: Any, like: Any) -> Any:
    """The inverse of `without_keys`."""
    return jax.tree.map(
        lambda x, shape: jax.random.wrap_key_data(x) if _is_key(shape) else x, tree, like
    )


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _add_counts(total: Array, new: Array) -> Array:
    """The sum, or -1 if it does not fit, as in `Trace`; counts are not negative otherwise."""
    new = new.astype(jnp.int32)
    added = total + new
    return jnp.where((total < 0) | (new < 0) | (added < total), -1, added).astype(jnp.int32)
