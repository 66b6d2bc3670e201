"""Federated averaging, the local algorithm of MFA-Rand and MFA-RR."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from fedjax_mm.base import (
    Algorithm,
    AnalyticTask,
    Batching,
    ClientState,
    Contribution,
    EpochTask,
    Index,
    LocalProblem,
    MeasuredTask,
    Params,
    Round,
    Scalar,
    ServerState,
    Task,
)
from fedjax_mm.checks import check_count, check_positive, needs
from fedjax_mm.local import Change, LocalOptimizer, one, train_locally
from fedjax_mm.schedules import Schedule
from fedjax_mm.sums import scale_update


class FedAvgState(NamedTuple):
    """The server's state of one model."""

    optimizer: optax.OptState
    population_weight: Float[Array, ""]  # sum of all N clients' weights


def fedavg(
    learning_rate: Scalar | Schedule,
    *,
    local_steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | Schedule | None = None,
    order: Literal["iid", "epochs"] | None = None,
    local_optimizer: LocalOptimizer = optax.sgd,
    server_optimizer: optax.GradientTransformation | None = None,
    server_scale: Literal["mean", "1/N"] = "mean",
    weighted: bool = True,
) -> Algorithm:
    """FedAvg: E local steps each, then ``w <- w + sum_k n_k (w_k - w) / sum_k n_k``.

    Args:
      learning_rate: eta, a number (it may be traced) or a schedule of the round t = 1, 2, ...
      local_steps: E, for every client; or else give `epochs`.
      epochs: passes over the client's examples, of ``ceil(n_k / B)`` local steps each.
      batch_size: B examples per local step; None takes the full gradient. A schedule N_s(t) takes,
        in round t, that many of the client's examples without replacement for each step, at most
        all of them.
      order: "iid" draws every example of a batch independently, "epochs" goes through all in a
        fresh order again and again; by default "epochs" where `epochs` is given, else "iid".
      local_optimizer: from the round's rate to an optax optimizer, restarted every round. With
        `optax.sgd` and full gradients a task may use its own closed form.
      server_optimizer: receives minus the mean update as a gradient; None is a plain step of size
        1.
      server_scale: "mean" divides by the participants' weights; "1/N" by those of all clients, the
        factor of eq. (19), for which Theorem 2 is proven.
      weighted: weight clients by their number of examples n_k; False gives everyone the weight 1.

    Raises:
      ValueError: if a number is not positive or `server_scale` is unknown.

    Example:
      >>> import jax, optax
      >>> from fedjax_mm import fedavg, full_participation, quadratic, simulate
      >>> task = quadratic(24, 4, mu=2e-4)
      >>> _, trace = simulate(
      ...     jax.random.key(0), task, fedavg(0.1, local_steps=5), full_participation(24), 10)
      >>> round(float(trace.metrics["loss"][-1, 0]), 6)
      -0.004798

    Reference: McMahan et al. (2017); Bhuyan, Moharir, Joshi, Algorithm 1.
    """
    _check_options(learning_rate, local_steps, epochs, batch_size, order, server_scale)
    schedule = learning_rate if callable(learning_rate) else lambda t: learning_rate
    is_plain = batch_size is None and local_optimizer is optax.sgd
    order = order or ("iid" if epochs is None else "epochs")
    server = optax.sgd(1.0) if server_optimizer is None else server_optimizer
    weight_of = LocalProblem.weight if weighted else one

    def num_steps(task: Task, client: Index, server_state: ServerState) -> int | Int[Array, ""]:
        del server_state
        if local_steps is not None:
            return local_steps
        assert epochs is not None
        assert not callable(batch_size)
        return epochs * needs(task, EpochTask).num_batches(client, batch_size)

    def init(task: Task, params: Params) -> tuple[FedAvgState, ClientState]:
        weights = jax.vmap(task.weight)(jnp.arange(task.num_clients))
        weights = weights if weighted else jnp.ones_like(weights)
        return FedAvgState(server.init(params), weights.sum()), ()

    def change(local: LocalProblem) -> Change:
        rate, task = schedule(local.round), local.task
        if is_plain and local_steps is not None and isinstance(task, AnalyticTask):
            update = task.local_sgd(local.params, local.client, rate, local_steps)
            loss = local.loss() if isinstance(task, MeasuredTask) else jnp.full((), jnp.nan)
            return Change(update, {"loss": loss})
        if callable(batch_size):
            how = Batching(limit=batch_size(local.round))
        else:
            how = Batching(batch_size, order)
        steps = num_steps(task, local.client, ())
        trained = train_locally(local, local_optimizer(rate), steps, how)
        return Change.between(local.params, *trained)

    def client(
        local: LocalProblem, server_state: FedAvgState, client_state: ClientState
    ) -> tuple[Contribution, ClientState]:
        del server_state
        trained, weight = change(local), weight_of(local)
        num_gradients = jnp.int32(num_steps(local.task, local.client, ()))
        update = scale_update(trained.update, weight)
        return Contribution(update, weight, num_gradients, trained.report), client_state

    def server_step(
        round: Round,
        task: Task,
        params: Params,
        server_state: FedAvgState,
        client_states: ClientState,
        total: Contribution,
    ) -> tuple[Params, FedAvgState]:
        del round, task, client_states
        optimizer, population_weight = server_state
        weight = total.weight if server_scale == "mean" else population_weight
        gradient = jax.tree.map(lambda update: -update / weight, total.update)
        updates, optimizer = server.update(gradient, optimizer, params)
        return optax.apply_updates(params, updates), FedAvgState(optimizer, population_weight)

    return Algorithm(init, client, server_step, num_steps)


def _check_options(
    learning_rate: Any,
    local_steps: int | None,
    epochs: int | None,
    batch_size: Any,
    order: str | None,
    server_scale: str,
) -> None:
    """Raises `ValueError` for options that are wrong or do not go together."""
    check_positive("learning_rate", learning_rate)
    check_count("local_steps", local_steps)
    check_count("epochs", epochs)
    if (local_steps is None) == (epochs is None):
        raise ValueError(f"local_steps is {local_steps}, epochs is {epochs}; give one of the two")
    if not callable(batch_size):
        check_count("batch_size", batch_size)
    if order not in ("iid", "epochs", None):
        raise ValueError(f"order is {order!r}; it must be 'iid', 'epochs' or None")
    if callable(batch_size) and (epochs is not None or order is not None):
        raise ValueError(
            "a schedule of sample sizes draws a sample for each step: give local_steps, and no "
            "epochs or order"
        )
    if order is not None and batch_size is None:
        raise ValueError(f"order is {order!r}, but steps take all examples; give a batch_size")
    if order == "iid" and epochs is not None:
        raise ValueError("epochs of iid draws would not see every example; give local_steps")
    if server_scale not in ("mean", "1/N"):
        raise ValueError(f"server_scale is {server_scale!r}; it must be 'mean' or '1/N'")
