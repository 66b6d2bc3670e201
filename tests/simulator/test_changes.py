"""A second eager call notices every change that no declaration excludes."""

import dataclasses
import enum
import functools
import os
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import part
from fedjax_mm.base.programs import compiled

BEFORE, AFTER = 0.1, 0.3
RATE = BEFORE
CASES = {}


def case(make):
    """Notes a function that makes a schedule of the value BEFORE, and what changes it to AFTER."""
    CASES[make.__name__] = make
    return make


def module_of(name, source):
    module = types.ModuleType(name)
    exec(source, vars(module))
    return module


def changing(x, name="rate"):
    return lambda: setattr(x, name, AFTER)


def updating(x, key="rate"):
    return lambda: x.__setitem__(key, AFTER)


def value_of(function):
    return jnp.asarray(function(1.0))


def ask(function):
    return float(compiled(value_of, (), (function,)))


def check_noticed(schedule, change):
    assert ask(schedule) == pytest.approx(BEFORE)
    change()
    assert ask(schedule) == pytest.approx(AFTER)


# A dozen kinds of changes; `tests_full` has a hundred more.


@case
def a_dict_in_a_closure():
    table = {"rate": BEFORE}
    return (lambda t: table["rate"] * t), updating(table)


@case
def a_global_number():
    return (lambda t: RATE * t), updating(globals(), "RATE")


@case
def a_module_in_a_closure():
    settings = module_of("settings", f"RATE = {BEFORE}")
    return (lambda t: settings.RATE * t), changing(settings, "RATE")


@case
def a_function_of_a_notebook_cell():
    cell = module_of("cell", f"rate = {BEFORE}\ndef schedule(t): return rate * t")
    return cell.schedule, changing(cell)


@case
def an_environment_variable():
    os.environ["RATE"] = str(BEFORE)
    return (
        lambda t: float(os.environ["RATE"]) * t,
        lambda: os.environ.update(RATE=str(AFTER)),
    )


class Slots:
    __slots__ = ("rate",)

    def __call__(self, t):
        return self.rate * t


@case
def an_object_with_slots():
    schedule = Slots()
    schedule.rate = BEFORE
    return schedule, changing(schedule)


@dataclasses.dataclass(unsafe_hash=True)
class NotCompared:
    name: str
    rate: float = dataclasses.field(default=BEFORE, compare=False)

    def __call__(self, t):
        return self.rate * t


@case
def a_field_that_is_not_compared():
    schedule = NotCompared("a")
    return schedule, changing(schedule)


class Kind(enum.Enum):
    FAST = "fast"

    def rate(self):
        return RATE


@case
def a_global_in_a_method_of_an_enum():
    return (lambda t: Kind.FAST.rate() * t), updating(globals(), "RATE")


@jax.tree_util.register_static
class Static:
    def __init__(self, rate):
        self.rate = rate


@case
def a_static_object_in_a_closure():
    static = Static(BEFORE)
    return (lambda t: static.rate * t), changing(static)


@case
def an_attribute_of_a_partial():
    schedule = functools.partial(lambda t: schedule.rate * t)
    schedule.rate = BEFORE
    return schedule, changing(schedule)


@case
def a_replaced_method():
    class Schedule:
        def __call__(self, t):
            return BEFORE * t

    return Schedule(), lambda: setattr(Schedule, "__call__", lambda self, t: AFTER * t)


@case
def other_code():
    def schedule(t):
        return 0.1 * t

    def other(t):
        return 0.3 * t

    return (lambda t: schedule(t)), lambda: setattr(schedule, "__code__", other.__code__)


@pytest.fixture
def restored(monkeypatch):
    """Undoes what cases change outside of themselves."""
    monkeypatch.setitem(globals(), "RATE", BEFORE)
    monkeypatch.setenv("RATE", "")


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_noticed(name, restored):
    check_noticed(*CASES[name]())


# Declared functions and classes keep their programs, although their reads are known in part.

TEXT = str(BEFORE)
SCALE = 1.0
ARRAY = np.full((), BEFORE)
TABLE = {"rate": BEFORE}
OBJECT = types.SimpleNamespace(rate=BEFORE)
SETTINGS = module_of("settings", f"RATE = {BEFORE}")


def helper():
    return RATE


def scaled(make):
    @functools.wraps(make)
    def scaled():
        return lambda t: SCALE * make()(t)

    return scaled


class Base:
    rate = BEFORE

    @property
    def read(self):
        return SCALE / 10

    @functools.cached_property
    def once(self):
        return float(TEXT)


def tree(call):
    """An object of a registered pytree."""
    kind = type("Tree", (Base,), {"__call__": call})
    jax.tree_util.register_pytree_node(kind, lambda _: ((), None), lambda *_: kind())
    return kind()


