# The package loads each of these names when it is first used: `__init__.py` reads this file.

from . import (
    asynchrony,
    availability,
    base,
    claims,
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
    topologies,
)
from .algorithms.afl import afl
from .algorithms.apfl import apfl
from .algorithms.attackers import attacked, noisy
from .algorithms.ditto import ditto
from .algorithms.fedavg import fedavg
from .algorithms.feddyn import feddyn
from .algorithms.fednova import fednova
from .algorithms.fedprox import fedprox
from .algorithms.gradient_tracking import gradient_tracking
from .algorithms.maxfl import maxfl
from .algorithms.mifa import mifa
from .algorithms.moon import moon
from .algorithms.mwfed import mwfed
from .algorithms.perfedavg import perfedavg
from .algorithms.pfedme import pfedme
from .algorithms.prsgd import prsgd
from .algorithms.qffl import qffl
from .algorithms.reporting import reporting
from .algorithms.scaffold import scaffold
from .algorithms.sharing import personal
from .algorithms.stalevr import stalevr
from .assignments.appealing import appealing
from .assignments.bandits import bandit
from .assignments.clusters import cfl, ifca, soft_clusters
from .assignments.fairness import fedfair
from .assignments.informed import oort, power_of_choice
from .assignments.partitions import fedcluster, full_participation, mfa_rand, mfa_rr, sequential
from .assignments.peers import edges, peers
from .assignments.rotating import dma_fl, mdh
from .assignments.scheduling import scheduled
from .assignments.variance_reduced import variance_reduced
from .checks.annotations import part
from .experiments.experiment import Experiment
from .experiments.run import run
from .local.servers import averaging
from .local.settings import local_sgd
from .results.dataset import join_seeds, save_dataset, to_dataset
from .results.finished import open_result
from .results.manifest import show_versions
from .simulator.record import join_traces
from .simulator.round import State
from .simulator.simulate import advance, init, params_of, simulate
from .sweeps.settle import settle
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
    "cfl",
    "claims",
    "compression",
    "data",
    "ditto",
    "dma_fl",
    "edges",
    "fedavg",
    "fedcluster",
    "feddyn",
    "fedfair",
    "fednova",
    "fedprox",
    "full_participation",
    "gradient_tracking",
    "ifca",
    "init",
    "join_seeds",
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
    "peers",
    "perfedavg",
    "personal",
    "pfedme",
    "plots",
    "power_of_choice",
    "privacy",
    "prsgd",
    "qffl",
    "reporting",
    "robust",
    "run",
    "save_dataset",
    "scaffold",
    "scheduled",
    "schedules",
    "sequential",
    "settle",
    "show_versions",
    "simulate",
    "soft_clusters",
    "stalevr",
    "sweep",
    "sweeps",
    "tasks",
    "theory",
    "to_dataset",
    "topologies",
    "variance_reduced",
]

__version__: str
