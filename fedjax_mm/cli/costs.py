"""Costs of capabilities relative to federated averaging, measured, printed and drawn."""

import datetime
import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from fedjax_mm.asynchrony.dispatch import Dispatch
from fedjax_mm.cli import capabilities
from fedjax_mm.cli.capabilities import ABSENT, BASELINE, CAPABILITIES, Operation, Problem
from fedjax_mm.cli.counting import count_round
from fedjax_mm.cli.speed import Program, compile_program, rounds_program, seconds_of
from fedjax_mm.cli.terminal import show_table
from fedjax_mm.plots.drawing import Picture, dots
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tools.compiler import cache_directory
from fedjax_mm.tools.screen import Report


class Cost(NamedTuple):
    """Cost of a capability on a workload.

    Attributes:
      workload: the name of the workload.
      name: the name of the row.
      kind: the kind of the part that is added to federated averaging.
      seconds: the least time of a run.
      times: the same, divided by that of the baseline.
      trace: seconds for tracing.
      lower: seconds for lowering to StableHLO.
      compile: seconds for compiling.
      temporary_bytes: the memory of temporary arrays, on each device.
      keys: the number of keys made in a round, on each device; None in asynchronous runs.
      words: the number of random words drawn in a round, on each device; None as above.
      operations: the operations of a round, on each device; None as above.
      moved: the bytes of rows read and written in a round, on each device; None as above.
      is_open: whether these four count one step of a loop without a known number of steps.
      operation: the arithmetic of NumPy and PyTorch, or None.
      numpy: its seconds for all rounds in NumPy.
      torch: the same in PyTorch; None if it is not installed.
    """

    workload: str
    name: str
    kind: str
    seconds: float
    times: float
    trace: float
    lower: float
    compile: float
    temporary_bytes: int
    keys: int | None
    words: int | None
    operations: int | None
    moved: int | None
    is_open: bool
    operation: Operation | None = None
    numpy: float | None = None
    torch: float | None = None


_UNKNOWN = {**dict.fromkeys(("keys", "words", "operations", "moved")), "is_open": False}
COLUMNS: tuple[str, ...] = (
    "run s",
    "x",
    "ops x",
    "bytes x",
    "trace s",
    "lower s",
    "compile s",
    "MiB",
)
COLUMNS += ("keys", "draws")
_SELECTION = ("adds s", "adds to mean s", "NumPy s", "PyTorch s")


