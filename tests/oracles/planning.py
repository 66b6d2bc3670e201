"""NumPy oracle of BODS in plain loops, with scikit-learn's Gaussian process.

Zhou et al., "Efficient Device Scheduling with Multi-Job Federated Learning", as FedAST's authors
compare with it, with the last plans only and a fixed length scale. Nothing here is shared with the
library under test.

Counting: `k` (client) and `m` (model) are array indices, from 0. N clients, M models, K clients of
each model.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern

Array = NDArray[np.float64]
Plan = Sequence[Sequence[int]]  # the clients of each model


def as_vector(plan: Plan, num_clients: int) -> Array:
    """x in {0, 1}^(M N)."""
    x = np.zeros((len(plan), num_clients))
    for m, clients in enumerate(plan):
        for k in clients:
            x[m, k] = 1.0
    return x.ravel()


def predict(X: Any, y: Any, candidates: Any, noise: float) -> tuple[Array, Array]:
    """Mean and standard deviation at the candidates, for standardized y."""
    process = GaussianProcessRegressor(
        Matern(length_scale=2.0, nu=1.5), alpha=noise, optimizer=None, normalize_y=True
    )
    mean, deviation = process.fit(np.array(X), np.array(y)).predict(candidates, return_std=True)
    return mean, deviation


def improvement(mean: Array, deviation: Array, best: float) -> Array:
    """Expected improvement of a minimum, 0 for deviation 0."""
    found = np.zeros(len(mean))
    for i in range(len(mean)):
        if deviation[i] > 0:
            z = (best - mean[i]) / deviation[i]
            found[i] = (best - mean[i]) * norm.cdf(z) + deviation[i] * norm.pdf(z)
    return found


def run(
    candidates: Sequence[Sequence[Plan]],
    chosen: Sequence[int],
    time_of: Callable[[int, int, int], float],
    num_clients: int,
    *,
    alpha: float,
    learn: str,
    memory: int,
    noise: float,
) -> list[float]:
    """How much better the best candidate of each round is than the chosen plan.

    Choices are an argument, because plans of equal merit differ by rounding.

    Args:
      candidates: the plans of each round to choose from.
      chosen: the index of the chosen plan of each round.
      time_of: the duration of a local training, from the round (from 1), m and k.
      num_clients: N.
      alpha: the weight of time.
      learn: "cost" or "time".
      memory: the number of last plans that are used.
      noise: added to the kernel's diagonal.
    """
    counts = np.zeros((len(candidates[0][0]), num_clients))
    X: list[Array] = []
    y: list[float] = []
    regrets = []
    for t, (plans, choice) in enumerate(zip(candidates, chosen, strict=True), start=1):
        vectors = [as_vector(plan, num_clients) for plan in plans]
        fairness = [float(np.var(counts + x.reshape(counts.shape), axis=1).sum()) for x in vectors]
        if X:
            mean, deviation = predict(X[-memory:], y[-memory:], vectors, noise)
            if learn == "cost":
                merit = improvement(mean, deviation, min(y[-memory:]))
            else:
                merit = -alpha * (mean - deviation) - (1 - alpha) * np.array(fairness)
            regrets.append(float(merit.max() - merit[choice]))
        longest = [max(time_of(t, m, k) for k in its) for m, its in enumerate(plans[choice])]
        time = sum(longest)
        counts += vectors[choice].reshape(counts.shape)
        X.append(vectors[choice])
        y.append(time if learn == "time" else alpha * time + (1 - alpha) * fairness[choice])
    return regrets
