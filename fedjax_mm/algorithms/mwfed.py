"""MW-Fed: unsatisfied clients get larger weights and take more local steps."""

from typing import Annotated, TypeAlias

import jax
import jax.numpy as jnp
import optax
from annotated_types import Gt
from jaxtyping import Array, Float, Int

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Scalar, Task
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import part
from fedjax_mm.local import LocalSGD, adding, check_local, keeping, mean_update
from fedjax_mm.tasks.view import client_losses, thresholds

Weights: TypeAlias = Float[Array, " clients"]

_MOST = 4  # bound on local steps, in units of tau
_LEAST_WEIGHT = 1e-30  # avoids division by 0 if all weights in a round underflow


@part
def mwfed(
    local: LocalSGD,
    *,
    growth: Annotated[Scalar, Gt(1)] = 4.0,
    server_optimizer: optax.GradientTransformation | None = None,
) -> Algorithm:
    """MW-Fed: FedAvg with weights v_k and local steps that grow while ``F_k(w) >= rho_k``.

    Weights start at 1/N. Before round 1 and after each round with participants, the weights of
    clients whose (reported) loss is not below their threshold are multiplied by `growth`, and all
    weights are normalized. Client k takes ``clip(round(tau N v_k), 1, 4 tau)`` local steps, and the
    server averages participants by v_k. Each round costs one pass over all training data.
    Clients need thresholds, so wrap the task with `requiring`.

    Args:
      local: tau, the steps of a client with average weight, and the other settings of `local_sgd`;
        with `epochs`, every client has its own tau.
      growth: multiplies the weights of unsatisfied clients; greater than 1.
      server_optimizer: an optimizer that gets minus the mean update as its gradient; None adds it.

    Raises:
      ValueError: if a number is not positive or `growth` is not greater than 1.

    Example:
      >>> import jax
      >>> from fedjax_mm import full_participation, local_sgd, mwfed, simulate
      >>> from fedjax_mm.tasks import quadratic, requiring
      >>> task = requiring(quadratic(24, 4, mu=2e-4), jax.numpy.full(24, -0.01))
      >>> _, trace = simulate(
      ...     jax.random.key(0), task, mwfed(local_sgd(0.1, steps=5)), full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Blum et al., "One for One, or All for All" (2021), in the form that Cho et al. use as
    a baseline.
    """
    check_local("mwfed", local)

    def grown(task: Task, params: Params, log_weights: Weights) -> Weights:
        is_satisfied = client_losses(task, params) < thresholds(task)
        return jax.nn.log_softmax(log_weights + jnp.where(is_satisfied, 0, jnp.log(growth)))

    def init(task: Task, params: Params) -> tuple[Weights, base.ClientState]:
        uniform = jnp.full(task.num_clients, -jnp.log(float(task.num_clients)))
        return grown(task, params, uniform).astype(uniform.dtype), ()

    def num_steps(task: Task, client: base.Index, server_state: Weights) -> Int[Array, ""]:
        tau, share = local.num_steps(task, client), task.num_clients * jnp.exp(server_state[client])
        return jnp.clip(jnp.round(tau * share), 1, _MOST * tau).astype(jnp.int32)

    def client(
        context: ClientContext, server_state: Weights, client_state: base.ClientState
    ) -> tuple[Contribution, base.ClientState]:
        steps = num_steps(context.task, context.client, server_state)
        trained = local.train(context, num_steps=steps)
        weight = jnp.maximum(jnp.exp(server_state[context.client]), _LEAST_WEIGHT) * context.scale
        update = scale_update(trained.update, weight)
        return Contribution(update, weight, steps, trained.report), client_state

    def after(context: base.ServerContext, params: Params, old: Weights) -> Weights:
        return grown(context.task, params, old).astype(old.dtype)

    own = mean_update, server_optimizer
    made = adding(client, *own, init=init, num_steps=num_steps, after=after)
    return keeping(made, local)
