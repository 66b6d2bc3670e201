"""Epsilon against published values and closed forms, and assignments without a bound."""

import math
import time

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedjax_mm import (
    appealing,
    bandit,
    full_participation,
    mfa_rand,
    mfa_rr,
    variance_reduced,
)
from fedjax_mm.asynchrony import on_clock, shifted_exponential
from fedjax_mm.availability import available, bernoulli, cyclic, dropping, markov
from fedjax_mm.base import Assignment, Cohort, Sampling
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
def test_epsilon_matches_published_values(z, q, rounds, delta, expected):
    how = {"noise_multiplier": z, "num_rounds": rounds, "delta": delta}
    pool = POOL if q == 1 else available(full_participation(100), bernoulli(q))
    assert epsilon(pool, **how) == pytest.approx(expected, rel=2e-3)


def test_cohorts_of_a_fixed_size_match_published_values():
    """A replacement moves a sum by 2 C, so z = 2.2 corresponds to 1.1."""
    how = {"noise_multiplier": 2.2, "num_rounds": 200, "delta": 1e-5}
    found = epsilon(mfa_rand(1000, 2, cohort_size=50), **how, neighbors="replace")
    assert found == pytest.approx(8.35851, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("z", [2.2, 0.7])
def test_a_cohort_costs_no_more_than_all_clients(z):
    """This holds even with noise so small that Renyi divergences are loose."""
    how = {"noise_multiplier": z, "num_rounds": 200, "delta": 1e-5, "neighbors": "replace"}
    few, everybody = (mfa_rand(1000, 2, cohort_size=size) for size in (50, None))
    assert epsilon(few, **how) <= epsilon(everybody, **how)


def delta_of(eps, mu):
    """Delta of a Gaussian mechanism whose sensitivity is mu standard deviations."""
    return norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu)


@pytest.mark.parametrize(("z", "rounds"), [(10.0, 100), (2.0, 9), (1.0, 1)])
def test_epsilon_matches_the_closed_form(z, rounds):
    mu = math.sqrt(rounds) / z
    expected = brentq(lambda eps: delta_of(eps, mu) - 1e-5, 0, 100)
    found = epsilon(POOL, noise_multiplier=z, num_rounds=rounds, delta=1e-5)
    assert found == pytest.approx(expected, rel=2e-3)
    back = noise_for(POOL, epsilon=found, num_rounds=rounds, delta=1e-5)
    assert back == pytest.approx(z, rel=1e-3)


def test_noise_for_is_found_in_seconds():
    """Clients are hardly ever present and need little noise, which makes privacy losses large."""
    few = available(full_participation(12), bernoulli(0.001))
    start = time.process_time()
    assert noise_for(few, epsilon=1.0, num_rounds=50, delta=1e-6) == pytest.approx(0.621, abs=5e-3)
    assert time.process_time() - start < 30


def test_wide_intervals_cost_no_accuracy():
    """Epsilon is in the hundreds, and the intervals of the discretized losses are wide."""
    mu = math.sqrt(10) / 0.2
    expected = brentq(lambda eps: delta_of(eps, mu) - 1e-5, 0, 300)
    found = epsilon(POOL, noise_multiplier=0.2, num_rounds=10, delta=1e-5)
    assert expected <= found <= expected + 1e-4


HOW = {"noise_multiplier": 8.0, "num_rounds": 10, "delta": 1e-5}


def test_models_cost_privacy_only_if_one_client_trains_several():
    """K models of a client act as one Gaussian mechanism with z / sqrt(K)."""
    one, many = mfa_rand(100, 1), mfa_rr(100, 20)
    assert epsilon(one, **HOW) == epsilon(many, **HOW)
    halved = epsilon(one, **HOW | {"noise_multiplier": 4.0})
    clients = np.tile(np.arange(6, dtype=np.int32), (4, 1))
    own = Assignment(
        6,
        4,
        lambda key, look: (),
        lambda key, t, state, look: (Cohort.of_rows(clients), state),
    ).sampled(Sampling(4))
    rare = [1] * 999 + [4]  # few clients are drawn
    for assignment in (
        own,
        mfa_rand(1000, 8, cohort_size=16, processors=rare),
        dropping(available(mfa_rand(1000, 8, processors=rare), bernoulli(1.0)), 0.97),
        on_clock(mfa_rand(6, 4, processors=4), shifted_exponential(6), first=1),
    ):
        assert epsilon(assignment, **HOW) == pytest.approx(halved, rel=1e-6)


