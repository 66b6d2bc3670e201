"""MIFA: averages the latest updates of all clients, including absent ones."""

import jax
import jax.numpy as jnp
import optax

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Scalar, ServerState, Task
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import part
from fedjax_mm.local import LocalSGD, steps_of
from fedjax_mm.tasks.view import client_weights


@part
def mifa(local: LocalSGD) -> Algorithm:
    """MIFA: ``w <- w + sum_k d_k h_k`` over all clients, where h_k is client k's latest update.

    ``d_k = n_k / sum n``, and h_k is 0 until the client has trained. The server also steps in
    rounds without participants. The updates are the clients' states, which take the memory of N M
    models per run for N clients and M models. Factors from the assignment are ignored, and clients
    that do not participate keep their h_k. `noisy` does not change the h_k.

    Args:
      local: eta, E and the other settings of `local_sgd`, except `epochs`.

    Raises:
      ValueError: if a number is not positive.

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
    steps = steps_of("mifa", local)

    def init(task: Task, params: Params) -> tuple[ServerState, Params]:
        del task
        return (), jax.tree.map(jnp.zeros_like, params)

    def client(
        context: ClientContext, server_state: ServerState, client_state: Params
    ) -> tuple[Contribution, Params]:
        del server_state
        trained, weight = local.train(context), context.weight()
        update = scale_update(trained.update, weight)
        sent = Contribution(update, weight, jnp.int32(steps), trained.report)
        new = context.next_state(trained.update, client_state)
        return sent, new

    def server(context: base.ServerContext) -> tuple[Params, ServerState]:
        # Adding only differences would accumulate rounding errors over rounds.
        step = weighted_sum(context.task, context.client_states)
        return optax.apply_updates(context.params, step), context.server_state

    return Algorithm(init, client, server, steps_idle=True)


def weighted_sum(task: Task, updates: Params, factors: Scalar = 1.0) -> Params:
    """``sum_k d_k factor_k h_k`` over all clients.

    Args:
      task: gives the clients' weights.
      updates: h, with a leading axis of clients.
      factors: one per client, or one for all.
    """
    weights = client_weights(task)
    d = weights * factors / weights.sum()
    return jax.tree.map(lambda h: jnp.tensordot(d.astype(h.dtype), h, 1), updates)
