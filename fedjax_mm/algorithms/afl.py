"""Agnostic federated learning: the best model for the worst mixture of clients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm.algorithms.local import local_sgd
from fedjax_mm.algorithms.views import measured
from fedjax_mm.base import Algorithm, Contribution, Params, Round, Scalar, Schedule, Task
from fedjax_mm.checks import check_positive
from fedjax_mm.contribution import scale_update


class AFLState(NamedTuple):
    """What the server of one model keeps between rounds."""

    mixture: Float[Array, " clients"]  # lambda
    average: Params  # of w after each of them
    num_rounds: Int[Array, ""]  # in which somebody trained


class Report(NamedTuple):
    """What one client lost when it trained last."""

    round: Int[Array, ""]
    loss: Float[Array, ""]


def afl(
    learning_rate: Scalar | Schedule,
    *,
    mixture_rate: Scalar,
    batch_size: int | None = None,
) -> Algorithm:
    """AFL: ``w <- w - eta_w sum lambda_k g_k``, ``lambda <- project(lambda + eta_lambda F_k)``.

    lambda is on the simplex of all N clients, from 1/N on; a participant adds the loss of all its
    training examples at w, the others add nothing. What is recorded and put out is the running
    average of w.

    Args:
      learning_rate: eta_w, a number (it may be traced) or a schedule of the round t = 1, 2, ...
      mixture_rate: eta_lambda.
      batch_size: B examples of the gradient g_k, drawn independently; None takes all.

    Raises:
      ValueError: if a number is not positive.

    Example:
      >>> import jax, numpy as np
      >>> from fedjax_mm import afl, full_participation, least_squares, simulate
      >>> task = least_squares([np.eye(2), np.eye(2)[:1]], [np.ones(2), np.zeros(1)], ridge=1.0)
      >>> state, _ = simulate(
      ...     jax.random.key(0), task, afl(0.1, mixture_rate=0.1), full_participation(2), 10)
      >>> bool(state.models.server.mixture[0, 0] > 0.5)  # the first client loses more
      True

    Reference: Mohri, Sivek, Suresh, "Agnostic Federated Learning" (2019), Stochastic-AFL.
    """
    local = local_sgd(learning_rate, 1, batch_size)
    check_positive("mixture_rate", mixture_rate)

    def init(task: Task, params: Params) -> tuple[AFLState, Report]:
        uniform = jnp.full(task.num_clients, 1 / task.num_clients)
        return AFLState(uniform, params, jnp.int32(0)), Report(jnp.int32(0), jnp.zeros(()))

    def begin(
        round: Round, task: Task, params: Params, server_state: AFLState, client_states: Report
    ) -> AFLState:
        # The end of the round before: the server sees sums, but here the states of all clients.
        del params
        losses, when = client_states.loss[: task.num_clients], client_states.round
        is_new = when[: task.num_clients] == jnp.maximum(round - 1, 1)
        mixture = server_state.mixture + mixture_rate * jnp.where(is_new, losses, 0)
        mixture = optax.projections.projection_simplex(mixture)
        return server_state._replace(mixture=mixture.astype(losses.dtype))

    def client(
        rng_key: PRNGKeyArray,
        round: Round,
        task: Task,
        client: Int[Array, ""],
        params: Params,
        server_state: AFLState,
        client_state: Report,
    ) -> tuple[Contribution, Report]:
        loss = measured(task).client_loss(params, client).astype(client_state.loss.dtype)
        change = local.change(rng_key, round, task, client, params)
        update = scale_update(change, server_state.mixture[client])
        report = Report(jnp.asarray(round, jnp.int32), loss)
        return Contribution(update, jnp.ones(()), jnp.int32(1)), report

    def server(
        round: Round, params: Params, server_state: AFLState, total: Contribution
    ) -> tuple[Params, AFLState]:
        del round
        params, count = optax.apply_updates(params, total.update), server_state.num_rounds + 1
        step = jax.tree.map(lambda new, old: (new - old) / count, params, server_state.average)
        average = optax.apply_updates(server_state.average, step)
        return params, server_state._replace(average=average, num_rounds=count)

    def output(params: Params, server_state: AFLState) -> Params:
        del params
        return server_state.average

    return Algorithm(init, client, server, begin=begin, output=output)
