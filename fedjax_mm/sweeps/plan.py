"""Plans: a grid's compiled programs, their batches and their memory.

`program.py` groups the points into programs, by the parts that `stacking.py` finds alike.
"""

import dataclasses
import hashlib
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np
import psutil

from fedjax_mm.base import Params
from fedjax_mm.base.calls import in_short
from fedjax_mm.base.programs import Memory
from fedjax_mm.simulator.record import Record, check_dims
from fedjax_mm.sweeps.client_files import ClientFiles
from fedjax_mm.sweeps.devices import Layout, agree, hosts_and_devices, layout
from fedjax_mm.sweeps.errors import InterruptedRunError
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.program import (
    Block,
    Program,
    Replica,
    kept_shapes,
    metric_shapes,
    num_bytes,
    programs_of,
)
from fedjax_mm.sweeps.stepwise import Stepwise
from fedjax_mm.tools.files import prepare_directory
from fedjax_mm.tools.interrupts import noted_signals

_RECORD_BYTES = 3 * 4 + 8 * 8  # for one model's counts, their 64-bit sums, and copies
_PADDING = 1.2  # most work in padding that sharing between points and seeds is worth
_CACHE_BYTES = 512 * 2**10  # for the states of replicas that one CPU device computes at a time

Approve: TypeAlias = Callable[[Program, Callable[[int], str]], None]

_compiled = Memory(64)  # a program takes a few megabytes


