# The package loads each of these names when it is first used: `__init__.py` reads this file.

from . import (
    asynchrony,
    availability,
    base,
    compression,
    data,
    metrics,
    optimizers,
    plots,
    privacy,
    robust,
    schedules,
    sweeps,
    tasks,
    theory,
)
from .algorithms.afl import afl
from .algorithms.apfl import apfl
from .algorithms.attackers import attacked, noisy
from .algorithms.ditto import ditto
from .algorithms.fedavg import fedavg
from .algorithms.feddyn import feddyn
from .algorithms.fednova import fednova
from .algorithms.fedprox import fedprox
from .algorithms.maxfl import maxfl
from .algorithms.mifa import mifa
from .algorithms.moon import moon
from .algorithms.mwfed import mwfed
from .algorithms.perfedavg import perfedavg
from .algorithms.pfedme import pfedme
from .algorithms.prsgd import prsgd
from .algorithms.qffl import qffl
from .algorithms.scaffold import scaffold
from .algorithms.sharing import personal
from .algorithms.stalevr import stalevr
from .assignments.appealing import appealing
from .assignments.bandits import bandit
from .assignments.clusters import ifca
from .assignments.fairness import fedfair
from .assignments.informed import oort, power_of_choice
from .assignments.partitions import fedcluster, full_participation, mfa_rand, mfa_rr, sequential
from .assignments.rotating import dma_fl, mdh
from .assignments.scheduling import scheduled
from .assignments.variance_reduced import variance_reduced
from .checks.annotations import part
from .experiments.experiment import Experiment
from .experiments.run import run
from .local.servers import averaging
from .local.settings import local_sgd
from .results.dataset import save_dataset, to_dataset
from .results.finished import open_result
from .results.manifest import show_versions
from .simulator.record import join_traces
from .simulator.round import State
from .simulator.simulate import advance, init, params_of, simulate
from .sweeps.sweep import sweep

__all__ = [
    "Experiment",
    "State",
    "advance",
    "afl",
    "apfl",
    "appealing",
    "asynchrony",
    "attacked",
    "availability",
    "averaging",
    "bandit",
    "base",
    "compression",
    "data",
    "ditto",
    "dma_fl",
    "fedavg",
    "fedcluster",
    "feddyn",
    "fedfair",
    "fednova",
    "fedprox",
    "full_participation",
    "ifca",
    "init",
    "join_traces",
    "local_sgd",
    "maxfl",
    "mdh",
    "metrics",
    "mfa_rand",
    "mfa_rr",
    "mifa",
    "moon",
    "mwfed",
    "noisy",
    "oort",
    "open_result",
    "optimizers",
    "params_of",
    "part",
    "perfedavg",
    "personal",
    "pfedme",
    "plots",
    "power_of_choice",
    "privacy",
    "prsgd",
    "qffl",
    "robust",
    "run",
    "save_dataset",
    "scaffold",
    "scheduled",
    "schedules",
    "sequential",
    "show_versions",
    "simulate",
    "stalevr",
    "sweep",
    "sweeps",
    "tasks",
    "theory",
    "to_dataset",
    "variance_reduced",
]

__version__: str
