"""A few minutes on an accelerator: kernels, microseconds and shares of the device's ceilings.

`python -m benchmarks.accelerator --out DIR` measures all rows on the first device that JAX sees and
writes `DIR/accelerator.json`, `DIR/accelerator.md` and figures. Each row has a file in `DIR/rows`,
so that a second call goes on with the rows that are left. A row that fails, or takes longer than
`--limit` seconds, is recorded with its error. Rows that have not begun after `--budget` seconds are
left to the next call. The most important rows come first.

| group | rows |
|---|---|
| device | the ceilings: products of two large matrices, a large copy, a launch |
| workloads | those of `fedjax-mm bench`, and F1 to F3 |
| replicas | seeds side by side of W1, W2 and W3, without records |
| clients | W1 with 10 models, and W2 with a tenth of its clients in a round, without records |
| variants | XLA's options, rounds unrolled, `client_map`, precisions and forms of products |
| table 1 | the grid of `maxfl-table1`, with few rounds |

Rows are measured in child processes, because a flag of XLA holds for a whole process, and because
an error may end it. `--jobs` processes compile at the same time, and each measures alone.
"""

import argparse
import asyncio
import fcntl
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accelerator_report import write_report
from fedjax_mm.tools.files import prepare_directory, save_json

MODULE = "benchmarks.accelerator"
GRAPHS_OF_LOOPS = "command buffers of loops"
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"  # what may be captured
OPTIONS: dict[str, dict[str, str | bool | int]] = {
    "no command buffers": {"xla_gpu_enable_command_buffer": ""},
    GRAPHS_OF_LOOPS: {
        "xla_gpu_enable_command_buffer": f"{GRAPHS},CONDITIONAL,WHILE",
        "xla_gpu_graph_min_graph_size": 1,
    },
    "XLA doubles loops": {
        "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER"
    },
    "deterministic": {"xla_gpu_deterministic_ops": True},
}
HOW: dict[str, dict[str, Any]] = {
    "as it is": {},
    **{name: {"options": options} for name, options in OPTIONS.items()},
    **{f"{number} rounds unrolled": {"unroll": number} for number in (2, 4, 8)},
}
HOW_CLASSIFIERS: dict[str, dict[str, Any]] = {
    "client_map scan": {"client_map": "scan"},
    "client_map 10": {"client_map": 10},
    "float32 products": {"precision": "highest"},
    "bfloat16 products": {"precision": "BF16_BF16_F32"},
    "multiply and sum": {"form": "multiply and sum"},
}
HOW_CNNS: dict[str, dict[str, Any]] = {
    "client_map scan": {"client_map": "scan"},
    "client_map 2": {"client_map": 2},
    "patches": {"form": "patches"},
    "patches, bfloat16": {"form": "patches", "precision": "BF16_BF16_F32"},
    "grouped convolutions": {"form": "grouped convolutions"},
    "outer products": {"form": "outer products"},
}
ALL_HOW = HOW | HOW_CLASSIFIERS | HOW_CNNS


class Row(NamedTuple):
    """A measurement.

    Attributes:
      group: of the table.
      work: the workload.
      size: replicas or clients; 0 elsewhere.
      variant: how it is computed.
      make: compiles it; None measures the device itself.
      flags: XLA's, of its process.
    """

    group: str
    work: str
    make: Callable[["Sizes"], Any] | None
    size: int = 0
    variant: str = ""
    flags: str = ""

    @property
    def name(self) -> str:
        """The name of its file."""
        words = filter(None, (self.group, self.work, str(self.size or ""), self.variant))
        return "-".join(words).replace(" ", "_")

    @property
    def runs_when_made(self) -> bool:
        """Whether `make` measures, too."""
        return self.group == "table 1"


