"""Programs: runs that differ only in numbers and seeds, compiled once and computed in segments."""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm.asynchrony.dispatch import Dispatch
from fedjax_mm.base import Algorithm, Assignment, ClientState, Cohort, Params, Task, keys
from fedjax_mm.base.calls import in_short
from fedjax_mm.base.chunks import ClientMap
from fedjax_mm.base.programs import Memory
from fedjax_mm.checks.values import check_alike, tracing
from fedjax_mm.simulator.preflight import Facts, Run, reads_examples, rehearse, run_of
from fedjax_mm.simulator.record import Bundle, Counts, Record, Work, add_counts
from fedjax_mm.simulator.round import Rounds, State, look, stacks_at
from fedjax_mm.simulator.simulate import init
from fedjax_mm.simulator.stacks import StackState, each_params, with_clients
from fedjax_mm.sweeps.devices import CLIENTS, Clients, Layout
from fedjax_mm.sweeps.dividing import Division, divide, over_axis, stores_of, whole
from fedjax_mm.sweeps.grid import Grid, Setup
from fedjax_mm.sweeps.stacking import (
    Leaf,
    Stacked,
    split_setup,
    stacked,
    with_keys,
    without_keys,
)
from fedjax_mm.sweeps.until import Watch

_traced = Memory(256)
_WHOLE = whole("")
_BUFFER_BYTES = 64 * 2**10  # for the records per replica that a segment keeps on the device


class Given(NamedTuple):
    """Arguments that are the same in every segment, with random keys as plain arrays.

    Attributes:
      root: the seed of the root key.
      values: for each leaf, the value that all runs share, the different values, stacked, or () if
        runs differ in a number.
      own: for each leaf, the runs' numbers, or the places of their values in `values`,
        ``[outer or 1, inner or 1]``; () if all runs share the value.
    """

    root: Any
    values: list[Any]
    own: list[Any]


class Replica(NamedTuple):
    """State of a run between segments.

    Attributes:
      models: the state of each stack.
      assignment: the assignment's state, or the clock's.
      since: the work since the last record.
      prepared: the numbers and arrays that the setup's `prepare` has made.
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

    def at(self, rng_key: PRNGKeyArray, round: Int[Array, ""]) -> State:
        """State of the run after a round."""
        return State(rng_key, round, self.models, self.assignment)


class Chosen(NamedTuple):
    """The cohort of a round, and the assignment's state after its choice."""

    cohort: Cohort
    own: Any


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


class _Prepared(NamedTuple):
    """Result of a setup's `prepare`.

    Attributes:
      new: the numbers and arrays that it has made.
      rebuild: makes the changed setup from the leaves of the first one and from new numbers.
    """

    new: Sequence[Any]
    rebuild: Callable[[Sequence[Any], Sequence[Any]], Setup]


