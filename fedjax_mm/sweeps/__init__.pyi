# The package loads each of these names when it is first used: `__init__.py` reads this file.

from .callbacks import Callback, Segment, progress
from .checkpoint import Checkpoints
from .devices import agree, join_processes, layout, use_cpu_devices
from .errors import DivergenceError, InterruptedRunError, RefusedError, refusing
from .execution import Execution
from .grid import Grid, Setup
from .program import OneOf
from .shapes import state_bytes
from .until import Until

__all__ = [
    "Callback",
    "Checkpoints",
    "DivergenceError",
    "Execution",
    "Grid",
    "InterruptedRunError",
    "OneOf",
    "RefusedError",
    "Segment",
    "Setup",
    "Until",
    "agree",
    "join_processes",
    "layout",
    "progress",
    "refusing",
    "state_bytes",
    "use_cpu_devices",
]
