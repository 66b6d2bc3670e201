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
from fedjax_mm.local import LocalSGD, loss_and_gradient, plain_server, steps_of, unit_steps

ApflState = dict[str, Any]
"""State of a client: its own model ``v``, and ``alpha``."""


@part
def apfl(local: LocalSGD, *, alpha: Mixture = 0.5, adaptive: bool = True) -> Algorithm:
    """APFL: clients evaluate with ``alpha_k v_k + (1 - alpha_k) w`` and train all three.

    A local step computes the gradients at w_k and at ``u = alpha_k v_k + (1 - alpha_k) w_k``, and
    sets ``w_k <- w_k - eta grad F_k(w_k)``, ``v_k <- v_k - eta grad F_k(u)`` and ``alpha_k <-
    clip(alpha_k - eta <v_k - w_k, grad F_k(u)>, 0, 1)``. The server averages the w_k as FedAvg
    does. The v_k start from the initial parameters, and do not change while a client does not
    participate.

    Args:
      local: eta, E and the other settings of `local_sgd`, except `epochs` and `optimizer`.
      alpha: the initial alpha_k, from 0 (FedAvg, if it is not adaptive) to 1 (local training).
      adaptive: whether clients train alpha_k.

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
    steps = steps_of("apfl", local, only_sgd=True)

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
            moves = [jax.tree.map(lambda g: rate * g, x) for x in (of_shared, of_mixed)]
            step = (own["alpha"] - new).astype(own["alpha"].dtype)
            return loss, {"w": moves[0], "v": moves[1], "alpha": step}

        # Moves already have the rate, because a rate of 0 could not be divided out of alpha's.
        trained = local._replace(optimizer=unit_steps).train(
            context, gradient_fn=gradient_fn, start={"w": context.params, **client_state}
        )
        shared, weight = trained.update.pop("w"), context.weight()
        new = jax.tree.map(jnp.add, client_state, trained.update)
        new = context.next_state(new, client_state)
        sent = scale_update(shared, weight)
        return Contribution(sent, weight, jnp.int32(2 * steps), trained.report), new

    return Algorithm(init, client, plain_server(), personal=mixed)


def mixed(params: Params, state: ApflState) -> Params:
    """``alpha v + (1 - alpha) w``."""
    share: Scalar = state["alpha"]
    return jax.tree.map(lambda w, v: share * v + (1 - share) * w, params, state["v"])
