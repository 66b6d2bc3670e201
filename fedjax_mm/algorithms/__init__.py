"""Federated algorithms, one file each; `methods` finds them."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import cache

from fedjax_mm.base import Algorithm


@cache
def methods() -> dict[str, Callable[..., Algorithm]]:
    """Returns the factories of all methods, by name.

    A method is a function with the name of its module whose first parameter is `learning_rate`;
    functions whose first parameter is an algorithm or a task wrap methods. A new file is found
    without an entry elsewhere.

    Example:
      >>> methods()["fedavg"].__module__
      'fedjax_mm.algorithms.fedavg'
      >>> "requiring" in methods()
      False
    """
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in names}
    own = {name: getattr(modules[name], name) for name in names if hasattr(modules[name], name)}
    return {
        name: factory
        for name, factory in own.items()
        if next(iter(inspect.signature(factory).parameters), None) == "learning_rate"
    }
