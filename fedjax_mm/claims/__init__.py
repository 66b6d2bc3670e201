"""Claims about results: which comparisons hold, by how much, and the seeds that decide them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
