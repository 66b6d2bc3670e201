"""q-FFL: clients with larger losses weigh more."""

import jax
import jax.numpy as jnp
import optax

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Scalar
from fedjax_mm.checks import check_not_negative
from fedjax_mm.local import local_sgd, stateless
from fedjax_mm.schedules import Schedule
from fedjax_mm.sums import scale_update

_LEAST_LOSS = 1e-10  # added to losses: a negative power of 0 is infinite


def qffl(
    learning_rate: Scalar | Schedule,
    *,
    q: Scalar,
    local_steps: base.Steps,
    batch_size: base.BatchSize = None,
) -> Algorithm:
    """q-FedAvg: ``w <- w - sum_k F_k^q dw_k / sum_k h_k``, for the objective ``sum F_k^(q+1)``.

    ``dw_k = (w - w_k) / eta`` after local steps, ``h_k = q F_k^(q-1) |dw_k|^2 + F_k^q / eta``, and
    F_k is the loss of all the client's training examples at w. Clients' numbers of examples do not
    count.

    Args:
      learning_rate: eta, a number (it may be traced) or a schedule of the round t = 1, 2, ...
      q: the power of losses in the weights; 0 is FedAvg, unweighted.
      local_steps: E, SGD steps of every client.
      batch_size: B examples per local step, drawn independently; None takes the full gradient.

    Raises:
      ValueError: if `q` is negative or another number is not positive.

    Example:
      >>> import jax, numpy as np
      >>> from fedjax_mm import full_participation, qffl, simulate
      >>> from fedjax_mm.tasks import least_squares
      >>> task = least_squares([np.eye(2), np.eye(2)[:1]], [np.ones(2), np.zeros(1)], ridge=1.0)
      >>> algorithm = qffl(0.1, q=1.0, local_steps=5)
      >>> _, trace = simulate(jax.random.key(0), task, algorithm, full_participation(2), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning" (2020),
    Algorithm 2.
    """
    sgd = local_sgd(learning_rate, local_steps, batch_size)
    check_not_negative("q", q)

    def client(local: ClientContext) -> Contribution:
        loss = local.loss() + _LEAST_LOSS
        change, rate, power = sgd.train(local), sgd.rate(local.round), loss**q
        step = jax.tree.map(lambda x: x / rate, change.update)  # -dw
        squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(step))
        h = local.scale * (q * loss ** (q - 1) * squares + power / rate)
        update = scale_update(step, power * local.scale)
        return Contribution(update, h, jnp.int32(local_steps), change.report)

    def server(params: Params, total: Contribution) -> Params:
        # Powers of small losses may underflow to 0: dividing by 1 changes nothing then.
        h = jnp.where(total.weight == 0, 1, total.weight)
        return optax.apply_updates(params, jax.tree.map(lambda x: x / h, total.update))

    return stateless(client, server)
