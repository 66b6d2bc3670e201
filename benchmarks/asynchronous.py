"""FedAST as a Python event loop around a compiled client update, as its serial programs are.

The loop keeps a heap of jobs, trains each one when it comes home by one compiled call, adds its
update up in another, and makes a server step in a third. It is given the draws of `simulate_async`,
so that both do the same work.
"""

import heapq
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mm import fedavg, keys
from fedjax_mm.asynchrony import Dispatch, fedast
from fedjax_mm.asynchrony.dispatch import draws_of
from fedjax_mm.base import Algorithm, LocalProblem
from fedjax_mm.data import synthetic
from fedjax_mm.tasks import LogisticRegression, classification

NUM_CLIENTS, NUM_MODELS, NUM_ARRIVALS, RATE = 100, 3, 3000, 0.05


def parts() -> tuple[Any, Algorithm, Dispatch]:
    """Three models of Synthetic(1, 1) with 300 jobs at work, E = 5 steps of B = 20."""
    task = classification(synthetic(NUM_CLIENTS), LogisticRegression(5))
    algorithm = fedavg(RATE, local_steps=5, batch_size=20, weighted=False)
    dispatch = fedast(NUM_CLIENTS, NUM_MODELS, at_work=100, ratio=10, reallocate=False)
    return task, algorithm, dispatch


def event_loop(num_arrivals: int = NUM_ARRIVALS) -> Callable[[], list[Any]]:
    """Returns a function that runs the loop and returns the models."""
    task, algorithm, dispatch = parts()
    rng_key, R = jax.random.key(0), dispatch.num_jobs
    numbers = jnp.arange(R + num_arrivals)
    drawn = jax.device_get(jax.jit(lambda: draws_of(dispatch, rng_key, numbers))())
    clients, delays = drawn.client.tolist(), drawn.delay.tolist()
    start = [
        jax.jit(task.init)(key) for key in keys.start_keys(rng_key, range(dispatch.num_models))
    ]

    @jax.jit
    def train(task: Any, params: Any, number: Any, client: Any, step: Any) -> Any:
        key = keys.training_key(keys.job_key(rng_key, number))
        local = LocalProblem(key, step, task, client, params)
        return algorithm.client(local, (), ())[0].update

    @jax.jit
    def add(total: Any, update: Any) -> Any:
        return jax.tree.map(jnp.add, total, update)

    @jax.jit
    def step(params: Any, total: Any, size: Any) -> Any:
        return jax.tree.map(lambda w, x: w + x / size, params, total)

    def run() -> list[Any]:
        models, steps = list(start), [0] * NUM_MODELS
        buffers: list[Any] = [None] * NUM_MODELS
        filled = [0] * NUM_MODELS
        models_of = np.repeat(np.arange(NUM_MODELS), dispatch.at_work).tolist()
        given = [(models[m], 0) for m in models_of]
        queue = [(delays[j][m], j, m) for j, m in enumerate(models_of)]
        jobs = dict(enumerate(given))
        heapq.heapify(queue)
        for arrived in range(num_arrivals):
            time, number, m = heapq.heappop(queue)
            params, version = jobs.pop(number)
            update = train(task, params, number, clients[number], version + 1)
            buffers[m] = update if filled[m] == 0 else add(buffers[m], update)
            filled[m] += 1
            if filled[m] == math.ceil(dispatch.at_work[m] / dispatch.ratio):
                models[m] = step(models[m], buffers[m], filled[m])
                filled[m] = 0
                steps[m] += 1
            new = R + arrived
            jobs[new] = models[m], steps[m]
            heapq.heappush(queue, (time + delays[new][m], new, m))
        return jax.block_until_ready(models)

    return run
