"""Rates fitted to curves with known rates."""

import numpy as np
import pytest

from fedjax_mm.theory.rates import Bootstrap, fit_rate

T = np.arange(1, 2001)


@pytest.mark.parametrize("frame", [1, 12])
def test_an_exact_power_law_is_recovered(frame):
    for exponent in [0.5, 1.0, 1.7]:
        errors = 3.0 * (T / frame + 50.0) ** -exponent * np.array([[0.5], [1.5]])
        rate = fit_rate(T / frame, errors, gamma=50.0)
        np.testing.assert_allclose(rate.exponent, exponent, rtol=1e-9)
        np.testing.assert_allclose(rate.interval, exponent, rtol=1e-9)
        assert rate.window == (1001 / frame, 2000 / frame)


def test_the_interval_has_its_nominal_coverage():
    rng, covered = np.random.default_rng(0), 0
    t, num_trials = T[::50], 200
    for trial in range(num_trials):
        noise = np.exp(0.3 * rng.standard_normal((30, 1)) * np.log(t / t[-1]))
        bootstrap = Bootstrap(num_resamples=200, seed=trial)
        rate = fit_rate(t, (t + 9.0) ** -0.5 * noise, gamma=9.0, bootstrap=bootstrap)
        truth = fit_rate(
            t,
            ((t + 9.0) ** -0.5 * np.exp(0.045 * np.log(t / t[-1]) ** 2))[None].repeat(2, 0),
            gamma=9.0,
        ).exponent
        covered += rate.interval[0] <= truth <= rate.interval[1]
    # The coverage is nominally 0.95, and a little less for a bootstrap of 30 seeds.
    assert covered / num_trials > 0.95 - 4 * np.sqrt(0.95 * 0.05 / num_trials)


def test_the_interval_distinguishes_rates():
    rng = np.random.default_rng(1)
    errors = (T[::20] + 9.0) ** -0.5 * (1 + 0.01 * rng.standard_normal((20, 100)))
    rate = fit_rate(T[::20], errors, gamma=9.0)
    assert rate.interval[0] < 0.5 < rate.interval[1] < 0.6


def test_curves_that_cannot_be_fitted_are_refused():
    for errors, options, message in [
        (np.ones((3, 5)), {}, r"shape \(3, 5\); give \[seeds, 2000 records\]"),
        (np.ones((1, 2000)), {}, "at least 2 of each"),
        (np.ones((3, 2000)), {"window": (5000, 6000)}, "0 records between 5000 and 6000"),
        (np.zeros((3, 2000)), {}, "the mean error is 0"),
        (np.ones((3, 2000)), {"bootstrap": Bootstrap(num_resamples=0)}, "num_resamples is 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            fit_rate(T, errors, gamma=1.0, **options)
