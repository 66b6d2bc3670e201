"""APFL: every client mixes a model of its own with the global one, and learns how much."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedjax_mm.base import (
    Algorithm,
    ClientContext,
    Contribution,
    Params,
    Scalar,
    ServerState,
    Task,
)
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import Mixture, part
from fedjax_mm.local import (
    LocalSGD,
    adding,
    check_local,
    each_by,
    keeping,
    loss_and_gradient,
    mean_update,
    weighing,
)

ApflState = dict[str, Any]
"""State of a client: its own model ``v``, and ``alpha``."""


@part
def apfl(
    local: LocalSGD,
    *,
    alpha: Mixture = 0.5,
    adaptive: bool = True,
    server_optimizer: optax.GradientTransformation | None = None,
    weighted: bool = True,
) -> Algorithm:
    """APFL: clients evaluate with ``alpha_k v_k + (1 - alpha_k) w`` and train all three.

    A local step computes the gradients at w_k and at ``u = alpha_k v_k + (1 - alpha_k) w_k``, and
    sets ``w_k <- w_k - eta grad F_k(w_k)``, ``v_k <- v_k - eta grad F_k(u)`` and ``alpha_k <-
    clip(alpha_k - eta <v_k - w_k, grad F_k(u)>, 0, 1)``. The server averages the w_k as FedAvg
    does. The v_k start from the initial parameters, and do not change while a client does not
    participate.

    Args:
      local: eta, E and the other settings of `local_sgd`. Momentum, clipping, weight decay and the
        optimizer are those of w_k and v_k, each by itself.
      alpha: the initial alpha_k, from 0 (FedAvg, if it is not adaptive) to 1 (local training).
      adaptive: whether clients train alpha_k.
      server_optimizer: an optimizer that gets minus the mean update as its gradient; None adds it.
      weighted: whether client k has weight n_k in the mean, rather than 1.

    Raises:
      ValueError: if `alpha` is not between 0 and 1 or another number is not positive.

    Example:
      >>> import jax
      >>> from fedjax_mm import apfl, full_participation, local_sgd, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> _, trace = simulate(jax.random.key(0), quadratic(24, 4, mu=2e-4),
      ...     apfl(local_sgd(0.1, steps=5)), full_participation(24), 10)
      >>> bool(trace.metrics["personal_loss"][-1, 0] < trace.metrics["loss"][-1, 0])
      True

    Reference: Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning" (2020), Algorithm
    1. The gradient of v_k there has a factor alpha_k, which FedJAX's implementation leaves out, as
    here; alpha_k is one number for each client.
    """
    check_local("apfl", local)
    weight_of = weighing(weighted)

    def init(task: Task, params: Params) -> tuple[ServerState, ApflState]:
        del task
        dtype = jnp.result_type(*jax.tree.leaves(params))
        return (), {"v": params, "alpha": jnp.asarray(alpha, dtype)}

    def client(
        context: ClientContext, server_state: ServerState, client_state: ApflState
    ) -> tuple[Contribution, ApflState]:
        del server_state
        both, rate = loss_and_gradient(context.task), local.rate(context.round)

        def gradient_fn(own: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
            loss, of_shared = both(own["w"], batch)
            _, of_mixed = both(mixed(own["w"], own), batch)
            away = jax.tree.map(jnp.subtract, own["v"], own["w"])
            slope = optax.tree.vdot(away, of_mixed) if adaptive else 0.0
            new = jnp.clip(own["alpha"] - rate * slope, 0, 1)
            step = (own["alpha"] - new).astype(own["alpha"].dtype)
            return loss, {"w": of_shared, "v": of_mixed, "alpha": step}

        optimizer = each_by(local.optimizer_at(context.round), "w", "v")
        start = {"w": context.params, **client_state}
        trained = local.train(context, gradient_fn=gradient_fn, start=start, optimizer=optimizer)
        shared, weight = trained.update.pop("w"), weight_of(context)
        new = jax.tree.map(jnp.add, client_state, trained.update)
        new = context.next_state(new, client_state)
        sent = scale_update(shared, weight)
        num_gradients = jnp.int32(2 * local.num_steps(context.task, context.client))
        return Contribution(sent, weight, num_gradients, trained.report), new

    made = adding(client, mean_update, server_optimizer, init=init, num_steps=local.num_steps)
    return keeping(made._replace(personal=mixed), local)


def mixed(params: Params, state: ApflState) -> Params:
    """``alpha v + (1 - alpha) w``."""
    share: Scalar = state["alpha"]
    return jax.tree.map(lambda w, v: share * v + (1 - share) * w, params, state["v"])
