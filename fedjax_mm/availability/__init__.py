"""Client availability: which clients are present in a round, and which messages are lost."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
