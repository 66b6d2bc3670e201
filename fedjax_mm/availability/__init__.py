"""Clients that are not always there: laws of their presence, and messages that are lost."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
