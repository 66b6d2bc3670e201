# The package loads each of these names when it is first used: `__init__.py` reads this file.

from .aggregation import robust
from .attacks import (
    Attack,
    Honest,
    alie,
    alie_factor,
    attacking,
    gaussian,
    ipm,
    scaling,
    sign_flip,
)
from .backdoor import backdoored
from .rules import (
    Rule,
    bucketing,
    bulyan,
    centered_clipping,
    fltrust,
    geometric_median,
    krum,
    mean,
    median,
    multi_krum,
    nearest_neighbor_mixing,
    trimmed_mean,
)

__all__ = [
    "Attack",
    "Honest",
    "Rule",
    "alie",
    "alie_factor",
    "attacking",
    "backdoored",
    "bucketing",
    "bulyan",
    "centered_clipping",
    "fltrust",
    "gaussian",
    "geometric_median",
    "ipm",
    "krum",
    "mean",
    "median",
    "multi_krum",
    "nearest_neighbor_mixing",
    "robust",
    "scaling",
    "sign_flip",
    "trimmed_mean",
]
