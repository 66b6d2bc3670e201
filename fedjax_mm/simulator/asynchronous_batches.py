"""Finds the next arrivals that can be trained together, and the server steps they trigger.

Everything in this module is computed from job times and counts, not from training results.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from fedjax_mm.asynchrony.dispatch import (
    WINDOW,
    Clock,
    Dispatch,
    Draws,
    Jobs,
    jobs_of,
    lacking_model,
)


class Arrived(NamedTuple):
    """Jobs that are trained together, ``[arrivals]`` each, ordered by finish time.

    Attributes:
      number: see `Jobs`; -1 is padding.
      model: see `Jobs`.
      client: see `Jobs`.
      version: see `Jobs`.
      place: see `Jobs`.
      rank: the number of earlier arrivals of the same model in the batch.
      step: the model's server step in the batch that the job contributes to, counted from 0.
      slot: the slot of the job's update among the model's recent updates; `WINDOW` if not kept.
      staleness: the number of steps that the model made during the job.
      is_used: whether the job contributes to a step, because it is not too stale; None if all do.
    """

    number: Array
    model: Array
    client: Array
    version: Array
    place: Array
    rank: Array
    step: Array
    slot: Array
    staleness: Array
    is_used: Array | None = None


class Batch(NamedTuple):
    """The next arrivals that can be trained together, and the steps they trigger.

    Attributes:
      size: the number of arrivals.
      jobs: the arrivals.
      keys: the keys for training the jobs, separate because keys cannot be padded with -1.
      steps_before: each model's server steps before the batch.
      new_steps: each model's server steps in the batch.
      places: the storage places of the new steps' versions, ``[models, steps]``.
    """

    size: Int[Array, ""]
    jobs: Arrived
    keys: PRNGKeyArray
    steps_before: Int[Array, " models"]
    new_steps: Int[Array, " models"]
    places: Int[Array, "models steps"]


class Bounds(NamedTuple):
    """Static bounds of a batch.

    Attributes:
      arrivals: upper bound on the arrivals.
      per_model: upper bound on the arrivals of one model.
      steps: upper bound on the steps of one model.
    """

    arrivals: int
    per_model: int
    steps: int


def next_batch(
    dispatch: Dispatch,
    clock: Clock,
    draws: Draws,
    bounds: Bounds,
    first: Int[Array, ""],
    limit: Int[Array, ""],
) -> tuple[Clock, Batch]:
    """Advances the clock by the next arrivals that can be trained together.

    A batch consists of jobs already in progress, ordered by finish time. It stops before the first
    job that began after one of them ended, because the model version for such a job is not known
    yet.

    Args:
      dispatch: the dispatch rule.
      clock: the clock before the batch.
      draws: the random draws for the replacements, which are jobs that begin when others arrive.
      bounds: the bounds of a batch.
      first: the index in `draws` of the first arrival's replacement.
      limit: upper bound on the arrivals; 0 gives an empty batch.
    """
    ending = _next_to_end(dispatch, clock, bounds.arrivals)
    followers = _followers(dispatch, clock, draws, ending, first)
    buffer_size = clock.buffer_sizes(dispatch.ratio)
    missing = jnp.maximum(buffer_size - clock.filled, 1)

    def new_steps_after(arrivals: Int[Array, "*any models"]) -> Int[Array, "*any models"]:
        """Each model's steps after `arrivals`, one per full buffer of b_m updates."""
        later = (arrivals - missing) // buffer_size + 1
        return jnp.where(arrivals < missing, 0, later)

    used, filling, is_used = ending.is_model, ending.arrived, None
    if dispatch.drop_after is not None:
        used = _used(clock, ending, new_steps_after, dispatch.drop_after)
        filling, is_used = jnp.cumsum(used, 0, jnp.int32), jnp.any(used, axis=1)
    step = ending.of_own(new_steps_after(filling - used))
    size = _batch_size(ending, followers, step, bounds, limit)
    present = jnp.arange(bounds.arrivals, dtype=jnp.int32) < size
    arrived = jnp.sum(present[:, None] & ending.is_model, axis=0, dtype=jnp.int32)
    total = arrived
    if dispatch.drop_after is not None:
        total = jnp.sum(present[:, None] & used, axis=0, dtype=jnp.int32)
    new_steps = new_steps_after(total)
    places = _free_places(dispatch, clock, ending, present, new_steps, bounds)
    since_step = (total - missing) % buffer_size
    filled = jnp.where(total < missing, clock.filled + total, since_step)
    steps_so_far = new_steps_after(filling)
    after = Clock(
        time=jnp.max(jnp.where(present, ending.jobs.finish, clock.time)),
        jobs=_jobs_after(clock, ending, followers, steps_so_far, places, present),
        steps=clock.steps + new_steps,
        filled=filled.astype(jnp.int32),
        place=_current_place(clock, places, jnp.arange(dispatch.num_models), new_steps),
        targets=clock.targets,
        arrived=clock.arrived + arrived,
        lives=clock.lives,
    )
    arrivals = _arrivals(clock, after, ending, step, present)._replace(is_used=is_used)
    return after, Batch(size, arrivals, ending.jobs.key, clock.steps, new_steps, places)


