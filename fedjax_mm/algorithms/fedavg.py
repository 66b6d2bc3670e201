"""Federated averaging, the local algorithm of MFA-Rand and MFA-RR."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm.algorithms.local import LocalOptimizer, train_locally
from fedjax_mm.base import (
    Algorithm,
    AnalyticTask,
    ClientState,
    Contribution,
    Params,
    Round,
    Scalar,
    Schedule,
    Task,
)
from fedjax_mm.checks import check_count, check_positive
from fedjax_mm.contribution import scale_update


class FedAvgState(NamedTuple):
    """What the server of one model keeps between rounds."""

    optimizer: optax.OptState
    population_weight: Float[Array, ""]  # sum of all N clients' weights


def fedavg(
    learning_rate: Scalar | Schedule,
    *,
    local_steps: int,
    batch_size: int | None = None,
    local_optimizer: LocalOptimizer = optax.sgd,
    server_optimizer: optax.GradientTransformation | None = None,
    server_scale: Literal["mean", "1/N"] = "mean",
    weighted: bool = True,
) -> Algorithm:
    """FedAvg: E local steps each, then ``w <- w + sum_k n_k (w_k - w) / sum_k n_k``.

    Args:
      learning_rate: eta, a number (it may be traced) or a schedule of the round t = 1, 2, ...
      local_steps: E.
      batch_size: B examples per local step; None takes the full gradient.
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
    check_positive("learning_rate", learning_rate)
    check_count("local_steps", local_steps)
    check_count("batch_size", batch_size)
    if server_scale not in ("mean", "1/N"):
        raise ValueError(f"server_scale is {server_scale!r}; it must be 'mean' or '1/N'")
    schedule = learning_rate if callable(learning_rate) else lambda t: learning_rate
    server = optax.sgd(1.0) if server_optimizer is None else server_optimizer

    def weight_of(task: Task, client: Int[Array, ""]) -> Float[Array, ""]:
        weight = task.weight(client)
        return weight if weighted else jnp.ones_like(weight)

    def init(task: Task, params: Params) -> tuple[FedAvgState, ClientState]:
        weights = jax.vmap(weight_of, (None, 0))(task, jnp.arange(task.num_clients))
        return FedAvgState(server.init(params), weights.sum()), ()

    def client_update(
        rng_key: PRNGKeyArray, rate: Scalar, task: Task, client: Int[Array, ""], params: Params
    ) -> Any:
        if batch_size is None and local_optimizer is optax.sgd and isinstance(task, AnalyticTask):
            return task.local_sgd(params, client, rate, local_steps)
        local = train_locally(
            rng_key, task, client, params, local_optimizer(rate), local_steps, batch_size
        )
        return jax.tree.map(jnp.subtract, local, params)

    def client(
        rng_key: PRNGKeyArray,
        round: Round,
        task: Task,
        client: Int[Array, ""],
        params: Params,
        server_state: FedAvgState,
        client_state: ClientState,
    ) -> tuple[Contribution, ClientState]:
        del server_state
        update = client_update(rng_key, schedule(round), task, client, params)
        weight = weight_of(task, client)
        gradients = jnp.int32(local_steps)
        return Contribution(scale_update(update, weight), weight, gradients), client_state

    def server_step(
        round: Round, params: Params, state: FedAvgState, total: Contribution
    ) -> tuple[Params, FedAvgState]:
        del round
        weight = total.weight if server_scale == "mean" else state.population_weight
        gradient = jax.tree.map(lambda update: -update / weight, total.update)
        updates, optimizer_state = server.update(gradient, state.optimizer, params)
        return optax.apply_updates(params, updates), state._replace(optimizer=optimizer_state)

    return Algorithm(init, client, server_step)
