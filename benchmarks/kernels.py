"""Kernels per round: the launches inside the loop of rounds, counted in a compiled program's text.

`python -m benchmarks.kernels [WORK ...]` compiles workloads, without running them, and prints their
launches per round, and the places in the source with the most. Clients are vmapped, as accelerators
compute them. On CPUs the counts are a proxy, because another backend fuses differently. A loop of
Threefry's rounds, which JAX draws with on CPUs, is a single kernel on GPUs, and is counted as one
too.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import jax
from rich.console import Console
from rich.table import Table

FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"),
    *("add-dependency", "opt-barrier", "partition-id", "replica-id"),
}
"""Operations that launch nothing, or whose launch is counted where it starts."""

_BITS = re.compile(r"(?:pred|[a-z]+?)(\d+)?(?:[a-z]\w*)?$")
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_OPERATION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Operation(NamedTuple):
    """An instruction of the optimized HLO: `%name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return _num_bytes(self.type)

    @property
    def op_name(self) -> str:
        """The path of JAX's functions and scopes that it comes from, or its opcode."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else self.opcode

    def called(self, *roles: str) -> list[str]:
        """Returns the computations that it calls in some roles, such as `body`."""
        found = []
        for role in roles:
            for group, single in re.findall(
                rf"\b{role}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.attributes
            ):
                found += _NAME.findall(group) if group else [single]
        return found


class Launch(NamedTuple):
    """An operation that starts a kernel.

    Attributes:
      operation: a loop of Threefry stands for the kernel that a GPU has instead of it.
      computation: where the operation is.
      times: how often it is started.
      loop: the innermost loop around it; of a copy, the loop whose initial value it is.
    """

    operation: Operation
    computation: str
    times: int
    loop: Operation | None

    @property
    def is_random(self) -> bool:
        """Whether it is a part of a loop of Threefry, or only serves one."""
        return self.loop is not None and _is_threefry(self.loop)


class Counted(NamedTuple):
    """The launches of one trip of the loop of rounds.

    Attributes:
      trips: of the loop; None if unknown.
      kernels: all of them, with those of Threefry's loops.
      as_on_gpus: with one launch for each loop of Threefry.
      in_graphs: those inside of command buffers, which a GPU launches as a whole.
      num_bytes: an estimate of what they read and write.
      launches: the operations of `as_on_gpus`.
    """

    trips: int | None
    kernels: int
    as_on_gpus: int
    in_graphs: int
    num_bytes: int
    launches: list[Launch]


class Module:
    """A compiled program's text, by computations."""

    def __init__(self, text: str) -> None:
        """Reads the text of `compiled.as_text()`."""
        self.text, self.entry = text, ""
        self.computations: dict[str, dict[str, Operation]] = {}
        inside: dict[str, Operation] | None = None
        for line in text.splitlines():
            if found := _HEADER.match(line):
                inside = self.computations[found[2]] = {}
                self.entry = found[2] if found[1] else self.entry
            elif line.startswith("}"):
                inside = None
            elif inside is not None and (found := _OPERATION.match(line)):
                operation = _operation(found[2], found[3], is_root=bool(found[1]))
                inside[operation.name] = operation

    def launches(
        self, computation: str, times: int = 1, loop: Operation | None = None
    ) -> list[Launch]:
        """Returns the launches of a computation that runs `times` times inside of a loop."""
        found: list[Launch] = []
        fed = self._fed_loops(computation)
        for each in self.computations[computation].values():
            if each.opcode in ("call", "async-start") and each.called("to_apply"):
                found += self.launches(*each.called("to_apply"), times, loop)
            elif each.opcode == "while":
                trips = _trips(each)
                if _is_threefry(each):
                    found.append(Launch(each, computation, times, loop))
                found += self.launches(*each.called("body"), times * (trips or 1), each)
                if trips is None:  # because the host must then ask the device whether to go on
                    found += self.launches(*each.called("condition"), times, each)
            elif each.opcode == "conditional":
                branches = [self.launches(name, times, loop) for name in _branches(each)]
                found += max(branches, key=_number)  # because one branch runs
            elif each.opcode not in FREE and not each.opcode.endswith(("-done", "-update")):
                around = fed.get(each.name, loop) if each.opcode == "copy" else loop
                found.append(Launch(each, computation, times, around))
        return found

    def _fed_loops(self, computation: str) -> dict[str, Operation]:
        """Returns the loop that each operation is an initial value of, by the operation's name."""
        scope, starts = self.computations[computation], list[tuple[Operation, Operation]]()
        for each in scope.values():
            if each.opcode == "while":
                starts.append((each, each))
            elif each.opcode == "call":  # CPUs call small loops
                starts += [(each, loop) for loop in self.loops(*each.called("to_apply"))]
        return {
            name: loop
            for start, loop in starts
            for given in start.operands
            if given in scope
            for name in scope[given].operands
        }

    def loops(self, computation: str | None = None) -> list[Operation]:
        """Returns the loops of a computation, by default the entry, without nested ones."""
        found = []
        for operation in self.computations[computation or self.entry].values():
            if operation.opcode == "while":
                found.append(operation)
            elif operation.opcode in ("call", "conditional"):
                for name in (*operation.called("to_apply"), *_branches(operation)):
                    found += self.loops(name)
        return found

    def rounds(self, depth: int = 1, num_rounds: int | None = None) -> Counted:
        """Counts the launches of one round.

        Args:
          depth: how many loops surround a round; 2 in a sweep, whose outer loop makes records.
          num_rounds: the trip count of the loop; by default unknown. A single round is the whole
            program, because XLA removes a loop of one trip.
        """
        loop = None if num_rounds == 1 else self._loop(depth, num_rounds)
        (body,) = loop.called("body") if loop else (self.entry,)
        found = self.launches(body)
        kernels = [each for each in found if not _is_threefry(each.operation)]
        graphs = [each for each in kernels if each.computation.startswith("command_buffer")]
        as_on_gpus = [each for each in found if not each.is_random]
        return Counted(
            trips=_trips(loop) if loop else 1,
            kernels=_number(kernels),
            as_on_gpus=_number(as_on_gpus),
            in_graphs=_number(graphs),
            num_bytes=sum(each.times * self.traffic(each) for each in as_on_gpus),
            launches=as_on_gpus,
        )

    def _loop(self, depth: int, num_rounds: int | None) -> Operation:
        loops = self.loops()
        for _ in range(depth - 1):
            loops = [inner for loop in loops for inner in self.loops(*loop.called("body"))]
        if not loops:
            raise ValueError(f"the program has no loop at depth {depth}; give num_rounds=1")
        # There is none of that length if XLA has unrolled it.
        known = [loop for loop in loops if num_rounds and _trips(loop) == num_rounds]
        return max(known or loops, key=lambda loop: _number(self.launches(*loop.called("body"))))

    def traffic(self, launch: Launch) -> int:
        """Estimates the bytes that a kernel reads and writes.

        Operands that it only takes slices or rows of, and results that it updates in place, count
        as these slices and rows.
        """
        operation, scope = launch.operation, self.computations[launch.computation]
        sizes = [scope[name].num_bytes for name in operation.operands if name in scope]
        if operation.opcode != "fusion":
            written = _updated(operation, scope)
            if written is None and operation.opcode in ("gather", "dynamic-slice", "slice"):
                return 2 * operation.num_bytes
            return sum(sizes) + operation.num_bytes if written is None else 2 * written
        inside = self.computations[operation.called("calls")[0]]
        given = [each for each in inside.values() if each.opcode == "parameter"]
        root = next(each for each in inside.values() if each.is_root)
        written = _written(root, inside)
        return sum(_read(each, inside) for each in given) + written

    @cached_property
    def _frames(self) -> dict[int, tuple[str, int]]:
        """The parent, and the place in the source, of each stack frame."""
        tables: dict[str, dict[int, str]] = {}
        table: dict[int, str] = {}
        for line in self.text.splitlines():
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = tables[line] = {}
            elif (found := re.match(r"(\d+) (.+)", line)) and tables:
                table[int(found[1])] = found[2]
            elif line.startswith("%"):
                break

        def number(text: str, name: str) -> int:
            found = re.search(rf"\b{name}=(\d+)", text)
            return int(found[1]) if found else 0

        frames = {}
        for frame, text in tables.get("StackFrames", {}).items():
            place = tables["FileLocations"][number(text, "file_location_id")]
            file = tables["FileNames"][number(place, "file_name_id")].strip('"')
            # The text has the parent's number plus one, so that 1 stands for none.
            parent = number(text, "parent_frame_id") - 1
            frames[frame] = (f"{file}:{number(place, 'line')}", parent)
        return frames

    def source(self, operation: Operation, package: str = "fedjax_mm") -> str:
        """Returns the innermost line of the package that an operation comes from, or ''."""
        if found := re.search(r'source_file="([^"]*)" source_line=(\d+)', operation.attributes):
            return f"{package}{found[1].rpartition(package)[2]}:{found[2]}"
        found = re.search(r"stack_frame_id=(\d+)", operation.attributes)
        frame = int(found[1]) if found else 0
        while frame:
            place, frame = self._frames.get(frame, ("", 0))
            if f"/{package}/" in place:
                return package + place.rpartition(f"/{package}")[2]
        return ""


def _operation(name: str, text: str, *, is_root: bool) -> Operation:
    """Reads an instruction without its name."""
    kind, rest = _split(text)
    opcode, _, rest = rest.partition("(")
    depth, end = 1, 0
    for end, letter in enumerate(rest):  # noqa: B007
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            break
    return Operation(
        name, kind, opcode.strip(), tuple(_NAME.findall(rest[:end])), rest[end + 1 :], is_root
    )


def _split(text: str) -> tuple[str, str]:
    """Splits a type, which may be a tuple of types, from what follows."""
    if not text.startswith("("):
        kind, _, rest = text.partition(" ")
        return kind, rest
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: place + 1], text[place + 1 :]
    return text, ""


def _num_bytes(kind: str) -> int:
    total = 0
    for name, shape in _SHAPE.findall(kind):
        width = _BITS.match(name)
        bits = 8 if width is None or width[1] is None else int(width[1])
        total += math.prod(map(int, filter(None, shape.split(",")))) * bits // 8
    return total


def _trips(loop: Operation) -> int | None:
    found = _TRIPS.search(loop.attributes)
    return int(found[1]) if found else None


def _branches(operation: Operation) -> list[str]:
    return operation.called("branch_computations", "true_computation", "false_computation")


def _is_threefry(operation: Operation) -> bool:
    """Whether a loop is `jax._src.prng`'s: its carry ends in two vectors of four rotations."""
    if operation.opcode != "while":
        return False
    types = re.sub(r"\{[^}]*\}|/\*[^*]*\*/", "", operation.type).strip("()")
    return types.replace(" ", "").endswith("u32[4],u32[4]")


def _number(launches: list[Launch]) -> int:
    return sum(each.times for each in launches)


def _updated(operation: Operation, scope: dict[str, Operation]) -> int | None:
    """Returns the bytes of an update in place, or None if the operation is none."""
    place = {"dynamic-update-slice": 1, "scatter": -1}.get(operation.opcode)
    return None if place is None else scope[operation.operands[place]].num_bytes


def _written(root: Operation, inside: dict[str, Operation]) -> int:
    """Returns the bytes that a fused computation writes."""
    if root.opcode == "tuple":
        return sum(_written(inside[name], inside) for name in root.operands)
    if root.opcode == "bitcast":
        return _written(inside[root.operands[0]], inside)
    updated = _updated(root, inside)
    return root.num_bytes if updated is None else updated


def _read(given: Operation, inside: dict[str, Operation]) -> int:
    """Returns the bytes that a fused computation reads of one of its operands."""
    total = 0
    for user in _users(given, inside):
        first = user.operands[0] == given.name
        if user.opcode in ("slice", "dynamic-slice", "gather") and first:
            total += user.num_bytes
        elif not (user.opcode in ("dynamic-update-slice", "scatter") and first):
            return given.num_bytes
    return min(total, given.num_bytes)


def _users(given: Operation, inside: dict[str, Operation]) -> Iterator[Operation]:
    for each in inside.values():
        if given.name in each.operands:
            if each.opcode == "bitcast":
                for user in _users(each, inside):
                    yield user._replace(
                        operands=tuple(given.name if x == each.name else x for x in user.operands)
                    )
            else:
                yield each


def by_source(module: Module, counted: Counted) -> Counter[tuple[str, str]]:
    """Returns the launches of a round by line of the source and by operation."""
    found: Counter[tuple[str, str]] = Counter()
    for launch in counted.launches:
        # Take the loop's line for copies, because XLA adds them without a place in the source.
        sources = [module.source(each) for each in (launch.operation, launch.loop) if each]
        source = next(filter(None, sources), "")
        path = launch.operation.op_name.split("/")
        scope = [x for x in path if x not in ("closed_call", "body", "vmap()")]
        found[source, "/".join(scope[-3:])] += launch.times
    return found


def main() -> None:
    """Counts and prints."""
    from benchmarks.programs import compiled_all  # which imports this module

    table = Table("work", "kernels", "Threefry as one", "KiB", box=None)
    details = []
    for name in sys.argv[1:] or ("W1", "W1b", "W2", "W3", "S1"):
        for label, made in compiled_all(name, "vmap"):
            for number, compiled in enumerate(made.program.compiled):
                module = Module(compiled.as_text())
                counted, title = module.rounds(made.depth, made.trips), f"{name} {label}"
                title += f", program {number}" if len(made.program.compiled) > 1 else ""
                cells = counted.kernels, counted.as_on_gpus
                kibibytes = f"{counted.num_bytes / 1024:,.0f}"
                table.add_row(title, *(f"{x:,}" for x in cells), kibibytes)
                details.append(most_launches(title, module, counted))
    console = Console(width=160)
    console.print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", table, *details)


def most_launches(title: str, module: Module, counted: Counted) -> Table:
    """Returns a table of the lines of the source with the most launches in a round."""
    table = Table("kernels", "source", "operation", title=title, box=None)
    for (source, scope), times in by_source(module, counted).most_common(20):
        table.add_row(f"{times:,}", source, scope)
    return table


if __name__ == "__main__":
    main()
