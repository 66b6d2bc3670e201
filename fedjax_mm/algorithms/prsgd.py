"""PR-SGD: parallel SGD with restarts from the clients' mean and one stale gradient."""

import jax
import jax.numpy as jnp
import optax

from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Task
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import part
from fedjax_mm.local import (
    LocalSGD,
    equal_weight,
    loss_and_gradient,
    plain_server,
    steps_of,
    train_locally,
)


@part
def prsgd(local: LocalSGD) -> Algorithm:
    """Parallel restarted SGD with a stale gradient at each averaging step, as stated by Pawlik.

    In iteration t client i computes a gradient ``G_i^t`` at its own ``x_i^(t-1)``. If I divides t,
    ``x_i^t = mean_j x_j^(t-1) - eta G_i^t`` (eq. 10), with a gradient computed before averaging;
    otherwise ``x_i^t = x_i^(t-1) - eta G_i^t``. FedAvg with I local steps averages after the step.

    A round ends with averaging, so the global model after round r is ``mean_j x_j^(rI - 1)``, one
    step behind FedAvg's. A client's state is its last step, which is applied at the beginning of
    its next round. The mean is unweighted. In the paper all clients participate.

    Args:
      local: eta, I steps and the other settings of `local_sgd`, except `epochs` and `optimizer`.

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
    steps = steps_of("prsgd", local, only_sgd=True)

    def init(task: Task, params: Params) -> tuple[tuple[()], Params]:
        del task
        return (), jax.tree.map(jnp.zeros_like, params)  # the last step

    def client(
        context: ClientContext, server_state: tuple[()], client_state: Params
    ) -> tuple[Contribution, Params]:
        del server_state
        task, rate, how = context.task, local.rate(context.round), local.batching(context.round)
        own, last = jax.tree.map(jnp.add, context.params, client_state), steps - 1
        loss = jnp.zeros(())
        if not isinstance(last, int) or last > 0:
            own, loss = train_locally(context, optax.sgd(rate), last, how, start=own)
            loss = jnp.where(last > 0, loss, 0)  # the mean of no batches is NaN
        # The client's next round applies the last gradient to the mean.
        batch = task.batch(context.rng_key, context.client, jnp.int32(last), how)
        last_loss, gradient = loss_and_gradient(task)(own, batch)
        step = jax.tree.map(lambda g: (-rate * g).astype(g.dtype), gradient)
        report = {"loss": (last * loss + last_loss) / steps}
        update = scale_update(jax.tree.map(jnp.subtract, own, context.params), context.scale)
        message = Contribution(update, equal_weight(context), jnp.int32(steps), report)
        # A client that does not participate keeps its last step, which has not been applied yet.
        return message, context.next_state(step, client_state)

    return Algorithm(init, client, plain_server())
