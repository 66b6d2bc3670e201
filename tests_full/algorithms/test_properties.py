"""Methods x properties with real sizes, and with all wrappers of algorithms."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from fedjax_mm import local_sgd, mfa_rand, personal, simulate
from fedjax_mm.availability import dropping
from fedjax_mm.base import Batching
from fedjax_mm.compression import compressed, top_k
from fedjax_mm.data import FederatedData, client_data
from fedjax_mm.privacy import private
from fedjax_mm.robust import mean, robust
from fedjax_mm.tasks import classification, least_squares, requiring
from tests.algorithms.method_problems import RIDGE, SEED, ridge_in_epochs
from tests.algorithms.test_methods import Quiet, error
from tests.algorithms.test_properties import WITHOUT_EPOCHS
from tests.helpers import Featured, remembering
from tests.methods import METHODS, VARIANTS

pytestmark = pytest.mark.usefixtures("x64")

CLIENTS, SIZE, ROUNDS, RATE = 10, 10, 12, 0.01
SIZES = (5, 60, 13, 41, 7, 29, 10, 22, 55, 34)
HEAVY = {name: VARIANTS[name] for name in ("scaffold", "scaffold I", "feddyn", "fednova")}
HEAVY |= {name: METHODS[name] for name in ("moon", "fedprox")}


def data():
    rng = np.random.default_rng(3)
    features = [rng.normal(size=(n, 4)) for n in SIZES]
    return features, [x.sum(1) + rng.normal(k % 3, 1, len(x)) for k, x in enumerate(features)]


@pytest.mark.parametrize("client_map", ["vmap", 3])
@pytest.mark.parametrize("name", HEAVY)
def test_published_settings_match_the_loop(name, client_map):
    """Three epochs, momentum .9, 5 to 60 examples, 4 of 10 clients, of which some drop out."""
    row, (features, targets) = HEAVY[name], data()
    assignment = dropping(mfa_rand(CLIENTS, 1, cohort_size=4), 0.3)
    assignment = remembering(assignment, ROUNDS)

    @jax.jit
    def run(task, start):
        local = local_sgd(RATE, epochs=3, batch_size=SIZE, momentum=0.9)
        algorithm = row.factory(local, **row.choices, **row.numbers)
        how = {"params": start, "client_map": client_map}
        return simulate(jax.random.key(SEED), task, algorithm, assignment, ROUNDS, **how)

    start = np.random.default_rng(2).normal(size=(1, 4))
    task = Featured(least_squares(features, targets, ridge=RIDGE), CLIENTS)
    state, _ = run(Quiet(task, CLIENTS), jnp.asarray(start))
    steps = [3 * math.ceil(n / SIZE) for n in SIZES]
    how = {"thresholds": np.zeros(CLIENTS), "steps": steps, "momentum": 0.9}
    problem = ridge_in_epochs(features, targets, Batching(SIZE, "epochs"), ROUNDS, **how)
    rounds = [[int(k) for k in group if k >= 0] for group in state.assignment[1][:, 0]]
    assert 4 * ROUNDS > sum(map(len, rounds)) > 2 * ROUNDS, "some drop out"
    given = {**row.choices, **row.numbers}
    found = row.loop(problem, start[0], rounds, lambda t: RATE, 0, **given)
    w, *states = found if isinstance(found, tuple) else (found,)
    models = jax.tree.map(lambda x: x[0], state.models[0])
    errors = [error(models.params, w)]
    errors += [error(x, y) for x, y in zip(row.states(models), states, strict=True)]
    print(f"{name}, {client_map}: {max(errors):.1e}")
    assert max(errors) < 1e-9
    assert len(set(steps)) > 3
    assert np.abs(w - start[0]).max() > 0.1


WRAPPERS = {  # settings with which a wrapper changes nothing, and with equal weights
    "dropping": lambda f: f,
    "personal": lambda f: personal(f, lambda path: False),
    "compressed": lambda f: compressed(f, top_k(1.0)),
    "private": lambda f: private(f, clip=1e9, noise_multiplier=0.0, clients_per_round=4),
    "robust": lambda f: robust(f, mean()),
}
SUMS = "two parts that the server multiplies, as fednova does"
STATES = "server of this method reads the clients' states"
MEMORIES = {
    "personal": "a method whose server reads the clients' states",
    "compressed": STATES,
    "private": "server of this method reads the clients' (states|data), which no noise covers",
    "robust": f"{STATES}|the assignment multiplies the clients' weights",
}
REFUSES = {
    "fednova": dict.fromkeys(("personal", "compressed", "private", "robust"), SUMS),
    "scaffold": {"personal": "not like the parameters"},
    "qffl": {"personal": "does not send weighted local changes"},
    "afl": MEMORIES | {"personal": "does not send weighted local changes"},
    "mwfed": {"private": "Hidden is not a task with client_loss"},
    **{name: {"personal": "has personal models"} for name in ("ditto", "apfl", "pfedme")},
    **dict.fromkeys(("mifa", "stalevr"), MEMORIES),
}
UNWEIGHTED = {("maxfl", "private"), ("qffl", "private")}  # `private` replaces weights by 1


def run_of(row, wrap, assignment):
    """A compiled run with epochs, momentum and a server optimizer, without weights by size."""
    is_equal = row.factory.__name__ in WITHOUT_EPOCHS
    often = {"steps": 4, "order": "epochs"} if is_equal else {"epochs": 1.5}
    features, targets = data()

    @jax.jit
    def run(task):
        local = local_sgd(RATE, **often, batch_size=SIZE, momentum=0.9)
        options = {**row.choices, **row.numbers, "server_optimizer": optax.sgd(0.8, momentum=0.5)}
        if "weighted" in inspect.signature(row.factory).parameters:
            options["weighted"] = False
        algorithm = wrap(row.factory(local, **options))
        task = requiring(task, jnp.linspace(0.3, 6.0, CLIENTS))
        return simulate(jax.random.key(SEED), task, algorithm, assignment, 3, client_map=3)[0]

    task = Featured(least_squares(features, targets, ridge=RIDGE), CLIENTS)
    return np.asarray(run(Quiet(task, CLIENTS)).models[0].params)


def assignment_of(method):
    return mfa_rand(CLIENTS, 1, cohort_size=4, unbiased=method == "stalevr")


@functools.cache
def plain(method):
    return run_of(METHODS[method], lambda f: f, assignment_of(method))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("method", METHODS)
def test_wrappers_keep_epochs_momentum_and_the_server(method, wrapper):
    """A neutral wrapper gives the same model, or is refused."""
    row, wrap, assignment = METHODS[method], WRAPPERS[wrapper], assignment_of(method)
    assignment = dropping(assignment, 0.0) if wrapper == "dropping" else assignment
    if words := REFUSES.get(method, {}).get(wrapper):
        with pytest.raises(ValueError, match=words):
            run_of(row, wrap, assignment)
        return
    found = run_of(row, wrap, assignment)
    assert np.isfinite(found).all()
    difference = error(found, plain(method))
    assert difference > 1e-3 if (method, wrapper) in UNWEIGHTED else difference < 1e-12


class Normed(nn.Module):
    """Softmax regression on normalized inputs, whose logits are its features."""

    @nn.compact
    def __call__(self, x, weights=None):
        used = None if weights is None else (weights > 0)[:, None]
        frozen = not self.is_mutable_collection("batch_stats")
        x = nn.BatchNorm(frozen, momentum=0.0, param_dtype=float, name="norm")(x, mask=used)
        logits = nn.Dense(2, param_dtype=float, name="classes")(x)
        self.sow("intermediates", "representation", logits)
        return logits


@pytest.mark.parametrize("method", METHODS)
def test_batch_norm_gives_the_same_bits_by_epochs_and_by_steps(method):
    """With momentum and a server's optimizer. The last batch of an epoch has one example of 3."""
    row, rng = METHODS[method], np.random.default_rng(0)
    sizes = {} if method in WITHOUT_EPOCHS else {"epochs": 1.5}

    @jax.jit
    def run(task):
        asked, options = requiring(Quiet(task, 4), jnp.full(4, 0.5)), {**row.choices, **row.numbers}

        def end(**often):
            local = local_sgd(0.1, **often, batch_size=3, momentum=0.9)
            algorithm = row.factory(local, **options, server_optimizer=optax.sgd(0.5, momentum=0.5))
            assignment = mfa_rand(4, 1, cohort_size=3, unbiased=True)
            return simulate(0, asked, algorithm, assignment, 2)[0].models[0].params

        steps = {"steps": 3, "order": "epochs"}
        return end(**steps), end(**(sizes or steps))

    with jax.enable_x64(False):
        clients = client_data([(rng.normal(k, 1, (4, 2)), rng.integers(0, 2, 4)) for k in range(4)])
        task = classification(FederatedData("four", "synthetic", 2, clients, clients), Normed())
        one, other = run(task)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert np.abs(one["batch_stats"]["norm"]["mean"]).min() > 1e-3
