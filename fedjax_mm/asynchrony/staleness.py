"""Weights of updates by their staleness, the steps that a model took during the job.

`simulator/asynchronous.py` applies them.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fedjax_mm.base import Scalar
from fedjax_mm.checks.annotations import NonNegative, part
from fedjax_mm.checks.values import described, tracing


class StaleWeight(Protocol):
    """Function from the staleness of an update to its factor."""

    def __call__(self, staleness: Int[Array, ""]) -> Scalar:
        """Factor of an update during whose job the model took `staleness` steps."""


@part
def polynomial(exponent: NonNegative = 0.5) -> StaleWeight:
    """Weights ``(1 + s)^-a`` of updates with staleness s.

    Args:
      exponent: a; 0 weights all updates equally.

    Example:
      >>> polynomial(0.5)(jnp.int32(3))
      Array(0.5, dtype=float32, weak_type=True)

    Reference: Xie, Koyejo, Gupta, "Asynchronous Federated Optimization" (2019).
    """
    return lambda staleness: (1.0 + staleness) ** -exponent


@part
def hinge(slope: NonNegative = 10.0, *, free: NonNegative = 6) -> StaleWeight:
    """Weights ``1 / (1 + a max(s - b, 0))`` of updates with staleness s.

    Args:
      slope: a.
      free: b, the staleness up to which the weight is 1.

    Example:
      >>> [float(hinge(1.0, free=2)(jnp.int32(s))) for s in (0, 2, 3)]
      [1.0, 1.0, 0.5]

    Reference: Xie, Koyejo, Gupta, "Asynchronous Federated Optimization" (2019).
    """
    return lambda staleness: 1 / (1 + slope * jnp.maximum(staleness - free, 0))


def check_stale_weight(weight: Any) -> None:
    """Raises an error if the argument is not a `StaleWeight`."""
    if not callable(weight):
        raise TypeError(
            f"weight is {described(weight)}; give a function of the staleness, such as "
            "asynchrony.polynomial(0.5)"
        )
    with tracing("weight(staleness)"):
        found = jax.eval_shape(
            lambda s: jnp.asarray(weight(s)), jax.ShapeDtypeStruct((), jnp.int32)
        )
    if found.shape or not jnp.issubdtype(found.dtype, jnp.floating):
        raise TypeError(f"weight returns {found.dtype}{list(found.shape)}; return one real number")
