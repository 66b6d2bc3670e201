"""NumPy float64 oracle of assignments that use observed losses, in plain loops.

Multi-FedAvg with bandits (Bhuyan and Moharir, "Multi-Model Federated Learning", 2022) and
FedFairMMFL (Siew et al., "Fair Concurrent Training of Multiple Models in Federated Learning",
2024). Nothing here is shared with the library under test.

`m` (model), `c` (client) and `e` (local step) count from 0, `t` (round) from 1. Draws are
arguments: lots (the smallest win), orders of clients, models and numbers between 0 and 1.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Choice = tuple[int, int]  # client and model
TrainFn = Callable[[int, int, Array, int], tuple[Array, float]]
"""``(m, c, w, t) -> (local parameters, mean of the batch losses)``."""


class Draws(NamedTuple):
    """Random numbers of a round. Each policy uses some of them."""

    order: Sequence[int] = ()  # the K drawn clients
    models: Sequence[int] = ()  # a model for each of them
    lots: Sequence[float] = ()  # one for each client
    uniform: Sequence[float] = ()  # one for each drawn client


class Bandit:
    """Discounted losses of all clients and models, and the policies that use them."""

    def __init__(
        self,
        num_clients: int,
        num_models: int,
        cohort_size: int,
        policy: str,
        *,
        weights: Sequence[float] | None = None,
        gamma: float = 0.9,
        clock: str = "round",
    ) -> None:
        self.N, self.M, self.K = num_clients, num_models, cohort_size
        self.policy, self.gamma, self.clock = policy, gamma, clock
        self.weights = [1.0 / num_models] * num_models if weights is None else weights
        self.L = [[0.0] * num_models for _ in range(num_clients)]
        self.Ncount = [[0.0] * num_models for _ in range(num_clients)]
        self.last = [[0] * num_models for _ in range(num_clients)]
        self.T = 0.0

    def bound(self, c: int, m: int) -> float:
        """A, the upper confidence bound of the loss of client c on model m."""
        if self.Ncount[c][m] == 0.0:
            return math.inf
        mean = self.L[c][m] / self.Ncount[c][m]
        return mean + math.sqrt(2.0 * math.log(self.T) / self.Ncount[c][m])

    def choose(self, t: int, draws: Draws) -> list[Choice]:
        """The clients of round t, in the order of the choices, with their models."""
        if t <= self.M:
            return [(c, t - 1) for c in range(self.N)]
        if self.policy == "random":
            return list(zip(draws.order, draws.models, strict=True))
        if self.policy == "weighted-sum":
            return self._weighted_sum()
        if self.policy == "pareto":
            return self._pareto(draws.lots)
        return self._rank_list(t)

    def _weighted_sum(self) -> list[Choice]:
        def total(c: int) -> float:
            return sum(self.weights[m] * self.bound(c, m) for m in range(self.M))

        best = sorted(range(self.N), key=total, reverse=True)[: self.K]
        return [(c, max(range(self.M), key=lambda m, c=c: self.bound(c, m))) for c in best]

    def _pareto(self, lots: Sequence[float]) -> list[Choice]:
        front = []
        for c in range(self.N):
            own = [self.bound(c, m) for m in range(self.M)]
            dominated = False
            for other in range(self.N):
                theirs = [self.bound(other, m) for m in range(self.M)]
                no_worse = all(x >= y for x, y in zip(theirs, own, strict=True))
                dominated |= no_worse and theirs != own
            if not dominated:
                front.append(c)
        drawn = sorted(front, key=lambda c: lots[c])[: self.K]
        return [(c, min(range(self.M), key=lambda m, c=c: self.last[c][m])) for c in drawn]

    def _rank_list(self, t: int) -> list[Choice]:
        lists = [
            sorted(range(self.N), key=lambda c, m=m: self.bound(c, m), reverse=True)
            for m in range(self.M)
        ]
        turn = (t - 1) % self.M if self.M > 2 else 0
        taken: list[Choice] = []
        while len(taken) < self.K:
            gone = {c for c, _ in taken}
            taken.append((next(c for c in lists[turn] if c not in gone), turn))
            turn = (turn + 1) % self.M
        return taken

    def observe(self, t: int, losses: Iterable[tuple[Choice, float]]) -> None:
        """Records the mean training losses of the participants of round t."""
        told = dict(losses)
        for c in range(self.N):
            for m in range(self.M):
                l_cm = told.get((c, m), 0.0)
                self.L[c][m] = l_cm + self.gamma * self.L[c][m]
                self.Ncount[c][m] = (1.0 if l_cm > 0 else 0.0) + self.gamma * self.Ncount[c][m]
                if (c, m) in told:
                    self.last[c][m] = t
            if self.clock == "client":
                self.T = 1.0 + self.gamma * self.T
        if self.clock == "round":
            self.T = 1.0 + self.gamma * self.T


def fair_models(lack: Sequence[float], alpha: float, uniform: Sequence[float]) -> list[int]:
    """A model for each uniform number, with probabilities proportional to f^(alpha - 1)."""
    weights = [f ** (alpha - 1.0) for f in lack]
    models = []
    for u in uniform:
        below, m = weights[0] / sum(weights), 0
        while u >= below:
            m += 1
            below += weights[m] / sum(weights)
        models.append(m)
    return models


class Run(NamedTuple):
    """Models, choices and losses of a run."""

    params: Array  # [T + 1, M, d]
    choices: list[list[Choice]]  # of each round
    losses: list[list[float]]  # in the order of the choices


def _one_round(
    models: Array, choices: list[Choice], train: TrainFn, t: int, weights: Sequence[float]
) -> tuple[Array, list[float]]:
    """Trains every choice and moves the models by weighted means of the updates."""
    trained = [train(m, c, models[m], t) for c, m in choices]
    new = models.copy()
    for m in range(len(models)):
        mine = [(c, w) for (c, its), (w, _) in zip(choices, trained, strict=True) if its == m]
        if mine:
            total = sum(weights[c] for c, _ in mine)
            new[m] = models[m] + sum(weights[c] * (w - models[m]) for c, w in mine) / total
    return new, [loss for _, loss in trained]


def simulate_bandit(
    bandit: Bandit, train: TrainFn, start: Array, draws: Sequence[Draws], weights: Sequence[float]
) -> Run:
    """Multi-FedAvg, with one round for each of the draws."""
    params, choices, losses = [np.array(start, np.float64)], [], []
    for t, drawn in enumerate(draws, start=1):
        choices.append(bandit.choose(t, drawn))
        new, told = _one_round(params[-1], choices[-1], train, t, weights)
        bandit.observe(t, zip(choices[-1], told, strict=True))
        params.append(new)
        losses.append(told)
    return Run(np.stack(params), choices, losses)


def simulate_fedfair(
    lack: Callable[[int, Array], float],
    alpha: float,
    train: TrainFn,
    start: Array,
    draws: Sequence[Draws],
    weights: Sequence[float],
) -> Run:
    """FedFairMMFL, where `lack` is f of a model at its current parameters."""
    params, choices, losses = [np.array(start, np.float64)], [], []
    for t, drawn in enumerate(draws, start=1):
        f = [lack(m, params[-1][m]) for m in range(len(start))]
        models = fair_models(f, alpha, drawn.uniform)
        choices.append(list(zip(drawn.order, models, strict=True)))
        new, told = _one_round(params[-1], choices[-1], train, t, weights)
        params.append(new)
        losses.append(told)
    return Run(np.stack(params), choices, losses)