class Block(NamedTuple):
    """The replicas of a batch: all of some points and seeds.

    Attributes:
      points: the number of points.
      seeds: the number of seeds.
      outer: the axis that is split over devices, 0 for the points and 1 for the seeds.
      is_flat: whether each replica is a point of its own; see `Program.flat`.
      chunk_size: the number of clients computed at once; None means that of the grid's
        `client_map`.
    """

    points: int
    seeds: int
    outer: int
    is_flat: bool = False
    chunk_size: int | None = None

    @property
    def words(self) -> str:
        """Size of a batch."""
        runs = f"{self.size} run{'s'[: self.size > 1]}"
        return runs if self.chunk_size is None else f"{runs} with {self.chunk_size} clients at once"

    @property
    def sizes(self) -> tuple[int, int]:
        """The sizes of the outer and the inner axis."""
        return (self.points, self.seeds) if self.outer == 0 else (self.seeds, self.points)

    @property
    def size(self) -> int:
        """The number of replicas."""
        return self.points * self.seeds

    def share(self, where: Layout) -> "Block":
        """The points and seeds of one device."""
        if where.axis == "clients":
            return self
        points, seeds = self.points, self.seeds
        if self.outer == 0:
            return self._replace(points=points // where.mesh.size)
        return self._replace(seeds=seeds // where.mesh.size)


@dataclasses.dataclass(eq=False)
class Program:
    """Runs of a grid that differ only in numbers and arrays, so that they share one compilation.

    Each run is a replica. What depends on the point or on the seed alone is computed once for all
    seeds, or points, of a batch.

    Attributes:
      grid: the grid that the program is a part of.
      stacked: the runs, and the leaves of their setups; the seed's number comes first.
      label: a description of the structure.
      client_map: how local trainings are computed.
      in_files: whether the states of clients are in files, see `stepwise.py`. The state of a
        replica then has only their initial value, as if there were one client.
      division: the examples that devices share out.
    """

    grid: Grid
    stacked: Stacked
    label: str
    client_map: ClientMap
    in_files: bool = False
    division: Division = _WHOLE

    __repr__ = in_short

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of points and of seeds."""
        return self.stacked.runs[0].shape

    @cached_property
    def index(self) -> tuple[np.ndarray, ...]:
        """For every axis, and for the seeds, the position of each replica, ``int[replicas]``."""
        points, seeds = (each.ravel() for each in self.stacked.runs)
        return *self.grid.points[points].T, seeds

    def __len__(self) -> int:
        """Number of replicas."""
        return math.prod(self.shape)

    def some(self, replicas: np.ndarray) -> "Program":
        """Restricts the program to some of its replicas, without tracing it again."""
        points, seeds = np.unravel_index(replicas, self.shape)
        rows = np.unique(points)
        if len(rows) * self.shape[1] == len(replicas):  # all seeds of some points
            return self._at(lambda x: x if len(x) == 1 else x[rows])
        return self._at(lambda x: np.broadcast_to(x, self.shape)[points, seeds][:, None])

    @cached_property
    def flat(self) -> "Program":
        """A program of the same runs, with a point for each replica."""
        return self._at(lambda x: np.broadcast_to(x, self.shape).reshape(-1, 1))

    def _at(self, change: Callable[[np.ndarray], np.ndarray]) -> "Program":
        """Changes the runs and the places of their values."""
        leaves = [
            leaf if leaf.place is None else leaf._replace(place=change(leaf.place))
            for leaf in self.stacked.leaves
        ]
        points, seeds = map(change, self.stacked.runs)
        return self._with(stacked=self.stacked._replace(leaves=leaves, runs=(points, seeds)))

    def _with(self, **changes: Any) -> "Program":
        """Changes fields that do not affect shapes, without tracing again."""
        made = dataclasses.replace(self, **changes)
        made.__dict__.update(traced=self.traced, _prepared=self._prepared)
        return made

    def lasting(self, num_rounds: int) -> "Program":
        """The program of runs with another number of rounds."""
        return self._with(grid=dataclasses.replace(self.grid, num_rounds=num_rounds))

    @cached_property
    def digest(self) -> str:
        """A digest of the numbers and arrays of all runs."""
        return hashlib.sha256("".join(x.digest for x in self.stacked.leaves).encode()).hexdigest()

    def of(self, block: Block) -> "Program":
        """The program to which a block refers."""
        program = self.flat if block.is_flat and self.shape[1] > 1 else self
        size = block.chunk_size
        return program if size is None else program._with(client_map=size)

    def _prepare(self, rng_key: PRNGKeyArray, leaves: Sequence[Any]) -> _Prepared:
        """Calls the `prepare` of a replica's setup."""
        make = self.stacked.rebuild
        with tracing("a point of a sweep"):
            setup = make(leaves)
        if setup.prepare is None:
            return _Prepared([], lambda leaves, _: make(leaves))
        found, rebuild = split_setup(setup.prepared(rng_key), traced=True)
        before = {id(leaf): number for number, leaf in enumerate(leaves)}
        places = [before.get(id(leaf)) for leaf in found.leaves]

        def remade(leaves: Sequence[Any], new: Sequence[Any]) -> Setup:
            each = iter(new)
            return rebuild([next(each) if place is None else leaves[place] for place in places])

        each = zip(found.leaves, places, strict=True)
        new = [jnp.asarray(x) for x, place in each if place is None]
        return _Prepared(new, remade)

    @cached_property
    def _prepared(self) -> _Prepared:
        """The shapes that `_prepare` returns, and its function."""
        key = ("prepared", self.key)
        return _traced.get(key) or _traced.put(key, self._trace_preparation())

    def _trace_preparation(self) -> _Prepared:
        found = list[_Prepared]()

        def prepare(rng_key: PRNGKeyArray, leaves: Sequence[Any]) -> Sequence[Any]:
            found.append(self._prepare(rng_key, leaves))
            return found[0].new

        shapes = jax.eval_shape(prepare, *self._shapes)
        return found[0]._replace(new=shapes)

    def _run(
        self, leaves: Sequence[Any], new: Sequence[Any], client_axis: str | None = None
    ) -> tuple[Run, Setup]:
        """Makes the run of one replica, and returns it with its setup."""
        # Make it in each branch, because a tracer made in one branch of `lax.cond` must not leak
        # into another.
        setup = self._prepared.rebuild(leaves, new)
        if client_axis is not None and self.division.examples:
            setup = setup._replace(tasks=over_axis(setup.tasks, client_axis))
        run = run_of(*setup[:4], self.client_map, client_axis)
        if self.in_files and isinstance(run, Rounds):
            run = run.with_homes(jnp.zeros(0, jnp.int32))
        return run, setup

    def start(
        self, client_axis: str | None, rng_key: PRNGKeyArray, leaves: Sequence[Any]
    ) -> Replica:
        """State of one replica before round 1."""
        new = self._prepare(rng_key, leaves).new
        replica = self._start(rng_key, leaves, new, client_axis)
        return self._watched(replica, self.traced.record)

    def _start(
        self,
        rng_key: PRNGKeyArray,
        leaves: Sequence[Any],
        new: Sequence[Any],
        client_axis: str | None = None,
    ) -> Replica:
        run, _ = self._run(leaves, new, client_axis)
        state = run.start(rng_key)
        return Replica(state.models, state.assignment, run.no_work(), new)

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
        leaves: Sequence[Any],
        replica: Replica,
        round: Int[Array, ""],
    ) -> Replica:
        """Computes one more round of one replica."""
        run, _ = self._run(leaves, replica.prepared, client_axis)
        # The key and the round are arguments of a segment, not a part of the state.
        return self.after(replica, *run.rounds(replica.at(rng_key, round), 1))

    def after(self, replica: Replica, state: State, done: Work) -> Replica:
        """State of one replica after a round, given the one before it."""
        models, since = state.models, add_counts(replica.since, done)
        if self.grid.keep is not None and self.grid.until is not None:
            # A replica that has met the target keeps its models while other replicas continue.
            stay = partial(jnp.where, replica.has_ended)
            models = jax.tree.map(stay, replica.models, models)
        return replica._replace(models=models, assignment=state.assignment, since=since)

    def choose(
        self,
        rng_key: PRNGKeyArray,
        leaves: Sequence[Any],
        replica: Replica,
        round: Int[Array, ""],
    ) -> Chosen:
        """Chooses the next cohort of one replica whose client states are in files."""
        run: Any
        run, _ = self._run(leaves, replica.prepared)
        state, number = replica.at(rng_key, round), round + 1
        stacks = stacks_at(run.stacks, number)
        asked = look(stacks, rng_key, round, state.models, run.options)
        assign_key = keys.assignment_key(keys.round_key(rng_key, number))
        return Chosen(*run.assignment.assign(assign_key, number, state.assignment, asked))

    @cached_property
    def chosen(self) -> Chosen:
        """Shapes of the choice of one replica."""
        state = self.traced.replica
        chosen: Chosen = jax.eval_shape(self.choose, *self._shapes, state, np.int32(0))
        return chosen

    def train(
        self,
        rng_key: PRNGKeyArray,
        leaves: Sequence[Any],
        replica: Replica,
        chosen: Chosen,
        states: Sequence[ClientState],
        homes: Int[Array, " slots"],
        round: Int[Array, ""],
    ) -> tuple[Replica, list[ClientState]]:
        """Computes the round of a chosen cohort, and returns the new states of its clients.

        Args:
          rng_key: the key of the seed.
          leaves: the numbers and arrays of the setup.
          replica: the state of the replica.
          chosen: the cohort.
          states: for each stack, the states of the cohort's clients, ``[models, rows, ...]``.
          homes: for each slot, the row of its client.
          round: the number of completed rounds.
        """
        run: Any
        run, _ = self._run(leaves, replica.prepared)
        again = run.assignment._replace(assign=lambda *_: tuple(chosen))
        run = run.with_homes(homes)._replace(assignment=again)
        before = replica.at(rng_key, round)
        fetched = with_clients(replica.models, states)
        state, done = run.rounds(before._replace(models=fetched), 1)
        new = [each.clients for each in state.models]
        models = with_clients(state.models, [each.clients for each in replica.models])
        return self.after(replica, state._replace(models=models), done), new

    def measure(
        self,
        client_axis: str | None,
        rng_key: PRNGKeyArray,
        leaves: Sequence[Any],
        replica: Replica,
        round: Int[Array, ""],
    ) -> Record:
        """The record of one replica."""
        run, setup = self._run(leaves, replica.prepared, client_axis)
        measured = run.measure(replica.at(rng_key, round), replica.since)
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
        key = ("traced", self.key)
        return _traced.get(key) or _traced.put(key, self._trace())

    @cached_property
    def key(self) -> Hashable:
        """A key that is equal for programs that are traced and compiled alike."""
        grid, leaves = self.grid, self.stacked.leaves
        return (
            *(self.stacked.structure, grid.num_rounds, grid.record_every, self.client_map),
            *(grid.until, grid.keep, self.in_files, tuple(leaf.kind for leaf in leaves)),
        )

    def _trace(self) -> Traced:
        def first_record(rng_key: Any, leaves: Any, round: Any, new: Any) -> Traced:
            run, _ = self._run(leaves, new)
            facts = rehearse(run, rng_key, round)
            replica = self._start(rng_key, leaves, new)
            record = self.measure(None, rng_key, leaves, replica, round)
            return Traced(self._watched(replica, record), record, facts)

        # Trace only shapes, so that nothing is computed or compiled, even for large data.
        try:
            new = self._prepared.new
            traced: Traced = jax.eval_shape(first_record, *self._shapes, np.int32(0), new)
        except OverflowError as error:
            raise ValueError(
                f"{self.label}: all models together have more numbers than 32 bits can count; take "
                "fewer clients or models, or smaller ones"
            ) from error
        return traced

    @cached_property
    def _shapes(self) -> tuple[Any, list[Any]]:
        """Shapes and types of the key and the leaves of one replica."""

        def one(leaf: Leaf) -> Any:
            if leaf.place is None:
                return leaf.value
            return jax.ShapeDtypeStruct(leaf.value.shape[1:], leaf.value.dtype)

        key = jax.eval_shape(lambda: jax.random.key(0))
        return key, [one(leaf) for leaf in self.stacked.leaves[1:]]

    @property
    def num_clients(self) -> int:
        """N, the number of clients."""
        return self.traced.facts.num_clients

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

    def replicas(self, block: Block, batch: int) -> np.ndarray:
        """Indices of a batch's replicas, padded with the last points and seeds."""
        points, seeds = self.shape
        across = -(-seeds // block.seeds)
        first = batch // across * block.points, batch % across * block.seeds
        mine = np.minimum(first[0] + np.arange(block.points), points - 1)
        theirs = np.minimum(first[1] + np.arange(block.seeds), seeds - 1)
        places = np.ravel_multi_index(np.ix_(mine, theirs), self.shape)
        return (places if block.outer == 0 else places.T).ravel()

    def num_batches(self, block: Block) -> int:
        """The number of batches into which the replicas are split."""
        points, seeds = self.shape
        return -(-points // block.points) * -(-seeds // block.seeds)

    @cached_property
    def _values(self) -> list[Any]:
        """The values of all leaves that `segment` receives."""
        new = self.division.examples | self.division.offsets
        return [
            () if x.is_number else new.get(place, without_keys(x.value))
            for place, x in enumerate(self.stacked.leaves)
        ]

    def divided(self, where: Layout) -> "Program":
        """The program with examples that the devices of a client axis share out, if possible."""
        if where.client_axis is None or where.mesh.size == 1:
            return self
        found = list[Any]()

        def ask(rng_key: PRNGKeyArray, leaves: Sequence[Any], round: Any) -> None:
            stores = stores_of(self.stacked.rebuild(leaves), [None, *leaves])
            found.append(stores)
            if not isinstance(stores, str):
                found.append(reads_examples(self._run(leaves, [])[0], rng_key, round))

        jax.eval_shape(ask, *self._shapes, np.int32(0))
        match found:
            case [str() as why]:
                return self._with(division=whole(why))
            case [_, True]:
                why = "a function of all clients, such as the server's, reads them"
                return self._with(division=whole(why))
        return self._with(division=divide(self.stacked.leaves, found[0], where.mesh.size))

    @property
    def undivided(self) -> "Program":
        """The program with all examples on every device."""
        return self._with(division=_WHOLE)

    def in_axes(self, block: Block) -> Given:
        """The axis of every argument in `Given` that is split over devices, or None."""
        leaves = self.stacked.leaves
        own = [None if self._is_alike(leaf, block.outer) else 0 for leaf in leaves]
        values: list[Any] = [None] * len(own)
        for place in self.division.examples:
            values[place] = Clients(0 if leaves[place].place is None else 1)
        return Given(None, values, own)

    def _is_alike(self, leaf: Leaf, axis: int) -> bool:
        """Whether a leaf is equal for all points, or for all seeds."""
        return leaf.place is None or leaf.place.shape[axis] == 1

    def inputs(
        self, where: Layout, block: Block, batch: int, state: Replica | None = None
    ) -> tuple[Given, Any, Replica]:
        """The arguments of `segment` for a batch, on their devices, with 0 rounds.

        Args:
          where: the devices.
          block: the points and seeds that are computed at once.
          batch: the number of the batch.
          state: the replicas' state; defaults to zeros, for the first segment.
        """
        replicas = self.replicas(block, batch)
        points, seeds = (
            each.reshape(block.sizes) for each in np.unravel_index(replicas, self.shape)
        )

        def of_block(leaf: Leaf) -> Any:
            if leaf.place is None:
                return ()
            places = np.broadcast_to(leaf.place, self.shape)[points, seeds]
            for axis, across in enumerate((block.outer, 1 - block.outer)):
                places = places.take([0], axis) if self._is_alike(leaf, across) else places
            return leaf.value[places] if leaf.is_number else places

        leaves = self.stacked.leaves
        own = [of_block(leaf) for leaf in leaves]
        axes = self.in_axes(block)
        own = [where.put(each, axis) for each, axis in zip(own, axes.own, strict=True)]
        root = where.put(np.uint32(self.grid.seed), None)
        pairs = zip(self._values, axes.values, strict=True)
        values = [where.put(each, axis) for each, axis in pairs]
        state = self.no_replica(len(replicas)) if state is None else state
        state = where.put(state, self.state_axes)
        rounds = where.put((np.int32(0), np.int32(0)), None)
        return Given(root, values, own), rounds, state

    @property
    def state_axes(self) -> Replica:
        """The axes of a state that are split over devices, as in `Layout.over`."""
        return self._by_axis(0, CLIENTS)

    def _by_axis(self, others: Any, clients: Any) -> Replica:
        """A prefix of the state's structure that marks the clients' states."""
        models = [
            StackState(others, others, clients, each.models) for each in self.traced.replica.models
        ]
        return Replica(tuple(models), *[others] * (len(Replica._fields) - 1))

    @cached_property
    def client_bytes(self) -> int:
        """The bytes of the states of all clients of one replica."""
        return num_bytes([each.clients for each in self.traced.replica.models])

    def data_bytes(self, where: Layout) -> tuple[int, float]:
        """The bytes of the data, and of those on one device."""
        own, new = self.undivided._values, self.division.examples
        plain = num_bytes([x for x in own if not isinstance(x, float)])
        share = num_bytes(new) / where.mesh.size
        return plain, plain - num_bytes([own[place] for place in new]) + share

    def state_bytes(self, where: Layout) -> int:
        """The bytes of one replica's state on one device, or on all CPU devices together."""
        whole = num_bytes(self.traced.replica)
        if where.is_cpu or where.client_axis is None:
            return whole
        return whole - self.client_bytes + -(-self.client_bytes // where.mesh.size)

    def fetch(self, where: Layout, replica: Any) -> Replica:
        """Fetches the state of a batch, as one device would have it, to the first process."""
        plain = jax.eval_shape(without_keys, self.traced.replica)
        whole: Replica = jax.tree.map(
            lambda x, like: x[tuple(map(slice, (len(x), *like.shape)))],
            where.fetch(replica, self.state_axes),
            plain,
        )
        return whole

    def no_replica(self, size: int) -> Replica:
        """The state of `size` replicas, filled with zeros, which take no memory on the host."""
        plain = jax.eval_shape(without_keys, self.traced.replica)

        def zeros(x: Any) -> np.ndarray:
            return np.broadcast_to(np.zeros((), x.dtype), (size, *x.shape))

        empty: Replica = jax.tree.map(zeros, plain)
        return empty

    def segment(
        self,
        client_axis: str | None,
        block: Block,
        given: Given,
        rounds: tuple[Array, Array],
        replica: Replica,
    ) -> tuple[Replica, Record]:
        """Computes the next rounds of some replicas, as one compiled program.

        Args:
          client_axis: see `simulate`.
          block: the points and seeds of one device.
          given: the arguments of the replicas.
          rounds: the number of rounds before the segment and within it.
          replica: the state of the replicas, with keys as plain arrays; ignored before the first
            round.

        Returns:
          The new state and the new records ``[1 + kept, replicas, models]``. In the first segment,
          the record of the initial state comes first. Once all replicas have met the target, no
          more rounds are computed and their records are zeros.
        """
        (done, count), every, size = rounds, self.grid.record_every, block.size
        last, first = done + count, jnp.where(done == 0, 0, done // every + 1)

        each = partial(self.each, given, block)

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
            measure = partial(self.measure, client_axis)
            record = lax.cond(
                is_record, lambda: each(measure, replica, round=(stop,)), lambda: nothing
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
        start = partial(self.start, client_axis)
        replica = lax.cond(done == 0, lambda: each(start), lambda: replica)
        # `lax.fori_loop` with a traced bound would become a `while_loop` anyway.
        _, replica, records = lax.while_loop(goes_on, one_record, (first, replica, records))
        return without_keys(replica), records.records()

    def each(
        self,
        given: Given,
        block: Block,
        function: Any,
        *states: Any,
        round: tuple[Any, ...] = (),
    ) -> Any:
        """Maps ``function(rng_key, leaves, *state, *round)`` over the replicas of a device."""

        def one(own: Any, *state: Any) -> Any:
            number, *leaves = self._leaves(given.values, own)
            # Keys depend only on the seed's number, not on the replica's batch or device.
            rng_key = keys.seed_key(given.root, number)
            return function(rng_key, leaves, *state, *round)

        return self._nested(one, block, given.own, *states)

    def _leaves(self, values: Sequence[Any], own: Sequence[Any]) -> list[Any]:
        """The leaves of one replica, inside the program."""

        def leaf_of(leaf: Leaf, value: Any, own: Any) -> Any:
            if leaf.is_number:
                return own
            plain = value if leaf.place is None else value[own]
            return with_keys(plain, leaf.value)

        return list(map(leaf_of, self.stacked.leaves, values, own))

    def _nested(self, function: Any, block: Block, own: Sequence[Any], *states: Any) -> Any:
        """Maps a function of leaves and of a state over the replicas of a device.

        Leaves that are equal for all points, or for all seeds, have no axis there, so that nothing
        that depends on them alone is repeated.
        """
        # Leave out axes of length 1 rather than map over them, because `jax.vmap` computes both
        # branches of a `lax.cond`, and XLA turns convolutions with a batch of kernels into loops,
        # even for a batch of one.
        mapped = [axis for axis in (0, 1) if block.sizes[axis] > 1]
        sizes = [block.sizes[axis] for axis in mapped]
        across = (block.outer, 1 - block.outer)
        states = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), states)
        axes = [
            [None if self._is_alike(leaf, across[axis]) else 0 for leaf in self.stacked.leaves]
            for axis in mapped
        ]
        own = [x if isinstance(x, tuple) else x.reshape([n for n in x.shape if n > 1]) for x in own]

        def mapped_over(own: Any, _: Any, *states: Any) -> Any:
            return function(own, *states)

        for in_axes in reversed(axes):
            mapped_over = jax.vmap(mapped_over, (in_axes, 0, *[0] * len(states)))
        # Without a mapped argument, `jax.vmap` does not know the length of an axis.
        number, places = len(sizes), jnp.arange(block.size).reshape(sizes)
        found = mapped_over(own, places, *states)
        return jax.tree.map(
            lambda x: jnp.asarray(x).reshape(block.size, *jnp.shape(x)[number:]), found
        )


def programs_of(grid: Grid, report: Callable[[str], None] = lambda _: None) -> list[Program]:
    """Builds the programs of a grid, one per structure of its setups."""
    found = stacked(grid, report)
    labels = [_label(grid, each) for each in found]
    return [
        Program(
            *(grid, each, label if labels.count(label) == 1 else f"{label} ({number + 1})"),
            grid.client_map,
        )
        for number, (each, label) in enumerate(zip(found, labels, strict=True))
    ]


def _label(grid: Grid, each: Stacked) -> str:
    """A program's label, which omits axes if it covers all their values."""
    words, points = {}, grid.points[each.runs[0].ravel()]
    for (name, values), places in zip(grid.labels.items(), points.T, strict=True):
        mine = np.unique(places)
        if len(mine) < len(values) or (len(values) == 1 and not isinstance(values[0], float)):
            words[name] = " | ".join(str(values[place]) for place in mine)
    algorithm = [words.pop("algorithm")] if "algorithm" in words else []
    return ", ".join(algorithm + [f"{name}={word}" for name, word in words.items()]) or "run"


def num_bytes(tree: Any) -> int:
    """Size in bytes of arrays, or of arrays with the given shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def metric_shapes(programs: Sequence[Program]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Each metric's dtype and its largest shape for one model, over all programs.

    Raises:
      ValueError: if a metric's number of axes differs between programs.
    """
    found: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    for program in programs:
        for name, x in program.traced.record.metrics.items():
            # Use floats for integer and boolean metrics too, because absent models have NaN.
            dtype, shape = np.dtype(x.dtype if x.dtype.kind == "f" else float), x.shape[1:]
            largest, _ = found.get(name, (shape, dtype))
            if len(largest) != len(shape):
                raise ValueError(
                    f"the metric {name!r} has shapes {largest} and {shape} at different points; "
                    "give it two names"
                )
            found[name] = tuple(map(max, largest, shape)), dtype
    return found


def kept_shapes(programs: Sequence[Program]) -> list[Params]:
    """The shapes of every model's final parameters, if they are kept.

    Raises:
      ValueError: if the structure of a model's parameters differs between programs.
    """
    each = [
        jax.eval_shape(each_params, program.traced.replica.models)
        for program in programs
        if program.grid.keep is not None
    ]
    longest: list[Params] = max(each, key=len, default=[])
    for program, shapes in zip(programs, each, strict=False):
        for number, (one, other) in enumerate(zip(longest, shapes, strict=False)):
            words = (
                f"keep is 'params', but those of model {number + 1} differ in {program.label} "
                "from those elsewhere; run these points one by one"
            )
            check_alike(words, one, other, shapes=True)
    return longest


def state_bytes(
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment | Dispatch,
) -> int:
    """The size in bytes of one seed's state, for arguments of `simulate`.

    The state of an asynchronous run consists mostly of model versions, R + M per structure of
    models. Reallocation keeps 8 updates per model. Training a batch of arrivals takes additional
    memory: several times the parameters of the jobs trained together, and one sum per model step
    in the batch, at most R_m / b_m.

    Example:
      >>> from fedjax_mm import fedavg
      >>> from fedjax_mm.asynchrony import fedast
      >>> from fedjax_mm.sweeps import state_bytes
      >>> from fedjax_mm.tasks import quadratic
      >>> dispatch = fedast(24, 2, at_work=12, ratio=3, reallocate=False)
      >>> of_all = state_bytes(quadratic(24, 4, mu=0.1), fedavg(0.1, local_steps=5), dispatch)
      >>> (24 + 2) * 97 * 4, of_all  # versions of 97 numbers; and all
      (10088, 12576)
    """
    return num_bytes(jax.eval_shape(lambda: init(0, tasks, algorithm, assignment)))
