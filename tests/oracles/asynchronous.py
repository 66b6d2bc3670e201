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


class Round(NamedTuple):
    """The state after a round, as recorded."""

    time: float
    active: list[bool]
    finished_at: list[float]
    arrived_at: list[float]
    targets: list[int]
    steps: list[int]
    models: list[Array]
    arrived: list[int]  # the updates of each model in this round
    working: dict[int, int]  # the model of each running job, by number


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


def share_out(
    total: int, ratio: int, variances: Sequence[float], active: Sequence[int]
) -> list[int]:
    """R_m. Each model gets `ratio`, and the largest deficit gets the next `ratio` of the rest."""
    whole = sum(variances[m] for m in active)
    wanted = {m: math.floor(total * variances[m] / whole) - ratio for m in active}
    shares = [ratio if m in active else 0 for m in range(len(variances))]
    left = total - sum(shares)
    while left > 0:
        m = max(active, key=lambda m: (wanted[m], -m))
        number = min(ratio, left)
        shares[m] += number
        wanted[m] -= ratio
        left -= number
    return shares


def give_up(
    targets: list[int], gone: int, active: Sequence[int], order: Sequence[int]
) -> list[int]:
    """R_m after a model has left its jobs to the active ones, in the random `order` of models."""
    whole, given = sum(targets[m] for m in active), targets[gone]
    after = [*targets]
    for m in active:
        after[m] += given * targets[m] // whole
    after[gone] = 0
    lucky = iter([m for m in order if m in active])
    while active and sum(after) < sum(targets):
        after[next(lucky)] += 1
    return after


