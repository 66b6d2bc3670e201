"""NumPy float64 oracle of drifting labels and examples, and of FedAvg on them, in plain loops.

Nothing here is shared with the library under test. Rounds t are from 1, and round 0 is the start.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


def share(t: float, start: float, length: float, period: float | None = None) -> float:
    """s(t): a ramp that begins at `start`, and falls again half a period later."""
    if t < start:
        return 0.0
    since = t - start
    while period is not None and since >= period:
        since -= period
    up = min((since + 1) / length, 1.0)
    if period is None or since < period / 2 - 1:
        return up
    return up - min((since - period / 2 + 1) / length, 1.0)


def own(
    y: Sequence[int],
    draws: Sequence[float] | None,
    concept: Sequence[int] | None,
    window: float | None,
    s: float,
) -> list[tuple[int, int]]:
    """The examples of a client, as indices from 0, and their labels."""
    rows = list(range(len(y)))
    if window is not None:
        rows.sort(key=lambda i: (y[i], i))
        size = max(1, round(window * len(y)))
        begin = round(s * (len(y) - size))
        rows = rows[begin : begin + size]
    if concept is None or draws is None:
        return [(i, int(y[i])) for i in rows]
    return [(i, int(concept[y[i]] if draws[i] < s else y[i])) for i in rows]


def loss_and_gradient(w: Any, examples: Sequence[tuple[Any, int]]) -> tuple[float, Any]:
    """Mean cross-entropy of logits W x + b and its gradient, for w = (W, b)."""
    total, gradient = 0.0, (np.zeros_like(w[0]), np.zeros_like(w[1]))
    for x, label in examples:
        logits = w[0] @ x + w[1]
        p = np.exp(logits - logits.max())
        p /= p.sum()
        total -= np.log(p[label])
        p[label] -= 1
        gradient = gradient[0] + np.outer(p, x), gradient[1] + p
    n = len(examples)
    return total / n, (gradient[0] / n, gradient[1] / n)


def fedavg(
    w: Any, data: Any, cohorts: Sequence[Sequence[int]], rate: float, steps: int
) -> tuple[Any, list[float]]:
    """The final w, and the losses over all training examples after rounds 0, 1, ...

    Args:
      w: W and b at the start.
      data: maps (t, k) to the examples (x, label) of client k in round t; N is `data.num_clients`.
      cohorts: the clients of each round.
      rate: the learning rate of full-gradient steps.
      steps: the number of local steps.
    """

    def loss(t: int) -> float:
        everything = [each for k in range(data.num_clients) for each in data(t, k)]
        return loss_and_gradient(w, everything)[0]

    losses = [loss(0)]
    for t, cohort in enumerate(cohorts, start=1):
        sums, weights = [np.zeros_like(w[0]), np.zeros_like(w[1])], 0
        for k in cohort:
            examples, v = data(t, k), w
            for _ in range(steps):
                _, gradient = loss_and_gradient(v, examples)
                v = v[0] - rate * gradient[0], v[1] - rate * gradient[1]
            weights += len(examples)
            for total, new, old in zip(sums, v, w, strict=True):
                total += len(examples) * (new - old)
        w = w[0] + sums[0] / weights, w[1] + sums[1] / weights
        losses.append(loss(t))
    return w, losses
