"""Bandits: clients train models on which their losses are large or rarely observed."""

from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Gt, Interval
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.assignments.sampling import Dealt, dealt_to
from fedjax_mm.base import Assignment, Cohort, Look, Round, Scalar
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import Count, part

Policy: TypeAlias = Literal["random", "weighted-sum", "pareto", "rank-list"]
"""How a policy ranks pairs of a client and a model."""


class Heard(NamedTuple):
    """Bandit state: discounted sums of the reported losses.

    Attributes:
      loss: L, the discounted sum of mean training losses.
      number: n, the discounted number of observed losses.
      time: T, the discounted number of clock ticks.
      last: the last round in which a client trained a model; 0 if none.
      first: whether each model was active in round 1.
    """

    loss: Float[Array, "models clients"]
    number: Float[Array, "models clients"]
    time: Float[Array, ""]
    last: Int[Array, "models clients"]
    first: Bool[Array, " models"]


@part
def bandit(
    num_clients: Count,
    num_models: Count,
    *,
    cohort_size: Count,
    policy: Policy = "rank-list",
    weights: Annotated[Float[Array, " models"] | tuple[float, ...], Gt(0)] | None = None,
    discount: Annotated[Scalar, Interval(gt=0, le=1)] = 0.9,
    clock: Literal["round", "client"] = "round",
) -> Assignment:
    """Multi-FedAvg with bandits: selects K clients per round using bounds on discounted losses.

    After every round ``L <- l + gamma L``, ``n <- 1[l > 0] + gamma n`` and ``T <- 1 + gamma T`` for
    each model and client, where l is the client's mean loss while training the model in this round,
    or 0 if it did not train it. The bound is ``A = L / n + sqrt(2 ln T / n)``, infinite for a pair
    without an observed loss. In the first M rounds all clients train model 1, 2, ..., M, except for
    inactive models.

    Losses must be positive, like the cross-entropy, because other values count as unobserved.

    Args:
      num_clients: N.
      num_models: M.
      cohort_size: K, from round M + 1 on.
      policy: "random" draws clients and models uniformly. "weighted-sum" selects the clients with
        the largest ``sum_m p_m A_m``, each for the model with its largest A. "pareto" draws from
        the clients whose bounds are Pareto-optimal, or selects all of them if there are fewer than
        K, each for the model that it trained least recently. In "rank-list" the models take turns
        picking the unassigned client with the largest A. With more than two models, the first one
        to pick rotates each round.
      weights: p for "weighted-sum", one positive number per model; None means equal weights.
      discount: gamma, above 0 and at most 1.
      clock: "round" advances T once per round, and "client" N times, as in the authors' code.

    Raises:
      ValueError: if sizes do not fit, `weights` does not apply to the policy, or a choice is
        unknown.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> assignment, key = bandit(3, 1, cohort_size=1), jax.random.key(0)
      >>> cohort, state = assignment.assign(key, 1, assignment.init(key, Look()), Look())
      >>> reports = {"loss": jnp.array([0.1, 0.9, 0.5])}
      >>> state = assignment.observe(1, cohort, reports, state)
      >>> assignment.assign(key, 2, state, Look())[0].clients.tolist()
      [1, -1, -1]

    Reference: Bhuyan and Moharir, "Multi-Model Federated Learning" (2022).
    """
    checks.check_between("cohort_size", cohort_size, 1, num_clients, "num_clients")
    shares = _shares(weights, policy, num_models)
    shape, ticks = (num_models, num_clients), num_clients if clock == "client" else 1

    def init(rng_key: PRNGKeyArray, look: Look) -> Heard:
        del rng_key, look
        nothing = jnp.zeros(shape)
        rounds, first = jnp.zeros(shape, jnp.int32), jnp.ones(num_models, bool)
        return Heard(nothing, nothing, jnp.zeros(()), rounds, first)

    def choose(rng_key: PRNGKeyArray, round: Array, heard: Heard, dealt: Dealt) -> Cohort:
        if policy == "random":
            return dealt.named(at_random(rng_key, num_clients, dealt.number, cohort_size))
        bounds = jnp.where(dealt.active[:, None], upper_bounds(heard), -jnp.inf)
        if policy == "weighted-sum":
            return dealt.masked(weighted_sum(bounds, jnp.asarray(shares, float), cohort_size))
        if policy == "pareto":
            return dealt.masked(pareto(rng_key, bounds, heard.last, cohort_size))
        first = jnp.where(dealt.number > 2, round - 1, 0)
        return dealt.named(rank_list(bounds[dealt.models], first, cohort_size, dealt.number))

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        t, given = jnp.asarray(round, jnp.int32), dealt_to(num_models, look)
        dealt = Dealt.to(jnp.ones(num_models, bool)) if given is None else given
        everybody = jnp.arange(num_clients, dtype=jnp.int32)
        first = Cohort(everybody, jnp.broadcast_to(t - 1, everybody.shape))
        fill = partial(jnp.pad, pad_width=(0, num_clients - cohort_size), constant_values=-1)
        opens = t <= num_models
        if given is not None:
            state = state._replace(first=jnp.where(t == 1, given.active, state.first))
            turn = jnp.minimum(t - 1, num_models - 1)
            opens &= state.first[turn] & given.active[turn]
        cohort = lax.cond(
            opens,
            lambda: first,
            lambda: jax.tree.map(fill, choose(rng_key, t, state, dealt)),
        )
        return cohort, state

    def observe(round: Round, cohort: Cohort, reports: Any, state: Any) -> Heard:
        # Use an index that is out of range and thus dropped, because -1 would mark the last client.
        pairs = cohort.models, jnp.where(cohort.clients >= 0, cohort.clients, num_clients)
        loss = jnp.zeros(shape).at[pairs].set(loss_in(reports), mode="drop")
        last = state.last.at[pairs].set(jnp.asarray(round, jnp.int32), mode="drop")
        passed = jnp.sum(jnp.asarray(discount) ** jnp.arange(ticks))
        return Heard(
            loss + discount * state.loss,
            (loss > 0) + discount * state.number,
            passed + jnp.asarray(discount) ** ticks * state.time,
            last,
            state.first,
        )

    return Assignment(num_clients, num_models, init, assign, observe)


