"""Table of methods x properties of local training and of the server.

Every method trains for epochs on clients of unequal size, with momentum, a server optimizer and
both kinds of weights, like its NumPy loop; or it is refused in the words of its paper.
"""

import dataclasses
import functools
import inspect
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mm import local_sgd, mfa_rand, simulate
from fedjax_mm.algorithms import methods
from fedjax_mm.base import Batching, ClientContext
from fedjax_mm.local import REFUSED
from fedjax_mm.tasks import least_squares, requiring
from tests.algorithms.method_problems import BATCH, SEED, N, examples, regression, ridge_in_epochs
from tests.algorithms.test_methods import THRESHOLDS, Quiet, error
from tests.helpers import Bowls, Featured, replay, roll_out
from tests.methods import METHODS, VARIANTS

pytestmark = pytest.mark.usefixtures("x64")

T, RATE, MOMENTUM, EPOCHS = 6, 0.1, 0.9, 1.5
SERVER_RATE, SERVER_MOMENTUM = 0.8, 0.5
WITHOUT_EPOCHS = {method for method, setting in REFUSED if setting == "epochs"}
ROWS = METHODS | {"scaffold I": VARIANTS["scaffold I"], "stalevr one": VARIANTS["stalevr one"]}


def length(n):
    """One epoch and a half."""
    return math.ceil(n / BATCH) + math.ceil(0.5 * n / BATCH)


def options(name, *, weighted=None, **others):
    """The options of a row, with weights other than by default unless they are given."""
    row = ROWS[name]
    default = inspect.signature(row.factory).parameters.get("weighted")
    if default is not None:
        others["weighted"] = (not default.default) if weighted is None else weighted
    return {**row.choices, **others}


class Server:
    """w + eta m with m <- beta m + step."""

    def __init__(self):
        self.m = np.zeros(())

    def __call__(self, w, step):
        self.m = SERVER_MOMENTUM * self.m + step
        return w + SERVER_RATE * self.m


@functools.cache
def groups():
    """2 or 3 of 7 clients in each round, and one round without clients."""
    made = roll_out(mfa_rand(N, 1, cohort_size=3), jax.random.key(SEED), T).copy()
    made[2] = -1
    return made


QUICK = ("fedavg", "maxfl", "fednova", "feddyn", "scaffold", "perfedavg", "mwfed", "ditto", "mifa")
"""The methods whose servers, weights and numbers of steps differ. `tests_full` has the others."""


@pytest.mark.parametrize("name", QUICK)
def test_epochs_momentum_and_the_server_match_the_loop(name):
    row, compared, cohorts = ROWS[name], regression(), groups()
    features, targets, _, counts = examples()
    is_equal = row.factory.__name__ in WITHOUT_EPOCHS
    often = {"steps": 4, "order": "epochs"} if is_equal else {"epochs": EPOCHS}

    def run(task, numbers, momentum, start):
        local = local_sgd(RATE, **often, batch_size=BATCH, momentum=momentum)
        server = optax.sgd(SERVER_RATE, momentum=SERVER_MOMENTUM)
        algorithm = row.factory(local, **options(name), **numbers, server_optimizer=server)
        task = requiring(Quiet(task, N), jnp.asarray(THRESHOLDS["least squares"]))
        how = {"params": start, "client_map": 2}
        return simulate(jax.random.key(SEED), task, algorithm, replay(cohorts, N), T, **how)

    start = np.random.default_rng(2).normal(size=(1, compared.size))
    state, trace = jax.jit(run)(compared.task, row.numbers, MOMENTUM, jnp.asarray(start))
    problem = ridge_in_epochs(
        features,
        targets,
        Batching(BATCH, "epochs"),
        T,
        thresholds=THRESHOLDS["least squares"],
        steps=[4 if is_equal else length(n) for n in counts],
        momentum=MOMENTUM,
        server=Server(),
    )
    clients = [[int(k) for k in group if k >= 0] for group in cohorts[:, 0]]
    more = {} if row.num_gradients else {"lengths": []}
    given = {**options(name), **row.numbers, **more}
    found = row.loop(problem, start[0], clients, lambda t: RATE, 4, **given)
    w, *states = found if isinstance(found, tuple) else (found,)
    models = jax.tree.map(lambda x: x[0], state.models[0])
    server = models.server.own if hasattr(models.server, "own") else models.server
    own = row.states(dataclasses.replace(models, server=server))
    assert error(models.params, w) < 1e-10
    for actual, expected in zip(own, states, strict=True):
        assert error(actual, expected) < 1e-10
    count = row.num_gradients or (lambda K: K)
    expected = [sum(count(problem.steps[k]) for k in group) for group in clients]
    np.testing.assert_array_equal(trace.gradients[1:, 0], more.get("lengths", expected))


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ditto"])
def test_other_words_for_the_same_training_give_the_same_bits(method):
    """Two epochs of 4 examples, momentum 0, a server's SGD of rate 1, and equal weights."""
    row, rng = METHODS[method], np.random.default_rng(1)
    xs, ys = [rng.normal(size=(4, 2)) for _ in range(5)], rng.normal(size=(5, 4))
    task = Quiet(Featured(least_squares(xs, list(ys), ridge=0.1), 5), 5)
    task = requiring(task, np.linspace(0.1, 0.9, 5))
    assignment = mfa_rand(5, 1, cohort_size=3, unbiased=True)
    by_steps = {"steps": 4, "order": "epochs"}
    by_epochs = by_steps if method in WITHOUT_EPOCHS else {"epochs": 2}

    def run(task, local, **how):
        algorithm = row.factory(local, **options(method, **how), **row.numbers)
        return simulate(jax.random.key(0), task, algorithm, assignment, 3)[0].models[0].params

    @jax.jit
    def both(task, momentum):
        default = inspect.signature(row.factory).parameters.get("weighted")
        plain = {} if default is None else {"weighted": default.default}
        other = local_sgd(0.1, **by_epochs, batch_size=2, momentum=momentum)
        return (
            run(task, local_sgd(0.1, **by_steps, batch_size=2), **plain),
            run(task, other, server_optimizer=optax.sgd(1.0)),
        )

    np.testing.assert_array_equal(*both(task, 0.0))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_refused_is_in_the_table(method):
    """Every other setting of local training is accepted, and changes the update of a client."""
    row, task = METHODS[method], requiring(regression().task, np.ones(N))
    name = "scaffold, option II" if method == "scaffold" else method

    def told(**how):
        def send(key, params, client):
            steps = {} if "epochs" in how else {"steps": 2}
            local = local_sgd(**{"learning_rate": 0.1, "batch_size": 2, **steps, **how})
            algorithm = row.factory(local, **row.numbers, **row.choices)
            context = ClientContext(key, jnp.int32(1), task, client, params)
            return algorithm.client(context, *algorithm.init(task, params))

        return str(jax.make_jaxpr(send)(jax.random.key(0), jnp.ones(4), jnp.int32(0)))

    settings = {
        "order": {"order": "epochs"},
        "epochs": {"epochs": 2},
        "fraction": {"epochs": 0.5},
        "momentum": {"momentum": 0.9},
        "nesterov": {"optimizer": functools.partial(optax.sgd, momentum=0.9, nesterov=True)},
        "weight_decay": {"weight_decay": 0.1},
        "clip": {"clip": 1.0},
        "optimizer": {"optimizer": optax.adam},
        "rate": {"learning_rate": lambda t: 0.1 / t},
        "batch_size": {"batch_size": lambda t: 1 + t},
        "keeps": {"keeps": "client", "momentum": 0.9},
        "keeps='mean'": {"keeps": "mean", "momentum": 0.9},
    }
    programs = []
    for key, how in settings.items():
        whole = {"fraction": "epochs", "keeps='mean'": "keeps"}.get(key, key)
        reason = REFUSED.get((name, key), REFUSED.get((name, whole)))
        if reason is None:
            programs.append(told(**how))
            continue
        with pytest.raises(ValueError, match=re.escape(f"which {name} refuses: {reason}")):
            told(**how)
    assert len({told(), *programs}) == 1 + len(programs)
    assert all(name.partition(",")[0] in methods() for name, _ in REFUSED)


