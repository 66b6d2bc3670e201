"""NumPy float64 oracle of the server optimizers of Reddi et al. (2021), Algorithm 2."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def reddi(
    w: Array,
    updates: Sequence[Array],
    rates: Sequence[float],
    kind: str,
    *,
    b1: float,
    b2: float,
    tau: float,
    v0: float,
) -> Array:
    """The parameters after one step for each mean update D of a round."""
    m, v = np.zeros_like(w), np.full_like(w, v0)
    for D, eta in zip(updates, rates, strict=True):
        m = b1 * m + (1 - b1) * D
        for i in range(len(w)):
            square = D[i] * D[i]
            if kind == "adagrad":
                v[i] = v[i] + square
            elif kind == "adam":
                v[i] = b2 * v[i] + (1 - b2) * square
            elif v[i] > square:
                v[i] = v[i] - (1 - b2) * square
            elif v[i] < square:
                v[i] = v[i] + (1 - b2) * square
        w = w + eta * m / (np.sqrt(v) + tau)
    return w
