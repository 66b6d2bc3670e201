"""Tests that a mean is near a number, given the errors of both."""

import numpy as np

from fedjax_mm.papers.rulings import Evidence

_CERTAIN = 1e9  # degrees of freedom of an error that is known


def near(
    text: str,
    apart: float,
    margin: float,
    error: float,
    *,
    name: str = "",
    freedom: float = _CERTAIN,
    tests: int = 1,
) -> Evidence:
    """Tests that a difference is at most a margin by two one-sided tests.

    Args:
      text: the numbers.
      apart: the difference.
      margin: the largest one that is near.
      error: the standard error of the difference.
      name: of the comparison.
      freedom: degrees of freedom of the error.
      tests: the number of comparisons of which this is the farthest.

    Example:
      >>> near("", 0.1, 1.0, 0.1).supports < 0.00135 < near("", 0.9, 1.0, 0.1).supports
      True
    """
    from scipy.special import stdtr

    beyond = (abs(apart) - margin) / error
    # Either side may contradict, so each has half of the level.
    against = np.minimum(1.0, 2 * tests * stdtr(freedom, -beyond))
    return Evidence(name, text, float(stdtr(freedom, beyond)), float(against))
