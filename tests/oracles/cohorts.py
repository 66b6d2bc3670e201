"""NumPy float64 oracle of Pawlik's two algorithms, in plain loops as printed.

It also has the exact expectation of the second one on quadratics. Nothing here is shared with the
library under test. `i` (client) is an array index, from 0. `t` (iteration) and `s` (round) are
from 1, as printed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

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
    """Parallel restarted SGD: x_i^t [N, d] from t = 0 and G_i^t [N, d] from t = 1.

    Args:
      gradient: G_i^t, from (i, x_i^(t-1), t).
      x0: the common start.
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
    """The last x_bar^(s) of SGD by cohorts, with full gradients and unweighted means.

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


class Quadratics(NamedTuple):
    """Problems with ``f_i(x) = (x - b_i)^T H_i (x - b_i) / 2``, N clients each.

    Attributes:
      H: ``[problems, N, d, d]``, positive semidefinite.
      b: ``[problems, N, d]``.
      start: ``[problems, d]``.
    """

    H: np.ndarray
    b: np.ndarray
    start: np.ndarray

    @property
    def smoothness(self):
        """The largest curvature among the clients of each problem."""
        return np.linalg.eigvalsh(self.H)[..., -1].max(-1)

    @property
    def gap(self):
        """``f(x_0) - f*``."""
        mean, linear = self.H.mean(1), np.einsum("pnij,pnj->pi", self.H, self.b) / self.b.shape[1]
        best = np.einsum("pij,pj->pi", np.linalg.pinv(mean), linear)
        away = self.start - best
        return np.einsum("pi,pij,pj->p", away, mean, away) / 2


def exact_training(problems, S, C, E, gamma):
    """The mean of ``E|grad f|^2`` over S rounds, and the G^2 and Z^2 of the proof.

    A local training is the affine map ``x -> P_i x + q_i``, so that the first two moments of the
    global model follow from those of the round before, without drawing a cohort.
    """
    H, b, start = problems
    N, d = b.shape[1:]
    step = np.eye(d) - gamma[:, None, None, None] * H
    shift = gamma[:, None, None] * np.einsum("pnij,pnj->pni", H, b)
    # In homogeneous coordinates (x, 1) an affine map is a matrix, and so are both moments.
    one = np.zeros((*b.shape[:2], d + 1, d + 1))
    one[..., :d, :d], one[..., :d, d], one[..., d, d] = step, shift, 1
    gradient = np.concatenate([H, -np.einsum("pnij,pnj->pni", H, b)[..., None]], -1)
    powers = [np.broadcast_to(np.eye(d + 1), one.shape)]
    for _ in range(E):
        powers.append(one @ powers[-1])
    sums = sum(gradient @ power for power in powers[:E])
    whole, along = gradient.mean(1), np.stack([gradient @ power for power in powers[:E]])
    deviation = (sums - sums.mean(1, keepdims=True)) / E
    x = np.concatenate([start, np.ones((len(start), 1))], 1)
    moment = x[:, :, None] * x[:, None, :]
    squares, G2, Z2 = [], np.zeros(len(b)), np.zeros(len(b))

    for _ in range(S):
        squares.append(np.einsum("pij,pjk,pik->p", whole, moment, whole))
        G2 = np.maximum(G2, np.einsum("tpnij,pjk,tpnik->tpn", along, moment, along).max((0, 2)))
        Z2 = np.maximum(Z2, np.einsum("pnij,pjk,pnik->pn", deviation, moment, deviation).mean(1))
        last = powers[E]
        each = np.einsum("pnij,pjk,pnlk->pil", last, moment, last)
        total = last.sum(1)
        every = np.einsum("pij,pjk,plk->pil", total, moment, total)
        pairs = (C - 1) / max(N - 1, 1)
        moment = (each * (1 - pairs) + every * pairs) / (C * N)
    return np.mean(squares, axis=0), G2, Z2
