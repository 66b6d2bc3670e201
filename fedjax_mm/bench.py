"""Benchmark workloads: what `fedjax-mm bench` times, and `benchmarks/` beside other systems."""

import resource
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignment import mfa_rand, mfa_rr
from fedjax_mm.base import Assignment
from fedjax_mm.runs import seed_keys
from fedjax_mm.simulate import ClientMap, simulate
from fedjax_mm.tasks.quadratic import quadratic

ASSIGNMENTS: dict[str, Callable[[int, int], Assignment]] = {"MFA-Rand": mfa_rand, "MFA-RR": mfa_rr}


class Workload(NamedTuple):
    """A quadratic (p = 4, E = 5, eta = 0.1), all of whose models are trained by all clients."""

    name: str
    num_clients: int
    num_models: int
    num_rounds: int
    num_seeds: int

    @property
    def client_updates(self) -> int:
        """Local trainings in one run."""
        return self.num_clients * self.num_rounds * self.num_seeds


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", 24, 12, 1000, 20),
        Workload("W1b", 1000, 10, 200, 20),
        Workload("W1c", 1_000_000, 10, 20, 1),
    )
}


class Timing(NamedTuple):
    """One workload's cost, compilation and run apart."""

    compile_seconds: float
    run_seconds: float  # median
    updates_per_second: float
    peak_mib: float  # of this process so far


def program(workload: Workload, label: str, client_map: ClientMap = "vmap") -> tuple[Any, float]:
    """The compiled program with its arguments bound, and the seconds that compiling took."""
    assignment = ASSIGNMENTS[label](workload.num_clients, workload.num_models)
    task = quadratic(workload.num_clients, 4, mu=2e-4)
    keys = seed_keys(0, workload.num_seeds)

    def run(rng_key: Any, task: Any, learning_rate: Any) -> Any:
        algorithm = fedavg(learning_rate, local_steps=5)
        return simulate(
            rng_key, task, algorithm, assignment, workload.num_rounds, client_map=client_map
        )[1]

    clock = time.perf_counter()
    compiled = jax.jit(jax.vmap(run, (0, None, None))).lower(keys, task, 0.1).compile()
    seconds = time.perf_counter() - clock
    return lambda: jax.block_until_ready(compiled(keys, task, 0.1)), seconds


def measure(
    workload: Workload, label: str, client_map: ClientMap = "vmap", repeats: int = 5
) -> Timing:
    """Compiles, warms up once, and times `repeats` runs."""
    run, compile_seconds = program(workload, label, client_map)
    run()
    times = []
    for _ in range(repeats):
        clock = time.perf_counter()
        run()
        times.append(time.perf_counter() - clock)
    median = statistics.median(times)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return Timing(compile_seconds, median, workload.client_updates / median, peak_mib)
