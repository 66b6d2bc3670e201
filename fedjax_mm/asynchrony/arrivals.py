"""The next arrivals that can be trained together, and the steps that they make.

All of it is arithmetic on the numbers of jobs: nothing depends on what the jobs bring.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from fedjax_mm.asynchrony.dispatch import WINDOW, Clock, Dispatch, Draws, Jobs


class Arrivals(NamedTuple):
    """Jobs that are trained together, ``[arrivals]`` each, in the order in which they end.

    Attributes:
      number: see `Jobs`; -1 in place of those that are too many.
      model: see `Jobs`.
      client: see `Jobs`.
      version: see `Jobs`.
      place: see `Jobs`.
      lane: arrivals of the model before it.
      part: steps of the model's server before it.
      turn: where the update is kept among the model's recent ones; `WINDOW` if it is not.
      staleness: steps that the model made during the job.
    """

    number: Array
    model: Array
    client: Array
    version: Array
    place: Array
    lane: Array
    part: Array
    turn: Array
    staleness: Array


class Batch(NamedTuple):
    """The next arrivals, as many as can be trained together, and the steps that they make.

    Attributes:
      size: the number of arrivals.
      jobs: the arrivals.
      keys: of their training.
      steps: those that each model's server had made before.
      made: those that it makes.
      places: where the versions are stored that these steps make, ``[models, steps]``.
    """

    size: Int[Array, ""]
    jobs: Arrivals
    keys: PRNGKeyArray
    steps: Int[Array, " models"]
    made: Int[Array, " models"]
    places: Int[Array, "models steps"]


class Room(NamedTuple):
    """Bounds of a batch, which are known while tracing.

    Attributes:
      arrivals: the most arrivals.
      lanes: the most of each model.
      steps: the most steps of each model.
    """

    arrivals: int
    lanes: int
    steps: int


def next_batch(
    dispatch: Dispatch,
    clock: Clock,
    draws: Draws,
    room: Room,
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
      room: the bounds of a batch.
      first: the place in `draws` of the job that follows the first arrival.
      limit: the most arrivals; none if it is 0.
    """
    come = _in_order(dispatch, clock, room.arrivals)
    new = _followers(dispatch, clock, draws, come, first)
    buffer_size = -(-clock.targets // dispatch.ratio)
    missing = jnp.maximum(buffer_size - clock.filled, 1)

    def made_by(arrivals: Int[Array, "*any models"]) -> Int[Array, "*any models"]:
        """The first step once the buffer is full, then one for every b_m arrivals."""
        later = (arrivals - missing) // buffer_size + 1
        return jnp.where(arrivals < missing, 0, later)

    part = come.of_own(made_by(come.arrived - come.is_model))
    # How many of them: the others' results are not used.
    earliest = jnp.concatenate(
        [jnp.full(1, jnp.inf, new.finish.dtype), lax.cummin(new.finish)[:-1]]
    )
    i = jnp.arange(room.arrivals, dtype=jnp.int32)
    fits = (i < limit) & (come.lane < room.lanes) & (part < room.steps)
    is_next = fits & (come.jobs.finish <= earliest)
    size = jnp.where(jnp.all(is_next), room.arrivals, jnp.argmin(is_next)).astype(jnp.int32)
    present = i < size
    total = jnp.sum(present[:, None] & come.is_model, axis=0, dtype=jnp.int32)
    made = made_by(total)
    places = _free_places(dispatch, clock, come, present, made, room)
    later = (total - missing) % buffer_size
    after = Clock(
        jnp.max(jnp.where(present, come.jobs.finish, clock.time)),
        _jobs_after(clock, come, new, made_by(come.arrived), places, present),
        clock.steps + made,
        jnp.where(total < missing, clock.filled + total, later).astype(jnp.int32),
        _place_after(clock, places, jnp.arange(dispatch.num_models), made),
        clock.targets,
        clock.arrived + total,
    )
    arrivals = _arrivals(clock, after, come, part, present)
    return after, Batch(size, arrivals, come.jobs.key, clock.steps, made, places)


class _Next(NamedTuple):
    """The next jobs to end, in that order, ``[arrivals]``, as many as a batch may have."""

    jobs: Jobs
    row: Array  # where they are among the jobs at work
    is_model: Array  # [arrivals, models]
    arrived: Array  # arrivals of each model, this one included, [arrivals, models]
    lane: Array  # its number among its model's, from 0

    def of_own(self, x: Int[Array, "arrivals models"]) -> Int[Array, " arrivals"]:
        """Returns the number of each arrival's own model."""
        return jnp.sum(jnp.where(self.is_model, x, 0), axis=1, dtype=jnp.int32)


def _arrivals(
    clock: Clock,
    after: Clock,
    come: _Next,
    part: Int[Array, " arrivals"],
    present: Bool[Array, " arrivals"],
) -> Arrivals:
    """Returns what the training needs to know of the next jobs."""
    jobs = come.jobs
    turn = clock.arrived[jobs.model] + come.lane
    # Of more updates than are kept the last ones.
    is_kept = present & (turn >= after.arrived[jobs.model] - WINDOW)
    return Arrivals(
        jnp.where(present, jobs.number, -1),
        jobs.model,
        jobs.client,
        jobs.version,
        jobs.place,
        come.lane,
        part,
        jnp.where(is_kept, turn % WINDOW, WINDOW),
        clock.steps[jobs.model] + part - jobs.version,
    )


def _in_order(dispatch: Dispatch, clock: Clock, most: int) -> _Next:
    # Of jobs that end at the same moment the one that began first comes first: they are stored in
    # the order of their beginnings, and `top_k` keeps the order of equal ones.
    _, row = lax.top_k(-clock.jobs.finish, most)
    jobs = jax.tree.map(lambda x: x[row], clock.jobs)
    is_model = jobs.model[:, None] == jnp.arange(dispatch.num_models, dtype=jnp.int32)
    count = jnp.cumsum(is_model, axis=0, dtype=jnp.int32)
    come = _Next(jobs, row, is_model, count, jobs.model)
    return come._replace(lane=come.of_own(count) - 1)


def _followers(
    dispatch: Dispatch, clock: Clock, draws: Draws, come: _Next, first: Int[Array, ""]
) -> Jobs:
    """Returns the job that follows each arrival, with the version of the one before it."""
    i = jnp.arange(len(come.lane), dtype=jnp.int32)
    model = _heirs(clock, come) if dispatch.reallocate else come.jobs.model
    place_in_draws = jnp.minimum(first + i, len(draws.client) - 1)
    return come.jobs._replace(
        finish=come.jobs.finish + draws.delay[place_in_draws, model],
        start=come.jobs.finish,
        number=dispatch.num_jobs + jnp.sum(clock.arrived, dtype=jnp.int32) + i,
        model=model,
        client=draws.client[place_in_draws],
        key=draws.key[place_in_draws],
    )


def _heirs(clock: Clock, come: _Next) -> Int[Array, " arrivals"]:
    """Returns the model of the job that follows each arrival.

    A model with too many jobs hands over its first ones, to the first models that lack some.
    """
    models = jnp.arange(len(clock.targets), dtype=jnp.int32)
    lacks = clock.targets - jnp.sum(clock.jobs.model[:, None] == models, axis=0, dtype=jnp.int32)
    gives = come.lane < -come.of_own(jnp.broadcast_to(lacks, come.is_model.shape))
    given = jnp.cumsum(gives, dtype=jnp.int32) - 1
    ends = jnp.cumsum(jnp.maximum(lacks, 0))
    taker = jnp.sum(given[:, None] >= ends, axis=1, dtype=jnp.int32)
    return jnp.where(gives, taker, come.jobs.model)


def _free_places(
    dispatch: Dispatch,
    clock: Clock,
    come: _Next,
    present: Bool[Array, " arrivals"],
    made: Int[Array, " models"],
    room: Room,
) -> Int[Array, "models steps"]:
    """Returns where the versions of the steps are stored, each in a place of its own.

    These are places where neither a job's version is that stays at work, nor a current one: there
    are as many of them as arrivals, and no more steps.
    """
    used = jnp.where(_stays(clock, come, present), clock.jobs.place, dispatch.num_places)
    is_used = jnp.zeros(dispatch.num_places, bool).at[used].set(True, mode="drop")
    is_free = ~is_used.at[clock.place].set(True)
    (free,) = jnp.nonzero(is_free, size=room.arrivals, fill_value=0)
    number = (jnp.cumsum(made) - made)[:, None] + jnp.arange(room.steps)
    return free[jnp.minimum(number, room.arrivals - 1)].astype(jnp.int32)


def _place_after(
    clock: Clock, places: Array, model: Int[Array, "*any"], made: Int[Array, "*any"]
) -> Int[Array, "*any"]:
    """Returns where the version of a model is stored after so many steps."""
    return jnp.where(made > 0, places[model, made - 1], clock.place[model])


def _stays(clock: Clock, come: _Next, present: Bool[Array, " arrivals"]) -> Bool[Array, " jobs"]:
    """Returns which of the jobs at work do not come home in a batch."""
    leaves = jnp.where(present, come.row, len(clock.jobs.number))
    return jnp.ones_like(clock.jobs.number, bool).at[leaves].set(False, mode="drop")


def _jobs_after(
    clock: Clock,
    come: _Next,
    new: Jobs,
    made_by_now: Int[Array, "arrivals models"],
    places: Int[Array, "models steps"],
    present: Bool[Array, " arrivals"],
) -> Jobs:
    """Returns the jobs at work after a batch, those that began in it with their versions."""
    # In the order of their beginnings: those that stay, then those that begin.
    (old,) = jnp.nonzero(_stays(clock, come, present), size=len(clock.jobs.number), fill_value=0)
    later = jnp.arange(len(old)) - len(old) + jnp.sum(present)
    after = jax.tree.map(lambda x, y: jnp.where(later < 0, x[old], y[later]), clock.jobs, new)
    # Jobs that begin at the moment of a step begin after it, whatever came first.
    times, i = jnp.where(present, come.jobs.finish, jnp.inf), jnp.arange(len(present))
    is_last = jnp.concatenate([times[:-1] < times[1:], jnp.ones(1, bool)])
    seen_by_new = lax.cummin(jnp.where(is_last, i + 1, len(i)), reverse=True)
    # Those that stay began before, or at the very moment of the first arrival.
    seen_by_old = jnp.where(after.start >= times[0], seen_by_new[0], 0)
    seen = jnp.minimum(jnp.where(later < 0, seen_by_old, seen_by_new[later]), jnp.sum(present))
    made = made_by_now[jnp.maximum(seen - 1, 0), after.model]
    is_fresh = seen > 0
    return after._replace(
        version=jnp.where(is_fresh, clock.steps[after.model] + made, after.version),
        place=jnp.where(is_fresh, _place_after(clock, places, after.model, made), after.place),
    )
