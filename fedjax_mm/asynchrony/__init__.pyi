# The package loads each of these names when it is first used: `__init__.py` reads this file.

from .clock import on_clock
from .delays import Delay, device_time, shifted_exponential
from .dispatch import Dispatch, fedast
from .planning import bods
from .staleness import StaleWeight, hinge, polynomial

__all__ = [
    "Delay",
    "Dispatch",
    "StaleWeight",
    "bods",
    "device_time",
    "fedast",
    "hinge",
    "on_clock",
    "polynomial",
    "shifted_exponential",
]
