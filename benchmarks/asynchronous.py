"""FedAST as a Python event loop around a compiled client update, as its serial programs are.

The loop keeps a heap of jobs, trains each one when it comes home, and makes a step once a buffer is
full. It is given the draws of `simulate`, so that both do the same work. A job costs it one
compiled call for the client's update and one for the sum in the buffer, or a single one for both.

`python -m benchmarks.asynchronous [REPEATS]` times both in turn and prints a table.
"""

import heapq
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from fedjax_mm import fedavg, local_sgd, simulate
from fedjax_mm.asynchrony import Dispatch, fedast
from fedjax_mm.asynchrony.dispatch import draws_of
from fedjax_mm.base import Algorithm, ClientContext, keys
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.base.sums import dense_update
from fedjax_mm.cli import speed as bench
from fedjax_mm.data import synthetic
from fedjax_mm.sweeps.devices import layout, use_cpu_devices
from fedjax_mm.tasks import LogisticRegression, classification, quadratic

NUM_MODELS, NUM_ARRIVALS = 3, 10_000


def parts(name: str) -> tuple[Any, Algorithm, Dispatch]:
    """Returns the task of three models, the method, and a dispatch with 300 jobs.

    F1 is a quadratic with 24 clients and E = 5 full-gradient steps, as W1; F2 the classes of
    Synthetic(1, 1) with 100 clients and E = 5 steps of B = 20 examples, as W2; F3 has E = 1.
    """
    if name == "F1":
        task: Any = quadratic(24, 4, mu=2e-4)
        algorithm = fedavg(0.1, local_steps=5, weighted=False)
    else:
        task = classification(synthetic(100), LogisticRegression(5))
        steps = {"F2": 5, "F3": 1}[name]
        algorithm = fedavg(local_sgd(0.05, steps=steps, batch_size=20), weighted=False)
    how: Any = {"at_work": 100, "ratio": 10, "reallocate": False, "arrivals_per_round": 1}
    dispatch = fedast(task.num_clients, NUM_MODELS, **how)
    return task, algorithm, dispatch


def event_loop(
    name: str, num_arrivals: int = NUM_ARRIVALS, *, fused: bool = True
) -> Callable[[], Any]:
    """Returns a function that runs the loop and returns the models and their last metrics.

    If it is fused, one compiled call trains and adds the update to the buffer.
    """
    task, algorithm, dispatch = parts(name)
    rng_key, R = jax.random.key(0), dispatch.num_jobs
    numbers = jnp.arange(R + num_arrivals)
    drawn = jax.device_get(jax.jit(lambda: draws_of(dispatch, rng_key, numbers))())
    clients, delays = drawn.client.tolist(), drawn.delay.tolist()
    start = [
        jax.jit(task.init)(key) for key in keys.start_keys(rng_key, range(dispatch.num_models))
    ]

    @jax.jit
    def update(task: Any, params: Any, number: Any, client: Any, step: Any) -> Any:
        key = keys.training_key(keys.job_key(rng_key, number))
        local = ClientContext(key, step, task, client, params)
        sent, _ = algorithm.client(local, (), ())
        return dense_update(sent, params).update

    @jax.jit
    def add(total: Any, change: Any) -> Any:
        return jax.tree.map(jnp.add, total, change)

    def train(total: Any, *job: Any) -> Any:
        return add(total, update(*job))

    train = jax.jit(train) if fused else train

    @jax.jit
    def step(params: Any, total: Any, size: Any) -> tuple[Any, Any]:
        params = jax.tree.map(lambda w, x: w + x / size, params, total)
        return params, jax.tree.map(jnp.zeros_like, total)

    @jax.jit
    def measure(task: Any, models: Any) -> Any:
        return [task.metrics(rng_key, params) for params in models]

    def run() -> Any:
        models, steps = list(start), [0] * NUM_MODELS
        buffers, filled = [jax.tree.map(jnp.zeros_like, w) for w in models], [0] * NUM_MODELS
        measure(task, models)
        models_of = np.repeat(np.arange(NUM_MODELS), dispatch.at_work).tolist()
        jobs = {number: (models[m], 0) for number, m in enumerate(models_of)}
        queue = [(delays[number][m], number, m) for number, m in enumerate(models_of)]
        heapq.heapify(queue)
        for new in range(R, R + num_arrivals):
            now, number, m = heapq.heappop(queue)
            params, version = jobs.pop(number)
            buffers[m] = train(buffers[m], task, params, number, clients[number], version + 1)
            filled[m] += 1
            if filled[m] == math.ceil(dispatch.at_work[m] / dispatch.ratio):
                models[m], buffers[m] = step(models[m], buffers[m], filled[m])
                filled[m], steps[m] = 0, steps[m] + 1
            jobs[new] = models[m], steps[m]
            heapq.heappush(queue, (now + delays[new][m], new, m))
        return jax.block_until_ready((models, measure(task, models)))

    return run


