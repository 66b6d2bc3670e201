"""Client updates per second as a workload grows: by clients, by models, by replicas.

`python -m benchmarks.growth FIGURE.png` times W1 and W2 in three directions, prints a table with
the memory of the programs beside their data, and draws it. Where a curve is flat, twice the work
takes twice the time.

| direction | W1: the quadratic of M = 12 models, 20 seeds | W2: logistic regression 60-5 |
|---|---|---|
| clients | N; M = 10 and one seed | N of 20 examples, a tenth in each round |
| models | M of 1,920 clients, which all train, one seed | M of the same data |
| replicas | seeds | seeds, as of a sweep |
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from fedjax_mm import bench
from fedjax_mm.assignments.partitions import mfa_rand
from fedjax_mm.sweeps.devices import use_cpu_devices
from fedjax_mm.sweeps.execute import Execution, carry_out
from fedjax_mm.sweeps.grid import Grid, Setup
from fedjax_mm.sweeps.plan import make_plan
from fedjax_mm.tasks.classification import classification
from fedjax_mm.workloads import WORKLOADS, LearningWorkload, Workload

_UPDATES = {"W1": 4_000_000, "W2": 200_000}  # of a run, about a second's
_MOST = {("W2", "clients"): 100_000, ("W2", "replicas"): 1024}  # for memory and for time
_REPEATS = 3
DIRECTIONS = {
    "clients": [10**i for i in range(2, 7)],
    "models": [1, 2, 4, 8, 16, 32, 64],
    "replicas": [1, 4, 16, 64, 256, 1024, 4096],
}


class Point(NamedTuple):
    """A size that was timed: updates per second, the program's memory and that of its data."""

    work: str
    direction: str
    size: int
    speed: float
    mebibytes: float
    data_mebibytes: float


def quadratics(direction: str, size: int) -> tuple[bench.Program, int, float]:
    """Returns W1 in a size: the program, its client updates, and the data's mebibytes."""
    sizes = {
        "clients": {"num_clients": size, "num_models": 10, "num_seeds": 1},
        "models": {"num_clients": 1920, "num_models": size, "num_seeds": 1},
        "replicas": {"num_clients": 24, "num_models": 12, "num_seeds": size},
    }[direction]
    rounds = max(2, _UPDATES["W1"] // (sizes["num_clients"] * sizes["num_seeds"]))
    workload = Workload("W1", num_rounds=min(rounds, 20_000), **sizes)
    program = bench.build(workload, "MFA-Rand")
    return program, workload.client_updates, 4 * sizes["num_models"] * sizes["num_clients"] / 2**18


def classifiers(direction: str, size: int) -> tuple[bench.Program, int, float]:
    """Returns W2 in a size, as `quadratics`; the plan's memory in place of the program's."""
    base = WORKLOADS["W2"]
    assert isinstance(base, LearningWorkload)
    num_models, num_seeds = 1, 1
    if direction == "clients":
        base = base._replace(num_clients=size, cohort_size=size // 10, num_examples=20)
    elif direction == "models":
        base, num_models = base._replace(num_clients=128, cohort_size=128), size
    else:
        num_seeds = size
    data = base.data()
    task, algorithm = classification(data, base.model.module()), base.algorithm()
    rounds = max(2, _UPDATES["W2"] // (base.cohort_size * num_seeds))

    def setup(task: Any) -> Setup:
        assignment = mfa_rand(base.num_clients, num_models, cohort_size=base.cohort_size)
        return Setup(task, algorithm, assignment)

    grid = Grid(setup, {}, rounds, num_seeds, record_every=rounds, shared={"task": task})
    plan = make_plan(grid)

    def follow() -> Any:
        return carry_out(plan, Execution(), data="synthetic", on_divergence="mark")

    program = bench.Program(follow, plan.compile_seconds, plan.batch_bytes / 2**20)
    stored = sum(x.nbytes for x in jax.tree.leaves(data.train.examples)) / 2**20
    return program, num_seeds * rounds * base.cohort_size, stored


def points() -> Iterator[Point]:
    """Yields all sizes, timed one after the other."""
    for work, build in {"W1": quadratics, "W2": classifiers}.items():
        for direction, sizes in DIRECTIONS.items():
            for size in sizes:
                if size > _MOST.get((work, direction), size):
                    continue
                program, updates, stored = build(direction, size)
                speed = updates / bench.median_seconds(program, _REPEATS)
                yield Point(work, direction, size, speed, program.mebibytes, stored)


def draw(found: list[Point]) -> Figure:
    """Draws a panel for each direction, with a curve for each workload."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, direction in zip(figure.subplots(1, 3, sharey=True), DIRECTIONS, strict=True):
        for work, marker in (("W1", "o"), ("W2", "s")):
            here = [p for p in found if (p.work, p.direction) == (work, direction)]
            axes.loglog([p.size for p in here], [p.speed for p in here], marker=marker, label=work)
        axes.set(xlabel=direction, title=f"more {direction}")
        axes.grid(True, alpha=0.3)
    figure.axes[0].set_ylabel("client updates per second")
    figure.axes[0].legend()
    return figure


def main() -> None:
    """Times, prints and draws."""
    use_cpu_devices()
    table = Table("work", "by", "size", "updates/s", "MiB", "data MiB", box=None)
    found = []
    for point in points():
        found.append(point)
        numbers = f"{point.speed:,.0f}", f"{point.mebibytes:,.0f}", f"{point.data_mebibytes:,.0f}"
        table.add_row(point.work, point.direction, f"{point.size:,}", *numbers)
    Console(width=100).print(table)
    draw(found).savefig(sys.argv[1], dpi=120)


if __name__ == "__main__":
    main()
