"""NumPy float64 oracle of moments, by enumerating all cohorts that can be drawn.

One model of M. Rounds count from 1, clients from 0. Nothing here is shared with the library.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Cohorts = list[list[int]]  # the clients of each round


class Moments(NamedTuple):
    """E w, E w w' and E f(w) after each round, from round 0."""

    mean: Array
    second: Array
    value: Array


def fresh(N: int, M: int, T: int) -> Iterator[tuple[float, Cohorts]]:
    """MFA-Rand: in each round the group of one of M models of near-equal sizes."""
    sizes = [len(group) for group in np.array_split(range(N), M)]
    groups = [
        (1 / M / len(list(itertools.combinations(range(N), n))), list(group))
        for n in sizes
        for group in itertools.combinations(range(N), n)
    ]
    for each in itertools.product(groups, repeat=T):
        yield float(np.prod([p for p, _ in each])), [group for _, group in each]


def frames(N: int, M: int, T: int) -> Iterator[tuple[float, Cohorts]]:
    """MFA-RR: a model visits the groups of a random ordered partition, new in each frame.

    Partitions are those of all N! orders of the clients and all M! orders of the sizes.
    """
    sizes = [len(group) for group in np.array_split(range(N), M)]
    each = {}
    for lengths in itertools.permutations(sizes):
        ends = np.cumsum(lengths)[:-1]
        for order in itertools.permutations(range(N)):
            key = tuple(tuple(sorted(map(int, group))) for group in np.split(np.array(order), ends))
            each[key] = each.get(key, 0) + 1
    total = sum(each.values())
    for chosen in itertools.product(each, repeat=-(-T // M)):
        rounds = [list(group) for partition in chosen for group in partition]
        yield float(np.prod([each[p] / total for p in chosen])), rounds[:T]


def enumerate_moments(
    law: Iterator[tuple[float, Cohorts]],
    run: Callable[[Cohorts], Array],
    value: Callable[[Array], float],
    T: int,
) -> Moments:
    """Averages over a law of T rounds, where `run` maps cohorts to the final model."""
    likely: list[dict[tuple[tuple[int, ...], ...], float]] = [{} for _ in range(T + 1)]
    for p, rounds in law:
        for t in range(T + 1):
            key = tuple(map(tuple, rounds[:t]))
            likely[t][key] = likely[t].get(key, 0) + p
    found = []
    for table in likely:
        models = [(p, run([list(group) for group in key])) for key, p in table.items()]
        found.append(
            (
                sum(p * w for p, w in models),
                sum(p * np.outer(w, w) for p, w in models),
                sum(p * value(w) for p, w in models),
            )
        )
    return Moments(*(np.array(x) for x in zip(*found, strict=True)))
