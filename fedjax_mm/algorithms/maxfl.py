"""MaxFL: one global model that as many clients as possible prefer to their own."""

from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedjax_mm.base import Algorithm, Contribution, LocalProblem, Params, Scalar
from fedjax_mm.checks import check_not_negative, check_positive
from fedjax_mm.local import averaging, local_sgd
from fedjax_mm.schedules import Schedule


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
    thresholds: wrap the task with `requiring`.

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
      >>> task = requiring(quadratic(24, 4, mu=2e-4), jax.numpy.full(24, -0.01))
      >>> _, trace = simulate(
      ...     jax.random.key(0), task, maxfl(0.1, local_steps=5), full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Cho et al., "Maximizing Global Model Appeal in Federated Learning", Algorithm 1.
    """
    sgd = local_sgd(learning_rate, local_steps, batch_size)
    check_positive("server_rate", server_rate)
    check_not_negative("eps", eps)
    check_positive("slope", slope)
    if weight not in ("derivative", "sigmoid"):
        raise ValueError(f"weight is {weight!r}; it must be 'derivative' or 'sigmoid'")

    def q(local: LocalProblem) -> Float[Array, ""]:
        x = slope * (local.loss() - local.threshold())
        s = jax.nn.sigmoid(x)
        return local.scale * (s * jax.nn.sigmoid(-x) if weight == "derivative" else s)

    def server(params: Params, total: Contribution) -> Params:
        divisor = total.weight + eps
        # Where all weights underflow and eps is 0, nothing is added.
        rate = server_rate / jnp.where(divisor == 0, 1, divisor)
        return optax.apply_updates(params, jax.tree.map(lambda x: rate * x, total.update))

    return averaging(sgd.train, q, num_gradients=local_steps, server=server)
