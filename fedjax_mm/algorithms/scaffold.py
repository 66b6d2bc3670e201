"""SCAFFOLD: control variates against the drift of clients that take many local steps."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Scalar, Task
from fedjax_mm.checks import check_choice, check_positive
from fedjax_mm.local import equal_weight, local_sgd
from fedjax_mm.schedules import Schedule
from fedjax_mm.sums import scale_update


def scaffold(
    learning_rate: Scalar | Schedule,
    *,
    local_steps: base.Steps,
    batch_size: base.BatchSize = None,
    server_rate: Scalar = 1.0,
    option: Literal["I", "II"] = "II",
) -> Algorithm:
    """SCAFFOLD: local steps ``y <- y - eta_l (grad F_k(y) - c_k + c)`` against client drift.

    After K steps a client sets ``c_k <- c_k - c + (w - y) / (K eta_l)`` (option II). The server
    sets ``w <- w + eta_g mean(y - w)``, unweighted, and ``c <- c + (1/N) sum (new c_k - old c_k)``.

    Args:
      learning_rate: eta_l, a number (it may be traced) or a schedule of the round t = 1, 2, ...
      local_steps: K, SGD steps of every client.
      batch_size: B examples per local step, drawn independently; None takes the full gradient.
      server_rate: eta_g.
      option: "II", or "I", where the new c_k is the gradient of all the client's examples at w.
        "I" costs one more gradient and needs a loss that is a mean over the batch.

    Raises:
      ValueError: if a number is not positive or `option` is unknown.

    Example:
      >>> import jax
      >>> from fedjax_mm import full_participation, scaffold, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = scaffold(0.1, local_steps=5)
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated
    Learning" (2020), Algorithm 1.
    """
    sgd = local_sgd(learning_rate, local_steps, batch_size)
    check_positive("server_rate", server_rate)
    check_choice("option", option, "I", "II")

    def init(task: Task, params: Params) -> tuple[Params, Params]:
        del task
        zeros = jax.tree.map(jnp.zeros_like, params)
        return zeros, zeros  # c, c_k

    def client(
        local: ClientContext, server_state: Params, client_state: Params
    ) -> tuple[Contribution, Params]:
        c_k, task = client_state, local.task
        drift = jax.tree.map(jnp.subtract, c_k, server_state)

        def direction(own: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
            loss, gradient = jax.value_and_grad(task.loss)(own, batch)
            return loss, jax.tree.map(jnp.subtract, gradient, drift)

        change = sgd.train(local, direction=direction)
        if option == "I":
            everything = task.batch(local.rng_key, local.client, jnp.int32(0), base.Batching())
            new = jax.grad(task.loss)(local.params, everything)
        else:
            steps = local_steps * sgd.rate(local.round)
            new = jax.tree.map(lambda d, x: d - (x / steps).astype(d.dtype), drift, change.update)
        # c must remain the mean of all c_k. If all factors are 0, the server makes no step and c
        # stays: so does the c_k of a client with such a factor. Others do not apply to the share.
        is_active = jnp.asarray(local.takes_part)
        new = jax.tree.map(partial(jnp.where, is_active), new, c_k)
        share = jax.tree.map(lambda new, old: (new - old) / task.num_clients, new, c_k)
        sent = {"params": scale_update(change.update, local.scale), "c": share}
        num_gradients = jnp.int32(local_steps + (option == "I"))
        return Contribution(sent, equal_weight(local), num_gradients, change.report), new

    def server(given: base.ServerContext) -> tuple[Params, Params]:
        total = given.total
        change = jax.tree.map(lambda x: server_rate / total.weight * x, total.update["params"])
        c = jax.tree.map(jnp.add, given.server_state, total.update["c"])
        return optax.apply_updates(given.params, change), c

    return Algorithm(init, client, server)
