# The package loads each of these names when it is first used: `__init__.py` reads this file.

from . import cohorts, constants, fairness, gossip, maxfl, mean_estimation, mfa, mfa_lemmas, rates
from .gossip import spectral_gap
from .problem import Problem, Rate

__all__ = [
    "Problem",
    "Rate",
    "cohorts",
    "constants",
    "fairness",
    "gossip",
    "maxfl",
    "mean_estimation",
    "mfa",
    "mfa_lemmas",
    "rates",
    "spectral_gap",
]
