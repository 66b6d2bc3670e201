"""jaxtyping's type checker under pytest, which checks array annotations only.

mypy checks the other annotations. Checking them here as well would hide the library's own errors
for wrong arguments.
"""

import functools
import inspect
from typing import Any

import jaxtyping
from beartype import beartype
from jaxtyping import AbstractArray


def check_shapes(function):
    """Decorates a function to check arguments and results that are annotated as arrays."""
    if isinstance(function, type):
        return function
    function.__annotations__ = {
        name: hint if _is_array(hint) else Any for name, hint in function.__annotations__.items()
    }
    return beartype(function)


def _is_array(hint):
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def skip_functions_without_arrays():
    """Makes jaxtyping leave functions without array annotations undecorated, and inner ones.

    jaxtyping decorates all functions, even those created in every call, and binds the arguments of
    every call, which takes a fifth of the time of some tests. A decorated function equals no other,
    so that no two parts that contain one would share a program.
    """
    decorate = jaxtyping.jaxtyped

    @functools.wraps(decorate)
    def jaxtyped(*functions, **how):
        if any(inspect.isfunction(each) and not _may_have_arrays(each) for each in functions):
            return functions[0]
        return decorate(*functions, **how)

    # jaxtyping calls itself by the second name, for properties and classes among others.
    jaxtyping.jaxtyped = jaxtyping._decorator.jaxtyped = jaxtyped


def _may_have_arrays(function):
    if "<locals>" in function.__qualname__:
        return False
    # A string annotation may name an array, because it is not evaluated here.
    hints = inspect.get_annotations(function).values()
    return any(isinstance(hint, str) or _is_array(hint) for hint in hints)
