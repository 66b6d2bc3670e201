"""Gradient tracking (DIGing): peers follow the gradient of all, which they mix as their models."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mm import base
from fedjax_mm.base import Algorithm, BatchSize, ClientContext, Contribution, Mixed, Params, Scalar
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import part
from fedjax_mm.local import adding, local_sgd, mean_update, weighing
from fedjax_mm.schedules import Schedule


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
    learning_rate: Scalar | Schedule, *, batch_size: BatchSize = None, weighted: bool = True
) -> Algorithm:
    """DIGing: ``w <- W w - eta g`` and ``g <- W g + grad(new w) - grad(w)``, for `mixing`.

    Full gradients and a constant rate converge to the minimizer of the sum over models, unlike
    decentralised SGD, if W is doubly stochastic and ``combine="before"``. With "after" the step is
    mixed, too: ``w <- W (w - eta g)``. Without mixing, g is the gradient. A model with several
    clients takes the mean of their gradients.

    Args:
      learning_rate: eta, or a schedule.
      batch_size: B; None takes full gradients.
      weighted: whether client k has weight n_k in the mean of a model's clients, rather than 1.

    Raises:
      ValueError: if a number is not positive.

    Example: two peers with the minimizers 0 and 2.
      >>> import numpy as np
      >>> from fedjax_mm import simulate
      >>> from fedjax_mm.assignments.topologies import mixing, network, peers
      >>> from fedjax_mm.tasks import mean_estimation
      >>> task, W = mean_estimation([0.0, 2.0], [0.0, 2.0]), np.array([[0.75, 0.25], [0.25, 0.75]])
      >>> pair = mixing(peers(2), network(W), combine="before")
      >>> state, _ = simulate(0, task, gradient_tracking(0.05), pair, 100)
      >>> state.models[0].params.round(3).tolist()
      [1.0, 1.0]

    Reference: Nedic, Olshevsky, Shi, "Achieving Geometric Convergence for Distributed Optimization
    over Time-Varying Graphs" (2017).
    """
    sgd, weight_of = local_sgd(learning_rate, steps=1, batch_size=batch_size), weighing(weighted)

    def init(task: base.Task, params: Params) -> tuple[Tracker, tuple[()]]:
        del task
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Tracker(Mixed(zeros), zeros), ()

    def client(
        context: ClientContext, server_state: Any, client_state: Any
    ) -> tuple[Contribution, Any]:
        del server_state
        weight, trained, rate = weight_of(context), sgd.train(context), sgd.rate(context.round)
        gradient = jax.tree.map(lambda x: -x / rate, trained.update)
        update = scale_update(gradient, weight)
        return Contribution(update, weight, jnp.int32(1), trained.report), client_state

    def mean(context: base.ServerContext) -> tuple[Params, Tracker]:
        old: Tracker = context.server_state
        gradient, _ = mean_update(context)
        g = jax.tree.map(lambda g, new, old: g + new - old, old.tracked.value, gradient, old[1])
        step = jax.tree.map(lambda x: (-sgd.rate(context.round) * x).astype(x.dtype), g)
        return step, Tracker(Mixed(g), gradient)

    return adding(client, mean, init=init)
