"""Programs: runs that differ only in numbers and seeds, compiled once and computed in segments."""

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm import keys
from fedjax_mm.checks import tracing
from fedjax_mm.chunks import vmap_unless_one
from fedjax_mm.preflight import Facts, Run, rehearse, run_of
from fedjax_mm.record import Bundle, Counts, Record, Work, add_counts
from fedjax_mm.round import State
from fedjax_mm.stacks import StackState
from fedjax_mm.sweeps.devices import Layout
from fedjax_mm.sweeps.grid import Grid, Setup
from fedjax_mm.sweeps.until import Watch

_BUFFER_BYTES = 64 * 2**10  # for the records per replica that a segment keeps on the device


class OneOf(NamedTuple):
    """A traced choice among axis values that share a program, passed to `build`.

    Attributes:
      values: the static values that share the program.
      place: the traced index of the replica's value.
    """

    values: tuple[Any, ...]
    place: Int[Array, ""]

    @property
    def number(self) -> Any:
        """The replica's value as a tracer, if the values are numbers."""
        return jnp.asarray(self.values)[self.place]


class Given(NamedTuple):
    """Arguments that are the same in every segment, with random keys as plain arrays.

    Attributes:
      seeds: ``int[replicas]``.
      numbers: values on numeric axes and per seed, ``[replicas]`` each.
      shared: the grid's shared arguments of `build`.
      root: the seed of the root key.
    """

    seeds: Any
    numbers: Any
    shared: Any
    root: Any


class Replica(NamedTuple):
    """State of a run between segments.

    Attributes:
      models: the state of each stack.
      assignment: the assignment's state, or the clock's.
      since: the work since the last record.
      prepared: the result of the grid's `prepare`.
      total: the counts up to the last record, if there is a target.
      watch: the state of the target, if there is one.
      has_ended: whether a record has met the target, if there is one.
    """

    models: tuple[StackState, ...]
    assignment: Any
    since: Work
    prepared: Any
    total: Counts | tuple[()] = ()
    watch: Watch | tuple[()] = ()
    has_ended: Any = ()


class Traced(NamedTuple):
    """Result of tracing a program, before it is compiled.

    Attributes:
      replica: shapes and types of the state of one replica.
      record: shapes and types of one record of one replica.
      facts: the static facts.
    """

    replica: Replica
    record: Record
    facts: Facts


