"""Parts, which print as the calls that made them."""

import dataclasses
import functools
import inspect
import reprlib
from collections.abc import Callable, Iterator
from html import escape
from types import UnionType
from typing import Annotated, Any, NamedTuple, Self, Union, get_args, get_origin

import jax
import numpy as np

_signature = functools.cache(inspect.signature)


class Call(NamedTuple):
    """The call of a factory, with its arguments."""

    factory: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, factory: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Self:
        """A call, with copies of arguments that may change later."""
        return cls(factory, tuple(map(_kept, args)), {key: _kept(x) for key, x in kwargs.items()})

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by parameter, with defaults."""
        bound = _signature(self.factory).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments

    @property
    def fixed(self) -> list[bool]:
        """Whether each argument is structure, although it is a number or a tuple of numbers."""
        places, names = _rules(self.factory)
        found = [place in places and places[place](x) for place, x in enumerate(self.args)]
        return found + [name in names and names[name](x) for name, x in self.kwargs.items()]

    def again(self, **changed: Any) -> Any:
        """Calls the factory with some other arguments."""
        bound = _signature(self.factory).bind(*self.args, **self.kwargs)
        bound.arguments.update(changed)
        return self.factory(*bound.args, **bound.kwargs)

    def __repr__(self) -> str:
        """The call as in a program, except that arrays show only their types."""
        short = _Short().repr
        named = [f"{name}={short(value)}" for name, value in self.kwargs.items()]
        return f"{self.factory.__name__}({', '.join([*map(short, self.args), *named])})"


@functools.cache
def _rules(factory: Callable[..., Any]) -> tuple[dict[int, Any], dict[str, Any]]:
    """Returns for each parameter, by place and by name, a test of values that are structure."""
    found = {
        name: functools.partial(
            _is_structure, may_be_traced(x.annotation), _takes_tuples(x.annotation)
        )
        for name, x in inspect.signature(factory, eval_str=True).parameters.items()
    }
    return dict(enumerate(found.values())), found


def _is_structure(may_be_traced: bool, takes_tuples: bool, value: Any) -> bool:
    """Whether a number must be known, or a tuple of numbers stands for a list."""
    if type(value) is tuple:
        return not takes_tuples and _are_numbers(value)
    return not may_be_traced and _is_number(value)


def _takes_tuples(annotation: Any) -> bool:
    """Whether tuples of traced numbers are allowed."""
    kinds = [get_args(each) for each in kinds_of(annotation) if get_origin(each) is tuple]
    return any(all(map(may_be_traced, each)) for each in kinds)


def may_be_traced(annotation: Any) -> bool:
    """Whether a number may be traced: unless its annotation has an int or a float, and no array.

    Example:
      >>> from fedjax_mm.base import Scalar
      >>> may_be_traced(float), may_be_traced(Scalar), may_be_traced(Any)
      (False, True, True)
    """
    kinds = list(kinds_of(annotation))
    return any(hasattr(each, "dims") for each in kinds) or not {int, float} & {*kinds}


def kinds_of(annotation: Any) -> Iterator[Any]:
    """Types in an annotation, without ranges, and those of unions one by one."""
    if get_origin(annotation) is Annotated:
        yield from kinds_of(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from kinds_of(each)
    else:
        yield annotation


def _are_numbers(value: Any) -> bool:
    return all(map(_are_numbers, value)) if type(value) is tuple else _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.generic | jax.Array)


def _kept(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set, np.ndarray) else value


def _called(factory: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    return factory(*args, **kwargs)


class _Short(reprlib.Repr):
    """Short forms of arguments."""

    def repr_instance(self, x: Any, level: int) -> str:
        del level
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            is_known = not (x.shape or isinstance(x, jax.core.Tracer)) and isinstance(
                x.dtype, np.dtype
            )
            return str(x) if is_known else f"{x.dtype}[{','.join(map(str, x.shape))}]"
        if isinstance(x, tuple) and not isinstance(x, Part):  # such as optimizers
            return f"{type(x).__name__}(...)"
        return x.__name__ if hasattr(x, "__name__") else repr(x)


def in_short(self: Any) -> str:
    """Returns the fields of a NamedTuple or a dataclass, with the shapes of arrays alone.

    It takes the same time for any size, and nothing is fetched from a device.

    Example:
      >>> from fedjax_mm.tasks import quadratic
      >>> quadratic(200, 4, mu=0.5)
      Quadratic(mu=0.5, minimizer=float32[801], optimum=..., num_clients=200, block_size=4)
    """
    fields = [f"{name}={_Short().repr(value)}" for name, value in _fields(self).items()]
    return f"{type(self).__name__}({', '.join(fields)})"


def in_html(self: Any) -> str:
    """The shapes as a table for notebooks, or the arguments of a part's call.

    Example:
      >>> from fedjax_mm import mfa_rr
      >>> mfa_rr(24, 2)._repr_html_()[:60]
      '<table><caption>mfa_rr</caption><tr><th>num_clients</th><td>'
    """
    call = getattr(self, "call", None)
    name = call.factory.__name__ if call else type(self).__name__
    rows = [
        f"<tr><th>{escape(key)}</th><td><code>{escape(_Short().repr(value))}</code></td></tr>"
        for key, value in (call.arguments if call else _fields(self)).items()
    ]
    return f"<table><caption>{escape(name)}</caption>{''.join(rows)}</table>"


def _fields(self: Any) -> dict[str, Any]:
    fields = [x.name for x in dataclasses.fields(self)] if dataclasses.is_dataclass(self) else ()
    return {name: getattr(self, name) for name in fields or self._fields}


class Part:
    """Base of the parts of an experiment, which hold numbers and functions.

    They are frozen dataclasses, or NamedTuples such as an optimizer of optax.

    Attributes:
      call: the call that made the part, or None. A part with a call prints as it, and `pickle`
        saves only the call. ``part._replace(...)`` has none, because the call made another part.
      name: the name of the factory.

    Example:
      >>> from fedjax_mm import mfa_rr
      >>> from fedjax_mm.availability import available, bernoulli
      >>> available(mfa_rr(24, 2), bernoulli(0.5))
      available(mfa_rr(24, 2), bernoulli(0.5))
    """

    call: Call | None = None
    name: str = ""

    def _replace(self, **changes: Any) -> Self:
        """Another part, without a call and statements."""
        own: Any = self
        fields: Any = super()
        is_tuple = isinstance(own, tuple)
        made: Self = fields._replace(**changes) if is_tuple else dataclasses.replace(own, **changes)
        return made

    def stating(self, **statements: Any) -> Self:
        """A copy of the part with statements about it, which `_replace` drops."""
        own: Any = self
        made: Self = type(self)(*own) if isinstance(own, tuple) else object.__new__(type(self))
        vars(made).update(vars(self), **statements)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses every change.

        Raises:
          AttributeError: always.
        """
        del value
        raise AttributeError(f"{name} cannot be set; parts do not change: use _replace")

    def __repr__(self) -> str:
        """The call, or else the fields."""
        return in_short(self) if self.call is None else repr(self.call)

    _repr_html_ = in_html

    def __copy__(self) -> Self:
        """The part itself, because it does not change."""
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        """The part itself, because it does not change."""
        del memo
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The call for `pickle`, or else the fields."""
        if self.call is None:
            return super().__reduce_ex__(protocol)
        return _called, (*self.call,)


class Function(Part):
    """A function that a factory has made, such as a schedule.

    It is no NamedTuple, because JAX needs weak references to functions.
    """

    function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        """Keeps the function."""
        vars(self)["function"] = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)


@functools.cache
def _part_type(kind: type) -> type:
    """A type of parts with the fields of a NamedTuple, such as an optimizer of optax."""
    return type(kind.__name__, (Part, kind), {"__module__": kind.__module__})


def with_call(made: Any, call: Call) -> Any:
    """Marks the result of a factory as a part with this call.

    Raises:
      TypeError: if it is neither a part, a function nor a NamedTuple.
    """
    if isinstance(made, Part):
        is_wrapped = getattr(made, "inner", None) is not None
        return made.stating(call=call, name=made.name if is_wrapped else call.factory.__name__)
    if isinstance(made, tuple) and hasattr(made, "_fields"):
        part: Any = _part_type(type(made))(*made)
        return part.stating(call=call)
    if callable(made) and not isinstance(made, type):
        return Function(made).stating(call=call)
    raise TypeError(
        f"{call.factory.__name__} is a factory of parts, but returns {type(made).__name__}; return "
        "an Algorithm, an Assignment, a function or an optimizer"
    )
