"""BODS: schedules clients for fast and fair rounds, with a Gaussian process over plans."""

from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from annotated_types import Interval
from jax import lax
from jax.custom_batching import custom_vmap
from jax.scipy.linalg import cho_factor, cho_solve, solve_triangular
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.asynchrony.clock import delays_of, on_clock
from fedjax_mm.asynchrony.delays import Delay, check_delay, shifted_exponential
from fedjax_mm.base import Assignment, Cohort, Look, Round, Scalar, keys
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.checks.annotations import Count, part

MEMORY = 64
"""The number of recent plans from which the Gaussian process learns."""

CANDIDATES = 75
"""The number of candidate plans compared in a round."""

LENGTH_SCALE = 2.0
"""The length scale of the Matern kernel."""

NOISE = 1e-4
"""Added to the kernel's diagonal, because equal plans make it singular in single precision."""

Costs: TypeAlias = Float[Array, " plans"]


class Plans(NamedTuple):
    """State of `bods`: recent plans and participation counts.

    Attributes:
      clients: the clients of the last plans, in a ring buffer.
      overlaps: the number of (model, client) pairs that two plans have in common.
      costs: each plan's cost or time, the targets of the Gaussian process.
      number: the number of rounds done.
      counts: s, how often each client has trained each model.
    """

    clients: Int[Array, "plans models cohort"]
    overlaps: Int[Array, "plans plans"]
    costs: Costs
    number: Int[Array, ""]
    counts: Int[Array, "models clients"]


@part
def bods(
    num_clients: Count,
    num_models: Count,
    *,
    cohort_size: Count,
    delay: Delay | None = None,
    alpha: Annotated[Scalar, Interval(ge=0, le=1)] = 0.25,
    learn: Literal["cost", "time"] = "cost",
) -> Assignment:
    """BODS: Bayesian optimization of each round's clients for short rounds and fair participation.

    A plan assigns K clients to each model, and each client to at most one model. Its cost is
    ``alpha T + (1 - alpha) F``, where T is the sum of the models' longest delays, and F is the sum
    of the variances of s_mk, the number of rounds in which client k has trained model m, including
    this one. Every round compares 75 candidate plans, which are shuffles of M K + 5 random clients,
    using a Gaussian process fitted to the last 64 plans, with a Matern kernel (nu = 3/2, length
    scale 2) and standardized costs. The candidate with the largest expected improvement over the
    lowest of these 64 costs is chosen. The first plan is random.

    F grows over the rounds, so the costs of old plans are too low, and plans are not fair. With
    ``learn="time"`` they are fair, because the process learns only T, and F is computed exactly.

    The trace has the metric `time`; see `on_clock`.

    Args:
      num_clients: N.
      num_models: M.
      cohort_size: K clients per model; M K <= N.
      delay: draws the duration of a local training; None means ``shifted_exponential(N)``.
      alpha: the trade-off between fairness (0) and time (1); it may be traced.
      learn: "cost" maximizes the expected improvement of the cost, as in FedAST's code. "time"
        minimizes ``alpha (mean - deviation of T) + (1 - alpha) F``.

    Raises:
      TypeError: if `delay` is not a function.
      ValueError: if a number is out of range, M K > N, or the delays are for another number of
        clients or models.

    Example:
      >>> import jax
      >>> from fedjax_mm.asynchrony import bods
      >>> assignment, key = bods(12, 2, cohort_size=3), jax.random.key(0)
      >>> cohort, state = assignment.assign(key, 1, assignment.init(key, Look()), Look())
      >>> len(set(cohort.clients.tolist())), cohort.models.tolist()
      (6, [0, 0, 0, 1, 1, 1])
      >>> assignment.metrics(state)["time"].shape
      (2,)

    Reference: Zhou et al., "Efficient Device Scheduling with Multi-Job Federated Learning" (2022),
    as compared by Askin, Sharma, Joe-Wong, Joshi in "FedAST" (2024).
    """
    if num_models * cohort_size > num_clients:
        raise ValueError(
            f"cohort_size is {cohort_size}, {num_models * cohort_size} clients for {num_models} "
            f"models, more than num_clients = {num_clients}; every model has clients of its own"
        )
    law = shifted_exponential(num_clients) if delay is None else delay
    check_delay(law, num_clients, num_models)
    shape = num_models, cohort_size

    def init(rng_key: PRNGKeyArray, look: Look) -> Plans:
        del rng_key, look
        return Plans(
            jnp.full((MEMORY, *shape), -1, jnp.int32),
            jnp.zeros((MEMORY, MEMORY), jnp.int32),
            jnp.zeros(MEMORY, float),
            jnp.int32(0),
            jnp.zeros((num_models, num_clients), jnp.int32),
        )

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        del round, look
        pool, places = draw_candidates(rng_key, num_clients, shape)
        overlaps = common_pairs(state.clients, pool, places)
        fairness = variances(state.counts, state.number, pool[places])
        is_kept = jnp.arange(MEMORY) < state.number
        mean, deviation = posterior(state.overlaps, overlaps, state.costs, is_kept, shape)
        if learn == "cost":
            best = jnp.min(state.costs, where=is_kept, initial=jnp.inf)
            score = -expected_improvement(mean, deviation, best)
        else:
            score = alpha * (mean - deviation) + (1 - alpha) * fairness
        chosen = jnp.where(state.number > 0, jnp.argmin(score), 0)
        clients = pool[places[chosen]]
        cohort = Cohort.of_rows(clients)
        times = (
            delays_of(law, keys.delays_key(rng_key), cohort, num_models).reshape(shape).max(1).sum()
        )
        cost = times if learn == "time" else alpha * times + (1 - alpha) * fairness[chosen]
        return cohort, remember(state, clients, overlaps[chosen], cost)

    return on_clock(Assignment(num_clients, num_models, init, assign), law)


