"""Importance sampling of clients that reduces the variance of unbiased updates."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm.assignments.partitions import Processors
from fedjax_mm.assignments.sampling import check_processors, dealt_to, no_state
from fedjax_mm.base import Assignment, Cohort, Look, Round, Scalar
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import Count, part


@part
def variance_reduced(
    num_clients: Count,
    num_models: Count,
    *,
    expected_trainings: Scalar,
    by: Literal["loss", "update"] = "loss",
    processors: Processors = 1,
    inactive: Literal["rest", "train"] = "rest",
) -> Assignment:
    """LVR and GVR: samples clients with large losses or updates more often, but at lower weights.

    Each of a client's B_k processors draws one of the M models, or none, with probabilities p from
    ``optimal_probabilities`` for ``U = d_k g / B_k``, where ``d_k = n_k / sum n`` and g is F_k(w)
    in LVR and ``|w_k - w|`` in GVR. If c processors of a client draw the same model, the client
    trains it once, and its update is multiplied by ``c / (B_k p)``. With
    ``fedavg(server_scale="1/N")`` the expected update then equals that of full participation.

    Every model has a slot for every client, and most are empty. With many clients, pass a chunk
    size as `client_map`, because chunks without participants are skipped.

    Args:
      num_clients: N.
      num_models: M.
      expected_trainings: m, the expected number of processors that draw a model in a round, at most
        their total number. If fewer have a positive U, for example because models have finished, it
        is the number of those.
      by: "loss" (LVR) costs one pass over all training examples. Negative losses, such as the
        quadratic's, make the model NaN. A client with loss 0 does not train. "update" (GVR) makes
        all clients train all models in every round, and counts their gradients; see
        `Look.updates`.
      processors: B_k; one number, or one per client.
      inactive: "rest" or "train". With "train", clients that are not drawn train without
        participating, as `stalevr` with exact beta requires.

    Raises:
      ValueError: if a number is not positive, or `expected_trainings` exceeds the number of
        processors.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedavg, simulate, variance_reduced
      >>> from fedjax_mm.tasks import least_squares
      >>> xs = [jax.numpy.eye(2)] * 6
      >>> task = least_squares(xs, [jax.numpy.full(2, k) for k in range(6)], ridge=0.1)
      >>> assignment = variance_reduced(6, 2, expected_trainings=3)
      >>> algorithm = fedavg(0.1, local_steps=5, server_scale="1/N")
      >>> _, trace = simulate(jax.random.key(0), task, algorithm, assignment, 100)
      >>> bool(2 < trace.client_updates.sum() / 100 < 4)
      True

    Reference: Zhang et al., "Towards Optimal Heterogeneous Client Sampling in Multi-Model Federated
    Learning" (2025).
    """
    number_of = check_processors(processors, num_clients)  # B_k
    owners = np.repeat(np.arange(num_clients), number_of)
    most = f"be positive and at most the number of processors, {len(owners)}"
    checks.check_numbers(
        "expected_trainings", expected_trainings, lambda m: (m > 0) & (m <= len(owners)), most
    )

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        del round
        dealt, (sizes, num_gradients) = dealt_to(num_models, look), _sizes(by, look)
        if dealt is not None:
            sizes = jnp.where(dealt.active[:, None], sizes, 0)
            if num_gradients is not None:
                num_gradients = jnp.where(dealt.active, num_gradients, 0)
        shares = sizes / number_of
        p = optimal_probabilities(shares[:, owners], expected_trainings)
        drawn = draw_models(rng_key, p)
        counts = jnp.zeros(shares.shape, jnp.int32).at[drawn, owners].add(1, mode="drop")
        (firsts,) = np.nonzero(np.diff(owners, prepend=-1))
        scale = jnp.where(counts > 0, counts / (number_of * p[:, firsts]), 0)
        everybody = jnp.broadcast_to(jnp.arange(num_clients, dtype=jnp.int32), counts.shape)
        if inactive == "train":
            if dealt is not None:
                everybody = jnp.where(dealt.active[:, None], everybody, -1)
            return Cohort.of_rows(everybody, scale, num_gradients, counts > 0), state
        # Move clients that train to the front, so that the remaining chunks are empty.
        order = jnp.argsort(counts == 0, axis=1, stable=True)
        clients = jnp.where(counts > 0, everybody, -1)
        clients, scale = (jnp.take_along_axis(x, order, axis=1) for x in (clients, scale))
        return Cohort.of_rows(clients, scale, num_gradients), state

    return Assignment(num_clients, num_models, no_state, assign)


def optimal_probabilities(
    sizes: Float[Array, "models processors"], expected_trainings: Scalar
) -> Float[Array, "models processors"]:
    """Sampling probabilities that minimize the variance of an unbiased sum.

    With ``M_v = sum_m U_mv`` sorted in ascending order, q is the largest number of processors for
    which ``0 < m - V + q <= sum_{j<=q} M_j / M_q``. The q smallest have the probabilities
    ``p_mv = (m - V + q) U_mv / sum_{j<=q} M_j``, and the others, which always train,
    ``p_mv = U_mv / M_v``. Each processor trains at most one model, so its probabilities sum to at
    most 1. The total is m, or the number of processors with a positive U if that is smaller.

    Args:
      sizes: U, nonnegative.
      expected_trainings: m, at most V.

    Example:
      >>> optimal_probabilities(jnp.array([[1.0, 3.0, 9.0]]), 2.0).tolist()
      [[0.25, 0.75, 1.0]]

    Reference: Zhang et al. (2025), the theorem on the sampling of MMFL-GVR.
    """
    of_processor = sizes.sum(0)
    order = jnp.argsort(of_processor)
    ascending, num = of_processor[order], jnp.arange(1, 1 + sizes.shape[1])
    below, room = jnp.cumsum(ascending), expected_trainings - sizes.shape[1] + num
    # Multiply out the condition, because M_q may be 0.
    q = jnp.max(jnp.where((room > 0) & (room * ascending <= below), num, 1))
    is_shared = jnp.argsort(order) < q
    shared_by, room = below[q - 1], room[q - 1]
    total = jnp.where(is_shared, shared_by, of_processor)
    factor = jnp.where(is_shared, room, 1.0)
    return jnp.where(total > 0, factor * sizes / jnp.where(total > 0, total, 1), 0 * sizes)


def draw_models(
    rng_key: PRNGKeyArray, p: Float[Array, "models processors"]
) -> Int[Array, " processors"]:
    """Draws a model for each processor, with M for no model."""
    lots = jax.random.uniform(rng_key, p.shape[1:], jnp.float32)
    return jnp.sum(jnp.cumsum(p, axis=0) <= lots, axis=0)


def _sizes(
    by: str, look: Look
) -> tuple[Float[Array, "models clients"], Int[Array, " models"] | None]:
    """D_k g for every model and client, and the gradients computed for it, if any."""
    if by == "update":
        return look.updates()
    losses, weights = look.losses(), look.weights()
    # Turn negative losses into NaN, because a negative probability would silently never be drawn.
    losses = jnp.where(losses < 0, jnp.nan, losses)
    return losses * weights / weights.sum(1, keepdims=True), None
