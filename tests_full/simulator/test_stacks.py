"""Models that differ in structure, algorithm or data."""

import dataclasses
import functools
import os
import signal
import sys

import chex
import jax
import numpy as np
import pytest

from fedjax_mm import fedavg, local_sgd, mfa_rand, mfa_rr, simulate, sweep
from fedjax_mm.data.federated import stack_data
from fedjax_mm.simulator.preflight import run_of
from fedjax_mm.sweeps import (
    Checkpoints,
    DivergenceError,
    Execution,
    InterruptedRunError,
    Setup,
    progress,
)
from fedjax_mm.sweeps.execute import carry_out, plan_for
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import MLP
from tests.helpers import labelled_data
from tests.simulator.test_stacks import (
    ALL_LINEAR,
    FAST,
    LINEAR,
    N,
    build_mixed,
    check,
    model_of,
    run,
    towards_and_quadratic,
    train,
)


def test_each_model_has_its_own_algorithm():
    mixed = train(ALL_LINEAR, ratios=(1, 0.1, 1))
    fast, slow = train(ALL_LINEAR), train(ALL_LINEAR, rate=0.03)
    for model, stack, place in ((0, 0, 0), (1, 1, 0), (2, 0, 1)):
        expected = model_of(*(slow if stack else fast), None, model, model)
        check(model_of(*mixed, stack, place, model), expected)


def test_shared_arrays_are_stored_once():
    """Nine models have different labels of the same examples, which a network shares, too."""
    data = labelled_data(10, dim=5000, columns=9)
    image_bytes = data.train.examples[0].nbytes + data.test.examples[0].nbytes
    tasks = [classification(data, LINEAR, column=c) for c in range(9)]
    (stack,) = run_of(tasks, FAST, mfa_rr(10, 9)).stacks
    assert stack.task.train.examples[0] is data.train.examples[0]
    assert stack.task.column.tolist() == list(range(9))

    def program(key, data):
        tasks = [classification(data, LINEAR, column=c) for c in range(9)]
        tasks.append(classification(data, MLP(3, hidden=(2,)), column=0))
        return simulate(key, tasks, FAST, mfa_rr(10, 10), 2, client_map=1)[1]

    compiled = jax.jit(program).lower(jax.random.key(0), data).compile()
    sizes = compiled.memory_analysis()
    assert image_bytes <= sizes.argument_size_in_bytes < 1.1 * image_bytes
    model_bytes = 4 * 5000 * (9 * 3 + 2)
    assert sizes.temp_size_in_bytes < 2 * image_bytes + 8 * model_bytes

    trace = compiled(jax.random.key(4), data)
    alone = jax.jit(
        lambda task: simulate(jax.random.key(4), task, FAST, mfa_rr(10, 10), 2, client_map=1)
    )
    for column in (0, 8):
        for name, values in alone(tasks[column])[1].metrics.items():
            np.testing.assert_allclose(
                trace.metrics[name][:, column], values[:, column], rtol=1e-4, err_msg=name
            )


