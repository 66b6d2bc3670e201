"""Ditto: FedAvg's global model, plus a personal model for every client."""

import jax
import jax.numpy as jnp
import optax

from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, ServerState, Task
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import NonNegative, part
from fedjax_mm.local import LocalSGD, adding, check_local, keeping, mean_update, proximal, weighing


@part
def ditto(
    local: LocalSGD,
    *,
    lam: NonNegative,
    server_optimizer: optax.GradientTransformation | None = None,
    weighted: bool = True,
) -> Algorithm:
    """Ditto: FedAvg, and personal steps ``v_k <- v_k - eta (grad F_k(v_k) + lam (v_k - w))``.

    Personal models start from the global parameters. Whenever a client trains, its personal model
    takes the same number of steps on the same batches. Personal models are the clients' states,
    ``state.models[0].clients`` in the result of `simulate`. Metrics are those of the global model,
    except ``personal_loss`` and ``personal_accuracy``.

    Args:
      local: eta, E and the other settings of `local_sgd` for both models.
      lam: the strength of the pull towards the global model; 0 makes personal models independent.
      server_optimizer: an optimizer that gets minus the mean update as its gradient; None adds it.
      weighted: whether client k has weight n_k in the mean, rather than 1.

    Raises:
      ValueError: if `lam` is negative or another number is not positive.

    Example:
      >>> import jax
      >>> from fedjax_mm import ditto, full_participation, local_sgd, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = ditto(local_sgd(0.1, steps=5), lam=0.1)
      >>> state, _ = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> state.models[0].clients.shape  # models, clients, parameters
      (1, 24, 97)

    Reference: Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through
    Personalization" (2021).
    """
    check_local("ditto", local)
    weight_of = weighing(weighted)

    def init(task: Task, params: Params) -> tuple[ServerState, Params]:
        del task
        return (), params

    def client(
        context: ClientContext, server_state: ServerState, client_state: Params
    ) -> tuple[Contribution, Params]:
        del server_state
        weight, trained = weight_of(context), local.train(context)
        # Reuse the context, so that personal steps draw the same batches as global steps.
        # Personal steps begin with a fresh optimizer.
        step = local._replace(keeps=None).train(
            context, gradient_fn=proximal(context, lam), start=client_state
        )
        personal = jax.tree.map(jnp.add, client_state, step.update)
        # A client that does not participate keeps its model, as if it had not trained.
        personal = context.next_state(personal, client_state)
        num_gradients = jnp.int32(2 * local.num_steps(context.task, context.client))
        update = scale_update(trained.update, weight)
        return Contribution(update, weight, num_gradients, trained.report), personal

    def evaluated(params: Params, state: Params) -> Params:
        del params
        return state

    made = adding(client, mean_update, server_optimizer, init=init, num_steps=local.num_steps)
    return keeping(made._replace(personal=evaluated), local)
