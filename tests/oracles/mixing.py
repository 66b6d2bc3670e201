"""NumPy float64 oracles of models that mix, in plain loops.

Decentralised SGD (Lian et al. 2017; adapt, then combine: Sayed 2014), push-sum (Assran et al.
2019), DIGing (Nedic, Olshevsky, Shi 2017), client, edge and cloud (Liu et al. 2020), the splits
of clusters (Sattler, Mueller, Samek 2021), soft clusters, and models that merge. Nothing here is
shared with the library under test.

Counting: `i` and `j` (model, and the client of a peer) are array indices, from 0. n peers.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.oracles.clusters import Problem

Array = NDArray[np.float64]
Link = tuple[int, int]  # (from, to)


class Round(NamedTuple):
    """The available peers of a round, and its links that carry a message."""

    present: Collection[int]
    links: Collection[Link]


def trained(problem: Problem, i: int, x: Array, rate: float, num_steps: int) -> Array:
    for _ in range(num_steps):
        x = x - rate * problem.gradient(i, x)
    return x


def metropolis(edges: Collection[Link]) -> dict[Link, float]:
    """Weights 1 / (1 + max(deg_i, deg_j)), in both directions."""
    found: dict[Link, float] = {}
    for i, j in edges:
        degrees = [sum(k in edge for edge in edges) for k in (i, j)]
        found[i, j] = found[j, i] = 1 / (1 + max(degrees))
    return found


def combined(
    x: Sequence[Array], weights: dict[Link, float], links: Collection[Link]
) -> list[Array]:
    """Sum over the links that are up, and the rest of 1 of the model itself."""
    made = []
    for i in range(len(x)):
        own, total = 1.0, np.zeros_like(x[i])
        for (sender, receiver), weight in weights.items():
            if receiver == i and (sender, receiver) in links:
                own -= weight
                total = total + weight * x[sender]
        made.append(own * x[i] + total)
    return made


def gossip(
    problem: Problem,
    start: Sequence[Array],
    rounds: Sequence[Round],
    weights: dict[Link, float],
    rate: float,
    num_steps: int,
    *,
    before: bool = False,
) -> list[Array]:
    """X <- W (X + D), or W X + D, where D are the changes by local training."""
    x = [np.array(each, float) for each in start]
    for present, links in rounds:
        new = [
            trained(problem, i, x[i], rate, num_steps) if i in present else x[i]
            for i in range(len(x))
        ]
        if before:
            old = combined(x, weights, links)
            x = [old[i] + (new[i] - x[i]) for i in range(len(x))]
        else:
            x = combined(new, weights, links)
    return x


def pairs(
    problem: Problem, start: Sequence[Array], rounds: Sequence[Round], rate: float, num_steps: int
) -> list[Array]:
    """Two models that meet both become their mean."""
    x = [np.array(each, float) for each in start]
    for present, links in rounds:
        x = [
            trained(problem, i, x[i], rate, num_steps) if i in present else x[i]
            for i in range(len(x))
        ]
        for i, j in links:
            if i < j:
                x[i] = x[j] = (x[i] + x[j]) / 2
    return x


def push_sum(
    problem: Problem,
    start: Sequence[Array],
    rounds: Sequence[Round],
    edges: Collection[Link],
    rate: float,
    num_steps: int,
) -> tuple[list[Array], list[float]]:
    """z = x / y, where every sender gives equal shares to itself and along its edges.

    A sender keeps the weight of its lost messages.
    """
    n = len(start)
    x, y = [np.array(each, float) for each in start], [1.0] * n
    for present, links in rounds:
        z = [x[i] / y[i] for i in range(n)]
        x = [
            x[i] + (trained(problem, i, z[i], rate, num_steps) - z[i]) if i in present else x[i]
            for i in range(n)
        ]
        new_x, new_y = [0 * each for each in x], [0.0] * n
        for i in range(n):
            ends = [receiver for sender, receiver in edges if sender == i]
            share = 1 / (1 + len(ends))
            left = 1.0
            for j in ends:
                if (i, j) in links:
                    new_x[j], new_y[j] = new_x[j] + share * x[i], new_y[j] + share * y[i]
                    left -= share
            new_x[i], new_y[i] = new_x[i] + left * x[i], new_y[i] + left * y[i]
        x, y = new_x, new_y
    return [x[i] / y[i] for i in range(n)], y


def tracking(
    problem: Problem,
    start: Sequence[Array],
    rounds: Sequence[Round],
    weights: dict[Link, float],
    rate: float,
) -> list[Array]:
    """DIGing: w <- W w - eta g, g <- W g + grad(new w) - grad(w) for available peers."""
    n = len(start)
    w = [np.array(each, float) for each in start]
    tracked, last = [0 * each for each in w], [0 * each for each in w]
    for present, links in rounds:
        step = [0 * each for each in w]
        for i in present:
            gradient = problem.gradient(i, w[i])
            tracked[i] = tracked[i] + gradient - last[i]
            last[i], step[i] = gradient, rate * tracked[i]
        mixed = combined(w, weights, links)
        w = [mixed[i] - step[i] for i in range(n)]
        tracked = combined(tracked, weights, links)
    return w


def hierarchy(
    problem: Problem,
    start: Sequence[Array],
    rounds: Sequence[tuple[Sequence[Sequence[int]], Collection[int]]],
    edge_of: Sequence[int],
    every: int,
    rate: float,
    num_steps: int,
    *,
    by: str,
) -> list[Array]:
    """Edges average their participants by examples, and the cloud averages edges every few rounds.

    A round has the participants of each edge, and the edges that reach the cloud.
    """
    x = [np.array(each, float) for each in start]
    sizes = [len(y) for y in problem.y]
    for t, (participants, reached) in enumerate(rounds, start=1):
        for m, clients in enumerate(participants):
            if clients:
                total = sum(sizes[k] for k in clients)
                x[m] = np.asarray(
                    sum(
                        sizes[k] / total * trained(problem, k, x[m], rate, num_steps)
                        for k in clients
                    )
                )
        if t % every == 0 and reached:
            weight = {}
            for m in reached:
                mine = [k for k in range(len(edge_of)) if edge_of[k] == m]
                weight[m] = {"examples": sum(sizes[k] for k in mine), "clients": len(mine)}.get(
                    by, 1
                )
            mean = sum(weight[m] * x[m] for m in reached) / sum(weight.values())
            x = [np.asarray(mean) if m in reached else x[m] for m in range(len(x))]
    return x


def halves(gram: Array) -> tuple[list[int], float]:
    """The group of the first update, and the largest cosine across groups, from inner products.

    Single linkage: the most similar groups are joined until two are left.
    """
    norms, groups = np.sqrt(np.diag(gram)), [[i] for i in range(len(gram))]

    def across(one: list[int], other: list[int]) -> float:
        return max(float(gram[i, j] / (norms[i] * norms[j])) for i in one for j in other)

    while len(groups) > 2:
        choices = [(a, b) for a in range(len(groups)) for b in range(a)]
        a, b = max(choices, key=lambda pair: across(groups[pair[0]], groups[pair[1]]))
        groups[b] = groups[b] + groups[a]
        del groups[a]
    first = next(group for group in groups if 0 in group)
    return sorted(first), across(*groups)


def cfl(
    problem: Problem,
    start: Array,
    cohorts: Sequence[Sequence[int]],
    most: int,
    eps: tuple[float, float],
    rate: float,
    num_steps: int,
) -> tuple[list[Array], list[int], list[int]]:
    """Models, the cluster of each client, and the rounds of the splits.

    Inner products are of the last round in which both clients trained, since the cluster's split.
    """
    n = len(problem.y)
    x = [np.array(start, float) for _ in range(most)]
    clusters: list[list[int]] = [list(range(n))]
    products: dict[tuple[int, int], float] = {}
    fresh: set[tuple[int, int]] = set()
    splits = []
    for t, cohort in enumerate(cohorts, start=1):
        updates: dict[int, Array] = {}
        for m, members in enumerate(clusters):
            mine = [k for k in members if k in cohort]
            for k in mine:
                updates[k] = trained(problem, k, x[m], rate, num_steps) - x[m]
            if mine:
                x[m] = x[m] + sum(updates[k] for k in mine) / len(mine)
        for i in updates:
            for j in updates:
                products[i, j] = float(updates[i] @ updates[j])
                fresh.add((i, j))
        for m, members in enumerate(list(clusters)):
            both = [(i, j) for i in members for j in members]
            if len(members) < 2 or len(clusters) == most or not set(both) <= fresh:
                continue
            mean = np.sqrt(max(sum(products[pair] for pair in both), 0.0)) / len(members)
            largest = max(np.sqrt(products[k, k]) for k in members)
            if not (mean < eps[0] and largest > eps[1]):
                continue
            gram = np.array([[products[i, j] for j in members] for i in members])
            first, _ = halves(gram)
            x[len(clusters)] = x[m].copy()
            clusters[m] = [members[i] for i in first]
            clusters.append([members[i] for i in range(len(members)) if i not in first])
            fresh -= set(both)
            splits.append(t)
    label = [next(m for m, members in enumerate(clusters) if k in members) for k in range(n)]
    return x, label, splits


def soft_clusters(
    problem: Problem,
    start: Sequence[Array],
    cohorts: Sequence[Collection[int]],
    temperature: float,
    rate: float,
    num_steps: int,
) -> list[Array]:
    """Client i has the weight n_i softmax_j(-F_i(x_j) / temperature) in the mean of model j."""
    x = [np.array(each, float) for each in start]
    for cohort in cohorts:
        totals, weights = [0 * each for each in x], [0.0] * len(x)
        for i in cohort:
            losses = np.array([problem.loss(i, each) for each in x])
            likely = np.exp((losses.min() - losses) / temperature)
            for j in range(len(x)):
                weight = len(problem.y[i]) * likely[j] / likely.sum()
                totals[j] = totals[j] + weight * trained(problem, i, x[j], rate, num_steps)
                weights[j] += weight
        x = [total / weight for total, weight in zip(totals, weights, strict=True)]
    return x


def merging(
    problem: Problem,
    start: Sequence[Array],
    cohorts: Sequence[Collection[int]],
    distance: float,
    rate: float,
    num_steps: int,
) -> tuple[list[Array], list[int]]:
    """Models that clients choose by their losses, and the number of different ones in each round.

    After training, a model becomes the mean of those near it that had participants, itself perhaps
    among them.
    """
    x, numbers = [np.array(each, float) for each in start], []
    for cohort in cohorts:
        chosen = {i: int(np.argmin([problem.loss(i, each) for each in x])) for i in cohort}
        new, busy = list(x), sorted({*chosen.values()})
        for j in busy:
            mine = [i for i in cohort if chosen[i] == j]
            total = sum(len(problem.y[i]) for i in mine)
            new[j] = np.asarray(
                sum(
                    len(problem.y[i]) / total * trained(problem, i, x[j], rate, num_steps)
                    for i in mine
                )
            )
        x = []
        for each in new:
            near = [new[j] for j in busy if np.linalg.norm(each - new[j]) <= distance]
            x.append(np.mean(near, axis=0) if near else each)
        numbers.append(len({tuple(each.round(9)) for each in x}))
    return x, numbers