def network(call):
    return functools.partial(type("Net", (nn.Module,), {"__call__": call})().apply, {})


def set_global(name, value):
    return lambda patch: patch.setitem(globals(), name, value)


@part
def of_a_number():
    return lambda t: RATE * t


@part
def of_a_text():
    return lambda t: float(TEXT) * t


@part
@scaled
def of_a_decorator():
    return lambda t: 0.1 * t


@part
def of_an_array():
    return lambda t: ARRAY * t


@part
def of_a_function():
    return lambda t: helper() * t


@part
def of_a_class():
    return lambda t: Base.rate * t


@part
def of_a_table():
    return lambda t: TABLE["rate"] * t


@part
def of_an_object():
    return lambda t: OBJECT.rate * t


@part
def of_a_module():
    return lambda t: SETTINGS.RATE * t


@part
def of_a_variable():
    return lambda t: float(os.environ["RATE"]) * t


def set_rate(patch):
    patch.setitem(globals(), "RATE", AFTER)


FASTER = type("Faster", (), {"rate": AFTER})
NOTICED = {
    "number": (of_a_number(), set_rate),
    "text": (of_a_text(), set_global("TEXT", str(AFTER))),
    "other array": (of_an_array(), set_global("ARRAY", np.full((), AFTER))),
    "same array": (of_an_array(), lambda _: ARRAY.fill(AFTER)),
    "other function": (of_a_function(), set_global("helper", lambda: AFTER)),
    "other class": (of_a_class(), set_global("Base", FASTER)),
    "number in a method": (tree(lambda self, t: RATE * t), set_rate),
    "number in a property": (tree(lambda self, t: self.read * t), set_global("SCALE", 3.0)),
    "text in a cached property": (
        tree(lambda self, t: type(self)().once * t),
        set_global("TEXT", str(AFTER)),
    ),
    "number in a decorator": (of_a_decorator(), set_global("SCALE", 3.0)),
    "function in a method": (
        tree(lambda self, t: helper() * t),
        set_global("helper", lambda: AFTER),
    ),
    "class in a method": (tree(lambda self, t: Base.rate * t), set_global("Base", FASTER)),
    "attribute of a base": (
        tree(lambda self, t: self.rate * t),
        lambda patch: patch.setattr(Base, "rate", AFTER),
    ),
    "replaced method of a base": (
        tree(lambda self, t: self.read * t),
        lambda patch: patch.setattr(Base, "read", AFTER),
    ),
    "number in a network": (network(lambda self, t: RATE * t), set_rate),
}


@pytest.mark.parametrize("name", NOTICED)
def test_plain_globals_of_declared_functions_and_classes_may_change(name, monkeypatch):
    monkeypatch.setitem(globals(), "ARRAY", ARRAY.copy())
    schedule, change = NOTICED[name]
    check_noticed(schedule, lambda: change(monkeypatch))


@jax.jit
def jitted(t):
    return RATE * t


@jax.tree_util.register_static
class StaticSchedule(Static):
    def __call__(self, t):
        return self.rate * t


def around():
    """A factory that is a local function."""
    rate = BEFORE

    @part
    def local():
        return lambda t: rate * t

    def change(_):
        nonlocal rate
        rate = AFTER

    return local(), change


STATIC = StaticSchedule(BEFORE)
STALE = {
    "dict": (of_a_table(), lambda patch: patch.setitem(TABLE, "rate", AFTER)),
    "object": (of_an_object(), lambda patch: patch.setattr(OBJECT, "rate", AFTER)),
    "module": (of_a_module(), lambda patch: patch.setattr(SETTINGS, "RATE", AFTER)),
    "class": (of_a_class(), lambda patch: patch.setattr(Base, "rate", AFTER)),
    "what a function reads": (of_a_function(), set_rate),
    "environment": (of_a_variable(), lambda patch: patch.setenv("RATE", str(AFTER))),
    "variable around the factory": around(),
    "object in a method": (
        tree(lambda self, t: OBJECT.rate * t),
        lambda patch: patch.setattr(OBJECT, "rate", AFTER),
    ),
    "dict in a network": (
        network(lambda self, t: TABLE["rate"] * t),
        lambda patch: patch.setitem(TABLE, "rate", AFTER),
    ),
    "static object": (STATIC, lambda patch: patch.setattr(STATIC, "rate", AFTER)),
    "jitted function": (jitted, set_rate),
}


@pytest.mark.parametrize("name", STALE)
def test_declarations_promise_that_nothing_else_changes(name, monkeypatch):
    """The value of the first call, which has become wrong, shows that the promise is used."""
    monkeypatch.setenv("RATE", str(BEFORE))
    schedule, change = STALE[name]
    assert ask(schedule) == pytest.approx(BEFORE)
    change(monkeypatch)
    assert ask(schedule) == pytest.approx(BEFORE)
