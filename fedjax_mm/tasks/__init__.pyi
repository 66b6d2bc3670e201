# The package loads each of these names when it is first used: `__init__.py` reads this file.

from .classification import Classification, classification
from .drift import Drifting, drifting
from .least_squares import LeastSquares, least_squares
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
from .view import client_losses
from .with_clients import with_clients
from .with_metrics import with_metrics

__all__ = [
    "MLP",
    "BatchNormCNN",
    "CelebACNN",
    "CharacterGRU",
    "Classification",
    "Drifting",
    "LeastSquares",
    "LogisticRegression",
    "McMahanCNN",
    "MeanEstimation",
    "Minimum",
    "OwnModels",
    "Quadratic",
    "ReddiCNN",
    "Requiring",
    "Tuning",
    "classification",
    "client_losses",
    "draw_means",
    "drifting",
    "fedavg_objective",
    "largest_curvature",
    "least_squares",
    "local_minimum",
    "log_objective",
    "maxfl_objective",
    "mean_estimation",
    "own_models",
    "quadratic",
    "relu_objective",
    "requiring",
    "with_clients",
    "with_metrics",
]
