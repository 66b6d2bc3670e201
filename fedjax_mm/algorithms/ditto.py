"""Ditto: FedAvg's global model, and a personal model for every client."""

import jax
import jax.numpy as jnp

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Scalar, ServerState, Task
from fedjax_mm.checks import check_not_negative
from fedjax_mm.local import local_sgd, plain_server, proximal
from fedjax_mm.schedules import Schedule
from fedjax_mm.sums import scale_update


def ditto(
    learning_rate: Scalar | Schedule,
    *,
    lam: Scalar,
    local_steps: base.Steps,
    batch_size: base.BatchSize = None,
) -> Algorithm:
    """Ditto: FedAvg, and personal steps ``v_k <- v_k - eta (grad F_k(v_k) + lam (v_k - w))``.

    Personal models start from the global one's parameters. In each round in which a client trains,
    its personal model takes equally many steps on the same batches. Personal models are the
    clients' states, ``state.models[0].clients`` of `simulate`; metrics are the global model's.

    Args:
      learning_rate: eta for both models, a number (it may be traced) or a schedule of the round.
      lam: how strongly personal models are pulled to the global one; at 0 they are independent.
      local_steps: E, SGD steps of every client for each of its two models.
      batch_size: B examples per local step, drawn independently; None takes the full gradient.

    Raises:
      ValueError: if `lam` is negative or another number is not positive.

    Example:
      >>> import jax
      >>> from fedjax_mm import ditto, full_participation, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = ditto(0.1, lam=0.1, local_steps=5)
      >>> state, _ = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> state.models[0].clients.shape  # models, clients, parameters
      (1, 24, 97)

    Reference: Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through
    Personalization" (2021), Algorithm 1.
    """
    sgd = local_sgd(learning_rate, local_steps, batch_size)
    check_not_negative("lam", lam)

    def init(task: Task, params: Params) -> tuple[ServerState, Params]:
        del task
        return (), params

    def client(
        local: ClientContext, server_state: ServerState, client_state: Params
    ) -> tuple[Contribution, Params]:
        del server_state
        weight, change = local.weight(), sgd.train(local)
        # The same `local` has the same key: personal steps see the batches of the global ones.
        step = sgd.train(local, direction=proximal(local, lam), start=client_state)
        personal = jax.tree.map(jnp.add, client_state, step.update)
        update, num_gradients = scale_update(change.update, weight), jnp.int32(2 * local_steps)
        return Contribution(update, weight, num_gradients, change.report), personal

    return Algorithm(init, client, plain_server())
