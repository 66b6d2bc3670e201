"""MaxFL: the global model with the largest GM-Appeal, the share of clients it appeals to."""

from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Params, Steps, Task
from fedjax_mm.checks.annotations import NonNegative, Positive, TracedCount, part
from fedjax_mm.local import LocalSGD, averaging, check_local, keeping


@part
def maxfl(
    local: LocalSGD,
    *,
    server_rate: Positive = 1.0,
    eps: NonNegative = 1e-2,
    weight: Literal["derivative", "sigmoid"] = "derivative",
    slope: Positive = 1.0,
    tuning_steps: TracedCount | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
) -> Algorithm:
    """MaxFL: ``w <- w + eta_g sum_k q_k (w_k - w) / (sum_k q_k + eps)``, eqs. (4) and (6).

    The objective, eq. (3), is the mean of ``sigma(F_k(w) - rho_k)``, a smooth count of the clients
    to whom the model does not appeal. So ``q_k = s (1 - s)`` with ``s = sigma(slope (F_k(w) -
    rho_k))``. Clients near their threshold have the largest weights, and clients far above or below
    it almost none. Clients need thresholds, so wrap the task with `requiring`.

    Args:
      local: eta_l, tau steps and the other settings of `local_sgd`.
      server_rate: eta_g, the step size of the server.
      eps: shrinks the step in rounds where all weights are small. The theoretical value, ``N L_c^2
        / (4 L_s)`` (`theory.maxfl.optimal_epsilon`), trains too slowly in practice.
      weight: "derivative", as above, or "sigmoid", ``q_k = s``, as in Algorithm 1, line 8.
      slope: the steepness of the sigmoid.
      tuning_steps: for clients that fine-tune the model (section 5.1), the number of local steps
        from w before ``F_k`` in q_k is evaluated. None evaluates ``F_k(w)``.
      server_optimizer: an optimizer that gets minus the step above as its gradient; None takes it.

    Raises:
      ValueError: if `eps` is negative, another number is not positive, or `weight` is unknown.

    Example:
      >>> import jax
      >>> from fedjax_mm import full_participation, local_sgd, maxfl, simulate
      >>> from fedjax_mm.tasks import quadratic, requiring
      >>> task = requiring(quadratic(24, 4, mu=2e-4), jax.numpy.full(24, -0.01))
      >>> _, trace = simulate(
      ...     jax.random.key(0), task, maxfl(local_sgd(0.1, steps=5)), full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Cho et al., "Maximizing Global Model Appeal in Federated Learning", Algorithm 1.
    """
    check_local("maxfl", local)

    def tuned(context: ClientContext) -> ClientContext:
        if tuning_steps is None:
            return context
        trained = local.train(context, num_steps=jnp.asarray(tuning_steps, jnp.int32))
        return context._replace(params=optax.apply_updates(context.params, trained.update))

    def q(context: ClientContext) -> Float[Array, ""]:
        x = slope * (tuned(context).loss() - context.threshold())
        s = jax.nn.sigmoid(x)  # 1 - s would lose all precision for large x
        return context.scale * (s * jax.nn.sigmoid(-x) if weight == "derivative" else s)

    def mean(context: base.ServerContext) -> tuple[Params, base.ServerState]:
        divisor = context.total.weight + eps
        # All weights may underflow with eps = 0. All updates are then 0 too, so divide by 1.
        rate = server_rate / jnp.where(divisor == 0, 1, divisor)
        added = jax.tree.map(lambda x: rate * x, context.total.update)
        return added, context.server_state

    def num_gradients(task: Task, client: base.Index) -> Steps:
        num_steps = local.num_steps(task, client)
        # Fine-tuning and local training begin with the same steps and batches. Count the longer.
        return num_steps if tuning_steps is None else jnp.maximum(num_steps, tuning_steps)

    how = local.train, q, server_optimizer
    return keeping(averaging(*how, num_gradients=num_gradients, mean=mean), local)
