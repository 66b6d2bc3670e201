"""NumPy float64 oracle of sampling with unequal probabilities and of stale updates, in plain loops.

Zhang et al., "Towards Optimal Heterogeneous Client Sampling in Multi-Model Federated Learning";
Gu et al. (MIFA); Jhunjhunwala et al. (FedVARP). Nothing here is shared with the library under test.

Counting as in `maxfl`, and `m` (model), `v` (processor) and `j` (processor in ascending order) are
array indices, from 0. N clients, M models, V processors, B_k processors of client k.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.oracles.maxfl import Problem, Rate, Rounds, sgd

Array = NDArray[np.float64]


def probabilities(U: Sequence[Sequence[float]], expected: float) -> list[list[float]]:
    """p[v][m] from U[v][m] and m0, the expected number of trainings."""
    V = len(U)
    M_of = [sum(row) for row in U]
    ascending = sorted(range(V), key=lambda v: M_of[v])
    q = 0
    for size in range(1, V + 1):
        left = expected - V + size
        smallest = sum(M_of[v] for v in ascending[:size])
        last = M_of[ascending[size - 1]]
        if left > 0 and (last == 0 or left <= smallest / last):
            q = size
    smallest = sum(M_of[v] for v in ascending[:q])
    p = [[0.0 for _ in row] for row in U]
    for j, v in enumerate(ascending):
        for m in range(len(U[v])):
            if j < q:
                p[v][m] = (expected - V + q) * U[v][m] / smallest if smallest > 0 else 0.0
            else:
                p[v][m] = U[v][m] / M_of[v]
    return p


def draw(p: Sequence[float], lot: float) -> int | None:
    """The model that a processor trains, whose interval of [0, 1) has the lot, or None."""
    end = 0.0
    for m, probability in enumerate(p):
        end += probability
        if lot < end:
            return m
    return None


class Run(NamedTuple):
    """A run of M models.

    Attributes:
      w: [T + 1][M][d], before round 1 and after every round.
      h: [M][N][d], the last updates of all pairs, or zeros for methods without them.
      counts: [T][M][N], how many processors of a client trained a model.
      decline: [M], the estimate of StaleVRE after the last round, else 0.
    """

    w: list[list[Array]]
    h: list[list[Array]]
    counts: list[list[list[int]]]
    decline: list[float]


def run(
    problems: Sequence[Problem],
    start: Sequence[Array],
    lots: Sequence[Sequence[float]],
    rate: Rate,
    num_steps: int,
    *,
    method: str,
    by: str,
    expected: float,
    processors: Sequence[int],
) -> Run:
    """LVR or GVR with the server "fedavg", "mifa", or beta "one", "exact" or "estimated"."""
    M, N = len(problems), len(processors)
    n = [problem.num_examples for problem in problems]
    d = [[n[m][k] / sum(n[m]) for k in range(N)] for m in range(M)]
    w = [np.array(x, float) for x in start]
    h = [[np.zeros_like(w[m]) for _ in range(N)] for m in range(M)]
    sent = [[0 for _ in range(N)] for _ in range(M)]  # the round of h, or 0
    declines: list[dict[int, float]] = [{} for _ in range(M)]
    history, all_counts = [list(w)], []
    for t, lot in enumerate(lots, start=1):
        G = [
            [sgd(problems[m], k, w[m], t, rate(t), num_steps) - w[m] for k in range(N)]
            for m in range(M)
        ]
        beta = [[0.0 for _ in range(N)] for _ in range(M)]
        measured: list[dict[int, float]] = [{} for _ in range(M)]
        for m in range(M):
            mean = sum(declines[m].values()) / len(declines[m]) if declines[m] else 0.0
            for k in range(N):
                if h[m][k].any():
                    measured[m][k] = float(G[m][k] @ h[m][k] / (h[m][k] @ h[m][k]))
                if method == "one":
                    beta[m][k] = 1.0
                if method == "exact":
                    beta[m][k] = measured[m].get(k, 0.0)
                if method == "estimated":
                    beta[m][k] = min(1.0, max(0.0, 1.0 - mean * (t - sent[m][k])))
        U, owner = [], []
        for k in range(N):
            for _ in range(processors[k]):
                sizes = []
                for m in range(M):
                    fresh = G[m][k] - beta[m][k] * h[m][k]
                    g = problems[m].loss(k, w[m]) if by == "loss" else np.linalg.norm(fresh)
                    sizes.append(float(d[m][k] * g / processors[k]))
                U.append(sizes)
                owner.append(k)
        p = probabilities(U, expected)
        counts = [[0 for _ in range(N)] for _ in range(M)]
        step = [np.zeros_like(w[m]) for m in range(M)]
        for v, k in enumerate(owner):
            m = draw(p[v], lot[v])
            if m is not None:
                counts[m][k] += 1
                fresh = G[m][k] - beta[m][k] * h[m][k]
                step[m] = step[m] + d[m][k] / (processors[k] * p[v][m]) * fresh
        for m in range(M):
            for k in range(N):
                step[m] = step[m] + d[m][k] * beta[m][k] * h[m][k]
                if counts[m][k]:
                    if method == "estimated" and k in measured[m]:
                        declines[m][k] = (1.0 - measured[m][k]) / (t - sent[m][k])
                    if method != "fedavg":
                        h[m][k], sent[m][k] = G[m][k], t
            if method == "mifa":
                step[m] = np.asarray(sum(d[m][k] * h[m][k] for k in range(N)))
            w[m] = w[m] + step[m]
        history.append(list(w))
        all_counts.append(counts)
    believed = [sum(x.values()) / len(x) if x else 0.0 for x in declines]
    return Run(history, h, all_counts, believed)


def mifa(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    weighted: bool = True,
) -> tuple[Array, Array]:
    """MIFA of one model: w and h [N, d] after the last round."""
    n = problem.weights(range(len(problem.num_examples)), weighted)
    h = np.zeros((len(n), len(w)))
    for t, clients in enumerate(rounds, start=1):
        for k in clients:
            h[k] = sgd(problem, k, w, t, rate(t), num_steps) - w
        for_all = [n[k] / sum(n) * h[k] for k in range(len(n))]
        w = problem.server(w, np.asarray(sum(for_all)))
    return w, h


def stalevr(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    beta: str,
    weighted: bool = True,
) -> tuple[Array, Array]:
    """StaleVRE ("estimated") or FedVARP ("one") of one model with p = 1: w and h [N, d]."""
    N = len(problem.num_examples)
    n = problem.weights(range(N), weighted)
    h, sent, declines = np.zeros((N, len(w))), np.zeros(N), np.full(N, np.nan)
    for t, clients in enumerate(rounds, start=1):
        known = [x for x in declines if not np.isnan(x)]
        decline = sum(known) / len(known) if known else 0.0
        factor = [min(1.0, max(0.0, 1.0 - decline * (t - sent[k]))) for k in range(N)]
        if beta == "one":
            factor = [1.0] * N
        step = np.zeros_like(w)
        for k in range(N):
            step = step + n[k] / sum(n) * factor[k] * h[k]
        for k in clients:
            G = sgd(problem, k, w, t, rate(t), num_steps) - w
            step = step + n[k] / sum(n) * (G - factor[k] * h[k])
            if h[k].any():
                declines[k] = (1.0 - G @ h[k] / (h[k] @ h[k])) / (t - sent[k])
            h[k], sent[k] = G, t
        w = problem.server(w, step)
    return w, h
