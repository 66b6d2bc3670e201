"""The papers' learning rates and sample sizes, as schedules of the round t = 1, 2, ...

Any optax schedule works too. `LocalSGD.rate` in `local/` evaluates it once per round, and all
local steps use that value.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp

from fedjax_mm.base import Steps
from fedjax_mm.checks.annotations import Count, part

__all__ = ["Schedule", "growing_sample_size", "inverse_time", "per_frame"]

Schedule: TypeAlias = Callable[[Any], Any]
"""An optax schedule, evaluated at the round t (or the frame l) and constant within a round."""


def value_at(schedule: Any, t: Any) -> Any:
    """Returns the value of a schedule in round t, or the number given instead of a schedule."""
    return schedule(t) if callable(schedule) else schedule


@part
def inverse_time(beta: Any, gamma: Any) -> Schedule:
    """Returns the decaying rate ``beta / (t + gamma)`` of Theorem 1.

    Both numbers may be traced.

    Example:
      >>> inverse_time(30.0, 100.0)(20)
      0.25
    """
    return lambda t: beta / (t + gamma)


@part
def per_frame(schedule: Schedule, num_models: Steps) -> Schedule:
    """Evaluates a schedule at the frame ``l = 1 + floor((t - 1) / M)``, as in Theorem 2.

    Example:
      >>> rate = per_frame(inverse_time(30.0, 99.0), num_models=12)
      >>> rate(1) == rate(12) == 30 / 100, rate(13) == 30 / 101
      (True, True)
    """
    return lambda t: schedule(1 + (t - 1) // num_models)


@part
def growing_sample_size(
    learning_rate: Schedule,
    *,
    num_examples: Count,
    local_steps: Count,
    gradient_bound: Any,
    noise: tuple[Any, Any],
    growth: Any,
) -> Schedule:
    """Returns a schedule of N_s(t), the sample size that Theorem 2 requires in round t.

    It is the smallest size with ``(S - N_s(t)) / S <= eta_t V / (2 E sqrt(beta_1 + beta_2 G^2))``,
    and at least 1. With a decaying rate it grows to include all examples. Pass it to `fedavg` as
    `batch_size`.

    Args:
      learning_rate: eta_t.
      num_examples: S, the number of examples of the largest client; smaller clients use all of
        their examples sooner.
      local_steps: E.
      gradient_bound: G. This and the arguments below may be traced.
      noise: beta_1 and beta_2 of Assumption 4.
      growth: V; 0 uses all examples.

    Example:
      >>> constants = {"gradient_bound": 1.0, "noise": (0.0, 1.0), "growth": 3.0}
      >>> rate = inverse_time(2.0, 3.0)
      >>> size = growing_sample_size(rate, num_examples=100, local_steps=1, **constants)
      >>> [int(size(t)) for t in (1, 100, 10_000)]
      [26, 98, 100]

    Reference: Bhuyan, Moharir, Joshi, Theorem 2 and eq. (31). `theory.mfa.least_sample_size`
    computes the same size in double precision, which is at most one example smaller.
    """
    beta_1, beta_2 = noise

    def size(t: Any) -> Any:
        left_out = learning_rate(t) * growth
        left_out /= 2 * local_steps * jnp.sqrt(beta_1 + beta_2 * gradient_bound**2)
        # Rounding must not make the sample smaller than the condition allows, hence 1e-6.
        least = jnp.ceil(num_examples * (1 - left_out + 1e-6))
        return jnp.clip(least, 1, num_examples).astype(jnp.int32)

    return size
