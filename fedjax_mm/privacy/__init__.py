"""Differential privacy of clients: clipped and noisy sums, and the epsilon that rounds cost."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
