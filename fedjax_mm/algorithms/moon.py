"""MOON: features stay near the global model's, and away from those of the last local model."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedjax_mm.base import (
    Algorithm,
    ClientContext,
    Contribution,
    Params,
    Scalar,
    ServerState,
    Task,
    needs,
)
from fedjax_mm.base.capabilities import FeaturesTask
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import NonNegative, Positive, part
from fedjax_mm.local import LocalSGD, adding, check_local, keeping, mean_update, weighing


@part
def moon(
    local: LocalSGD,
    *,
    mu: NonNegative,
    temperature: Positive = 0.5,
    server_optimizer: optax.GradientTransformation | None = None,
    weighted: bool = True,
) -> Algorithm:
    """MOON: FedAvg whose local steps descend ``F_k(w_k) + mu l_con``.

    Each example adds ``l_con = -log(e^(s_g / T) / (e^(s_g / T) + e^(s_p / T)))``, where s_g and s_p
    are the cosines of its features under w_k with those under the global model w and under the
    client's previous local model. No gradient passes through the latter two. Before a client's
    first participation, its previous model is the initial one. Reported losses are those of the
    task. All three features of an example are those of training, with the same dropped units, and
    batch norms use the statistics of the batch.

    Args:
      local: eta, E and the other settings of `local_sgd`.
      mu: the weight of the contrast; 0 makes it FedAvg.
      temperature: T, by which cosines are divided.
      server_optimizer: an optimizer that gets minus the mean update as its gradient; None adds it.
      weighted: whether client k has weight n_k in the mean, rather than 1.

    Raises:
      ValueError: if a number has the wrong sign, or, in a run, if the task gives no features.

    Example:
      >>> import numpy as np
      >>> from fedjax_mm import full_participation, local_sgd, moon, simulate
      >>> from fedjax_mm.data import FederatedData, client_data
      >>> from fedjax_mm.tasks import MLP, classification
      >>> clients = client_data([(np.eye(2), np.arange(2)), (np.eye(2)[:1], np.zeros(1, int))])
      >>> data = FederatedData("two", "synthetic", 2, clients, clients)
      >>> task = classification(data, MLP(2, (3,)))
      >>> algorithm = moon(local_sgd(0.5, steps=5), mu=1.0)
      >>> _, trace = simulate(0, task, algorithm, full_participation(2), 20)
      >>> bool(trace.metrics["loss"][-1, 0] < 0.5 * trace.metrics["loss"][0, 0])
      True

    Reference: Li, He, Song, "Model-Contrastive Federated Learning" (2021).
    """
    check_local("moon", local)
    weight_of = weighing(weighted)

    def init(task: Task, params: Params) -> tuple[ServerState, Params]:
        del task
        return (), params

    def client(
        context: ClientContext, server_state: ServerState, client_state: Params
    ) -> tuple[Contribution, Params]:
        del server_state
        task = needs(context.task, FeaturesTask)

        def gradient_fn(own: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
            near, _ = task.features(context.params, batch)
            far, _ = task.features(client_state, batch)

            def total(params: Params) -> tuple[Float[Array, ""], Float[Array, ""]]:
                loss = task.loss(params, batch)
                features, weights = task.features(params, batch)
                each = contrast(features, near, far, temperature)
                held = loss + mu * jnp.sum(weights * each)
                return held.astype(loss.dtype), loss

            (_, loss), gradient = jax.value_and_grad(total, has_aux=True)(own)
            return loss, gradient

        weight, trained = weight_of(context), local.train(context, gradient_fn=gradient_fn)
        new = jax.tree.map(jnp.add, context.params, trained.update)
        new = context.next_state(new, client_state)
        sent = scale_update(trained.update, weight)
        num_gradients = jnp.int32(local.num_steps(task, context.client))
        return Contribution(sent, weight, num_gradients, trained.report), new

    made = adding(client, mean_update, server_optimizer, init=init, num_steps=local.num_steps)
    return keeping(made, local)


def contrast(
    features: Float[Array, "batch features"],
    near: Float[Array, "batch features"],
    far: Float[Array, "batch features"],
    temperature: Scalar,
) -> Float[Array, " batch"]:
    """``-log(e^(s_g / T) / (e^(s_g / T) + e^(s_p / T)))`` of each example."""
    return jax.nn.softplus((_cosine(features, far) - _cosine(features, near)) / temperature)


def _cosine(
    x: Float[Array, "batch features"], y: Float[Array, "batch features"]
) -> Float[Array, " batch"]:
    """Cosines of rows, or 0 if a row is 0."""

    # All units of a ReLU layer may be 0, where the norm has no gradient.
    def norm(x: Array) -> Array:
        square = jnp.sum(x**2, axis=1)
        return jnp.sqrt(jnp.where(square > 0, square, 1))

    return jnp.sum(x * y, axis=1) / (norm(x) * norm(y))
