"""LVR and GVR, with plain servers and servers that use earlier updates, against NumPy loops."""

import dataclasses
import functools
import tomllib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    Experiment,
    fedavg,
    full_participation,
    local_sgd,
    mfa_rand,
    run,
    scaffold,
    simulate,
    stalevr,
    variance_reduced,
)
from fedjax_mm.base import Cohort
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.sweeps.devices import layout
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks import quadratic
from tests.algorithms.method_problems import BATCH, PROBLEMS, N
from tests.algorithms.test_methods import Quiet
from tests.algorithms.test_sampling import (
    CASES,
    SERVERS,
    E,
)
from tests.helpers import Towards, slow_unless

pytestmark = pytest.mark.usefixtures("x64")


MIXED = "least squares", "softmax", "least squares"


WAYS = ["scan", 2, "auto", "two devices"]


QUICK_WAYS = {("StaleVRE by updates", "two devices")}


def mixed_run(case, client_map, client_axis=None):
    """Two seeds of five rounds, with models of different structure."""
    server, by, *_ = CASES[case]
    inactive = "train" if server == "exact" else "rest"
    assignment = variance_reduced(N, 3, expected_trainings=5, by=by, inactive=inactive)
    algorithm = SERVERS[server](local_sgd(0.1, steps=2, batch_size=2))

    def one(rng_key, tasks):
        how = {"client_map": client_map, "client_axis": client_axis}
        tasks = [Quiet(task, N) for task in tasks]
        state, trace = simulate(rng_key, tasks, algorithm, assignment, 5, **how)
        return state.models, trace.client_updates, trace.gradients

    return jax.vmap(one, (0, None))


def mixed_arguments(seed):
    return jax.random.split(jax.random.key(seed), 2), [PROBLEMS[name]().task for name in MIXED]


@functools.cache
def all_at_once(case):
    with jax.enable_x64(True):
        return jax.device_get(jax.jit(mixed_run(case, "vmap"))(*mixed_arguments(0)))


@pytest.mark.parametrize(
    ("case", "way"),
    [
        slow_unless((case, way) in QUICK_WAYS, case, way)
        for case in ("GVR", "MIFA", "FedVARP", "StaleVRE by updates", "StaleVR")
        for way in WAYS
    ],
)
def test_client_maps_and_devices_agree_and_nothing_recompiles(case, way):
    """Draws depend on norms that all clients of all models report in chunks."""
    chex.clear_trace_counter()
    if way == "two devices":
        where = layout(1, jax.devices()[:2], "clients")
        program = where.over(mixed_run(case, 2, where.client_axis), (0, None))
    else:
        program = mixed_run(case, way)
    compiled = jax.jit(chex.assert_max_traces(lambda *given: program(*given), n=1))
    actual = compiled(*mixed_arguments(0))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(all_at_once(case)), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-10 * (1 + np.abs(b).max()))
        else:
            np.testing.assert_array_equal(a, b)
    other = compiled(*mixed_arguments(1))
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (actual, other)), strict=True))


def test_exact_factors_need_all_clients():
    """Without a client's h_k the update would be wrong, so the model becomes NaN."""
    task = PROBLEMS["least squares"]().task
    algorithm = stalevr(local_sgd(0.1, steps=1), beta="exact")
    everybody = mfa_rand(N, 1, unbiased=True)

    def assign(rng_key, round, state, look):
        return Cohort.of_rows(jnp.arange(N)[None, : N - 1], jnp.ones((1, N - 1))), state

    ends = [
        jax.jit(lambda key, who=who: simulate(key, Quiet(task, N), algorithm, who, 1)[0])(
            jax.random.key(0)
        )
        .models[0]
        .params
        for who in (everybody, everybody._replace(assign=assign))
    ]
    assert np.isfinite(ends[0]).all()
    assert np.isnan(ends[1]).all()


def test_norms_leave_out_control_variates():
    """The first round of SCAFFOLD equals that of FedAvg without weights."""
    everybody, task = full_participation(N), Quiet(PROBLEMS["least squares"]().task, N)

    def assign(rng_key, round, state, look):
        return everybody.assign(rng_key, round, (), look)[0], look.updates().norms

    assignment = everybody._replace(init=lambda rng_key, look: jnp.zeros((1, N)), assign=assign)

    @jax.jit
    def norms(rng_key):
        local = local_sgd(0.1, steps=E, batch_size=BATCH)
        algorithms = scaffold(local), fedavg(local, weighted=False)
        runs = [simulate(rng_key, task, algorithm, assignment, 1)[0] for algorithm in algorithms]
        return [state.assignment for state in runs]

    one, other = norms(jax.random.key(0))
    np.testing.assert_allclose(one, other, rtol=1e-12)
    assert (one > 0).all()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighing(Towards):
    """`Towards` in which all clients have the same weight."""

    each: float = 1.0

    def weight(self, client):
        return jnp.asarray(self.each)


def test_norms_are_shares_of_the_mean_step():
    """Norms are d_k |w_k - w|, and do not depend on the scale of the weights."""
    everybody, targets = mfa_rand(3, 2), jnp.arange(3.0)
    tasks = [Weighing(targets, each=jnp.array(each)) for each in (1.0, 5.0)]

    def assign(rng_key, round, state, look):
        return everybody.assign(rng_key, round, (), look)[0], look.updates().norms

    assignment = everybody._replace(init=lambda rng_key, look: jnp.zeros((2, 3)), assign=assign)
    start = {"params": {"w": jnp.zeros(3)}}
    run = jax.jit(lambda: simulate(0, tasks, fedavg(0.5, local_steps=1), assignment, 1, **start)[0])
    norms = 0.5 * np.linalg.norm(np.outer(targets, np.ones(3)), axis=1) / 3
    np.testing.assert_allclose(run().assignment, [norms, norms], rtol=1e-6)


FILE = """
num_models = 2
num_rounds = 4
num_seeds = 1
task = { num_clients = 6, block_size = 2, mu = 0.1, start = "normal" }

[algorithms.A]
name = "stalevr"
beta = "exact"
learning_rate = 0.1
local_steps = 2

[algorithms.A.assignment]
name = "variance_reduced"
expected_trainings = 5
by = "update"
processors = 2
inactive = "train"

[axes]
assignment.expected_trainings = [3, 7.5]
"""


SHARED = FILE.replace("[algorithms.A.assignment]", "[assignment]")


@pytest.mark.parametrize(
    "text",
    [pytest.param(FILE, id="own"), pytest.param(SHARED, id="shared", marks=pytest.mark.slow)],
)
def test_a_file_has_all_settings(text):
    """Expected trainings are a swept argument, for one algorithm or for all of them."""
    experiment = validate(Experiment, tomllib.loads(text))
    assert len(programs_of(grid_of(experiment))) == 1
    result = run(experiment)
    algorithm = stalevr(local_sgd(0.1, steps=2), beta="exact")
    task, start = quadratic(6, 2, mu=0.1), experiment.task.initial_params()
    for expected in (3, 7.5):
        how = {"by": "update", "processors": 2, "inactive": "train"}
        assignment = variance_reduced(6, 2, expected_trainings=expected, **how)
        _, trace = jax.jit(
            lambda key, who=assignment: simulate(key, task, algorithm, who, 4, params=start)
        )(seed_keys(0, range(1))[0])
        found = result.sel(expected_trainings=expected).isel(seed=0, algorithm=0)
        np.testing.assert_allclose(found.loss.values, trace.metrics["loss"], rtol=1e-5)  # float32
        drawn = np.cumsum(trace.client_updates, axis=0)
        np.testing.assert_array_equal(found.client_updates.values, drawn)
