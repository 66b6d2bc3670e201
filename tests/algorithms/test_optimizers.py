"""Server optimizers of Reddi et al. against their equations, in plain NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mm import Experiment, fedprox, full_participation, local_sgd, run, simulate
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.optimizers import fedadagrad, fedadam, fedyogi
from fedjax_mm.tasks import quadratic
from tests.oracles.optimizers import reddi

pytestmark = pytest.mark.usefixtures("x64")


def steps(optimizer, updates, start=0.0):
    """The parameter after each mean update."""
    w, state, found = jnp.asarray(start), optimizer.init(jnp.asarray(start)), []
    for update in updates:
        change, state = optimizer.update(-jnp.asarray(update), state, w)
        w = optax.apply_updates(w, change)
        found.append(float(w))
    return found


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (fedadagrad(0.1, b1=0.9), (0.009990005, 0.022500791)),
        (fedadagrad(0.1), (0.09990005, 0.14458143)),
        (fedadagrad(0.1, b1=0.9, initial_accumulator_value=0.0), (0.009990010, 0.022500801)),
        (fedadam(0.1), (0.099005049, 0.223604897)),
        (fedadam(0.1, initial_accumulator_value=0.0), (0.099009901, 0.223614629)),
        (fedyogi(0.1), (0.099005000, 0.223109815)),
        (fedyogi(0.1, initial_accumulator_value=0.0), (0.099009901, 0.223119637)),
        (optax.sgd(1.0, momentum=0.9), (1.0, 2.4)),
    ],
)
def test_two_steps_have_the_numbers_computed_by_hand(optimizer, expected):
    np.testing.assert_allclose(steps(optimizer, [1.0, 0.5]), expected, atol=5e-9)


FACTORIES = {"adagrad": fedadagrad, "adam": fedadam, "yogi": fedyogi}


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("start", [None, 0.02])
def test_many_steps_agree_with_the_oracle(kind, start):
    updates = np.random.default_rng(0).normal(size=(20, 3))
    how = {"b1": 0.7, "tau": 0.01} | ({} if kind == "adagrad" else {"b2": 0.6})
    optimizer = FACTORIES[kind](
        lambda count: 0.1 / (1 + count), **how, initial_accumulator_value=start
    )
    w, state = jnp.zeros(3), optimizer.init(jnp.zeros(3))
    for update in updates:
        change, state = optimizer.update(-jnp.asarray(update), state, w)
        w = optax.apply_updates(w, change)
    rates = [0.1 / (1 + t) for t in range(20)]
    v0 = 0.01**2 if start is None else start
    expected = reddi(np.zeros(3), updates, rates, kind, v0=v0, **{"b2": 0.0} | how)
    np.testing.assert_allclose(w, expected, rtol=1e-12)


def test_adam_of_optax_is_fedadam_with_other_rates():
    """optax's bias corrections are a schedule of eta and of tau, from v = 0."""
    b1, b2, tau, updates = 0.9, 0.99, 1e-3, [1.0, 0.5, -0.2]
    found, m, v = [0.0], 0.0, 0.0
    for t, update in enumerate(updates, start=1):
        m, v = b1 * m + (1 - b1) * update, b2 * v + (1 - b2) * update**2
        rate = 0.1 * np.sqrt(1 - b2**t) / (1 - b1**t)
        found.append(found[-1] + rate * m / (np.sqrt(v) + tau * np.sqrt(1 - b2**t)))
    adam = optax.adam(0.1, b1=b1, b2=b2, eps=tau)
    np.testing.assert_allclose(steps(adam, updates), found[1:], rtol=1e-10)
    ours = steps(fedadam(0.1, initial_accumulator_value=0.0), updates)
    assert abs(ours[-1] - found[-1]) > 1e-2


def test_precision_and_gradients_survive():
    def end(rate):
        optimizer = fedyogi(rate, initial_accumulator_value=0.0)
        state = optimizer.init(jnp.zeros(2, jnp.float32))
        change, state = optimizer.update(jnp.array([0.0, 1.0], jnp.float32), state)
        return change, state

    change, state = end(0.1)
    assert {x.dtype for x in (change, state.mean, state.square)} == {jnp.dtype("float32")}
    assert np.isfinite(jax.grad(lambda rate: end(rate)[0].sum())(0.1))


TABLE = {"name": "fedyogi", "learning_rate": 0.2, "tau": 0.1}
METHOD = {"name": "fedprox", "mu": 0.3, "learning_rate": 0.1, "local_steps": 2, "momentum": 0.5}


def test_a_file_names_them():
    """In a file, any method has a server optimizer, momentum, and unweighted clients."""
    settings = {
        "task": {"num_clients": 6, "mu": 0.1, "block_size": 2},
        "num_models": 1,
        "num_rounds": 4,
        "num_seeds": 1,
        "precision": "float64",
        "assignment": {"name": "full_participation"},
        "algorithms": {"A": METHOD | {"weighted": False, "server_optimizer": TABLE}},
        "axes": {"server_optimizer.tau": [0.1, 0.5], "momentum": [0.5, 0.9]},
    }
    result = run(validate(Experiment, settings))
    for tau, momentum in itertools.product((0.1, 0.5), (0.5, 0.9)):
        local, server = local_sgd(0.1, steps=2, momentum=momentum), fedyogi(0.2, tau=tau)
        algorithm = fedprox(local, mu=0.3, server_optimizer=server, weighted=False)
        _, trace = simulate(0, quadratic(6, 2, mu=0.1), algorithm, full_participation(6), 4)
        found = result.loss.sel(tau=tau, momentum=momentum).values.ravel()
        np.testing.assert_allclose(found, trace.metrics["loss"][:, 0], rtol=1e-12)
