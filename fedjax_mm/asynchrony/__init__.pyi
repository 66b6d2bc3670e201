# The package loads each of these names when it is first used: `__init__.py` reads this file.

from .clock import on_clock
from .delays import Delay, device_time, shifted_exponential
from .dispatch import Dispatch, fedast
from .planning import bods

__all__ = [
    "Delay",
    "Dispatch",
    "bods",
    "device_time",
    "fedast",
    "on_clock",
    "shifted_exponential",
]