def _used(
    clock: Clock,
    ending: "_Ending",
    new_steps_after: Callable[[Int[Array, " models"]], Int[Array, " models"]],
    drop_after: int,
) -> Bool[Array, "arrivals models"]:
    """Marks the model of each arrival that is not too stale.

    An update that is dropped fills no buffer, so that later ones may be less stale.
    """

    def arrive(filling: Array, one: tuple[Array, Array]) -> tuple[Array, Array]:
        is_model, version = one
        staleness = clock.steps + new_steps_after(filling) - version
        used = is_model & (staleness <= drop_after)
        return filling + used, used

    start = jnp.zeros_like(clock.filled)
    return lax.scan(arrive, start, (ending.is_model, ending.jobs.version))[1]


class _Ending(NamedTuple):
    """The next ``[arrivals]`` jobs in progress to end, ordered by finish time."""

    jobs: Jobs
    row: Array  # indices among the jobs in progress
    is_model: Array  # [arrivals, models]
    arrived: Array  # arrivals of each model so far, including this one, [arrivals, models]
    rank: Array  # number of earlier arrivals of the same model

    def of_own(self, x: Int[Array, "arrivals models"]) -> Int[Array, " arrivals"]:
        """Each arrival's entry for its own model."""
        return jnp.sum(jnp.where(self.is_model, x, 0), axis=1, dtype=jnp.int32)


def _batch_size(
    ending: _Ending,
    followers: Jobs,
    step: Int[Array, " arrivals"],
    bounds: Bounds,
    limit: Int[Array, ""],
) -> Int[Array, ""]:
    """The number of next jobs to end that are trained together."""
    # Earliest finish time among the replacements of arrivals 0, ..., i - 1.
    never = jnp.full(1, jnp.inf, followers.finish.dtype)
    earliest = jnp.concatenate([never, lax.cummin(followers.finish)[:-1]])
    i = jnp.arange(bounds.arrivals, dtype=jnp.int32)
    fits = (i < limit) & (ending.rank < bounds.per_model) & (step < bounds.steps)
    is_next = fits & (ending.jobs.finish <= earliest)
    return jnp.where(jnp.all(is_next), bounds.arrivals, jnp.argmin(is_next)).astype(jnp.int32)


def _arrivals(
    clock: Clock,
    after: Clock,
    ending: _Ending,
    step: Int[Array, " arrivals"],
    present: Bool[Array, " arrivals"],
) -> Arrived:
    """The arrivals of a batch."""
    jobs = ending.jobs
    number = clock.arrived[jobs.model] + ending.rank  # counts the model's updates since the start
    # Keep only the last updates, because a batch may have more than `WINDOW`.
    is_kept = present & (number >= after.arrived[jobs.model] - WINDOW)
    return Arrived(
        number=jnp.where(present, jobs.number, -1),
        model=jobs.model,
        client=jobs.client,
        version=jobs.version,
        place=jobs.place,
        rank=ending.rank,
        step=step,
        slot=jnp.where(is_kept, number % WINDOW, WINDOW),
        staleness=clock.steps[jobs.model] + step - jobs.version,
    )


def _next_to_end(dispatch: Dispatch, clock: Clock, number: int) -> _Ending:
    """The next jobs to end."""
    # Among jobs that end at the same time, the one that began first comes first, because jobs are
    # stored in starting order and `top_k` is stable.
    _, row = lax.top_k(-clock.jobs.finish, number)
    jobs = jax.tree.map(lambda x: x[row], clock.jobs)
    is_model = jobs_of(jobs, dispatch.num_models)
    count = jnp.cumsum(is_model, axis=0, dtype=jnp.int32)
    ending = _Ending(jobs, row, is_model, count, rank=jobs.model)
    return ending._replace(rank=ending.of_own(count) - 1)


