"""Robust aggregation: rules that replace the mean of the updates, and attacks to test them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
