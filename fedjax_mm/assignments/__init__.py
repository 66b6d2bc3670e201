"""Assignments, one file per family, all listed by `assignments`."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import cache

from fedjax_mm.base import Assignment


@cache
def assignments() -> dict[str, Callable[..., Assignment]]:
    """Factories of all assignments, by name.

    A factory is a function that returns an assignment and whose first parameter is `num_clients`.
    New files are discovered automatically.

    Example:
      >>> assignments()["mfa_rr"].__module__
      'fedjax_mm.assignments.partitions'
      >>> "appealing" in assignments()
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
