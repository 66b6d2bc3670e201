"""Asynchronous training in simulated time: dispatch of jobs, their delays, and server steps."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
