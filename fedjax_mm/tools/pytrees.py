"""Compiles calls once for each structure, so that their numbers are arguments of one program.

Python floats and JAX arrays are leaves; ints, bools, strings, functions and NumPy arrays are
structure, except that NumPy arrays in data are leaves. The numbers that a closure, a partial or a
bound method holds are leaves too: the function is made again around the arguments of the program.

The structure includes the values of everything that a user's functions and classes refer to: cells,
defaults, attributes, and the globals that they read. So a list that has changed is noticed. A call
with a value that cannot be compared, such as a generator, has no program of its own.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from types import (
    CellType,
    CodeType,
    EllipsisType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")
Mode: TypeAlias = Literal["data", "part", "fixed"]  # in "fixed", numbers are structure
Rebuild: TypeAlias = Callable[[dict[Any, Any]], Any]

_MOST_PROGRAMS = 64  # a program takes a few megabytes
_DEBUGGING = ("disable_jit", "debug_nans", "debug_infs", "debug_key_reuse", "check_tracer_leaks")
# Functions and classes of these packages do not change while a program runs.
_LIBRARIES = {"fedjax_mm", "jax", "jaxlib", "numpy", "optax", "flax", "chex", "jaxtyping"}
_LIBRARIES |= sys.stdlib_module_names - {"weakref"}
_PLAIN = (type(None), bool, int, str, bytes, EllipsisType)
_FieldType = type(inspect.getattr_static(NamedTuple("_", [("field", int)]), "field"))
_UNIQUE = (jax.Array, ModuleType, enum.Enum, GetSetDescriptorType, MemberDescriptorType, _FieldType)
_INNER = ("__self__", "__wrapped__")
_WRAPPING = (property, staticmethod, classmethod, functools.cached_property)


def compiled(function: Callable[..., T], data: Sequence[Any], parts: Sequence[Any]) -> T:
    """Returns ``function(*data, *parts)``, computed by one program for all calls of a structure.

    The function is called as it is inside transformations of JAX, in the debugging modes of JAX,
    and if it fails with traced numbers, so that error messages are its own.

    A program calls the user's functions while it is traced, and never again. Their results must not
    depend on files, on time, or on the state of a random generator.

    Args:
      function: a function of a module.
      data: keys, tasks, parameters and states.
      parts: algorithms, assignments, and options that are structure.
    """
    # Make an array, because it is a tracer inside `jax.jit` even if all arguments are known.
    is_traced = isinstance(jnp.zeros((), jnp.int32), jax.core.Tracer)
    if is_traced or any(getattr(jax.config, f"jax_{name}") for name in _DEBUGGING):
        return function(*data, *parts)
    try:
        structure, leaves, rebuild = split(data, parts)
        _current.call = lambda new: function(*rebuild(new))
        return _program((function, *structure))(leaves)
    except jax.errors.JaxRuntimeError:
        raise
    except Exception:
        pass  # Call it below, outside this block, because errors would be shown twice.
    finally:
        vars(_current).clear()
    return function(*data, *parts)


class TracedInt(int):
    """An int that is an argument of a program, so that programs are not compiled for each value.

    It is an int in Python, and a tracer while a program is compiled. Sums and products with ints
    are such numbers, too; whatever else Python computes from it is a plain int.

    Example:
      >>> type(2 * TracedInt(3) + 1).__name__, type(TracedInt(3) // 2).__name__
      ('TracedInt', 'int')
    """

    def __add__(self, other: Any) -> Any:
        """The sum."""
        return _traced_int(int(self) + other)

    def __mul__(self, other: Any) -> Any:
        """The product."""
        return _traced_int(int(self) * other)

    __radd__, __rmul__ = __add__, __mul__


def _traced_int(x: Any) -> Any:
    return TracedInt(x) if type(x) is int else x


class OpaqueError(Exception):
    """Raised at a value that cannot be compared with the value in another call, with its name."""


class _Current(threading.local):
    """The call that is made now."""

    call: Callable[[Sequence[Any]], Any]


_current = _Current()


@functools.lru_cache(_MOST_PROGRAMS)
def _program(_: tuple[Any, ...]) -> Callable[[Sequence[Any]], Any]:
    # Do not close over a call, because its objects may have changed when JAX traces for other
    # shapes. Define `run` here, so that JAX frees its programs with it.
    def run(leaves: Sequence[Any]) -> Any:
        return _current.call(leaves)

    return jax.jit(run, inline=True)


class Split(NamedTuple):
    """Values, split into numbers and structure.

    Attributes:
      structure: is equal for values that differ only in numbers.
      leaves: the numbers and arrays; each array once, so that models share data inside a program.
      rebuild: makes the values from new leaves.
    """

    structure: tuple[Any, ...]
    leaves: list[Any]
    rebuild: Callable[[Sequence[Any]], list[Any]]


def split(data: Sequence[Any], parts: Sequence[Any], *, traced: bool = False) -> Split:
    """Splits data and parts into their numbers and their structure.

    Args:
      data: keys, tasks, parameters and states.
      parts: algorithms, assignments, and options that are structure.
      traced: whether there may be tracers, which then are leaves.

    Raises:
      OpaqueError: if a value cannot be compared with another.
    """
    walk = _Walk(traced)
    values: list[tuple[Any, Mode]] = [(x, "data") for x in data]
    values += [(tuple(x) if type(x) is list else x, "part") for x in parts]
    each = [_or_kept(walk.visit(x, mode), x) for x, mode in values]

    def rebuild(leaves: Sequence[Any]) -> list[Any]:
        given: dict[Any, Any] = dict(enumerate(leaves))
        return [make(given) for make in each]

    return Split(tuple(walk.key), walk.leaves, rebuild)


@functools.lru_cache(4096)
def _sort(kind: type) -> tuple[bool, bool, bool]:
    """Whether values of a type are tracers, arrays of JAX, and numbers that may be leaves."""
    is_tracer = issubclass(kind, jax.core.Tracer)
    is_number = issubclass(kind, float | np.floating | TracedInt)
    return is_tracer, is_tracer or issubclass(kind, jax.Array), is_number


class _Walk:
    """Collects the leaves and the structure of values.

    Attributes:
      leaves: numbers and arrays; each array once, so that models share data inside the program.
      key: the structure.
    """

    def __init__(self, traced: bool) -> None:
        self.leaves: list[Any] = []
        self.key: list[Any] = []
        self._places: dict[int, int] = {}
        self._visited: dict[Any, tuple[int, Rebuild | None, Any]] = {}
        self._traced = traced

    def visit(self, x: Any, mode: Mode) -> Rebuild | None:
        """Returns a function that makes the value from new leaves, or None if it has no leaf."""
        kind: Any = type(x)
        if kind in _PLAIN:
            self.key.append((kind, x))
            return None
        if kind is tuple:  # Python decides which equal tuples are one object
            return self._open(x, mode)
        is_tracer, is_array, is_number = _sort(kind)
        if is_tracer and not self._traced:
            raise OpaqueError("a tracer")
        is_array = is_array or (kind is np.ndarray and mode == "data")
        if mode != "fixed" and (is_array or is_number):
            return self._leaf(x, is_array)
        if (token := _token(x)) is not None:
            self.key.append(token)
            return None
        name = id(x), mode
        if name in self._visited:
            number, rebuild, _ = self._visited[name]
            if rebuild is _unfinished:
                raise OpaqueError(f"{_named(x)}, which refers to itself")
            self.key.append(("again", number))
            return rebuild
        number = len(self._visited)
        # Keep the value, because its identity is its name.
        self._visited[name] = number, None if mode == "fixed" else _unfinished, x
        rebuild = self._open(x, mode)
        self._visited[name] = number, rebuild, x
        return rebuild

    def _leaf(self, x: Any, is_array: bool) -> Rebuild:
        new = len(self.leaves)
        place = self._places.setdefault(id(x), new) if is_array else new
        if place == new:
            self.leaves.append(x)
        self.key.append(("leaf", place))
        return lambda given: given[place]

    def _open(self, x: Any, mode: Mode) -> Rebuild | None:
        opened = _opened(x, mode)
        self.key.append((type(x), opened.tag, len(opened.children), len(opened.fixed)))
        for child in opened.fixed:
            self.visit(child, "fixed")
        found = [self.visit(child, mode) for child in opened.children]
        if not any(found):
            return None  # Keep the original, which may be compared by `is`.
        return _rebuilding(opened.make, list(map(_or_kept, found, opened.children)))


def _rebuilding(make: Callable[[list[Any]], Any], each: list[Rebuild]) -> Rebuild:
    def rebuild(given: dict[Any, Any]) -> Any:
        if rebuild not in given:
            given[rebuild] = make([of_child(given) for of_child in each])
        return given[rebuild]

    return rebuild


def _or_kept(rebuild: Rebuild | None, x: Any) -> Rebuild:
    return rebuild or (lambda _: x)


def _unfinished(_: dict[Any, Any]) -> Any:
    """Stands for the value that is being visited, which must not refer to itself."""


class _Same:
    """Wraps a value that only equals itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _named(x: Any) -> str:
    kind = type(x)
    if kind is FunctionType:
        return f"the function {x.__qualname__}"
    return f"{'an' if kind.__name__[0] in 'aeiouAEIOU' else 'a'} {kind.__name__}"


def _token(x: Any) -> Any:
    """Returns the structure of a value without children, or None for other values."""
    kind = type(x)
    if kind is TracedInt:
        return int, int(x)
    if isinstance(x, _UNIQUE) or (kind is FunctionType and _is_constant(x)):
        return _Same(x)
    if isinstance(x, type) and not _attributes(x):
        return _Same(x)
    if kind in (float, complex) or isinstance(x, np.generic):
        return kind, repr(x)  # equal for NaN, and not for 0.0 and -0.0
    if kind is np.ndarray:
        if x.dtype.hasobject or x.dtype.kind == "T":
            raise OpaqueError("an array of Python objects")
        return kind, x.shape, x.dtype, hashlib.blake2b(x.tobytes()).digest()
    return None


class _Opened(NamedTuple):
    """The content of a value.

    Attributes:
      tag: is compared in addition to the children.
      fixed: children whose numbers are structure.
      children: the other children.
      make: makes the value from new children.
    """

    tag: Any = None
    fixed: Sequence[Any] = ()
    children: Sequence[Any] = ()
    make: Callable[[list[Any]], Any] = list


def _opened(x: Any, mode: Mode) -> _Opened:
    kind: Any = type(x)
    if kind is FunctionType:
        return _opened_function(x)
    if kind is functools.partial:
        return _opened_partial(x)
    if kind is MethodType:
        return _Opened(None, (), [x.__func__, x.__self__], lambda new: MethodType(*new))
    if kind is CellType:
        if x == CellType():
            return _Opened("empty")
        return _Opened(None, (), [x.cell_contents], lambda new: CellType(*new))
    # Lists and dicts in parts stay the same objects, because the user's functions may change them.
    if kind is dict and mode != "data":
        return _Opened(None, [*x, *x.values()])
    if kind in (set, frozenset) or (kind is list and mode != "data"):
        return _Opened(None, list(x))
    if not jax.tree_util.all_leaves([x]):
        tree: Any
        children, tree = jax.tree.flatten(x, is_leaf=lambda child: child is not x)
        _, static = tree.node_data()
        return _Opened(None, [kind, static], children, tree.unflatten)
    if isinstance(x, type):
        own = _attributes(x)
        return _Opened((_Same(x), *own), [*own.values()])
    if kind in _WRAPPING:
        names = "fget", "fset", "fdel", "__func__", "func"
        return _Opened(None, [getattr(x, name, None) for name in names])
    return _opened_object(x)


def _opened_function(x: FunctionType) -> _Opened:
    read: dict[str, Any] = {}
    if not _is_library(x.__globals__.get("__name__")):
        names, assigns = _names(x.__code__)
        if assigns:  # Its variables count calls, for example.
            raise OpaqueError(f"{_named(x)}, which assigns to a variable of a function around it")
        read = _read(names, x.__globals__)
    plain, qualname = (x.__code__, x.__globals__, x.__name__), x.__qualname__
    cells, more = x.__closure__ or (), {**(x.__kwdefaults__ or {})}
    num_cells, keywords, own = len(cells), tuple(more), tuple(vars(x))

    def make(new: list[Any]) -> FunctionType:
        each = iter(new)
        closure = tuple(itertools.islice(each, num_cells))
        made = FunctionType(*plain, next(each), closure)
        made.__kwdefaults__ = dict(zip(keywords, each, strict=False)) or None
        vars(made).update(zip(own, each, strict=True))
        made.__qualname__ = qualname
        return made

    tag = x.__code__, _Same(x.__globals__), num_cells, keywords, own, tuple(read)
    children = [*cells, x.__defaults__, *more.values(), *vars(x).values()]
    return _Opened(tag, [*read.values()], children, make)


def _opened_partial(x: functools.partial[Any]) -> _Opened:
    stop, names = 1 + len(x.args), tuple(x.keywords)

    def make(new: list[Any]) -> functools.partial[Any]:
        function, *args = new[:stop]
        return functools.partial(function, *args, **dict(zip(names, new[stop:], strict=True)))

    return _Opened((stop, names), (), [x.func, *x.args, *x.keywords.values()], make)


def _opened_object(x: Any) -> _Opened:
    kind: Any = type(x)
    is_of_library = _is_library(kind.__module__)
    hides_state = kind.__basicsize__ > _Same.__basicsize__ or kind.__itemsize__  # in C or slots
    if hides_state and is_of_library and callable(x):  # a function in C, or of `jax.jit`
        return _Opened(_Same(x), [getattr(x, name, None) for name in _INNER])
    has_own_equality = kind.__eq__ is not object.__eq__ and kind.__hash__ is not None
    is_dataclass = dataclasses.is_dataclass(x) and not hides_state
    if has_own_equality and is_of_library and not is_dataclass:
        return _Opened(x)
    if hides_state:
        raise OpaqueError(_named(x))
    own: dict[str, Any] = {} if kind is object else vars(x)
    if is_dataclass and kind.__dataclass_params__.frozen:
        return _Opened((*own,), [kind], [*own.values()], functools.partial(_remade, kind, (*own,)))
    if is_dataclass and has_own_equality:
        own = {each.name: getattr(x, each.name) for each in dataclasses.fields(x) if each.compare}
    tag = None if has_own_equality else _Same(x)
    return _Opened((tag, *own), [kind, *own.values()])


def _remade(kind: type, names: Sequence[str], values: Sequence[Any]) -> Any:
    made: Any = object.__new__(kind)
    vars(made).update(zip(names, values, strict=True))
    return made


def _attributes(kind: type) -> dict[str, Any]:
    """Returns the attributes that a user's class and its base classes define."""
    if all(_is_library(each.__module__) for each in kind.__mro__):
        return {}
    return {
        f"{number}.{name}": value
        for number, each in enumerate(kind.__mro__)
        if not _is_library(each.__module__)
        for name, value in vars(each).items()
        if isinstance(value, FunctionType) or not name.startswith(("__", "_abc_"))
    }


def _read(names: Sequence[str], space: dict[str, Any]) -> dict[str, Any]:
    """Returns the globals with the given names, also of the user's modules among them."""
    spaces, found = [space], {}
    for number, each in enumerate(spaces):
        for name in names:
            if name in each:
                found[f"{number}.{name}"] = value = each[name]
                if isinstance(value, ModuleType) and not _is_library(value.__name__):
                    spaces += [vars(value)] if all(vars(value) is not x for x in spaces) else []
    return found


@functools.lru_cache(4096)
def _names(code: CodeType) -> tuple[tuple[str, ...], bool]:
    """Returns the names that code reads, and whether it assigns to a variable around it."""
    names, assigns = dict.fromkeys(code.co_names), False
    codes = [code]
    for each in codes:
        codes += [x for x in each.co_consts if isinstance(x, CodeType)]
        names |= dict.fromkeys(each.co_names)
        stored = {x.argval for x in dis.get_instructions(each) if x.opname == "STORE_DEREF"}
        assigns |= not stored.isdisjoint(code.co_freevars)
    return tuple(names), assigns


def _is_constant(function: FunctionType) -> bool:
    """Returns whether a function is defined by a library, outside of other functions."""
    if "<" in function.__qualname__ or not _is_library(function.__module__):
        return False
    return _is_library(function.__globals__.get("__name__"))


@functools.lru_cache(4096)
def _is_library(name: Any) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES
