"""NumPy float64 oracle of IFCA on least squares, in plain loops.

Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning",
Algorithm 1 with both of its averages. Nothing here is shared with the library under test.

Counting: `i` (client) and `j` (cluster) are array indices, from 0. m participants, p clusters.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Problem(NamedTuple):
    """F_i(theta) = |X_i theta - y_i|^2 / (2 n_i) + ridge/2 |theta|^2."""

    X: Sequence[Array]
    y: Sequence[Array]
    ridge: float

    def loss(self, i: int, theta: Array) -> float:
        residuals = self.X[i] @ theta - self.y[i]
        return float(residuals @ residuals / (2 * len(residuals)) + self.ridge / 2 * theta @ theta)

    def gradient(self, i: int, theta: Array) -> Array:
        residuals = self.X[i] @ theta - self.y[i]
        return np.asarray(self.X[i].T @ residuals / len(residuals) + self.ridge * theta)


class Run(NamedTuple):
    """A run of T rounds."""

    theta: list[list[Array]]  # [T + 1][p][d]
    clusters: list[list[list[int]]]  # [T][p], the clients of each cluster


def run(
    problem: Problem,
    start: Sequence[Array],
    cohorts: Sequence[Sequence[int]],
    rate: float,
    num_steps: int,
    *,
    average: str,
) -> Run:
    """IFCA with `num_steps` full gradients per client, or one gradient with "gradients"."""
    p = len(start)
    theta, history, clusters = [np.array(x, float) for x in start], [], []
    history.append(list(theta))
    for cohort in cohorts:
        m = len(cohort)
        S: list[list[int]] = [[] for _ in range(p)]
        for i in cohort:
            best = 0
            for j in range(1, p):
                if problem.loss(i, theta[j]) < problem.loss(i, theta[best]):
                    best = j
            S[best].append(i)
        for j in range(p):
            if average == "gradients":
                for_all = [problem.gradient(i, theta[j]) for i in S[j]]
                theta[j] = theta[j] - rate / m * sum(for_all, np.zeros_like(theta[j]))
            elif S[j]:
                local = []
                for i in S[j]:
                    mine = theta[j]
                    for _ in range(num_steps):
                        mine = mine - rate * problem.gradient(i, mine)
                    local.append(mine)
                theta[j] = np.asarray(sum(local) / len(S[j]))
        history.append(list(theta))
        clusters.append(S)
    return Run(history, clusters)
