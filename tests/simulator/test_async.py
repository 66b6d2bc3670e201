"""Asynchronous training against a NumPy event loop, the law of its delays, and `simulate`."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mm import fedavg, join_traces, keys, params_of, simulate
from fedjax_mm.base import Batching
from fedjax_mm.delays import shifted_exponential
from fedjax_mm.dispatch import draws_of, fedast
from fedjax_mm.simulate_async import advance_async, simulate_async
from fedjax_mm.tasks import least_squares, quadratic, with_metrics
from tests.helpers import Towards, replay, slow_unless
from tests.oracles import asynchronous as oracle
from tests.oracles import multi_model as reference
from tests.simulator.test_oracle import regression, row_numbers

KEY = jax.random.key(5)
N, NUM_STEPS, RATE, SERVER_RATE = 7, 3, 0.02, 0.8
CASES = {  # R_m, ratio, whether R_m changes, arrivals, whether models are stacked
    "one model": ((7,), 3, False, 80, True),
    "fully asynchronous": ((5, 4), 5, False, 80, True),
    "unequal": ((9, 2, 4), 3, False, 80, True),
    "reallocated": ((6, 6, 6), 2, True, 200, True),
    "different structures, reallocated": ((10, 3), 3, True, 200, False),
}
QUICK = {"unequal", "different structures, reallocated"}


def draws(dispatch, count):
    """The clients and the delays of the first jobs."""
    return jax.device_get(jax.jit(lambda: draws_of(dispatch, KEY, jnp.arange(count)))())


def drawn_rows(store, client, how):
    """The rows of each job's steps, ``[jobs, steps, B]``."""

    def rows(number, client, step):
        key = keys.training_key(keys.job_key(KEY, number))
        return store.take(store.batch(key, client, step, how)[0])

    over = jax.vmap(jax.vmap(rows, (None, None, 0)), (0, 0, None))
    return jax.device_get(jax.jit(over)(jnp.arange(len(client)), client, jnp.arange(NUM_STEPS)))


def fed(server_rate=SERVER_RATE, **options):
    """FedAvg of equally weighted clients."""
    options = {"local_steps": NUM_STEPS, "server_optimizer": optax.sgd(server_rate)} | options
    return fedavg(options.pop("rate", RATE), weighted=False, **options)


@functools.cache
def regressions(num_models, alike):
    """Features and targets of each model's clients; alike in shape, so that models are stacked."""
    data = [regression(N, seed=m) for m in range(num_models)]
    if not alike:
        return data
    rng = np.random.default_rng(3)
    return [tuple([x + rng.normal(size=x.shape) for x in each] for each in data[0]) for _ in data]


def models_of(trace, model, name):
    """What a metric of a model is worth in every record after the first."""
    return np.asarray(trace.metrics[name])[1:, model]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [slow_unless(name in QUICK, name) for name in CASES])
def test_every_arrival_is_the_event_loops(name):
    """Minibatches of data that differ by model and client; every update, step and version."""
    at_work, ratio, reallocate, num_arrivals, alike = CASES[name]
    dispatch = fedast(N, len(at_work), at_work=at_work, ratio=ratio, reallocate=reallocate)
    data = regressions(len(at_work), alike)
    tasks = [
        with_metrics(least_squares(*each, ridge=0.3), {"w": lambda params: params}) for each in data
    ]
    problems = [reference.LeastSquares(*each, 0.3) for each in data]
    start = list(np.random.default_rng(2).normal(size=(len(at_work), 4)))
    drawn, how = draws(dispatch, sum(at_work) + num_arrivals), Batching(2)
    rows = [
        drawn_rows(
            dataclasses.replace(task.task.data, examples=row_numbers(targets)), drawn.client, how
        )
        for task, (_, targets) in zip(tasks, data, strict=True)
    ]

    def train(m, k, w, number, t):
        local = reference.full_gradient_steps(
            lambda w, e: reference.least_squares_gradient(problems[m], k, w, rows[m][number, e]),
            w,
            RATE,
            NUM_STEPS,
        )
        return local - w

    expected = oracle.fedast(
        train,
        start,
        at_work,
        ratio,
        drawn.client.item,
        lambda *place: drawn.delay.item(*place),
        num_arrivals,
        SERVER_RATE,
        reallocate,
    )

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def run(tasks, client_map, record_every):
        how = {"client_map": client_map, "record_every": record_every, "params": start}
        return simulate_async(KEY, tasks, fed(batch_size=2), dispatch, num_arrivals, **how)

    state, trace = jax.device_get(run(tasks, "vmap", 1))
    np.testing.assert_allclose(trace.time[1:], [each.time for each in expected], rtol=1e-12)
    came = np.argmax(trace.client_updates[1:], axis=1)
    assert came.tolist() == [each.model for each in expected]
    for m in range(len(at_work)):
        np.testing.assert_array_equal(
            models_of(trace, m, "steps"), [each.steps[m] for each in expected]
        )
        np.testing.assert_array_equal(
            models_of(trace, m, "at_work"), [each.targets[m] for each in expected]
        )
        np.testing.assert_allclose(
            models_of(trace, m, "w"), [each.models[m] for each in expected], rtol=0, atol=1e-10
        )
    staleness = np.nansum(trace.metrics["staleness"][1:], axis=1)
    assert staleness.tolist() == [each.staleness for each in expected]
    assert (len({tuple(each.targets) for each in expected}) > 1) == reallocate