class Sizes(NamedTuple):
    """How large the rows are.

    Attributes:
      workloads: of the first group, with changes to their settings.
      arrivals: of F1 to F3.
      replicas: by workload.
      clients: by workload.
      updates: local trainings of a run, by workload, as far as the number of rounds allows.
      rounds: the least and the most of a run, by workload.
      variants: the workloads, and the variants of each.
      flagged: sweeps, as `workloads`, whose programs take no options of their own.
      methods: of Table 1, a row for each tuple, compiled without autotuning.
      autotuned: methods that are compiled with it, too.
      table_1: changes to its settings.
      side: of the matrices.
      num_bytes: of the copy.
    """

    workloads: Mapping[str, Mapping[str, Any]]
    arrivals: Mapping[str, int]
    replicas: Mapping[str, Sequence[int]]
    clients: Mapping[str, Sequence[int]]
    updates: Mapping[str, int]
    rounds: Mapping[str, tuple[int, int]]
    variants: Mapping[str, Sequence[str]]
    flagged: Mapping[str, Mapping[str, Any]]
    methods: Sequence[tuple[str, ...]]
    autotuned: Sequence[str]
    table_1: Mapping[str, Any]
    side: int
    num_bytes: int


_ALL_METHODS = ("FedAvg", "FedProx", "SCAFFOLD", "PerFedAvg", "qFFL", "MW-Fed", "MaxFL")
FULL = Sizes(
    workloads={name: {} for name in ("W1", "W2", "W3", "W4", "S1", "W1b", "W1c", "W2b", "W3b")},
    arrivals=dict.fromkeys(("F1", "F2", "F3"), 10_000),
    replicas={
        "W1": [4**i for i in range(9)],
        "W2": [4**i for i in range(7)],
        "W3": [8**i for i in range(5)],
    },
    clients={"W1": [10**i for i in range(2, 8)], "W2": [10**i for i in range(2, 7)]},
    updates={"W1": 10**8, "W2": 5 * 10**6, "W3": 10**5},
    rounds={"W1": (20, 1000), "W2": (16, 1000), "W3": (8, 48), "W4": (1, 2), "W5": (2, 20)},
    # W3 has 30 local steps in a round, so that unrolling rounds changes little.
    variants={
        "W1": [*HOW],
        "W2": [*HOW, *HOW_CLASSIFIERS],
        "W3": ["as it is", *OPTIONS, *HOW_CLASSIFIERS],
        "W4": ["as it is", GRAPHS_OF_LOOPS, *HOW_CNNS],
        "W5": ["as it is", *HOW_CNNS],
    },
    flagged={"S1": {}},
    methods=[("FedAvg",), ("MaxFL",), _ALL_METHODS],
    autotuned=["FedAvg"],
    table_1={"num_rounds": 10, "selection_seeds": 1},
    side=8192,
    num_bytes=2**31,
)
TINY = Sizes(
    workloads={
        "W1": {"num_clients": 4, "num_models": 2, "num_rounds": 6, "num_seeds": 2},
        "W2": {"num_clients": 4, "num_examples": 30, "cohort_size": 4, "num_rounds": 3},
        "W4": {
            "num_clients": 4,
            "num_examples": 3,
            "cohort_size": 4,
            "num_steps": 2,
            "batch_size": 2,
        },
    },
    arrivals={"F1": 20},
    replicas={"W1": [4]},
    clients={"W1": [20]},
    updates={"W1": 100},
    rounds={"W1": (4, 16), "W2": (4, 16), "W4": (2, 2)},
    variants={
        "W1": [*HOW],
        "W2": ["as it is", *HOW_CLASSIFIERS],
        "W4": ["as it is", *HOW_CNNS],
    },
    flagged={
        "S1": {
            "num_clients": 4,
            "num_models": (2,),
            "num_rates": 2,
            "num_rounds": 4,
            "num_seeds": 2,
            "record_every": 2,
        }
    },
    methods=[],
    autotuned=["FedAvg"],
    table_1={
        "num_clients": 4,
        "num_unseen": 3,
        "cohort_size": 2,
        "num_rounds": 4,
        "num_seeds": 2,
        "learning_rates": (0.1, 0.2),
        "local_steps": (2,),
        "batch_sizes": (8,),
        "requirement": {"num_steps": (10,)},
    },
    side=64,
    num_bytes=2**16,
)