@pytest.mark.parametrize("epochs", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_stacked_data_train_like_separate_data(epochs):
    draws = [labelled_data(seed=seed) for seed in range(2)]
    assert len({int(each.train.counts.sum()) for each in draws}) > 1
    both, assignment = stack_data(draws), mfa_rand(N, 2)
    options = {"epochs": 2, "batch_size": 4} if epochs else {"steps": 4, "batch_size": 3}
    algorithm = fedavg(local_sgd(0.1, **options))
    stacked = [classification(both.select(i), LINEAR) for i in range(2)]
    (stack,) = run_of(stacked, algorithm, assignment).stacks
    assert stack.task.train.examples[0] is both.train.examples[0]
    together = run(stacked, algorithm, assignment)
    apart = run([classification(each, LINEAR) for each in draws], algorithm, assignment)
    assert len(apart[0].models) == 2, "stores of other sizes are other kinds"
    for model in range(2):
        check(model_of(*together, None, model, model), model_of(*apart, model, 0, model))


def test_metrics_that_a_task_lacks_are_nan():
    _, trace = run(towards_and_quadratic(), fedavg(0.1, local_steps=2), mfa_rr(N, 3))
    assert set(trace.metrics) == {"norm", "loss", "excess_loss", "distance"}
    for name, values in trace.metrics.items():
        lacks = [name != "norm", name == "norm", name != "norm"]
        np.testing.assert_array_equal(np.isnan(values), np.tile(lacks, (7, 1)))
    assert trace.upload_size == (3, 2 * N + 1, 3)


SIZES = {"num_rounds": 6, "num_seeds": 2, "seed": 3}


MIXED_GRID = Grid(build_mixed, {"learning_rate": [0.1, 0.2]}, **SIZES)


def carried_out(how):
    """Runs the sweep of stacks. It is traced only once, because the grid is the same."""
    plan = plan_for(MIXED_GRID, how)
    return carry_out(plan, how)[0]


@functools.cache
def whole_sweep():
    return carried_out(Execution())


def test_a_sweep_of_stacks_equals_its_single_runs():
    result = whole_sweep()
    assert (result.diverged == -1).all(), "a model without a loss has not diverged"
    keys = [jax.random.fold_in(jax.random.key(3), i) for i in range(2)]
    run = jax.jit(lambda key, rate: simulate(key, *build_mixed(rate)[:3], 6)[1])
    for rate in (0.1, 0.2):
        for seed, key in enumerate(keys):
            trace = run(key, rate)
            point = result.sel(learning_rate=rate, seed=seed)
            for name, values in trace.metrics.items():
                np.testing.assert_allclose(point[name], values, rtol=1e-5, atol=1e-7, err_msg=name)
            np.testing.assert_array_equal(
                point.parameters_up, np.cumsum(trace.client_updates * np.array([3, 15, 3]), axis=0)
            )


def test_divergence_of_one_stack_is_marked_and_stops():
    """The quadratic diverges, but the model without a loss does not."""

    def build(learning_rate):
        algorithms = [fedavg(0.1, local_steps=1), fedavg(learning_rate, local_steps=9)]
        return Setup(towards_and_quadratic()[:2], algorithms, mfa_rr(N, 2))

    plan = plan_for(Grid(build, {"learning_rate": [0.1, 1e6]}, **SIZES), Execution())
    result = carry_out(plan, Execution())[0]
    assert (result.diverged.sel(learning_rate=0.1) == -1).all()
    assert (result.diverged.sel(learning_rate=1e6) == [-1, 1]).all()
    assert np.isfinite(result.norm.sel(model=1)).all()
    with pytest.raises(DivergenceError) as error:
        carry_out(plan, Execution(), on_divergence="stop")
    assert error.value.partial.diverged.max() > 0


def test_a_sweep_of_stacks_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["fedjax_mm.sweeps.execute"], "_SEGMENT_SECONDS", 0.0)
    whole = whole_sweep()

    def stop(_, done, total):
        if 0.3 * total < done < total:
            os.kill(os.getpid(), signal.SIGTERM)

    with Checkpoints(tmp_path) as checkpoints, pytest.raises(InterruptedRunError):
        carried_out(Execution(checkpoints=checkpoints, save_every=0, callbacks=[progress(stop)]))
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        rest = carried_out(Execution(checkpoints=checkpoints))
    for name in whole.data_vars:
        np.testing.assert_array_equal(rest[name], whole[name], err_msg=name)


@pytest.mark.slow  # experiments/test_draws.py does this quickly
def test_vmapped_data_per_seed_equal_single_runs():
    draws = [labelled_data(seed=seed) for seed in range(2)]

    data = stack_data(draws)

    def build(seed):
        return Setup(classification(data.select(1 - seed), LINEAR), FAST, mfa_rand(N, 2))

    (program,) = programs_of(grid := Grid(build, {}, num_rounds=4, num_seeds=2))
    assert program.shape == (1, 2)
    together = sweep(grid)
    for seed, draw in enumerate([1, 0]):
        key = jax.random.fold_in(jax.random.key(0), seed)
        task = classification(draws[draw], LINEAR)
        one = jax.jit(functools.partial(simulate, num_rounds=4), static_argnums=(2, 3))
        _, trace = one(key, task, FAST, mfa_rand(N, 2))
        for name, values in trace.metrics.items():
            np.testing.assert_allclose(
                together[name].sel(seed=seed), values, rtol=1e-5, err_msg=name
            )
        np.testing.assert_array_equal(
            together.gradients.sel(seed=seed), np.cumsum(trace.gradients, axis=0)
        )


def test_data_of_a_stack_may_be_replaced_by_data_of_the_same_shape():
    """Data are arguments, so other targets use the same compiled program."""

    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def program(key, tasks):
        return simulate(key, tasks, fedavg(0.1, local_steps=1), mfa_rr(N, 3), 2)[1]

    tasks = towards_and_quadratic()
    first = program(jax.random.key(0), tasks)
    tasks[0] = dataclasses.replace(tasks[0], targets=tasks[0].targets + 100)
    second = program(jax.random.key(0), tasks)
    assert (first.metrics["norm"][-1, 0] != second.metrics["norm"][-1, 0]).all()
