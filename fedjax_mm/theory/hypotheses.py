"""Checks of a statement's hypotheses: outside of them there is no bound."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike


def require(statement: str, hypotheses: Mapping[str, ArrayLike], **given: ArrayLike) -> None:
    """Raises `ValueError` naming the first hypothesis that does not hold for all numbers given.

    Args:
      statement: whose hypotheses they are, as in "Theorem 1".
      hypotheses: for each, as it is printed, whether it holds; NaN comparisons do not.
      **given: the numbers that it speaks of, for the message.

    Example:
      >>> require("Theorem 1", {"beta > 1/mu": 3.0 > 1 / 0.2}, beta=3.0, mu=0.2)
      Traceback (most recent call last):
        ...
      ValueError: Theorem 1 needs beta > 1/mu; given beta = 3, mu = 0.2
    """
    for name, holds in hypotheses.items():
        if not np.all(holds):
            numbers = ", ".join(f"{key} = {_in_short(value)}" for key, value in given.items())
            raise ValueError(f"{statement} needs {name}; given {numbers}")


def _in_short(value: ArrayLike) -> str:
    numbers = np.asarray(value)
    if numbers.ndim == 0:
        return f"{numbers:.6g}"
    return f"{numbers.min():.6g} to {numbers.max():.6g}"