def draw_candidates(
    rng_key: PRNGKeyArray, num_clients: int, shape: tuple[int, int]
) -> tuple[Int[Array, " pool"], Int[Array, "candidates models cohort"]]:
    """Draws a pool of M K + 5 clients, and candidate plans as indices into the pool."""
    pool_key, shuffle_key = jax.random.split(rng_key)
    size = shape[0] * shape[1]
    pool = permutation(pool_key, num_clients, min(num_clients, size + 5))
    # Draw a flat array, because XLA compiles a draw with two axes ten times more slowly.
    lots = jax.random.bits(shuffle_key, (CANDIDATES * len(pool),), jnp.uint32)
    places = jnp.argsort(lots.reshape(CANDIDATES, -1), axis=1).astype(jnp.int32)[:, :size]
    return pool, places.reshape(CANDIDATES, *shape)


def common_pairs(
    kept: Int[Array, "plans models cohort"],
    pool: Int[Array, " pool"],
    places: Int[Array, "candidates models cohort"],
) -> Int[Array, "candidates plans"]:
    """Counts the (model, client) pairs that candidates share with kept plans."""
    # Compare only clients in the pool, because all candidates come from it.
    inside = jnp.any(kept[..., None] == pool, axis=2)
    chosen = jnp.any(places[..., None] == jnp.arange(len(pool)), axis=2)
    # Count by a product of floats, exact for such sizes, because XLA's CPU compiler gathers slowly.
    common = jnp.einsum("cmp,kmp->ck", chosen.astype(jnp.float32), inside.astype(jnp.float32))
    return common.astype(jnp.int32)


def variances(
    counts: Int[Array, "models clients"],
    number: Int[Array, ""],
    plans: Int[Array, "candidates models cohort"],
) -> Float[Array, " candidates"]:
    """F of each plan, ``sum_m mean_k (s_mk - mean)^2``, where s includes this round."""
    num_clients, share = counts.shape[1], plans.shape[2] / counts.shape[1]
    # Subtract the mean first, because squares of large counts lose precision in float32.
    excess = counts - number * share
    models = jnp.arange(len(counts))[:, None]
    added = jnp.sum(2 * excess[models, plans] + 1, axis=(1, 2))
    return (jnp.sum(excess**2) + added) / num_clients - len(counts) * share**2


