"""Jobs in simulated time: the dispatch rule, the jobs' random draws, and the clock.

A job is one client's local training of one model, starting from the model's version when the job
begins. A job arrives when it ends. `simulator/asynchronous_batches.py` finds the next jobs to
arrive, and `simulator/asynchronous.py` trains them.

Axes:  ``models`` M · ``jobs`` all R in progress
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.asynchrony.delays import Delay, check_delay, shifted_exponential
from fedjax_mm.asynchrony.lifetimes import Lifetime, Lives, given_up, made_room, observed
from fedjax_mm.asynchrony.staleness import StaleWeight, check_stale_weight
from fedjax_mm.base import Look, chunks, keys
from fedjax_mm.base.calls import Part
from fedjax_mm.checks.annotations import CountOrZero, part
from fedjax_mm.checks.values import check_count, check_known, described

WINDOW = 8
"""The number of recent updates used to compute a model's relative variance."""


@dataclasses.dataclass(frozen=True, repr=False)
class Dispatch(Part):
    """A rule for dispatching jobs and buffering updates, as built by `fedast`.

    Attributes:
      num_clients: N, the number of clients to draw from.
      num_models: M.
      at_work: the initial R_m, the number of jobs of each model in progress.
      ratio: R_m divided by the number of updates in the model's buffer.
      delay: draws the duration of a job.
      reallocate: whether R_m adapts to the relative variance of recent updates.
      arrivals_per_round: the number of arrivals that count as one round.
      lifetimes: when models are active, as stated by `finishing` and `arriving`, from the inside
        out; () means always.
      weight: the factor of an update by its staleness; None means 1.
      drop_after: the largest staleness of an update that is used; None uses all.
      sends: whether clients send their updates, or their models.
    """

    num_clients: int
    num_models: int
    at_work: tuple[int, ...]
    ratio: int
    delay: Delay
    reallocate: bool
    arrivals_per_round: int
    lifetimes: tuple[Lifetime, ...] = ()
    weight: StaleWeight | None = None
    drop_after: int | None = None
    sends: Literal["update", "model"] = "update"

    @property
    def num_jobs(self) -> int:
        """R, the number of jobs in progress."""
        return sum(self.at_work)

    @property
    def moves_jobs(self) -> bool:
        """Whether a job's replacement may train another model."""
        return self.reallocate or bool(self.lifetimes)

    @property
    def num_places(self) -> int:
        """The maximum number of stored versions, one for each job and one for each model."""
        return self.num_jobs + self.num_models


