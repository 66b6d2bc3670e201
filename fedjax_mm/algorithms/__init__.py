"""Federated algorithms, one per file, all listed by `methods`."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import cache

from fedjax_mm.base import Algorithm


@cache
def methods() -> dict[str, Callable[..., Algorithm]]:
    """Factories of all methods, by name.

    A method is a function with the name of its module and a first parameter `local`, the local
    training settings. A function whose first parameter is an algorithm or a task is a wrapper. New
    files are discovered automatically.

    Example:
      >>> methods()["fedavg"].__module__
      'fedjax_mm.algorithms.fedavg'
      >>> "requiring" in methods()
      False
    """
    found = {}
    for _, name, _ in pkgutil.iter_modules(__path__):
        factory = getattr(importlib.import_module(f"{__name__}.{name}"), name, None)
        if factory and next(iter(inspect.signature(factory).parameters), "") == "local":
            found[name] = factory
    return found
