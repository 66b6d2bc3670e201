"""Local optimizers whose states are kept by clients, or averaged, against the methods' loops."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mm import advance, fedavg, local_sgd, mfa_rand, simulate
from fedjax_mm.availability import dropping
from fedjax_mm.base import Batching
from fedjax_mm.local import REFUSED
from fedjax_mm.tasks import requiring
from tests.algorithms.method_problems import BATCH, SEED, N, examples, regression, ridge_in_epochs
from tests.algorithms.test_methods import THRESHOLDS, Quiet, error
from tests.algorithms.test_properties import ROWS, options
from tests.helpers import remembering, replay, roll_out
from tests.oracles.keeping import Adam, Averaged, Momentum, OfClients

pytestmark = pytest.mark.usefixtures("x64")

T, RATE, BETA, EPOCHS = 8, 0.05, 0.9, 1.5
OPTIMIZERS = {
    "momentum": ({"momentum": BETA}, lambda: Momentum(BETA)),
    "adam": ({"optimizer": optax.adam}, Adam),
}


def kept_by(keeps):
    """The methods that keep states, and whose weights in a mean do not depend on losses."""
    refused = {name for name, setting in REFUSED if setting in ("keeps", f"keeps={keeps!r}")}
    others = {"maxfl", "mwfed"} if keeps == "mean" else set()
    return [
        name
        for name, row in ROWS.items()
        if row.factory.__name__ not in refused | others and name != "scaffold"
    ]


def check(name, keeps, kind, client_map=2):
    """Unequal epochs, 3 of 7 clients in a round, and messages that are lost."""
    row, compared = ROWS[name], regression()
    settings, fresh = OPTIMIZERS[kind]
    features, targets, _, counts = examples()
    cohorts = roll_out(mfa_rand(N, 1, cohort_size=3), jax.random.key(SEED), T)
    assignment = dropping(replay(cohorts, N), 0.3)
    given = {**options(name, weighted=True), **row.numbers}

    @jax.jit
    def run(task, start):
        local = local_sgd(RATE, epochs=EPOCHS, batch_size=BATCH, **settings, keeps=keeps)
        task = requiring(Quiet(task, N), jnp.asarray(THRESHOLDS["least squares"]))
        how = {"params": start, "client_map": client_map}
        rounds = remembering(assignment, T)
        return simulate(jax.random.key(SEED), task, row.factory(local, **given), rounds, T, **how)

    start = np.random.default_rng(2).normal(size=(1, compared.size))
    state, _ = run(compared.task, jnp.asarray(start))
    how = {"thresholds": THRESHOLDS["least squares"], "stepper_of": OfClients(fresh)}
    if keeps == "mean":
        is_weighted = given.get("weighted", False) and name != "feddyn"
        mean = Averaged(fresh, lambda k: float(counts[k]) if is_weighted else 1.0)
        how |= {"stepper_of": mean, "server": mean.server}
    steps = [math.ceil(n / BATCH) + math.ceil(0.5 * n / BATCH) for n in counts]
    how["steps"] = steps
    problem = ridge_in_epochs(features, targets, Batching(BATCH, "epochs"), T, **how)
    clients = [[int(k) for k in group if k >= 0] for group in state.assignment[1][:, 0]]
    assert 3 * T > sum(map(len, clients)) > T, "some messages are lost"
    more = {} if row.num_gradients else {"lengths": []}
    found = row.loop(problem, start[0], clients, lambda t: RATE, 4, **given, **more)
    w, *states = found if isinstance(found, tuple) else (found,)
    models = jax.tree.map(lambda x: x[0], state.models[0])
    if keeps == "mean":
        models = dataclasses.replace(models, server=models.server.own)
    if hasattr(models.clients, "kept"):
        models = dataclasses.replace(models, clients=models.clients.own)
    assert error(models.params, w) < 1e-10
    assert np.abs(w - start[0]).max() > 0.01
    for actual, expected in zip(row.states(models), states, strict=True):
        assert error(actual, expected) < 1e-10


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("keeps", ["client", "mean"])
def test_fedavg_keeps_states_like_its_loop(keeps, kind):
    check("fedavg", keeps, kind)


@pytest.mark.parametrize("keeps", ["client", "mean"])
def test_a_run_continues_with_the_states_that_were_kept(keeps):
    """Bit by bit, with a state of every (model, client) pair."""
    task = Quiet(regression().task, N)
    local = local_sgd(RATE, steps=2, batch_size=BATCH, optimizer=optax.adam, keeps=keeps)
    parts = task, fedavg(local), mfa_rand(N, 2, cohort_size=2)
    whole, _ = simulate(SEED, *parts, 6)
    half, _ = simulate(SEED, *parts, 3)
    rest, _ = advance(half, *parts, 3)
    jax.tree.map(np.testing.assert_array_equal, whole.models, rest.models)
    fresh, _ = simulate(SEED, task, fedavg(local._replace(keeps=None)), parts[2], 6)
    assert error(fresh.models[0].params, whole.models[0].params) > 1e-4


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"keeps": "client"}, "SGD has no state to keep; give momentum"),
        ({"keeps": "all", "momentum": 0.9}, "keeps is 'all'; "),
    ],
)
def test_wrong_settings_are_refused(how, words):
    with pytest.raises(ValueError, match=words):
        local_sgd(0.1, steps=2, **how)
