"""Epsilon against formulas computed here, and the noise that reaches it."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from fedjax_mm import full_participation, mfa_rand
from fedjax_mm.availability import available, bernoulli
from fedjax_mm.privacy import epsilon, noise_for

DELTA = 1e-5


def of_gaussian(mu):
    """Epsilon of a Gaussian mechanism whose sensitivity is mu standard deviations."""

    def delta(eps):
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu)

    return brentq(lambda eps: delta(eps) - DELTA, 0, 300)


def of_sampled_gaussian(z, q):
    """Epsilon of one round in which a client takes part with probability q, by integration."""

    def law(x, is_present):
        with_it = q * norm.pdf(x, 1, z) + (1 - q) * norm.pdf(x, 0, z)
        return with_it if is_present else norm.pdf(x, 0, z)

    def above(x, eps, is_present):
        return max(law(x, is_present) - math.exp(eps) * law(x, not is_present), 0)

    def delta(eps):
        ends = -9 * z, 1 + 9 * z
        return max(quad(above, *ends, (eps, which), limit=400)[0] for which in (True, False))

    return brentq(lambda eps: delta(eps) - DELTA, 1e-3, 50)


def of_cohorts(z, q, num_rounds):
    """Epsilon of uniform cohorts, from Renyi divergences of whole orders a.

    Wang, Balle, Kasiviswanathan, "Subsampled Renyi Differential Privacy and Analytical Moments
    Accountant" (2019), Theorem 27, for a Gaussian mechanism with sensitivity 1; and Canonne,
    Kamath, Steinke, "The Discrete Gaussian for Differential Privacy" (2020), Proposition 12.
    """
    x, width = np.linspace(-12 * z, 40 + 12 * z, 200_001, retstep=True)
    ratio, density = norm.pdf(x, 1, z) / norm.pdf(x, 0, z), norm.pdf(x, 0, z) * width

    def central(j):
        return np.sum((ratio - 1) ** j * density)

    def term(j):
        tight = 4 * math.sqrt(central(2 * (j // 2)) * central(2 * ((j + 1) // 2)))
        return q**j * min(tight, 2 * np.sum(ratio**j * density))

    terms, found = {j: term(j) for j in range(2, 21)}, []
    for a in range(2, 21):
        moment = 1 + sum(math.comb(a, j) * terms[j] for j in range(2, a + 1))
        rest = math.log1p(-1 / a) - math.log(DELTA * a) / (a - 1)
        found.append(num_rounds * math.log(moment) / (a - 1) + rest)
    return min(found)


@pytest.mark.parametrize(
    ("assignment", "neighbors", "mu"),
    [
        (mfa_rand(100, 2), "replace", 2.0),
        (mfa_rand(100, 4, processors=3), "zero", math.sqrt(3)),
    ],
    ids=["a replacement", "three models of a client"],
)
def test_rounds_of_all_clients_are_one_gaussian_mechanism(assignment, neighbors, mu):
    """T rounds have sqrt(T) times the sensitivity mu of one."""
    how = {"num_rounds": 9, "delta": DELTA, "neighbors": neighbors}
    found = epsilon(assignment, noise_multiplier=4.0, **how)
    assert found == pytest.approx(of_gaussian(3 * mu / 4.0), rel=1e-3)
    least = noise_for(assignment, epsilon=found, **how)
    assert least == pytest.approx(4.0, abs=2e-4)
    assert epsilon(assignment, noise_multiplier=least, **how) <= found


def test_independent_clients_amplify_by_their_probability():
    pool = available(full_participation(100), bernoulli(0.1))
    found = epsilon(pool, noise_multiplier=1.0, num_rounds=1, delta=DELTA)
    assert found == pytest.approx(of_sampled_gaussian(1.0, 0.1), rel=1e-3)


def test_uniform_cohorts_amplify_by_their_share():
    """A replacement moves a sum by 2 C, which is z / 2 at sensitivity 1."""
    how = {"noise_multiplier": 4.0, "num_rounds": 200, "delta": DELTA, "neighbors": "replace"}
    found = epsilon(mfa_rand(1000, 2, cohort_size=50), **how)
    assert found == pytest.approx(of_cohorts(2.0, 0.05, 200), rel=1e-3)
