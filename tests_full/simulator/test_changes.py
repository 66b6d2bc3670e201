"""A hundred more kinds of changes that a second eager call notices."""

import abc
import argparse
import array
import collections
import contextlib
import contextvars
import ctypes
import dataclasses
import enum
import functools
import importlib
import operator
import sys
import tempfile
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.simulator.test_changes import (
    AFTER,
    BEFORE,
    NotCompared,
    Slots,
    Static,
    ask,
    changing,
    check_noticed,
    module_of,
    updating,
)

RATE = BEFORE
STACK = contextlib.ExitStack()
CASES = {}
SOURCE = """
RATE = 0.1
TABLE = {"rate": 0.1}
class deep: rate = 0.1
def get(): return RATE
def __getattr__(name):
    if name == "LAZY": return TABLE["rate"]
    raise AttributeError(name)
"""


def case(make):
    CASES[make.__name__] = make
    return make


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    """Undoes what cases change outside of themselves, and makes the modules of a user."""
    monkeypatch.setitem(globals(), "RATE", BEFORE)
    settings = module_of("settings_of_a_user", SOURCE)
    package = module_of("package_of_a_user", "__path__ = []")
    package.conf = module_of("package_of_a_user.conf", "RATE = 0.1")
    for each in (settings, package, package.conf):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setitem(globals(), "settings", settings)
    with STACK:
        yield


settings: Any = None
set_rate = updating(globals(), "RATE")


class Plain:
    """An object whose class is not declared."""

    def __init__(self, rate=BEFORE):
        self.rate = rate

    def __call__(self, t):
        return self.rate * t


# Modules


@case
def module_as_a_default():
    def schedule(t, chosen=settings):
        return chosen.RATE * t

    return schedule, changing(settings, "RATE")


@case
def module_as_a_class_attribute():
    class Schedule:
        chosen = settings

        def __call__(self, t):
            return self.chosen.RATE * t

    return Schedule(), changing(settings, "RATE")


@case
def module_as_an_attribute():
    plain = Plain(settings)
    return (lambda t: plain.rate.RATE * t), changing(settings, "RATE")


def rate_of(module):
    return module.RATE


@case
def module_as_an_argument_of_a_helper():
    return (lambda t: rate_of(settings) * t), changing(settings, "RATE")


@case
def import_inside():
    def schedule(t):
        import settings_of_a_user as chosen

        return chosen.RATE * t

    return schedule, changing(settings, "RATE")


@case
def from_import_inside():
    def schedule(t):
        from settings_of_a_user import RATE

        return RATE * t

    return schedule, changing(settings, "RATE")


def of_package(body):
    source = f"import package_of_a_user.conf\ndef schedule(t):\n {body}"
    conf = sys.modules["package_of_a_user.conf"]
    return module_of("package_of_a_user.use", source).schedule, changing(conf, "RATE")


@case
def module_of_a_package():
    return of_package("return package_of_a_user.conf.RATE * t")


@case
def from_import_of_a_package_inside():
    return of_package("from package_of_a_user.conf import RATE; return RATE * t")


@case
def import_of_a_package_inside():
    return of_package("import package_of_a_user.conf as chosen; return chosen.RATE * t")


@case
def getattr_of_a_module():
    name = "RATE"
    return (lambda t: getattr(settings, name) * t), changing(settings, "RATE")


@case
def vars_of_a_module():
    return (lambda t: vars(settings)["RATE"] * t), changing(settings, "RATE")


@case
def getattr_in_a_module():
    return (lambda t: settings.LAZY * t), updating(settings.TABLE)


@case
def function_of_a_module():
    return (lambda t: settings.get() * t), changing(settings, "RATE")


@case
def class_of_a_module():
    return (lambda t: settings.deep.rate * t), changing(settings.deep)


@case
def attrgetter_of_a_module():
    get = operator.attrgetter("RATE")
    return (lambda t: get(settings) * t), changing(settings, "RATE")


@case
def modules_of_the_system():
    return (lambda t: sys.modules["settings_of_a_user"].RATE * t), changing(settings, "RATE")


@case
def import_by_a_call():
    def schedule(t):
        return importlib.import_module("settings_of_a_user").RATE * t

    return schedule, changing(settings, "RATE")


@case
def module_named_like_one_of_the_standard_library():
    module = module_of("code.model", "rate = 0.1\ndef schedule(t): return rate * t")
    return module.schedule, changing(module)


# Namespaces


