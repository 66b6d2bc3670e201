"""Memory and time of SCAFFOLD whose client states are in files, and of the same run in memory.

`python -m benchmarks.client_files DIRECTORY [ROUNDS [CLIENTS]]` runs each row in a child process on
one device, and prints its peak resident memory, seconds and CPU seconds a round, and the first
digits of a digest of the final parameters. The network is W3's, with 52,704 parameters, and 100
clients of 8 examples take 5 steps of 8 in a round. The files in DIRECTORY are deleted at the end.
"""

import hashlib
import resource
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np

from fedjax_mm import local_sgd, mfa_rand, scaffold, sweep
from fedjax_mm.cli.workloads import PERCEPTRON
from fedjax_mm.data import FederatedData
from fedjax_mm.data.clients import flat_client_data
from fedjax_mm.sweeps import Callback, Execution, Setup
from fedjax_mm.sweeps.plan import Plan, Segment
from fedjax_mm.tasks import classification

EXAMPLES, COHORT, STEPS = 8, 100, 5


def setup(num_clients: int) -> Setup:
    """SCAFFOLD on random images of bytes."""
    rng = np.random.default_rng(0)

    def some(clients: int, each: int) -> Any:
        images = rng.integers(256, size=(clients * each, 784), dtype=np.uint8)
        labels = rng.integers(10, size=len(images), dtype=np.int32)
        return flat_client_data((images, labels), [each] * clients)

    train, test = some(num_clients, EXAMPLES), some(1, 1000)
    data = FederatedData("random", "synthetic", 10, train, test)
    task = classification(data, PERCEPTRON.module(), scale=1 / 255)
    algorithm = scaffold(local_sgd(0.05, steps=STEPS, batch_size=EXAMPLES))
    return Setup(task, algorithm, mfa_rand(num_clients, 1, cohort_size=COHORT))


def measure(num_clients: int, num_rounds: int, directory: str | None) -> str:
    """Runs once in this process, and describes what it took."""
    moments = list[tuple[int, float, float]]()

    def note(segment: Segment) -> None:
        moments.append((segment.rounds, time.perf_counter(), time.process_time()))

    def show(plan: Plan) -> None:
        print(*plan.lines[1:], sep="\n", file=sys.stderr)

    watch = Callback(on_start=show, on_segment=note)
    how = Execution(client_states=directory, callbacks=[watch], progress=False)
    runs: Any = {"num_rounds": num_rounds, "record_every": num_rounds, "keep": "params"}
    _, params = sweep(setup(num_clients), execution=how, **runs)
    digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params)))
    # The first segment also starts the run, and the last one measures it.
    (first, start, cpu), (last, end, spent) = moments[0], moments[-2]
    wall, used = (end - start) / (last - first), (spent - cpu) / (last - first)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    kind = "in memory" if directory is None else "in files"
    words = f"{num_clients:,} | {kind} | {peak:.2f} | {wall:.3f} | {used:.3f}"
    return f"| {words} | {digest.hexdigest()[:8]} |"


def main(directory: str, num_rounds: str = "300", num_clients: str = "20000") -> None:
    """Runs all rows."""
    print("| clients | states | peak GiB | s/round | CPU s/round | digest |")
    print("|---|---|---|---|---|---|")
    few = str(int(num_clients) // 10)
    for clients, where in ((few, ""), (few, directory), (num_clients, directory)):
        child = [sys.executable, "-m", "benchmarks.client_files", "one", clients, num_rounds, where]
        subprocess.run(child, check=True)


if __name__ == "__main__":
    if sys.argv[1] == "one":
        _, _, clients, rounds, where = sys.argv
        print(measure(int(clients), int(rounds), where or None), flush=True)
    else:
        main(*sys.argv[1:])
