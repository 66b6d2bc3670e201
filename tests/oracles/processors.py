"""NumPy oracle of clients that train several models in a round, in plain loops.

Client k of a cohort trains ``min(B_k, M)`` different models. Nothing here is shared with the
library under test. `k` (client) and `m` (model) are array indices, from 0.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def further_models(
    first: Sequence[tuple[int, int]],
    lots: Sequence[Sequence[int]],
    processors: Sequence[int],
    num_models: int,
) -> list[set[int]]:
    """The clients of each model.

    Args:
      first: client and model of each member of the groups.
      lots: a number for each member and model. Small ones are drawn first.
      processors: B_k of all clients.
      num_models: M.
    """
    trained: list[set[int]] = [set() for _ in range(num_models)]
    for (k, m), lot in zip(first, lots, strict=True):
        own = [m]
        while len(own) < min(processors[k], num_models):
            left = [other for other in range(num_models) if other not in own]
            own.append(min(left, key=lambda other, lot=lot: lot[other]))
        for each in own:
            trained[each].add(k)
    return trained


def round_of(
    params: Array,
    trained: Sequence[set[int]],
    targets: Array,
    ridge: float,
    rate: float,
    factors: Array,
) -> Array:
    """One round with a gradient of ``(w - targets[k])^2 / 2 + ridge/2 w^2`` per client, over N.

    Args:
      params: [M, 1].
      trained: the clients of each model.
      targets: [N].
      ridge: the regularization.
      rate: the learning rate.
      factors: [N], of the clients' updates.
    """
    new = params.copy()
    for m, clients in enumerate(trained):
        for k in clients:
            gradient = params[m] - targets[k] + ridge * params[m]
            new[m] = new[m] - factors[k] * rate * gradient / len(targets)
    return new
