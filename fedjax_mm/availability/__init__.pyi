# The package loads each of these names when it is first used: `__init__.py` reads this file.

from .jobs import arriving, finishing
from .laws import Law, bernoulli, cyclic, markov, share_of_examples, timetable
from .wrappers import available, dropping

__all__ = [
    "Law",
    "arriving",
    "available",
    "bernoulli",
    "cyclic",
    "dropping",
    "finishing",
    "markov",
    "share_of_examples",
    "timetable",
]
