"""MIFA: averages the latest updates of all clients, including absent ones."""

from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Scalar, ServerState, Task
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import part
from fedjax_mm.local import LocalSGD, adding, check_local, keeping, weighing
from fedjax_mm.tasks.view import client_weights


@part
def mifa(
    local: LocalSGD,
    *,
    server_optimizer: optax.GradientTransformation | None = None,
    weighted: bool = True,
    memory: Literal["server", "clients"] = "server",
) -> Algorithm:
    """MIFA: ``w <- w + sum_k d_k h_k`` over all clients, where h_k is client k's latest update.

    ``d_k = n_k / sum n``, and h_k is 0 until the client has trained. The server also steps in
    rounds without participants. The updates are the clients' states, which take the memory of N M
    models per run for N clients and M models. Factors from the assignment are ignored, and clients
    that do not participate keep their h_k. `noisy` does not change the h_k, but it does change the
    sum if `memory` is "clients".

    Args:
      local: eta, E and the other settings of `local_sgd`.
      server_optimizer: an optimizer that gets minus the sum above as its gradient; None adds it.
      weighted: whether d_k is as above, or else 1 / N.
      memory: "server" adds up all h_k in every round. With "clients", each client keeps its h_k and
        sends its change, and the server has only the sum. That is equal up to rounding errors,
        which add up over rounds, and allows `client_states` of `Execution`.

    Raises:
      ValueError: if a number is not positive, or `memory` is unknown.

    Example:
      >>> import jax
      >>> from fedjax_mm import local_sgd, mfa_rand, mifa, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = mifa(local_sgd(0.1, steps=5))
      >>> state, _ = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, mfa_rand(24, 2), 10)
      >>> state.models[0].clients.shape  # models, clients, parameters
      (2, 24, 97)

    Reference: Gu, Huang, Zhang, Huang, "Fast Federated Learning in the Presence of Arbitrary Device
    Unavailability" (2021).
    """
    check_local("mifa", local)
    weight_of = weighing(weighted)

    def init(task: Task, params: Params) -> tuple[ServerState, Params]:
        del task
        zeros = jax.tree.map(jnp.zeros_like, params)
        return zeros if memory == "clients" else (), zeros

    def client(
        context: ClientContext, server_state: ServerState, client_state: Params
    ) -> tuple[Contribution, Params]:
        del server_state
        trained, weight = local.train(context), weight_of(context)
        new, update = context.next_state(trained.update, client_state), trained.update
        if memory == "clients":  # without the factor, which would stay in the sum
            change = jax.tree.map(jnp.subtract, new, client_state)
            update = scale_update(change, weight_of(context._replace(factor=None, takes_part=True)))
        else:
            update = scale_update(update, weight)
        num_gradients = jnp.int32(local.num_steps(context.task, context.client))
        return Contribution(update, weight, num_gradients, trained.report), new

    def mean(context: base.ServerContext) -> tuple[Params, ServerState]:
        weights = all_weights(context.task, weighted)
        if memory == "clients":
            # Asking for the dtype of the h_k reads none, and lets wrappers refuse that hide them
            # because they change the updates: the sum would no longer be that of the h_k.
            dtypes = jax.tree.map(lambda h: h.dtype, context.client_states)
            old, changes = context.server_state, context.total.update
            new = jax.tree.map(lambda x, y, dtype: (x + y).astype(dtype), old, changes, dtypes)
            return scale_update(new, 1 / weights.sum()), new
        # Adding only differences would accumulate rounding errors over rounds.
        return weighted_sum(context.client_states, weights), context.server_state

    made = adding(client, mean, server_optimizer, init=init, num_steps=local.num_steps)
    return keeping(made._replace(steps_idle=True), local)


def all_weights(task: Task, weighted: bool) -> Float[Array, " clients"]:
    """The clients' weights in sums over all of them, n_k or 1."""
    weights = client_weights(task)
    return weights if weighted else jnp.ones_like(weights)


def weighted_sum(
    updates: Params, weights: Float[Array, " clients"], factors: Scalar = 1.0
) -> Params:
    """``sum_k d_k factor_k h_k`` over all clients.

    Args:
      updates: h, with a leading axis of clients.
      weights: the clients' weights.
      factors: one per client, or one for all.
    """
    d = weights * factors / weights.sum()
    return jax.tree.map(lambda h: jnp.tensordot(d.astype(h.dtype), h, 1), updates)
