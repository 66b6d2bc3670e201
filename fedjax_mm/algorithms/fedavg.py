"""Federated averaging, the method of MFA-Rand and MFA-RR."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Scalar, Task
from fedjax_mm.checks import check_choice
from fedjax_mm.local import LocalOptimizer, equal_weight, local_sgd
from fedjax_mm.parts import check_optimizer
from fedjax_mm.schedules import Schedule
from fedjax_mm.sums import scale_update
from fedjax_mm.tasks.view import client_weights


def fedavg(
    learning_rate: Scalar | Schedule,
    *,
    local_steps: base.Steps | None = None,
    epochs: int | None = None,
    batch_size: base.BatchSize | Schedule = None,
    order: Literal["iid", "epochs"] | None = None,
    local_optimizer: LocalOptimizer = optax.sgd,
    server_optimizer: optax.GradientTransformation | None = None,
    server_scale: Literal["mean", "1/N"] = "mean",
    weighted: bool = True,
) -> Algorithm:
    """FedAvg: E local steps each, then ``w <- w + sum_k n_k (w_k - w) / sum_k n_k``.

    Args:
      learning_rate: eta, a number (it may be traced) or a schedule of the round t = 1, 2, ...
      local_steps: E, for every client; give this or `epochs`.
      epochs: passes over the client's examples, of ``ceil(n_k / B)`` local steps each.
      batch_size: B examples per local step; None takes the full gradient. With a schedule N_s(t),
        each step of round t draws N_s(t) of the client's examples without replacement, at most all.
      order: "iid" draws every example of a batch independently; "epochs" goes through all examples
        in a new order for each epoch. The default is "epochs" if `epochs` is given, else "iid".
      local_optimizer: makes an optax optimizer from the round's rate, anew in every round. With
        `optax.sgd` and full gradients a task may use its closed form.
      server_optimizer: gets minus the mean update as a gradient; None is a step of size 1.
      server_scale: "mean" divides by the participants' weights. "1/N" divides by the weights of all
        clients, as eq. (19) and Theorem 2 do.
      weighted: whether clients weigh n_k, their number of examples; else each weighs 1.

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
    sgd = local_sgd(learning_rate, local_steps, batch_size, epochs, order, local_optimizer)
    check_choice("server_scale", server_scale, "mean", "1/N")
    optimizer = optax.sgd(1.0) if server_optimizer is None else server_optimizer
    check_optimizer("server_optimizer", optimizer)
    weight_of = ClientContext.weight if weighted else equal_weight

    def num_steps(task: Task, client: base.Index, server_state: Any) -> base.Steps:
        del server_state
        return sgd.num_steps(task, client)

    def init(task: Task, params: Params) -> tuple[Any, base.ClientState]:
        del task
        return optimizer.init(params), ()

    def client(
        local: ClientContext, server_state: Any, client_state: base.ClientState
    ) -> tuple[Contribution, base.ClientState]:
        del server_state
        change, weight = sgd.train_or_solve(local), weight_of(local)
        num_gradients = jnp.int32(sgd.num_steps(local.task, local.client))
        update = scale_update(change.update, weight)
        return Contribution(update, weight, num_gradients, change.report), client_state

    def server(given: base.ServerContext) -> tuple[Params, Any]:
        weight = given.total.weight
        if server_scale == "1/N":
            weights = client_weights(given.task)
            weight = jnp.sum(weights if weighted else jnp.ones_like(weights))
        # Minus the mean change is the gradient that optax descends.
        gradient = jax.tree.map(lambda update: -update / weight, given.total.update)
        updates, state = optimizer.update(gradient, given.server_state, given.params)
        return optax.apply_updates(given.params, updates), state

    return Algorithm(init, client, server, num_steps, sgd.equal_steps)
