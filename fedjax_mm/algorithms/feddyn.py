"""FedDyn: dynamic regularization, with which local minima and the global minimum agree."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Task
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import Positive, part
from fedjax_mm.local import LocalSGD, adding, check_local, keeping, proximal
from fedjax_mm.tasks.view import client_weights


@part
def feddyn(
    local: LocalSGD,
    *,
    alpha: Positive = 0.1,
    server_optimizer: optax.GradientTransformation | None = None,
    weighted: bool = False,
) -> Algorithm:
    """FedDyn: local steps on ``F_k(x) - <g_k, x> + alpha/2 |x - w|^2``, and a corrected mean.

    A client sets ``g_k <- g_k - alpha (w_k - w)``. The server sets ``h <- h - (alpha / N) sum (w_k
    - w)`` over the participants, and ``w <- mean w_k - h / alpha``, unweighted. All g_k and h start
    at 0. Clients that do not participate keep their g_k, and factors from the assignment are
    ignored. If it converges, g_k is the gradient of F_k at w, and the gradients sum to 0.

    Args:
      local: eta, E and the other settings of `local_sgd`.
      alpha: the strength of the regularization. The larger it is, the slower clients move.
      server_optimizer: an optimizer that gets minus ``mean (w_k - w) - h / alpha`` as its gradient;
        None adds it.
      weighted: whether the loss of client k has weight n_k rather than 1 in the sum that is
        minimized. The mean of w_k stays unweighted; instead, client k has ``alpha mean(n) / n_k``
        as its alpha.

    Raises:
      ValueError: if a number is not positive.

    Example:
      >>> import jax
      >>> from fedjax_mm import feddyn, full_participation, local_sgd, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = feddyn(local_sgd(0.1, steps=5), alpha=1.0)
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Acar et al., "Federated Learning Based on Dynamic Regularization" (2021).
    """
    check_local("feddyn", local)

    def init(task: Task, params: Params) -> tuple[Params, Params]:
        del task
        zeros = jax.tree.map(jnp.zeros_like, params)
        return zeros, zeros  # h, g_k

    def client(
        context: ClientContext, server_state: Params, client_state: Params
    ) -> tuple[Contribution, Params]:
        del server_state
        own_alpha, task = alpha, context.task
        if weighted:
            own_alpha *= client_weights(task).mean() / task.weight(context.client)
        held = proximal(context, own_alpha)

        def gradient_fn(own: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
            loss, gradient = held(own, batch)
            return loss, jax.tree.map(jnp.subtract, gradient, client_state)

        trained = local.train(context, gradient_fn=gradient_fn)
        # Ignore factors of the assignment, because h must remain the mean of all g_k.
        weight = jnp.where(jnp.asarray(context.takes_part), jnp.ones(()), 0)
        update = scale_update(trained.update, weight)
        new = jax.tree.map(lambda g, x: (g - own_alpha * x).astype(g.dtype), client_state, update)
        num_gradients = jnp.int32(local.num_steps(task, context.client))
        return Contribution(update, weight, num_gradients, trained.report), new

    def mean(context: base.ServerContext) -> tuple[Params, Params]:
        total, share = context.total, alpha / context.task.num_clients
        old = context.server_state
        h = jax.tree.map(lambda h, x: (h - share * x).astype(h.dtype), old, total.update)
        return jax.tree.map(lambda x, h: x / total.weight - h / alpha, total.update, h), h

    made = adding(client, mean, server_optimizer, init=init, num_steps=local.num_steps)
    return keeping(made, local)