def three_times(rng_key, round, state, look):
    """Lists client 0 three times, so that it moves the sum of the only model by 3 C."""
    return Cohort.of_rows(jnp.zeros((1, 3), jnp.int32)), state


PRESENT = available(full_participation(100), bernoulli(0.1))


@pytest.mark.parametrize(
    "assignment",
    [
        Assignment(6, 1, lambda key, look: (), three_times),
        mfa_rand(100, 1)._replace(assign=three_times),
        PRESENT._replace(assign=full_participation(100).assign),
        PRESENT._replace(
            init=lambda *given: PRESENT.init(*given)._replace(own=((), jnp.full((), -1.0)))
        ),
        mfa_rand(100, 1, cohort_size=5)._replace(num_clients=10**6),
        available(full_participation(100)._replace(assign=three_times), bernoulli(0.1)),
        dropping(mfa_rand(100, 1)._replace(assign=three_times), 0.1),
        on_clock(mfa_rand(100, 1)._replace(assign=three_times), shifted_exponential(100), first=1),
    ],
    ids=["own", "replaced", "amplified", "start", "number", "available", "dropping", "on_clock"],
)
def test_epsilon_needs_stated_sampling(assignment):
    """Replacing a function of an assignment drops its statement of the sampling."""
    with pytest.raises(UncoveredError, match="epsilon is infinite: the assignment states no sampl"):
        epsilon(assignment, **HOW)
    with pytest.raises(UncoveredError, match="states no sampling"):
        noise_for(assignment, epsilon=1.0, num_rounds=10, delta=1e-5)
    stated = assignment.sampled(Sampling(3))
    assert epsilon(stated, **HOW) > epsilon(full_participation(100), **HOW)


def test_presence_amplifies_if_it_is_independent():
    """Independent sampling amplifies by its largest probability. Other laws do not amplify."""
    everyone, full = full_participation(100), epsilon(full_participation(100), **HOW)
    rare = epsilon(available(everyone, bernoulli(0.1)), **HOW)
    assert rare < 0.2 * full
    unequal = bernoulli(np.linspace(0.01, 0.1, 100))
    assert epsilon(available(everyone, unequal), **HOW) == pytest.approx(rare)
    twice = available(available(everyone, bernoulli(0.5)), bernoulli(0.2))
    assert epsilon(twice, **HOW) == pytest.approx(rare)
    assert epsilon(dropping(available(everyone, bernoulli(0.1)), 0.5), **HOW) == rare
    for assignment in (
        available(everyone, markov(0.1, 0.9)),
        available(everyone, cyclic(10)),
        available(mfa_rand(100, 2, cohort_size=50), bernoulli(0.1)),
        available(mfa_rand(100, 2), bernoulli(0.1), when_absent="replace"),
        on_clock(available(everyone, bernoulli(0.1)), shifted_exponential(100), deadline=9.0),
        mfa_rr(100, 2, cohort_size=50),
    ):
        assert epsilon(assignment, **HOW) == full


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (variance_reduced(6, 2, expected_trainings=3), "looks at the clients' losses"),
        (bandit(6, 2, cohort_size=4), "epsilon is infinite: the assignment"),
        (appealing(full_participation(6), cohort_size=2), "looks at the clients' losses"),
    ],
)
def test_assignments_without_a_bound_are_refused(assignment, message):
    with pytest.raises(UncoveredError, match=message):
        epsilon(assignment, noise_multiplier=1.0, num_rounds=10, delta=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"delta": 0.0},
        {"num_rounds": 0},
        {"noise_multiplier": 0.0},
        {"neighbors": "all"},
    ],
)
def test_wrong_numbers_are_refused(change):
    given = {"noise_multiplier": 1.0, "num_rounds": 10, "delta": 1e-5} | change
    with pytest.raises(ValueError, match=f"{next(iter(change))} is"):
        epsilon(POOL, **given)
