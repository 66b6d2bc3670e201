"""Programs: runs that differ in numbers and seeds only, compiled once and computed in segments.

A segment takes `Given`, which stays, `Carry`, which the segment before it returned, and `Rounds`,
which says how far to go.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm.base import AnalyticTask, Padded, Params
from fedjax_mm.checks import tracing
from fedjax_mm.chunks import chunk_size_of, vmap_unless_one
from fedjax_mm.engine import Engine, State, engine_of
from fedjax_mm.record import (
    Counts,
    MessageSizes,
    Work,
    add_counts,
    measure,
    message_sizes,
    metrics_per_client,
)
from fedjax_mm.stacks import StackState
from fedjax_mm.sweeps.devices import Layout
from fedjax_mm.sweeps.grid import Grid, Setup

_BUFFER_BYTES = 64 * 2**10  # records of one replica that a segment keeps on the device


class OneOf(NamedTuple):
    """One of the values of an axis that share a program, as `build` gets it.

    Attributes:
      values: all of them, which are known while tracing.
      place: the number of the replica's own among them; it is traced.
    """

    values: tuple[Any, ...]
    place: Int[Array, ""]

    @property
    def number(self) -> Any:
        """Returns the replica's own value, of values that are numbers; it is traced."""
        return jnp.asarray(self.values)[self.place]

    @property
    def padded(self) -> Padded:
        """Returns the number, in arrays that have room for the largest."""
        return Padded(max(self.values), self.number)


class Given(NamedTuple):
    """Arguments that are the same in every segment; random keys are plain arrays.

    Attributes:
      seeds: ``int[replicas]``.
      numbers: values on the numeric axes and of the seeds, ``[replicas]`` each.
      shared: the grid's shared arguments of `build`.
      root: the seed of the key that all draws come from.
    """

    seeds: Any
    numbers: Any
    shared: Any
    root: Any


class Rounds(NamedTuple):
    """The rounds of a segment: those that were done before it, and how many it computes."""

    done: Any
    count: Any


class Ending(NamedTuple):
    """Whether a record of a replica met the target, and counts up to its last record."""

    is_met: Any
    total: Counts


class Carry(NamedTuple):
    """State of a replica between two segments.

    Attributes:
      models: the state of each stack.
      assignment: the assignment's state, or the clock's.
      since: work since the last record.
      prepared: the result of the grid's `prepare`.
      ending: None without a target.
    """

    models: tuple[StackState, ...]
    assignment: Any
    since: Work
    prepared: Any
    ending: Ending | None


