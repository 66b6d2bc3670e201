"""MaxFL: one global model that as many clients as possible prefer to their own."""

from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm.algorithms.local import local_sgd
from fedjax_mm.algorithms.views import demanding
from fedjax_mm.base import (
    Algorithm,
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
from fedjax_mm.contribution import scale_update


def maxfl(
    learning_rate: Scalar | Schedule,
    *,
    local_steps: int,
    batch_size: int | None = None,
    server_rate: Scalar = 1.0,
    eps: Scalar = 1e-2,
    weight: Literal["derivative", "sigmoid"] = "derivative",
    slope: Scalar = 1.0,
) -> Algorithm:
    """MaxFL: ``w <- w + eta_g sum_k q_k (w_k - w) / (sum_k q_k + eps)``, eqs. (4) and (6).

    ``q_k = s (1 - s)`` with ``s = sigma(slope (F_k(w) - rho_k))``: clients near their threshold
    count most, those to whom the model appeals anyway, or by no means, hardly. They need
    thresholds: wrap it with `requiring`.

    Args:
      learning_rate: eta_l, a number (it may be traced) or a schedule of the round t = 1, 2, ...
      local_steps: tau, SGD steps of every client.
      batch_size: B examples per local step, drawn independently; None takes the full gradient.
      server_rate: eta_g.
      eps: the larger, the less a round moves whose clients all weigh little. Theory has
        ``N L_c^2 / (4 L_s)``, see `theory.maxfl.optimal_epsilon`, which trains too slowly.
      weight: "derivative", as above, or "sigmoid", ``q_k = s``, as Algorithm 1, line 8, prints it.
      slope: how steep the sigmoid is.

    Raises:
      ValueError: if `eps` is negative, another number is not positive, or `weight` is unknown.

    Example:
      >>> import jax
      >>> from fedjax_mm import full_participation, maxfl, quadratic, requiring, simulate
      >>> algorithm = requiring(maxfl(0.1, local_steps=5), learning_rate=0.1, num_steps=2)
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Cho et al., "Maximizing Global Model Appeal in Federated Learning", Algorithm 1.
    """
    local = local_sgd(learning_rate, local_steps, batch_size)
    check_positive("server_rate", server_rate)
    check_not_negative("eps", eps)
    check_positive("slope", slope)
    if weight not in ("derivative", "sigmoid"):
        raise ValueError(f"weight is {weight!r}; it must be 'derivative' or 'sigmoid'")

    def weight_of(task: Task, client: Int[Array, ""], params: Params) -> Float[Array, ""]:
        rho = demanding(task).threshold(client)
        x = slope * (demanding(task).client_loss(params, client) - rho)
        s = jax.nn.sigmoid(x)
        return s * jax.nn.sigmoid(-x) if weight == "derivative" else s

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
        q = weight_of(task, client, params)
        change = local.change(rng_key, round, task, client, params)
        return Contribution(scale_update(change, q), q, jnp.int32(local_steps)), client_state

    def server(
        round: Round, params: Params, server_state: ServerState, total: Contribution
    ) -> tuple[Params, ServerState]:
        del round
        weight = total.weight + eps
        # Where all weights underflow and eps is 0, nothing is added.
        rate = server_rate / jnp.where(weight == 0, 1, weight)
        change = jax.tree.map(lambda update: rate * update, total.update)
        return optax.apply_updates(params, change), server_state

    return Algorithm(init, client, server)
