"""Power-of-choice and Oort: models take turns to choose clients with large losses."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Gt, Interval
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.assignments.bandits import loss_in
from fedjax_mm.assignments.sampling import Dealt, dealt_to, no_state
from fedjax_mm.base import Assignment, Cohort, Look, Round, Scalar
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import Count, NonNegative, Positive, part

Choice: TypeAlias = Callable[[Array, Array, Array], Int[Array, " width"]]
"""``(model, is_taken, size) -> clients``: at most `size` clients of a model, then padding."""


@part
def power_of_choice(
    num_clients: Count,
    num_models: Count = 1,
    *,
    cohort_size: Count,
    candidates: Count,
) -> Assignment:
    """Power-of-choice: of d candidates, those with the largest losses train.

    The active models take turns, and the next one begins in every round. In its turn, a model draws
    d of the clients that no other model has taken, without replacement and with probabilities
    proportional to n_k. Its K / M clients are the candidates with the largest F_k(w). With d = K /
    M losses do not matter; with d = N those clients train whose losses are largest.

    Every round costs one pass over all training examples, while a real server would ask only the
    candidates. The paper has one model; turns are ours.

    Args:
      num_clients: N.
      num_models: M.
      cohort_size: K, the number of clients of all models in a round, divided near-equally.
      candidates: d, of each model, at least the number of its clients. If fewer clients are left,
        all of them are candidates.

    Raises:
      ValueError: if sizes do not fit.

    Example: the client with the largest loss trains the model.
      >>> import jax
      >>> import jax.numpy as jnp
      >>> look = Look(
      ...     losses=lambda: jnp.array([[0.1, 0.9, 0.5]]), weights=lambda: jnp.ones((1, 3)))
      >>> assignment = power_of_choice(3, cohort_size=1, candidates=3)
      >>> assignment.assign(jax.random.key(0), 1, (), look)[0].clients.tolist()
      [1]

    Reference: Cho, Wang, Joshi, "Towards Understanding Biased Client Selection in Federated
    Learning" (2022).
    """
    checks.check_sizes(num_clients, num_models, cohort_size)
    checks.check_between("candidates", candidates, -(-cohort_size // num_models), num_clients)

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        losses, dealt = look.losses(), dealt_to(num_models, look)
        num_drawn = candidates if dealt is None else max(candidates, cohort_size)
        width = _width(num_models, cohort_size, dealt is not None, num_drawn)
        lots = jnp.log(look.weights()) + jax.random.gumbel(rng_key, losses.shape, jnp.float32)

        def choose(model: Array, is_taken: Array, size: Array) -> Array:
            lot, those = lax.top_k(jnp.where(is_taken, -jnp.inf, lots[model]), num_drawn)
            # A model that has the clients of others, too, needs more candidates.
            lot = jnp.where(jnp.arange(num_drawn) < jnp.maximum(candidates, size), lot, -jnp.inf)
            _, first = lax.top_k(
                jnp.where(jnp.isneginf(lot), -jnp.inf, losses[model, those]), width
            )
            is_chosen = (jnp.arange(width, dtype=jnp.int32) < size) & ~is_taken[those[first]]
            return jnp.where(is_chosen, those[first], -1)

        is_active = jnp.ones(num_models, bool) if dealt is None else dealt.active
        rows = _in_turn(round, num_clients, cohort_size, is_active, choose)
        return Cohort.of_rows(rows), state

    return Assignment(num_clients, num_models, no_state, assign)


class Utilities(NamedTuple):
    """State of Oort.

    Attributes:
      utility: U, from the latest training of each pair.
      last: the round of that training; 0 before the first.
      weight: n_k.
    """

    utility: Float[Array, "models clients"]
    last: Int[Array, "models clients"]
    weight: Float[Array, "models clients"]


@part
def oort(
    num_clients: Count,
    num_models: Count = 1,
    *,
    cohort_size: Count,
    exploration: Annotated[Scalar, Interval(ge=0, le=1)] = 0.9,
    exploration_decay: Annotated[Scalar, Interval(gt=0, le=1)] = 0.98,
    least_exploration: Annotated[Scalar, Interval(ge=0, le=1)] = 0.3,
    uncertainty: NonNegative = 0.1,
    durations: Annotated[Float[Array, " clients"] | tuple[float, ...], Gt(0)] | None = None,
    preferred_duration: Positive | None = None,
) -> Assignment:
    """Oort: explores clients that never trained, and exploits those with large utilities.

    The utility of a client is ``U_k = n_k l_k``, with its mean training loss l_k when it trained
    the model last. The score of a client that trained in round t_k before is ``(min(U_k, U_90) -
    min U) / (max min(U, U_90) - min U) + sqrt(uncertainty ln t / t_k)``, where U_90 is the 90 %
    quantile of the model's utilities. If the duration of a client exceeds the preferred one T, the
    score is multiplied by ``(T / duration)^2``.

    The active models take turns, and the next one begins in every round. In its turn a model has
    K / M slots, of which a share ``max(exploration exploration_decay^t, least_exploration)`` is for
    clients that never trained it, drawn with probabilities proportional to n_k. The others are
    drawn, with probabilities proportional to scores, from the clients whose scores are at least
    5 % of the score at the last slot, or which are among the best ten for each slot. If one kind
    has too few clients, the other one takes its slots.

    The paper has the root mean square of the examples' losses for l_k, which clients here do not
    report, and adapts T during training. It has one model; turns are ours.

    Args:
      num_clients: N.
      num_models: M.
      cohort_size: K, the number of clients of all models in a round, divided near-equally.
      exploration: the initial share of exploration.
      exploration_decay: multiplies this share every round.
      least_exploration: the smallest share of exploration.
      uncertainty: the weight of the bonus for clients that trained long ago.
      durations: the duration of each client's training, positive; None means that time does not
        count.
      preferred_duration: T, in the same unit.

    Raises:
      ValueError: if sizes do not fit, a number is out of range, or only one of the durations and T
        is given.

    Example: of two clients that have trained, the one with the larger loss trains again.
      >>> import jax
      >>> import jax.numpy as jnp
      >>> assignment = oort(2, cohort_size=1, least_exploration=0.0, exploration=0.0)
      >>> look, key = Look(weights=lambda: jnp.ones((1, 2))), jax.random.key(0)
      >>> cohort, state = assignment.assign(key, 1, assignment.init(key, look), look)
      >>> everybody = Cohort(jnp.arange(2), jnp.zeros(2, int))
      >>> state = assignment.observe(1, everybody, {"loss": jnp.array([0.1, 0.9])}, state)
      >>> assignment.assign(key, 2, state, look)[0].clients.tolist()
      [1]

    Reference: Lai, Zhu, Madhyastha, Chowdhury, "Oort: Efficient Federated Learning via Guided
    Participant Selection" (2021).
    """
    checks.check_sizes(num_clients, num_models, cohort_size)
    if (durations is None) != (preferred_duration is None):
        raise ValueError(
            f"durations are {durations} and preferred_duration is {preferred_duration}; give both, "
            "or none"
        )
    if durations is not None and np.shape(durations) != (num_clients,):
        raise ValueError(
            f"durations has shape {np.shape(durations)}; give one for each of {num_clients} clients"
        )
    shape = num_models, num_clients

    def init(rng_key: PRNGKeyArray, look: Look) -> Utilities:
        del rng_key, look
        return Utilities(jnp.zeros(shape), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))

    def penalty() -> Any:
        if durations is None or preferred_duration is None:
            return 1.0
        return jnp.minimum(preferred_duration / jnp.asarray(durations, float), 1) ** 2

    def assign(
        rng_key: PRNGKeyArray, round: Round, state: Utilities, look: Look
    ) -> tuple[Cohort, Utilities]:
        weights, t = look.weights(), jnp.asarray(round, float)
        dealt = dealt_to(num_models, look)
        width = _width(num_models, cohort_size, dealt is not None, num_clients)
        lots = jax.random.gumbel(rng_key, (2, *shape), jnp.float32)
        unseen = jnp.log(weights) + lots[0]
        score = scores(state.utility, state.last, t, uncertainty) * penalty()
        share = jnp.maximum(exploration * exploration_decay**t, least_exploration)

        def choose(model: Array, is_taken: Array, size: Array) -> Array:
            is_seen = (state.last[model] > 0) & ~is_taken
            is_new = (state.last[model] == 0) & ~is_taken & (weights[model] > 0)
            wanted = jnp.minimum(jnp.round(share * size), jnp.sum(is_new))
            known = jnp.minimum(size - wanted, jnp.sum(is_seen)).astype(jnp.int32)
            of_known = jnp.where(is_seen, score[model], -jnp.inf)
            best = jnp.argsort(-of_known, stable=True)
            rank = (
                jnp.zeros(num_clients, jnp.int32)
                .at[best]
                .set(jnp.arange(num_clients, dtype=jnp.int32))
            )
            cut = of_known[best[jnp.maximum(known - 1, 0)]]
            in_pool = is_seen & ((of_known >= _CUT_OFF * cut) | (rank < _POOL * known))
            drawn = jnp.log(jnp.maximum(of_known, _LEAST_SCORE)) + lots[1, model]
            exploited = jnp.argsort(-jnp.where(in_pool, drawn, -jnp.inf), stable=True)
            explored = jnp.argsort(-jnp.where(is_new, unseen[model], -jnp.inf), stable=True)
            place = jnp.arange(width, dtype=jnp.int32)
            clients = jnp.where(
                place < known, exploited[:width], explored[jnp.maximum(place - known, 0)]
            )
            return jnp.where(place < size, clients, -1).astype(jnp.int32)

        is_active = jnp.ones(num_models, bool) if dealt is None else dealt.active
        rows = _in_turn(round, num_clients, cohort_size, is_active, choose)
        return Cohort.of_rows(rows), state._replace(weight=weights.astype(state.weight.dtype))

    def observe(round: Round, cohort: Cohort, reports: Any, state: Utilities) -> Utilities:
        pairs = cohort.models, jnp.where(cohort.clients >= 0, cohort.clients, num_clients)
        found = loss_in(reports) * state.weight[cohort.models, jnp.maximum(cohort.clients, 0)]
        utility = state.utility.at[pairs].set(found.astype(state.utility.dtype), mode="drop")
        last = state.last.at[pairs].set(jnp.asarray(round, jnp.int32), mode="drop")
        return state._replace(utility=utility, last=last)

    return Assignment(num_clients, num_models, init, assign, observe)


_QUANTILE = 0.9  # utilities above this quantile are clipped
_CUT_OFF = 0.05  # of the score at the last slot
_POOL = 10  # clients in the pool for each slot
_LEAST_SCORE = 1e-12  # lets clients with score 0 be drawn when no others are left


def scores(
    utility: Float[Array, "models clients"],
    last: Int[Array, "models clients"],
    round: Scalar,
    uncertainty: Scalar,
) -> Float[Array, "models clients"]:
    """Oort's scores of the clients that trained a model before, without durations.

    Example:
      >>> utility, last = jnp.array([[2.0, 3.0, 1.0, 9.0]]), jnp.array([[10, 10, 10, 0]])
      >>> [round(x, 4) for x in scores(utility, last, 100, 0.1)[0].tolist()]
      [0.7146, 1.2146, 0.2146, 0.0]
    """
    is_seen = last > 0
    number = jnp.sum(is_seen, axis=1, keepdims=True, dtype=jnp.int32)
    ascending = jnp.sort(jnp.where(is_seen, utility, jnp.inf), axis=1)
    place = jnp.minimum((_QUANTILE * number).astype(jnp.int32), jnp.maximum(number - 1, 0))
    top, bottom = jnp.take_along_axis(ascending, place, axis=1), ascending[:, :1]
    spread = jnp.where(top > bottom, top - bottom, 1)
    bonus = jnp.sqrt(uncertainty * jnp.log(round) / jnp.maximum(last, 1))
    return jnp.where(is_seen, (jnp.minimum(utility, top) - bottom) / spread + bonus, 0)


def _width(num_models: int, cohort_size: int, may_rest: bool, most: int) -> int:
    """Slots of each model: all clients if other models may rest, otherwise an equal share."""
    return min(cohort_size, most) if may_rest else -(-cohort_size // num_models)


def _in_turn(
    round: Round,
    num_clients: int,
    cohort_size: int,
    active: Bool[Array, " models"],
    choose: Choice,
) -> Int[Array, "models width"]:
    """Lets the active models choose clients in turn, each from the ones not yet taken."""
    number, order, _ = Dealt.to(active)

    def turn(is_taken: Array, j: Array) -> tuple[Array, Any]:
        is_active = j < number
        model = order[jnp.where(is_active, (jnp.asarray(round, jnp.int32) - 1 + j) % number, j)]
        size = cohort_size // number + (j < cohort_size % number)
        clients = choose(model, is_taken, jnp.where(is_active & active[model], size, 0))
        index = jnp.where(clients >= 0, clients, num_clients)
        return is_taken.at[index].set(True, mode="drop"), (model, clients)

    start, turns = jnp.zeros(num_clients, bool), jnp.arange(len(active), dtype=jnp.int32)
    _, (models, rows) = lax.scan(turn, start, turns)
    return jnp.zeros_like(rows).at[models].set(rows)