def rows(sizes: Sizes) -> Iterator[Row]:
    """Yields all rows, the most important first."""
    yield Row("device", "ceilings", None)
    for name, changes in sizes.workloads.items():
        labels = ("MFA-Rand", "MFA-RR") if name.startswith("W1") else ("",)
        for label in labels:
            yield Row("workloads", name, partial(_whole, name, changes, label), variant=label)
    for name in sizes.arrivals:
        yield Row("workloads", name, partial(_arrivals, name))
    for name, numbers in sizes.replicas.items():
        for number in numbers:
            yield Row("replicas", name, partial(_replicas, name, number), number)
    for name, numbers in sizes.clients.items():
        for number in numbers:
            yield Row("clients", name, partial(_clients, name, number), number)
    for name, variants in sizes.variants.items():
        for variant in variants:
            yield Row("variants", name, partial(_variant, name, variant), variant=variant)
    for name, changes in sizes.flagged.items():
        flags, whole = _flags(OPTIONS[GRAPHS_OF_LOOPS]), partial(_whole, name, changes, "")
        yield Row("variants", name, whole, 0, GRAPHS_OF_LOOPS, flags)
    for methods in sizes.methods:
        make = partial(_table_1, methods)
        name = methods[0] if len(methods) == 1 else f"{len(methods)} methods"
        yield Row("table 1", name, make, 0, "no autotuning", _flags({"xla_gpu_autotune_level": 0}))
    for name in sizes.autotuned:
        yield Row("table 1", name, partial(_table_1, (name,)), variant="autotuning")


def _flags(options: Mapping[str, Any]) -> str:
    return " ".join(
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in options.items()
    )


# The functions that make rows import JAX late, because a process that has it may hold the device.


def _whole(name: str, changes: Mapping[str, Any], label: str, _: Sizes) -> Any:
    from benchmarks.programs import whole
    from fedjax_mm.cli.workloads import WORKLOADS

    return whole(WORKLOADS[name]._replace(**changes), label)


def _arrivals(name: str, sizes: Sizes) -> Any:
    from benchmarks.programs import arrivals

    return arrivals(name, sizes.arrivals[name])


def _variant(name: str, variant: str, sizes: Sizes) -> Any:
    from benchmarks.programs import How, rounds_alone
    from fedjax_mm.cli.workloads import WORKLOADS

    changes = {**sizes.workloads.get(name, {}), "num_rounds": sizes.rounds[name][1]}
    made = rounds_alone(WORKLOADS[name]._replace(**changes), how=How(**ALL_HOW[variant]))
    return made._replace(is_compared=True)


def _replicas(name: str, number: int, sizes: Sizes) -> Any:
    from benchmarks.programs import rounds_alone
    from fedjax_mm.cli.workloads import WORKLOADS, LearningWorkload

    workload: Any = WORKLOADS[name]
    is_classifier = isinstance(workload, LearningWorkload)
    cohort = workload.cohort_size if is_classifier else workload.num_clients
    rounds = _rounds(name, number * cohort, sizes)
    return rounds_alone(workload._replace(num_rounds=rounds), number)


def _clients(name: str, number: int, sizes: Sizes) -> Any:
    from benchmarks.programs import rounds_alone
    from fedjax_mm.cli.workloads import WORKLOADS, LearningWorkload

    workload: Any = WORKLOADS[name]
    if isinstance(workload, LearningWorkload):
        cohort = number // 10
        changes: dict[str, Any] = {"num_examples": 10, "cohort_size": cohort}
    else:
        cohort, changes = number, {"num_models": 10}
    changes |= {"num_clients": number, "num_rounds": _rounds(name, cohort, sizes)}
    return rounds_alone(workload._replace(**changes))