def test_the_page_has_the_table_of_what_is_refused():
    page = (Path(__file__).parents[2] / "docs/how-to/methods.md").read_text()
    rows = [f"| {method} | `{name}` | {reason} |" for (method, name), reason in REFUSED.items()]
    assert "|---|---|---|\n" + "\n".join(rows) + "\n\n" in page


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, (1, 3, 10)),
        ({"momentum": 0.9}, (1, 5.61, 41.381060)),
        ({"optimizer": functools.partial(optax.sgd, momentum=0.9)}, (1, 5.61, 41.381060)),
        ({"momentum": 0.0, "clip": 1.0, "weight_decay": 0.1}, (1, 3, 10)),
    ],
)
def test_normalizers_are_those_of_the_reference(how, expected):
    """Coefficients of 1, 3 and 10 steps, and with Nesterov's momentum those of a loop."""
    task, client = Bowls.of([0.0]), jnp.int32(0)
    for K, a in zip((1, 3, 10), expected, strict=True):
        assert local_sgd(0.3, steps=K, **how).normalizer(task, client) == pytest.approx(a, abs=5e-7)
    nesterov, moved, m = functools.partial(optax.sgd, momentum=0.9, nesterov=True), 0.0, 0.0
    for _ in range(3):
        m = 0.9 * m + 1
        moved += 0.9 * m + 1
    found = local_sgd(0.3, steps=3, optimizer=nesterov).normalizer(task, client)
    assert found == pytest.approx(moved)
    with pytest.raises(ValueError, match="only SGD has a_k"):
        local_sgd(0.3, steps=3, optimizer=optax.adam).normalizer(task, client)


def test_fractions_of_epochs_are_counted():
    for epochs, size, expected in [
        (0.1, 3, [1, 1, 1, 1]),  # 0.1 of 30 is 3, and not a little more
        (0.5, 4, [1, 1, 3, 4]),
        (2, 4, [2, 4, 10, 16]),
        (2.5, 4, [3, 5, 13, 20]),
        (1.5, None, [2, 2, 2, 2]),
        (1 / 3, 1, [1, 2, 7, 10]),
        (3.0, 20, [3, 3, 3, 6]),
    ]:
        task = Bowls.of([0.0] * 4, counts=[1, 5, 20, 30])
        local = local_sgd(0.1, epochs=epochs, batch_size=size)
        steps = functools.partial(local.num_steps, task)
        found = jax.jit(jax.vmap(steps))(jnp.arange(4))
        assert found.tolist() == expected
