"""Numbers of a formula as arrays: a bound over a grid is one call."""

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray: TypeAlias = NDArray[np.float64]


def broadcast(*values: ArrayLike) -> tuple[FloatArray, ...]:
    """The values in double precision and in their common shape.

    Example:
      >>> T, tau = broadcast([[10], [20]], [1, 2, 5])
      >>> T.shape, tau.shape
      ((2, 3), (2, 3))
    """
    return np.broadcast_arrays(*(np.asarray(value, np.float64) for value in values))