@case
def globals_by_a_call():
    return (lambda t: globals()["RATE"] * t), set_rate


@case
def eval_of_a_global():
    return (lambda t: eval("RATE") * t), set_rate


@case
def simple_namespace():
    space = types.SimpleNamespace(rate=BEFORE)
    return (lambda t: space.rate * t), changing(space)


@case
def namespace_of_arguments():
    space = argparse.Namespace(rate=BEFORE)
    return (lambda t: space.rate * t), changing(space)


@case
def attrgetter_of_an_object():
    plain, get = Plain(), operator.attrgetter("rate")
    return (lambda t: get(plain) * t), changing(plain)


@case
def function_by_exec():
    space = {"rate": BEFORE}
    exec("def schedule(t): return rate * t", space)
    return space["schedule"], updating(space)


@case
def global_of_a_class_by_exec():
    space = {"rate": BEFORE}
    exec("class Schedule:\n    def __call__(self, t): return rate * t", space)
    return space["Schedule"](), updating(space)


@case
def attribute_of_a_class_by_exec():
    space = {}
    exec("class Schedule:\n rate = 0.1\n def __call__(self, t): return self.rate * t", space)
    return space["Schedule"](), changing(space["Schedule"])


@case
def thread_local():
    space = threading.local()
    space.rate = BEFORE
    return (lambda t: space.rate * t), changing(space)


@case
def context_variable():
    variable = contextvars.ContextVar("variable")
    variable.set(BEFORE)
    return (lambda t: variable.get() * t), lambda: variable.set(AFTER)


# Classes


class Meta(type):
    rate = BEFORE

    @property
    def read(cls):
        return RATE


def with_meta():
    meta = type("OtherMeta", (Meta,), {"rate": BEFORE})
    return meta, meta("WithMeta", (), {})


@case
def attribute_of_a_metaclass():
    meta, kind = with_meta()
    return (lambda t: kind.rate * t), changing(meta)


@case
def property_of_a_metaclass():
    _, kind = with_meta()
    return (lambda t: kind.read * t), set_rate


@case
def class_attribute_with_underscores():
    class Schedule:
        __rate__ = BEFORE

        def __call__(self, t):
            return self.__rate__ * t

    return Schedule(), changing(Schedule, "__rate__")


@case
def class_attribute_named_as_by_abc():
    class Settings:
        _abc_rate = BEFORE

    return (lambda t: Settings._abc_rate * t), changing(Settings, "_abc_rate")


def global_times(self, t):
    return RATE * t


@case
def call_is_a_partialmethod():
    class Schedule:
        __call__ = functools.partialmethod(global_times)

    return Schedule(), set_rate


@case
def call_is_a_staticmethod():
    class Schedule:
        @staticmethod
        def __call__(t):
            return RATE * t

    return Schedule(), set_rate


@case
def getitem_is_a_classmethod():
    class Table:
        @classmethod
        def __getitem__(cls, key):
            return RATE

    table = Table()
    return (lambda t: table["rate"] * t), set_rate


@case
def class_getitem():
    class Table:
        def __class_getitem__(cls, key):
            return RATE

    return (lambda t: Table["rate"] * t), set_rate


@case
def namespace_of_make_dataclass():
    kind = dataclasses.make_dataclass(
        "Schedule", [("power", int)], namespace={"__call__": lambda self, t: RATE * t}
    )
    return kind(1), set_rate


@case
def class_attribute_of_make_dataclass():
    kind = dataclasses.make_dataclass("Settings", ["power"], namespace={"rate": BEFORE})
    return (lambda t: kind.rate * t), changing(kind)


@case
def class_by_types():
    kind = types.new_class("Settings", (), {}, lambda space: space.update(rate=BEFORE))
    return (lambda t: kind.rate * t), changing(kind)


@case
def class_by_type():
    kind = type("Settings", (), {"rate": BEFORE})
    return (lambda t: kind.rate * t), changing(kind)


@case
def property_of_a_global():
    class Settings:
        @property
        def rate(self):
            return RATE

    one = Settings()
    return (lambda t: one.rate * t), set_rate


@case
def cached_property():
    class Settings:
        @functools.cached_property
        def rate(self):
            return RATE

    def change():
        set_rate()
        del one.rate

    one = Settings()
    return (lambda t: one.rate * t), change


@case
def descriptor():
    class Descriptor(Plain):
        def __get__(self, one, kind=None):
            return self.rate

    class Settings:
        rate = Descriptor()

    one = Settings()
    return (lambda t: one.rate * t), changing(vars(Settings)["rate"])


