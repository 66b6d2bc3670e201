"""Jobs in simulated time: who works on what, who comes home next, and who gets how many.

A job is the local training of one model by one client, from the version of the model that it was
given. Everything here is numbers about jobs; their training is in `training.py`.

Axes:  ``models`` M · ``jobs`` all R that are at work · ``lanes`` of a model, jobs trained at once
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm import keys
from fedjax_mm.asynchrony.delays import Delay, check_delay, shifted_exponential
from fedjax_mm.checks import check_count, described

WINDOW = 8
"""Updates of a model whose relative variance counts."""

_LAST = np.iinfo(np.int32).max


class Dispatch(NamedTuple):
    """Rule by which jobs are handed out and updates are collected; build it with `fedast`.

    Attributes:
      num_clients: N, the number of clients to draw from.
      num_models: M.
      at_work: R_m, the jobs of each model in the beginning.
      ratio: R_m over the number of updates in the model's buffer.
      delay: draws how long a job takes.
      reallocate: whether R_m follows the relative variance of recent updates.
    """

    num_clients: int
    num_models: int
    at_work: tuple[int, ...]
    ratio: int
    delay: Delay
    reallocate: bool

    @property
    def num_jobs(self) -> int:
        """R, the jobs at work."""
        return sum(self.at_work)

    @property
    def period(self) -> int:
        """Arrivals between two reallocations, 0.75 R M."""
        return max(1, 3 * self.num_jobs * self.num_models // 4)

    @property
    def num_places(self) -> int:
        """The most versions of models that are needed at a time: jobs', and the current ones."""
        return self.num_jobs + self.num_models


def fedast(
    num_clients: int,
    num_models: int,
    *,
    at_work: int | Sequence[int],
    ratio: int,
    delay: Delay | None = None,
    reallocate: bool = True,
) -> Dispatch:
    """FedAST: R_m jobs of every model at work, and a step of the model for b_m of their updates.

    A finished job is followed by a new one, on a client drawn uniformly, from the current version
    of its model. Of b_m = ceil(R_m / ratio) updates that have arrived, the server makes one step.
    The new job is of the same model, unless that has R_m others; then it is of the model that
    lacks most. Every 0.75 R M arrivals (R jobs of all models) R_m is set in proportion to the
    relative variance ``mean |Delta - mean Delta|^2 / |mean Delta|^2`` of the model's last 8
    updates, in multiples of `ratio` and at least `ratio`, as long as all models have so many.

    Args:
      num_clients: N. A client may have several jobs at a time.
      num_models: M.
      at_work: R_m in the beginning; a number for all models, or one for each.
      ratio: R_m / b_m, about the number of steps that a model makes while a job is at work.
      delay: draws how long a job takes, such as `asynchrony.shifted_exponential`, the default.
      reallocate: whether R_m changes.

    Raises:
      TypeError: if `delay` is no function.
      ValueError: if a number is out of its range.

    Example:
      >>> from fedjax_mm.asynchrony import fedast
      >>> fedast(100, 3, at_work=20, ratio=4).period
      135

    Reference: Askin, Sharma, Joe-Wong, Joshi, "FedAST: Federated Asynchronous Simultaneous
    Training" (2024), Algorithms 1 and 2.
    """
    num_clients = check_count("num_clients", num_clients)
    num_models = check_count("num_models", num_models)
    each = list(at_work) if isinstance(at_work, Sequence | np.ndarray) else [at_work] * num_models
    each = [check_count("at_work", number) for number in each]
    if len(each) != num_models:
        raise ValueError(
            f"at_work has {len(each)} numbers; give one for all models, or one for each of "
            f"{num_models}"
        )
    ratio = check_count("ratio", ratio)
    if not isinstance(reallocate, bool):
        raise ValueError(f"reallocate is {described(reallocate)}; it must be True or False")
    if reallocate and sum(each) < ratio * num_models:
        raise ValueError(
            f"at_work is {sum(each)} in all, fewer than ratio = {ratio} for each of {num_models} "
            "models; give more jobs, a smaller ratio, or reallocate=False"
        )
    if delay is None:
        delay = shifted_exponential(num_clients)
    check_delay(delay)
    return Dispatch(num_clients, num_models, tuple(each), ratio, delay, reallocate)


class Jobs(NamedTuple):
    """Jobs that are at work, ``[jobs]`` each.

    Attributes:
      finish: when they end.
      start: when they began.
      number: from 0, in the order in which they began.
      model: what they train.
      client: who trains.
      version: the steps that the model had made.
      place: where that version is stored.
    """

    finish: Array
    start: Array
    number: Array
    model: Array
    client: Array
    version: Array
    place: Array


