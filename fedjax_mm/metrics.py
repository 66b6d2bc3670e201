"""NumPy functions that evaluate recorded curves, with recorded rounds along the last axis."""

from typing import Any

import numpy as np
from jaxtyping import Float

__all__ = ["first_round_below", "gain", "log_gap", "standard_error"]


def log_gap(excess_loss: Any) -> Float[np.ndarray, "*batch records"]:
    """Returns ``gap(t) = log10(F(w_t) - F*)``, eq. (10) of Bhuyan et al.

    The gap is -inf at the optimum.

    Example:
      >>> log_gap([0.1, 0.001]).tolist()
      [-1.0, -3.0]
    """
    with np.errstate(divide="ignore"):
        return np.log10(np.asarray(excess_loss, np.float64))


def first_round_below(errors: Any, rounds: Any, threshold: Any) -> Float[np.ndarray, "*batch"]:
    """Returns the first recorded round with an error of at most `threshold`, or NaN.

    Args:
      errors: ``[..., records]``.
      rounds: ``[records]``, the recorded rounds.
      threshold: a number, or an array over the leading axes.

    Example:
      >>> first_round_below([[3.0, 2.0, 1.0], [3.0, 3.0, 3.0]], [0, 10, 20], 2.0).tolist()
      [10.0, nan]
    """
    below = np.asarray(errors) <= np.asarray(threshold)[..., None]
    first = np.asarray(rounds, np.float64)[np.argmax(below, axis=-1)]
    return np.where(below.any(axis=-1), first, np.nan)


def gain(num_models: Any, rounds_single: Any, rounds_multi: Any) -> Float[np.ndarray, "*batch"]:
    """Returns the gain of multi-model training, ``g = M T_1 / T_M``, eq. (3) of Bhuyan et al.

    If a target was not reached, the gain is NaN, and rounds are not clipped to the budget.

    Example:
      >>> gain(9, 50, 117).round(3).item()
      3.846
    """
    return np.asarray(
        np.asarray(num_models) * np.asarray(rounds_single, np.float64) / np.asarray(rounds_multi)
    )


def standard_error(samples: Any, axis: int = 0) -> Float[np.ndarray, "*batch"]:
    """Returns the standard error of the mean over `axis`, or NaN for a single sample.

    Example:
      >>> standard_error([1.0, 3.0]).item()
      1.0
    """
    samples = np.asarray(samples, np.float64)
    size = samples.shape[axis]
    if size < 2:
        return np.full(np.delete(samples.shape, axis), np.nan)
    return np.asarray(np.std(samples, axis=axis, ddof=1) / np.sqrt(size))
