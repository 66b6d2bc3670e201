"""Client updates per second as a workload grows: by clients, models, replicas and rounds.

`python -m benchmarks.growth FIGURE.png [DIRECTION ...]` times W1 and W2 in these directions, prints
each size as it comes, with the memory of its program and of its data, and draws them. Where a curve
is flat, twice the work takes twice the time.

| direction | W1: the quadratic, E = 5 | W2: logistic regression 60-5, E = 5, B = 20 |
|---|---|---|
| clients | N, who train 10 models; one seed | N of 10 examples, a tenth in each round |
| models | M of 1,920 clients; one seed | M of the same 128 clients of 200 examples |
| replicas | seeds of a sweep, 24 clients and 12 models | seeds of a sweep, 100 clients of 200 |
| rounds | recorded rounds, 24 clients, 12 models; one seed | recorded rounds, 100 clients of 200 |

`python -m benchmarks.growth fixed` prints the CPU time of a sweep of a single round, for more and
more points and seeds of W1's quadratic, and for seeds with their own data, those of W2.
"""

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

from fedjax_mm import fedavg, local_sgd, mfa_rand
from fedjax_mm.base import Task
from fedjax_mm.cli import speed as bench
from fedjax_mm.cli.workloads import WORKLOADS, LearningWorkload
from fedjax_mm.results.dataset import save_dataset
from fedjax_mm.sweeps import Execution
from fedjax_mm.sweeps.devices import use_cpu_devices
from fedjax_mm.sweeps.execute import batches
from fedjax_mm.sweeps.grid import Grid, Setup
from fedjax_mm.sweeps.plan import make_plan
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.sweeps.result import Result
from fedjax_mm.tasks import classification, quadratic

UPDATES = {"W1": 4_000_000, "W2": 100_000}  # of a run, about a second's
MOST_ROUNDS = 20_000
LEAST_ROUNDS = {"W1": 500, "W2": 20}  # of replicas: a batch of them costs a few milliseconds
DIRECTIONS = {
    "clients": [10**i for i in range(2, 7)],
    "models": [1, 2, 4, 8, 16, 32, 64],
    "replicas": [1, 4, 16, 64, 256, 1024, 4096],
    "rounds": [10**i for i in range(2, 7)],
}
MOST_UPDATES = 30_000_000  # sizes with more are left out


class Size(NamedTuple):
    """A size of a workload, with the dimensions of its sweep."""

    task: Task
    num_models: int
    cohort_size: int
    num_seeds: int
    num_rounds: int | None = None
    """All recorded; None is about a second's, of which only the last is recorded."""


class Point(NamedTuple):
    """A size that was timed: updates per second, the memory of its program and of its data."""

    work: str
    direction: str
    size: int
    speed: float
    mebibytes: float
    data_mebibytes: float


def sized(work: str, direction: str, size: int) -> Size:
    """Returns a workload in a size."""
    clients, models, seeds, rounds = (size if direction == name else None for name in DIRECTIONS)
    if work == "W1":
        num_clients = clients or (24 if seeds or rounds else 1920)
        task: Task = quadratic(num_clients, 4, mu=2e-4)
        num_models = models or (12 if seeds or rounds else 10)
        return Size(task, num_models, num_clients, seeds or 1, rounds)
    base = WORKLOADS["W2"]
    assert isinstance(base, LearningWorkload)
    num_clients = clients or (100 if seeds or rounds else 128)
    base = base._replace(num_clients=num_clients, num_examples=10 if clients else 200)
    cohort_size = clients // 10 if clients else num_clients
    task = classification(base.data(), base.model.module())
    return Size(task, models or 1, cohort_size, seeds or 1, rounds)


def unmeasured(task: Any) -> Task:
    """Returns the task without metrics: rounds alone are timed, not the records at both ends."""

    class Unmeasured(type(task)):  # type: ignore[misc]
        def metrics(self, *_: Any) -> dict[str, Any]:
            return {}

    names = [field.name for field in dataclasses.fields(task)]
    static = [f.name for f in dataclasses.fields(task) if f.metadata.get("static")]
    arrays = [name for name in names if name not in static]
    jax.tree_util.register_dataclass(Unmeasured, data_fields=arrays, meta_fields=static)
    return Unmeasured(**{name: getattr(task, name) for name in names})


def build(work: str, size: Size) -> tuple[bench.Program, int]:
    """Returns a program, a sweep, and its client updates."""
    rounds = UPDATES[work] // (size.cohort_size * size.num_seeds)
    least = LEAST_ROUNDS[work] if size.num_seeds > 1 else 2
    rounds = size.num_rounds or min(max(least, rounds), MOST_ROUNDS)
    how: dict[str, Any] = {"batch_size": 20} if work == "W2" else {}
    assignment = mfa_rand(size.task.num_clients, size.num_models, cohort_size=size.cohort_size)

    is_recorded = size.num_rounds is not None
    task = size.task if is_recorded else unmeasured(size.task)
    setup = Setup(task, fedavg(local_sgd(0.1, steps=5, **how)), assignment)
    every = 1 if is_recorded else rounds
    grid = Grid(setup, {}, rounds, size.num_seeds, record_every=every)
    program = bench.program_of(make_plan(grid))
    return program, size.num_seeds * rounds * size.cohort_size


