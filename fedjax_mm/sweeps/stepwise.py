"""Programs whose states of clients are in files, computed round by round.

A round is two compiled calls. The first one chooses the cohort. Then the host reads the states of
its clients, the second call trains, and the host writes the new states. Callbacks from inside one
compiled segment took twice the time of small rounds, and would copy the rows.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mm.simulator.record import Record
from fedjax_mm.sweeps.client_files import ClientFiles, Shape
from fedjax_mm.sweeps.devices import Layout
from fedjax_mm.sweeps.program import Block, Chosen, Given, Program, Replica
from fedjax_mm.sweeps.stacking import with_keys, without_keys

_SIZES = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")


class Lowered(NamedTuple):
    """The calls of a program, lowered or compiled."""

    start: Any
    choose: Any
    train: Any
    record: Any

    def as_text(self) -> str:
        """Text of all calls."""
        return "".join(each.as_text() for each in self)


class Stepwise:
    """A program that computes rounds one by one, called like a compiled `Program.segment`.

    Args:
      program: the program, whose client states are in files.
      block: the replicas that are computed at once.
      where: the one device.
    """

    def __init__(self, program: Program, block: Block, where: Layout) -> None:
        """Prepares the calls, without tracing them."""
        self.program, self.block, self.where = program, block, where
        self._calls: Any = None

    @cached_property
    def _lowered(self) -> Lowered:
        program, where, size = self.program, self.where, self.block.size
        given, (zero, _), replica = program.inputs(where, self.block, 0)

        def some(tree: Any) -> Any:
            plain = jax.eval_shape(without_keys, tree)
            return where.put(jax.tree.map(lambda x: np.zeros((size, *x.shape), x.dtype), plain), 0)

        chosen = some(program.chosen)

        def rows(stack: int, width: int) -> Any:
            plain = jax.eval_shape(without_keys, program.traced.replica.models[stack].clients)
            return jax.tree.map(
                lambda x: np.zeros((size, x.shape[0], width, *x.shape[2:]), x.dtype), plain
            )

        states = [rows(stack, shape.width) for stack, shape in self._shapes.items()]
        homes = np.zeros((size, len(chosen.cohort.clients[0])), np.int32)
        states, homes = where.put((states, homes), 0)
        return Lowered(
            jax.jit(self._start).lower(given),
            jax.jit(self._choose).lower(given, zero, replica),
            jax.jit(self._train, donate_argnums=(2, 4)).lower(
                given, zero, replica, chosen, states, homes
            ),
            jax.jit(self._record, donate_argnums=2).lower(given, zero, replica),
        )

    def as_text(self) -> str:
        """Text of the lowered calls."""
        return self._lowered.as_text()

    def compile(self) -> "Stepwise":
        """Compiles the calls."""
        self._calls = Lowered(*(each.compile() for each in self._lowered))
        del self._lowered
        return self

    def memory_analysis(self) -> Any:
        """Memory of the largest call."""
        each = [call.memory_analysis() for call in self._calls]
        if None in each:
            return None
        return max(each, key=lambda found: sum(attrgetter(*_SIZES)(found)))

    @cached_property
    def _shapes(self) -> dict[int, Shape]:
        """Sizes of the states of each stack that has some."""
        cohort, models = self.program.chosen.cohort, self.program.traced.replica.models
        slots, num_clients = len(cohort.clients), self.program.num_clients

        def width(of: tuple[int, ...]) -> int:
            if not cohort.is_known:
                return min(slots, num_clients)
            return min(max(int(np.sum(cohort.models == model)) for model in of), num_clients)

        return {
            stack: Shape(state.models, num_clients, width(state.models))
            for stack, state in enumerate(models)
            if jax.tree.leaves(state.clients)
        }

    def _start(self, given: Given) -> Replica:
        start = partial(self.program.start, None)
        replica: Replica = without_keys(self.program.each(given, self.block, start))
        return replica

    def _choose(self, given: Given, round: Any, replica: Replica) -> Chosen:
        program = self.program
        replica = with_keys(replica, program.traced.replica)
        chosen: Chosen = program.each(given, self.block, program.choose, replica, round=(round,))
        return without_keys(chosen)

    def _train(
        self,
        given: Given,
        round: Any,
        replica: Replica,
        chosen: Chosen,
        states: Sequence[Any],
        homes: Any,
    ) -> tuple[Replica, list[Any]]:
        program, like = self.program, self.program.traced.replica
        replica, chosen = with_keys((replica, chosen), (like, program.chosen))
        states = [
            with_keys(each, like.models[stack].clients)
            for stack, each in zip(self._shapes, states, strict=True)
        ]
        every = [states.pop(0) if i in self._shapes else () for i in range(len(like.models))]
        given_rows = replica, chosen, every, homes
        made = program.each(given, self.block, program.train, *given_rows, round=(round,))
        replica, rows = without_keys(made)
        return replica, [rows[stack] for stack in self._shapes]

    def _record(self, given: Given, round: Any, replica: Replica) -> tuple[Replica, Record]:
        program = self.program
        replica = with_keys(replica, program.traced.replica)
        measure = partial(program.measure, None)
        record = program.each(given, self.block, measure, replica, round=(round,))
        return without_keys(program.note(replica, record, jnp.asarray(True))), record

    def __call__(
        self, files: ClientFiles, given: Given, rounds: tuple[Any, Any], replica: Replica
    ) -> tuple[Replica, Record]:
        """Computes the next rounds, as `Program.segment` does, and gives the new records."""
        (done, count), every, until = map(int, rounds), self.program.grid.record_every, self._until
        records, call, put = list[Record](), self._calls, self.where.put

        def recorded(round: int, replica: Replica) -> Replica:
            replica, record = call.record(given, put(np.int32(round), None), replica)
            records.append(self.where.fetch(record))
            return replica

        if done == 0:
            replica = recorded(0, call.start(given))
        if not files.is_open:
            initial = [replica.models[stack].clients for stack in self._shapes]
            files.open(list(self._shapes.values()), initial)
        for number in range(done, done + count):
            at = put(np.int32(number), None)
            chosen = call.choose(given, at, replica)
            found = files.fetch(self.where.fetch(chosen.cohort))
            rows = put((found.states, found.homes), 0)
            replica, new = call.train(given, at, replica, chosen, *rows)
            files.put(found, new)
            if (number + 1) % every == 0:
                replica = recorded(number + 1, replica)
                if until and np.all(self.where.fetch(replica.has_ended)):
                    break
        missing = (done + count) // every - done // every + (done == 0) - len(records)
        if not records:
            shapes, size = self.program.traced.record, self.block.size
            none = jax.tree.map(lambda x: np.zeros((0, size, *x.shape), x.dtype), shapes)
            return replica, none
        stacked: Record = jax.tree.map(
            lambda *x: np.stack([*x, *[np.zeros_like(x[0])] * missing]), *records
        )
        return replica, stacked

    @property
    def _until(self) -> bool:
        return self.program.grid.until is not None