@case
def inherited_attribute():
    class Base:
        rate = BEFORE

    child = type("Child", (Base,), {})()
    return (lambda t: child.rate * t), changing(Base)


@case
def other_class_of_an_object():
    class Slow:
        rate = BEFORE

    class Fast:
        rate = AFTER

    one = Slow()
    return (lambda t: one.rate * t), lambda: setattr(one, "__class__", Fast)


@case
def registered_subclass():
    class Fast(abc.ABC):  # noqa: B024
        pass

    one = Plain()
    rate = {True: AFTER, False: BEFORE}
    return (lambda t: rate[isinstance(one, Fast)] * t), lambda: Fast.register(Plain)


# Enums


@case
def method_of_a_member():
    class Kind(enum.Enum):
        FAST = "fast"

        def rate(self):
            return RATE

    member = Kind.FAST
    return (lambda t: member.rate() * t), set_rate


@case
def list_of_a_member():
    class Kind(enum.Enum):
        FAST = [BEFORE]  # noqa: RUF012

    return (lambda t: Kind.FAST.value[0] * t), updating(Kind.FAST.value, 0)


@case
def attribute_of_a_member():
    class Planet(enum.Enum):
        EARTH = 1

        def __init__(self, _):
            self.rate = BEFORE

    return (lambda t: Planet.EARTH.rate * t), changing(Planet.EARTH)


# Objects


@case
def slots_with_a_dict():
    class Schedule(Slots):
        __slots__ = ("__dict__",)

    schedule = Schedule()
    schedule.rate = BEFORE
    return schedule, changing(schedule)


@case
def slots_and_a_dict_in_one_class():
    class Schedule:
        __slots__ = ("__dict__", "rate")

        def __call__(self, t):
            return self.rate * t

    schedule = Schedule()
    schedule.rate = BEFORE
    return schedule, changing(schedule)


@case
def slots_of_a_base():
    class Schedule(Slots):
        pass

    schedule = Schedule()
    schedule.rate = BEFORE
    return schedule, changing(schedule)


@case
def attribute_that_is_not_a_field():
    @dataclasses.dataclass(unsafe_hash=True)
    class Schedule:
        name: str

        def __post_init__(self):
            self.rate = BEFORE

        def __call__(self, t):
            return self.rate * t

    schedule = Schedule("a")
    return schedule, changing(schedule)


@case
def own_hash_of_a_dataclass():
    @dataclasses.dataclass
    class Schedule:
        name: str
        rates: list = dataclasses.field(default_factory=lambda: [BEFORE], compare=False)

        def __hash__(self):
            return hash(self.name)

        def __call__(self, t):
            return self.rates[0] * t

    schedule = Schedule("a")
    return schedule, updating(schedule.rates, 0)


@case
def list_of_a_frozen_dataclass():
    @dataclasses.dataclass(frozen=True)
    class Schedule:
        rates: list

        def __call__(self, t):
            return self.rates[0] * t

    schedule = Schedule([BEFORE])
    return schedule, updating(schedule.rates, 0)


@case
def other_static_object():
    def make(static):
        return lambda t: static.rate * t

    made = [make(Static(BEFORE))]
    return (lambda t: made[0](t)), lambda: made.__setitem__(0, make(Static(AFTER)))


@case
def other_static_dataclass_in_a_global():
    @jax.tree_util.register_static
    @dataclasses.dataclass(frozen=True)
    class Settings:
        rate: float

    space = {"static": Settings(BEFORE)}
    exec("def schedule(t): return static.rate * t", space)
    return space["schedule"], lambda: space.update(static=Settings(AFTER))


@case
def weak_reference():
    plain = Plain()
    STACK.callback(lambda: plain)  # keeps it alive
    reference = weakref.ref(plain)
    return (lambda t: reference().rate * t), changing(plain)


@case
def weak_proxy():
    plain = Plain()
    STACK.callback(lambda: plain)
    proxy = weakref.proxy(plain)
    return (lambda t: proxy.rate * t), changing(plain)


# Functions


@case
def attribute_of_a_partial_in_a_closure():
    partial = functools.partial(global_times, None)
    partial.rate = BEFORE
    return (lambda t: partial.rate * t), changing(partial)


@case
def attribute_of_a_cached_function():
    @functools.lru_cache
    def cached(x):
        return x

    cached.rate = BEFORE
    return (lambda t: cached.rate * t), changing(cached)


