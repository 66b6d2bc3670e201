"""The type checker that pytest gives to jaxtyping: array shapes and dtypes, and nothing else.

Other annotations are mypy's business, and checking them here would hide the library's own errors
for wrong arguments.
"""

import functools
import inspect
from typing import Any

import jaxtyping
from beartype import beartype
from jaxtyping import AbstractArray


def check_shapes(function):
    """Checks the arguments and the result that are annotated as arrays."""
    if isinstance(function, type):
        return function
    function.__annotations__ = {
        name: hint if _is_array(hint) else Any for name, hint in function.__annotations__.items()
    }
    return beartype(function)


def _is_array(hint):
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def leave_others_alone():
    """Functions that are not annotated with arrays are not decorated: nothing in them is checked.

    jaxtyping decorates all functions, even those created in every call, and binds the arguments of
    every call, which takes a fifth of the time of some tests.
    """
    decorate = jaxtyping.jaxtyped

    @functools.wraps(decorate)
    def jaxtyped(*functions, **how):
        if any(inspect.isfunction(each) and not _may_have_arrays(each) for each in functions):
            return functions[0]
        return decorate(*functions, **how)

    # It calls itself by the second name: for properties, classes, and once it has its checker.
    jaxtyping.jaxtyped = jaxtyping._decorator.jaxtyped = jaxtyped


def _may_have_arrays(function):
    # A hint that is text is known once it is evaluated.
    hints = inspect.get_annotations(function).values()
    return any(isinstance(hint, str) or _is_array(hint) for hint in hints)
