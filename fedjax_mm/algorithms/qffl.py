"""q-FFL: clients with larger losses get larger weights."""

import jax
import jax.numpy as jnp
import optax

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import NonNegative, part
from fedjax_mm.local import LocalSGD, adding, check_local, keeping, weighing

_LEAST_LOSS = 1e-10  # added to losses, because a negative power of 0 is infinite


@part
def qffl(
    local: LocalSGD,
    *,
    q: NonNegative,
    server_optimizer: optax.GradientTransformation | None = None,
    weighted: bool = False,
) -> Algorithm:
    """q-FedAvg: ``w <- w - sum_k F_k^q dw_k / sum_k h_k``, for the objective ``sum F_k^(q+1)``.

    ``dw_k = (w - w_k) / eta`` after local steps, ``h_k = q F_k^(q-1) |dw_k|^2 + F_k^q / eta``, and
    F_k is the loss over all the client's training examples at w.

    Args:
      local: eta, E and the other settings of `local_sgd`.
      q: the exponent of the losses in the weights; 0 is FedAvg.
      server_optimizer: an optimizer that gets minus the step above as its gradient; None takes it.
      weighted: whether client k has weight n_k rather than 1 in the objective and in both sums.

    Raises:
      ValueError: if `q` is negative or another number is not positive.

    Example:
      >>> import jax, numpy as np
      >>> from fedjax_mm import full_participation, local_sgd, qffl, simulate
      >>> from fedjax_mm.tasks import least_squares
      >>> task = least_squares([np.eye(2), np.eye(2)[:1]], [np.ones(2), np.zeros(1)], ridge=1.0)
      >>> algorithm = qffl(local_sgd(0.1, steps=5), q=1.0)
      >>> _, trace = simulate(jax.random.key(0), task, algorithm, full_participation(2), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning" (2020).
    """
    check_local("qffl", local)
    weight_of = weighing(weighted)

    def client(
        context: ClientContext, server_state: base.ServerState, client_state: base.ClientState
    ) -> tuple[Contribution, base.ClientState]:
        del server_state
        loss, weight = context.loss() + _LEAST_LOSS, weight_of(context)
        trained, rate, power = local.train(context), local.rate(context.round), loss**q
        step = jax.tree.map(lambda x: x / rate, trained.update)  # -dw
        squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(step))
        h = weight * (q * loss ** (q - 1) * squares + power / rate)
        num_gradients = jnp.int32(local.num_steps(context.task, context.client))
        update = scale_update(step, power * weight)
        return Contribution(update, h, num_gradients, trained.report), client_state

    def mean(context: base.ServerContext) -> tuple[Params, base.ServerState]:
        # If powers of small losses underflow to 0, divide by 1, because all updates are 0 too.
        h = jnp.where(context.total.weight == 0, 1, context.total.weight)
        return jax.tree.map(lambda x: x / h, context.total.update), context.server_state

    return keeping(adding(client, mean, server_optimizer, num_steps=local.num_steps), local)