def points(directions: Sequence[str]) -> Iterator[Point]:
    """Yields all sizes, timed one after the other."""
    for work in UPDATES:
        for direction in directions:
            for number in DIRECTIONS[direction]:
                size = sized(work, direction, number)
                if (size.num_rounds or 0) * size.cohort_size > MOST_UPDATES:
                    continue
                program, updates = build(work, size)
                stored = sum(x.nbytes for x in jax.tree.leaves(size.task)) / 2**20
                repeats = 3 if updates <= 2 * UPDATES[work] else 1
                speed = updates / bench.median_seconds(program, repeats)
                yield Point(work, direction, number, speed, program.mebibytes, stored)


class Fixed(NamedTuple):
    """The CPU seconds that a sweep of some runs takes apart from its rounds."""

    runs: int
    build: float
    """Building and grouping the points."""
    plan: float
    """Tracing and compiling."""
    run: float
    """One round, and collecting the records."""
    label: float
    save: float


def fixed(kind: str, size: int) -> Fixed:
    """Times the steps of a sweep of one round.

    Args:
      kind: what grows, "points", "seeds" or "seeds with data".
      size: the number of them.
    """
    base = WORKLOADS["W2"]
    assert isinstance(base, LearningWorkload)
    shared, data, network = quadratic(24, 4, mu=2e-4), base.data(), base.model.module()

    def build(learning_rate: Any) -> Setup:
        return Setup(shared, fedavg(learning_rate, local_steps=5), mfa_rand(24, 2))

    def with_data(learning_rate: Any, seed: int) -> Setup:
        del seed
        local = local_sgd(learning_rate, steps=5, batch_size=20)
        return Setup(classification(data, network), fedavg(local), mfa_rand(100, 1))

    points, seeds = (size, 1) if kind == "points" else (1, size)
    axes = {"learning_rate": [float(x) for x in np.geomspace(0.01, 0.1, points)]}
    clock = [time.process_time()]
    grid = Grid(with_data if kind == "seeds with data" else build, axes, 1, seeds)
    programs = programs_of(grid)
    clock.append(time.process_time())
    plan = make_plan(grid, programs=programs)
    clock.append(time.process_time())
    result = Result(plan)
    for last in batches(plan, Execution(), "mark"):
        result.place(last.program, last.replicas, last.records)
    clock.append(time.process_time())
    dataset = result.dataset()
    clock.append(time.process_time())
    with TemporaryDirectory() as directory:
        save_dataset(dataset, Path(directory) / "result.nc")
    clock.append(time.process_time())
    return Fixed(len(plan.programs[0]), *np.diff(clock))


def print_fixed() -> None:
    """Prints the fixed costs of sweeps of several sizes."""
    print("| runs | build s | plan s | run s | label s | save s |\n|---|---:|---:|---:|---:|---:|")
    for kind, most in {"points": 5, "seeds": 5, "seeds with data": 3}.items():
        for size in [10**i for i in range(1, most + 1)]:
            found = fixed(kind, size)
            cells = " | ".join(f"{seconds:.3f}" for seconds in found[1:])
            print(f"| {found.runs:,} {kind} | {cells} |", flush=True)


def draw(found: list[Point]) -> Figure:
    """Draws a panel for each direction, with a curve for each workload."""
    directions = list(dict.fromkeys(point.direction for point in found))
    figure = Figure(figsize=(2.6 * len(directions) + 0.6, 3.4), layout="constrained")
    panels = figure.subplots(1, len(directions), sharey=True, squeeze=False)[0]
    for axes, direction in zip(panels, directions, strict=True):
        for work, marker in zip(UPDATES, "os", strict=True):
            here = [p for p in found if (p.work, p.direction) == (work, direction)]
            axes.loglog([p.size for p in here], [p.speed for p in here], marker=marker, label=work)
        axes.set(xlabel=direction, ylim=(1e4, 1e8))
        axes.grid(True, alpha=0.3)
    figure.axes[0].set_ylabel("client updates per second")
    figure.axes[0].legend()
    return figure


def main() -> None:
    """Times, prints and draws."""
    use_cpu_devices()
    if sys.argv[1:] == ["fixed"]:
        print_fixed()
        return
    print("| work | by | size | updates/s | MiB | of which data |\n|---|---|---:|---:|---:|---:|")
    found = []
    for point in points(sys.argv[2:] or list(DIRECTIONS)):
        found.append(point)
        numbers = f"{point.speed:,.0f} | {point.mebibytes:,.1f} | {point.data_mebibytes:,.1f}"
        print(f"| {point.work} | {point.direction} | {point.size:,} | {numbers} |", flush=True)
    draw(found).savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
