# The package loads each of these names when it is first used: `__init__.py` reads this file.

from .comparisons import at_least, at_most, fact, first, increases, less, more, standing, within
from .evidence import Evidence
from .judging import Judged, Verdicts, judge
from .printed import mean_above, near, one_draw, welch

__all__ = [
    "Evidence",
    "Judged",
    "Verdicts",
    "at_least",
    "at_most",
    "fact",
    "first",
    "increases",
    "judge",
    "less",
    "mean_above",
    "more",
    "near",
    "one_draw",
    "standing",
    "welch",
    "within",
]
