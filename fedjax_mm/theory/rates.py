"""Measured convergence rates, for comparison with proven ones."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_mm.checks.annotations import Count, check_argument
from fedjax_mm.theory.problem import FloatArray

MFA_RAND_EXPONENT, MFA_RR_EXPONENT = 0.5, 1.0
"""Exponents of Theorem 1's bound in t + gamma, and of Theorem 2's bound in t/M + gamma."""


class MeasuredRate(NamedTuple):
    """An exponent a in ``E|w_t - w*| ~ C (time + gamma)^-a``.

    Attributes:
      exponent: minus the least-squares slope between the logarithms.
      interval: the bootstrap confidence interval of the exponent over seeds.
      window: the first and last time of the fit.
    """

    exponent: float
    interval: tuple[float, float]
    window: tuple[float, float]


class Bootstrap(NamedTuple):
    """Settings of a bootstrap confidence interval.

    Attributes:
      confidence: the confidence level, for quantiles of the resampled slopes.
      num_resamples: the number of times that all seeds are resampled with replacement.
      seed: the seed of the resampling.
    """

    confidence: float = 0.95
    num_resamples: Count = 2000
    seed: int = 0


_BOOTSTRAP = Bootstrap()


def fit_rate(
    times: ArrayLike,
    errors: ArrayLike,
    gamma: float,
    window: tuple[float, float] | None = None,
    bootstrap: Bootstrap = _BOOTSTRAP,
) -> MeasuredRate:
    """Fits the convergence rate of the mean error over seeds.

    Args:
      times: ``[records]``, the bound's time: t, which is 1 at the start, or t/M.
      errors: ``[seeds, records]``, ``|w_t - w*|``.
      gamma: the offset gamma of the theorem.
      window: the first and last time of the fit; defaults to the second half of the records.
      bootstrap: the settings of the interval.

    Raises:
      ValueError: unless at least two seeds and two records have positive errors.

    Example:
      >>> t = np.arange(1, 1001)
      >>> errors = (t + 10.0) ** -0.5 * np.array([[1.0], [2.0]])
      >>> round(fit_rate(t, errors, gamma=10.0).exponent, 6)
      0.5

    Reference: Bhuyan et al., Theorems 1 and 2, for the bounds whose exponents are estimated.
    """
    check_argument("num_resamples", bootstrap.num_resamples, Count)
    t, values = np.asarray(times, np.float64), np.asarray(errors, np.float64)
    if t.ndim != 1 or values.ndim != 2 or values.shape[1] != len(t):
        raise ValueError(f"errors have shape {values.shape}; give [seeds, {len(t)} records]")
    first, last = (t[len(t) // 2], t[-1]) if window is None else window
    inside = (t >= first) & (t <= last)
    if inside.sum() < 2 or len(values) < 2:
        raise ValueError(
            f"{inside.sum()} records between {first:g} and {last:g} of {len(values)} seeds; a rate "
            "and its interval take at least 2 of each"
        )
    t, values = t[inside], values[:, inside]
    if not np.all(values.mean(0) > 0):
        raise ValueError("the mean error is 0 somewhere; end the window before")
    # Take the logarithm after the mean over seeds, because the theorems bound the mean error.
    logs, size = np.log(t + gamma), len(values)
    slope = _slope(logs, np.log(values.mean(0)))
    # Resample whole seeds, because the records of one seed are dependent.
    draws = np.random.default_rng(bootstrap.seed).integers(
        size, size=(bootstrap.num_resamples, size)
    )
    counts = np.stack([np.bincount(draw, minlength=size) for draw in draws])
    slopes = _slope(logs, np.log(counts @ values / size))
    tail = (1 - bootstrap.confidence) / 2
    low, high = np.quantile(-slopes, [tail, 1 - tail])
    return MeasuredRate(-float(slope), (float(low), float(high)), (float(first), float(last)))


def fitted_exponent(times: ArrayLike, values: ArrayLike) -> FloatArray:
    """Least-squares exponent a of ``values ~ C times^-a``, over the last axis.

    Example:
      >>> fitted_exponent([1, 2, 4], [[8.0, 4.0, 2.0], [1.0, 0.5, 0.25]]).round(12).tolist()
      [1.0, 1.0]
    """
    return -_slope(np.log(np.asarray(times, float)), np.log(np.asarray(values, float)))


def _slope(x: FloatArray, y: FloatArray) -> FloatArray:
    """Least-squares slope over the last axis of y."""
    centred = x - x.mean()
    return np.asarray(y @ centred / (centred @ centred))