class Compiled(NamedTuple):
    """A compiled program.

    Attributes:
      program: the program before compilation.
      block: the points and seeds that are computed at once, on all devices together.
      call: `Program.segment` on all devices.
      num_bytes: the memory for its arguments, results and temporaries, and for a batch's records.
    """

    program: Program
    block: Block
    call: Callable[..., Any]
    num_bytes: float

    @property
    def batch_size(self) -> int:
        """The number of replicas that are computed at once."""
        return self.block.size

    @property
    def num_batches(self) -> int:
        """The number of batches into which the program's replicas are split."""
        return self.program.num_batches(self.block)

    def replicas(self, batch: int) -> np.ndarray:
        """Indices of a batch's replicas, padded with the last points and seeds."""
        return self.program.replicas(self.block, batch)

    def updates_per_round(self, batch: int) -> int:
        """Maximum number of local trainings of a batch per round, without padding."""
        return len(np.unique(self.replicas(batch))) * self.program.traced.facts.updates_per_round

    def cost(self, batch: int) -> float:
        """Mean cost of a local training in a batch."""
        index = [places[self.replicas(batch)] for places in self.program.index]
        return float(np.mean(self.program.grid.costs(index)))

    def label(self, batch: int) -> str:
        """Label of a batch."""
        return self.program.label + (
            f", batch {batch + 1} of {self.num_batches}" if self.num_batches > 1 else ""
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of a sweep, ready to be executed.

    Attributes:
      grid: the runs.
      where: the devices.
      compiled: the programs.
      compile_seconds: the total compile time of all programs; NaN for an outline.
      process_bytes: the memory of this process, including programs, before the first run.
      limit: the memory limit in bytes; on accelerators, per device.
      num_hosts: the number of hosts.
      num_devices: the number of all their devices, whether used or not.
      client_states: the directory with the states of clients; None if they are in memory.
    """

    grid: Grid
    where: Layout
    compiled: list[Compiled]
    compile_seconds: float
    process_bytes: int
    limit: float
    num_hosts: int
    num_devices: int
    client_states: Path | None = None

    __repr__ = in_short

    @property
    def programs(self) -> list[Program]:
        """The programs, compiled or not."""
        return [each.program for each in self.compiled]

    @property
    def is_compiled(self) -> bool:
        """Whether the programs can be called, which is not the case for an outline."""
        return not math.isnan(self.compile_seconds)

    @cached_property
    def batches(self) -> list[tuple[Compiled, int]]:
        """All batches in order."""
        return [(each, batch) for each in self.compiled for batch in range(each.num_batches)]

    @cached_property
    def work(self) -> list[float]:
        """The cost of each batch, its maximum number of local trainings times their mean cost."""
        return [
            self.grid.num_rounds * each.updates_per_round(batch) * each.cost(batch)
            for each, batch in self.batches
        ]

    @property
    def client_updates(self) -> int:
        """The maximum total number of local trainings."""
        return self.grid.num_rounds * sum(each.updates_per_round(b) for each, b in self.batches)

    @property
    def is_split(self) -> bool:
        """Whether a program's runs do not all fit in memory at once."""
        room = self.limit - (self.num_bytes - self.batch_bytes if self.where.is_cpu else 0)
        return any(each.num_bytes * each.num_batches > room for each in self.compiled)

    @property
    def result_bytes(self) -> int:
        """The memory of the labelled result."""
        return _result_bytes(self.grid, self.programs)

    @property
    def batch_bytes(self) -> float:
        """The memory of the largest batch."""
        return max(each.num_bytes for each in self.compiled)

    @property
    def num_bytes(self) -> float:
        """The estimated peak memory, for this process, the largest batch and the result."""
        return self.process_bytes + self.batch_bytes + self.result_bytes

    @property
    def lines(self) -> list[str]:
        """The work and the memory as lines of text."""
        kind = self.where.mesh.devices.flat[0].device_kind
        used = f"{self.where.mesh.size} of {self.num_devices} devices"
        used += f" on {_hosts(self.num_hosts)} ({kind})"
        shared = f"on {used}, which share out the {self.where.axis}"
        number = f"{len(self.compiled)} program{'s'[: len(self.compiled) > 1]}"
        files = self._lines_of_files()
        work = f"{self.client_updates:,} local trainings {shared}"
        if not self.is_compiled:
            return [
                f"{number} to compile; {work}",
                f"memory: at least {_in_gib(self.num_bytes)} = {_in_gib(self.process_bytes)} this "
                f"process + {_in_gib(self.batch_bytes)} states and records of the largest batch + "
                f"{_in_gib(self.result_bytes)} the result; {_in_gib(self.limit)} may be used",
                "a program's own memory is known once it is compiled; batches get smaller if it "
                "does not fit",
                *self._of_devices,
                *files,
            ]
        lines = [
            f"{number}, each compiled once, in {self.compile_seconds:.1f} s; {work}",
            f"memory: {_in_gib(self.num_bytes)} estimated = {_in_gib(self.process_bytes)} this "
            f"process + {_in_gib(self.batch_bytes)} the largest batch + "
            f"{_in_gib(self.result_bytes)} the result; {_in_gib(self.limit)} may be used",
            *self._of_devices,
        ]
        if self.is_split:
            lines.append("all runs of a program at once would not fit: they are split into batches")
        sizes = [each.block.chunk_size for each in self.compiled if each.block.chunk_size]
        if sizes:
            lines.append(f"all clients of a run would not fit: {min(sizes):,} are computed at once")
        return [*lines, *files]

    def _lines_of_files(self) -> list[str]:
        """Size and traffic of the largest batch whose client states are in files."""
        each = [of for of in self.compiled if of.program.in_files]
        if not each:
            return []
        some = max(each, key=lambda of: of.batch_size * states_in_files(of.program, 1).total)
        needed = states_in_files(some.program, some.batch_size)
        return [
            f"states of clients: at most {_in_gib(needed.file)} in {self.client_states}; "
            f"a round of a batch reads {_in_mib(needed.round)} and writes as much"
        ]

    @property
    def _of_devices(self) -> list[str]:
        """Contents of each device's memory, if devices share out the clients."""
        number = self.where.mesh.size
        if self.where.client_axis is None or number == 1:
            return []
        most = max(self.compiled, key=lambda each: each.block.size * each.program.client_bytes)
        whole, words = most.block.size * most.program.client_bytes, "no states of clients"
        if whole:
            words = f"{_in_mib(whole / number)} of {_in_mib(whole)} of the clients' states"
        program = max(self.programs, key=lambda each: each.data_bytes(self.where)[1])
        whole_data, own = program.data_bytes(self.where)
        of_data = f"{_in_mib(own)} of {_in_mib(whole_data)} of the data"
        if not program.division.examples:
            of_data = f"all of the data ({_in_mib(own)})"
            of_data += f", because {program.division.why_not}" * bool(program.division.why_not)
        lines = [f"each device holds {words}, and {of_data}"]
        if whole and any(program.traced.facts.reads_states for program in self.programs):
            lines.append(
                "the server reads the states of all clients, so every round also copies all of "
                "them to each device"
            )
        return lines


def make_plan(
    grid: Grid,
    *,
    split: Literal["replicas", "clients"] | None = None,
    limit: float | None = None,
    blocks: Sequence[Block] | None = None,
    report: Callable[[str], None] = lambda _: None,
    approve: Approve | None = None,
    programs: Sequence[Program] | None = None,
    compiles: bool = True,
    client_states: Path | str | None = None,
) -> Plan:
    """Compiles the programs of a grid, with batch sizes that are fast and fit in memory.

    Args:
      grid: the runs to compute.
      split: the axis to split over devices; see `layout`. None chooses replicas if runs are
        asynchronous or clients have closed forms, because summing sparse updates over devices would
        take longer than computing them.
      limit: the memory limit in bytes; defaults to 60 % of the free memory.
      blocks: the block of each program, to repeat an earlier plan.
      report: called with progress messages.
      approve: called with every program, and with a function that returns the digest of its text
        for a number of rounds, before it is compiled.
      programs: the runs to compute; defaults to all runs of the grid.
      compiles: False makes an outline by tracing alone. Its programs cannot be called, and its
        estimates of memory, which determine the batch sizes, count only states and records.
      client_states: as in `Execution`.

    Raises:
      ValueError: if one replica per device, or the result, does not fit in memory; or if states of
        clients cannot be in files.
      InterruptedRunError: if a process of a multi-process run received a signal to stop.
    """
    # If one process stopped here, the others would hang in a collective. Agree to stop after all
    # have compiled.
    words = "stopping when the programs are compiled"
    with noted_signals(jax.process_count() > 1, words) as signals:
        directory = None if client_states is None else Path(client_states)
        mine, where, room, limit = _place(grid, split, limit, programs, report, directory)
        clock = time.perf_counter()
        first = blocks or [_block(program, where, room) for program in mine]
        if compiles:
            _check_disk(mine, directory)
            calls = _compile(mine, first, where, report, approve)
            # A resumed run whose blocks do not fit is refused by the caller, not here.
            approve = None if blocks else approve
            again = partial(_compile, where=where, report=report, approve=approve)
            parts = zip(mine, first, calls, strict=True)
            compiled = [_fit(*each, where, room, again) for each in parts]
        else:
            compiled = list(map(partial(_outlined, where=where), mine, first))
        seconds = time.perf_counter() - clock if compiles else math.nan
    (stop,) = agree(signals[-1] if signals else 0)
    if stop:
        raise InterruptedRunError(int(stop), None)
    hosts, devices = hosts_and_devices()
    if jax.device_count() < devices and jax.process_index() == 0:
        warnings.warn(
            f"JAX sees {jax.device_count()} of {devices} devices on {_hosts(hosts)}; start "
            "one process on each (srun --ntasks-per-node=1), or one for each device",
            stacklevel=2,
        )
    used = psutil.Process().memory_info().rss
    return Plan(grid, where, compiled, seconds, used, limit, hosts, devices, directory)


def _compile(
    programs: Sequence[Program],
    blocks: Sequence[Block],
    where: Layout,
    report: Callable[[str], None],
    approve: Approve | None,
) -> list[Any]:
    """Compiles each program for its block, and reports how many of them are ready.

    Raises:
      KeyboardInterrupt: if interrupted, with the number of programs compiled so far.
    """
    in_words = f"{len(programs)} program{'s'[: len(programs) > 1]}"
    report(f"compiling {in_words}")
    calls, told, made = list[Future[Any]](), 0, list[tuple[Any, str, Future[Any]]]()

    def tell(number: int) -> None:
        nonlocal told
        while told < number:
            told += 1
            report(f"compiled {told} of {in_words}")

    # Compile in threads. XLA releases the GIL while compiling, and the next program can be traced
    # meanwhile. Report in this thread, because a callback may be the user's.
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        try:
            for program, block in zip(map(Program.of, programs, blocks), blocks, strict=True):
                size = program.records_kept, program.rounds_at_once, program.division.shapes
                key = (program.key, block, where, *size)
                code, call = _compiled.get(key) or ("", None)
                if call is None or (approve and not code):
                    lowered = _lower(program, block, where)
                    if approve:
                        code = _digest(program, block, where, lowered)
                    call = call or threads.submit(lowered.compile)
                if approve:
                    approve(program, partial(_code, program, block, where, code))
                made.append((key, code, call))
                calls.append(call)
                tell(sum(call.done() for call in calls))
            for number, _ in enumerate(as_completed(calls), 1):
                tell(number)
        except KeyboardInterrupt as error:
            threads.shutdown(cancel_futures=True)  # exiting would otherwise wait for all programs
            ended = [call for call in calls if call.done() and not call.cancelled()]
            done = sum(call.exception() is None for call in ended)
            words = f"{done} of {len(programs)} programs were compiled"
            if jax.config.values["jax_compilation_cache_dir"]:
                words += ", and are kept for the next start"
            raise KeyboardInterrupt(words) from error
        finally:
            for call in calls:
                call.cancel()  # an error must not wait for programs in the queue
    for key, code, call in made:
        call.result()
        _compiled.put(key, (code, call))
    if _is_crowded():
        _compiled.keep(len(made))
    return [call.result() for call in calls]


def _is_crowded(limit: Path = Path("/proc/sys/vm/max_map_count")) -> bool:
    """Whether this process has more than half of the memory maps that Linux allows.

    A program for CPUs takes about a thousand, and a process that has all cannot compile another.
    """
    if not limit.exists():
        return False
    return Path("/proc/self/maps").read_bytes().count(b"\n") > int(limit.read_text()) / 2


def _digest(program: Program, block: Block, where: Layout, lowered: Any = None) -> str:
    """The digest of a program's text, for one device if clients are split over devices."""
    text = _text_alone(program, block, where)
    text = text or (lowered or _lower(program, block, where)).as_text()
    return hashlib.sha256(text.encode()).hexdigest()


def _code(program: Program, block: Block, where: Layout, code: str, num_rounds: int) -> str:
    """The digest of a program's text for a number of rounds, given that for its own number."""
    other = program.lasting(num_rounds)
    # The text depends on the number of rounds only through the records that a segment keeps.
    return code if other.records_kept == program.records_kept else _digest(other, block, where)


def _outlined(program: Program, block: Block, where: Layout) -> Compiled:
    needed = block.size * _replica_bytes(program, where)
    return Compiled(program.of(block), block, _not_compiled, needed)


def _not_compiled(*_: Any) -> Any:
    raise ValueError("an outline cannot be carried out; make a plan")


def _place(
    grid: Grid,
    split: Literal["replicas", "clients"] | None,
    limit: float | None,
    programs: Sequence[Program] | None = None,
    report: Callable[[str], None] = lambda _: None,
    client_states: Path | None = None,
) -> tuple[list[Program], Layout, float, float]:
    """Finds the programs, the devices, the bytes for a batch, and the total limit."""
    # Check the number of runs first, because programs list their runs, and too many would exhaust
    # the memory before any shape is known.
    records = grid.num_records + 1
    runs = math.prod(grid.shape) if programs is None else sum(map(len, programs))
    what = f"{runs:,} runs (num_seeds = {grid.num_seeds:,}) with {records:,} records each"
    remedy = "take fewer seeds or points, or record less often (record_every)"
    check_fits(what, runs * (records * _RECORD_BYTES + 8), limit, remedy)
    programs = programs_of(grid, report) if programs is None else list(programs)
    if client_states is not None:
        programs = list(map(_in_files, programs))
    each = [program.traced for program in programs]
    metrics = {name: x for traced in each for name, x in traced.record.metrics.items()}
    for name in metrics.keys() & grid.axes.keys():
        raise ValueError(f"an axis is called {name!r}, like one of the task's metrics; rename it")
    dims = {name: x.ndim - 1 for name, x in metrics.items()}
    check_dims(dims, [name for traced in each for name in traced.facts.per_client], grid.axes)
    for program in programs:
        facts = program.traced.facts
        arrivals = grid.num_rounds * facts.updates_per_round
        if not facts.is_synchronous and arrivals >= 2**31:
            raise ValueError(
                f"{program.label}: {grid.num_rounds:,} rounds of "
                f"{facts.updates_per_round:,} arrivals are {arrivals:,} arrivals; at most "
                f"{2**31 - 1:,} are counted"
            )
    # By default, clients are split for speed alone, because examples that travel take time.
    divides = split == "clients"
    # Split replicas. Closed forms are cheap and their updates sparse, so `lax.psum` over devices
    # would cost more, and asynchronous runs would need it every few arrivals.
    if split is None and any(
        each.traced.facts.has_closed_form or not each.traced.facts.is_synchronous
        for each in programs
    ):
        split = "replicas"
    if any(program.in_files for program in programs):
        where = _one_device(split)
    else:
        where = layout(max(map(len, programs)), axis=split)
    if divides:
        programs = [program.divided(where) for program in programs]
    return programs, where, *_room(_result_bytes(grid, programs), where, limit)


class FileSizes(NamedTuple):
    """Bytes of client states in files: of all rows, the most on disk, and those of a round."""

    total: int
    file: int
    round: int


def states_in_files(program: Program, num_replicas: int) -> FileSizes:
    """Sizes of the files with a program's client states, and the bytes that a round moves."""
    row, models = 0, 0
    for state in program.traced.replica.models:
        size = num_bytes(state.clients) // (1 if program.in_files else program.num_clients)
        row, models = max(row, size // len(state.models)), models + len(state.models) * (size > 0)
    slots, rounds = program.traced.facts.updates_per_round * models, program.grid.num_rounds
    slots = min(slots, models * program.num_clients, program.traced.facts.slots)
    total = num_replicas * row * models * program.num_clients
    most = min(total, num_replicas * row * slots * rounds)
    # Rows that were written since the last two checkpoints have a second place.
    return FileSizes(total, 2 * most, num_replicas * row * slots)


def _in_files(program: Program) -> Program:
    """A program with client states in files, if it has client states."""
    made = dataclasses.replace(program, in_files=True)
    models = made.traced.replica.models
    return made if jax.tree.leaves([state.clients for state in models]) else program


def _one_device(split: str | None) -> Layout:
    if jax.process_count() > 1:
        raise ValueError(
            f"client_states are files of one process, but there are {jax.process_count()}; run "
            "parts of the sweep instead (part, --part), or keep the states in memory"
        )
    if split == "clients":
        raise ValueError(
            "client_states are files for one device, but split is 'clients'; give one of them"
        )
    return layout(1, jax.devices()[:1], "replicas")


def _check_disk(programs: Sequence[Program], directory: Path | None) -> None:
    """Raises `ValueError` if the disk is too small for the states of one replica."""
    sizes = [states_in_files(each, 1).file // 2 for each in programs if each.in_files]
    if directory is None or not sizes:
        return
    prepare_directory(directory)
    needed = max(sizes)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise ValueError(
            f"the states of clients take {_in_gib(needed)} and {_in_gib(free)} are free in "
            f"{directory}; make room, or give another directory"
        )


def check_fits(what: str, num_bytes: float, limit: float | None, remedy: str) -> None:
    """Raises `ValueError` if something does not fit in memory, before it is allocated.

    Args:
      what: the start of the message.
      num_bytes: a lower bound on its memory.
      limit: the memory limit in bytes; defaults to this process's memory plus 60 % of the free
        memory.
      remedy: the end of the message.
    """
    used = psutil.Process().memory_info().rss
    limit = used + 0.6 * psutil.virtual_memory().available if limit is None else limit
    if used + num_bytes > limit:
        raise ValueError(
            f"{what} take at least {_in_gib(num_bytes)} and this process already {_in_gib(used)}, "
            f"but {_in_gib(limit)} may be used; {remedy}, or allow more memory"
        )


def _room(result: int, where: Layout, limit: float | None) -> tuple[float, float]:
    """Bytes left for a batch in addition to the result, and the memory limit."""
    used = psutil.Process().memory_info().rss
    if where.is_cpu:
        limit = used + 0.6 * psutil.virtual_memory().available if limit is None else limit
        room = limit - used - result
    else:
        memory = where.mesh.local_devices[0].memory_stats()
        limit = room = 0.75 * memory["bytes_limit"] if limit is None else limit
    room = -agree(-room)[0]  # all processes must agree
    if room <= 0:
        raise ValueError(
            f"the result takes {_in_gib(result)} and this process already {_in_gib(used)}, but "
            f"{_in_gib(limit)} may be used; record less often (record_every), or allow more memory"
        )
    return room, limit


def _block(program: Program, where: Layout, room: float) -> Block:
    """The points and seeds per batch that fit in memory and, on CPUs, in caches."""
    state, most = program.state_bytes(where), room / _replica_bytes(program, where)
    if state > room:  # fail before compiling, which costs time and more memory
        raise ValueError(
            f"{program.label}: the state of one run takes {_in_gib(state)} and {_in_gib(room)} are "
            "left for it; take fewer clients or models, or smaller ones, or allow more memory"
            f"{_or_in_files(program, room)}"
        )
    if where.is_cpu:
        per_device = _CACHE_BYTES // max(1, state) if program.traced.facts.vectorizes else 1
        most = min(most, where.padded(1) * max(1, per_device))
    return _best_block(program, where, max(where.padded(1), int(most)))


def _or_in_files(program: Program, room: float) -> str:
    """The end of a message that a state is too large, if files would help."""
    sizes = states_in_files(program, 1)
    if program.in_files or num_bytes(program.traced.replica) - sizes.total > room:
        return ""
    return (
        f", or keep the states of clients ({_in_gib(sizes.total)}) in files (client_states, "
        f"--client-states DIR), where a round reads {_in_mib(sizes.round)} and writes as much"
    )


def _best_block(program: Program, where: Layout, most: int) -> Block:
    """The points and seeds of at most `most` replicas, with few batches and little padding."""
    # Runs of one point end at similar times. Otherwise points share what depends on seeds alone.
    by_point = program.grid.together or program.grid.until is not None

    def badness(block: Block) -> tuple[int, int, int]:
        number = program.of(block).num_batches(block)
        return number, number * block.size, -(block.seeds if by_point else block.points)

    nested = min(_blocks(*program.shape, where, most), key=badness)
    flat = min(_blocks(len(program), 1, where, most, is_flat=True), key=badness)
    (number, work, _), (fewer, less, _) = badness(nested), badness(flat)
    return flat if fewer < number or work > _PADDING * less else nested


def _blocks(
    points: int, seeds: int, where: Layout, most: int, is_flat: bool = False
) -> Iterator[Block]:
    """Yields blocks of equal size that cover all points and seeds."""
    for outer in (0, 1):
        pad = [lambda size: size, lambda size: size]
        pad[outer] = where.padded
        for parts in range(1, seeds + 1):
            some_seeds = pad[1](-(-seeds // parts))
            room = most // some_seeds
            some_points = room if outer else room - room % where.padded(1)
            if some_points:
                even = -(-points // -(-points // some_points))
                yield Block(pad[0](even), some_seeds, outer, is_flat)


def _replica_bytes(program: Program, where: Layout) -> float:
    """Estimates a replica's memory before compiling: two states, temporaries and fetched rows."""
    state, record = program.state_bytes(where), num_bytes(program.traced.record)
    if program.in_files:
        state += states_in_files(program, 1).round
    return 3 * state + (2 * program.records_kept + program.grid.num_records) * record


def jitted(program: Program, block: Block, where: Layout) -> Any:
    """`Program.segment` on all devices, as a jitted function."""
    segment = where.over(
        partial(program.segment, where.client_axis, block.share(where)),
        in_axes=(program.in_axes(block), None, program.state_axes),
        out_axes=(program.state_axes, 1),
    )
    # The new state reuses the memory of the donated old state.
    return jax.jit(segment, donate_argnums=2)


def _lower(program: Program, block: Block, where: Layout) -> Any:
    if program.in_files:
        return Stepwise(program, block, where)
    return jitted(program, block, where).lower(*program.inputs(where, block, 0))


def _text_alone(program: Program, block: Block, where: Layout) -> str | None:
    """The text of a program whose clients are split, as one device would compute it.

    A run can then be resumed on another number of devices.
    """
    if where.client_axis is None:
        return None
    given, rounds, _ = program.inputs(where, block, 0)
    given = given._replace(values=program.undivided._values)
    shapes = jax.eval_shape(lambda: (given, rounds, program.no_replica(block.size)))
    return jax.jit(partial(program.segment, None, block)).lower(*shapes).as_text()


def memory_of(call: Any) -> float:
    """Bytes that a compiled function needs on a device, or NaN if unknown."""
    analysis = call.memory_analysis()
    if analysis is None:
        return math.nan
    names = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    return float(sum(getattr(analysis, name) for name in names) - analysis.alias_size_in_bytes)


def _fit(
    program: Program,
    block: Block,
    call: Any,
    where: Layout,
    room: float,
    compile_again: Callable[[Sequence[Program], Sequence[Block]], list[Any]],
) -> Compiled:
    """The compiled program, recompiled with a smaller block if it does not fit."""
    needed = memory_of(call)
    if where.is_cpu:  # devices and a batch's records share the host's memory
        records = (program.grid.num_records + 1) * num_bytes(program.traced.record)
        needed = needed * len(where.mesh.local_devices) + block.size * records
    if not needed > room:
        return Compiled(program.of(block), block, call, needed)
    smaller = _smaller(program, block, where, room / needed)
    if smaller is None:
        raise ValueError(
            f"{program.label}: {block.words}, the fewest at once, take {_in_gib(needed)} and "
            f"{_in_gib(room)} are left for them; record less often (record_every), or allow more "
            "memory"
        )
    (call,) = compile_again([program], [smaller])
    return _fit(program, smaller, call, where, room, compile_again)


def _smaller(program: Program, block: Block, where: Layout, share: float) -> Block | None:
    """A block that needs about this share of the memory, or None if none is smaller."""
    # Reduce slightly more than proportionally. Not all temporaries shrink with the batch.
    fewest = where.padded(1)
    if block.size > fewest:
        return _best_block(program, where, max(fewest, int(0.9 * block.size * share) - fewest))
    # On CPUs, "auto" computes few clients at once anyway.
    if program.client_map != "auto" or jax.default_backend() == "cpu":
        return None
    at_once = block.chunk_size or program.traced.facts.updates_per_round
    fewer = max(1, min(at_once // 2, int(0.9 * at_once * share)))
    return block._replace(chunk_size=fewer) if at_once > 1 else None


def _result_bytes(grid: Grid, programs: Sequence[Program]) -> int:
    """Peak memory of building the labelled result, in bytes."""
    runs = sum(map(len, programs))
    cells = runs * (grid.num_records + 1)
    shapes = metric_shapes(programs).values()
    metrics = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
    kept = runs * num_bytes(kept_shapes(programs))
    num_models = max(program.num_models for program in programs)
    return cells * num_models * (metrics + _RECORD_BYTES) + kept


def _hosts(number: int) -> str:
    return f"{number} host{'s'[: number > 1]}"


def _in_gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _in_mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


class Segment(NamedTuple):
    """State of a batch after a segment of its rounds.

    Attributes:
      label: the label of the batch.
      plan: the plan of the sweep.
      batch: the index of the batch in `Plan.batches`.
      rounds: the number of finished rounds of the batch.
      records: the records so far, ``[records, replicas, models, ...]``, on the host.
      replica: the state of the batch, ``[replicas, ...]``, on the devices; the next segment
        overwrites it. None before the first round.
      seconds: the duration of the segment in the slowest process.
      earlier_seconds: the time that the batch took before the sweep was resumed.
      files: the states of clients, if they are in files.
    """

    label: str
    plan: Plan
    batch: int
    rounds: int
    records: Record
    replica: Replica | None
    seconds: float = 0.0
    earlier_seconds: float = 0.0
    files: ClientFiles | None = None

    @property
    def program(self) -> Program:
        """The program that the batch's replicas belong to."""
        return self.plan.batches[self.batch][0].program

    @property
    def replicas(self) -> np.ndarray:
        """The indices of the batch's replicas in the program, with padding at the end."""
        compiled, number = self.plan.batches[self.batch]
        return compiled.replicas(number)

    @property
    def params(self) -> list[Params] | None:
        """The parameters of each stack of models, fetched to the host, if the grid keeps them."""
        if self.plan.grid.keep is None or self.replica is None:
            return None
        fetched: list[Params] = self.plan.where.fetch([each.params for each in self.replica.models])
        return fetched

    @property
    def work_done(self) -> float:
        """The finished part of `total_work`."""
        work = self.plan.work
        part = self.rounds / self.plan.grid.num_rounds
        return sum(work[: self.batch]) + part * work[self.batch]

    @property
    def total_work(self) -> float:
        """The work of all batches, in local trainings."""
        return sum(self.plan.work)