class Clock(NamedTuple):
    """All that decides what happens next.

    Attributes:
      time: of the last arrival.
      jobs: the jobs at work.
      steps: those that each model's server has made.
      filled: updates in each model's buffer.
      place: where each model's current version is stored.
      targets: R_m.
      arrived: updates of each model since the start.
    """

    time: Float[Array, ""]
    jobs: Jobs
    steps: Int[Array, " models"]
    filled: Int[Array, " models"]
    place: Int[Array, " models"]
    targets: Int[Array, " models"]
    arrived: Int[Array, " models"]


class Draws(NamedTuple):
    """Draws of jobs with consecutive numbers: clients, and the delays of each model there."""

    client: Int[Array, " jobs"]
    delay: Float[Array, "jobs models"]


class Lanes(NamedTuple):
    """Jobs that are trained together, ``[models, lanes]`` each; see `Jobs`.

    Lanes of which the model has no job have the number -1.
    """

    number: Array
    client: Array
    version: Array
    place: Array


class Arrivals(NamedTuple):
    """Jobs in the order in which they come home, ``[arrivals]`` each.

    Attributes:
      model: what they trained.
      lane: theirs among the model's.
      turn: updates of the model that arrived before.
      step: the number of the step of the model's server that they belong to, from 1.
      is_last: whether they are the last of it.
      place: where the model's version after them is stored.
      staleness: steps that the model made while they were at work.
    """

    model: Array
    lane: Array
    turn: Array
    step: Array
    is_last: Array
    place: Array
    staleness: Array


class Batch(NamedTuple):
    """The next arrivals, as many as can be trained together."""

    size: Int[Array, ""]
    lanes: Lanes
    arrivals: Arrivals


def draws_of(dispatch: Dispatch, rng_key: PRNGKeyArray, numbers: Int[Array, " jobs"]) -> Draws:
    """Returns the draws of jobs with these numbers; they depend on the seed and the number only."""

    def draw(number: Int[Array, ""]) -> Draws:
        key = keys.job_key(rng_key, number)
        client = jax.random.randint(keys.draw_key(key), (), 0, dispatch.num_clients, jnp.int32)
        models = jnp.arange(dispatch.num_models, dtype=jnp.int32)
        delays = jax.vmap(dispatch.delay, (None, 0, None))(keys.delay_key(key), models, client)
        return Draws(client, jnp.asarray(delays, float))

    return jax.vmap(draw)(numbers)


def first_jobs(dispatch: Dispatch, rng_key: PRNGKeyArray) -> Clock:
    """Returns the clock at time 0, when all jobs begin."""
    M = dispatch.num_models
    number = jnp.arange(dispatch.num_jobs, dtype=jnp.int32)
    model = jnp.asarray(np.repeat(np.arange(M), dispatch.at_work), jnp.int32)
    draws, zeros = draws_of(dispatch, rng_key, number), jnp.zeros(M, jnp.int32)
    finish = draws.delay[number, model]
    nothing = jnp.zeros_like(model)
    jobs = Jobs(finish, jnp.zeros_like(finish), number, model, draws.client, nothing, model)
    targets, places = jnp.asarray(dispatch.at_work, jnp.int32), jnp.arange(M, dtype=jnp.int32)
    return Clock(jnp.zeros((), float), jobs, zeros, zeros, places, targets, zeros)


