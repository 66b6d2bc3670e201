"""Agnostic federated learning, which minimizes the loss of the worst-case mixture of clients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Task
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import Positive, part
from fedjax_mm.checks.instances import check_optimizer
from fedjax_mm.local import LocalSGD, check_local, keeping, optimized


class AFLState(NamedTuple):
    """Server state of a model whose parameters are the running average of the iterates."""

    iterate: Params  # w, from which clients start
    mixture: Float[Array, " clients"]  # lambda
    num_rounds: Int[Array, ""]  # rounds with participants
    optimizer: Any = ()  # the state of the server's optimizer


class LastLoss(NamedTuple):
    """A client's loss in the last round it took part in."""

    round: Int[Array, ""]  # 0 is never
    loss: Float[Array, ""]


@part
def afl(
    local: LocalSGD,
    *,
    mixture_rate: Positive,
    server_optimizer: optax.GradientTransformation | None = None,
) -> Algorithm:
    """AFL: ``w <- w + sum lambda_k (w_k - w)``, ``lambda <- project(lambda + eta_lambda F_k)``.

    lambda lies in the simplex over all N clients and starts at 1/N. For a participant, F_k is the
    loss over all of its training examples at w, and for an absent client, F_k is 0. The recorded
    parameters are the running average of w, and the server state holds w itself.

    Args:
      local: eta_w, B and the other settings of `local_sgd`. By default clients take 1 step, as in
        the paper.
      mixture_rate: eta_lambda, the step size of the weights lambda.
      server_optimizer: an optimizer that gets minus the sum above as its gradient; None adds it.

    Raises:
      ValueError: if a number is not positive.

    Example:
      >>> import jax, numpy as np
      >>> from fedjax_mm import afl, full_participation, local_sgd, simulate
      >>> from fedjax_mm.tasks import least_squares
      >>> task = least_squares([np.eye(2), np.eye(2)[:1]], [np.ones(2), np.zeros(1)], ridge=1.0)
      >>> algorithm = afl(local_sgd(0.1), mixture_rate=0.1)
      >>> state, _ = simulate(
      ...     jax.random.key(0), task, algorithm, full_participation(2), 10)
      >>> bool(state.models[0].server.mixture[0, 0] > 0.5)  # the first client loses more
      True

    Reference: Mohri, Sivek, Suresh, "Agnostic Federated Learning" (2019), Stochastic-AFL.
    """
    sgd, optimizer = check_local("afl", local, default=1), server_optimizer
    if optimizer is not None:
        check_optimizer("server_optimizer", optimizer)

    def init(task: Task, params: Params) -> tuple[AFLState, LastLoss]:
        uniform = jnp.full(task.num_clients, 1 / task.num_clients)
        own = () if optimizer is None else optimizer.init(params)
        return AFLState(params, uniform, jnp.int32(0), own), LastLoss(jnp.int32(0), jnp.zeros(()))

    def client(
        context: ClientContext, server_state: AFLState, client_state: LastLoss
    ) -> tuple[Contribution, LastLoss]:
        context = context._replace(params=server_state.iterate)
        loss, trained = context.loss().astype(client_state.loss.dtype), sgd.train(context)
        update = scale_update(trained.update, context.scale * server_state.mixture[context.client])
        num_gradients = jnp.int32(sgd.num_steps(context.task, context.client))
        sent = Contribution(update, jnp.ones(()), num_gradients, trained.report)
        # The losses of clients that do not participate are ignored in this round.
        last = jnp.where(context.takes_part, context.round, client_state.round)
        return sent, LastLoss(jnp.asarray(last, jnp.int32), loss)

    def server(context: base.ServerContext) -> tuple[Params, AFLState]:
        iterate, mixture, count, own = context.server_state
        count += 1
        iterate, own = optimized(optimizer, iterate, context.total.update, own)
        step = jax.tree.map(lambda new, old: (new - old) / count, iterate, context.params)
        # Read the losses from the clients' states, because the server sees only sums of
        # contributions.
        last = context.client_states
        losses = jnp.where(last.round == context.round, last.loss, 0)
        mixture = optax.projections.projection_simplex(mixture + mixture_rate * losses)
        state = AFLState(iterate, mixture.astype(losses.dtype), count, own)
        return optax.apply_updates(context.params, step), state

    return keeping(Algorithm(init, client, server, sgd.num_steps), sgd)
