# The package loads each of these names when it is first used: `__init__.py` reads this file.

from .delays import Delay, on_clock, shifted_exponential
from .dispatch import Dispatch, fedast
from .training import advance_async, simulate_async, state_bytes

__all__ = [
    "Delay",
    "Dispatch",
    "advance_async",
    "fedast",
    "on_clock",
    "shifted_exponential",
    "simulate_async",
    "state_bytes",
]