def next_batch(
    dispatch: Dispatch,
    clock: Clock,
    draws: Draws,
    widths: Int[Array, " models"],
    width: int,
    first: Int[Array, ""],
    limit: Int[Array, ""],
) -> tuple[Clock, Batch]:
    """Returns the next arrivals that can be trained together, and the clock after them.

    Arrivals are taken in their order until one began from a version that is made by one of them.

    Args:
      dispatch: the rule.
      clock: the clock before them.
      draws: those of the jobs that follow.
      widths: the most arrivals of each model.
      width: the largest of them.
      first: the place in `draws` of the job that follows the first arrival.
      limit: the most arrivals, positive.
    """
    num_models, num_places = dispatch.num_models, dispatch.num_places
    made, most = clock.steps, min(num_models * width, len(draws.client))
    lanes = Lanes(*[jnp.full((num_models, width), -1, jnp.int32)] * 4)
    nothing = jnp.zeros(most, jnp.int32)
    arrivals = Arrivals(*[nothing] * 7)._replace(is_last=jnp.zeros(most, bool))
    batch = Batch(jnp.zeros((), jnp.int32), lanes, arrivals)
    new_number = dispatch.num_jobs + jnp.sum(clock.arrived, dtype=jnp.int32)

    def may_join(carry: tuple[Clock, Batch, Array, Array]) -> Bool[Array, ""]:
        clock, batch, used, row = carry
        model = clock.jobs.model[row]
        is_known = clock.jobs.version[row] <= made[model]
        return (batch.size < limit) & is_known & (used[model] < widths[model])

    def arrive(carry: tuple[Clock, Batch, Array, Array]) -> tuple[Clock, Batch, Array, Array]:
        clock, (count, lanes, arrivals), used, row = carry
        jobs, time = clock.jobs, clock.jobs.finish[row]
        of_row = jax.tree.map(lambda x: x[row], jobs)
        model, lane = of_row.model, used[of_row.model]
        # The step, if its update fills the buffer. Its version goes where no job's is, nor another
        # model's: of the places, as many as jobs and models, at least one is free.
        filled = clock.filled[model] + 1
        is_step = filled >= -(-clock.targets[model] // dispatch.ratio)
        others = jnp.arange(len(jobs.model)) != row
        used_by = jnp.where(others, jobs.place, num_places)
        is_used = jnp.zeros(num_places, bool).at[used_by].set(True, mode="drop")
        is_used = is_used.at[clock.place].set(True)
        place = jnp.where(is_step, jnp.argmin(is_used), clock.place[model]).astype(jnp.int32)
        steps = clock.steps.at[model].add(is_step)
        places = clock.place.at[model].set(place)
        # The job that follows.
        counts = jnp.zeros_like(clock.targets).at[jobs.model].add(others.astype(jnp.int32))
        lacks = clock.targets - counts
        follows = jnp.where(lacks[model] > 0, model, jnp.argmax(lacks)).astype(model.dtype)
        new = Jobs(
            finish=time + draws.delay[first + count, follows],
            start=time,
            number=(new_number + count).astype(jobs.number.dtype),
            model=follows,
            client=draws.client[first + count],
            version=steps[follows],
            place=places[follows],
        )
        after = jax.tree.map(lambda x, y: x.at[row].set(y), jobs, new)
        # Jobs that begin at the moment of a step begin after it, whatever came first.
        fresh = is_step & (after.model == model) & (after.start == time)
        after = after._replace(
            version=jnp.where(fresh, steps[model], after.version),
            place=jnp.where(fresh, place, after.place),
        )
        staleness = clock.steps[model] - of_row.version
        turn, step = clock.arrived[model], clock.steps[model] + 1
        entry = Arrivals(model, lane, turn, step, is_step, place, staleness)
        home = Lanes(of_row.number, of_row.client, of_row.version, of_row.place)
        lanes = jax.tree.map(lambda x, y: x.at[model, lane].set(y), lanes, home)
        arrivals = jax.tree.map(lambda x, y: x.at[count].set(y), arrivals, entry)
        clock = Clock(
            time,
            after,
            steps,
            clock.filled.at[model].set(jnp.where(is_step, 0, filled)),
            places,
            clock.targets,
            clock.arrived.at[model].add(1),
        )
        batch = Batch(count + 1, lanes, arrivals)
        return clock, batch, used.at[model].add(1), _first_home(after)

    carry = clock, batch, jnp.zeros(num_models, jnp.int32), _first_home(clock.jobs)
    clock, batch, _, _ = lax.while_loop(may_join, arrive, carry)
    return clock, batch


def _first_home(jobs: Jobs) -> Int[Array, ""]:
    """Returns the row of the job that ends first; of several, the one that began first."""
    is_first = jobs.finish == jnp.min(jobs.finish)
    return jnp.argmin(jnp.where(is_first, jobs.number, _LAST))


def share_out(
    dispatch: Dispatch, targets: Int[Array, " models"], variances: Float[Array, " models"]
) -> Int[Array, " models"]:
    """Returns new R_m, in proportion to relative variances; the old ones if they have none."""
    ratio, M = dispatch.ratio, dispatch.num_models
    left = dispatch.num_jobs - M * ratio
    total = jnp.sum(variances)
    wanted = jnp.floor(dispatch.num_jobs * variances / total) - ratio

    def give(i: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        given, wanted = carry
        model = jnp.argmax(wanted)
        number = jnp.minimum(ratio, left - i * ratio)
        return given.at[model].add(number), wanted.at[model].add(-ratio)

    start = jnp.full(M, ratio, jnp.int32), wanted
    shared, _ = lax.fori_loop(0, -(-left // ratio), give, start)
    return jnp.where(jnp.isfinite(total) & (total > 0), shared, targets)
