"""Epsilon against published values, closed forms, and what is not covered."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedjax_mm import bandit, full_participation, mfa_rand, mfa_rr, variance_reduced
from fedjax_mm.availability import available, bernoulli
from fedjax_mm.base import Assignment, Cohort
from fedjax_mm.privacy import UncoveredError, epsilon, noise_for

POOL = mfa_rand(100, 2)


@pytest.mark.parametrize(
    ("z", "q", "rounds", "delta", "expected"),
    [
        (10.0, 1.0, 100, 1e-5, 4.37718),
        (1.0, 0.01, 1000, 1e-5, 1.82824),
        (1.1, 0.05, 200, 1e-5, 3.96165),
        (3.0, 0.1, 512, 1e-6, 3.76969),
    ],
)
def test_epsilon_is_that_of_the_reference(z, q, rounds, delta, expected):
    how = {"noise_multiplier": z, "num_rounds": rounds, "delta": delta, "sampling_rate": q}
    assert epsilon(POOL, **how) == pytest.approx(expected, rel=2e-3)


def test_cohorts_of_a_fixed_size_are_those_of_the_reference():
    """A replacement moves a sum by 2 C, so that z = 2.2 here is an event of 1.1."""
    how = {"noise_multiplier": 2.2, "num_rounds": 200, "delta": 1e-5}
    pool = mfa_rand(1000, 2, cohort_size=50)
    found = epsilon(pool, **how, cohort_size=50)
    assert found == pytest.approx(8.35851, rel=1e-3)
    assert found < epsilon(pool, **how)


def delta_of(eps, mu):
    """Of a Gaussian mechanism with sensitivity over deviation mu."""
    return norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu)


@pytest.mark.parametrize(("z", "rounds"), [(10.0, 100), (2.0, 9), (1.0, 1)])
def test_epsilon_is_that_of_the_closed_form(z, rounds):
    mu = math.sqrt(rounds) / z
    expected = brentq(lambda eps: delta_of(eps, mu) - 1e-5, 0, 100)
    found = epsilon(POOL, noise_multiplier=z, num_rounds=rounds, delta=1e-5)
    assert found == pytest.approx(expected, rel=2e-3)
    back = noise_for(POOL, epsilon=found, num_rounds=rounds, delta=1e-5)
    assert back == pytest.approx(z, rel=1e-3)


def test_the_number_of_models_costs_nothing_but_models_of_one_client_do():
    """All models in a round are one Gaussian; K models of a client are one of z / sqrt(K)."""
    how = {"num_rounds": 10, "delta": 1e-5}
    one, many = mfa_rand(100, 1), mfa_rr(100, 20)
    each = [epsilon(strategy, noise_multiplier=4.0, **how) for strategy in (one, many)]
    assert each[0] == each[1]
    clients = np.tile(np.arange(6, dtype=np.int32), (4, 1))
    all_models = Assignment(
        6, 4, lambda key: (), lambda key, t, state, look: (Cohort.of_rows(clients), state)
    )
    four = epsilon(all_models, noise_multiplier=8.0, **how)
    assert four == pytest.approx(each[0], rel=1e-6)


def test_absence_is_no_amplification_unless_it_is_told():
    strategy = available(full_participation(100), bernoulli(0.1))
    how = {"noise_multiplier": 3.0, "num_rounds": 512, "delta": 1e-6}
    assert epsilon(strategy, **how, sampling_rate=0.1) == pytest.approx(3.76969, rel=2e-3)
    assert epsilon(strategy, **how) > 30


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (variance_reduced(6, 2, expected_trainings=3), "looks at the clients' losses"),
        (bandit(6, 2, cohort_size=4), "epsilon is infinite: the assignment"),
        (mfa_rand(6, 2, unbiased=True), "gives clients factors"),
    ],
)
def test_what_is_not_covered_is_told(strategy, message):
    with pytest.raises(UncoveredError, match=message):
        epsilon(strategy, noise_multiplier=1.0, num_rounds=10, delta=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"delta": 0.0},
        {"sampling_rate": 1.5},
        {"num_rounds": 0},
        {"cohort_size": 101},
        {"cohort_size": 50, "sampling_rate": 0.5},
    ],
)
def test_wrong_numbers_are_refused(change):
    given = {"noise_multiplier": 1.0, "num_rounds": 10, "delta": 1e-5} | change
    with pytest.raises(ValueError, match=f"{next(iter(change))} is"):
        epsilon(POOL, **given)