@part
def fedast(
    num_clients: int,
    num_models: int,
    *,
    at_work: int | Sequence[int],
    ratio: int,
    delay: Delay | None = None,
    reallocate: bool = True,
    arrivals_per_round: int | None = None,
    weight: StaleWeight | None = None,
    drop_after: CountOrZero | None = None,
    sends: Literal["update", "model"] = "update",
) -> Dispatch:
    """FedAST: R_m jobs of each model are in progress, and every b_m updates trigger a server step.

    When a job ends, a new one begins on a client drawn uniformly, from the current version of its
    model. The server takes one step per b_m = ceil(R_m / ratio) updates that have arrived. The new
    job trains the same model, unless R_m other jobs already do, in which case it trains the first
    model with fewer than its R_m. Every 0.75 R M arrivals (R jobs in total), R_m is set in
    proportion to the relative variance ``mean |Delta - mean Delta|^2 / |mean Delta|^2`` of the
    model's last 8 updates, once all models have had 8. R_m is at least `ratio`, and a multiple of
    `ratio` except for the remainder of R.

    Args:
      num_clients: N. A client may run several jobs at a time.
      num_models: M.
      at_work: the initial R_m; one number, or one per model.
      ratio: R_m / b_m, roughly the number of steps that a model takes while a job is in progress.
      delay: draws the duration of a job; defaults to `asynchrony.shifted_exponential`. A job with
        an infinite or NaN delay never arrives while others do.
      reallocate: whether R_m changes.
      arrivals_per_round: the number of arrivals that count as one round; None means R. Training
        does not depend on it, but metrics are recorded between rounds.
      weight: multiplies an update, and not its weight in the mean, by a function of its staleness,
        such as `asynchrony.polynomial(0.5)`; None means 1.
      drop_after: updates that are more steps old are dropped. They do not fill the buffer, but
        count as arrivals, in `staleness` and for R_m.
      sends: "update" adds the mean of ``w_k - w`` for the w from which clients began; "model" adds
        the mean of ``w_k - w`` for the server's current w. The algorithm must then send weighted
        changes of the parameters, as `fedavg` does.

    In addition to the tasks' metrics, the trace has `time`, the simulated time, which all models
    share; `steps`, each model's server steps; `staleness`, the mean number of steps that a model
    took during the jobs that arrived since the last record, or NaN without arrivals; and `at_work`,
    R_m. When a job begins, schedules are evaluated at the model's next step. The algorithm must not
    keep client states. With unweighted FedAvg and a server rate eta_g, this is FedAST: ``w <- w +
    (eta_g / b_m) sum Delta``. FedBuff is the same with one model, ``reallocate=False`` and a
    `weight`. FedAsync has ``ratio=at_work``, so that each arrival is a step, ``sends="model"`` and
    a server rate alpha: ``w <- w + alpha weight(s) (w_k - w)``.

    Models can finish at a target, by `finishing`, and arrive later, by `arriving`. They do so
    between rounds, so that training depends on `arrivals_per_round`. R_m is 0 for models that are
    inactive, and M in the period 0.75 R M is the number of active models.

    Raises:
      TypeError: if `delay` is not a function.
      ValueError: if a number is out of its range, or the delays are for another number of clients
        or models.

    Example:
      >>> from fedjax_mm import fedavg, simulate
      >>> from fedjax_mm.asynchrony import fedast
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = fedavg(0.1, local_steps=5, weighted=False)
      >>> dispatch = fedast(24, 2, at_work=12, ratio=3, arrivals_per_round=100)
      >>> state, trace = simulate(0, quadratic(24, 4, mu=2e-4), algorithm, dispatch, num_rounds=4)
      >>> trace.metrics["steps"][-1].tolist()
      [52.0, 57.0]

    Reference: Askin, Sharma, Joe-Wong, Joshi, "FedAST: Federated Asynchronous Simultaneous
    Training" (2024), Algorithms 1 and 2; Nguyen et al., "Federated Learning with Buffered
    Asynchronous Aggregation" (2022); Xie, Koyejo, Gupta, "Asynchronous Federated Optimization"
    (2019).
    """
    num_clients = _known("num_clients", num_clients)
    num_models = _known("num_models", num_models)
    each = list(at_work) if isinstance(at_work, Sequence | np.ndarray) else [at_work] * num_models
    each = [_known("at_work", number) for number in each]
    if len(each) != num_models:
        raise ValueError(
            f"at_work has {len(each)} numbers; give one for all models, or one for each of "
            f"{num_models}"
        )
    ratio = _known("ratio", ratio)
    if not isinstance(reallocate, bool):
        raise ValueError(f"reallocate is {described(reallocate)}; it must be True or False")
    if reallocate and sum(each) < ratio * num_models:
        raise ValueError(
            f"at_work is {sum(each)} in all, fewer than ratio = {ratio} for each of {num_models} "
            "models; give more jobs, a smaller ratio, or reallocate=False"
        )
    if delay is None:
        delay = shifted_exponential(num_clients)
    check_delay(delay, num_clients, num_models)
    per_round = sum(each) if arrivals_per_round is None else arrivals_per_round
    per_round = _known("arrivals_per_round", per_round)
    if weight is not None:
        check_stale_weight(weight)
    return Dispatch(
        *(num_clients, num_models, tuple(each), ratio, delay, reallocate, per_round),
        weight=weight,
        drop_after=drop_after,
        sends=sends,
    )


def _known(name: str, value: Any) -> int:
    """Checks that a number is a static positive integer, and returns it."""
    check_known(name, value)
    return int(check_count(name, value))


class Jobs(NamedTuple):
    """Jobs in progress, ``[jobs]`` each.

    Attributes:
      finish: the arrival time.
      start: the start time.
      number: the job's number, counted from 0 in starting order.
      model: the model that the job trains.
      client: the client that trains.
      version: the number of steps that the model had taken at the start.
      place: the storage place of that version.
      key: the key of the local training.
    """

    finish: Array
    start: Array
    number: Array
    model: Array
    client: Array
    version: Array
    place: Array
    key: PRNGKeyArray


