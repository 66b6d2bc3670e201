"""Robust aggregation: rules that replace the mean of the updates, and attacks to test them."""

import sys
import types
from typing import Any, NoReturn

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


class _Package(types.ModuleType):
    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "fedjax_mm.robust is a module, and its function has the same name; write "
            "robust.robust(algorithm, rule), or from fedjax_mm.robust import robust"
        )


sys.modules[__name__].__class__ = _Package
