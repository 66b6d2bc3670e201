"""Gradient tracking (DIGing): peers follow the gradient of all, which they mix as their models."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Mixed, Params, Task
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import part
from fedjax_mm.local import LocalSGD, adding, check_local, keeping, mean_update, weighing


class Tracker(NamedTuple):
    """State of a model.

    Attributes:
      tracked: g, which mixing mixes as it mixes the model.
      gradient: the last gradient.
    """

    tracked: Mixed
    gradient: Params


@part
def gradient_tracking(
    local: LocalSGD,
    *,
    server_optimizer: optax.GradientTransformation | None = None,
    weighted: bool = True,
) -> Algorithm:
    """DIGing: ``w <- W w - eta g`` and ``g <- W g + grad(new w) - grad(w)``, for `mixing`.

    With full gradients and a constant rate, all models converge to the minimizer of the sum over
    models, unlike those of decentralised SGD, if W is doubly stochastic and ``combine="before"``.
    With "after" the step is mixed, too: ``w <- W (w - eta g)``. Without mixing this is `fedavg`. A
    model with several clients takes their mean, and ``(w - w_k) / eta`` is the gradient of a client
    with more local steps.

    Args:
      local: eta, B and the other settings of `local_sgd`. By default clients take 1 step, as in the
        paper.
      server_optimizer: an optimizer that gets ``eta g`` as its gradient; None subtracts it.
      weighted: whether client k has weight n_k in the mean of a model's clients, rather than 1.

    Raises:
      ValueError: if a number is not positive.

    Example: two peers with the minimizers 0 and 2.
      >>> import numpy as np
      >>> from fedjax_mm import gradient_tracking, local_sgd, peers, simulate
      >>> from fedjax_mm.tasks import mean_estimation
      >>> from fedjax_mm.topologies import mixing, network
      >>> task, W = mean_estimation([0.0, 2.0], [0.0, 2.0]), np.array([[0.75, 0.25], [0.25, 0.75]])
      >>> pair = mixing(peers(2), network(W), combine="before")
      >>> state, _ = simulate(0, task, gradient_tracking(local_sgd(0.05)), pair, 100)
      >>> state.models[0].params.round(3).tolist()
      [1.0, 1.0]

    Reference: Nedic, Olshevsky, Shi, "Achieving Geometric Convergence for Distributed Optimization
    over Time-Varying Graphs" (2017).
    """
    sgd, weight_of = check_local("gradient_tracking", local, default=1), weighing(weighted)

    def init(task: Task, params: Params) -> tuple[Tracker, tuple[()]]:
        del task
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Tracker(Mixed(zeros), zeros), ()

    def client(
        context: ClientContext, server_state: Any, client_state: Any
    ) -> tuple[Contribution, Any]:
        del server_state
        weight, trained = weight_of(context), sgd.train(context)
        update = scale_update(trained.update, weight)
        count = jnp.int32(sgd.num_steps(context.task, context.client))
        return Contribution(update, weight, count, trained.report), client_state

    def mean(context: base.ServerContext) -> tuple[Params, Tracker]:
        tracked, last = context.server_state
        rate, (change, _) = sgd.rate(context.round), mean_update(context)
        new = jax.tree.map(lambda x, old: (-x / rate).astype(old.dtype), change, last)
        g = jax.tree.map(lambda g, x, old: g + (x - old), tracked.value, new, last)
        return jax.tree.map(lambda x: -rate * x, g), Tracker(Mixed(g), new)

    made = adding(client, mean, server_optimizer, init=init, num_steps=sgd.num_steps)
    return keeping(made, sgd)
