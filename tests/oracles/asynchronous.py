"""NumPy float64 oracle of asynchronous training: FedAST as an event loop, one arrival at a time.

Askin, Sharma, Joe-Wong, Joshi, "FedAST: Federated Asynchronous Simultaneous Training" (2024).
Nothing here is shared with the library under test. Models, clients and jobs count from 0.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Arrival(NamedTuple):
    """An arrived job and the state after it."""

    time: float
    number: int
    model: int
    client: int
    staleness: int
    steps: list[int]  # of every model
    targets: list[int]  # R_m
    models: list[Array]
    recent: list[list[Array]]  # the last updates


class Job(NamedTuple):
    """A running job."""

    start: float
    model: int
    client: int
    version: int
    params: Array


def relative_variance(updates: Sequence[Array]) -> float:
    """The mean squared distance from the mean, over the mean's squared length."""
    mean = sum(updates) / len(updates)
    return sum(float((u - mean) @ (u - mean)) for u in updates) / len(updates) / float(mean @ mean)


def share_out(total: int, ratio: int, variances: Sequence[float]) -> list[int]:
    """R_m. Each model gets `ratio`, and the largest deficit gets the next `ratio` of the rest."""
    wanted = [math.floor(total * v / sum(variances)) - ratio for v in variances]
    shares = [ratio] * len(variances)
    left = total - sum(shares)
    while left > 0:
        m = wanted.index(max(wanted))
        number = min(ratio, left)
        shares[m] += number
        wanted[m] -= ratio
        left -= number
    return shares


def fedast(
    train: Callable[[int, int, Array, int, int], Array],
    start: Sequence[Array],
    at_work: Sequence[int],
    ratio: int,
    client_of: Callable[[int], int],
    delay_of: Callable[[int, int], float],
    num_arrivals: int,
    server_rate: float = 1.0,
    reallocate: bool = False,
    window: int = 8,
) -> list[Arrival]:
    """Every arrival, in order.

    Args:
        train: maps `(m, k, w, number, t)` to the update Delta of client k, which trains model m
            from w in job `number`. The model's next step at the job's start is t, from 1.
        start: the models at time 0.
        at_work: R_m at time 0.
        ratio: b_m = ceil(R_m / ratio).
        client_of: the client of each job number.
        delay_of: maps `(number, m)` to the job's delay.
        num_arrivals: the number of arrivals.
        server_rate: eta_g.
        reallocate: whether R_m changes every 0.75 R M arrivals.
        window: the number of updates of each model that reallocation uses.
    """
    M, R = len(start), sum(at_work)
    w = [np.array(each, np.float64) for each in start]
    steps, targets = [0] * M, list(at_work)
    buffers: list[list[Array]] = [[] for _ in range(M)]
    recent: list[list[Array]] = [[] for _ in range(M)]
    working: dict[int, Job] = {}
    queue: list[tuple[float, int]] = []
    done: list[Arrival] = []

    def begin(number: int, m: int, time: float) -> None:
        working[number] = Job(time, m, client_of(number), steps[m], w[m])
        heapq.heappush(queue, (time + delay_of(number, m), number))

    for m in range(M):
        for _ in range(at_work[m]):
            begin(len(working), m, 0.0)
    for arrived in range(1, num_arrivals + 1):
        time, number = heapq.heappop(queue)
        job = working.pop(number)
        m = job.model
        update = train(m, job.client, job.params, number, job.version + 1)
        staleness = steps[m] - job.version
        buffers[m].append(update)
        recent[m] = [*recent[m], update][-window:]
        if len(buffers[m]) >= math.ceil(targets[m] / ratio):
            w[m] = w[m] + server_rate / len(buffers[m]) * sum(buffers[m])
            buffers[m] = []
            steps[m] += 1
            for other, each in working.items():  # jobs that started at this moment
                if each.model == m and each.start == time:
                    working[other] = each._replace(version=steps[m], params=w[m])
        lacks = [targets[i] - sum(each.model == i for each in working.values()) for i in range(M)]
        takers = [i for i in range(M) if lacks[i] > 0]
        begin(R + arrived - 1, m if m in takers else takers[0], time)
        period = 3 * R * M // 4
        if reallocate and arrived % period == 0 and min(map(len, recent)) == window:
            targets = share_out(R, ratio, [relative_variance(each) for each in recent])
        done.append(
            Arrival(
                time,
                number,
                m,
                job.client,
                staleness,
                list(steps),
                list(targets),
                list(w),
                list(recent),
            )
        )
    return done