def make_room(targets: list[int], new: int, active: Sequence[int], total: int) -> list[int]:
    """R_m after active models have left some of their jobs to a new one."""
    if not active:
        return [total if m == new else 0 for m in range(len(targets))]
    wanted = total // (len(active) + 1)
    after = [R - wanted * R // total for R in targets]
    while sum(after) > total - wanted:
        after[after.index(max(after))] -= 1
    after[new] = wanted
    return after


def fedast(
    train: Callable[[int, int, Array, int, int], Array],
    start: Sequence[Array],
    at_work: Sequence[int],
    ratio: int,
    client_of: Callable[[int], int],
    delay_of: Callable[[int, int], float],
    num_rounds: int,
    server_rate: float = 1.0,
    reallocate: bool = False,
    window: int = 8,
    per_round: int = 1,
    arrivals: Sequence[int] | None = None,
    meets: Callable[[int, Array], bool] = lambda m, w: False,
    every: int = 1,
    order_of: Callable[[int, int], Sequence[int]] = lambda t, m: [],
    weight: Callable[[int], float] = lambda s: 1.0,
    drop_after: float = math.inf,
    sends: str = "update",
) -> tuple[list[Arrival], list[Round]]:
    """Every arrival of an update, and every round from 0, in order.

    Args:
        train: maps `(m, k, w, number, t)` to the update Delta of client k, which trains model m
            from w in job `number`. The model's next step at the job's start is t, from 1.
        start: the models at time 0.
        at_work: R_m at time 0, if all models are active.
        ratio: b_m = ceil(R_m / ratio).
        client_of: the client of each job number.
        delay_of: maps `(number, m)` to the job's delay.
        num_rounds: the number of rounds.
        server_rate: eta_g.
        reallocate: whether R_m changes every 0.75 R |A| arrivals, A being the active models.
        window: the number of updates of each model that reallocation uses.
        per_round: the number of arrivals in a round, unless no model is active.
        arrivals: the number of rounds after which each model arrives; None means 0.
        meets: whether a model w_m has met its target.
        every: the number of rounds between two evaluations.
        order_of: all models in a random order, given the round and the model that leaves.
        weight: multiplies a buffered update of staleness s (FedBuff, Algorithm 1, line 11; alpha_t
            of FedAsync), and not the size K of the buffer.
        drop_after: an update of larger staleness does not enter the buffer.
        sends: "update" Delta, or the client's "model", from which the current one is subtracted at
            the step: x_t = x_{t-1} + mean alpha_t (x_new - x_{t-1}) (FedAsync).
    """
    M, R = len(start), sum(at_work)
    w = [np.array(each, np.float64) for each in start]
    steps, targets = [0] * M, list(at_work)
    arrived_at, finished_at = [math.nan] * M, [math.nan] * M
    buffers: list[list[tuple[float, Array]]] = [[] for _ in range(M)]
    recent: list[list[Array]] = [[] for _ in range(M)]
    working: dict[int, Job] = {}
    queue: list[tuple[float, int]] = []
    done: list[Arrival] = []
    now, born = 0.0, 0

    def active() -> list[int]:
        return [m for m in range(M) if finished_at[m] != finished_at[m] and m in here]

    def lacks(m: int) -> int:
        return targets[m] - sum(each.model == m for each in working.values())

    def begin(m: int) -> None:
        nonlocal born
        working[born] = Job(now, m, client_of(born), steps[m], w[m])
        heapq.heappush(queue, (now + delay_of(born, m), born))
        born += 1

    def fill() -> None:
        while active() and len(working) < R:
            begin(next(m for m in active() if lacks(m) > 0))

    here = {m for m in range(M) if arrivals is None or arrivals[m] == 0}
    for m in here:
        arrived_at[m] = 0
    for m in range(M):
        if m not in here:
            targets = give_up(targets, m, active(), order_of(0, m))
    fill()
    rounds = [_round(0.0, active(), finished_at, arrived_at, targets, steps, w, [], working)]
    for t in range(num_rounds):
        new = [m for m in range(M) if m not in here and arrivals is not None and arrivals[m] <= t]
        for m in new:
            arrived_at[m] = t
        old = active()
        met = [m for m in sorted({*old, *new}) if t % every == 0 and meets(m, w[m])]
        for m in met:
            finished_at[m] = t
        for m in met:
            if m in old:
                targets = give_up(targets, m, active(), order_of(t, m))
                working = {number: job for number, job in working.items() if job.model != m}
                buffers[m] = []
        for m in new:
            if m not in met:
                targets = make_room(targets, m, active(), R)
            here.add(m)
        fill()
        came = []
        for _ in range(per_round if active() else 0):
            time, number = heapq.heappop(queue)
            while number not in working:  # deleted
                time, number = heapq.heappop(queue)
            now, job = time, working.pop(number)
            m = job.model
            update = train(m, job.client, job.params, number, job.version + 1)
            staleness = steps[m] - job.version
            is_used = staleness <= drop_after
            if is_used:
                sent = update if sends == "update" else job.params + update
                buffers[m].append((weight(staleness), sent))
            recent[m] = [*recent[m], update][-window:]
            if is_used and len(buffers[m]) >= math.ceil(targets[m] / ratio):
                start_of = 0.0 if sends == "update" else w[m]
                total = sum(s * (sent - start_of) for s, sent in buffers[m])
                w[m] = w[m] + server_rate / len(buffers[m]) * total
                buffers[m] = []
                steps[m] += 1
                for other, each in working.items():  # jobs that started at this moment
                    if each.model == m and each.start == time:
                        working[other] = each._replace(version=steps[m], params=w[m])
            begin(m if lacks(m) > 0 else next(i for i in range(M) if lacks(i) > 0))
            period, A = 3 * R * len(active()) // 4, active()
            is_known = min(len(recent[i]) for i in A) == window
            if reallocate and (len(done) + 1) % period == 0 and is_known:
                variances = [relative_variance(recent[i]) if i in A else 0.0 for i in range(M)]
                targets = share_out(R, ratio, variances, A)
            came.append(m)
            state = list(steps), list(targets), list(w), list(recent)
            done.append(Arrival(now, number, m, job.client, staleness, *state))
        rounds.append(
            _round(now, active(), finished_at, arrived_at, targets, steps, w, came, working)
        )
    return done, rounds


def _round(
    time: float,
    active: Sequence[int],
    finished_at: Sequence[float],
    arrived_at: Sequence[float],
    targets: Sequence[int],
    steps: Sequence[int],
    models: Sequence[Array],
    came: Sequence[int],
    working: dict[int, Job],
) -> Round:
    return Round(
        time,
        [m in active for m in range(len(steps))],
        list(finished_at),
        list(arrived_at),
        list(targets),
        list(steps),
        list(models),
        [came.count(m) for m in range(len(steps))],
        {number: job.model for number, job in working.items()},
    )
