"""Parts, which print as the calls that made them, and the functions of wrapped parts."""

import functools
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax


class Call(NamedTuple):
    """The call of a factory, with its arguments."""

    factory: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __repr__(self) -> str:
        """Returns the call as in a program, except that arrays show only their types."""
        short = _Short().repr
        named = [f"{name}={short(value)}" for name, value in self.kwargs.items()]
        return f"{self.factory.__name__}({', '.join([*map(short, self.args), *named])})"


class _Short(reprlib.Repr):
    """Short forms of arguments."""

    def repr_instance(self, x: Any, level: int) -> str:
        del level
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            is_known = not x.shape and not isinstance(x, jax.core.Tracer)
            return str(x) if is_known else jax.typeof(x).str_short()
        if isinstance(x, tuple) and not isinstance(x, Part):  # such as optimizers
            return f"{type(x).__name__}(...)"
        return x.__name__ if hasattr(x, "__name__") else repr(x)


class Part:
    """Base of the parts of an experiment, which are NamedTuples of numbers and functions.

    Attributes:
      call: the call that made the part, or None. A part with a call prints as it, and `pickle`
        saves only the call. ``part._replace(...)`` has none, because the call made another part.

    Example:
      >>> from fedjax_mm import available, mfa_rr
      >>> from fedjax_mm.availability import bernoulli
      >>> available(mfa_rr(24, 2), bernoulli(0.5))
      available(mfa_rr(24, 2), bernoulli(0.5))
    """

    call: Call | None = None

    def made_by(self, call: Call) -> Self:
        """Returns the part with its call."""
        fields: Any = self
        made: Self = type(self)(*fields)
        vars(made).update(vars(self), call=call)
        return made

    def __repr__(self) -> str:
        """Returns the call, or else the fields."""
        return super().__repr__() if self.call is None else repr(self.call)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns the call for `pickle`, or else the fields."""
        if self.call is None:
            return super().__reduce_ex__(protocol)
        return functools.partial(self.call.factory, **self.call.kwargs), self.call.args


class Wraps(NamedTuple):
    """A function of a wrapped algorithm or assignment.

    Attributes:
      name: the wrapper's name.
      inner: the algorithm or the assignment inside.
      function: the function.
    """

    name: str
    inner: Any
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)


def wrapper_of(*functions: Any) -> Wraps | None:
    """Returns the first of several functions that belongs to a wrapper."""
    return next((each for each in functions if isinstance(each, Wraps)), None)
