"""Models that differ in structure, algorithm or data."""

import dataclasses
import functools
import operator
import os
import signal
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, local_sgd, mfa_rand, mfa_rr, simulate, sweep
from fedjax_mm.data.federated import stack_data
from fedjax_mm.stacks import by_model, stacks_of
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
from fedjax_mm.tasks import quadratic
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import MLP, LogisticRegression
from tests.helpers import Towards, labelled_data, replay, roll_out

N = 7
LINEAR, NETWORK = LogisticRegression(3), MLP(3, hidden=(5,))
FAST = fedavg(local_sgd(0.3, epochs=1, batch_size=4))
SLOW = fedavg(local_sgd(0.03, epochs=1, batch_size=4))


def model_of(state, trace, stack, place, model):
    """One model's parameters and records."""
    params = state.models[stack or 0].params
    records = trace.metrics, {"up": trace.client_updates, "gradients": trace.gradients}
    return (
        jax.tree.map(operator.itemgetter(place), params),
        jax.tree.map(lambda x: x[:, model], records),
        (trace.upload_size[model], trace.download_size[model]),
    )


def check(actual, expected, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (1 + np.abs(b).max()))


def run(tasks, algorithm, assignment, client_map="auto", **options):
    """Simulates six rounds in one compiled program."""

    def program(key, options):
        return simulate(key, tasks, algorithm, assignment, 6, client_map=client_map, **options)

    return jax.jit(program)(jax.random.key(4), options)


