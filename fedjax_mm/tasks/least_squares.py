"""Ridge regression with minibatch noise and a known minimizer."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm.base import Batching, Index, Metrics
from fedjax_mm.base.calls import in_short
from fedjax_mm.checks.annotations import Positive, checked
from fedjax_mm.data.clients import ClientData, client_data
from fedjax_mm.tasks.quadratic import Vector


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LeastSquares:
    """Task with ``F_k(w) = 1/(2 n_k) sum_i (x_i'w - y_i)^2 + ridge/2 |w|^2``.

    Built by `least_squares`. F is the mean of F_k weighted by n_k.

    Attributes:
      data: examples ``(features [examples, dim], targets [examples])`` of all clients.
      ridge: the regularization strength.
      hessian: ``float[dim, dim]``, the Hessian of F.
      minimizer: ``float[dim]``, w*.
      optimum: F* = F(w*).
    """

    data: ClientData
    ridge: Array
    hessian: Array
    minimizer: Array
    optimum: Array

    __repr__ = in_short

    @property
    def num_clients(self) -> int:
        """The number of clients, N."""
        return self.data.num_clients

    def init(self, rng_key: PRNGKeyArray) -> Vector:
        """Starts at 0."""
        del rng_key
        return jnp.zeros_like(self.minimizer)

    def weight(self, client: Index) -> Float[Array, ""]:
        """The number of examples, n_k."""
        return self.data.counts[client].astype(self.minimizer.dtype)

    def batch(self, rng_key: PRNGKeyArray, client: Index, step: Index, how: Batching) -> Any:
        """Rows of the client's examples and their weights, as `ClientData.batch` does."""
        return self.data.batch(rng_key, client, step, how)

    def examples(self, params: Vector, batch: Any) -> tuple[Any, Float[Array, " batch"]]:
        """Batches of one row, and the examples' weights."""
        del params
        rows, weights = batch
        return (rows[:, None], jnp.ones_like(weights)[:, None]), weights

    def num_batches(self, client: Index, size: int | None) -> int | Int[Array, ""]:
        """Steps per epoch."""
        return self.data.num_batches(client, size)

    def loss(self, params: Vector, batch: Any) -> Float[Array, ""]:
        """Half the batch's weighted mean squared error, plus the ridge term."""
        rows, weights = batch
        features, targets = self.data.take(rows)
        errors = features @ params - targets
        mean = jnp.sum(weights * errors**2) / jnp.sum(weights)
        return (mean + self.ridge * jnp.sum(params**2)) / 2

    def client_loss(self, params: Vector, client: Index) -> Float[Array, ""]:
        """F_k(w), over all of the client's examples."""
        nothing = jax.random.key(0)  # unused, because a batch of all rows is not random
        return self.loss(params, self.batch(nothing, client, jnp.int32(0), Batching()))

    def metrics(self, rng_key: PRNGKeyArray, params: Vector) -> Metrics:
        """F(w), F(w) - F*, and |w - w*|."""
        del rng_key
        error = params - self.minimizer
        # Use the quadratic form, because a difference of losses would lose precision near the
        # optimum.
        excess = error @ self.hessian @ error / 2
        loss, distance = self.optimum + excess, jnp.sqrt(jnp.sum(error**2))
        return {"loss": loss, "excess_loss": excess, "distance": distance}


@checked
def least_squares(
    features: Sequence[Any], targets: Sequence[Any], *, ridge: Positive
) -> LeastSquares:
    """Makes the task of ridge regression on clients' examples.

    Args:
      features: ``[n_k, dim]`` for each client.
      targets: ``[n_k]`` for each client.
      ridge: the regularization strength, positive; it may be traced.

    Raises:
      ValueError: if the clients' arrays do not match or `ridge` is not positive.

    Example:
      >>> import numpy as np
      >>> task = least_squares([np.eye(2), np.eye(2)[:1]], [np.ones(2), np.zeros(1)], ridge=1.0)
      >>> task.minimizer.round(3).tolist()
      [0.20000000298023224, 0.25]
    """
    if len(features) != len(targets):
        raise ValueError(
            f"there are features of {len(features)} clients but targets of {len(targets)}; "
            "give both for every client"
        )
    data = client_data(list(zip(features, targets, strict=True)))
    x, y = (jnp.asarray(leaf, float) for leaf in data.examples)
    data = dataclasses.replace(data, examples=(x, y))
    ridge = jnp.asarray(ridge, x.dtype)
    hessian = x.T @ x / len(x) + ridge * jnp.eye(x.shape[1], dtype=x.dtype)
    minimizer = jnp.linalg.solve(hessian, x.T @ y / len(x))
    optimum = (jnp.mean((x @ minimizer - y) ** 2) + ridge * jnp.sum(minimizer**2)) / 2
    return LeastSquares(data, ridge, hessian, minimizer, optimum)