class Clock(NamedTuple):
    """Jobs in progress and per-model counts, which determine all later arrivals.

    Attributes:
      time: the time of the last arrival.
      jobs: the jobs in progress.
      steps: each model's server steps.
      filled: the number of updates in each model's buffer.
      place: the storage place of each model's current version.
      targets: R_m.
      arrived: the number of updates of each model since the start.
      lives: the active models; () if all always are.
    """

    time: Float[Array, ""]
    jobs: Jobs
    steps: Int[Array, " models"]
    filled: Int[Array, " models"]
    place: Int[Array, " models"]
    targets: Int[Array, " models"]
    arrived: Int[Array, " models"]
    lives: Lives | tuple[()] = ()

    @property
    def active(self) -> Bool[Array, " models"] | None:
        """A, the active models, or None if all always are."""
        return self.lives.active if isinstance(self.lives, Lives) else None

    @property
    def num_active(self) -> Int[Array, ""] | int:
        """The number of active models."""
        active = self.active
        return len(self.targets) if active is None else jnp.sum(active, dtype=jnp.int32)

    @property
    def num_arrived(self) -> Int[Array, ""]:
        """The number of updates since the start."""
        return jnp.sum(self.arrived, dtype=jnp.int32)

    def next_number(self, num_arrived: Int[Array, ""]) -> Int[Array, ""]:
        """Number of the next job to begin after `num_arrived` updates."""
        number = len(self.jobs.number) + num_arrived
        return number + self.lives.replaced if isinstance(self.lives, Lives) else number

    @property
    def period(self) -> Int[Array, ""] | int:
        """The number of arrivals between two reallocations, 0.75 R M for M active models."""
        period = 3 * len(self.jobs.number) * self.num_active // 4
        return max(1, period) if isinstance(period, int) else jnp.maximum(1, period)

    def buffer_sizes(self, ratio: int) -> Int[Array, " models"]:
        """Buffer sizes b_m, which are 1 for inactive models."""
        sizes = -(-self.targets // ratio)
        return sizes if self.active is None else jnp.maximum(1, sizes)


class Draws(NamedTuple):
    """Random draws of consecutive jobs: the client, its delay for each model, and the key."""

    client: Int[Array, " jobs"]
    delay: Float[Array, "jobs models"]
    key: PRNGKeyArray  # for the training


def draws_of(dispatch: Dispatch, rng_key: PRNGKeyArray, numbers: Int[Array, " jobs"]) -> Draws:
    """Draws random values for jobs, which depend only on the seed and the job's number."""

    def draw(number: Int[Array, ""]) -> Draws:
        key = keys.job_key(rng_key, number)
        client = jax.random.randint(keys.draw_key(key), (), 0, dispatch.num_clients, jnp.int32)
        models = jnp.arange(dispatch.num_models, dtype=jnp.int32)
        delays = jax.vmap(dispatch.delay, (None, 0, None))(keys.delay_key(key), models, client)
        delays = jnp.asarray(delays, float)
        # Treat a NaN delay as infinite, so that the job never ends, because NaN cannot be
        # ordered.
        delays = jnp.where(jnp.isnan(delays), jnp.inf, delays)
        return Draws(client, delays, keys.training_key(key))

    return jax.vmap(draw)(numbers)


def first_jobs(dispatch: Dispatch, rng_key: PRNGKeyArray) -> Clock:
    """The clock at time 0, when all jobs begin."""
    M, lives = dispatch.num_models, first_lives(dispatch)
    number = jnp.arange(dispatch.num_jobs, dtype=jnp.int32)
    model = jnp.asarray(np.repeat(np.arange(M), dispatch.at_work), jnp.int32)
    targets = jnp.asarray(dispatch.at_work, jnp.int32)
    if isinstance(lives, Lives):
        key = keys.assignment_key(keys.round_key(rng_key, 0))
        targets = given_up(targets, ~lives.active, lives.active, key)
        # If nobody is active, these jobs do not exist: `replace_jobs` deletes them.
        model = jnp.minimum(lacking_model(targets, number), M - 1)
    draws, zeros = draws_of(dispatch, rng_key, number), jnp.zeros(M, jnp.int32)
    finish = draws.delay[number, model]
    jobs = Jobs(
        finish=finish,
        start=jnp.zeros_like(finish),
        number=number,
        model=model,
        client=draws.client,
        version=jnp.zeros_like(model),
        place=model,
        key=draws.key,
    )
    return Clock(
        time=jnp.zeros((), float),
        jobs=jobs,
        steps=zeros,
        filled=zeros,
        place=jnp.arange(M, dtype=jnp.int32),
        targets=targets,
        arrived=zeros,
        lives=lives,
    )


def first_lives(dispatch: Dispatch) -> Lives | tuple[()]:
    """Marks the models that are active at time 0."""
    if not dispatch.lifetimes:
        return ()
    each = dispatch.lifetimes, dispatch.num_models
    events, active = observed(*each, lambda i, lifetime, active: lifetime.first())
    # The jobs of time 0 are numbered from 0, also if they begin later.
    replaced = jnp.where(jnp.any(active), 0, -dispatch.num_jobs)
    return Lives(events, active, replaced.astype(jnp.int32))


def lacking_model(lacks: Int[Array, " models"], number: Int[Array, " jobs"]) -> Int[Array, " jobs"]:
    """Models of consecutive new jobs, which go to the first models that lack jobs."""
    ends = jnp.cumsum(jnp.maximum(lacks, 0), dtype=jnp.int32)
    return jnp.sum(number[:, None] >= ends, axis=1, dtype=jnp.int32)


def jobs_of(jobs: Jobs, num_models: int) -> Bool[Array, "jobs models"]:
    """The model that each job trains."""
    return jobs.model[:, None] == jnp.arange(num_models, dtype=jnp.int32)


def between_rounds(
    dispatch: Dispatch, clock: Clock, rng_key: PRNGKeyArray, round: Int[Array, ""], look: Look
) -> Clock:
    """Updates the clock for models that have arrived and finished between two rounds.

    Args:
      dispatch: the dispatch rule.
      clock: the clock.
      rng_key: the key of the seed.
      round: the number of completed rounds.
      look: evaluates the models.
    """
    if not isinstance(clock.lives, Lives):
        return clock
    old, done = clock.lives, jnp.asarray(round, jnp.int32)

    def event_of(i: int, lifetime: Lifetime, active: Array) -> Array:
        return lifetime.event(done, old.events[i], look._replace(active=lambda: active))

    events, active = observed(dispatch.lifetimes, dispatch.num_models, event_of)
    stays = old.active & active

    def changed() -> Clock:
        key = keys.assignment_key(keys.round_key(rng_key, done))
        targets = given_up(clock.targets, old.active & ~active, stays, key)
        targets = made_room(targets, active & ~old.active, stays, dispatch.num_jobs)
        filled = jnp.where(stays, clock.filled, 0)
        now = clock._replace(targets=targets, filled=filled)
        return replace_jobs(dispatch, now, rng_key, stays, jnp.any(active))

    # Jobs are drawn only if a model arrives or finishes, in any replica.
    is_changed = chunks.is_any(active != old.active)
    after = lax.cond(is_changed, changed, lambda: clock)
    lives: Any = after.lives
    return after._replace(lives=lives._replace(events=events, active=active))


def replace_jobs(
    dispatch: Dispatch,
    clock: Clock,
    rng_key: PRNGKeyArray,
    stays: Bool[Array, " models"],
    begins: Bool[Array, ""],
) -> Clock:
    """Deletes the jobs of finished models, and begins one new job for each.

    The new jobs begin at the time of the last arrival, and go to the first models that have fewer
    than their R_m.

    Args:
      dispatch: the dispatch rule.
      clock: the clock, with the new R_m.
      rng_key: the key of the seed.
      stays: the models whose jobs stay.
      begins: whether jobs begin, because a model is active.
    """
    jobs, R = clock.jobs, len(clock.jobs.number)
    is_kept = stays[jobs.model]
    number_kept = jnp.sum(is_kept, dtype=jnp.int32)
    kept = jnp.sum(jobs_of(jobs, len(stays)) & is_kept[:, None], axis=0, dtype=jnp.int32)
    # Jobs are kept in starting order, and the new ones are the last to begin.
    old = jax.tree.map(lambda x: x[jnp.argsort(~is_kept, stable=True)], jobs)
    i = jnp.arange(R, dtype=jnp.int32) - number_kept
    model = jnp.minimum(lacking_model(clock.targets - kept, i), len(stays) - 1)
    number = clock.next_number(clock.num_arrived) + jnp.maximum(i, 0)
    draws = draws_of(dispatch, rng_key, number)
    new = Jobs(
        finish=clock.time + draws.delay[jnp.arange(R), model],
        start=jnp.full_like(jobs.start, clock.time),
        number=number,
        model=model,
        client=draws.client,
        version=clock.steps[model],
        place=clock.place[model],
        key=draws.key,
    )
    both = jax.tree.map(lambda x, y: jnp.where(i < 0, x, y), old, new)
    jobs = jax.tree.map(lambda x, y: jnp.where(begins, x, y), both, jobs)
    lives: Any = clock.lives
    replaced = lives.replaced + jnp.where(begins, R - number_kept, 0)
    return clock._replace(jobs=jobs, lives=lives._replace(replaced=replaced.astype(jnp.int32)))


def share_out(
    dispatch: Dispatch, clock: Clock, variances: Float[Array, " models"]
) -> Int[Array, " models"]:
    """Sets R_m in proportion to relative variances, or keeps R_m if these are undefined.

    Inactive models get none.
    """
    ratio, active = dispatch.ratio, clock.active
    variances = variances if active is None else jnp.where(active, variances, 0)
    left = dispatch.num_jobs - clock.num_active * ratio
    total = jnp.sum(variances)
    wanted = jnp.floor(dispatch.num_jobs * variances / total) - ratio
    start = jnp.full_like(clock.targets, ratio)
    if active is not None:
        wanted, start = jnp.where(active, wanted, -jnp.inf), jnp.where(active, start, 0)

    def give(i: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        given, wanted = carry
        model = jnp.argmax(wanted)
        number = jnp.minimum(ratio, left - i * ratio)
        return given.at[model].add(number), wanted.at[model].add(-ratio)

    shared, _ = lax.fori_loop(0, -(-left // ratio), give, (start, wanted))
    return jnp.where(jnp.isfinite(total) & (total > 0), shared, clock.targets)
