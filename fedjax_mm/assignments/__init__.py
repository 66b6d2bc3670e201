"""Assignments, one file per family, all listed by `strategies`."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import cache

from fedjax_mm.base import Assignment


@cache
def strategies() -> dict[str, Callable[..., Assignment]]:
    """Returns the factories of all assignments, by name.

    A factory is a function that returns an assignment and whose first parameter is `num_clients`.
    New files are discovered automatically.

    Example:
      >>> strategies()["mfa_rr"].__module__
      'fedjax_mm.assignments.partitions'
      >>> "appealing" in strategies()
      False
    """
    found: dict[str, Callable[..., Assignment]] = {}
    for _, module, _ in pkgutil.iter_modules(__path__):
        for name, factory in vars(importlib.import_module(f"{__name__}.{module}")).items():
            if inspect.isfunction(factory) and not name.startswith("_"):
                signature = inspect.signature(factory)
                first = next(iter(signature.parameters), "")
                if first == "num_clients" and signature.return_annotation is Assignment:
                    found[name] = factory
    return found