def _rounds(name: str, updates: int, sizes: Sizes) -> int:
    least, most = sizes.rounds[name]
    return min(max(least, sizes.updates[name] // updates), most)


def _table_1(methods: Sequence[str], sizes: Sizes) -> Any:
    from benchmarks.programs import table_1
    from fedjax_mm.papers import ITEMS

    known = ITEMS["maxfl-table1"].settings.methods
    return table_1({**sizes.table_1, "methods": {name: known[name] for name in methods}})


def measure(row: Row, sizes: Sizes, out: Path) -> dict[str, Any]:
    """Measures a row in this process, alone on the device."""
    import jax

    from benchmarks import programs
    from fedjax_mm.cli import speed as bench

    device = jax.devices()[0]
    about = {"device": device.device_kind, "jax": jax.__version__}
    if row.make is None:
        with device_of(out, alone=True):
            return about | {"ceilings": programs.ceilings(sizes.side, sizes.num_bytes)}
    with device_of(out, alone=row.runs_when_made):
        made = row.make(sizes)
    program, counted, seconds, checksums = made.program, made.counted(), made.seconds, None
    if seconds is None:
        with device_of(out, alone=True):
            (seconds,) = bench.seconds_of(program.run, 1)
            if seconds < 1:  # else a second run would tell little more
                seconds = bench.median_seconds(program, 5)
            if made.is_compared:
                checksums = programs.checksums(program.run())

    def mean(name: str) -> float:
        # A trip has several rounds if we, or XLA, have unrolled them.
        rounds = [
            made.num_rounds / each.trips if made.trips and each.trips else 1 for each in counted
        ]
        each_round = [getattr(each, name) / n for each, n in zip(counted, rounds, strict=True)]
        return sum(each_round) / len(each_round)

    return about | {
        "compile_seconds": program.compile_seconds,
        "seconds": seconds,
        "num_rounds": made.num_rounds,
        "updates": made.updates,
        "flops": made.flops,
        "mebibytes": program.mebibytes,
        "kernels": mean("kernels"),
        "as_on_gpus": mean("as_on_gpus"),
        "in_graphs": mean("in_graphs"),
        "round_bytes": None if made.is_batched else mean("num_bytes"),
        "is_batched": made.is_batched,
        "checksums": checksums,
    }


@contextmanager
def device_of(out: Path, *, alone: bool) -> Iterator[None]:
    """Waits until this process may use the device, alone or together with others.

    A process that waits to be alone keeps others from starting, because it would starve otherwise.
    """
    left = signal.alarm(0)  # because the time of waiting is not the row's
    with (
        (out / "rows" / "turn.lock").open("w") as turn,
        (out / "rows" / "device.lock").open("w") as device,
    ):
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(device, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        signal.alarm(left)
        yield


Measure = Callable[[Row, Any, Path], dict[str, Any]]


def work(
    todo: Sequence[Row],
    sizes: Any,
    out: Path,
    limit: int,
    deadline: float,
    measure: Measure = measure,
) -> None:
    """Measures rows one after the other in this process, until the deadline."""
    for row in todo:
        if time.time() > deadline:
            return
        # This ends a worker whose supervisor was killed, because nobody reads its messages then.
        print(f"begin {row.name}", flush=True)
        # End the process by its alarm, because Python's handlers wait until XLA has compiled.
        signal.alarm(limit)
        clock = time.perf_counter()
        try:
            found = measure(row, sizes, out)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.alarm(0)
        save(row, found | {"all_seconds": time.perf_counter() - clock}, out)
        gc.collect()  # arrays in cycles, because the next row may need their memory


def save(row: Row, found: Mapping[str, Any], out: Path) -> None:
    """Writes a row's file."""
    about = {
        key: getattr(row, key) for key in ("name", "group", "work", "size", "variant", "flags")
    }
    save_json(about | dict(found), path_of(row, out))


def path_of(row: Row, out: Path) -> Path:
    """Returns the file of a row."""
    return out / "rows" / f"{row.name}.json"


async def supervise(
    command: Sequence[str],
    given: Sequence[Row],
    out: Path,
    limit: int,
    note: Callable[[], None] = lambda: None,
) -> None:
    """Runs workers until all rows with their flags are finished, or their time is over.

    Args:
      command: of a worker.
      given: rows with equal flags.
      out: the directory.
      limit: seconds of a row.
      note: called whenever a row begins, and so after each row but the last.

    Raises:
      RuntimeError: if a worker ends before its first row.
    """
    by_name = {row.name: row for row in given}
    while any(not path_of(row, out).exists() for row in given):
        begun = None
        flags = f"{os.environ.get('XLA_FLAGS', '')} {given[0].flags}".strip()
        # Allocate as needed, because workers share the device's memory.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ | {"XLA_FLAGS": flags}
        worker = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env=environment
        )
        assert worker.stdout is not None
        try:
            async for line in worker.stdout:
                print(line.decode(), end="", flush=True)
                word, _, name = line.decode().strip().partition(" ")
                if word == "begin":
                    begun = by_name[name]
                    note()
            await worker.wait()
        finally:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()
        if worker.returncode == 0:
            return
        if begun is None or path_of(begun, out).exists():
            raise RuntimeError(f"a worker ended with {worker.returncode} outside of its rows")
        reason = f"the process ended with {worker.returncode}"
        if worker.returncode == -signal.SIGALRM:
            reason = f"took longer than {limit} seconds"
        save(begun, {"error": reason}, out)


async def supervise_all(
    command: Sequence[str],
    todo: Sequence[Row],
    given: Any,
    out: Path,
    note: Callable[[], None] = lambda: None,
) -> None:
    """Runs `given.jobs` workers side by side for the rows of each flag."""
    deadline = time.time() + given.budget
    for flags in dict.fromkeys(row.flags for row in todo):
        mine = [row for row in todo if row.flags == flags]
        shares = [mine[i :: given.jobs] for i in range(min(given.jobs, len(mine)))]
        if time.time() < deadline:
            rest = [*command, "--deadline", str(deadline), "--rows"]
            await asyncio.gather(
                *(
                    supervise([*rest, *(row.name for row in share)], share, out, given.limit, note)
                    for share in shares
                )
            )


def options(module: str, *, budget: float, limit: int) -> argparse.ArgumentParser:
    """Returns the options of a command that measures rows, with its defaults."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--out", type=Path, required=True, help="the directory of the results")
    parser.add_argument("--tiny", action="store_true", help="few and small rows, for tests")
    parser.add_argument(
        "--budget", type=float, default=budget, help=f"seconds, by default {budget:g}"
    )
    parser.add_argument(
        "--limit", type=int, default=limit, help=f"seconds of a row, by default {limit}"
    )
    parser.add_argument("--groups", nargs="+", help="groups of rows, by default all")
    parser.add_argument("--works", nargs="+", help="workloads, by default all")
    parser.add_argument("--retry", action="store_true", help="measure failed rows again")
    jobs = min(8, max(1, (os.cpu_count() or 1) // 2))  # at most 8, because they share the memory
    parser.add_argument(
        "--jobs", type=int, default=jobs, help=f"processes that compile, here by default {jobs}"
    )
    for name, kind, number in (("--deadline", float, None), ("--rows", str, "+")):  # of a worker
        parser.add_argument(name, type=kind, nargs=number, help=argparse.SUPPRESS)
    return parser


def carry_out(
    module: str,
    given: argparse.Namespace,
    all_rows: Sequence[Row],
    sizes: Any,
    measure: Measure,
    report: Callable[[Sequence[dict[str, Any]], Path], None],
    *,
    report_each: bool = False,
) -> None:
    """Measures what is left, and reports; or, in a worker, measures the rows that it was given.

    Args:
      module: of the command, which is also that of its workers.
      given: the arguments of the command.
      all_rows: of these sizes.
      sizes: how large the rows are.
      measure: measures a row alone on the device.
      report: writes what was found so far.
      report_each: whether to report after each row, not only at the end.
    """
    out = given.out.resolve()
    prepare_directory(out / "rows")
    if given.rows is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # because its supervisor ends it
        mine = [row for row in all_rows if row.name in given.rows]
        todo = [row for row in mine if not path_of(row, out).exists()]
        work(todo, sizes, out, given.limit, given.deadline, measure)
        return
    wanted = [row for row in all_rows if not given.groups or row.group in given.groups]
    wanted = [row for row in wanted if not given.works or row.work in given.works]
    if given.retry:
        for row in wanted:
            path = path_of(row, out)
            if path.exists() and "error" in json.loads(path.read_text()):
                path.unlink()

    def found() -> list[dict[str, Any]]:
        paths = [path_of(row, out) for row in all_rows]
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    def note() -> None:
        if report_each:
            report(found(), out)

    todo = [row for row in wanted if not path_of(row, out).exists()]
    command = [sys.executable, "-m", module, "--out", str(out)]
    command += ["--limit", str(given.limit)] + ["--tiny"] * given.tiny
    asyncio.run(supervise_all(command, todo, given, out, note))
    report(found(), out)
    left = sum(not path_of(row, out).exists() for row in wanted)
    print(f"{len(found())} rows, {left} left" + ": run the command again" * bool(left))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what is left, and writes the report."""
    parser = options(MODULE, budget=420, limit=100)
    given = parser.parse_args(arguments)
    if given.jobs < 1:
        parser.error(f"--jobs is {given.jobs}; give at least 1")
    sizes = TINY if given.tiny else FULL
    carry_out(MODULE, given, list(rows(sizes)), sizes, measure, write_report)


if __name__ == "__main__":
    main()
