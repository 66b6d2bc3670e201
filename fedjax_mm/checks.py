"""Checks of arguments, before anything is compiled."""

from typing import Any

import jax
import numpy as np


def check_not_negative(name: str, value: Any) -> None:
    """Raises `ValueError` unless every number in `value` is at least 0 and finite.

    None and schedules pass, and so do traced numbers, as with `check_positive`.
    """
    if value is None or callable(value) or isinstance(value, jax.core.Tracer):
        return
    numbers = np.asarray(value)
    if not np.all(np.isfinite(numbers) & (numbers >= 0)):
        raise ValueError(f"{name} is {value}; it must not be negative")


def check_positive(name: str, value: Any) -> None:
    """Raises `ValueError` unless every number in `value` is positive and finite.

    None and schedules pass, and so do traced numbers: whoever supplies the numbers checks them.
    """
    if value is None or callable(value) or isinstance(value, jax.core.Tracer):
        return
    numbers = np.asarray(value)
    if not np.all(np.isfinite(numbers) & (numbers > 0)):
        raise ValueError(f"{name} is {value}; it must be positive")


def check_count(name: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is a positive whole number; None passes."""
    if value is not None and not (isinstance(value, int | np.integer) and value > 0):
        raise ValueError(f"{name} is {value}; it must be a positive whole number")
