"""Every method x every assignment x every client map x one or three models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    LogisticRegression,
    afl,
    appealing,
    byzantine,
    classification,
    ditto,
    fedavg,
    fedcluster,
    fedprox,
    full_participation,
    least_squares,
    maxfl,
    mfa_rand,
    mfa_rr,
    mwfed,
    perfedavg,
    qffl,
    requiring,
    scaffold,
    sequential,
    simulate,
)
from tests.helpers import Measured, labelled_data, replay, roll_out

N, ROUNDS = 6, 4
STEPS = {"local_steps": 2, "batch_size": 2}
METHODS = {
    "fedavg": lambda rate: fedavg(rate, **STEPS),
    "maxfl": lambda rate: maxfl(rate, **STEPS),
    "fedprox": lambda rate: fedprox(rate, mu=0.5, **STEPS),
    "scaffold": lambda rate: scaffold(rate, **STEPS),
    "perfedavg": lambda rate: perfedavg(rate, **STEPS),
    "qffl": lambda rate: qffl(rate, q=1.0, **STEPS),
    "afl": lambda rate: afl(rate, mixture_rate=0.1, batch_size=2),
    "mwfed": lambda rate: mwfed(rate, **STEPS),
    "ditto": lambda rate: ditto(rate, lam=0.5, **STEPS),
    "byzantine": lambda rate: byzantine(maxfl(rate, **STEPS), jnp.arange(N) < 2),
}
ASSIGNMENTS = {
    1: [
        mfa_rand(N, 1, cohort_size=4),
        mfa_rr(N, 1, cohort_size=3),
        full_participation(N),
        fedcluster(N, 2),
        appealing(full_participation(N), cohort_size=2, from_round=2),
    ],
    3: [
        mfa_rand(N, 3),
        mfa_rr(N, 3),
        mfa_rand(N, 3, cohort_size=4),
        sequential(N, 3, rounds_per_model=1),
        appealing(mfa_rr(N, 3), cohort_size=1, from_round=2),
    ],
}
every_method = pytest.mark.parametrize("method", METHODS)


@functools.cache
def groups_of(num_models, index, seed):
    """Who may train what, ``[T, M, N]``: drawn beforehand, by programs that all methods share."""
    groups = roll_out(ASSIGNMENTS[num_models][index], jax.random.key(seed), ROUNDS)
    return np.pad(groups, ((0, 0), (0, 0), (0, N - groups.shape[2])), constant_values=-1)


def one_of(num_models, index, groups):
    """The assignment of that number, which may be traced, with these groups."""

    def select(rng_key, t, groups, appeal):
        selected = ASSIGNMENTS[num_models][-1].select(rng_key, t, groups, appeal)
        padding = ((0, 0), (0, N - selected.shape[1]))
        stays = index == len(ASSIGNMENTS[num_models]) - 1
        return jnp.where(stays, jnp.pad(selected, padding, constant_values=-1), groups)

    return replay(groups, N)._replace(select=select)


def tasks(num_models):
    """Regressions with 1 to 5 examples per client, one for each model."""
    counts = [1, 5, 2, 3, 5, 4]

    def one(seed):
        rng = np.random.default_rng(seed)
        features = [rng.normal(size=(n, 2)) for n in counts]
        return least_squares(features, [x.sum(1) + rng.normal() for x in features], ridge=0.1)

    return [one(seed) for seed in range(num_models)]


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-10 * (1 + np.abs(b).max()))
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num_models", ASSIGNMENTS)
@every_method
def test_client_maps_agree_and_nothing_recompiles(method, num_models):
    data, rho = tasks(num_models), jnp.array([0.1, 0.5, 2.0, 0.05, 0.3, 1.0])
    key = jax.random.key(1)
    calls = [
        (key, 0.1, index, groups_of(num_models, index, 1))
        for index in range(len(ASSIGNMENTS[num_models]))
    ]
    calls.append((jax.random.key(2), 0.05, 0, groups_of(num_models, 0, 2)))
    results = []
    for client_map in ("vmap", 3, "scan"):

        def run(rng_key, rate, index, groups, tasks, rho, client_map=client_map):
            algorithm = requiring(METHODS[method](rate), thresholds=rho)
            assignment = one_of(num_models, index, groups)
            state, trace = simulate(
                rng_key, tasks, algorithm, assignment, ROUNDS, client_map=client_map
            )
            return state.models, trace

        program = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})
        results.append([program(*call, data, rho) for call in calls])
        assert program._cache_size() == 1
    for other in results[1:]:
        assert_close(other, results[0])
    ends = [np.asarray(models.params) for models, _ in results[0]]
    assert all(np.isfinite(end).all() for end in ends)
    assert all(np.abs(a - b).max() > 1e-6 for i, a in enumerate(ends) for b in ends[:i])
    for (models, trace), each in zip(results[0], ASSIGNMENTS[num_models], strict=False):
        assert trace.metrics["train_appeal"].shape == (1 + ROUNDS, num_models)
        if each.select is None:
            assert (trace.client_updates[1:].sum(1) >= 3).all()
        assert models.params.shape == (num_models, 2)


@every_method
def test_single_precision_in_a_double_precision_program(method):
    """States and parameters keep their types: what a scan carries may not change."""
    with jax.enable_x64(True):
        task = Measured(jnp.arange(N, dtype=jnp.float32))

        def run(rng_key):
            algorithm = requiring(METHODS[method](lambda t: 0.1 / t), learning_rate=0.1)
            strategy = appealing(full_participation(N), cohort_size=2)
            return simulate(rng_key, task, algorithm, strategy, 2)[0].models

        models = jax.eval_shape(run, jax.random.key(0))
        assert {leaf.dtype for leaf in jax.tree.leaves(models.params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("method", ["ditto", "perfedavg", "byzantine"])
def test_keys_are_never_reused(method):
    """JAX's own checker, with a warm-up, clients that stay away, and tuning."""
    task = classification(labelled_data(N), LogisticRegression(3))

    def run(rng_key, task):
        algorithm = requiring(
            METHODS[method](0.1), learning_rate=0.1, batch_size=2, num_steps=2, tuning_steps=2
        )
        strategy = appealing(full_participation(N), cohort_size=2, from_round=1)
        return simulate(rng_key, task, algorithm, strategy, 2)[1]

    with jax.debug_key_reuse(True):
        jax.jit(run)(jax.random.key(0), task)