def _followers(
    dispatch: Dispatch, clock: Clock, draws: Draws, ending: _Ending, first: Int[Array, ""]
) -> Jobs:
    """Each arrival's replacement, still with the old job's version."""
    i = jnp.arange(len(ending.rank), dtype=jnp.int32)
    model = _models_of_followers(clock, ending) if dispatch.moves_jobs else ending.jobs.model
    place_in_draws = jnp.minimum(first + i, len(draws.client) - 1)
    return ending.jobs._replace(
        finish=ending.jobs.finish + draws.delay[place_in_draws, model],
        start=ending.jobs.finish,
        number=clock.next_number(clock.num_arrived) + i,
        model=model,
        client=draws.client[place_in_draws],
        key=draws.key[place_in_draws],
    )


def _models_of_followers(clock: Clock, ending: _Ending) -> Int[Array, " arrivals"]:
    """The model of each arrival's replacement.

    If a model has too many jobs, the replacements of its first arrivals go to the first models that
    have too few.
    """
    is_model = jobs_of(clock.jobs, len(clock.targets))
    lacks = clock.targets - jnp.sum(is_model, axis=0, dtype=jnp.int32)
    gives = ending.rank < -ending.of_own(jnp.broadcast_to(lacks, ending.is_model.shape))
    given = jnp.cumsum(gives, dtype=jnp.int32) - 1
    return jnp.where(gives, lacking_model(lacks, given), ending.jobs.model)


def _free_places(
    dispatch: Dispatch,
    clock: Clock,
    ending: _Ending,
    present: Bool[Array, " arrivals"],
    new_steps: Int[Array, " models"],
    bounds: Bounds,
) -> Int[Array, "models steps"]:
    """A separate place for the version of each new step.

    A place is free if it holds neither the version of a job that stays in progress nor a current
    version. There are always enough, because free places are at least as numerous as arrivals, and
    each arrival triggers at most one step.
    """
    used = jnp.where(_stays(clock, ending, present), clock.jobs.place, dispatch.num_places)
    is_used = jnp.zeros(dispatch.num_places, bool).at[used].set(True, mode="drop")
    is_free = ~is_used.at[clock.place].set(True)
    (free,) = jnp.nonzero(is_free, size=bounds.arrivals, fill_value=0)
    number = (jnp.cumsum(new_steps) - new_steps)[:, None] + jnp.arange(bounds.steps)
    return free[jnp.minimum(number, bounds.arrivals - 1)].astype(jnp.int32)


def _current_place(
    clock: Clock, places: Array, model: Int[Array, "*any"], new_steps: Int[Array, "*any"]
) -> Int[Array, "*any"]:
    """The place of a model's version after `new_steps` steps of the batch."""
    return jnp.where(new_steps > 0, places[model, new_steps - 1], clock.place[model])


def _stays(
    clock: Clock, ending: _Ending, present: Bool[Array, " arrivals"]
) -> Bool[Array, " jobs"]:
    """Whether each job in progress stays in progress after the batch."""
    leaves = jnp.where(present, ending.row, len(clock.jobs.number))
    return jnp.ones_like(clock.jobs.number, bool).at[leaves].set(False, mode="drop")


def _jobs_after(
    clock: Clock,
    ending: _Ending,
    followers: Jobs,
    steps_so_far: Int[Array, "arrivals models"],
    places: Int[Array, "models steps"],
    present: Bool[Array, " arrivals"],
) -> Jobs:
    """The jobs in progress after the batch, with the versions that new jobs begin from.

    `steps_so_far` are each model's steps up to and including each arrival.
    """
    # Put remaining jobs before new ones, because jobs are kept in starting order.
    (old,) = jnp.nonzero(_stays(clock, ending, present), size=len(clock.jobs.number), fill_value=0)
    later = jnp.arange(len(old)) - len(old) + jnp.sum(present)
    after = jax.tree.map(lambda x, y: jnp.where(later < 0, x[old], y[later]), clock.jobs, followers)
    # A job that begins at the time of a step begins after it, so it sees all arrivals up to the
    # last one at that time.
    times, i = jnp.where(present, ending.jobs.finish, jnp.inf), jnp.arange(len(present))
    is_last = jnp.concatenate([times[:-1] < times[1:], jnp.ones(1, bool)])
    seen_by_new = lax.cummin(jnp.where(is_last, i + 1, len(i)), reverse=True)
    # Remaining jobs began no later than the first arrival.
    seen_by_old = jnp.where(after.start >= times[0], seen_by_new[0], 0)
    seen = jnp.minimum(jnp.where(later < 0, seen_by_old, seen_by_new[later]), jnp.sum(present))
    new_steps = steps_so_far[jnp.maximum(seen - 1, 0), after.model]
    is_fresh = seen > 0
    return after._replace(
        version=jnp.where(is_fresh, clock.steps[after.model] + new_steps, after.version),
        place=jnp.where(
            is_fresh, _current_place(clock, places, after.model, new_steps), after.place
        ),
    )
