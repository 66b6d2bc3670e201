"""Plain loops of the schedulers of jobs, one client after another.

Venn's plan and its simulator, and the allocations of FedFairMMFL's authors, MultiFedAvg-MDH and
DMA-FL. Models and clients count from 0, rounds from 1.
"""

import heapq
import itertools
import math

import numpy as np


def venn_plan(supply, queues):
    """The class that each type is reserved for, and the supply of each class.

    Args:
      supply: the number of clients of each type; a type is a frozenset of classes.
      queues: the demands of each class.
    """
    classes = sorted(queues, key=lambda e: sum(n for s, n in supply.items() if e in s))
    owner, waiting = {}, {e: list(queues[e]) for e in classes}
    for e in classes:
        for s in supply:
            if e in s and s not in owner:
                owner[s] = e
    size = {e: max(1, sum(n for s, n in supply.items() if owner.get(s) == e)) for e in classes}
    for i in reversed(range(len(classes))):
        e = classes[i]
        if not waiting[e] or size[e] == 0:
            continue
        for h in reversed(classes[:i]):
            held = [s for s in supply if owner.get(s) == h]
            usable = [s for s in held if e in s]
            if waiting[h]:
                if usable != held:
                    continue
                of_e = sum(d / size[e] for d in waiting[e])
                of_h = sum(d / size[h] for d in waiting[h]) if size[h] else 0.0
                number, delay = len(waiting[e]), 0.0
                if of_e > of_h:
                    number = 0
                    for d in sorted(waiting[e]):
                        delay += d / size[e]
                        number += delay < of_h
                if size[h] and number / size[e] <= len(waiting[h]) / size[h]:
                    break
            left = sum(supply[s] for s in held) - sum(supply[s] for s in usable)
            for s in usable:
                owner[s] = e
            waiting[e] += waiting[h]
            size[e] += size[h] - left
            waiting[h], size[h] = [], left
    return owner, size


def check_in(order, eligible, demand, policy, key=None):
    """The model that each client of the queue serves, or None, one client after another.

    Args:
      order: the clients, in the order in which they check in.
      eligible: ``[models][clients]``.
      demand: the number of clients that each model requests, which may be 0.
      policy: "srsf", "venn", or another one with the key below.
      key: for each model, a number; the lowest is served first.
    """
    num_models, lacks, served = len(eligible), list(demand), []
    class_of = [tuple(row) for row in eligible]
    type_of = {
        k: frozenset(class_of[m] for m in range(num_models) if eligible[m][k]) for k in order
    }
    supply = {s: sum(t == s for t in type_of.values()) for s in set(type_of.values())}

    def plan():
        queues = {
            e: [lacks[m] for m in range(num_models) if class_of[m] == e and lacks[m]]
            for e in class_of
        }
        return venn_plan(supply, queues)[0]

    owner = plan()
    for k in order:
        open_to = [m for m in range(num_models) if eligible[m][k] and lacks[m] > 0]
        if policy == "venn":
            open_to = [m for m in open_to if owner.get(type_of[k]) == class_of[m]]
        rank = key if policy not in ("venn", "srsf") else lacks
        model = min(open_to, key=lambda m: (rank[m], m), default=None)
        served.append(model)
        if model is not None:
            lacks[model] -= 1
            if lacks[model] == 0:
                owner = plan()
    return served


def bayesian(histories, num_models, decay, beta, accuracy):
    """Each client's probabilities of the models, given the models of the past rounds."""
    rows = []
    for history in histories:
        s = [
            sum(decay ** (len(history) - 1 - i) * ((had == m) + 1) for i, had in enumerate(history))
            for m in range(num_models)
        ]
        f = [1 - x / sum(s) if history else 1.0 for x in s]
        p = [f[m] * (100 * (1 - accuracy[m])) ** (beta - 1) for m in range(num_models)]
        rows.append([x / sum(p) for x in p])
    return rows


