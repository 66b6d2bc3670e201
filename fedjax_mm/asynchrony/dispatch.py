"""Jobs in simulated time: the dispatch rule, the jobs' random draws, and the clock.

A job is one client's local training of one model, starting from the model's version when the job
begins. A job arrives when it ends. `simulator/asynchronous_batches.py` finds the next jobs to
arrive, and `simulator/asynchronous.py` trains them.

Axes:  ``models`` M · ``jobs`` all R in progress
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm.asynchrony.delays import Delay, check_delay, shifted_exponential
from fedjax_mm.base import keys
from fedjax_mm.checks.values import check_count, check_known, described

WINDOW = 8
"""The number of recent updates used to compute a model's relative variance."""


class Dispatch(NamedTuple):
    """A rule for dispatching jobs and buffering updates, as built by `fedast`.

    Attributes:
      num_clients: N, the number of clients to draw from.
      num_models: M.
      at_work: the initial R_m, the number of jobs of each model in progress.
      ratio: R_m divided by the number of updates in the model's buffer.
      delay: draws the duration of a job.
      reallocate: whether R_m adapts to the relative variance of recent updates.
      arrivals_per_round: the number of arrivals that count as one round.
    """

    num_clients: int
    num_models: int
    at_work: tuple[int, ...]
    ratio: int
    delay: Delay
    reallocate: bool
    arrivals_per_round: int

    @property
    def num_jobs(self) -> int:
        """R, the number of jobs in progress."""
        return sum(self.at_work)

    @property
    def period(self) -> int:
        """The number of arrivals between two reallocations, 0.75 R M."""
        return max(1, 3 * self.num_jobs * self.num_models // 4)

    @property
    def num_places(self) -> int:
        """The maximum number of stored versions, one for each job and one for each model."""
        return self.num_jobs + self.num_models


def fedast(
    num_clients: int,
    num_models: int,
    *,
    at_work: int | Sequence[int],
    ratio: int,
    delay: Delay | None = None,
    reallocate: bool = True,
    arrivals_per_round: int | None = None,
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

    In addition to the tasks' metrics, the trace has `time`, the simulated time, which all models
    share; `steps`, each model's server steps; `staleness`, the mean number of steps that a model
    took during the jobs that arrived since the last record, or NaN without arrivals; and `at_work`,
    R_m. When a job begins, schedules are evaluated at the model's next step. The algorithm must not
    keep client states. With unweighted FedAvg and a server rate eta_g, this is FedAST: ``w <- w +
    (eta_g / b_m) sum Delta``.

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
    Training" (2024), Algorithms 1 and 2.
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
    return Dispatch(num_clients, num_models, tuple(each), ratio, delay, reallocate, per_round)


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
    """

    time: Float[Array, ""]
    jobs: Jobs
    steps: Int[Array, " models"]
    filled: Int[Array, " models"]
    place: Int[Array, " models"]
    targets: Int[Array, " models"]
    arrived: Int[Array, " models"]


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
    """Returns the clock at time 0, when all jobs begin."""
    M = dispatch.num_models
    number = jnp.arange(dispatch.num_jobs, dtype=jnp.int32)
    model = jnp.asarray(np.repeat(np.arange(M), dispatch.at_work), jnp.int32)
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
        targets=jnp.asarray(dispatch.at_work, jnp.int32),
        arrived=zeros,
    )


def share_out(
    dispatch: Dispatch, targets: Int[Array, " models"], variances: Float[Array, " models"]
) -> Int[Array, " models"]:
    """Returns R_m in proportion to relative variances, or the old R_m if these are undefined."""
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
