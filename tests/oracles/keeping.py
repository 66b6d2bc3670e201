"""NumPy float64 oracle of local optimizers whose states outlive the round.

Steppers replace `maxfl.Heavy` in the loops of all methods: each is called for every local step of
one client and keeps its own state. REFERENCE of Adam: Kingma and Ba (2015), Algorithm 1.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Adam:
    """m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, w <- w - rate mhat / (sqrt(vhat) + eps)."""

    reals, integers = ("m", "v"), ("count",)

    def __init__(self, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> None:
        self.b1, self.b2, self.eps = b1, b2, eps
        self.m, self.v, self.count = np.zeros(()), np.zeros(()), 0

    def __call__(self, w: Array, rate: float, g: Array) -> Array:
        self.count += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g * g
        mean = self.m / (1 - self.b1**self.count)
        square = self.v / (1 - self.b2**self.count)
        return np.asarray(w - rate * mean / (np.sqrt(square) + self.eps))


class Momentum:
    """m <- beta m + g and w <- w - rate m."""

    reals, integers = ("m",), ()

    def __init__(self, beta: float) -> None:
        self.beta, self.m = beta, np.zeros(())

    def __call__(self, w: Array, rate: float, g: Array) -> Array:
        self.m = self.beta * self.m + g
        return np.asarray(w - rate * self.m)


class OfClients:
    """One optimizer state for each client and model. Ditto's v_k begins afresh."""

    def __init__(self, fresh: Callable[[], Any]) -> None:
        self.fresh, self.states = fresh, {}

    def __call__(self, k: int, model: str) -> Any:
        if model == "personal":
            return self.fresh()
        return self.states.setdefault((k, model), self.fresh())


class Averaged:
    """One optimizer state for all clients, the mean of the last participants' states.

    Integers become the largest. `weight(k)` is that of client k's update.
    """

    def __init__(self, fresh: Callable[[], Any], weight: Callable[[int], float]) -> None:
        self.fresh, self.weight, self.state = fresh, weight, fresh()
        self.trained: list[tuple[int, Any]] = []

    def __call__(self, k: int, model: str) -> Any:
        if model == "personal":
            return self.fresh()
        self.trained.append((k, deepcopy(self.state)))
        return self.trained[-1][1]

    def server(self, w: Array, step: Array) -> Array:
        """Adds the step to w at the end of a round, and averages the states."""
        weights = [self.weight(k) for k, _ in self.trained]
        for name in self.state.reals:
            each = [getattr(one, name) for _, one in self.trained]
            total = sum(p * x for p, x in zip(weights, each, strict=True))
            setattr(self.state, name, total / sum(weights))
        for name in self.state.integers:
            setattr(self.state, name, max(getattr(one, name) for _, one in self.trained))
        self.trained = []
        return np.asarray(w + step)
