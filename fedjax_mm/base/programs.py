"""Compiles calls once for each structure, so that their numbers are arguments of one program.

A part is a call: its factory is structure, and its arguments are numbers, structure, or parts. The
program makes it again from traced numbers. Floats and JAX arrays are numbers, and so are NumPy
arrays of data; ints, strings and NumPy arrays of parts are structure.

What any other function of a user's depends on cannot be known. Within one sweep such functions are
compared by their code and the values of their cells, whose numbers are numbers; a function of a
module equals only itself. A program that has one is never reused by another call.
"""

import dataclasses
import functools
import hashlib
import inspect
import itertools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    EllipsisType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mm.base.calls import Call, Part

T = TypeVar("T")
Mode: TypeAlias = Literal["data", "part", "fixed"]  # in "fixed", numbers are structure
Rebuild: TypeAlias = Callable[[dict[Any, Any]], Any]

_MOST_PROGRAMS = 64  # a program takes a few megabytes
_DEBUGGING = ("disable_jit", "debug_nans", "debug_infs", "debug_key_reuse", "check_tracer_leaks")
NO_VALUE = (  # JAX raises these when Python needs the value of a tracer
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_PLAIN = (type(None), bool, int, str, bytes, EllipsisType)
_JITTED = (type(jax.jit(abs)), jax.custom_jvp, jax.custom_vjp, np.ufunc)
# By their documentation, functions of these packages are pure, and so are the modules of flax.
_PURE = ("fedjax_mm", "jax", "jaxlib", "flax", "optax", "chex", "numpy")
_FLAX = "flax.linen.module", "Module"
_HEAP_TYPE = 1 << 9  # a class that Python code has defined, and may change


def compiled(function: Callable[..., T], data: Sequence[Any], parts: Sequence[Any]) -> T:
    """Returns ``function(*data, *parts)``, computed by one program for all calls of a structure.

    The function is called as it is inside transformations of JAX, and in the debugging modes of
    JAX; and with known numbers if it fails because a traced one has no value.

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
        found = split(data, parts)
    except OpaqueError:
        return function(*data, *parts)
    # Copy the caller's NumPy arrays. JAX would read them later, in the background.
    leaves = [np.array(x) if isinstance(x, np.ndarray) else x for x in found.leaves]

    def call(leaves: Sequence[Any]) -> T:
        return function(*found.rebuild(leaves))

    _current.call = call
    key = function, *found.structure
    program: Any = jax.jit(call, inline=True) if found.undeclared else _program(key)
    try:
        made: T = program(leaves)
        return made
    except NO_VALUE:
        pass  # Call it below, outside of this block, because errors would be shown twice.
    finally:
        vars(_current).clear()
    return call(leaves)


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
    """Raised at a tracer, whose value belongs to a transformation around the call."""


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


class Memory:
    """Traced and compiled values of the latest keys, under the same settings of JAX."""

    def __init__(self, most: int) -> None:
        """Starts empty, and keeps at most `most` values."""
        self._most, self._values = most, OrderedDict[Hashable, Any]()

    def get(self, key: Hashable) -> Any:
        """The value of a key, or None."""
        key = self._now(key)
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Hashable, value: Any) -> Any:
        """Keeps a value, and returns it."""
        self._values[self._now(key)] = value
        self.keep(self._most)
        return value

    def keep(self, most: int) -> None:
        """Forgets all but the latest `most` values."""
        while len(self._values) > most:
            self._values.popitem(last=False)

    def _now(self, key: Hashable) -> Hashable:
        return key, repr([getattr(jax.config, name, None) for name in jax.config.values])


class Split(NamedTuple):
    """Values, split into numbers and structure.

    Attributes:
      structure: is equal for values that differ only in numbers.
      leaves: the numbers and arrays; each array once, so that models share data inside a program.
      rebuild: makes the values from new leaves.
      undeclared: names of the functions and objects that have not been declared to be pure.
      own: names of those that equal only themselves.
    """

    structure: tuple[Any, ...]
    leaves: list[Any]
    rebuild: Callable[[Sequence[Any]], list[Any]]
    undeclared: list[str]
    own: list[str]

    @property
    def without_own(self) -> tuple[Any, ...]:
        """The structure, as if all values of the user's that equal only themselves were equal."""
        return tuple(None if isinstance(x, _Own) else x for x in self.structure)


def split(
    data: Sequence[Any], parts: Sequence[Any], *, opens: bool = False, traced: bool = False
) -> Split:
    """Splits data and parts into their numbers and their structure.

    Args:
      data: keys, tasks, parameters and states.
      parts: algorithms, assignments, and options that are structure.
      opens: whether the cells of a user's local functions are numbers and structure, too. Their
        code may read what has changed, so structures are compared within one sweep only.
      traced: whether there may be tracers, which then are leaves.

    Raises:
      OpaqueError: at a tracer, if there must be none.
    """
    walk = _Walk(opens, traced)
    values: list[tuple[Any, Mode]] = [(x, "data") for x in data]
    values += [(tuple(x) if type(x) is list else x, "part") for x in parts]
    each = [_or_kept(walk.visit(x, mode), x) for x, mode in values]

    def rebuild(leaves: Sequence[Any]) -> list[Any]:
        given: dict[Any, Any] = dict(enumerate(leaves))
        return [make(given) for make in each]

    return Split(tuple(walk.key), walk.leaves, rebuild, [*walk.undeclared], [*walk.own])


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
      undeclared: names of parts that have not been declared to be pure.
      own: names of what equals only itself, of that.
    """

    def __init__(self, opens: bool, traced: bool) -> None:
        self.leaves: list[Any] = []
        self.key: list[Any] = []
        self.undeclared: dict[str, None] = {}
        self.own: dict[str, None] = {}
        self._opens, self._traced = opens, traced
        self._places: dict[int, int] = {}
        self._visited: dict[Any, tuple[int, Rebuild | None, Any]] = {}
        self._circles: set[int] = set()

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
            self.key.append(("again", number))
            if rebuild is not _unfinished:
                return rebuild
            self._circles.add(number)
            return None
        number = len(self._visited)
        # Keep the value, because its identity is its name.
        self._visited[name] = number, None if mode == "fixed" else _unfinished, x
        rebuild = self._open(x, mode)
        if number in self._circles:  # It refers to itself, so it cannot be made from new leaves.
            self._keep(x)
            rebuild = None
        self._visited[name] = number, rebuild, x
        return rebuild

    def _leaf(self, x: Any, is_array: bool) -> Rebuild:
        new = len(self.leaves)
        place = self._places.setdefault(id(x), new) if is_array else new
        if place == new:
            self.leaves.append(x)
        self.key.append(("leaf", place))
        return lambda given: given[place]

    def _keep(self, x: Any) -> None:
        """Notes a value that is not declared to be pure, and equals itself alone."""
        self.undeclared[named(x)] = self.own[named(x)] = None
        self.key.append(_Own(x))

    def _open(self, x: Any, mode: Mode) -> Rebuild | None:
        opened = _opened(x, mode)
        if not opened.is_declared:
            if opened.is_own or not self._opens:
                self._keep(x)
                return None
            self.undeclared[named(x)] = None
        self.key.append((type(x), opened.tag, len(opened.children)))
        modes = opened.modes or [mode] * len(opened.children)
        found = [self.visit(*child) for child in zip(opened.children, modes, strict=True)]
        if not any(found) or opened.make is None:
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
    """Stands for the value that is being visited."""


class _Same:
    """Wraps a value that only equals itself, without keeping it alive if it has weak references."""

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self.value: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self.value = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or self._id != other._id:
            return False
        return self is other or ((now := self.value()) is not None and now is other.value())

    def __hash__(self) -> int:
        return self._id


class _Own(_Same):
    """Wraps such a value of the user's."""


def named(x: Any) -> str:
    """Names a function or an object for messages.

    Example:
      >>> named(named), named(iter([]))
      ('the function named', 'a list_iterator')
    """
    if isinstance(name := getattr(x, "__qualname__", None), str):
        return f"the {'class' if isinstance(x, type) else 'function'} {name}"
    kind = type(x).__qualname__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def _token(x: Any) -> Any:
    """Returns the structure of a declared value without children, or None for other values."""
    kind = type(x)
    if kind is TracedInt:
        return int, int(x)
    if kind in (float, complex) or isinstance(x, np.generic):
        return kind, repr(x)  # equal for NaN, and not for 0.0 and -0.0
    if kind is np.ndarray and not (x.dtype.hasobject or x.dtype.kind == "T"):
        return kind, x.shape, x.dtype, hashlib.blake2b(x.tobytes()).digest()
    if isinstance(x, np.dtype):
        return x
    is_jax = isinstance(x, (jax.Array, *_JITTED))
    is_module = isinstance(x, ModuleType) and _is_pure(x.__name__)
    is_class = isinstance(x, type) and (_is_pure(x.__module__) or not x.__flags__ & _HEAP_TYPE)
    in_c = kind is BuiltinFunctionType and isinstance(x.__self__, ModuleType | None)
    of_module = kind is FunctionType and "<" not in x.__qualname__ and _is_of_library(x)
    return _Same(x) if is_jax or is_module or is_class or in_c or of_module else None


class _Opened(NamedTuple):
    """The content of a value.

    Attributes:
      tag: is compared in addition to the children.
      children: the values inside.
      make: makes the value from new children; None keeps it as it is.
      modes: the mode of every child; None means that of the value.
      is_declared: whether the value is declared to be pure, apart from its children.
      is_own: whether the value is not, and equals only itself.
    """

    tag: Any = None
    children: Sequence[Any] = ()
    make: Callable[[list[Any]], Any] | None = None
    modes: Sequence[Mode] | None = None
    is_declared: bool = True
    is_own: bool = False


_OWN = _Opened(is_declared=False, is_own=True)


def _fixed(tag: Any, children: Sequence[Any], is_declared: bool = True) -> _Opened:
    return _Opened(tag, children, None, ["fixed"] * len(children), is_declared)


def _opened(x: Any, mode: Mode) -> _Opened:
    kind: Any = type(x)
    if isinstance(x, Part) and x.call is not None:
        return _opened_call(x.call, mode)
    if kind is FunctionType:
        return _opened_function(x)
    if kind is functools.partial:
        return _opened_partial(x)
    if kind is MethodType:
        return _Opened(None, [x.__func__, x.__self__], lambda new: MethodType(*new))
    if kind is CellType:
        if x == CellType():
            return _Opened("empty")
        return _Opened(None, [x.cell_contents], lambda new: CellType(*new))
    # Lists and dicts in parts stay the same objects, because functions may change them.
    if kind is dict and mode != "data":
        return _fixed(None, [*x, *x.values()])
    if kind in (set, frozenset) or (kind is list and mode != "data"):
        return _fixed(None, list(x))
    if not isinstance(x, Iterator) and not jax.tree_util.all_leaves([x]):
        return _opened_tree(x, mode)
    return _opened_object(x)


def _opened_call(call: Call, mode: Mode) -> _Opened:
    factory, args, kwargs = call
    stop, names = len(args), (*kwargs,)

    def make(new: list[Any]) -> Any:
        return factory(*new[:stop], **dict(zip(names, new[stop:], strict=True)))

    modes: list[Mode] = ["fixed" if is_fixed else mode for is_fixed in call.fixed]
    tag = _Same(factory), stop, names, _read_by(factory)
    return _Opened(tag, [*args, *kwargs.values()], make, modes)


def _opened_function(x: FunctionType) -> _Opened:
    if "<" not in x.__qualname__:
        return _OWN
    plain, qualname = (x.__code__, x.__globals__, x.__name__), x.__qualname__
    cells, more, own = x.__closure__ or (), {**(x.__kwdefaults__ or {})}, {**vars(x)}
    num_cells, keywords, names = len(cells), tuple(more), tuple(own)

    def make(new: list[Any]) -> FunctionType:
        each = iter(new)
        closure = tuple(itertools.islice(each, num_cells))
        made = FunctionType(*plain, next(each), closure)
        made.__kwdefaults__ = dict(zip(keywords, each, strict=False)) or None
        vars(made).update(zip(names, each, strict=True))
        made.__qualname__ = qualname
        return made

    tag = x.__code__, id(x.__globals__), num_cells, keywords, names
    children = [*cells, x.__defaults__, *more.values(), *own.values()]
    return _Opened(tag, children, make, is_declared=_is_of_library(x))


def _opened_partial(x: functools.partial[Any]) -> _Opened:
    stop, names, own = 1 + len(x.args), (*x.keywords,), (*vars(x),)
    end = stop + len(names)

    def make(new: list[Any]) -> functools.partial[Any]:
        function, *args = new[:stop]
        made = functools.partial(function, *args, **dict(zip(names, new[stop:end], strict=True)))
        vars(made).update(zip(own, new[end:], strict=True))
        return made

    children = [x.func, *x.args, *x.keywords.values(), *vars(x).values()]
    return _Opened((stop, names, own), children, make)


def _opened_tree(x: Any, mode: Mode) -> _Opened:
    tree: Any
    children, tree = jax.tree.flatten(x, is_leaf=lambda child: child is not x)
    kind, static = tree.node_data()
    if static is x:  # as of `jax.tree_util.register_static`
        opened = _opened_object(x)
        return _Opened(_Same(x)) if opened.is_own else opened._replace(is_declared=True)
    each = [None if static is kind else static, *children]
    modes: list[Mode] = ["fixed", *[mode] * len(children)]

    return _Opened(_read_by(kind), each, lambda new: tree.unflatten(new[1:]), modes)


def _opened_object(x: Any) -> _Opened:
    """An object equals others by `==`, but all fields of a dataclass count."""
    kind: Any = type(x)
    is_flax = any((each.__module__, each.__name__) == _FLAX for each in kind.__mro__)
    if is_flax and x.scope is not None:  # which holds variables
        return _OWN
    is_declared = is_flax or _is_pure(kind.__module__)
    own = getattr(x, "__dict__", {})
    if dataclasses.is_dataclass(x):
        names = [each.name for each in dataclasses.fields(x) if each.name != "parent" * is_flax]
        if issubclass(kind, Part):  # without statements
            own = {name: own[name] for name in names}
        if kind.__dataclass_params__.frozen and not is_flax and {*own} >= {*names}:
            make = functools.partial(_remade, kind, (*own,))
            return _Opened((*own,), [*own.values()], make, is_declared=is_declared)
        if kind.__eq__ is not object.__eq__:
            fields = {name: getattr(x, name, None) for name in names}
            fields |= {} if is_flax else own
            return _fixed((*fields, _read_by(kind)), [*fields.values()], is_declared)
    elif kind.__eq__ is not object.__eq__ and _is_comparable(x):
        return _Opened(x, is_declared=is_declared)
    return _OWN


def _is_comparable(x: Any) -> bool:
    try:
        hash(x)
        return (x == x) is True
    except Exception:  # a user's methods may raise anything
        return False


def _remade(kind: type, names: Sequence[str], values: Sequence[Any]) -> Any:
    made: Any = object.__new__(kind)
    vars(made).update(zip(names, values, strict=True))
    return made


def _read_by(x: Any) -> Hashable:
    """Names and values that a user's declared class or factory reads, without following them.

    Functions, classes and arrays of JAX equal themselves. Objects, lists and dicts are left out.
    """
    classes = x.__mro__ if isinstance(x, type) else ()
    own = {
        f"{each.__qualname__}.{name}": value
        for each in classes
        if each.__flags__ & _HEAP_TYPE and not _is_pure(each.__module__)
        for name, value in vars(each).items()
    }
    for value in [*own.values()] or [x]:
        # Of properties, of cached properties, and of static and class methods.
        each = (getattr(value, name, None) for name in ("fget", "func", "__func__"))
        found, wrappers = next(filter(None, each), value), list[Any]()
        last = inspect.unwrap(found, stop=wrappers.append) if callable(found) else None
        for function in (*wrappers, last):
            if type(function) is FunctionType and not _is_of_library(function):
                space = function.__globals__
                own |= {name: space[name] for name in _names(function.__code__) if name in space}
    return tuple((name, token) for name, value in own.items() if (token := _plain(value)))


def _plain(x: Any) -> Any:
    if type(x) in _PLAIN:
        return type(x), x
    return _Same(x) if type(x) is FunctionType or isinstance(x, type) else _token(x)


@functools.lru_cache(4096)
def _names(code: CodeType) -> tuple[str, ...]:
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each)]
    return (*code.co_names, *inner)


def _is_of_library(function: FunctionType) -> bool:
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) and _is_pure(name) else None
    return vars(module) is function.__globals__ if module else False


@functools.lru_cache(4096)
def _is_pure(module: str | None) -> bool:
    return str(module).partition(".")[0] in _PURE
