# The package loads each of these names when it is first used: `__init__.py` reads this file.

from .checkpoint import Checkpoints
from .devices import join_processes, layout, use_cpu_devices
from .errors import DivergenceError, InterruptedRunError
from .execution import Execution
from .grid import Setup
from .shapes import state_bytes
from .until import Until

__all__ = [
    "Checkpoints",
    "DivergenceError",
    "Execution",
    "InterruptedRunError",
    "Setup",
    "Until",
    "join_processes",
    "layout",
    "state_bytes",
    "use_cpu_devices",
]
