"""Fair allocation: models with larger losses or errors get more clients."""

from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedjax_mm.assignments.sampling import dealt_to, no_state
from fedjax_mm.base import Assignment, Cohort, Look, Round, Scalar
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import Count, part


@part
def fedfair(
    num_clients: Count,
    num_models: Count,
    *,
    cohort_size: Count | None = None,
    alpha: Annotated[Scalar, Ge(1)] = 3.0,
    by: Literal["loss", "accuracy"] = "loss",
    memory: Annotated[Scalar, Interval(gt=0, le=1)] | None = None,
) -> Assignment:
    """FedFairMMFL: each client draws a model with probability proportional to f_m^(alpha - 1).

    f_m is the model's loss or error before the round. A model that no client draws does not change.

    This is the paper's allocation for clients that are willing to train every model. Its auctions
    for recruiting clients and its group-based variant are not implemented. Its round-robin variant
    is ``mfa_rr(..., redraw="never")``.

    With `memory` it is the authors' Bayesian allocation: the probability is multiplied by
    ``1 - s_km / sum_m s_km``, where s_km counts the rounds before, plus those in which client k
    was given model m, each weighted by d to the power of its age.

    Args:
      num_clients: N.
      num_models: M.
      cohort_size: K of the N clients, drawn uniformly each round; None means all of them.
      alpha: 1 draws models uniformly; larger values give more clients to the worst model.
      by: the metric that determines f_m and that all tasks must have. "loss" uses the mean training
        loss, and "accuracy" uses 100 (1 - test accuracy). Either costs one pass over the data.
      memory: d, above 0 and at most 1; None ignores which models a client has trained.

    Raises:
      ValueError: if sizes do not fit, `alpha` is below 1, `by` is unknown, or there is a memory
        but only one model.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> look = Look(None, None, metric=lambda *names: jnp.array([0.01, 2.0]))
      >>> cohort, _ = fedfair(3, 2).assign(jax.random.key(0), 1, (), look)
      >>> sorted(cohort.clients.tolist()), cohort.models.tolist()
      ([0, 1, 2], [1, 1, 1])

    Reference: Siew et al., "Fair Concurrent Training of Multiple Models in Federated Learning"
    (2024).
    """
    number = checks.check_cohort_size(num_clients, cohort_size)
    if memory is not None and num_models == 1:
        raise ValueError("memory is given, but there is one model; leave it out")

    def init(rng_key: PRNGKeyArray, look: Look) -> Any:
        nothing = jnp.zeros((num_clients, num_models))
        return no_state(rng_key, look) if memory is None else nothing

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        del round
        dealt = dealt_to(num_models, look)
        client_key, model_key = jax.random.split(rng_key)
        clients = permutation(client_key, num_clients, number)
        if by == "loss":
            lack = look.metric("loss")
        else:
            lack = 100 * (1 - look.metric("test_accuracy", "accuracy"))
        rarity = 1 if memory is None else rarities(state[clients])
        p = chances(lack, alpha, True if dealt is None else dealt.active, rarity)
        lot = jax.random.uniform(model_key, (number, 1), jnp.float32)
        # Round-off may leave the last sum below 1.
        models = jnp.minimum(jnp.sum(lot >= jnp.cumsum(p, axis=-1), axis=1), num_models - 1)
        cohort = Cohort(clients, models.astype(jnp.int32))
        if memory is not None:
            state = (memory * state + 1).at[cohort.clients, cohort.models].add(1)
        return cohort if dealt is None else dealt.masked(cohort), state

    return Assignment(num_clients, num_models, init, assign)


def rarities(counts: Float[Array, "slots models"]) -> Float[Array, "slots models"]:
    """``1 - s_km / sum_m s_km``, or 1 if a client has no past.

    Example:
      >>> rarities(jnp.array([[4.0, 2.0], [0.0, 0.0]])).tolist()
      [[0.3..., 0.6...], [1.0, 1.0]]
    """
    total = counts.sum(-1, keepdims=True)
    return 1 - counts / jnp.where(total > 0, total, 1)


def chances(
    lack: Float[Array, " models"],
    alpha: Scalar,
    active: bool | Bool[Array, " models"] = True,
    rarity: int | Float[Array, "slots models"] = 1,
) -> Float[Array, "*slots models"]:
    """Probabilities proportional to f_m^(alpha - 1), for the active models.

    A model with f_m = 0 is drawn only if alpha is 1 or all f_m are 0. `rarity` multiplies them.

    Example:
      >>> chances(jnp.array([1.0, 2.0]), 3.0).tolist()
      [0.2..., 0.8...]
      >>> chances(jnp.array([0.0, 0.0]), 3.0).tolist()
      [0.5, 0.5]
    """
    # Use logarithms, because for large alpha the powers of small losses would all underflow to 0.
    tiny = jnp.finfo(lack.dtype).tiny
    powers = (alpha - 1) * jnp.log(jnp.maximum(lack, tiny)) + jnp.log(rarity)
    return jax.nn.softmax(powers, where=active)
