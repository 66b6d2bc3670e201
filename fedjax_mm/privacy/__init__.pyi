# The package loads each of these names when it is first used: `__init__.py` reads this file.

from .accounting import UncoveredError, epsilon, noise_for
from .examples import example_epsilon
from .mechanism import AdaptiveClip, private

__all__ = ["AdaptiveClip", "UncoveredError", "epsilon", "example_epsilon", "noise_for", "private"]