class Costs(NamedTuple):
    """A table of costs.

    Attributes:
      about: the versions, the machine, its load and the settings.
      rows: all rows.
    """

    about: Mapping[str, Any]
    rows: Sequence[Cost]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Costs that were saved by `json`."""
        return cls(content["about"], [Cost(**row) for row in content["rows"]])

    @property
    def json(self) -> dict[str, Any]:
        """Plain data."""
        return {"about": self.about, "rows": [row._asdict() for row in self.rows]}

    @property
    def workloads(self) -> list[str]:
        """The names of the workloads."""
        return list(dict.fromkeys(row.workload for row in self.rows))

    def of(self, workload: str) -> dict[str, Cost]:
        """The rows of a workload by name."""
        return {row.name: row for row in self.rows if row.workload == workload}


def plan(only: Sequence[str], on: Sequence[str], rounds: int | None, repeats: int) -> "Planned":
    """Chooses rows and workloads, of which an empty sequence means all.

    Args:
      only: names of rows and of kinds; the baseline is always measured.
      on: names of workloads.
      rounds: the number of rounds; None takes each workload's.
      repeats: the number of timed runs, of which the fastest counts.

    Raises:
      ValueError: if a name is unknown or a number is too small.
    """
    known = capabilities.problems()
    kinds = dict.fromkeys(row.kind for row in CAPABILITIES.values())
    for name in on:
        if name not in known:
            raise ValueError(f"capabilities on {name!r}; choose from {', '.join(known)}")
    for name in only:
        if name not in (*kinds, *CAPABILITIES):
            allowed = ", ".join([*kinds, *CAPABILITIES])
            raise ValueError(f"--only is {name!r}; choose from {allowed}")
    if rounds is not None and rounds < 2:
        raise ValueError(f"--rounds is {rounds}; it must be at least 2")
    rows = {
        name
        for name, row in CAPABILITIES.items()
        if not only or name == BASELINE or {name, row.kind} & {*only}
    }
    chosen = {name: each.lasting(rounds) for name, each in known.items() if name in (on or known)}
    points = [(w, name) for w in chosen for name in CAPABILITIES if name in rows]
    return Planned(chosen, [each for each in points if each not in ABSENT], repeats)


class Planned(NamedTuple):
    """Rows to be measured.

    Attributes:
      problems: the workloads by name.
      points: the names of workloads and rows, workload after workload.
      repeats: the number of timed runs.
    """

    problems: Mapping[str, Problem]
    points: Sequence[tuple[str, str]]
    repeats: int

    def run(self, report: Report) -> Costs:
        """Compiles and times all rows."""
        about, found = self._about(), list[Cost]()
        for workload, points in groupby(self.points, lambda point: point[0]):
            problem = self.problems[workload]
            # The first program of a process takes longer to trace.
            report(f"{workload} {BASELINE}", len(found), len(self.points))
            first = _program(problem.with_part(problem.plain), problem.num_rounds)
            times, rows = seconds_of(first.run, self.repeats), list[Cost]()
            for _, name in points:
                report(f"{workload} {name}", len(found) + len(rows), len(self.points))
                rows.append(self._cost(workload, name))
            # Time the baseline at both ends, because the pace of a machine changes.
            least = min(*times, *seconds_of(first.run, self.repeats), rows[0].seconds)
            rows[0] = rows[0]._replace(seconds=least)
            found += [row._replace(times=row.seconds / least) for row in rows]
        return Costs(about, found)

    def _cost(self, workload: str, name: str) -> Cost:
        problem, row = self.problems[workload], CAPABILITIES[name]
        setup = problem.with_part(row.build(problem))
        program = _program(setup, problem.num_rounds)
        (executable,) = program.compiled
        trace, lower, compile_ = program.stages or (math.nan,) * 3
        counted = None
        if program.jaxpr is not None and not isinstance(setup.assignment, Dispatch):
            counted = count_round(program.jaxpr, problem.num_rounds)
        return Cost(
            workload,
            name,
            row.kind,
            seconds=min(seconds_of(program.run, self.repeats)),
            times=1.0,
            trace=trace,
            lower=lower,
            compile=compile_,
            temporary_bytes=int(executable.memory_analysis().temp_size_in_bytes),
            **(counted._asdict() if counted else _UNKNOWN),
            operation=row.operation,
            **_by_others(problem, row.operation, self.repeats),
        )

    def _about(self) -> dict[str, Any]:
        device = jax.devices()[0]
        return {
            "date": datetime.date.today().isoformat(),
            "num_devices": jax.device_count(),
            "device": device.device_kind,
            "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
            "jax": jax.__version__,
            "numpy": np.__version__,
            "torch": _torch().__version__ if _torch() else None,
            "is_cached": cache_directory() is not None,
            "repeats": self.repeats,
            "rounds": {name: each.num_rounds for name, each in self.problems.items()},
            "clients": {name: each.num_clients for name, each in self.problems.items()},
        }


def _program(setup: Setup, num_rounds: int) -> Program:
    # Return all that a next round reads, because XLA leaves out what no result depends on.
    return compile_program(
        rounds_program(setup, num_rounds, lambda state: (state.models, state.assignment))
    )


def _torch() -> Any:
    """PyTorch, or None if it is not installed."""
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None


def _by_others(problem: Problem, operation: Operation | None, repeats: int) -> dict[str, Any]:
    """Seconds of NumPy and PyTorch for the same arithmetic in all rounds."""
    if operation is None:
        return {}
    shape, few = (problem.num_clients, problem.num_parameters), problem.attackers
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    torch = _torch()
    forms = {"numpy": (OPERATIONS[operation][0], x)}
    if torch:
        forms["torch"] = (partial(OPERATIONS[operation][1], torch), torch.from_numpy(x))

    def seconds(compute: Callable[[Any, int], Any], x: Any) -> float:
        def every_round() -> None:
            for _ in range(problem.num_rounds):
                compute(x, few)

        return min(seconds_of(every_round, repeats))

    return {name: seconds(*form) for name, form in forms.items()}


def _krum(x: np.ndarray, attackers: int) -> Any:
    centered = x - x.mean(0)
    squares, number = (centered**2).sum(1), len(x) - attackers - 2
    distances = squares[:, None] + squares - 2 * (centered @ centered.T)
    np.fill_diagonal(distances, np.inf)
    return np.partition(distances, number - 1, axis=1)[:, :number].sum(1).argmin()


def _krum_in_torch(torch: Any, x: Any, attackers: int) -> Any:
    centered = x - x.mean(0)
    squares, number = (centered**2).sum(1), len(x) - attackers - 2
    distances = squares[:, None] + squares - 2 * (centered @ centered.T)
    distances.fill_diagonal_(torch.inf)
    return distances.topk(number, largest=False).values.sum(1).argmin()


OPERATIONS: dict[Operation, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sort": (lambda x, few: np.sort(x, axis=0), lambda torch, x, few: torch.sort(x, dim=0)),
    "krum": (_krum, _krum_in_torch),
    "top-k": (
        lambda x, few: np.argpartition(np.abs(x), -(x.shape[1] // 10), axis=1),
        lambda torch, x, few: torch.topk(torch.abs(x), x.shape[1] // 10, dim=1),
    ),
}
"""Arithmetic of NumPy and of PyTorch on all updates ``[clients, numbers]`` of a round."""


def show(costs: Costs) -> None:
    """Prints a table for each workload, and one of selection."""
    for workload in costs.workloads:
        rows = costs.of(workload)
        title = f"{workload}, {costs.about['rounds'][workload]} rounds; {sentence(costs)}"
        cells = [_cells(row, rows[BASELINE]) for row in rows.values()]
        show_table(("capability", *COLUMNS), cells, title=title, box=None)
    if selections := list(_selections(costs)):
        show_table(
            ("selection", *_SELECTION), selections, title="Selection in all rounds", box=None
        )


def sentence(costs: Costs) -> str:
    """How the numbers were measured."""
    about = costs.about
    parts = [
        f"{about['num_devices']} x {about['device']}",
        f"jax {about['jax']}",
        f"minimum of {about['repeats']}",
    ]
    parts += [about["date"], f"load average {about['load']} at the start"]
    is_busy = (about["load"] or 0) > about["num_devices"]
    parts += ["on a busy machine, so that times say little"] * is_busy
    return ", ".join(parts + ["programs read from the cache"] * about["is_cached"])


def _cells(row: Cost, baseline: Cost) -> list[str]:
    counts = ["-" if x is None else f"{x:,}" for x in (row.keys, row.words)]
    stages = [f"{x:.2f}" for x in (row.trace, row.lower, row.compile)]
    times = [row.times, *bounds_of(row, baseline)]
    ratios = ["-" if math.isnan(x) else f"{x:.2f}" for x in times]
    if row.is_open:
        ratios[1:] = [f">= {x}" for x in ratios[1:]]
    memory = f"{row.temporary_bytes / 2**20:.1f}"
    return [row.name, f"{row.seconds:.3f}", *ratios, *stages, memory, *counts]


def bounds_of(row: Cost, baseline: Cost) -> tuple[float, float]:
    """The operations and the moved bytes of a round, divided by those of the baseline."""
    pairs = ((row.operations, baseline.operations), (row.moved, baseline.moved))
    one, two = (math.nan if x is None or not y else x / y for x, y in pairs)
    return one, two


def _selections(costs: Costs) -> Iterable[list[str]]:
    for workload in costs.workloads:
        rows = costs.of(workload)
        for row in rows.values():
            if row.numpy is not None:
                added = [row.seconds - rows[BASELINE].seconds]
                if row.kind == "rule" and "mean" in rows:
                    added.append(row.seconds - rows["mean"].seconds)
                times = [f"{x:.3f}" for x in added] + ["-"] * (2 - len(added))
                torch = "not installed" if row.torch is None else f"{row.torch:.3f}"
                name = f"{workload} {row.name} ({row.operation})"
                yield [name, *times, f"{row.numpy:.3f}", torch]


def markdown(costs: Costs) -> str:
    """Both tables in Markdown, with a row for each capability."""
    lines = [f"{sentence(costs)}.", ""]
    names = dict.fromkeys(row.name for row in costs.rows)
    for workload in costs.workloads:
        about = costs.about
        lines += [
            f"## {workload}, {about['clients'][workload]} clients, "
            f"{about['rounds'][workload]} rounds",
            "",
            f"| capability | {' | '.join(COLUMNS)} |",
            f"|---|{'---:|' * len(COLUMNS)}",
        ]
        for kind, rows in groupby(costs.of(workload).values(), lambda row: row.kind):
            lines.append(f"| **{kind}** |{' |' * len(COLUMNS)}")
            for row in rows:
                name, *cells = _cells(row, costs.of(workload)[BASELINE])
                lines.append(f"| `{name}` | {' | '.join(cells)} |")
        absent = [(name, why) for (w, name), why in ABSENT.items() if w == workload]
        lines += [
            f"| `{name}` | {why} |{' |' * (len(COLUMNS) - 1)}"
            for name, why in absent
            if name in names
        ]
        lines.append("")
    lines += ["## Selection", "", f"| row | {' | '.join(_SELECTION)} |"]
    lines += [f"|---|{'---:|' * len(_SELECTION)}"]
    return "\n".join([*lines, *[f"| {' | '.join(cells)} |" for cells in _selections(costs)], ""])


def draw(costs: Costs) -> Picture:
    """Draws all rows relative to the baseline: times, and the larger of operations and bytes."""
    groups = dict[str, list[str]]()
    for kind, name in dict.fromkeys((row.kind, row.name) for row in costs.rows):
        groups.setdefault(kind, []).append(name)
    times = {w: {name: row.times for name, row in costs.of(w).items()} for w in costs.workloads}
    for w in costs.workloads:
        rows = costs.of(w)
        most = {name: max(bounds_of(row, rows[BASELINE])) for name, row in rows.items()}
        times[f"{w}, bound"] = {n: x for n, x in most.items() if not math.isnan(x)}
    return dots(
        times,
        groups,
        xlabel=f"time of a run, or its bound, divided by that of {BASELINE}",
        lines=(1, 2),
        title="What a capability costs",
        caption=f"{sentence(costs)}.",
    )
