"""FedAST as a Python event loop around a compiled client update, as its serial programs are.

The loop keeps a heap of jobs, trains each one when it comes home, and makes a step once a buffer is
full. It is given the draws of `simulate_async`, so that both do the same work; a job costs it one
compiled call, which adds the update to the buffer too: with a second one for the sum the loop would
be slower.
"""

import heapq
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mm import fedavg, keys
from fedjax_mm.asynchrony import Dispatch, fedast, simulate_async
from fedjax_mm.asynchrony.dispatch import draws_of
from fedjax_mm.base import Algorithm, LocalProblem
from fedjax_mm.data import synthetic
from fedjax_mm.sums import dense_update
from fedjax_mm.tasks import LogisticRegression, classification, quadratic

NUM_MODELS, NUM_ARRIVALS = 3, 10_000


def parts(name: str) -> tuple[Any, Algorithm, Dispatch]:
    """Returns the task of three models, the method, and 300 jobs at work.

    F1 is a quadratic with 24 clients and E = 5 full-gradient steps, as W1; F2 the classes of
    Synthetic(1, 1) with 100 clients and E = 5 steps of B = 20 examples, as W2; F3 has E = 1.
    """
    if name == "F1":
        task: Any = quadratic(24, 4, mu=2e-4)
        algorithm = fedavg(0.1, local_steps=5, weighted=False)
    else:
        task = classification(synthetic(100), LogisticRegression(5))
        steps = {"F2": 5, "F3": 1}[name]
        algorithm = fedavg(0.05, local_steps=steps, batch_size=20, weighted=False)
    dispatch = fedast(task.num_clients, NUM_MODELS, at_work=100, ratio=10, reallocate=False)
    return task, algorithm, dispatch


def event_loop(name: str, num_arrivals: int = NUM_ARRIVALS) -> Callable[[], Any]:
    """Returns a function that runs the loop and returns the models and their last metrics."""
    task, algorithm, dispatch = parts(name)
    rng_key, R = jax.random.key(0), dispatch.num_jobs
    numbers = jnp.arange(R + num_arrivals)
    drawn = jax.device_get(jax.jit(lambda: draws_of(dispatch, rng_key, numbers))())
    clients, delays = drawn.client.tolist(), drawn.delay.tolist()
    start = [
        jax.jit(task.init)(key) for key in keys.start_keys(rng_key, range(dispatch.num_models))
    ]

    @jax.jit
    def train(task: Any, params: Any, number: Any, client: Any, step: Any, total: Any) -> Any:
        key = keys.training_key(keys.job_key(rng_key, number))
        local = LocalProblem(key, step, task, client, params)
        sent, _ = algorithm.client(local, (), ())
        return jax.tree.map(jnp.add, total, dense_update(sent, params).update)

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
            buffers[m] = train(task, params, number, clients[number], version + 1, buffers[m])
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
    task, algorithm, dispatch = parts(name)

    def run(rng_key: Any, task: Any) -> Any:
        how: Any = {"record_every": num_arrivals}
        return simulate_async(rng_key, task, algorithm, dispatch, num_arrivals, **how)

    start = time.perf_counter()
    program = jax.jit(run).lower(jax.random.key(0), task).compile()
    seconds = time.perf_counter() - start
    return lambda: jax.block_until_ready(program(jax.random.key(0), task)), seconds
