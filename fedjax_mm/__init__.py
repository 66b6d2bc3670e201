"""A vectorized simulator of multi-model federated learning in JAX."""

from fedjax_mm.algorithms.afl import afl
from fedjax_mm.algorithms.ditto import ditto
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.algorithms.fedprox import fedprox
from fedjax_mm.algorithms.maxfl import maxfl
from fedjax_mm.algorithms.mwfed import mwfed
from fedjax_mm.algorithms.noisy import noisy
from fedjax_mm.algorithms.perfedavg import perfedavg
from fedjax_mm.algorithms.qffl import qffl
from fedjax_mm.algorithms.scaffold import scaffold
from fedjax_mm.assignment import (
    appealing,
    fedcluster,
    full_participation,
    mfa_rand,
    mfa_rr,
    sequential,
)
from fedjax_mm.base import (
    Algorithm,
    AnalyticTask,
    Assignment,
    Batching,
    Contribution,
    DemandingTask,
    EpochTask,
    Groups,
    LocalProblem,
    Look,
    MeasuredTask,
    Task,
)
from fedjax_mm.checkpoint import Checkpoints
from fedjax_mm.data.celeba import load_celeba
from fedjax_mm.data.clients import ClientData, client_data, flat_client_data
from fedjax_mm.data.dealing import federate, flip_labels
from fedjax_mm.data.digits import digits
from fedjax_mm.data.federated import FederatedData, Pool, stack_data
from fedjax_mm.data.idx import load_idx
from fedjax_mm.data.leaf import load_leaf
from fedjax_mm.data.sent140 import load_sent140, surrogate_tweets
from fedjax_mm.data.surrogate import surrogate_faces
from fedjax_mm.data.synthetic import synthetic
from fedjax_mm.devices import join_processes, layout, use_cpu_devices
from fedjax_mm.experiment import Experiment, Sweep
from fedjax_mm.local import averaging
from fedjax_mm.metrics import first_round_below, gain, log_gap, standard_error
from fedjax_mm.minimize import Minimum, local_minimum
from fedjax_mm.plan import Setup
from fedjax_mm.record import Trace
from fedjax_mm.results import save_dataset, to_dataset
from fedjax_mm.runs import run
from fedjax_mm.schedules import growing_sample_size, inverse_time, per_frame
from fedjax_mm.simulate import State, advance, init, simulate
from fedjax_mm.sums import SparseUpdate
from fedjax_mm.sweep import DivergenceError, Execution, InterruptedRunError, sweep
from fedjax_mm.tasks.attackers import attacked
from fedjax_mm.tasks.classification import Classification, classification
from fedjax_mm.tasks.least_squares import LeastSquares, least_squares
from fedjax_mm.tasks.mean_estimation import (
    MeanEstimation,
    draw_means,
    fedavg_objective,
    log_objective,
    maxfl_objective,
    mean_estimation,
    relu_objective,
)
from fedjax_mm.tasks.networks import MLP, CelebACNN, LogisticRegression, McMahanCNN
from fedjax_mm.tasks.quadratic import Quadratic, quadratic
from fedjax_mm.tasks.requirements import OwnModels, Tuning, own_models, requiring

__all__ = [
    "MLP",
    "Algorithm",
    "AnalyticTask",
    "Assignment",
    "Batching",
    "CelebACNN",
    "Checkpoints",
    "Classification",
    "ClientData",
    "Contribution",
    "DemandingTask",
    "DivergenceError",
    "EpochTask",
    "Execution",
    "Experiment",
    "FederatedData",
    "Groups",
    "InterruptedRunError",
    "LeastSquares",
    "LocalProblem",
    "LogisticRegression",
    "Look",
    "McMahanCNN",
    "MeanEstimation",
    "MeasuredTask",
    "Minimum",
    "OwnModels",
    "Pool",
    "Quadratic",
    "Setup",
    "SparseUpdate",
    "State",
    "Sweep",
    "Task",
    "Trace",
    "Tuning",
    "advance",
    "afl",
    "appealing",
    "attacked",
    "averaging",
    "classification",
    "client_data",
    "digits",
    "ditto",
    "draw_means",
    "fedavg",
    "fedavg_objective",
    "fedcluster",
    "federate",
    "fedprox",
    "first_round_below",
    "flat_client_data",
    "flip_labels",
    "full_participation",
    "gain",
    "growing_sample_size",
    "init",
    "inverse_time",
    "join_processes",
    "layout",
    "least_squares",
    "load_celeba",
    "load_idx",
    "load_leaf",
    "load_sent140",
    "local_minimum",
    "log_gap",
    "log_objective",
    "maxfl",
    "maxfl_objective",
    "mean_estimation",
    "mfa_rand",
    "mfa_rr",
    "mwfed",
    "noisy",
    "own_models",
    "per_frame",
    "perfedavg",
    "qffl",
    "quadratic",
    "relu_objective",
    "requiring",
    "run",
    "save_dataset",
    "scaffold",
    "sequential",
    "simulate",
    "stack_data",
    "standard_error",
    "surrogate_faces",
    "surrogate_tweets",
    "sweep",
    "synthetic",
    "to_dataset",
    "use_cpu_devices",
]
