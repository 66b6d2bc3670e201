"""Adaptive server optimizers of federated learning, as optax optimizers.

FedAvgM is ``optax.sgd(eta, momentum=b1)``. No call of optax equals the others: `optax.adam` and
`optax.yogi` correct the bias of their means, and `optax.adagrad` adds its constant inside the root.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from annotated_types import Interval
from jaxtyping import Array, Int

from fedjax_mm.base import Params, Scalar
from fedjax_mm.base.sums import root
from fedjax_mm.checks.annotations import NonNegative, Positive, part
from fedjax_mm.checks.instances import check_rate
from fedjax_mm.schedules import Schedule, value_at

__all__ = ["fedadagrad", "fedadam", "fedyogi"]

Decay: TypeAlias = Annotated[Scalar, Interval(ge=0, lt=1)]
"""A decay rate, which may be traced."""


class AdaptiveState(NamedTuple):
    """State of an adaptive server optimizer.

    Attributes:
      step: the number of steps so far.
      mean: m, like the parameters.
      square: v, like the parameters.
    """

    step: Int[Array, ""]
    mean: Params
    square: Params


@part
def fedadagrad(
    learning_rate: Scalar | Schedule,
    *,
    b1: Decay = 0.0,
    tau: Positive = 1e-3,
    initial_accumulator_value: NonNegative | None = None,
) -> optax.GradientTransformation:
    """FedAdagrad: ``v <- v + D^2`` and ``w <- w + eta m / (sqrt(v) + tau)``.

    D is the mean update of a round, and ``m <- b1 m + (1 - b1) D`` starts at 0.

    Args:
      learning_rate: eta, a number or an optax schedule of the number of steps so far.
      b1: the decay rate of m; 0 as in the paper.
      tau: the degree of adaptivity; smaller values are more adaptive.
      initial_accumulator_value: the initial v; None is tau^2, the smallest value that the paper
        allows.

    Raises:
      ValueError: if a number is out of range.

    Example:
      >>> from fedjax_mm import fedavg, full_participation, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = fedavg(0.1, local_steps=5, server_optimizer=fedadagrad(0.01))
      >>> _, trace = simulate(
      ...     0, quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Reddi et al., "Adaptive Federated Optimization" (2021).
    """

    def accumulated(v: Array, squares: Array) -> Array:
        return v + squares

    return _adaptive(learning_rate, b1, tau, initial_accumulator_value, accumulated)


@part
def fedadam(
    learning_rate: Scalar | Schedule,
    *,
    b1: Decay = 0.9,
    b2: Decay = 0.99,
    tau: Positive = 1e-3,
    initial_accumulator_value: NonNegative | None = None,
) -> optax.GradientTransformation:
    """FedAdam: ``v <- b2 v + (1 - b2) D^2`` and ``w <- w + eta m / (sqrt(v) + tau)``.

    D is the mean update of a round, and ``m <- b1 m + (1 - b1) D`` starts at 0. Bias is not
    corrected.

    Args:
      learning_rate: eta, a number or an optax schedule of the number of steps so far.
      b1: the decay rate of m.
      b2: the decay rate of v.
      tau: the degree of adaptivity; smaller values are more adaptive.
      initial_accumulator_value: the initial v; None is tau^2.

    Raises:
      ValueError: if a number is out of range.

    Example:
      >>> from fedjax_mm import fedavg, full_participation, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = fedavg(0.1, local_steps=5, server_optimizer=fedadam(0.01))
      >>> _, trace = simulate(
      ...     0, quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Reddi et al. (2021).
    """

    def averaged(v: Array, squares: Array) -> Array:
        return b2 * v + (1 - b2) * squares

    return _adaptive(learning_rate, b1, tau, initial_accumulator_value, averaged)


@part
def fedyogi(
    learning_rate: Scalar | Schedule,
    *,
    b1: Decay = 0.9,
    b2: Decay = 0.99,
    tau: Positive = 1e-3,
    initial_accumulator_value: NonNegative | None = None,
) -> optax.GradientTransformation:
    """FedYogi: ``v <- v - (1 - b2) D^2 sign(v - D^2)`` and ``w <- w + eta m / (sqrt(v) + tau)``.

    D is the mean update of a round, and ``m <- b1 m + (1 - b1) D`` starts at 0.

    Args:
      learning_rate: eta, a number or an optax schedule of the number of steps so far.
      b1: the decay rate of m.
      b2: the decay rate of v.
      tau: the degree of adaptivity; smaller values are more adaptive.
      initial_accumulator_value: the initial v; None is tau^2.

    Raises:
      ValueError: if a number is out of range.

    Example:
      >>> from fedjax_mm import fedavg, full_participation, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = fedavg(0.1, local_steps=5, server_optimizer=fedyogi(0.01))
      >>> _, trace = simulate(
      ...     0, quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Reddi et al. (2021).
    """

    def signed(v: Array, squares: Array) -> Array:
        return v - (1 - b2) * squares * jnp.sign(v - squares)

    return _adaptive(learning_rate, b1, tau, initial_accumulator_value, signed)


def _adaptive(
    learning_rate: Scalar | Schedule,
    b1: Scalar,
    tau: Scalar,
    start: Scalar | None,
    accumulate: Callable[[Array, Array], Array],
) -> optax.GradientTransformation:
    """The optimizers of Reddi et al., which differ only in how v accumulates D^2."""
    check_rate("learning_rate", learning_rate)
    first: Any = tau**2 if start is None else start

    def init(params: Params) -> AdaptiveState:
        mean = jax.tree.map(jnp.zeros_like, params)
        return AdaptiveState(jnp.int32(0), mean, jax.tree.map(lambda m: _like(m, m + first), mean))

    def update(
        gradient: Params, state: AdaptiveState, params: Params | None = None
    ) -> tuple[Params, AdaptiveState]:
        del params
        rate = value_at(learning_rate, state.step)
        # The gradient is -D.
        mean = jax.tree.map(lambda m, g: _like(m, b1 * m - (1 - b1) * g), state.mean, gradient)
        square = jax.tree.map(lambda v, g: _like(v, accumulate(v, g**2)), state.square, gradient)
        step = jax.tree.map(lambda m, v: _like(m, rate * m / (root(v) + tau)), mean, square)
        return step, AdaptiveState(state.step + 1, mean, square)

    return optax.GradientTransformation(init, update)


def _like(old: Array, new: Array) -> Array:
    return new.astype(old.dtype)
