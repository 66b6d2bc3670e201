"""The next arrivals that can be trained together, and the steps that they make.

All of it is arithmetic on the numbers of jobs: nothing depends on what the jobs bring.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from fedjax_mm.asynchrony.dispatch import Clock, Dispatch, Draws, Jobs


class Lanes(NamedTuple):
    """Jobs that are trained together, ``[models, lanes]`` each, in the order of their arrivals.

    Attributes:
      number: see `Jobs`; -1 where a model has no more jobs.
      client: see `Jobs`.
      version: see `Jobs`.
      place: see `Jobs`.
      turn: updates of the model that arrived before.
      part: steps of the model's server among the arrivals before.
      staleness: steps that the model made during the job.
    """

    number: Array
    client: Array
    version: Array
    place: Array
    turn: Array
    part: Array
    staleness: Array


class Steps(NamedTuple):
    """Steps of servers, ``[arrivals]`` each, of which the first are meant.

    Attributes:
      model: whose.
      part: how many steps of the model came before it in this batch.
      number: of the model's step, from 1.
      place: where its version is stored.
    """

    model: Array
    part: Array
    number: Array
    place: Array


class Batch(NamedTuple):
    """The next arrivals, as many as can be trained together.

    Attributes:
      size: their number.
      lanes: what is trained.
      num_steps: how many steps they make.
      steps: the steps, in their order.
      made: steps of each model.
    """

    size: Int[Array, ""]
    lanes: Lanes
    num_steps: Int[Array, ""]
    steps: Steps
    made: Int[Array, " models"]


def next_batch(
    dispatch: Dispatch,
    clock: Clock,
    draws: Draws,
    widths: Int[np.ndarray, " models"],
    first: Int[Array, ""],
    limit: Int[Array, ""],
) -> tuple[Clock, Batch]:
    """Returns the next arrivals that can be trained together, and the clock after them.

    These are jobs that are at work already, in the order in which they end, until one would come
    home that began after one of them: its version is not known yet.

    Args:
      dispatch: the rule.
      clock: the clock before them.
      draws: those of the jobs that follow.
      widths: the most arrivals of each model; they are known while tracing.
      first: the place in `draws` of the job that follows the first arrival.
      limit: the most arrivals, positive.
    """
    M, most = dispatch.num_models, min(dispatch.num_jobs, int(widths.sum()))
    come, i = _in_order(dispatch, clock, most), jnp.arange(most, dtype=jnp.int32)
    new = _followers(dispatch, clock, draws, come, first)
    # How many of them: the others' results are not used.
    earliest = jnp.concatenate(
        [jnp.full(1, jnp.inf, new.finish.dtype), lax.cummin(new.finish)[:-1]]
    )
    fits = come.lane < jnp.asarray(widths)[come.jobs.model]
    is_next = (i < limit) & fits & (come.jobs.finish <= earliest)
    size = jnp.where(jnp.all(is_next), most, jnp.argmin(is_next)).astype(jnp.int32)
    present, end = i < size, size - 1
    made = _steps(dispatch, clock, come, present)
    after = _versions(clock, come, new, made, present)
    total, last = come.arrived[end], made.latest[end]
    later = (total - made.missing) % made.buffer_size
    filled = jnp.where(total < made.missing, clock.filled + total, later).astype(jnp.int32)
    own_steps = clock.steps[come.jobs.model]
    clock = Clock(
        jnp.where(present, come.jobs.finish, jnp.inf)[end],
        after,
        clock.steps + made.by_now[end],
        filled,
        jnp.where(last >= 0, made.last_place[last], clock.place),
        clock.targets,
        clock.arrived + total,
    )
    each = Lanes(
        come.jobs.number,
        come.jobs.client,
        come.jobs.version,
        come.jobs.place,
        clock.arrived[come.jobs.model] - total[come.jobs.model] + come.lane,
        made.part,
        own_steps + made.part - come.jobs.version,
    )
    to = jnp.where(present, come.jobs.model, M), come.lane
    empty = jnp.full((M, widths.max()), -1, jnp.int32)
    lanes = jax.tree.map(lambda x: empty.at[to].set(x, mode="drop"), each)
    return clock, Batch(size, lanes, made.num_steps, made.steps, made.by_now[end])


class _Arrivals(NamedTuple):
    """The next jobs to end, in that order, ``[arrivals]``, as many as a batch may have."""

    jobs: Jobs
    row: Array  # where they are among the jobs at work
    is_model: Array  # [arrivals, models]
    arrived: Array  # arrivals of each model, this one included, [arrivals, models]
    lane: Array  # its number among its model's, from 0

    def of_own(self, x: Int[Array, "arrivals models"]) -> Int[Array, " arrivals"]:
        """Returns the number of each arrival's own model."""
        return jnp.sum(jnp.where(self.is_model, x, 0), axis=1, dtype=jnp.int32)


class _Made(NamedTuple):
    """Steps that arrivals make."""

    buffer_size: Array  # b_m, [models]
    missing: Array  # arrivals until each model's next step, [models]
    by_now: Array  # steps of each model after this arrival, [arrivals, models]
    part: Array  # steps of its own model before it, [arrivals]
    latest: Array  # the arrival that made each model's latest step, or -1, [arrivals, models]
    last_place: Array  # where the step of this arrival stores its version, or -1, [arrivals]
    steps: Steps
    num_steps: Array


