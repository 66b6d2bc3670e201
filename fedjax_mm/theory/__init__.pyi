# The package loads each of these names when it is first used: `__init__.py` reads this file.

from . import (
    cohorts,
    constants,
    fairness,
    gossip,
    local_steps,
    maxfl,
    mean_estimation,
    mfa,
    mfa_lemmas,
    rates,
)
from .gossip import spectral_gap
from .moments import Exact, exact, stationary
from .problem import HypothesisError, Problem, Rate, require
from .validation import against, over, tightest, validate

__all__ = [
    "Exact",
    "HypothesisError",
    "Problem",
    "Rate",
    "against",
    "cohorts",
    "constants",
    "exact",
    "fairness",
    "gossip",
    "local_steps",
    "maxfl",
    "mean_estimation",
    "mfa",
    "mfa_lemmas",
    "over",
    "rates",
    "require",
    "spectral_gap",
    "stationary",
    "tightest",
    "validate",
]
