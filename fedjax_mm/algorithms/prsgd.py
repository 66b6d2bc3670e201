"""PR-SGD: parallel SGD with restarts from the clients' mean and one stale gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Steps, Task
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import part
from fedjax_mm.local import (
    LocalSGD,
    adding,
    check_local,
    loss_and_gradient,
    mean_update,
    train_locally,
    weighing,
)


@part
def prsgd(
    local: LocalSGD,
    *,
    server_optimizer: optax.GradientTransformation | None = None,
    weighted: bool = False,
) -> Algorithm:
    """Parallel restarted SGD with a stale gradient at each averaging step, as stated by Pawlik.

    In iteration t client i computes a gradient ``G_i^t`` at its own ``x_i^(t-1)``. If I divides t,
    ``x_i^t = mean_j x_j^(t-1) - eta G_i^t`` (eq. 10), with a gradient computed before averaging;
    otherwise ``x_i^t = x_i^(t-1) - eta G_i^t``. FedAvg with I local steps averages after the step.

    A round ends with averaging, so the global model after round r is ``mean_j x_j^(rI - 1)``, one
    step behind FedAvg's. A client's state is its last step, which is applied at the beginning of
    its next round. The mean is unweighted. In the paper all clients participate.

    Args:
      local: eta, I steps and the other settings of `local_sgd`, except `epochs` and `optimizer`.
        With momentum, G is the sum of gradients by which it steps.
      server_optimizer: an optimizer that gets minus the mean update as its gradient; None adds it.
      weighted: whether client k has weight n_k in the mean, rather than 1.

    Raises:
      ValueError: if a number is not positive.

    Example:
      >>> import jax
      >>> from fedjax_mm import full_participation, local_sgd, prsgd, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = prsgd(local_sgd(0.1, steps=5))
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Pawlik (2020), Algorithm 1; Yu, Yang, Zhu, "Parallel Restarted SGD with Faster
    Convergence and Less Communication" (2018).
    """
    check_local("prsgd", local)
    weight_of = weighing(weighted)

    def init(task: Task, params: Params) -> tuple[tuple[()], Params]:
        del task
        return (), jax.tree.map(jnp.zeros_like, params)  # the last step

    def client(
        context: ClientContext, server_state: tuple[()], client_state: Params
    ) -> tuple[Contribution, Params]:
        del server_state
        both, zeros = loss_and_gradient(context.task), init(context.task, context.params)[1]
        num_steps = local.num_steps(context.task, context.client)

        def gradient_fn(own: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
            loss, gradient = both(own["x"], batch)
            return loss, {"x": gradient, "last": zeros}

        # The client's next round applies the last step to the mean.
        start = {"x": jax.tree.map(jnp.add, context.params, client_state), "last": zeros}
        optimizer = _keeping_the_last(local.optimizer_at(context.round), num_steps)
        how = local.batching(context.round)
        own, loss = train_locally(
            context, optimizer, num_steps, how, gradient_fn=gradient_fn, start=start
        )
        weight, step = weight_of(context), own["last"]
        update = scale_update(jax.tree.map(jnp.subtract, own["x"], context.params), weight)
        message = Contribution(update, weight, jnp.int32(num_steps), {"loss": loss})
        # A client that does not participate keeps its last step, which has not been applied yet.
        return message, context.next_state(step, client_state)

    return adding(client, mean_update, server_optimizer, init=init)


def _keeping_the_last(
    optimizer: optax.GradientTransformation, num_steps: Steps
) -> optax.GradientTransformation:
    """Applies all steps to x but the last one, which becomes "last"."""

    def init(params: Params) -> tuple[Int[Array, ""], Any]:
        return jnp.int32(1), optimizer.init(params["x"])

    def update(gradients: Params, state: Any, params: Any) -> tuple[Params, Any]:
        number, inner = state
        step, inner = optimizer.update(gradients["x"], inner, params["x"])
        is_last = number == num_steps
        kept = jax.tree.map(lambda x: jnp.where(is_last, x, 0).astype(x.dtype), step)
        taken = jax.tree.map(lambda x: jnp.where(is_last, 0, x).astype(x.dtype), step)
        return {"x": taken, "last": kept}, (number + 1, inner)

    return optax.GradientTransformation(init, update)
