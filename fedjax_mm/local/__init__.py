"""Local training, and building blocks shared by federated methods."""

from fedjax_mm.local.gradients import (
    GradientFn,
    LocalStep,
    StepGradient,
    loss_and_gradient,
    proximal,
)
from fedjax_mm.local.keeping import keeping
from fedjax_mm.local.refused import REFUSED, check_local
from fedjax_mm.local.servers import (
    MeanFn,
    Optimized,
    adding,
    averaging,
    equal_weight,
    mean_update,
    no_states,
    optimized,
    weighing,
)
from fedjax_mm.local.settings import Epochs, LocalOptimizer, LocalSGD, local_sgd
from fedjax_mm.local.training import LocalUpdate, each_by, train_locally

__all__ = [
    "REFUSED",
    "Epochs",
    "GradientFn",
    "LocalOptimizer",
    "LocalSGD",
    "LocalStep",
    "LocalUpdate",
    "MeanFn",
    "Optimized",
    "StepGradient",
    "adding",
    "averaging",
    "check_local",
    "each_by",
    "equal_weight",
    "keeping",
    "local_sgd",
    "loss_and_gradient",
    "mean_update",
    "no_states",
    "optimized",
    "proximal",
    "train_locally",
    "weighing",
]
