"""Every assignment x the properties of the compiled loop."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    fedavg,
    mfa_rr,
    sequential,
    simulate,
)
from fedjax_mm.base import Batching
from fedjax_mm.tasks import quadratic
from tests.helpers import ASSIGNMENTS, replay, rounds_of, slow_unless
from tests.simulator.test_simulate import (
    FEW,
    RATES,
    ROUNDS,
    TASKS,
    N,
    assert_close,
    build,
    few_assignments,
    on_host,
    program,
    reference_run,
)


@functools.cache
def swept(assignment):
    """The run vmapped over rates and keys, and a list with an entry for each trace."""
    (run, _), traces = build(assignment, "quadratic"), []

    def traced(rng_key, mu, rate):
        traces.append(mu)
        return run(rng_key, quadratic(N, 2, mu=mu), rate)

    return jax.jit(jax.vmap(jax.vmap(traced, (0, None, None)), (None, None, 0))), traces


EVERY_MAP = ("scan", 2, 100)


@pytest.mark.parametrize(
    ("assignment", "task", "maps"),
    [
        *zip(FEW, FEW.values(), (EVERY_MAP, EVERY_MAP[1:2]), strict=True),
        *(
            slow_unless(False, s, t, EVERY_MAP)
            for s in ASSIGNMENTS
            for t in TASKS
            if (s, t) != ("mfa_rr redrawn", "least squares")
        ),
    ],
)
def test_every_client_map_agrees(assignment, task, maps):
    """Chunk sizes divide the group or not, and may exceed its size."""
    run, data = build(assignment, task)

    @jax.jit
    def runs(rng_key, data, rate):
        return [run(rng_key, data, rate, client_map=each) for each in maps]

    for actual in runs(jax.random.key(0), data, RATES[task]):
        assert_close(actual, reference_run(assignment, task))


@few_assignments
def test_one_compilation_for_all_numbers(assignment):
    """A grid of 20 seeds x 8 learning rates compiles once, and not again on a second call."""
    grid, traces = swept(assignment)
    num_models = ASSIGNMENTS[assignment](N).num_models
    keys = jax.random.split(jax.random.key(0), 20)
    before = len(traces)
    first = grid(keys, 0.1, np.linspace(0.2, 4.0, 8))[1]
    assert first.metrics["loss"].shape == (8, 20, ROUNDS + 1, num_models)
    other = jax.random.split(jax.random.key(1), 20)
    second = grid(other, 0.2, np.linspace(0.4, 6.0, 8))[1]
    assert len(traces) <= before + 1
    assert grid._cache_size() == 1
    ends = (np.asarray(each.metrics["loss"][:, :, -1]) for each in (first, second))
    assert not np.array_equal(*ends)


@few_assignments
def test_a_point_of_a_sweep_equals_its_single_run(assignment):
    (grid, _), (alone, _) = swept(assignment), program(assignment, "quadratic")
    task, rates = quadratic(N, 2, mu=0.1), np.linspace(1.0, 4.0, 8)
    keys = jax.random.split(jax.random.key(4), 20)
    points = on_host(grid(keys, 0.1, rates))
    for point in ((0, 0), (2, 3), (7, 19)):
        expected = alone(keys[point[1]], task, rates[point[0]])
        assert_close(jax.tree.map(operator.itemgetter(point), points), expected)


def test_draws_do_not_depend_on_precision_or_vmap():
    """Cohorts do not depend on x64 or on other replicas, and no key is used twice."""
    key = jax.random.fold_in(jax.random.key(9), 1)
    seeds = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(9), i))(np.array([7, 8, 1, 9]))

    def draw(key):
        return {name: rounds_of(make(N), key, ROUNDS) for name, make in ASSIGNMENTS.items()}

    alone = jax.jit(draw)(key)
    with jax.debug_key_reuse(True):
        together = jax.jit(jax.vmap(draw))(seeds)
    with jax.enable_x64(True):
        double = jax.jit(draw)(key)
    for name, groups in alone.items():
        np.testing.assert_array_equal(together[name][2], groups, err_msg=name)
        np.testing.assert_array_equal(double[name], groups, err_msg=name)


def test_minibatch_draws_do_not_depend_on_precision_or_vmap():
    """Covers iid batches, epochs, full batches and growing batches."""
    hows = Batching(4), Batching(4, "epochs"), Batching(), Batching(limit=3)
    keys = jax.random.split(jax.random.key(3), 3)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0, 0))
    def draw(task, key, k):
        return [task.batch(key, k, jnp.int32(1), how) for how in hows]

    def batches(keys, clients):
        return jax.tree.leaves(jax.device_get(draw(TASKS["least squares"](), keys, clients)))

    together = batches(keys, np.array([2, 5, 2], np.int32))
    alone = batches(keys[1:2], np.array([5], np.int32))
    with jax.enable_x64(True):
        double = batches(keys, np.array([2, 5, 2], np.int32))
    assert len(together) >= 2 * len(hows)
    for one, all_, precise in zip(alone, together, double, strict=True):
        np.testing.assert_array_equal(one[0], all_[1])
        np.testing.assert_array_equal(precise, all_)


@pytest.mark.parametrize(
    "assignment",
    [
        replay([[[0, -1, 2], [1, 3, -1]], [[-1] * 3, [4, 5, 6]], [[3, 1, -1], [-1] * 3]] * 2, N),
        slow_unless(False, mfa_rr(N, 3)),
        slow_unless(False, sequential(N, 2, rounds_per_model=2)),
    ],
    ids=["padding and idle models", "mfa_rr", "sequential"],
)
def test_the_loss_is_differentiable(assignment):
    """Compares with a central difference over the learning rate. Idle models have 0/0."""

    @jax.jit
    @jax.value_and_grad
    def final_loss(learning_rate):
        algorithm = fedavg(learning_rate, local_steps=3)
        task = quadratic(N, 2, mu=0.1)
        _, trace = simulate(jax.random.key(0), task, algorithm, assignment, 6)
        return trace.metrics["loss"][-1, 0]

    with jax.enable_x64(True):
        below, here, above = (final_loss(0.1 + step) for step in (-1e-5, 0.0, 1e-5))
        assert here[1] == pytest.approx(float(above[0] - below[0]) / 2e-5, rel=1e-6)


@pytest.mark.parametrize(
    ("assignment", "task"),
    [slow_unless((s, t) in FEW.items(), s, t) for s in ASSIGNMENTS for t in TASKS],
)
def test_vmapped_seeds_equal_single_runs_and_no_key_is_reused(assignment, task):
    """JAX checks for reused keys while tracing, with sampled minibatches under jit and vmap.

    Tests below vmap seeds of the quadratic task, and the draws of every assignment.
    """
    run, data = build(assignment, task)
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(3))
    vmapped = jax.jit(jax.vmap(run, (0, None, None)))
    with jax.debug_key_reuse(True):
        together = vmapped(keys, data, RATES[task])
    together, (compiled, _) = on_host(together), program(assignment, task)
    for i in range(3):
        alone = compiled(keys[i], data, RATES[task])
        assert_close(jax.tree.map(operator.itemgetter(i), together), alone)
