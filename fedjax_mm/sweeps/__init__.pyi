# The package loads each of these names when it is first used: `__init__.py` reads this file.

from .checkpoint import Checkpoints, Saved
from .cluster import Part
from .devices import agree, join_processes, layout, use_cpu_devices
from .errors import DivergenceError, InterruptedRunError, RefusedError, refusing
from .execution import Callback, Execution, progress
from .grid import Grid, Setup
from .plan import Segment
from .program import state_bytes
from .sweep import merge
from .until import Until

__all__ = [
    "Callback",
    "Checkpoints",
    "DivergenceError",
    "Execution",
    "Grid",
    "InterruptedRunError",
    "Part",
    "RefusedError",
    "Saved",
    "Segment",
    "Setup",
    "Until",
    "agree",
    "join_processes",
    "layout",
    "merge",
    "progress",
    "refusing",
    "state_bytes",
    "use_cpu_devices",
]
