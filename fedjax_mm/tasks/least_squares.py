"""Ridge regression on clients' examples: strongly convex, minibatch noise, a known minimizer."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm.base import Batching
from fedjax_mm.checks import check_positive
from fedjax_mm.data.clients import ClientData, client_data


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LeastSquares:
    """``F_k(w) = 1/(2 n_k) sum_i (x_i'w - y_i)^2 + ridge/2 |w|^2``; build it with `least_squares`.

    F is the mean of the F_k weighted by n_k.

    Attributes:
      data: examples ``(features [examples, dim], targets [examples])`` of all clients.
      ridge: the regularization.
      hessian: ``float[dim, dim]``, the Hessian of F.
      minimizer: ``float[dim]``, w*.
      optimum: F* = F(w*).
    """

    data: ClientData
    ridge: Array
    hessian: Array
    minimizer: Array
    optimum: Array

    @property
    def num_clients(self) -> int:
        """N."""
        return self.data.num_clients

    def init(self, rng_key: PRNGKeyArray) -> Float[Array, " dim"]:
        """Zeros."""
        del rng_key
        return jnp.zeros_like(self.minimizer)

    def weight(self, client: Int[Array, ""]) -> Float[Array, ""]:
        """n_k."""
        return self.data.counts[client].astype(self.minimizer.dtype)

    def batch(
        self, rng_key: PRNGKeyArray, client: Int[Array, ""], step: Int[Array, ""], how: Batching
    ) -> Any:
        """Rows of the client's examples and their weights; see `ClientData.batch`."""
        return self.data.batch(rng_key, client, step, how)

    def num_batches(self, client: Int[Array, ""], size: int | None) -> int | Int[Array, ""]:
        """Steps of an epoch."""
        return self.data.num_batches(client, size)

    def loss(self, params: Float[Array, " dim"], batch: Any) -> Float[Array, ""]:
        """Half the weighted mean squared error of the batch, and the ridge."""
        rows, weights = batch
        features, targets = self.data.take(rows)
        errors = features @ params - targets
        mean = jnp.sum(weights * errors**2) / jnp.sum(weights)
        return (mean + self.ridge * jnp.sum(params**2)) / 2

    def client_loss(self, params: Float[Array, " dim"], client: Int[Array, ""]) -> Float[Array, ""]:
        """F_k(w), over all of the client's examples."""
        nothing = jax.random.key(0)  # all rows: nothing is drawn
        return self.loss(params, self.batch(nothing, client, jnp.int32(0), Batching()))

    def metrics(
        self, rng_key: PRNGKeyArray, params: Float[Array, " dim"]
    ) -> dict[str, Float[Array, ""]]:
        """F(w), F(w) - F*, |w - w*|."""
        del rng_key
        error = params - self.minimizer
        excess = error @ self.hessian @ error / 2
        return {
            "loss": self.optimum + excess,
            "excess_loss": excess,
            "distance": jnp.sqrt(jnp.sum(error**2)),
        }


def least_squares(features: Sequence[Any], targets: Sequence[Any], *, ridge: Any) -> LeastSquares:
    """Ridge regression over clients.

    Args:
      features: for each client ``[n_k, dim]``.
      targets: for each client ``[n_k]``.
      ridge: positive; it may be traced.

    Raises:
      ValueError: if the clients' arrays do not match or `ridge` is not positive.

    Example:
      >>> import numpy as np
      >>> task = least_squares([np.eye(2), np.eye(2)[:1]], [np.ones(2), np.zeros(1)], ridge=1.0)
      >>> task.minimizer.round(3).tolist()
      [0.20000000298023224, 0.25]
    """
    check_positive("ridge", ridge)
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
