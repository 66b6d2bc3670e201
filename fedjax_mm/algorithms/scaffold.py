"""SCAFFOLD: control variates that correct client drift."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Task
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import Positive, part
from fedjax_mm.local import LocalSGD, adding, check_local, keeping, loss_and_gradient, weighing


@part
def scaffold(
    local: LocalSGD,
    *,
    server_rate: Positive = 1.0,
    option: Literal["I", "II"] = "II",
    server_optimizer: optax.GradientTransformation | None = None,
    weighted: bool = False,
) -> Algorithm:
    """SCAFFOLD: local steps ``y <- y - eta_l (grad F_k(y) - c_k + c)`` against client drift.

    After K_k steps a client sets ``c_k <- c_k - c + (w - y) / (a_k eta_l)`` (option II), where a_k
    is K_k without momentum, and in general `LocalSGD.normalizer`. The server sets ``w <- w + eta_g
    mean(y - w)``, unweighted, and ``c <- c + (1/N) sum (new c_k - old c_k)``.

    Args:
      local: eta_l, K steps and the other settings of `local_sgd`. With option II the optimizer is
        SGD, with or without momentum.
      server_rate: eta_g, the step size of the server.
      option: "II" as above, or "I", where the new c_k is the gradient over all the client's
        examples at w. "I" costs one more gradient and needs a loss that is a mean over the batch.
      server_optimizer: an optimizer that gets minus ``eta_g mean(y - w)`` as its gradient; None
        adds it.
      weighted: whether client k has weight n_k in the mean of ``y - w``, rather than 1.

    Raises:
      ValueError: if a number is not positive or `option` is unknown.

    Example:
      >>> import jax
      >>> from fedjax_mm import full_participation, local_sgd, scaffold, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = scaffold(local_sgd(0.1, steps=5))
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated
    Learning" (2020).
    """
    check_local(f"scaffold, option {option}", local)
    weight_of = weighing(weighted)

    def init(task: Task, params: Params) -> tuple[Params, Params]:
        del task
        zeros = jax.tree.map(jnp.zeros_like, params)
        return zeros, zeros  # c, c_k

    def client(
        context: ClientContext, server_state: Params, client_state: Params
    ) -> tuple[Contribution, Params]:
        c_k, task, k = client_state, context.task, context.client
        drift = jax.tree.map(jnp.subtract, c_k, server_state)

        def gradient_fn(own: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
            loss, gradient = loss_and_gradient(task)(own, batch)
            return loss, jax.tree.map(jnp.subtract, gradient, drift)

        trained = local.train(context, gradient_fn=gradient_fn)
        if option == "I":
            everything = task.batch(context.rng_key, k, jnp.int32(0), base.Batching())
            _, new = loss_and_gradient(task)(context.params, everything)
        else:
            length = local.normalizer(task, k) * local.rate(context.round)
            new = jax.tree.map(lambda d, x: d - (x / length).astype(d.dtype), drift, trained.update)
        # Keep the c_k of a client that does not participate, and do not scale any client's share of
        # c, because c must remain the mean of all c_k. Without participants, the server keeps c.
        new = context.next_state(new, c_k)
        share = jax.tree.map(lambda new, old: (new - old) / task.num_clients, new, c_k)
        weight = weight_of(context)
        sent = {"params": scale_update(trained.update, weight), "c": share}
        num_gradients = jnp.int32(local.num_steps(task, k) + (option == "I"))
        return Contribution(sent, weight, num_gradients, trained.report), new

    def mean(context: base.ServerContext) -> tuple[Params, Params]:
        total = context.total
        step = jax.tree.map(lambda x: server_rate / total.weight * x, total.update["params"])
        return step, jax.tree.map(jnp.add, context.server_state, total.update["c"])

    made = adding(client, mean, server_optimizer, init=init, num_steps=local.num_steps)
    return keeping(made, local)
