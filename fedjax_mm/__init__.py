"""A vectorized simulator of multi-model federated learning in JAX."""

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignment import fedcluster, full_participation, mfa_rand, mfa_rr, sequential
from fedjax_mm.base import (
    Algorithm,
    AnalyticTask,
    Assignment,
    Batching,
    Contribution,
    EpochTask,
    SparseUpdate,
    Task,
)
from fedjax_mm.checkpoint import Checkpoints
from fedjax_mm.data.clients import ClientData, client_data
from fedjax_mm.devices import join_processes, layout, use_cpu_devices
from fedjax_mm.experiment import Experiment, Sweep
from fedjax_mm.metrics import first_round_below, gain, log_gap, standard_error
from fedjax_mm.plan import Setup
from fedjax_mm.results import save_dataset, to_dataset
from fedjax_mm.runs import run
from fedjax_mm.schedules import inverse_time, per_frame
from fedjax_mm.simulate import State, Trace, advance, init, simulate
from fedjax_mm.sweep import DivergenceError, Execution, InterruptedRunError, sweep
from fedjax_mm.tasks.least_squares import LeastSquares, least_squares
from fedjax_mm.tasks.quadratic import Quadratic, quadratic

__all__ = [
    "Algorithm",
    "AnalyticTask",
    "Assignment",
    "Batching",
    "Checkpoints",
    "ClientData",
    "Contribution",
    "DivergenceError",
    "EpochTask",
    "Execution",
    "Experiment",
    "InterruptedRunError",
    "LeastSquares",
    "Quadratic",
    "Setup",
    "SparseUpdate",
    "State",
    "Sweep",
    "Task",
    "Trace",
    "advance",
    "client_data",
    "fedavg",
    "fedcluster",
    "first_round_below",
    "full_participation",
    "gain",
    "init",
    "inverse_time",
    "join_processes",
    "layout",
    "least_squares",
    "log_gap",
    "mfa_rand",
    "mfa_rr",
    "per_frame",
    "quadratic",
    "run",
    "save_dataset",
    "sequential",
    "simulate",
    "standard_error",
    "sweep",
    "to_dataset",
    "use_cpu_devices",
]