def upper_bounds(heard: Heard) -> Float[Array, "models clients"]:
    """A for every model and client, infinite for pairs without an observed loss."""
    bounds = heard.loss / heard.number + jnp.sqrt(2 * jnp.log(heard.time) / heard.number)
    return jnp.where(heard.number > 0, bounds, jnp.inf)


def at_random(
    rng_key: PRNGKeyArray, num_clients: int, num_models: int | Int[Array, ""], cohort_size: int
) -> Cohort:
    """Draws K clients without replacement, and a model for each."""
    client_key, model_key = jax.random.split(rng_key)
    models = jax.random.randint(model_key, (cohort_size,), 0, num_models, jnp.int32)
    return Cohort(permutation(client_key, num_clients, cohort_size), models)


def weighted_sum(
    bounds: Float[Array, "models clients"], shares: Float[Array, " models"], cohort_size: int
) -> Cohort:
    """Selects the K clients with largest ``sum_m p_m A_m``, each for its model with largest A.

    A is -inf for inactive models.
    """
    _, clients = lax.top_k(shares @ jnp.where(jnp.isneginf(bounds), 0, bounds), cohort_size)
    models = jnp.argmax(bounds[:, clients], axis=0).astype(jnp.int32)
    return Cohort(clients.astype(jnp.int32), models)


def pareto(
    rng_key: PRNGKeyArray,
    bounds: Float[Array, "models clients"],
    last: Int[Array, "models clients"],
    cohort_size: int,
) -> Cohort:
    """Draws K Pareto-optimal clients, each for the model it trained least recently.

    A is -inf for inactive models.
    """
    last = jnp.where(jnp.isneginf(bounds), jnp.iinfo(jnp.int32).max, last)

    def is_dominated(own: Float[Array, " models"]) -> Bool[Array, ""]:
        as_large = jnp.all(bounds >= own[:, None], axis=0)
        return jnp.any(as_large & jnp.any(bounds > own[:, None], axis=0))

    # Compare in blocks, because N^2 comparisons at once would take too much memory.
    outside = lax.map(is_dominated, bounds.T, batch_size=256)
    lots = jax.random.bits(rng_key, outside.shape, jnp.uint32)
    clients = jnp.lexsort((lots, outside))[:cohort_size].astype(jnp.int32)
    models = jnp.argmin(last[:, clients], axis=0).astype(jnp.int32)
    return Cohort(jnp.where(outside[clients], -1, clients), models)


def rank_list(
    bounds: Float[Array, "models clients"],
    first: Int[Array, ""],
    cohort_size: int,
    number: Int[Array, ""],
) -> Cohort:
    """Lets models take turns, from `first` on, to pick the unassigned client with the largest A.

    Only the first `number` models do.
    """

    def take(is_taken: Array, turn: Array) -> tuple[Array, tuple[Array, Array]]:
        model = (first + turn) % number
        client = jnp.argmax(jnp.where(is_taken, -jnp.inf, bounds[model])).astype(jnp.int32)
        return is_taken.at[client].set(True), (client, model)

    turns = jnp.arange(cohort_size, dtype=jnp.int32)
    return Cohort(*lax.scan(take, jnp.zeros(bounds.shape[1], bool), turns)[1])


def _shares(weights: Any, policy: Policy, num_models: int) -> Any:
    """Weights p of the weighted sum."""
    # Use NumPy unless a JAX array is given, because factories must not initialize a backend.
    if weights is None:
        return np.full(num_models, 1 / num_models)
    if policy != "weighted-sum":
        raise ValueError(f"weights are given, but the policy is {policy!r}; leave them out")
    weights = np.asarray(weights) if isinstance(weights, tuple | list) else weights
    if len(weights) != num_models:
        raise ValueError(
            f"weights has {len(weights)} numbers; give one for each of the {num_models} models"
        )
    return weights


def loss_in(reports: Any) -> Float[Array, "*places"]:
    """The losses in clients' reports. Raises `ValueError` for reports without losses."""
    if not isinstance(reports, dict) or "loss" not in reports:
        raise ValueError(
            f"the algorithm reports {jax.tree.structure(reports)}, but assignments need losses; "
            'let its clients report {"loss": the mean loss while training}'
        )
    loss: Array = reports["loss"]
    return loss