def compiled(name: str, num_arrivals: int = NUM_ARRIVALS) -> tuple[Callable[[], Any], float]:
    """Returns a function that does the same in one program, and the seconds of compiling it."""
    made = bench.compile_program(program(name, num_arrivals))
    return made.run, made.compile_seconds


def program(name: str, num_arrivals: int = NUM_ARRIVALS) -> bench.Uncompiled:
    """Returns the program, which is not compiled, on one device."""
    arguments = jax.random.key(0), parts(name)[0]
    return bench.Uncompiled(_program(name, num_arrivals), arguments, layout(1, jax.devices()[:1]))


def shared(name: str) -> Callable[[], Any]:
    """Returns the same, whose jobs the devices share."""
    where = layout(1, axis="clients")
    all_of_it = where.over(_program(name, NUM_ARRIVALS, where.client_axis), (None, None), None)
    arguments = jax.random.key(0), parts(name)[0]
    return bench.compile_program(bench.Uncompiled(all_of_it, arguments, where)).run


def seeds(name: str, number: int) -> Callable[[], Any]:
    """Returns a function that does the same with many seeds, shared out over the devices."""
    where = layout(number, axis="replicas")
    all_of_it = where.over(jax.vmap(_program(name, NUM_ARRIVALS), (0, None)), (0, None))
    arguments = seed_keys(0, range(number)), parts(name)[0]
    return bench.compile_program(bench.Uncompiled(all_of_it, arguments, where)).run


def _program(name: str, num_arrivals: int, client_axis: str | None = None) -> Callable[..., Any]:
    _, algorithm, dispatch = parts(name)
    how: Any = {"record_every": num_arrivals, "client_axis": client_axis}

    def run(rng_key: Any, task: Any) -> Any:
        return simulate(rng_key, task, algorithm, dispatch, num_arrivals, **how)

    return run


def main() -> None:
    """Times the loops and the programs in turn and prints medians per arrival."""
    use_cpu_devices()
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    number = 8
    columns = "loop, two calls", "loop, one call", "one run", "shared", f"{number} seeds"
    table = Table("microseconds", *columns, box=None)
    for name in "F1", "F2", "F3":
        runs = (
            (event_loop(name, fused=False), 1),
            (event_loop(name), 1),
            (compiled(name)[0], 1),
            (shared(name), 1),
            (seeds(name, number), number),
        )
        taken: list[list[float]] = [[] for _ in runs]
        for run, _ in runs:
            run()
        for _ in range(repeats):
            for (run, count), found in zip(runs, taken, strict=True):
                start = time.perf_counter()
                run()
                found.append((time.perf_counter() - start) / (count * NUM_ARRIVALS) * 1e6)
        table.add_row(name, *(f"{statistics.median(found):.2f}" for found in taken))
    Console(width=80).print(table)


if __name__ == "__main__":
    main()
