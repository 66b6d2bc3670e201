"""A vectorized simulator of multi-model federated learning in JAX."""

import sys
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
    try:
        return _imported(name)
    except AttributeError:
        if name in __all__ or name.startswith("_"):
            raise
    from fedjax_mm.tools import names

    # `from fedjax_mm import ...` drops the message of an AttributeError, but not of an ImportError.
    # It asks for submodules, too, which it then imports.
    error = AttributeError(names.missing(name))
    if sys._getframe(1).f_code.co_name == "_handle_fromlist" and " is in " in str(error):
        raise ImportError(str(error))
    raise error
