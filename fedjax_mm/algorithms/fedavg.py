"""Federated averaging, the method behind MFA-Rand and MFA-RR."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Scalar, Steps, Task
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import TracedCount, check_argument, part
from fedjax_mm.checks.instances import check_optimizer
from fedjax_mm.local import LocalSGD, equal_weight, local_sgd
from fedjax_mm.schedules import Schedule
from fedjax_mm.tasks.view import client_weights


@part
def fedavg(
    local: LocalSGD | Scalar | Schedule,
    *,
    local_steps: TracedCount | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
    server_scale: Literal["mean", "1/N"] = "mean",
    weighted: bool = True,
) -> Algorithm:
    """FedAvg: E local steps per client, then ``w <- w + sum_k n_k (w_k - w) / sum_k n_k``.

    ``fedavg(0.1, local_steps=5)`` is shorthand for ``fedavg(local_sgd(0.1, steps=5))``.

    Args:
      local: eta, E and the other settings of `local_sgd`; or only eta, with `local_steps`.
      local_steps: E, if `local` is only eta.
      server_optimizer: an optimizer that receives the negative mean update as its gradient; None
        takes a step of size 1.
      server_scale: "mean" divides by the sum of the participants' weights. "1/N" divides by the sum
        of all clients' weights, as eq. (19) and Theorem 2 do.
      weighted: whether client k has weight n_k, its number of examples, rather than 1.

    Raises:
      ValueError: if a number is not positive or `server_scale` is unknown.

    Example:
      >>> import jax, optax
      >>> from fedjax_mm import fedavg, full_participation, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> task = quadratic(24, 4, mu=2e-4)
      >>> _, trace = simulate(
      ...     jax.random.key(0), task, fedavg(0.1, local_steps=5), full_participation(24), 10)
      >>> round(float(trace.metrics["loss"][-1, 0]), 6)
      -0.004798

    Reference: McMahan et al. (2017); Bhuyan, Moharir, Joshi, Algorithm 1.
    """
    sgd = _settings(local, local_steps)
    optimizer = optax.sgd(1.0) if server_optimizer is None else server_optimizer
    check_optimizer("server_optimizer", optimizer)
    weight_of = ClientContext.weight if weighted else equal_weight

    def init(task: Task, params: Params) -> tuple[Any, base.ClientState]:
        del task
        return optimizer.init(params), ()

    def client(
        context: ClientContext, server_state: Any, client_state: base.ClientState
    ) -> tuple[Contribution, base.ClientState]:
        del server_state
        trained, weight = sgd.train_or_solve(context), weight_of(context)
        num_gradients = jnp.int32(sgd.num_steps(context.task, context.client))
        update = scale_update(trained.update, weight)
        return Contribution(update, weight, num_gradients, trained.report), client_state

    def server(context: base.ServerContext) -> tuple[Params, Any]:
        weight = context.total.weight
        if server_scale == "1/N":
            weights = client_weights(context.task)
            weight = jnp.sum(weights if weighted else jnp.ones_like(weights))
        # Negate the mean update, because optax descends.
        gradient = jax.tree.map(lambda update: -update / weight, context.total.update)
        updates, state = optimizer.update(gradient, context.server_state, context.params)
        return optax.apply_updates(context.params, updates), state

    return Algorithm(init, client, server, lambda task, k, _: sgd.num_steps(task, k))


def _settings(local: LocalSGD | Scalar | Schedule, local_steps: Steps | None) -> LocalSGD:
    if not isinstance(local, LocalSGD):
        settings = local_sgd(local, steps=local_steps)
        check_argument("local_steps", local_steps, TracedCount)
        return settings
    if local_steps is not None:
        raise ValueError(f"local_steps is {local_steps}; give it to local_sgd, as steps")
    if local.steps is None:
        raise ValueError("neither local steps nor epochs are given; give one of the two")
    return local
