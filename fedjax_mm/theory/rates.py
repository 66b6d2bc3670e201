"""Measured rates of convergence, to stand beside those that are proven."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_mm.checks import check_count


class Rate(NamedTuple):
    """The exponent a in ``E|w_t - w*| ~ C (t/M + gamma)^-a``.

    Attributes:
      exponent: the slope of least squares between the logarithms, its sign turned.
      interval: ends of its bootstrap confidence interval over seeds.
      window: the rounds that it was fitted on, first and last.
    """

    exponent: float
    interval: tuple[float, float]
    window: tuple[float, float]


MFA_RAND_EXPONENT, MFA_RR_EXPONENT = 0.5, 1.0
"""Of Theorem 1's bound in t + gamma, and of Theorem 2's in t/M + gamma."""


def fit_rate(
    rounds: ArrayLike,
    errors: ArrayLike,
    *,
    gamma: float,
    frame: int = 1,
    window: tuple[float, float] | None = None,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Rate:
    """The rate at which the mean error over seeds falls.

    Args:
      rounds: ``[records]``, the theorems' t: 1 at the start.
      errors: ``[seeds, records]``, ``|w_t - w*|``.
      gamma: of the theorem.
      frame: M where the bound is in frames, t/M + gamma; else 1.
      window: first and last t to fit on; by default the later half of the records.
      confidence: of the interval, whose ends are quantiles over resampled seeds.
      num_resamples: of the bootstrap.
      seed: of the bootstrap.

    Raises:
      ValueError: if there are not two seeds and two records with positive errors.

    Example:
      >>> t = np.arange(1, 1001)
      >>> errors = (t + 10.0) ** -0.5 * np.array([[1.0], [2.0]])
      >>> round(fit_rate(t, errors, gamma=10.0).exponent, 6)
      0.5
    """
    check_count("frame", frame)
    check_count("num_resamples", num_resamples)
    t, values = np.asarray(rounds, np.float64), np.asarray(errors, np.float64)
    if t.ndim != 1 or values.ndim != 2 or values.shape[1] != len(t):
        raise ValueError(f"errors have shape {values.shape}; give [seeds, {len(t)} records]")
    first, last = (t[len(t) // 2], t[-1]) if window is None else window
    inside = (t >= first) & (t <= last)
    if inside.sum() < 2 or len(values) < 2:
        raise ValueError(
            f"{inside.sum()} records between {first:g} and {last:g} of {len(values)} seeds; a rate "
            "and its interval take at least 2 of each"
        )
    times, values = t[inside], values[:, inside]
    if not np.all(values.mean(0) > 0):
        raise ValueError("the mean error is 0 somewhere; end the window before")
    logs = np.log(times / frame + gamma)
    slope = _slope(logs, np.log(values.mean(0)))
    draws = np.random.default_rng(seed).integers(len(values), size=(num_resamples, len(values)))
    counts = np.stack([np.bincount(draw, minlength=len(values)) for draw in draws])
    slopes = _slope(logs, np.log(counts @ values / len(values)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(-slopes, [tail, 1 - tail])
    return Rate(-float(slope), (float(low), float(high)), (float(first), float(last)))


def _slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """The slope of least squares, over the last axis of y."""
    centred = x - x.mean()
    return np.asarray(y @ centred / (centred @ centred))
