"""Numbers are leaves: eager calls of one structure share a program, and others do not."""

import contextlib
import dataclasses
import functools
import gc
import weakref

import flax.linen as nn
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
    part,
    scaffold,
    simulate,
)
from fedjax_mm.asynchrony import device_time, fedast, on_clock, shifted_exponential
from fedjax_mm.availability import available, bernoulli, dropping
from fedjax_mm.base.programs import compiled
from fedjax_mm.privacy import private
from fedjax_mm.schedules import inverse_time
from fedjax_mm.tasks import quadratic
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
                    inverse_time(x, 1.0),
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


@pytest.mark.parametrize("name", ["scaffold", "wrappers"])
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


# Trace a user's function for each call, because its dependencies are unknown.


def value_of(function):
    return jnp.asarray(function(1.0))


def ask(function):
    return float(compiled(value_of, (), (function,)))


@part
def times(number, power=1):
    return lambda t: number * t**power


def test_undeclared_functions_are_traced_for_each_call():
    draws = iter([1.0, 2.0, 3.0])
    assert [ask(lambda t: next(draws)) for _ in range(3)] == [1, 2, 3]
    box = {"rate": 0.1}
    rates = []
    for rate in (0.1, 0.3):
        box["rate"] = rate
        rates.append(ask(lambda t: box["rate"] * t))
    assert rates == pytest.approx([0.1, 0.3])


def test_numbers_of_undeclared_functions_are_those_that_the_user_wrote():
    rate = 0.25
    assert ask(lambda t: rate if isinstance(rate, float) else 0.5) == 0.25


def test_declared_functions_share_a_program_for_all_numbers():
    assert ask(times(2.0)) == 2
    with compiling(0):
        assert ask(times(3.0)) == 3
    assert ask(times(4)) == 4  # an int is structure
    assert ask(functools.partial(times, 5.0)(power=2)) == 5
    double = jax.jit(lambda t: 2 * t)
    ask(double)
    with compiling(0):
        assert ask(double) == 2


FACTOR = 1.0


class Net(nn.Module):
    power: int = 1

    @nn.compact
    def __call__(self, t):
        return FACTOR * self.param("w", nn.initializers.ones, ()) * t**self.power


def output(network):
    return network.init_with_output(jax.random.key(0), 2.0)[0]


@pytest.mark.parametrize("make", [lambda: Net(2), lambda: Constant(jnp.float32(1))])
def test_networks_and_pytrees_of_the_user_keep_their_programs(make, monkeypatch):
    """And notice the plain globals that their methods name."""

    def asked():
        return float(compiled(output if isinstance(make(), Net) else value_of, (make(),), ()))

    first = asked()
    with compiling(0):
        assert asked() == first
    monkeypatch.setattr(f"{__name__}.FACTOR", 3.0)
    assert asked() == 3 * first


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Constant:
    value: jax.Array

    def __call__(self, t):
        return FACTOR * self.value * t


def test_numbers_that_choose_structure_are_compiled_in():
    @part
    def chosen(number):
        return (lambda t: t) if number > 0 else (lambda t: -t)

    assert [ask(chosen(x)) for x in (1.0, -1.0)] == [1, -1]


def test_numbers_annotated_as_floats_have_their_values():
    @part
    def known(rate: float):
        return lambda t: rate if isinstance(rate, float) else 0.5

    assert [ask(known(x)) for x in (0.25, 0.75)] == [0.25, 0.75]


def test_errors_are_the_users_own_and_come_from_one_call():
    calls = []

    def schedule(t):
        calls.append(t)
        raise KeyError("no rate at a quarter")

    with pytest.raises(KeyError, match="no rate at a quarter") as caught:
        ask(schedule)
    assert caught.value.__context__ is None
    assert len(calls) == 1


def test_the_callers_arrays_may_change_after_the_call():
    data = np.full((40, 5, 50_000), 1, np.float32)
    task = Towards(data)

    def last(task):
        x = task.targets
        for _ in range(20):
            x = jnp.sin(x) + x
        return jnp.sum(x)

    before = float(compiled(last, (task,), ()))
    found = compiled(last, (task,), ())
    data[:] = 0
    assert float(found) == before


def test_programs_are_freed():
    kept = jax.jit(lambda t: t)
    ask(kept)
    ref = weakref.ref(kept)
    del kept
    gc.collect()
    assert ref() is None
