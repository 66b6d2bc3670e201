"""Tests whether a mean is near a number, given both of their errors."""

import numpy as np

from fedjax_mm.papers.rulings import Evidence

_CERTAIN = 1e9  # degrees of freedom of a known error


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
    """Tests whether a difference is at most a margin, using two one-sided tests.

    Args:
      text: the numbers, as text.
      apart: the difference.
      margin: the largest difference that counts as near.
      error: the standard error of the difference.
      name: the name of the comparison.
      freedom: the degrees of freedom of the error.
      tests: the number of comparisons, of which this is the worst.

    Example:
      >>> near("", 0.1, 1.0, 0.1).supports < 0.00135 < near("", 0.9, 1.0, 0.1).supports
      True
    """
    from scipy.special import stdtr

    beyond = (abs(apart) - margin) / error
    # Give each side half of the level, because either of them may contradict.
    against = np.minimum(1.0, 2 * tests * stdtr(freedom, -beyond))
    return Evidence(name, text, float(stdtr(freedom, beyond)), float(against))
