"""Mean estimation of Cho et al., "Maximizing Global Model Appeal in Federated Learning", app. A."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedjax_mm.base import Batching, Index, Metrics, Scalar, Steps
from fedjax_mm.base.calls import in_short
from fedjax_mm.checks.annotations import Positive, checked
from fedjax_mm.checks.instances import key_of
from fedjax_mm.checks.values import check_numbers

_JITTER = 1e-3  # avoids starting midway between two clients, which may be a maximum


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MeanEstimation:
    """Task with ``F_k(w) = (w - hat theta_k)^2 + (hat theta_k - theta_k)^2``.

    See `mean_estimation`. The model is a single number w. Client k's true loss is
    ``f_k(w) = (w - theta_k)^2``, its own model is ``hat theta_k``, and its requirement is
    ``rho_k = F_k(hat theta_k) = f_k(hat theta_k)``.

    Attributes:
      true_means: ``float[clients]``, theta_k.
      empirical_means: ``float[clients]``, hat theta_k.
    """

    true_means: Array
    empirical_means: Array

    __repr__ = in_short

    @property
    def num_clients(self) -> int:
        """The number of clients, N."""
        return self.true_means.shape[-1]

    @property
    def minimizer(self) -> Float[Array, ""]:
        """The mean of the empirical means, which minimizes the mean of F_k."""
        return jnp.mean(self.empirical_means)

    @property
    def requirements(self) -> Float[Array, " clients"]:
        """``rho_k = (hat theta_k - theta_k)^2``."""
        return (self.empirical_means - self.true_means) ** 2

    def init(self, rng_key: PRNGKeyArray) -> Float[Array, ""]:
        """Starts at the mean of the empirical means, plus a small jitter."""
        jitter = jax.random.normal(rng_key, (), jnp.float32)
        return self.minimizer + _JITTER * jitter.astype(self.empirical_means.dtype)

    def weight(self, client: Index) -> Float[Array, ""]:
        """1, because all clients have the same number of samples."""
        del client
        return jnp.ones((), self.empirical_means.dtype)

    def batch(self, rng_key: PRNGKeyArray, client: Index, step: Index, how: Batching) -> Index:
        """Gives the client's index instead of samples, because the loss only needs their mean."""
        del rng_key, step
        if how.size is not None or how.limit is not None:
            raise ValueError(f"batch_size is {how.size}; mean estimation has no examples, use None")
        return client

    def losses(self, params: Scalar) -> Float[Array, " clients"]:
        """F_k(w) for all clients."""
        return self.gaps(params) + self.requirements

    def gaps(self, params: Scalar) -> Float[Array, " clients"]:
        """``F_k(w) - rho_k = (w - hat theta_k)^2`` for all clients."""
        # Do not subtract `requirements` from `losses`, because the difference would lose precision.
        return (params - self.empirical_means) ** 2

    def satisfied(self, params: Scalar) -> Bool[Array, " clients"]:
        """Marks the clients with ``f_k(w) < rho_k`` (definition 1).

        A client is not satisfied if w rounds to its own model; see `relative_to`.
        """
        # Test ``f_k(w) - rho_k = (w - hat theta_k) (w - hat theta_k + 2 (hat theta_k - theta_k))``,
        # because the signs of the factors are correct however close w is to the client's own model.
        error = params - self.empirical_means
        return jnp.sign(error) * jnp.sign(error + 2 * (self.empirical_means - self.true_means)) < 0

    def relative_to(self, origin: Any) -> "MeanEstimation":
        """Shifts the problem to ``w - origin``, for models very close to `origin`.

        MaxFL's minima may be closer to a client's own model than the floating-point spacing.

        Example:
          >>> task = mean_estimation([0.5, 9.0], [1.0, 9.0])
          >>> task.relative_to(task.empirical_means[0]).satisfied(-1e-30).tolist()
          [True, False]
        """
        return MeanEstimation(self.true_means - origin, self.empirical_means - origin)

    def loss(self, params: Float[Array, ""], batch: Index) -> Float[Array, ""]:
        """F_k(w) for the client given by the batch."""
        return self.losses(params)[batch]

    def client_loss(self, params: Float[Array, ""], client: Index) -> Float[Array, ""]:
        """F_k(w)."""
        return self.losses(params)[client]

    def threshold(self, client: Index) -> Float[Array, ""]:
        """A threshold rho_k for the true loss, because F_k(w) is never below rho_k."""
        return self.requirements[client]

    def appeals(self, params: Float[Array, ""]) -> Bool[Array, " clients"]:
        """Marks the clients with ``f_k(w) < rho_k``."""
        return self.satisfied(params)

    def local_sgd(
        self, params: Float[Array, ""], client: Index, learning_rate: Scalar, num_steps: Steps
    ) -> Float[Array, ""]:
        """Update after E gradient steps, ``((1 - 2 eta)^E - 1) (w - hat theta_k)``."""
        decay = (1 - 2 * learning_rate) ** num_steps - 1
        return decay * (params - self.empirical_means[client])

    def metrics(self, rng_key: PRNGKeyArray, params: Float[Array, ""]) -> Metrics:
        """F(w), F(w) - F*, |w - w*| and GM-Appeal, the fraction of satisfied clients."""
        del rng_key
        error = params - self.minimizer
        return {
            "loss": jnp.mean(self.losses(params)),
            "excess_loss": error**2,
            "distance": jnp.abs(error),
            "appeal": jnp.mean(self.satisfied(params), dtype=params.dtype),
        }


