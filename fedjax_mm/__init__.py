"""A vectorized simulator of multi-model federated learning in JAX."""

from typing import Any

import lazy_loader

from fedjax_mm.tools import compiler as compiler

# Import each name on first use, because importing everything would double the time of importing
# JAX, mostly for modules that a program never uses. `__init__.pyi` lists the names and their
# modules, both for this and for type checkers.
_imported, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("fedjax-mm")
    return _imported(name)
