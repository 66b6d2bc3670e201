"""Federated averaging, the method behind MFA-Rand and MFA-RR."""

from typing import Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_mm import base
from fedjax_mm.base import Algorithm, Params, Scalar, Steps
from fedjax_mm.checks.annotations import TracedCount, check_argument, part
from fedjax_mm.local import LocalSGD, averaging, check_local, keeping, local_sgd, weighing
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
      server_optimizer: an optimizer that gets minus the mean update as its gradient; None adds it.
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

    def mean(context: base.ServerContext) -> tuple[Params, base.ServerState]:
        weight = context.total.weight
        if server_scale == "1/N":
            weights = client_weights(context.task)
            weight = jnp.sum(weights if weighted else jnp.ones_like(weights))
        added = jax.tree.map(lambda update: update / weight, context.total.update)
        return added, context.server_state

    how = sgd.train_or_solve, weighing(weighted), server_optimizer
    return keeping(averaging(*how, num_gradients=sgd.num_steps, mean=mean), sgd)


def _settings(local: LocalSGD | Scalar | Schedule, local_steps: Steps | None) -> LocalSGD:
    if not isinstance(local, LocalSGD):
        settings = local_sgd(local, steps=local_steps)
        check_argument("local_steps", local_steps, TracedCount)
        return settings
    if local_steps is not None:
        raise ValueError(f"local_steps is {local_steps}; give it to local_sgd, as steps")
    return check_local("fedavg", local)
