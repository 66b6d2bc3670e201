"""NumPy float64 oracle of Pawlik's two algorithms, in plain loops as they are printed.

Nothing here is shared with the library under test. `i` (client) is an array index, from 0; `t`
(iteration) and `s` (round) are from 1, as printed.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def algorithm_1(
    gradient: Callable[[int, Array, int], Array],
    x0: Array,
    num_clients: int,
    num_iterations: int,
    interval: int,
    gamma: float,
) -> tuple[list[Array], list[Array]]:
    """Parallel restarted SGD; all clients' x_i^t [N, d] and G_i^t [N, d], from t = 0 and t = 1.

    Args:
      gradient: G_i^t, from (i, x_i^(t-1), t).
      x0: where all begin.
      num_clients: N.
      num_iterations: T.
      interval: I.
      gamma: learning rate.
    """
    x, G = [np.array([x0] * num_clients)], []
    for t in range(1, num_iterations + 1):
        G.append(np.array([gradient(i, x[-1][i], t) for i in range(num_clients)]))
        if t % interval == 0:
            mean = sum(x[-1][j] for j in range(num_clients)) / num_clients
            x.append(np.array([mean - gamma * G[-1][i] for i in range(num_clients)]))
        else:
            x.append(np.array([x[-1][i] - gamma * G[-1][i] for i in range(num_clients)]))
    return x, G


def algorithm_2(
    gradient: Callable[[int, Array], Array],
    x0: Array,
    cohorts: Sequence[Sequence[int]],
    num_steps: int,
    gamma: float,
) -> Array:
    """Cohorts: x_bar^(s) after the last round, of full gradients and unweighted means.

    Args:
      gradient: of f_i, from (i, x).
      x0: x_bar^(0).
      cohorts: the C clients of every round.
      num_steps: T.
      gamma: learning rate.
    """
    x_bar = x0
    for cohort in cohorts:
        ends = []
        for i in cohort:
            x = x_bar
            for _ in range(num_steps):
                x = x - gamma * gradient(i, x)
            ends.append(x)
        x_bar = np.asarray(sum(ends) / len(cohort))
    return x_bar
