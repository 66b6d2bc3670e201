# The package loads each of these names when it is first used: `__init__.py` reads this file.

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
from .assignment import (
    appealing,
    fedcluster,
    full_participation,
    mfa_rand,
    mfa_rr,
    sequential,
)
from .base import (
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
from .data.celeba import load_celeba
from .data.clients import ClientData, client_data, flat_client_data
from .data.digits import digits
from .data.federate import federate, flip_labels
from .data.federated import FederatedData, Pool, stack_data
from .data.idx import load_idx
from .data.leaf import load_leaf
from .data.sent140 import load_sent140
from .data.surrogate import surrogate_faces, surrogate_tweets
from .data.synthetic import synthetic
from .experiments.experiment import Experiment
from .experiments.run import run
from .local import averaging
from .record import Trace, join_traces
from .results.dataset import open_result, save_dataset, to_dataset
from .results.metrics import first_round_below, gain, log_gap, standard_error
from .schedules import growing_sample_size, inverse_time, per_frame
from .simulate import State, advance, init, params_of, simulate
from .sums import SparseUpdate
from .sweeps.checkpoint import Checkpoints
from .sweeps.devices import join_processes, layout, use_cpu_devices
from .sweeps.errors import DivergenceError, InterruptedRunError
from .sweeps.execute import Execution, sweep
from .sweeps.grid import Setup
from .sweeps.until import Until
from .tasks.classification import Classification, classification
from .tasks.least_squares import LeastSquares, least_squares
from .tasks.mean_estimation import (
    MeanEstimation,
    draw_means,
    fedavg_objective,
    log_objective,
    maxfl_objective,
    mean_estimation,
    relu_objective,
)
from .tasks.minimize import Minimum, local_minimum
from .tasks.networks import MLP, CelebACNN, LogisticRegression, McMahanCNN
from .tasks.quadratic import Quadratic, quadratic
from .tasks.requirements import OwnModels, Tuning, own_models, requiring

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
    "Task",
    "Trace",
    "Tuning",
    "Until",
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
    "join_traces",
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
    "open_result",
    "own_models",
    "params_of",
    "per_frame",
    "perfedavg",
    "prsgd",
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
