"""Asynchronous training in simulated time: who works on what, how long it takes, what it brings."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
