"""Sampling with unequal probabilities: constraints, unbiasedness and variance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_mm import (
    advance,
    fedavg,
    full_participation,
    init,
    local_sgd,
    mfa_rand,
    mifa,
    simulate,
    stalevr,
    variance_reduced,
)
from fedjax_mm.assignments.sampling import no_state
from fedjax_mm.assignments.variance_reduced import draw_models, optimal_probabilities
from fedjax_mm.base import Assignment, Cohort
from fedjax_mm.tasks import least_squares
from tests.helpers import slow_unless
from tests.oracles import sampling as oracle

pytestmark = pytest.mark.usefixtures("x64")

N, M, DRAWS = 6, 2, 10_000
PROCESSORS = (1, 2, 1, 1, 3, 1)


# Probabilities

SIZES = [(1, 1), (2, 4), (3, 7)]  # models and processors; each compiles
amounts = st.sampled_from([0.0, 1e-8, 0.5, 1.0, 1.0, 2.0, 1e6]) | st.floats(1e-12, 10)


@st.composite
def problems(draw):
    """U and m0, which may be the number of processors."""
    num_models, num_processors = draw(st.sampled_from(SIZES))
    row = st.lists(amounts, min_size=num_processors, max_size=num_processors)
    sizes = draw(st.lists(row, min_size=num_models, max_size=num_models))
    share = draw(st.sampled_from([0.25, 0.5, 1.0]) | st.floats(0.01, 1))
    return np.array(sizes), share * num_processors


@settings(deadline=None, max_examples=150)
@given(problems())
def test_probabilities_meet_their_constraints(problem):
    """Checks sums over all and over each processor, the oracle, and the variance."""
    sizes, expected = problem
    with jax.enable_x64(True):
        p = np.asarray(jax.jit(optimal_probabilities)(sizes, expected))
    assert (p >= 0).all()
    assert (p.sum(0) <= 1 + 1e-12).all()
    trained = sizes.sum(0) > 0
    assert p.sum() == pytest.approx(min(expected, trained.sum()), rel=1e-9)
    assert ((p > 0) == (sizes > 0)).all()
    np.testing.assert_allclose(p, np.transpose(oracle.probabilities(sizes.T, expected)), rtol=1e-9)
    uniform = np.full(sizes.shape, expected / sizes.size)

    def second_moment(p):
        return (sizes[sizes > 0] ** 2 / p[sizes > 0]).sum()

    assert second_moment(p) <= second_moment(uniform) * (1 + 1e-9)


# Draws


@functools.cache
def task():
    """Six regressions with 1 to 9 examples and very different minimizers."""
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, 3)) for n in (1, 5, 2, 9, 3, 6)]
    return least_squares(xs, [x.sum(1) * 2.0**k for k, x in enumerate(xs)], ridge=0.1)


def uniform(expected):
    """An assignment with equal probabilities for all processors and models."""
    owners = np.repeat(np.arange(N), PROCESSORS)
    p = np.full((M, len(owners)), expected / (M * len(owners)))

    def assign(rng_key, round, state, look):
        drawn = draw_models(rng_key, jnp.asarray(p))
        counts = jnp.zeros((M, N)).at[drawn, owners].add(1, mode="drop")
        clients = jnp.where(counts > 0, jnp.arange(N), -1)
        return Cohort.of_rows(clients, counts / (np.array(PROCESSORS) * p[0, 0])), state

    return Assignment(N, M, no_state, assign)


def sampled(expected, **how):
    return variance_reduced(N, M, expected_trainings=expected, processors=PROCESSORS, **how)


CASES = {
    "uniform": (uniform(3.0), fedavg(0.05, local_steps=2, server_scale="1/N")),
    "LVR": (sampled(3.0), fedavg(0.05, local_steps=2, server_scale="1/N")),
    "GVR": (sampled(3.0, by="update"), fedavg(0.05, local_steps=2, server_scale="1/N")),
    "FedVARP": (sampled(3.0), stalevr(local_sgd(0.05, steps=2), beta="one")),
    "FedVARP, uniform": (
        mfa_rand(N, M, cohort_size=3, unbiased=True),
        stalevr(local_sgd(0.05, steps=2), beta="one"),
    ),
    "StaleVRE": (sampled(3.0, by="update"), stalevr(local_sgd(0.05, steps=2))),
    "StaleVR": (
        sampled(3.0, by="update", inactive="train"),
        stalevr(local_sgd(0.05, steps=2), beta="exact"),
    ),
    "MIFA": (sampled(3.0), mifa(local_sgd(0.05, steps=2))),
}


@functools.cache
def steps(case):
    """The steps of all draws ``[draws, models, 3]``, and the step of full participation.

    Methods with states first run eight rounds, and all others start from the same models.
    """
    assignment, algorithm = CASES[case]
    plain, start = fedavg(0.05, local_steps=2), np.random.default_rng(1).normal(size=(M, 3))

    @jax.jit
    def run(task):
        state = init(jax.random.key(3), task, algorithm, assignment, start)
        if jax.tree.leaves(state.models[0].clients):
            state, _ = advance(state, task, algorithm, assignment, 8)

        def step(key):
            again = state._replace(rng_key=key)
            return advance(again, task, algorithm, assignment, 1)[0].models[0].params

        def full(params):
            how = task, plain, full_participation(N), 1
            return simulate(jax.random.key(0), *how, params=params)[0].models[0].params[0]

        before = state.models[0].params
        drawn = jax.vmap(step)(jax.random.split(jax.random.key(1), DRAWS))
        return drawn - before, jax.vmap(full)(before) - before

    with jax.enable_x64(True):
        return jax.device_get(run(task()))


def distances(case):
    """Distance of the mean step from that of full participation, in standard errors."""
    drawn, full = steps(case)
    return np.abs(drawn.mean(0) - full) / (drawn.std(0, ddof=1) / np.sqrt(len(drawn)))


@pytest.mark.parametrize(
    "case",
    [slow_unless(case not in ("FedVARP", "StaleVR"), case) for case in CASES if case != "MIFA"],
)
def test_the_mean_step_is_that_of_full_participation(case):
    """The mean of 10,000 draws is within 4 standard errors."""
    assert distances(case).max() < 4


def test_mifa_is_biased():
    """MIFA does not divide by p, so the test above can fail."""
    assert distances("MIFA").max() > 10


def test_draws_by_losses_or_updates_reduce_the_variance():
    """Norms of updates reduce it most."""
    variance = {case: steps(case)[0].var(0).sum() for case in ("uniform", "LVR", "GVR")}
    assert variance["LVR"] < 0.9 * variance["uniform"]
    assert variance["GVR"] < variance["LVR"]