def posterior(
    overlaps: Int[Array, "plans plans"],
    cross: Int[Array, "candidates plans"],
    costs: Costs,
    is_kept: Bool[Array, " plans"],
    shape: tuple[int, int],
) -> tuple[Float[Array, " candidates"], Float[Array, " candidates"]]:
    """Mean and standard deviation of each candidate's cost.

    The squared distance between two plans, as 0/1 vectors, is ``2 (M K - overlap)``.
    """

    def kernel(overlap: Int[Array, "*plans"]) -> Float[Array, "*plans"]:
        scaled = jnp.sqrt(6.0 * (shape[0] * shape[1] - overlap)) / LENGTH_SCALE
        return (1 + scaled) * jnp.exp(-scaled)

    number = jnp.maximum(jnp.sum(is_kept), 1)
    center = jnp.sum(costs, where=is_kept) / number
    width = jnp.sqrt(jnp.sum((costs - center) ** 2, where=is_kept) / number)
    width = jnp.where(width > 0, width, 1)
    values = jnp.where(is_kept, (costs - center) / width, 0)
    # Fill empty places with rows of the identity, so that they do not affect predictions.
    inner = jnp.where(is_kept[:, None] & is_kept, kernel(overlaps), 0)
    inner = inner + jnp.diag(jnp.where(is_kept, NOISE, 1.0))
    outer = jnp.where(is_kept, kernel(cross), 0)
    mean, explained = predict(inner, values, outer)
    deviation = jnp.sqrt(jnp.maximum(1 - explained, 0))
    return center + width * mean, width * deviation


@custom_vmap
def predict(
    inner: Float[Array, "plans plans"],
    values: Float[Array, " plans"],
    outer: Float[Array, "candidates plans"],
) -> tuple[Float[Array, " candidates"], Float[Array, " candidates"]]:
    """Each candidate's mean, and the variance explained by the plans."""
    factor = cho_factor(inner, lower=True)
    # Solve for few candidates at a time on CPUs, because OpenBLAS uses threads for 8 or more, which
    # take a hundred times as long to meet.
    at_once = 7 if jax.default_backend() == "cpu" else len(outer)
    solve = partial(solve_triangular, factor[0], lower=True)
    explained = jnp.sum(lax.map(solve, outer, batch_size=at_once) ** 2, axis=1)
    return outer @ cho_solve(factor, values), explained


@predict.def_vmap
def _predict_for_replicas(
    axis_size: int, in_batched: list[bool], *args: Array
) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
    # Factor the matrices one by one on CPUs, because jaxlib factors a batch in the threads that
    # also run the program, so several devices may wait for each other forever.
    rows = [
        x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, is_batched in zip(args, in_batched, strict=True)
    ]
    if jax.default_backend() == "cpu":
        return lax.map(lambda row: predict(*row), rows), (True, True)
    return jax.vmap(predict.fun)(*rows), (True, True)


def expected_improvement(
    mean: Float[Array, " candidates"], deviation: Float[Array, " candidates"], best: Scalar
) -> Float[Array, " candidates"]:
    """``(best - mean) Phi(Z) + deviation phi(Z)``, ``Z = (best - mean) / deviation``.

    The result is 0 if the deviation is 0.

    Example:
      >>> expected_improvement(jnp.array([0.0, 0.0]), jnp.array([1.0, 0.0]), 0.0).round(3).tolist()
      [0.399..., 0.0]
    """
    is_known = deviation <= 0
    z = (best - mean) / jnp.where(is_known, 1, deviation)
    return jnp.where(is_known, 0, (best - mean) * norm.cdf(z) + deviation * norm.pdf(z))


def remember(
    state: Plans,
    clients: Int[Array, "models cohort"],
    overlaps: Int[Array, " plans"],
    cost: Scalar,
) -> Plans:
    """Replaces the oldest plan of the state by a new one."""
    place = state.number % MEMORY
    overlaps = overlaps.at[place].set(clients.size)
    models = jnp.arange(len(clients))[:, None]
    return Plans(
        state.clients.at[place].set(clients),
        state.overlaps.at[place].set(overlaps).at[:, place].set(overlaps),
        state.costs.at[place].set(cost),
        state.number + 1,
        state.counts.at[models, clients].add(1),
    )
