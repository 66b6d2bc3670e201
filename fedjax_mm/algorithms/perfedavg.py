"""Per-FedAvg: a start from which one local step serves each client well."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm.algorithms.local import add_mean, local_sgd
from fedjax_mm.base import (
    Algorithm,
    Batch,
    ClientState,
    Contribution,
    Params,
    Round,
    Scalar,
    Schedule,
    ServerState,
    Task,
)
from fedjax_mm.checks import check_not_negative, check_positive


def perfedavg(
    learning_rate: Scalar | Schedule,
    *,
    local_steps: int,
    batch_size: int | None = None,
    alpha: Scalar = 1e-2,
    variant: Literal["FO", "HF"] = "FO",
    delta: Scalar = 1e-3,
) -> Algorithm:
    """Per-FedAvg: local steps on ``F_k(w - alpha grad F_k(w))``, then the unweighted mean.

    With batches D, D', D'' of its own in each step, ``u = w - alpha grad(w; D)``, a step goes along
    ``g' = grad(u; D')`` (first order, "FO") or along ``g' - alpha (grad(w + delta g'; D'') -
    grad(w - delta g'; D'')) / (2 delta)``, a Hessian-vector product by differences ("HF").

    Args:
      learning_rate: beta, a number (it may be traced) or a schedule of the round t = 1, 2, ...
      local_steps: E, meta steps of every client.
      batch_size: B examples of each of the batches, drawn independently; None takes all in each.
      alpha: the rate of the step inside; 0 is FedAvg, unweighted.
      variant: "FO" (2 gradients a step) or "HF" (4).
      delta: of "HF".

    Raises:
      ValueError: if `alpha` is negative, another number is not positive, or `variant` is unknown.

    Example:
      >>> import jax
      >>> from fedjax_mm import full_participation, perfedavg, quadratic, simulate
      >>> algorithm = perfedavg(0.1, local_steps=5)
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical
    Guarantees" (2020), Algorithm 1 and section 5.
    """
    local = local_sgd(learning_rate, local_steps, batch_size)
    check_not_negative("alpha", alpha)
    check_positive("delta", delta)
    if variant not in ("FO", "HF"):
        raise ValueError(f"variant is {variant!r}; it must be 'FO' or 'HF'")
    num_batches = 2 if variant == "FO" else 3

    def init(task: Task, params: Params) -> tuple[ServerState, ClientState]:
        del task, params
        return (), ()

    def client(
        rng_key: PRNGKeyArray,
        round: Round,
        task: Task,
        client: Int[Array, ""],
        params: Params,
        server_state: ServerState,
        client_state: ClientState,
    ) -> tuple[Contribution, ClientState]:
        del server_state
        gradient = jax.grad(task.loss)

        def direction(own: Params, inner: Batch, outer: Batch, *third: Batch) -> Params:
            outer_gradient = gradient(_plus(own, -alpha, gradient(own, inner)), outer)
            if variant == "FO":
                return outer_gradient
            ahead, behind = (
                gradient(_plus(own, side * delta, outer_gradient), *third) for side in (1, -1)
            )
            bend = jax.tree.map(lambda x, y: (x - y) / (2 * delta), ahead, behind)
            return _plus(outer_gradient, -alpha, bend)

        change = local.change(
            rng_key, round, task, client, params, direction=direction, num_batches=num_batches
        )
        num_gradients = jnp.int32(local_steps * (2 if variant == "FO" else 4))
        return Contribution(change, jnp.ones(()), num_gradients), client_state

    return Algorithm(init, client, add_mean)


def _plus(tree: Params, factor: Scalar, other: Params) -> Params:
    return jax.tree.map(lambda x, y: x + factor * y, tree, other)