@dataclasses.dataclass(eq=False)
class Program:
    """Runs of a grid that differ only in numbers and seeds, so that they share one compilation.

    Each run is a replica.

    Attributes:
      grid: the grid that the program is a part of.
      label: a description of the structure.
      fixed: the value on each structural axis.
      index: for every axis, and for the seeds, the position of each replica, ``int[replicas]``.
      numbers: the values on numeric axes and per seed, ``[replicas]`` each.
    """

    grid: Grid
    label: str
    fixed: dict[str, Any]
    index: tuple[np.ndarray, ...]
    numbers: dict[str, np.ndarray]

    def __len__(self) -> int:
        """Number of replicas."""
        return len(self.index[-1])

    def some(self, replicas: np.ndarray) -> "Program":
        """Restricts the program to some of its replicas, without tracing it again."""
        index = tuple(places[replicas] for places in self.index)
        numbers = {name: x[replicas] for name, x in self.numbers.items()}
        fewer = dataclasses.replace(self, index=index, numbers=numbers)
        fewer.__dict__["traced"] = self.traced
        return fewer

    def arguments(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of `build` for the axes and the per-seed numbers."""
        shared = {name: OneOf(self.fixed[name], numbers[name]) for name in self.grid.together}
        return {**self.fixed, **numbers, **shared}

    @tracing("a sweep's prepare")
    def prepare(self, rng_key: PRNGKeyArray, numbers: Any, shared: Any) -> Any:
        """Computes `prepared` for `build`, once per replica, before its first round."""
        if self.grid.prepare is None:
            return ()
        return self.grid.prepare(rng_key, **self.arguments(numbers), **shared)

    @tracing("a sweep's build")
    def setup(self, numbers: Any, shared: Any, prepared: Any) -> Setup:
        """Builds the `Setup` of one replica."""
        return self.grid.setup(prepared, **self.arguments(numbers), **shared)

    def _run(
        self, numbers: Any, shared: Any, prepared: Any, client_axis: str | None = None
    ) -> tuple[Run, Setup]:
        """Builds the run of one replica, and returns it with its setup."""
        # Rebuild in each branch, because a tracer made in one branch of `lax.cond` must not leak
        # into another.
        setup = self.setup(numbers, shared, prepared)
        return run_of(*setup[:4], self.grid.client_map, client_axis), setup

    def start(self, rng_key: PRNGKeyArray, numbers: Any, shared: Any) -> Replica:
        """State of one replica before round 1."""
        prepared = self.prepare(rng_key, numbers, shared)
        return self._watched(self._start(rng_key, numbers, shared, prepared), self.traced.record)

    def _start(self, rng_key: PRNGKeyArray, numbers: Any, shared: Any, prepared: Any) -> Replica:
        run, _ = self._run(numbers, shared, prepared)
        state = run.start(rng_key)
        return Replica(state.models, state.assignment, run.no_work(), prepared)

    def _watched(self, replica: Replica, record: Record) -> Replica:
        """Adds the state of the target, if there is one, for records of this shape."""
        until = self.grid.until
        if until is None:
            return replica
        until.check_metric(record.metrics, Counts._fields)
        watch = jax.tree.map(jnp.asarray, until.start(record.metrics))
        has_ended = jnp.zeros((), bool)
        return replica._replace(total=replica.since.counts, watch=watch, has_ended=has_ended)

    def advance(
        self,
        client_axis: str | None,
        rng_key: PRNGKeyArray,
        numbers: Any,
        shared: Any,
        replica: Replica,
        round: Int[Array, ""],
    ) -> Replica:
        """Computes one more round of one replica."""
        run, _ = self._run(numbers, shared, replica.prepared, client_axis)
        # The key and the round are arguments of a segment, not a part of the state.
        state, done = run.rounds(State(rng_key, round, replica.models, replica.assignment), 1)
        models, since = state.models, add_counts(replica.since, done)
        if self.grid.keep is not None and self.grid.until is not None:
            # A replica that has met the target keeps its models while other replicas continue.
            stay = partial(jnp.where, replica.has_ended)
            models = jax.tree.map(stay, replica.models, models)
        return replica._replace(models=models, assignment=state.assignment, since=since)

    def measure(
        self,
        rng_key: PRNGKeyArray,
        numbers: Any,
        shared: Any,
        replica: Replica,
        round: Int[Array, ""],
    ) -> Record:
        """Returns the record of one replica."""
        run, setup = self._run(numbers, shared, replica.prepared)
        state = State(rng_key, round, replica.models, replica.assignment)
        measured = run.measure(state, replica.since)
        record = Record(measured.metrics, replica.since.counts, is_finite=measured.is_finite)
        if setup.num_models is None:
            return record
        is_used = jnp.arange(len(record.is_finite)) < setup.num_models

        # All models must meet the target. Unused ones get the first model's values.
        def repeat(x: Array) -> Array:
            return jnp.where(is_used.reshape(-1, *[1] * (x.ndim - 1)), x, x[:1])

        return jax.tree.map(repeat, record)._replace(is_used=is_used)

    def note(self, replica: Replica, record: Record, is_record: Any) -> Replica:
        """Resets the counts after a record, and compares the record with the target."""
        since = jax.tree.map(lambda x: jnp.where(is_record, 0, x), replica.since)
        replica, until = replica._replace(since=since), self.grid.until
        if until is None:
            return replica
        counts = jax.tree.map(lambda new: jnp.where(is_record, new, 0), record.counts)
        total = add_counts(replica.total, counts)
        watch, is_met = until.after(replica.watch, record.metrics | total._asdict())
        watch = jax.tree.map(partial(jnp.where, is_record), watch, replica.watch)
        has_ended = replica.has_ended | (is_record & is_met)
        return replica._replace(total=total, watch=watch, has_ended=has_ended)

    @cached_property
    def traced(self) -> Traced:
        """Shapes and facts of one replica's initial state and first record, without compilation.

        Raises:
          ValueError: if the grid's target is not a recorded metric, or arrays are too large.
        """

        def first_record(
            rng_key: Any, numbers: Any, round: Any, shared: Any, prepared: Any
        ) -> Traced:
            run, _ = self._run(numbers, shared, prepared)
            facts = rehearse(run, rng_key, round)
            replica = self._start(rng_key, numbers, shared, prepared)
            record = self.measure(rng_key, numbers, shared, replica, round)
            return Traced(self._watched(replica, record), record, facts)

        # Shapes alone: nothing is computed or compiled, even for large data.
        key = jax.eval_shape(lambda: jax.random.key(0))
        numbers = {name: x[0] for name, x in self.numbers.items()}
        shared = self.grid.shared
        try:
            prepared = jax.eval_shape(self.prepare, key, numbers, shared)  # once for all uses below
            self._check_ends(numbers, prepared)
            traced: Traced = jax.eval_shape(
                first_record, key, numbers, np.int32(0), shared, prepared
            )
        except OverflowError as error:
            raise ValueError(
                f"{self.label}: all models together have more numbers than 32 bits can count; take "
                "fewer clients or models, or smaller ones"
            ) from error
        return traced

    def _check_ends(self, numbers: Mapping[str, Any], prepared: Any) -> None:
        """Builds the points with all smallest and all largest values, for factories to check."""
        # Factories can check concrete numbers only.
        axes = [name for name in self.grid.axes if self.grid.is_numeric(name)]

        def build(end: Any, numbers: Any, shared: Any, prepared: Any) -> Any:
            known = {name: float(end(self.grid.axes[name])) for name in axes}
            self._run(numbers | known, shared, prepared)

        for end in (min, max) if axes else ():
            jax.eval_shape(partial(build, end), numbers, self.grid.shared, prepared)

    @property
    def num_models(self) -> int:
        """M, the number of models."""
        return len(self.traced.record.counts.client_updates)

    @property
    def records_kept(self) -> int:
        """The maximum number of records per segment."""
        return max(1, min(self.grid.num_records, _BUFFER_BYTES // num_bytes(self.traced.record)))

    @property
    def rounds_at_once(self) -> int:
        """The number of rounds after which a segment may end."""
        # End anywhere on CPUs. An accelerator waits for the host whenever only the device knows the
        # length of a loop, so rounds are computed several at a time.
        if jax.default_backend() == "cpu":
            return 1
        common = math.gcd(self.grid.num_rounds, self.grid.record_every)
        return max(number for number in range(1, 9) if common % number == 0)

    def inputs(
        self, where: Layout, replicas: np.ndarray, state: Replica | None = None
    ) -> tuple[Given, Any, Replica]:
        """Returns the arguments of `segment` for some replicas, on their devices, with 0 rounds.

        Args:
          where: the devices.
          replicas: the indices of the replicas.
          state: the replicas' state; defaults to zeros, for the first segment.
        """
        state = self.no_replica(len(replicas)) if state is None else state
        # A seed's draws depend on its dtype. Use int32 even with x64.
        seeds = (self.grid.first_seed + self.index[-1][replicas]).astype(np.int32)
        numbers = {name: x[replicas] for name, x in self.numbers.items()}
        seeds, numbers, state = where.put((seeds, numbers, state), 0)
        shared, root = where.put((without_keys(self.grid.shared), np.uint32(self.grid.seed)), None)
        rounds = where.put((np.int32(0), np.int32(0)), None)
        return Given(seeds, numbers, shared, root), rounds, state

    def no_replica(self, size: int) -> Replica:
        """Allocates the state of `size` replicas, filled with zeros."""
        plain = jax.eval_shape(without_keys, self.traced.replica)
        empty: Replica = jax.tree.map(lambda x: np.zeros((size, *x.shape), x.dtype), plain)
        return empty

    def segment(
        self, client_axis: str | None, given: Given, rounds: tuple[Array, Array], replica: Replica
    ) -> tuple[Replica, Record]:
        """Computes the next rounds of some replicas, as one compiled program.

        Args:
          client_axis: see `simulate`.
          given: the arguments of the replicas.
          rounds: the number of rounds before the segment and within it.
          replica: the state of the replicas, with keys as plain arrays; ignored before the first
            round.

        Returns:
          The new state and the new records ``[1 + kept, replicas, models]``. In the first segment,
          the record of the initial state comes first. Once all replicas have met the target, no
          more rounds are computed and their records are zeros.
        """
        (done, count), every, size = rounds, self.grid.record_every, len(given.seeds)
        # Keys depend only on the seed's number, not on the replica's batch or device.
        rng_keys = keys.seed_keys(given.root, given.seeds)
        shared = with_keys(given.shared, self.grid.shared)
        last, first = done + count, jnp.where(done == 0, 0, done // every + 1)

        def each(function: Any, *states: Replica, round: tuple[Any, ...] = ()) -> Any:
            def one(rng_key: Any, numbers: Any, *state: Replica) -> Any:
                return function(rng_key, numbers, shared, *state, *round)

            return vmap_unless_one(size, one)(rng_keys, given.numbers, *states)

        def one_round(now: tuple[Any, Replica]) -> tuple[Any, Replica]:
            so_far, replica = now
            return so_far + 1, each(partial(self.advance, client_axis), replica, round=(so_far,))

        def some_rounds(now: tuple[Any, Replica]) -> tuple[Any, Replica]:
            if self.rounds_at_once == 1:
                return one_round(now)
            return lax.fori_loop(0, self.rounds_at_once, lambda _, now: one_round(now), now)

        def goes_on(now: tuple[Any, Replica, Any]) -> Any:
            is_left = (now[0] - 1) * every < last
            return is_left if self.grid.until is None else is_left & ~jnp.all(now[1].has_ended)

        def one_record(now: tuple[Any, Replica, Any]) -> tuple[Any, Replica, Any]:
            number, replica, records = now
            stop = jnp.minimum(number * every, last)
            # Record the initial state here, after 0 rounds, because a separate record would be
            # compiled a second time.
            start = jnp.maximum((number - 1) * every, done), replica
            _, replica = lax.while_loop(lambda now: now[0] < stop, some_rounds, start)
            is_record = stop == number * every
            record = lax.cond(
                is_record, lambda: each(self.measure, replica, round=(stop,)), lambda: nothing
            )
            # `records.at[place].set` would be a scatter, which compiles longer.
            put = partial(lax.dynamic_update_index_in_dim, index=number - first, axis=0)
            records = jax.tree.map(put, records, Bundle.of(record))
            return number + 1, self.note(replica, record, is_record), records

        nothing = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), self.traced.record)
        kept = 1 + self.records_kept
        records = jax.tree.map(
            lambda x: jnp.zeros((kept, *x.shape), x.dtype), jax.eval_shape(Bundle.of, nothing)
        )
        replica = with_keys(replica, self.traced.replica)
        # Start in a branch of this program. A separate one would be compiled as well.
        replica = lax.cond(done == 0, lambda: each(self.start), lambda: replica)
        # `lax.fori_loop` with a traced bound would become a `while_loop` anyway.
        _, replica, records = lax.while_loop(goes_on, one_record, (first, replica, records))
        return without_keys(replica), records.records()


def num_bytes(tree: Any) -> int:
    """Size in bytes of arrays, or of arrays with the given shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def without_keys(tree: Any) -> Any:
    """Replaces random keys with plain arrays, which can be saved."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def with_keys(tree: Any, like: Any) -> Any:
    """Inverts `without_keys`."""
    return jax.tree.map(
        lambda x, shape: jax.random.wrap_key_data(x) if _is_key(shape) else x, tree, like
    )


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
