# The package loads each of these names when it is first used: `__init__.py` reads this file.

from .comparisons import at_least, at_most, fact, first, increases, less, more, standing, within
from .evidence import LEVEL, Evidence, combined, rows_of
from .judge import Judged, Verdicts, judge
from .parts import Part
from .printed import mean_above, near, one_draw, welch

__all__ = [
    "LEVEL",
    "Evidence",
    "Judged",
    "Part",
    "Verdicts",
    "at_least",
    "at_most",
    "combined",
    "fact",
    "first",
    "increases",
    "judge",
    "less",
    "mean_above",
    "more",
    "near",
    "one_draw",
    "rows_of",
    "standing",
    "welch",
    "within",
]
