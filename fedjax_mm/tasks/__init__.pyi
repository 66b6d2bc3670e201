# The package loads each of these names when it is first used: `__init__.py` reads this file.

from .classification import classification
from .drift import Drifting, drifting
from .least_squares import LeastSquares, least_squares
from .lowrank import LowRank, low_rank
from .mean_estimation import (
    MeanEstimation,
    draw_means,
    fedavg_objective,
    log_objective,
    maxfl_objective,
    mean_estimation,
    relu_objective,
)
from .minimize import Minimum, local_minimum
from .networks import (
    MLP,
    BatchNormCNN,
    CelebACNN,
    CharacterGRU,
    LogisticRegression,
    McMahanCNN,
    ReddiCNN,
)
from .quadratic import Quadratic, largest_curvature, quadratic
from .requirements import OwnModels, Requiring, Tuning, own_models, requiring
from .scores import (
    absolute_error,
    accuracy,
    auc,
    calibration_error,
    class_accuracy,
    cross_entropy,
    f1,
    r2,
    squared_error,
    top_k_accuracy,
)
from .supervised import Supervised, supervised
from .view import client_losses
from .with_clients import with_clients
from .with_metrics import with_metrics

__all__ = [
    "MLP",
    "BatchNormCNN",
    "CelebACNN",
    "CharacterGRU",
    "Drifting",
    "LeastSquares",
    "LogisticRegression",
    "LowRank",
    "McMahanCNN",
    "MeanEstimation",
    "Minimum",
    "OwnModels",
    "Quadratic",
    "ReddiCNN",
    "Requiring",
    "Supervised",
    "Tuning",
    "absolute_error",
    "accuracy",
    "auc",
    "calibration_error",
    "class_accuracy",
    "classification",
    "client_losses",
    "cross_entropy",
    "draw_means",
    "drifting",
    "f1",
    "fedavg_objective",
    "largest_curvature",
    "least_squares",
    "local_minimum",
    "log_objective",
    "low_rank",
    "maxfl_objective",
    "mean_estimation",
    "own_models",
    "quadratic",
    "r2",
    "relu_objective",
    "requiring",
    "squared_error",
    "supervised",
    "top_k_accuracy",
    "with_clients",
    "with_metrics",
]
