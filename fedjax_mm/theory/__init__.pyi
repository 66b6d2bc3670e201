# The package loads each of these names when it is first used: `__init__.py` reads this file.

from . import cohorts, constants, fairness, maxfl, mean_estimation, mfa, mfa_lemmas, rates
from .moments import Exact, exact, stationary
from .problem import Problem, Rate

__all__ = [
    "Exact",
    "Problem",
    "Rate",
    "cohorts",
    "constants",
    "exact",
    "fairness",
    "maxfl",
    "mean_estimation",
    "mfa",
    "mfa_lemmas",
    "rates",
    "stationary",
]