class Record(NamedTuple):
    """Record of a replica, ``[models]`` each; see `Trace`.

    `is_finite` says whether a model's parameters and its loss are. `is_there` is () unless the
    number of models is padded.
    """

    metrics: dict[str, Any]
    counts: Counts
    is_finite: Any
    is_there: Any = ()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about a program that tracing it shows; static, so that tracing can return them.

    Attributes:
      updates_per_round: the most local trainings of one replica in a round.
      message_sizes: of each model.
      has_closed_form: whether every task brings its own local updates.
      is_synchronous: whether the clients of a round can be shared out.
      per_client: names of the metrics with a number for each client.
      vectorizes: whether a CPU device computes replicas faster side by side. Where local trainings
        differ in length, replicas would wait for the longest; where clients are computed in chunks,
        replicas would share the cache, and slices of data become gathers.
    """

    updates_per_round: int
    message_sizes: MessageSizes
    has_closed_form: bool
    is_synchronous: bool
    per_client: tuple[str, ...]
    vectorizes: bool

    @classmethod
    def of(cls, engine: Engine, state: State) -> "Facts":
        """Returns what an engine and its first state show."""
        updates, stacks = engine.most_updates(state), engine.stacks
        return cls(
            updates_per_round=updates,
            message_sizes=message_sizes(stacks, state.models),
            has_closed_form=all(isinstance(each.task, AnalyticTask) for each in stacks),
            is_synchronous=engine.is_synchronous,
            per_client=metrics_per_client(stacks),
            vectorizes=all(
                stack.has_equal_steps
                and chunk_size_of("auto", stack.task, each.params, updates) is None
                for stack, each in zip(stacks, state.models, strict=True)
            ),
        )


class Traced(NamedTuple):
    """Result of tracing a program, before it is compiled.

    Attributes:
      carry: shapes and types of the carry of one replica.
      record: shapes and types of one record of one replica.
      facts: the rest.
    """

    carry: Carry
    record: Record
    facts: Facts


@dataclasses.dataclass(eq=False)
class Program:
    """Runs of a grid that differ in numbers and seeds only: one compilation.

    Each of these runs is a replica; they are numbered in the order of the grid's axes and seeds.

    Attributes:
      grid: the grid that the program is a part of.
      label: the structure in words.
      fixed: the value on each structural axis.
      index: the place of each replica on every axis and in the seeds, ``int[replicas]`` each.
      numbers: the values on the numeric axes and of the seeds, ``[replicas]`` each.
    """

    grid: Grid
    label: str
    fixed: dict[str, Any]
    index: tuple[np.ndarray, ...]
    numbers: dict[str, np.ndarray]

    def __len__(self) -> int:
        """The number of replicas."""
        return len(self.index[-1])

    def arguments(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what `build` gets by the names of the axes and of the seeds' numbers."""
        shared = {name: OneOf(self.fixed[name], numbers[name]) for name in self.grid.together}
        return {**self.fixed, **numbers, **shared}

    @tracing("a sweep's prepare")
    def prepare(self, rng_key: PRNGKeyArray, numbers: Any, shared: Any) -> Any:
        """Computes once for a replica, before its first round, what `build` gets as `prepared`."""
        if self.grid.prepare is None:
            return ()
        return self.grid.prepare(rng_key, **self.arguments(numbers), **shared)

    @tracing("a sweep's build")
    def setup(self, numbers: Any, shared: Any, prepared: Any) -> Setup:
        """Builds what one replica simulates."""
        return self.grid.setup(prepared, **self.arguments(numbers), **shared)

    def _engine(
        self, numbers: Any, shared: Any, prepared: Any, client_axis: str | None = None
    ) -> tuple[Engine, Params | None]:
        """Returns the engine of what `build` returns, and its initial parameters."""
        # Built wherever it is used: tracers of one branch of `lax.cond` are unknown to others.
        setup = self.setup(numbers, shared, prepared)
        return engine_of(*setup[:3], self.grid.client_map, client_axis), setup.params

    def start(self, rng_key: PRNGKeyArray, numbers: Any, shared: Any) -> Carry:
        """Returns one replica before round 1."""
        return self._start(rng_key, numbers, shared, self.prepare(rng_key, numbers, shared))

    def _start(self, rng_key: PRNGKeyArray, numbers: Any, shared: Any, prepared: Any) -> Carry:
        engine, params = self._engine(numbers, shared, prepared)
        state, no_work = engine.start(rng_key, params), engine.no_work()
        ending = None if self.grid.until is None else Ending(jnp.zeros((), bool), no_work.counts)
        return Carry(state.models, state.assignment, no_work, prepared, ending)

    def advance(
        self,
        client_axis: str | None,
        rng_key: PRNGKeyArray,
        numbers: Any,
        shared: Any,
        carry: Carry,
        round: Int[Array, ""],
    ) -> Carry:
        """Computes one more round of one replica."""
        engine, _ = self._engine(numbers, shared, carry.prepared, client_axis)
        # The key and the round are the same for all that a program does: they are not carried.
        state, done = engine.rounds(State(rng_key, round, carry.models, carry.assignment), 1)
        since = add_counts(carry.since, done)
        if self.grid.keep is not None and carry.ending is not None:
            # Beside others that go on, a replica that has met the target would be trained further.
            stay = partial(jnp.where, carry.ending.is_met)
            state = state._replace(models=jax.tree.map(stay, carry.models, state.models))
        return carry._replace(models=state.models, assignment=state.assignment, since=since)

    def measure(
        self, rng_key: PRNGKeyArray, numbers: Any, shared: Any, carry: Carry, round: Int[Array, ""]
    ) -> Record:
        """Returns the record of one replica."""
        engine, _ = self._engine(numbers, shared, carry.prepared)
        own = engine.metrics(carry.assignment, carry.since)
        measured = measure(engine.stacks, rng_key, round, carry.models, self.grid.client_map, own)
        record = Record(measured.metrics, carry.since.counts, measured.is_finite)
        if engine.num_used is None:
            return record
        is_there = jnp.arange(len(record.is_finite)) < engine.num_used

        # All models have to meet a target: one that is not there repeats what the first one has.
        def repeat(x: Array) -> Array:
            return jnp.where(is_there.reshape(-1, *[1] * (x.ndim - 1)), x, x[:1])

        return jax.tree.map(repeat, record)._replace(is_there=is_there)

    def note(self, carry: Carry, record: Record, is_record: Any) -> Carry:
        """Resets the counts after a record, and compares the record with the target."""
        since = jax.tree.map(lambda x: jnp.where(is_record, 0, x), carry.since)
        carry, ending, until = carry._replace(since=since), carry.ending, self.grid.until
        if ending is None or until is None:
            return carry
        counts = jax.tree.map(lambda new: jnp.where(is_record, new, 0), record.counts)
        total = add_counts(ending.total, counts)
        is_met = is_record & until.is_met(record.metrics | total._asdict())
        return carry._replace(ending=Ending(ending.is_met | is_met, total))

    @cached_property
    def traced(self) -> Traced:
        """Facts from one replica's start and first record, traced but not compiled.

        Raises:
          ValueError: if the grid's target is not recorded, or arrays are too large.
        """

        def first_record(
            rng_key: Any, numbers: Any, round: Any, shared: Any, prepared: Any
        ) -> Traced:
            carry = self._start(rng_key, numbers, shared, prepared)
            engine, _ = self._engine(numbers, shared, prepared)
            facts = Facts.of(engine, State(rng_key, round, carry.models, carry.assignment))
            return Traced(carry, self.measure(rng_key, numbers, shared, carry, round), facts)

        # Shapes alone: nothing is computed or compiled, whatever the size of the data.
        key = jax.eval_shape(lambda: jax.random.key(0))
        numbers = {name: x[0] for name, x in self.numbers.items()}
        shared = self.grid.shared
        try:
            prepared = jax.eval_shape(self.prepare, key, numbers, shared)  # once, for all below
            self._check_ends(numbers, prepared)
            traced: Traced = jax.eval_shape(
                first_record, key, numbers, np.int32(0), shared, prepared
            )
        except OverflowError as error:
            raise ValueError(
                f"{self.label}: all models together have more numbers than 32 bits can count; take "
                "fewer clients or models, or smaller ones"
            ) from error
        if self.grid.until is not None:
            self.grid.until.check_metric(traced.record.metrics, Counts._fields)
        return traced

    def _check_ends(self, numbers: Mapping[str, Any], prepared: Any) -> None:
        """Builds the points of all least and of all largest values, for what factories refuse."""
        # Numbers are traced everywhere else, and factories let traced numbers pass.
        axes = [name for name in self.grid.axes if self.grid.is_numeric(name)]

        def build(end: Any, numbers: Any, shared: Any, prepared: Any) -> Any:
            known = {name: float(end(self.grid.axes[name])) for name in axes}
            self._engine(numbers | known, shared, prepared)

        for end in (min, max) if axes else ():
            jax.eval_shape(partial(build, end), numbers, self.grid.shared, prepared)

    @property
    def num_models(self) -> int:
        """M."""
        return len(self.traced.record.counts.client_updates)

    @property
    def records_kept(self) -> int:
        """The most records that a segment can make."""
        return max(1, min(self.grid.num_records, _BUFFER_BYTES // num_bytes(self.traced.record)))

    def inputs(
        self, where: Layout, replicas: np.ndarray, carry: Carry | None = None
    ) -> tuple[Given, Carry, Rounds]:
        """Returns arguments of `segment` for some replicas, on their devices, and no rounds."""
        carry = self.no_carry(len(replicas)) if carry is None else carry
        # int32 with and without x64, or a seed would mean other draws.
        seeds = (self.grid.first_seed + self.index[-1][replicas]).astype(np.int32)
        numbers = {name: x[replicas] for name, x in self.numbers.items()}
        seeds, numbers, carry = where.put((seeds, numbers, carry), 0)
        root, rounds = np.uint32(self.grid.seed), Rounds(np.int32(0), np.int32(0))
        shared, root, rounds = where.put((without_keys(self.grid.shared), root, rounds), None)
        return Given(seeds, numbers, shared, root), carry, rounds

    def no_carry(self, size: int) -> Carry:
        """Returns zeros in place of so many replicas."""
        plain = jax.eval_shape(without_keys, self.traced.carry)
        empty: Carry = jax.tree.map(lambda x: np.zeros((size, *x.shape), x.dtype), plain)
        return empty

    def segment(
        self, client_axis: str | None, given: Given, carry: Carry, rounds: Rounds
    ) -> tuple[Carry, Record]:
        """Computes some more rounds of a share of the replicas: the compiled program.

        Args:
          client_axis: see `simulate`.
          given: of the replicas.
          carry: of the replicas, with keys as plain arrays; anything before the first round.
          rounds: which rounds to compute.

        Returns:
          The new carry, and the records made, ``[1 + kept, replicas, models]``: first that of the
          start if these are the first rounds. Once all replicas have met the target no more rounds
          are computed, and their records are zeros.
        """
        (done, count), every, size = rounds, self.grid.record_every, len(given.seeds)
        root = jax.random.key(given.root)
        # Keys depend on a seed's number only: a replica draws alike in any batch, on any device.
        keys = jax.vmap(jax.random.fold_in, (None, 0))(root, given.seeds)
        shared = with_keys(given.shared, self.grid.shared)
        last, first = done + count, jnp.where(done == 0, 0, done // every + 1)

        def each(function: Any, *carries: Carry, round: tuple[Any, ...] = ()) -> Any:
            def one(key: Any, numbers: Any, *carry: Carry) -> Any:
                return function(key, numbers, shared, *carry, *round)

            return vmap_unless_one(size, one)(keys, given.numbers, *carries)

        def one_round(now: tuple[Any, Carry]) -> tuple[Any, Carry]:
            so_far, carry = now
            return so_far + 1, each(partial(self.advance, client_axis), carry, round=(so_far,))

        def goes_on(now: tuple[Any, Carry, Record]) -> Any:
            is_left, ending = (now[0] - 1) * every < last, now[1].ending
            return is_left if ending is None else is_left & ~jnp.all(ending.is_met)

        def one_record(now: tuple[Any, Carry, Record]) -> tuple[Any, Carry, Record]:
            number, carry, records = now
            stop = jnp.minimum(number * every, last)
            # The start is a record without rounds before it: apart it would be compiled twice.
            start = jnp.maximum((number - 1) * every, done), carry
            _, carry = lax.while_loop(lambda now: now[0] < stop, one_round, start)
            is_record = stop == number * every
            record = lax.cond(
                is_record, lambda: each(self.measure, carry, round=(stop,)), lambda: nothing
            )
            # `records.at[place].set` would be a scatter, which takes longer to compile.
            put = partial(lax.dynamic_update_index_in_dim, index=number - first, axis=0)
            records = jax.tree.map(put, records, record)
            return number + 1, self.note(carry, record, is_record), records

        kept = (1 + self.records_kept, size)
        records = jax.tree.map(lambda x: jnp.zeros(kept + x.shape, x.dtype), self.traced.record)
        nothing = jax.tree.map(itemgetter(0), records)
        carry = with_keys(carry, self.traced.carry)
        # The start is a branch of the same program: apart it would be compiled by itself.
        carry = lax.cond(done == 0, lambda: each(self.start), lambda: carry)
        # XLA has no other loop: `lax.fori_loop` to a traced bound becomes this one too.
        _, carry, records = lax.while_loop(goes_on, one_record, (first, carry, records))
        return without_keys(carry), records


def num_bytes(tree: Any) -> int:
    """Returns the memory of arrays, or of arrays of given shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def without_keys(tree: Any) -> Any:
    """Returns random keys as plain arrays, which can be saved."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def with_keys(tree: Any, like: Any) -> Any:
    """Inverts `without_keys`."""
    return jax.tree.map(
        lambda x, shape: jax.random.wrap_key_data(x) if _is_key(shape) else x, tree, like
    )


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
