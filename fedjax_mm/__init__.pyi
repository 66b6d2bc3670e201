# The package loads each of these names when it is first used: `__init__.py` reads this file.

from . import asynchrony, base, data, metrics, plots, schedules, sweeps, tasks, theory
from .algorithms.afl import afl
from .algorithms.attackers import attacked, noisy
from .algorithms.ditto import ditto
from .algorithms.fedavg import fedavg
from .algorithms.fedprox import fedprox
from .algorithms.maxfl import maxfl
from .algorithms.mwfed import mwfed
from .algorithms.perfedavg import perfedavg
from .algorithms.prsgd import prsgd
from .algorithms.qffl import qffl
from .algorithms.scaffold import scaffold
from .assignments.appealing import appealing
from .assignments.partitions import fedcluster, full_participation, mfa_rand, mfa_rr, sequential
from .asynchrony.training import simulate_async
from .experiments.experiment import Experiment
from .experiments.run import run
from .local import averaging
from .record import Trace, join_traces
from .results.dataset import open_result, save_dataset, to_dataset
from .simulate import State, advance, init, params_of, simulate
from .sweeps.devices import use_cpu_devices
from .sweeps.execute import sweep
from .sweeps.grid import Setup
from .tasks.requirements import own_models, requiring

__all__ = [
    "Experiment",
    "Setup",
    "State",
    "Trace",
    "advance",
    "afl",
    "appealing",
    "asynchrony",
    "attacked",
    "averaging",
    "base",
    "data",
    "ditto",
    "fedavg",
    "fedcluster",
    "fedprox",
    "full_participation",
    "init",
    "join_traces",
    "maxfl",
    "metrics",
    "mfa_rand",
    "mfa_rr",
    "mwfed",
    "noisy",
    "open_result",
    "own_models",
    "params_of",
    "perfedavg",
    "plots",
    "prsgd",
    "qffl",
    "requiring",
    "run",
    "save_dataset",
    "scaffold",
    "schedules",
    "sequential",
    "simulate",
    "simulate_async",
    "sweep",
    "sweeps",
    "tasks",
    "theory",
    "to_dataset",
    "use_cpu_devices",
]

__version__: str