@case
def attribute_of_a_jitted_function():
    jitted = jax.jit(lambda x: x)
    jitted.rate = BEFORE
    return (lambda t: jitted.rate * t), changing(jitted)


@case
def attribute_of_a_function():
    def other():
        pass

    other.rate = BEFORE
    return (lambda t: other.rate * t), changing(other)


@case
def keyword_defaults():
    def inner(t, *, rate=BEFORE):
        return rate * t

    return (lambda t: inner(t)), updating(inner.__kwdefaults__)


@case
def defaults():
    def inner(t, rate=BEFORE):
        return rate * t

    return (lambda t: inner(t)), lambda: setattr(inner, "__defaults__", (AFTER,))


@case
def method_of_a_dict():
    table = {"rate": BEFORE}
    get = table.get
    return (lambda t: get("rate") * t), updating(table)


@case
def method_of_a_list():
    table = [BEFORE]
    get = table.__getitem__
    return (lambda t: get(0) * t), updating(table, 0)


@case
def single_dispatch():
    @functools.singledispatch
    def schedule(t):
        return BEFORE * t

    def other(t):
        return AFTER * t

    return (lambda t: schedule(t)), lambda: schedule.register(object, other)


@case
def custom_derivative():
    @jax.custom_jvp
    def inner(t):
        return RATE * t

    inner.defjvps(lambda slope, _, t: RATE * slope)
    return (lambda t: inner(t)), set_rate


@case
def partial_of_jax():
    box = {"rate": BEFORE}
    return jax.tree_util.Partial(lambda t: box["rate"] * t), updating(box)


@case
def schedules_of_optax():
    box = {"rate": BEFORE}
    joined = optax.join_schedules([lambda count: box["rate"]] * 2, [5])
    return (lambda t: joined(jnp.int32(0)) * t), updating(box)


@case
def function_of_numpy_from_python():
    function = np.frompyfunc(lambda x: x * RATE, 1, 1)
    return (lambda t: function(1.0) * t), set_rate


@case
def vectorized_function():
    function = np.vectorize(lambda x: x * RATE)
    return (lambda t: float(function(1.0)) * t), set_rate


# Containers and values


@case
def mapping_proxy():
    table = {"rate": BEFORE}
    proxy = types.MappingProxyType(table)
    return (lambda t: proxy["rate"] * t), updating(table)


@case
def view_of_a_dict():
    table = {"rate": BEFORE}
    values = table.values()
    return (lambda t: next(iter(values)) * t), updating(table)


@case
def deque():
    rates = collections.deque([BEFORE])
    return (lambda t: rates[0] * t), updating(rates, 0)


@case
def byte_array():
    numbers = bytearray(b"\x01")
    return (lambda t: numbers[0] / 10 * t), lambda: numbers.__setitem__(0, 3)


@case
def array_of_python():
    rates = array.array("d", [BEFORE])
    return (lambda t: rates[0] * t), updating(rates, 0)


@case
def memory_view():
    rates = np.array([BEFORE])
    view = memoryview(rates)
    return (lambda t: view[0] * t), updating(rates, 0)


@case
def memory_map():
    path = Path(STACK.enter_context(tempfile.TemporaryDirectory())) / "rates"
    rates = np.memmap(path, np.float64, "w+", shape=(1,))
    rates[0] = BEFORE
    return (lambda t: float(rates[0]) * t), updating(rates, 0)


@case
def mask_of_an_array():
    rates = np.ma.array([BEFORE, 0.5], mask=[0, 1])

    def change():
        rates.mask = [0, 0]

    return (lambda t: float(rates.mean()) * t), change


@case
def number_of_c():
    rate = ctypes.c_double(BEFORE)
    return (lambda t: rate.value * t), changing(rate, "value")


@case
def digits_that_do_not_print():
    kind = np.dtype([("rates", "f8", (3,))])
    small, large = (np.array([([1 + x * 2**-40, 0, 0],)], kind)[0] for x in (0, 2))
    box = {"record": small}

    def schedule(t):
        return (0.1 + (box["record"]["rates"][0] - 1) * 2**40 / 10) * t

    return schedule, lambda: box.update(record=large)


@case
def sign_of_zero():
    box = {"zero": 0.0}

    def schedule(t):
        return (0.2 - 0.1 * jnp.arctan2(box["zero"], -1.0) / np.pi) * t

    return schedule, lambda: box.update(zero=-0.0)


