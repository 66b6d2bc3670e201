"""LVR and GVR, with plain servers and servers that use earlier updates, against NumPy loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from fedjax_mm import (
    fedavg,
    full_participation,
    local_sgd,
    mfa_rand,
    mifa,
    simulate,
    stalevr,
    variance_reduced,
)
from fedjax_mm.base import keys
from fedjax_mm.schedules import inverse_time
from fedjax_mm.sweeps import Setup
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.plan import make_plan
from fedjax_mm.sweeps.program import num_bytes, programs_of
from fedjax_mm.tasks import quadratic
from tests.algorithms.method_problems import BATCH, LONG, MODELS, PROBLEMS, SEED, N
from tests.algorithms.test_methods import Quiet, error
from tests.helpers import slow_unless
from tests.oracles import sampling as oracle

pytestmark = pytest.mark.usefixtures("x64")


M, E, ROUNDS = MODELS, 3, LONG


RATE, RATES = inverse_time(2.0, 30.0), [2.0 / (t + 30.0) for t in range(ROUNDS + 1)]


SINGLE, SEVERAL = (1,) * N, (1, 3, 1, 2, 1, 1, 2)


SERVERS = {
    "fedavg": functools.partial(fedavg, server_scale="1/N"),
    "mifa": mifa,
    "one": functools.partial(stalevr, beta="one"),
    "estimated": functools.partial(stalevr, beta="estimated"),
    "exact": functools.partial(stalevr, beta="exact"),
}


CASES = {  # server, norm, expected trainings, processors
    "LVR": ("fedavg", "loss", 4.0, SINGLE),
    "LVR, several processors": ("fedavg", "loss", 6.5, SEVERAL),
    "LVR, few": ("fedavg", "loss", 0.6, SINGLE),
    "GVR": ("fedavg", "update", 4.0, SINGLE),
    "GVR, several processors": ("fedavg", "update", 6.5, SEVERAL),
    "MIFA": ("mifa", "loss", 2.5, SINGLE),
    "MIFA by updates": ("mifa", "update", 2.5, SINGLE),
    "FedVARP": ("one", "loss", 2.5, SEVERAL),
    "FedVARP by updates": ("one", "update", 2.5, SINGLE),
    "StaleVRE": ("estimated", "loss", 2.5, SINGLE),
    "StaleVRE by updates": ("estimated", "update", 2.5, SEVERAL),
    "StaleVR": ("exact", "update", 2.5, SINGLE),
    "StaleVR by losses": ("exact", "loss", 2.5, SEVERAL),
}


QUICK = {"GVR, several processors", "FedVARP", "StaleVRE by updates", "StaleVR"}


def start_of(name):
    return np.random.default_rng(2).normal(size=(M, PROBLEMS[name]().size))


def assignment_of(case):
    server, by, expected, processors = CASES[case]
    inactive = "train" if server == "exact" else "rest"
    how = {"by": by, "processors": processors, "inactive": inactive}
    return variance_reduced(N, M, expected_trainings=expected, **how)


@functools.cache
def program(case, client_map):
    server, *_ = CASES[case]
    local = local_sgd(RATE, steps=E, batch_size=BATCH)
    algorithm, assignment = SERVERS[server](local), assignment_of(case)

    def run(task, start):
        how = {"params": start, "client_map": client_map}
        key = jax.random.key(SEED)
        return simulate(key, Quiet(task, N), algorithm, assignment, ROUNDS, **how)

    return jax.jit(run)


@functools.cache
def lots(num_processors):
    """The uniform lots of all processors in all rounds."""

    def of_round(t):
        key = keys.assignment_key(keys.round_key(jax.random.key(SEED), t))
        return jax.random.uniform(key, (num_processors,), jnp.float32)

    return np.asarray(jax.vmap(of_round)(jnp.arange(1, ROUNDS + 1)), float)


@functools.cache
def expected_run(case, name):
    server, by, expected, processors = CASES[case]
    compared = PROBLEMS[name]()
    problems = [compared.problem(m, np.zeros(N)) for m in range(M)]
    return oracle.run(
        problems,
        start_of(name),
        lots(sum(processors)),
        RATES.__getitem__,
        E,
        method=server,
        by=by,
        expected=expected,
        processors=processors,
    )


@pytest.mark.parametrize(
    ("case", "name", "client_map"),
    [
        *(slow_unless(case in QUICK, case, "least squares", 2) for case in CASES),
        *(slow_unless(case == "StaleVRE", case, "softmax", "vmap") for case in CASES),
    ],
)
def test_a_run_matches_its_loop(case, name, client_map):
    """Two models and 7 clients of 1 to 9 examples for 30 rounds, with the lots of the draws."""
    (server, by, _, _), compared = CASES[case], PROBLEMS[name]()
    start = compared.start(start_of(name))
    state, trace = program(case, client_map)(compared.task, start)
    expected = expected_run(case, name)
    models = state.models[0]
    params = compared.flat(models.params)
    for m in range(M):
        assert error(params[m], expected.w[-1][m]) < 1e-10
        if server != "fedavg":
            h = models.clients if server == "mifa" else models.clients.update
            assert error(compared.flat(h)[m], expected.h[m]) < 1e-10
        if server == "estimated":
            assert models.server.decline[m] == pytest.approx(expected.decline[m], rel=1e-9)
            assert expected.decline[m] != 0
    counts = np.array(expected.counts) > 0
    np.testing.assert_array_equal(trace.client_updates[1:], counts.sum(2))
    np.testing.assert_array_equal(trace.idle_rounds[1:], counts.sum(2) == 0)
    everybody = by == "update" or server == "exact"
    trained = np.full((ROUNDS, M), N) if everybody else counts.sum(2)
    np.testing.assert_array_equal(trace.gradients[1:], E * trained)
    assert trace.upload_size == (compared.size,) * M


def test_some_rounds_are_idle():
    """The comparison above includes rounds without participants."""
    for case in ("LVR, few", "MIFA", "FedVARP", "StaleVR"):
        assert (np.array(expected_run(case, "least squares").counts).sum(2) == 0).any(), case


def test_steps_without_the_factors_of_a_draw_are_refused():
    """Steps would be too small by a factor of K/N."""
    for assignment in (mfa_rand(6, 1, cohort_size=2), full_participation(6)):
        with pytest.raises(ValueError, match=r"stalevr needs the factors 1/p .* unbiased=True"):
            simulate(0, quadratic(6, 1, mu=0.1), stalevr(local_sgd(0.1, steps=1)), assignment, 1)


def test_negative_losses_make_the_models_nan():
    """They have no probability. A sweep reports the NaN."""
    task = quadratic(6, 1, mu=0.1)
    assignment = variance_reduced(6, 2, expected_trainings=3)
    algorithm = fedavg(0.1, local_steps=1, server_scale="1/N")
    start = np.zeros(7) + 0.1
    state = jax.jit(lambda key: simulate(key, task, algorithm, assignment, 1, params=start)[0])(
        jax.random.key(0)
    )
    assert np.isnan(state.models[0].params).any()


@pytest.mark.parametrize("algorithm", [mifa, stalevr])
def test_the_memory_of_all_updates_is_estimated_before_the_run(algorithm):
    """The state has the last updates of 50 clients for two models of 51 numbers."""
    bytes_of_updates = 8 * 2 * 50 * 51

    def build(learning_rate):
        how = algorithm(local_sgd(learning_rate, steps=1))
        return Setup(quadratic(50, 1, mu=0.1), how, mfa_rand(50, 2, unbiased=True))

    (program,) = programs_of(Grid(build, {"learning_rate": [0.1]}, 2))
    carried = num_bytes(program.traced.replica)
    assert bytes_of_updates < carried < 1.2 * bytes_of_updates
    outline = make_plan(program.grid, compiles=False)
    assert outline.batch_bytes > 2 * bytes_of_updates
    used = psutil.Process().memory_info().rss
    with pytest.raises(ValueError, match=r"the state of one run takes .* take fewer clients"):
        make_plan(program.grid, limit=used + carried // 2, programs=[program], compiles=False)


def test_wrong_factors_are_refused():
    with pytest.raises(ValueError, match="beta is 'two'; it must be 'estimated', 'exact' or 'one'"):
        stalevr(local_sgd(0.1, steps=1), beta="two")
