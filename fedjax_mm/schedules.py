"""Learning rates of the papers, as schedules of the round t = 1, 2, ...

Any optax schedule may stand beside them: it is evaluated at the round, once, and all local steps
use that rate.
"""

from typing import Any

from fedjax_mm.base import Schedule


def inverse_time(beta: Any, gamma: Any) -> Schedule:
    """The decaying rate ``beta / (t + gamma)`` of Theorem 1. `beta` and `gamma` may be traced.

    Example:
      >>> inverse_time(30.0, 100.0)(20)
      0.25
    """
    return lambda t: beta / (t + gamma)


def per_frame(schedule: Schedule, num_models: int) -> Schedule:
    """The schedule at the frame ``l = 1 + floor((t - 1) / M)`` instead of the round (Theorem 2).

    Example:
      >>> rate = per_frame(inverse_time(30.0, 99.0), num_models=12)
      >>> rate(1) == rate(12) == 30 / 100, rate(13) == 30 / 101
      (True, True)
    """
    return lambda t: schedule(1 + (t - 1) // num_models)
