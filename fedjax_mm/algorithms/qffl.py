"""q-FFL: clients with larger losses get larger weights."""

import jax
import jax.numpy as jnp
import optax

from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import NonNegative, part
from fedjax_mm.local import LocalSGD, stateless, steps_of

_LEAST_LOSS = 1e-10  # added to losses, because a negative power of 0 is infinite


@part
def qffl(local: LocalSGD, *, q: NonNegative) -> Algorithm:
    """q-FedAvg: ``w <- w - sum_k F_k^q dw_k / sum_k h_k``, for the objective ``sum F_k^(q+1)``.

    ``dw_k = (w - w_k) / eta`` after local steps, ``h_k = q F_k^(q-1) |dw_k|^2 + F_k^q / eta``, and
    F_k is the loss over all the client's training examples at w. The number of examples n_k is not
    used as a weight.

    Args:
      local: eta, E and the other settings of `local_sgd`, except `epochs` and `optimizer`.
      q: the exponent of the losses in the weights; 0 is unweighted FedAvg.

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
    steps = steps_of("qffl", local, only_sgd=True)

    def client(context: ClientContext) -> Contribution:
        loss = context.loss() + _LEAST_LOSS
        trained, rate, power = local.train(context), local.rate(context.round), loss**q
        step = jax.tree.map(lambda x: x / rate, trained.update)  # -dw
        squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(step))
        h = context.scale * (q * loss ** (q - 1) * squares + power / rate)
        update = scale_update(step, power * context.scale)
        return Contribution(update, h, jnp.int32(steps), trained.report)

    def server(params: Params, total: Contribution) -> Params:
        # If powers of small losses underflow to 0, divide by 1, because all updates are 0 too.
        h = jnp.where(total.weight == 0, 1, total.weight)
        return optax.apply_updates(params, jax.tree.map(lambda x: x / h, total.update))

    return stateless(client, server)
