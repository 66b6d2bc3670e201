"""An impure `build` is refused, and points that look alike keep their own values."""

import dataclasses
import functools
import os
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, full_participation, local_sgd, part, simulate, sweep
from fedjax_mm.base.programs import split
from fedjax_mm.sweeps import Setup
from tests.helpers import Towards

N, ROUNDS = 4, 2
TASK = Towards(jnp.arange(1.0, N + 1))
RATES = [0.1, 0.3]
PARAMS = {"w": jnp.zeros(3)}  # because draws differ between points
LABELS = {"a": 0.1, "b": 0.3, "c": 0.1}


def setup(schedule):
    return Setup(TASK, fedavg(local_sgd(schedule, steps=1)), full_participation(N), PARAMS)


def last(schedule):
    return simulate(0, *setup(schedule)[:3], ROUNDS, params=PARAMS)[1].metrics["norm"][-1, 0]


@functools.cache
def expected(*rates):
    run = jax.jit(last)  # another way to the numbers
    return [float(run(rate)) for rate in rates]


def swept(build, values):
    return sweep(build, {"x": values}, num_rounds=ROUNDS).norm.isel(round=-1).values.ravel()


RATE = 0.0
TABLE = {"rate": 0.0}
SPACE = types.SimpleNamespace(rate=0.0)
LIST = [0.0]
ARRAY = np.zeros(1)
MODULE = types.ModuleType("module")


class Schedule:
    rate = 0.0

    def __call__(self, t):
        return self.rate + 0 * t


ONE = Schedule()


def in_a_global(rate):
    global RATE
    RATE = rate
    return lambda t: RATE + 0 * t


def in_a_dict(rate):
    TABLE["rate"] = rate
    return lambda t: TABLE["rate"] + 0 * t


def in_a_namespace(rate):
    SPACE.rate = rate
    return lambda t: SPACE.rate + 0 * t


def in_a_class(rate):
    Schedule.rate = rate
    return Schedule()


def in_one_object(rate):
    ONE.rate = rate
    return ONE


def in_a_list(rate):
    LIST[0] = rate
    return lambda t: LIST[0] + 0 * t


def in_an_array(rate):
    ARRAY[0] = rate
    return lambda t: float(ARRAY[0]) + 0 * t


def in_a_module(rate):
    MODULE.rate = rate
    return lambda t: MODULE.rate + 0 * t


def in_the_environment(rate):
    os.environ["RATE"] = str(rate)
    return lambda t: float(os.environ["RATE"]) + 0 * t


IMPURE = {
    in_a_global: "in_a_global.<locals>.<lambda>",
    in_a_dict: "in_a_dict.<locals>.<lambda>",
    in_a_namespace: "in_a_namespace.<locals>.<lambda>",
    in_a_class: "a Schedule",
    in_one_object: "a Schedule",
    in_a_list: "in_a_list.<locals>.<lambda>",
    in_an_array: "in_an_array.<locals>.<lambda>",
    in_a_module: "in_a_module.<locals>.<lambda>",
    in_the_environment: "in_the_environment.<locals>.<lambda>",
}


@pytest.mark.parametrize("schedule", IMPURE, ids=lambda each: each.__name__)
def test_an_impure_build_is_refused(schedule, monkeypatch):
    """Of three labels the first and the last have one rate, and the one between another."""
    monkeypatch.setenv("RATE", "")
    for values in (RATES, [*LABELS]):
        with pytest.raises(ValueError, match="build is not a pure function") as caught:
            swept(lambda x: setup(schedule(LABELS.get(x, x))), values)
        assert IMPURE[schedule] in str(caught.value)
        assert "as an argument" in str(caught.value)


@pytest.mark.parametrize("values", ["acbc", "aacacaba"])
def test_every_label_is_checked(values):
    """Only the point of b differs, and it is not among the 1st, 2nd, 4th and 8th."""
    labels = [f"{label}{place}" for place, label in enumerate(values)]
    with pytest.raises(ValueError, match="build is not a pure function"):
        swept(lambda x: setup(in_a_global(LABELS[x[0]])), labels)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    rate: float


class Plain:
    def __init__(self, rate):
        self.rate = rate


class OwnAux(Plain):
    """A pytree whose auxiliary data is the object itself."""


jax.tree_util.register_pytree_node(OwnAux, lambda x: ((), x), lambda x, _: x)


@dataclasses.dataclass(unsafe_hash=True)
class NotCompared:
    name: str
    rate: float = dataclasses.field(compare=False)

    def __call__(self, t):
        return self.rate + 0 * t


class Net(nn.Module):
    @nn.compact
    def __call__(self):
        return self.param("rate", nn.initializers.zeros, ())


def read(settings, t):
    return settings.rate + 0 * t


def with_attribute(rate):
    settings = functools.partial(read)
    settings.rate = rate
    return functools.partial(read, settings)


def with_keyword_default(rate):
    def schedule(t, *, rate=rate):
        return rate + 0 * t

    return schedule


def bound(rate):
    net = Net().bind({"params": {"rate": jnp.float32(rate)}})
    return lambda t: net() + 0 * t


ALIKE = {
    "static": lambda rate: functools.partial(read, Static(rate)),
    "its own auxiliary data": lambda rate: functools.partial(read, OwnAux(rate)),
    "not compared": lambda rate: NotCompared("a", rate),
    "attribute of a partial": with_attribute,
    "keyword default": with_keyword_default,
    "bound network": bound,
}


@functools.cache
def swept_alike():
    def build(name, x):
        return setup(ALIKE[name](LABELS[x]))

    return sweep(build, {"name": [*ALIKE], "x": ["a", "b"]}, num_rounds=ROUNDS).norm


@pytest.mark.parametrize("name", ALIKE)
def test_points_that_look_alike_keep_their_own_values(name):
    """In eager calls one after the other, and in one sweep."""
    found = [float(last(ALIKE[name](rate))) for rate in RATES]
    found += swept_alike().sel(name=name).isel(round=-1).values.ravel().tolist()
    np.testing.assert_allclose(found, 2 * expected(*RATES), rtol=1e-5)


def test_a_number_on_an_axis_that_chooses_structure_is_refused_in_words():
    @part
    def chosen(rate):
        return (lambda t: rate) if rate > 0 else (lambda t: 0.0)

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        swept(lambda x: setup(chosen(x)), RATES)
    assert "numbers on axes" in str(caught.value.__notes__)


def test_a_setup_that_keeps_a_tracer_is_refused_in_words():
    def growing(rate):
        def schedule(t):
            times.append(t)
            return rate + 0 * t

        times = []
        return schedule

    with pytest.raises(ValueError, match=r"point x=0\.1 holds a tracer"):
        swept(lambda x: setup(growing(x)), RATES)


class Incomparable(Plain):
    def __eq__(self, other):
        raise RuntimeError("no comparison")

    def __hash__(self):
        return 0


class WithoutHash(Plain):
    def __eq__(self, other):
        return True

    def __hash__(self):
        raise RuntimeError("no hash")


class Elementwise(Plain):
    def __eq__(self, other):
        return np.zeros(2) == self.rate

    def __hash__(self):
        return 0


@pytest.mark.parametrize("kind", [Incomparable, WithoutHash, Elementwise])
def test_objects_that_cannot_be_compared_equal_only_themselves(kind):
    one, other = (functools.partial(read, kind(rate)) for rate in RATES)
    found = {split((), (each,), opens=True).structure for each in (one, other, one)}
    assert len(found) == 2