def mean_estimation(true_means: Any, empirical_means: Any) -> MeanEstimation:
    """Makes the task of estimating a single mean for clients with different true means.

    Args:
      true_means: ``float[clients]``, theta_k; it may be traced.
      empirical_means: ``float[clients]``, hat theta_k, for example from `draw_means`; it may be
        traced.

    Raises:
      ValueError: if the arrays are empty, shapes differ or a number is not finite.

    Example:
      >>> task = mean_estimation([0.0, 0.0, 6.0], [0.8, -0.7, 6.3])
      >>> [bool(each) for each in task.satisfied(0.05)], round(float(task.minimizer), 3)
      ([True, True, False], 2.133)

    Reference: Cho et al., appendix A.1.
    """
    shapes = np.shape(true_means), np.shape(empirical_means)
    if len(shapes[0]) != 1 or not shapes[0][0] or shapes[0] != shapes[1]:
        raise ValueError(
            f"true_means and empirical_means have the shapes {shapes[0]} and {shapes[1]}; "
            "give one number of each for every client"
        )
    check_numbers("true_means", true_means, np.isfinite, "be finite", ndim=1)
    check_numbers("empirical_means", empirical_means, np.isfinite, "be finite", ndim=1)
    return MeanEstimation(_floats(true_means), _floats(empirical_means))


def _floats(values: Any) -> Array:
    return jnp.asarray(values if isinstance(values, jax.Array) else np.asarray(values), float)


@checked
def draw_means(rng_key: PRNGKeyArray | int, true_means: Any, gamma: Positive = 1.0) -> Array:
    """Draws empirical means, ``hat theta_k ~ N(theta_k, gamma^2)`` (9).

    Args:
      rng_key: the random key.
      true_means: ``float[clients]``, theta_k.
      gamma: the standard deviation of a sample divided by the square root of the number of samples.

    Raises:
      ValueError: if `gamma` is not positive.

    Example:
      >>> draw_means(jax.random.key(0), [0.0, 4.0]).shape
      (2,)
    """
    true_means = _floats(true_means)
    noise = jax.random.normal(key_of(rng_key), true_means.shape, jnp.float32)
    return true_means + gamma * noise.astype(true_means.dtype)


def fedavg_objective(task: MeanEstimation, params: Any) -> Any:
    """Objective of standard federated learning, the mean of F_k(w).

    Example:
      >>> float(fedavg_objective(mean_estimation([0.0, 2.0], [0.0, 2.0]), 1.0))
      1.0
    """
    return jnp.mean(task.losses(params))


def maxfl_objective(task: MeanEstimation, params: Any) -> Any:
    """MaxFL's objective, the mean of ``sigma(F_k(w) - rho_k)`` (3).

    Its gradient is the mean of the F_k gradients weighted by ``q_k = sigma (1 - sigma)`` (4).

    Example:
      >>> float(maxfl_objective(mean_estimation([0.0], [1.0]), 1.0))
      0.5
    """
    # Use 1 - sigma(-gap), because JAX computes sigma' as sigma (1 - sigma), which is 0 for gaps
    # above 37, where sigma rounds to 1. The small values sigma(-gap) do not round to 0.
    return jnp.mean(1 - jax.nn.sigmoid(-task.gaps(params)))


def relu_objective(task: MeanEstimation, params: Any) -> Any:
    """MaxFL with a ReLU instead of a sigmoid, the mean of ``max(F_k(w) - rho_k, 0)``.

    Gaps are never negative in mean estimation, so the minimizer is FedAvg's.

    Example:
      >>> float(relu_objective(mean_estimation([0.0, 2.0], [0.0, 2.0]), 1.0))
      1.0
    """
    return jnp.mean(jax.nn.relu(task.gaps(params)))


def log_objective(task: MeanEstimation, params: Any) -> Any:
    """MaxFL with the log loss, the mean of ``log(1 + exp(F_k(w) - rho_k))``.

    Its gradient weights clients by ``sigma(F_k(w) - rho_k)``, the weight in Algorithm 1, line 8.
    The objective is convex, as Lemma A.2 assumes for surrogates with FedAvg's minimizer.

    Example:
      >>> round(float(log_objective(mean_estimation([0.0], [1.0]), 1.0)), 4)
      0.6931
    """
    return jnp.mean(jax.nn.softplus(task.gaps(params)))


Objective: TypeAlias = Callable[[MeanEstimation, Any], Any]
"""Maps a task and a model to a number."""

OBJECTIVES: Mapping[str, Objective] = MappingProxyType(
    {
        "FedAvg": fedavg_objective,
        "MaxFL": maxfl_objective,
        "MaxFL (ReLU)": relu_objective,
        "MaxFL (log loss)": log_objective,
    }
)
"""The objectives, by name."""