def _in_order(dispatch: Dispatch, clock: Clock, most: int) -> _Arrivals:
    # Of jobs that end at the same moment the one that began first comes first: they are stored in
    # the order of their beginnings, and `top_k` keeps the order of equal ones.
    _, row = lax.top_k(-clock.jobs.finish, most)
    jobs = jax.tree.map(lambda x: x[row], clock.jobs)
    is_model = jobs.model[:, None] == jnp.arange(dispatch.num_models, dtype=jnp.int32)
    count = jnp.cumsum(is_model, axis=0, dtype=jnp.int32)
    come = _Arrivals(jobs, row, is_model, count, jobs.model)
    return come._replace(lane=come.of_own(count) - 1)


def _followers(
    dispatch: Dispatch, clock: Clock, draws: Draws, come: _Arrivals, first: Int[Array, ""]
) -> Jobs:
    """Returns the job that follows each arrival, with the version of the one before it."""
    i = jnp.arange(len(come.lane), dtype=jnp.int32)
    # A model with too many jobs hands over its first ones, to the first models that lack some.
    models = jnp.arange(dispatch.num_models, dtype=jnp.int32)
    lacks = clock.targets - jnp.sum(clock.jobs.model[:, None] == models, axis=0, dtype=jnp.int32)
    gives = come.lane < -come.of_own(jnp.broadcast_to(lacks, come.is_model.shape))
    given = jnp.cumsum(gives, dtype=jnp.int32) - 1
    ends = jnp.cumsum(jnp.maximum(lacks, 0))
    taker = jnp.sum(given[:, None] >= ends, axis=1, dtype=jnp.int32)
    model = jnp.where(gives, taker, come.jobs.model)
    place_in_draws = jnp.minimum(first + i, len(draws.client) - 1)
    return come.jobs._replace(
        finish=come.jobs.finish + draws.delay[place_in_draws, model],
        start=come.jobs.finish,
        number=dispatch.num_jobs + jnp.sum(clock.arrived, dtype=jnp.int32) + i,
        model=model,
        client=draws.client[place_in_draws],
    )


def _steps(
    dispatch: Dispatch, clock: Clock, come: _Arrivals, present: Bool[Array, " arrivals"]
) -> _Made:
    """Returns the steps: the first once the buffer is full, then one for every b_m arrivals."""
    most, model = len(come.lane), come.jobs.model
    buffer_size = -(-clock.targets // dispatch.ratio)
    missing = jnp.maximum(buffer_size - clock.filled, 1)

    def made_by(arrivals: Int[Array, "*any models"]) -> Int[Array, "*any models"]:
        later = (arrivals - missing) // buffer_size + 1
        return jnp.where(arrivals < missing, 0, later)

    count, part = made_by(come.arrived), come.of_own(made_by(come.arrived - come.is_model))
    is_step = present & (come.of_own(count) > part)
    # Every step has a place of its own, where no job's version is that stays at work, nor a
    # current one: there are as many free places as arrivals.
    used = jnp.where(_stays(clock, come, present), clock.jobs.place, dispatch.num_places)
    is_used = jnp.zeros(dispatch.num_places, bool).at[used].set(True, mode="drop")
    (free,) = jnp.nonzero(~is_used.at[clock.place].set(True), size=most, fill_value=0)
    (at,) = jnp.nonzero(is_step, size=most, fill_value=0)
    number = clock.steps[model][at] + part[at] + 1
    steps = Steps(model[at], part[at], number, free.astype(jnp.int32))
    step_of = jnp.cumsum(is_step, dtype=jnp.int32) - 1  # the last step so far, of any model
    last_place = jnp.where(is_step, steps.place[step_of], -1)
    made_here = jnp.arange(most, dtype=jnp.int32)[:, None]
    latest = lax.cummax(jnp.where(is_step[:, None] & come.is_model, made_here, -1), axis=0)
    num_steps = jnp.sum(is_step, dtype=jnp.int32)
    return _Made(buffer_size, missing, count, part, latest, last_place, steps, num_steps)


def _stays(
    clock: Clock, come: _Arrivals, present: Bool[Array, " arrivals"]
) -> Bool[Array, " jobs"]:
    """Returns which of the jobs at work do not come home in a batch."""
    leaves = jnp.where(present, come.row, len(clock.jobs.number))
    return jnp.ones_like(clock.jobs.number, bool).at[leaves].set(False, mode="drop")


def _versions(
    clock: Clock, come: _Arrivals, new: Jobs, made: _Made, present: Bool[Array, " arrivals"]
) -> Jobs:
    """Returns the jobs at work after a batch, those that began in it with their versions."""
    # In the order of their beginnings: those that stay, then those that begin.
    (old,) = jnp.nonzero(_stays(clock, come, present), size=len(clock.jobs.number), fill_value=0)
    later = jnp.arange(len(old)) - len(old) + jnp.sum(present)
    after = jax.tree.map(lambda x, y: jnp.where(later < 0, x[old], y[later]), clock.jobs, new)
    # Jobs that begin at the moment of a step begin after it, whatever came first.
    times = jnp.where(present, come.jobs.finish, jnp.inf)
    seen_by_new = jnp.searchsorted(times, new.start, side="right", method="compare_all")
    # Those that stay began before, or at the very moment of the first arrival.
    seen_by_old = jnp.where(after.start >= times[0], seen_by_new[0], 0)
    seen = jnp.where(later < 0, seen_by_old, seen_by_new[later])
    upto, is_fresh = jnp.maximum(seen - 1, 0), seen > 0
    step_at = made.latest[upto, after.model]
    version = clock.steps[after.model] + made.by_now[upto, after.model]
    place = jnp.where(step_at >= 0, made.last_place[step_at], clock.place[after.model])
    return after._replace(
        version=jnp.where(is_fresh, version, after.version),
        place=jnp.where(is_fresh, place, after.place),
    )