def mdh_sizes(t, heterogeneous, cohort_size, first=50, at_once=1):
    """The number of clients of each model in round t, which counts from 0 here."""

    def near_equal(number, parts):
        return [number // parts + (i < number % parts) for i in range(parts)]

    models = range(len(heterogeneous))
    special = [m for m in models if heterogeneous[m]]
    if t < first or not special:
        return near_equal(cohort_size, len(heterogeneous))
    q = min(len(special), at_once)
    now = sorted({special[((t - first) * q + i) % len(special)] for i in range(q)})
    others = [m for m in models if m not in special]
    shared = round(len(special) * cohort_size / len(models)) if others else cohort_size
    sizes = [0] * len(models)
    for m, number in zip(now, near_equal(shared, len(now)), strict=True):
        sizes[m] = number
    if others:
        for m, number in zip(others, near_equal(cohort_size - shared, len(others)), strict=True):
            sizes[m] = number
    return sizes


class Drifting:
    """DMA-FL: how much each client's loss on each model grew between its last two trainings."""

    def __init__(self, threshold=0.05, weight=3.0):
        self.threshold, self.weight, self.last, self.grew = threshold, weight, {}, {}

    def weights(self, m, clients):
        drifts = (self.grew.get((m, k), 0.0) for k in clients)
        return [self.weight if drift >= self.threshold else 1.0 for drift in drifts]

    def observe(self, m, k, loss):
        old = self.last.get((m, k))
        self.grew[m, k] = 0.0 if old is None else max(0.0, (loss - old) / old)
        self.last[m, k] = loss


TYPES = {frozenset([0]): 0.4, frozenset([0, 1]): 0.25, frozenset([0, 2]): 0.2}
TYPES |= {frozenset([0, 1, 2, 3]): 0.15}
"""Shares of clients by what they have: nothing special, fast processors, much memory, or both."""


def completion_times(policy, seed, num_jobs=50, rounds=(3, 8), demand=(10, 100), gap=6.0):
    """The completion times of jobs without training, as a run of events in Venn's setting.

    Jobs arrive from 3600 s on, with exponential gaps of 1800 s. Each has an equally likely class,
    and asks for its demand again and again, whenever 80 % of its clients have answered. Clients
    check in with exponential gaps, and answer after a lognormal time with the mean 274 s. Numbers
    of rounds, demands and clients are ours, because the authors' trace of devices is not public.

    Args:
      policy: "fifo", "srsf" or "venn".
      seed: the seed of jobs and clients.
      num_jobs: the number of jobs.
      rounds: the bounds of a job's number of rounds.
      demand: the bounds of a job's demand.
      gap: the mean number of seconds between two clients.
    """
    rng, devices = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    jobs = range(num_jobs)
    arrivals = 3600 + np.cumsum([0, *rng.exponential(1800, num_jobs - 1)])
    class_of = rng.integers(0, 4, num_jobs)
    wanted = rng.integers(demand[0], demand[1] + 1, num_jobs).tolist()
    left = rng.integers(rounds[0], rounds[1] + 1, num_jobs).tolist()
    lacks, answers, round_of, finish = ([0] * num_jobs for _ in range(4))
    count, types, seen = itertools.count(), list(TYPES), []
    events = [(at, next(count), "request", job) for job, at in enumerate(arrivals)]
    heapq.heappush(events, (0.0, next(count), "client", None))

    def plan():
        supply = {s: max(1, seen.count(s)) for s in types}
        queues = {e: [lacks[j] for j in jobs if class_of[j] == e and lacks[j]] for e in range(4)}
        return venn_plan(supply, queues)[0] if policy == "venn" else {}

    owner = plan()
    while any(left):
        now, _, kind, about = heapq.heappop(events)
        if kind == "client":
            next_one = (now + devices.exponential(gap), next(count), "client", None)
            heapq.heappush(events, next_one)
            s = types[devices.choice(len(types), p=list(TYPES.values()))]
            answer = now + devices.lognormal(math.log(274) - 0.125, 0.5)
            seen = [*seen, s][-1000:]
            able = [j for j in jobs if lacks[j] and class_of[j] in s]
            if policy == "venn":
                able = [j for j in able if owner.get(s) == class_of[j]]
            if not able:
                continue
            rank = {"fifo": arrivals, "srsf": wanted, "venn": lacks}[policy]
            j = min(able, key=lambda j: (rank[j], j))
            lacks[j] -= 1
            heapq.heappush(events, (answer, next(count), "answer", (j, round_of[j])))
            if lacks[j]:
                continue
        elif kind == "request":
            lacks[about], answers[about] = wanted[about], 0
        else:
            j, number = about
            if number != round_of[j]:
                continue
            answers[j] += 1
            if answers[j] < math.ceil(0.8 * wanted[j]):
                continue
            left[j], lacks[j], round_of[j], finish[j] = left[j] - 1, 0, round_of[j] + 1, now
            if left[j]:
                heapq.heappush(events, (now, next(count), "request", j))
        owner = plan()
    return np.subtract(finish, arrivals)