@case
def bool_that_equals_an_int():
    box = {"one": 1}
    return (lambda t: (0.3 if box["one"] is True else 0.1) * t), lambda: box.update(one=True)


@case
def float_that_equals_an_int():
    box = {"one": 1}
    return (lambda t: (0.1 if type(box["one"]) is int else 0.3) * t), lambda: box.update(one=1.0)


@case
def number_of_another_precision():
    space = {"number": np.int8(1)}
    exec("def schedule(t): return (0.1 if number.itemsize == 1 else 0.3) * t", space)
    return space["schedule"], lambda: space.update(number=np.int64(1))


@case
def ordered_dict():
    table = collections.OrderedDict(rate=BEFORE)
    return (lambda t: table["rate"] * t), updating(table)


@case
def factory_of_a_dict():
    table = collections.defaultdict(lambda: RATE)
    return (lambda t: table.default_factory() * t), set_rate


@case
def counter():
    table = collections.Counter(a=1)
    return (lambda t: table["a"] / 10 * t), lambda: table.update(a=2)


@case
def chain_of_dicts():
    table = {"rate": BEFORE}
    chain = collections.ChainMap({}, table)
    return (lambda t: chain["rate"] * t), updating(table)


@case
def dict_of_a_user():
    table = collections.UserDict(rate=BEFORE)
    return (lambda t: table["rate"] * t), updating(table)


# Networks


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear, self.dropout = nnx.Linear(1, 1, rngs=rngs), nnx.Dropout(BEFORE, rngs=rngs)
        self.linear.kernel[...] = jnp.full((1, 1), BEFORE)
        self.rate = BEFORE

    def __call__(self, t):
        return self.rate * t


@case
def parameter_of_nnx():
    param = nnx.Param(jnp.asarray(BEFORE))
    return (lambda t: param[...] * t), updating(param, ...)


@case
def parameter_of_nnx_in_a_global():
    space = {"param": nnx.Param(jnp.asarray(BEFORE))}
    exec("def schedule(t): return param[...] * t", space)
    return space["schedule"], updating(space["param"], ...)


@case
def attribute_of_a_network_of_nnx():
    model = Model()
    return (lambda t: model(t)), changing(model)


@case
def network_of_nnx_in_a_global():
    space = {"model": Model()}
    exec("def schedule(t): return model(t)", space)
    return space["schedule"], changing(space["model"])


@case
def dropout_of_nnx():
    model = Model()
    return (lambda t: model.dropout.rate * t), changing(model.dropout)


@case
def kernel_of_nnx():
    model = Model()
    return (lambda t: model.linear.kernel[0, 0] * t), updating(model.linear.kernel, (0, 0))


class Net(nn.Module):
    rate: float = BEFORE

    def __call__(self, t):
        return self.rate * t


@case
def frozen_attribute_of_a_network():
    net = Net()
    return (lambda t: net.apply({}, t)), lambda: object.__setattr__(net, "rate", AFTER)


@case
def list_of_an_object_of_a_network():
    class OfPlain(nn.Module):
        plain: Plain

        def __call__(self, t):
            return self.plain.rate[0] * t

    rates = [BEFORE]
    net = OfPlain(Plain(rates))
    return (lambda t: net.apply({}, t)), updating(rates, 0)


@case
def class_attribute_of_a_network():
    class OfItsClass(nn.Module):
        def __call__(self, t):
            return OfItsClass.rate * t

    OfItsClass.rate = BEFORE
    net = OfItsClass()
    return (lambda t: net.apply({}, t)), changing(OfItsClass)


@case
def interceptor_of_methods():
    net = Net()

    def tripled(method, args, kwargs, context):
        return 3 * method(*args, **kwargs)

    return (
        lambda t: net.apply({}, t),
        lambda: STACK.enter_context(nn.intercept_methods(tripled)),
    )


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_noticed(name):
    check_noticed(*CASES[name]())


def test_fields_that_are_not_compared_differ_between_objects():
    assert [ask(NotCompared("a", rate)) for rate in (BEFORE, AFTER)] == pytest.approx([0.1, 0.3])


@pytest.mark.parametrize(
    "read",
    [lambda rate: rate if isinstance(rate, float) else 0.5, lambda rate: float(str(rate))],
    ids=["type", "str"],
)
def test_numbers_of_undeclared_functions_are_pythons_own(read):
    def make(rate):
        return lambda t: read(rate) * t

    assert [ask(make(rate)) for rate in (BEFORE, AFTER)] == pytest.approx([0.1, 0.3])