@functools.cache
def program(modules, client_map, ratios):
    """A compiled run of models that learn the same data, with all numbers and data as arguments.

    Args:
      modules: one for each model.
      client_map: as in `simulate`.
      ratios: factors of the learning rate, one for all models or one for each.
    """

    def run(rng_key, groups, rate, params, data):
        tasks = [classification(data, module) for module in modules]
        every = {each: fedavg(local_sgd(rate * each, epochs=1, batch_size=4)) for each in ratios}
        algorithms = [every[each] for each in ratios] * (3 // len(ratios))
        strategy, how = replay(groups, N), {"client_map": client_map, "params": params}
        return simulate(rng_key, tasks, algorithms, strategy, 6, **how)

    chex.clear_trace_counter()
    return jax.jit(chex.assert_max_traces(run, n=1))


@functools.cache
def starts(modules):
    tasks = [classification(labelled_data(), module) for module in modules]
    return [jax.jit(task.init)(jax.random.key(i + 9)) for i, task in enumerate(tasks)]


@functools.cache
def groups_of(assignment):
    groups = roll_out(assignment, jax.random.key(4), 6)
    return np.pad(groups, ((0, 0), (0, 0), (0, 3 - groups.shape[2])), constant_values=-1)


EVERYBODY, COHORT = mfa_rand(N, 3), mfa_rr(N, 3, cohort_size=5)
MIXED, ALL_LINEAR, ALL_NETWORKS = (LINEAR, NETWORK, LINEAR), (LINEAR,) * 3, (NETWORK,) * 3


def train(modules, assignment=EVERYBODY, rate=0.3, given=None, client_map=None, ratios=(1,)):
    """Trains three models of one or two structures, each from its own start.

    Models of two structures are trained in chunks of clients by default.
    """
    client_map = client_map or ("auto" if len(set(modules)) == 1 else 2)
    params = list(given or starts(modules))
    if len(set(modules)) == len(set(ratios)) == 1:
        params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    run = program(modules, client_map, ratios)
    return run(jax.random.key(4), groups_of(assignment), rate, params, labelled_data())


@pytest.mark.parametrize(
    ("assignment", "client_map"),
    [(COHORT, 2), pytest.param(EVERYBODY, "auto", marks=pytest.mark.slow)],
)
def test_a_model_does_not_depend_on_the_structures_of_others(assignment, client_map):
    """Each of three models trains as if all had its structure.

    Draws are keyed by the model's number, so every model sees the same clients and examples.
    """
    mixed = train(MIXED, assignment, client_map=client_map)
    assert len(mixed[0].models) == 2
    all_linear, all_networks = train(ALL_LINEAR, assignment), train(ALL_NETWORKS, assignment)
    for model, stack, place in ((0, 0, 0), (1, 1, 0), (2, 0, 1)):
        alone = all_networks if stack else all_linear
        expected = model_of(*alone, None, model, model)
        check(model_of(*mixed, stack, place, model), expected)
    assert mixed[1].upload_size == mixed[1].download_size == (15, 43, 15)


def test_one_compilation_for_all_stacks():
    """Rates, parameters, seeds, cohorts and data are arguments."""
    ends = [train(MIXED, rate=rate)[1].metrics["loss"][-1] for rate in (0.1, 0.2)]
    assert (ends[0] != ends[1]).all()


def test_each_model_has_its_own_algorithm():
    mixed = train(ALL_LINEAR, ratios=(1, 0.1, 1))
    fast, slow = train(ALL_LINEAR), train(ALL_LINEAR, rate=0.03)
    for model, stack, place in ((0, 0, 0), (1, 1, 0), (2, 0, 1)):
        expected = model_of(*(slow if stack else fast), None, model, model)
        check(model_of(*mixed, stack, place, model), expected)


def test_models_share_a_stack_if_their_algorithm_is_the_same_object():
    task, assignment = quadratic(N, 2, mu=0.1), mfa_rr(N, 3)
    assert len(stacks_of(task, FAST, assignment)) == 1
    assert len(stacks_of([task] * 3, [FAST] * 3, assignment)) == 1
    assert [stack.models for stack in stacks_of(task, [SLOW, FAST, SLOW], assignment)] == [
        (0, 2),
        (1,),
    ]


def test_an_array_is_shared_if_all_tasks_have_it():
    """It is not shared if only the first and the last have it."""
    one, other = jnp.arange(4.0), jnp.arange(4.0) + 10
    for targets, is_shared in (((one, one, one), True), ((one, other, one), False)):
        tasks = [Towards(each) for each in targets]
        (stack,) = stacks_of(tasks, FAST, mfa_rr(4, 3))
        assert stack.shared.targets == is_shared
        for row, task in enumerate(tasks):
            np.testing.assert_array_equal(stack.task_at(jnp.int32(row)).targets, task.targets)


def test_rows_of_stacks_come_in_the_order_of_the_models():
    """The order is not its own inverse."""
    task, assignment = quadratic(N, 2, mu=0.1), mfa_rr(N, 4)
    stacks = stacks_of(task, [SLOW, FAST, fedavg(0.2, local_steps=1), SLOW], assignment)
    assert [stack.models for stack in stacks] == [(0, 3), (1,), (2,)]
    rows = [jnp.array(stack.models) for stack in stacks]
    np.testing.assert_array_equal(by_model(stacks, rows), range(4))


def test_shared_arrays_are_stored_once():
    """Nine models have different labels of the same examples, which a network shares, too."""
    data = labelled_data(10, dim=5000, columns=9)
    image_bytes = data.train.examples[0].nbytes + data.test.examples[0].nbytes
    tasks = [classification(data, LINEAR, column=c) for c in range(9)]
    (stack,) = stacks_of(tasks, FAST, mfa_rr(10, 9))
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
    (stack,) = stacks_of(stacked, algorithm, assignment)
    assert stack.task.train.examples[0] is both.train.examples[0]
    together = run(stacked, algorithm, assignment)
    apart = run([classification(each, LINEAR) for each in draws], algorithm, assignment)
    assert len(apart[0].models) == 2, "stores of other sizes are other kinds"
    for model in range(2):
        check(model_of(*together, None, model, model), model_of(*apart, model, 0, model))


def test_parameters_are_given_for_each_model():
    given = [jax.tree.map(lambda x, i=i: x + i, each) for i, each in enumerate(starts(MIXED))]
    _, trace = train(MIXED, given=given)
    tasks = [classification(labelled_data(), module) for module in MIXED]
    for model, (task, params) in enumerate(zip(tasks, given, strict=True)):
        for name, value in jax.jit(task.metrics)(jax.random.key(0), params).items():
            np.testing.assert_allclose(trace.metrics[name][0, model], value, rtol=1e-6)


def towards_and_quadratic():
    return [Towards(jnp.arange(float(N))), quadratic(N, 2, mu=0.1), Towards(jnp.zeros(N))]


def test_metrics_that_a_task_lacks_are_nan():
    _, trace = run(towards_and_quadratic(), fedavg(0.1, local_steps=2), mfa_rr(N, 3))
    assert set(trace.metrics) == {"norm", "loss", "excess_loss", "distance"}
    for name, values in trace.metrics.items():
        lacks = [name != "norm", name == "norm", name != "norm"]
        np.testing.assert_array_equal(np.isnan(values), np.tile(lacks, (7, 1)))
    assert trace.upload_size == (3, 2 * N + 1, 3)


# Sweeps.


def build_mixed(learning_rate):
    algorithm = fedavg(learning_rate, local_steps=2)
    return Setup(towards_and_quadratic(), algorithm, mfa_rr(N, 3))


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

    def build(data, draw):
        return Setup(classification(data.select(draw), LINEAR), FAST, mfa_rand(N, 2))

    together = sweep(
        Grid(
            build,
            {},
            num_rounds=4,
            num_seeds=2,
            shared={"data": stack_data(draws)},
            per_seed={"draw": [1, 0]},
        )
    )
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


@pytest.mark.parametrize("numbers", [[0, 1], [[0, 1, 2]], 3])
def test_per_seed_needs_one_number_for_each_seed(numbers):
    with pytest.raises(ValueError, match=r"per_seed\['draw'\] has shape"):
        sweep(
            Grid(
                lambda draw: build_mixed(0.1),
                {},
                num_rounds=1,
                num_seeds=3,
                per_seed={"draw": numbers},
            )
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
