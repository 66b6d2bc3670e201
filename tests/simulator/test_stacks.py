"""Models that differ in structure, algorithm or data."""

import functools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, local_sgd, mfa_rand, mfa_rr, simulate
from fedjax_mm.simulator.preflight import run_of
from fedjax_mm.simulator.stacks import by_model
from fedjax_mm.sweeps import (
    Setup,
)
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
        assignment, how = replay(groups, N), {"client_map": client_map, "params": params}
        return simulate(rng_key, tasks, algorithms, assignment, 6, **how)

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


def test_models_share_a_stack_if_their_algorithm_is_the_same_object():
    task, assignment = quadratic(N, 2, mu=0.1), mfa_rr(N, 3)
    assert len(run_of(task, FAST, assignment).stacks) == 1
    assert len(run_of([task] * 3, [FAST] * 3, assignment).stacks) == 1
    assert [stack.models for stack in run_of(task, [SLOW, FAST, SLOW], assignment).stacks] == [
        (0, 2),
        (1,),
    ]


def test_an_array_is_shared_if_all_tasks_have_it():
    """It is not shared if only the first and the last have it."""
    one, other = jnp.arange(4.0), jnp.arange(4.0) + 10
    for targets, is_shared in (((one, one, one), True), ((one, other, one), False)):
        tasks = [Towards(each) for each in targets]
        (stack,) = run_of(tasks, FAST, mfa_rr(4, 3)).stacks
        assert stack.shared.targets == is_shared
        for row, task in enumerate(tasks):
            np.testing.assert_array_equal(stack.task_at(jnp.int32(row)).targets, task.targets)


def test_rows_of_stacks_come_in_the_order_of_the_models():
    """The order is not its own inverse."""
    task, assignment = quadratic(N, 2, mu=0.1), mfa_rr(N, 4)
    stacks = run_of(task, [SLOW, FAST, fedavg(0.2, local_steps=1), SLOW], assignment).stacks
    assert [stack.models for stack in stacks] == [(0, 3), (1,), (2,)]
    rows = [jnp.array(stack.models) for stack in stacks]
    np.testing.assert_array_equal(by_model(stacks, rows), range(4))


def test_parameters_are_given_for_each_model():
    given = [jax.tree.map(lambda x, i=i: x + i, each) for i, each in enumerate(starts(MIXED))]
    _, trace = train(MIXED, given=given)
    tasks = [classification(labelled_data(), module) for module in MIXED]
    for model, (task, params) in enumerate(zip(tasks, given, strict=True)):
        for name, value in jax.jit(task.metrics)(jax.random.key(0), params).items():
            np.testing.assert_allclose(trace.metrics[name][0, model], value, rtol=1e-6)


def towards_and_quadratic():
    return [Towards(jnp.arange(float(N))), quadratic(N, 2, mu=0.1), Towards(jnp.zeros(N))]


def build_mixed(learning_rate):
    algorithm = fedavg(learning_rate, local_steps=2)
    return Setup(towards_and_quadratic(), algorithm, mfa_rr(N, 3))
