"""NumPy float64 oracle of power-of-choice and Oort for several models, in plain loops.

Cho, Wang, Joshi (2022); Lai et al. (2021), without the pacer. The turns of the models are the
library's: in round t (from 1) number (t - 1) mod |A| (from 0) of the active models A begins. `lots`
are Gumbel draws: the clients with the largest ``log p + lot`` are a sample without replacement with
probabilities p.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def in_turn(
    t: int, M: int, K: int, active: list[bool], pick: Callable[[int, set[int], int], list[int]]
) -> list[list[int]]:
    """The clients of every model."""
    chosen: list[list[int]] = [[] for _ in range(M)]
    taken: set[int] = set()
    A = [m for m in range(M) if active[m]]
    for j in range(len(A)):
        m = A[(t - 1 + j) % len(A)]
        size = K // len(A) + (1 if j < K % len(A) else 0)
        chosen[m] = pick(m, taken, size)
        taken |= set(chosen[m])
    return chosen


def power_of_choice(
    t: int, n: Array, losses: Array, lots: Array, K: int, d: int, active: list[bool]
) -> list[list[int]]:
    """The clients of round t, given n [M, N] and losses [M, N]."""
    M, N = losses.shape

    def pick(m: int, taken: set[int], size: int) -> list[int]:
        free = [k for k in range(N) if k not in taken]
        free.sort(key=lambda k: -(np.log(n[m, k]) + lots[m, k]))
        candidates = free[:d]
        candidates.sort(key=lambda k: -losses[m, k])
        return candidates[:size]

    return in_turn(t, M, K, active, pick)


def score(utility: Array, last: list[int], t: int, k: int, uncertainty: float) -> float:
    """The score of client k without durations, given those of all clients of a model."""
    seen = sorted(utility[i] for i in range(len(last)) if last[i] > 0)
    top, bottom = seen[min(int(0.9 * len(seen)), len(seen) - 1)], seen[0]
    spread = top - bottom if top > bottom else 1.0
    bonus = np.sqrt(uncertainty * np.log(t) / last[k])
    return float((min(utility[k], top) - bottom) / spread + bonus)


def oort(
    t: int,
    n: Array,
    utility: Array,
    last: NDArray[np.int64],
    lots: Array,
    K: int,
    *,
    share: float,
    uncertainty: float,
    durations: Array | None = None,
    T: float = 1.0,
) -> list[list[int]]:
    """The clients of round t, given the state [M, N], with lots [2, M, N] of new and known ones."""
    M, N = utility.shape

    def pick(m: int, taken: set[int], size: int) -> list[int]:
        new = [k for k in range(N) if k not in taken and last[m, k] == 0]
        known = [k for k in range(N) if k not in taken and last[m, k] > 0]
        value = {}
        for k in known:
            value[k] = score(utility[m], list(last[m]), t, k, uncertainty)
            if durations is not None and durations[k] > T:
                value[k] *= (T / durations[k]) ** 2
        num_new = min(int(np.round(share * size)), len(new))
        num_known = min(size - num_new, len(known))
        ranked = sorted(known, key=lambda k: -value[k])
        pool = []
        if num_known:
            cut = value[ranked[num_known - 1]]
            pool = [k for i, k in enumerate(ranked) if value[k] >= 0.05 * cut or i < 10 * num_known]
        pool.sort(key=lambda k: -(np.log(max(value[k], 1e-12)) + lots[1, m, k]))
        new.sort(key=lambda k: -(np.log(n[m, k]) + lots[0, m, k]))
        return pool[:num_known] + new[: size - num_known]

    return in_turn(t, M, K, [True] * M, pick)
