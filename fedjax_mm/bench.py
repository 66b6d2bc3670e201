"""Benchmark workloads: what `fedjax-mm bench` times, and `benchmarks/` beside other systems."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignment import mfa_rand, mfa_rr
from fedjax_mm.base import Assignment
from fedjax_mm.devices import layout
from fedjax_mm.plan import Grid, Setup, make_plan, seed_keys
from fedjax_mm.simulate import ClientMap, simulate
from fedjax_mm.sweep import Execution, carry_out
from fedjax_mm.tasks.quadratic import quadratic

ASSIGNMENTS: dict[str, Callable[[int, int], Assignment]] = {"MFA-Rand": mfa_rand, "MFA-RR": mfa_rr}


class Workload(NamedTuple):
    """A quadratic (p = 4, E = 5, eta = 0.1); all clients train, each one of all the models."""

    name: str
    num_clients: int
    num_models: int
    num_rounds: int
    num_seeds: int

    @property
    def labels(self) -> tuple[str, ...]:
        """What is timed one by one."""
        return tuple(ASSIGNMENTS)

    @property
    def client_updates(self) -> int:
        """Local trainings in one run."""
        return self.num_clients * self.num_rounds * self.num_seeds


class SweepWorkload(NamedTuple):
    """A sweep on that quadratic over both algorithms, numbers of models and learning rates."""

    name: str
    num_clients: int
    num_models: tuple[int, ...]
    num_rates: int
    num_rounds: int
    num_seeds: int
    record_every: int

    @property
    def labels(self) -> tuple[str, ...]:
        """What is timed: all at once."""
        return ("sweep of both",)

    @property
    def client_updates(self) -> int:
        """Local trainings in the sweep."""
        points = len(ASSIGNMENTS) * len(self.num_models) * self.num_rates
        return points * self.num_seeds * self.num_rounds * self.num_clients

    def grid(self) -> Grid:
        """All its runs."""

        def setup(algorithm: str, num_models: int, learning_rate: Any) -> Setup:
            assignment = ASSIGNMENTS[algorithm](self.num_clients, num_models)
            task = quadratic(self.num_clients, 4, mu=2e-4)
            return Setup(task, fedavg(learning_rate, local_steps=5), assignment)

        axes: dict[str, Sequence[Any]] = {
            "algorithm": list(ASSIGNMENTS),
            "num_models": self.num_models,
            "learning_rate": list(np.geomspace(0.01, 0.3, self.num_rates)),
        }
        return Grid(setup, axes, self.num_rounds, self.num_seeds, record_every=self.record_every)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", 24, 12, 1000, 20),
        Workload("W1b", 1000, 10, 200, 20),
        Workload("W1c", 1_000_000, 10, 20, 1),
        SweepWorkload("S1", 24, (2, 12), 16, 1000, 64, 10),
    )
}


class Program(NamedTuple):
    """A compiled workload.

    Attributes:
      run: does all the work and waits for it.
      compile_seconds: of tracing and compiling.
      mebibytes: memory of the arguments, the results and the temporaries.
    """

    run: Callable[[], Any]
    compile_seconds: float
    mebibytes: float


def build(
    workload: Workload | SweepWorkload, label: str, client_map: ClientMap = "vmap"
) -> Program:
    """Compiles a workload for all devices; `label` is one of its labels."""
    if isinstance(workload, SweepWorkload):
        plan = make_plan(workload.grid())

        def follow() -> Any:
            return carry_out(plan, Execution(), data="synthetic", on_divergence="mark")

        return Program(follow, plan.compile_seconds, plan.batch_bytes / 2**20)
    assignment = ASSIGNMENTS[label](workload.num_clients, workload.num_models)
    task = quadratic(workload.num_clients, 4, mu=2e-4)
    where = layout(workload.num_seeds, axis="replicas")
    keys = seed_keys(0, where.padded(workload.num_seeds))

    def run(rng_key: Any, task: Any, learning_rate: Any) -> Any:
        algorithm = fedavg(learning_rate, local_steps=5)
        return simulate(
            rng_key, task, algorithm, assignment, workload.num_rounds, client_map=client_map
        )[1]

    clock = time.perf_counter()
    everywhere = where.over(jax.vmap(run, (0, None, None)), (0, None, None))
    compiled = jax.jit(everywhere).lower(keys, task, 0.1).compile()
    seconds = time.perf_counter() - clock
    return Program(
        lambda: jax.block_until_ready(compiled(keys, task, 0.1)), seconds, _mebibytes(compiled)
    )


def _mebibytes(compiled: Any) -> float:
    """Arguments, results and temporaries; NaN where the backend does not say."""
    memory = compiled.memory_analysis()
    if memory is None:
        return math.nan
    sizes = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    return sum(getattr(memory, size) for size in sizes) / 2**20


def median_seconds(program: Program, repeats: int) -> float:
    """The median over `repeats` runs, after one to warm up."""
    program.run()
    times = []
    for _ in range(repeats):
        clock = time.perf_counter()
        program.run()
        times.append(time.perf_counter() - clock)
    return statistics.median(times)
