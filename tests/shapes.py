"""The type checker that pytest gives to jaxtyping: array shapes and dtypes, and nothing else.

Other annotations are mypy's business, and checking them here would hide the library's own errors
for wrong arguments.
"""

from typing import Any

from beartype import beartype
from jaxtyping import AbstractArray


def check_shapes(function):
    """Checks the arguments and the result that are annotated as arrays."""
    if isinstance(function, type):
        return function
    function.__annotations__ = {
        name: hint if isinstance(hint, type) and issubclass(hint, AbstractArray) else Any
        for name, hint in function.__annotations__.items()
    }
    return beartype(function)
