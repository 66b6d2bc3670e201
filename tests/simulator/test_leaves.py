"""Numbers are leaves: eager calls of one structure share a program, and others do not."""

import contextlib
import functools
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mm import (
    advance,
    fedavg,
    fedprox,
    full_participation,
    init,
    local_sgd,
    mfa_rand,
    mfa_rr,
    noisy,
    scaffold,
    simulate,
)
from fedjax_mm.asynchrony import device_time, fedast, on_clock, shifted_exponential
from fedjax_mm.availability import available, bernoulli, dropping
from fedjax_mm.privacy import private
from fedjax_mm.tasks import quadratic
from fedjax_mm.tools.pytrees import compiled
from tests.helpers import Towards

N, ROUNDS = 6, 2
TASK = Towards(jnp.arange(float(N)))
COMPILED = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: COMPILED.append(name))


@contextlib.contextmanager
def compiling(number):
    """Asserts how many programs are compiled, or read from the cache, inside."""
    COMPILED.clear()
    yield
    assert COMPILED.count("/jax/core/compile/backend_compile_duration") == number


def assert_close(actual, expected, rtol=1e-6):
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol, atol=1e-6)


# A number becomes an algorithm and an assignment; and two such numbers.
PARTS = {
    "scaffold": (
        lambda x: (scaffold(local_sgd(x, steps=2), server_rate=x), mfa_rr(N, 2)),
        (0.1, 0.3),
    ),
    "devices": (
        lambda x: (
            fedavg(x, local_steps=1),
            on_clock(
                mfa_rand(N, 2),
                device_time(
                    N,
                    steps=1,
                    flops=[1.0, 2.0],
                    bytes_down=x,
                    bytes_up=x,
                    speed=np.full(N, 2.0),
                    down=x,
                ),
            ),
        ),
        (0.5, 0.75),
    ),
    "optax": (
        lambda x: (
            fedavg(
                local_sgd(
                    lambda t: x / (1 + t),
                    steps=2,
                    optimizer=functools.partial(optax.sgd, momentum=x),
                ),
                server_optimizer=optax.chain(
                    optax.clip(x), optax.sgd(optax.cosine_decay_schedule(x, 9))
                ),
            ),
            full_participation(N),
        ),
        (0.5, 0.75),
    ),
    "wrappers": (
        lambda x: (
            private(
                noisy(fedprox(local_sgd(x, steps=2), mu=x), np.arange(N) < 2, noise=x),
                clip=x,
                noise_multiplier=0.5,
                clients_per_round=3.0,
            ),
            dropping(available(mfa_rand(N, 2), bernoulli(x)), np.full(N, 0.25)),
        ),
        (0.5, 0.75),
    ),
    "asynchronous": (
        lambda x: (
            fedavg(x, local_steps=1, weighted=False),
            fedast(N, 2, at_work=2, ratio=1, delay=shifted_exponential(N, mean=x)),
        ),
        (0.1, 0.3),
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_another_number_compiles_nothing_and_gives_its_own_results(name):
    build, (first, second) = PARTS[name]

    @jax.jit
    def run(x):
        algorithm, assignment = build(x)
        return simulate(jax.random.key(0), TASK, algorithm, assignment, ROUNDS)[1]

    expected = run(first), run(second)
    key = jax.random.key(0)
    _, before = simulate(key, TASK, *build(first), ROUNDS)
    with compiling(0):
        _, after = simulate(key, TASK, *build(second), ROUNDS)
    assert_close((before, after), expected)
    assert not np.allclose(before.metrics["norm"], after.metrics["norm"])


def test_keys_parameters_and_states_are_leaves_too():
    """And `init`, `advance` and `simulate` agree to the bit."""
    ones = {"w": np.ones(3, np.float32)}

    def parts(rate):
        return TASK, fedavg(rate, local_steps=1), mfa_rr(N, 2)

    whole, _ = simulate(1, *parts(0.2), 4, params={"w": 2 * ones["w"]})
    start = init(0, *parts(0.1), ones)
    advance(start, *parts(0.1), 2)
    with compiling(0):
        state = init(1, *parts(0.2), {"w": 2 * ones["w"]})
        for _ in range(2):
            state, _ = advance(state, *parts(0.2), 2)
    for x, y in zip(*(each.models[0].params["w"] for each in (state, whole)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_double_precision_has_its_own_program():
    def loss(rate):
        task, algorithm = quadratic(N, 1, mu=0.1), fedavg(rate, local_steps=1)
        trace = simulate(0, task, algorithm, full_participation(N), ROUNDS)[1]
        return np.asarray(trace.metrics["loss"][-1, 0])

    single = loss(0.1)
    with jax.enable_x64(True):
        double = loss(0.1)
        assert double.dtype == np.float64
    assert loss(0.1) == single == pytest.approx(double, rel=1e-5)


def test_gradients_are_those_of_a_jitted_run():
    assignment = full_participation(N)

    def norm(rate):
        algorithm = fedavg(rate, local_steps=1)
        return simulate(0, TASK, algorithm, assignment, 1)[1].metrics["norm"][-1, 0]

    norm(0.1)
    found, slope = jax.grad(norm)(0.1), (norm(0.11) - norm(0.09)) / 0.02
    assert_close(found, slope, rtol=1e-3)


def test_models_share_their_data_inside_the_program():
    other = Towards(TASK.targets)
    found = []

    def look(tasks):
        found.append([x is y for x in tasks for y in tasks])
        found.append([x.targets is y.targets for x in tasks for y in tasks])
        return tasks[0].targets

    compiled(look, ([TASK, TASK, other],), ())
    assert found == [[True, True, False] * 2 + [False, False, True], [True] * 9]


# What a user's function depends on, and how that changes.


def value_of(function):
    return jnp.asarray(function(1.0))


def ask(function):
    return float(compiled(value_of, (), (function,)))


RATE = 0.1
SETTINGS = types.ModuleType("settings")


class Slope:
    factor = 1.0

    def __init__(self, rate):
        self.rates = [rate]

    def __call__(self, t):
        return self.factor * self.rates[0] * t + RATE


def through_a_global(t):
    return helper(t)


def helper(t):
    return SETTINGS.rate * t


def closing_over(box):
    return lambda t: box["rate"] * t


BOX, ARRAY, SLOPE = {"rate": 0.1}, np.full(3, 0.1), Slope(0.1)
CHANGES = {
    "a dict": (closing_over(BOX), lambda patch: patch.setitem(BOX, "rate", 0.3)),
    "a list of an object": (SLOPE, lambda patch: patch.setattr(SLOPE, "rates", [0.3])),
    "a class": (Slope(0.1), lambda patch: patch.setattr(Slope, "factor", 0.3)),
    "a global": (Slope(0.1).__call__, lambda patch: patch.setattr(f"{__name__}.RATE", 0.3)),
    "a module": (through_a_global, lambda patch: patch.setattr(SETTINGS, "rate", 0.3)),
    "a default": (through_a_global, lambda patch: patch.setattr(f"{__name__}.helper", lambda t: t)),
    "an array": (
        (lambda x: lambda t: float(x[0]))(ARRAY),
        lambda patch: ARRAY.__setitem__(slice(None), 0.3),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_calls_is_noticed(name, monkeypatch):
    SETTINGS.rate = 0.1
    function, change = CHANGES[name]
    before = ask(function)
    with compiling(0):
        assert ask(function) == before
    change(monkeypatch)
    after = ask(function)
    assert after == pytest.approx(function(1.0)) != before


def counting():
    calls = 0.0

    def count(t):
        nonlocal calls
        calls += 1.0
        return calls

    return count


def test_values_that_cannot_be_compared_are_asked_each_time():
    draws = iter([1.0, 2.0, 3.0])
    assert [ask(lambda t: next(draws)) for _ in range(3)] == [1, 2, 3]
    count = counting()
    assert [ask(count) for _ in range(3)] == [1, 2, 3]


def test_functions_differ_by_what_they_do():
    def times(number):
        return lambda t: number * t

    assert ask(times(2.0)) == 2
    with compiling(0):  # The same code around another number.
        assert ask(times(3.0)) == 3
    assert ask(times(4)) == 4
    assert ask(lambda t: 5 * t) == 5
    assert ask(functools.partial(lambda x, t: x * t, 6.0)) == 6


def test_numbers_that_choose_structure_are_compiled_in():
    def chosen(number):
        return lambda t: t if number > 0 else -t

    assert [ask(chosen(x)) for x in (1.0, -1.0)] == [1, -1]


def test_errors_are_the_users_own():
    def fails(rate):
        def schedule(t):
            raise KeyError("no rate at a quarter", rate)

        return schedule

    with pytest.raises(KeyError, match="no rate at a quarter") as caught:
        ask(fails(0.25))
    assert caught.value.__context__ is None


def test_programs_are_freed():
    kept = Slope(0.1)
    ask(kept)
    ref = weakref.ref(kept)
    del kept
    for number in range(64):
        ask(functools.partial(max, number))
    gc.collect()
    assert ref() is None
