"""A vectorized simulator of multi-model federated learning in JAX."""

from typing import Any

import lazy_loader

# All names at once would import what most programs never use, and take as long as JAX: each is
# imported when it is first used. `__init__.pyi` says from where, for us and for type checkers.
_imported, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("fedjax-mm")
    return _imported(name)
