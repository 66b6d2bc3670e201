"""Valid input of unusual kinds gives the same results as plain input."""

import functools
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fedjax_mm import fedavg, full_participation, mfa_rr, run, simulate, sweep
from fedjax_mm.data import Pool, client_data, federate, flat_client_data
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.overrides import load
from fedjax_mm.sweeps import Setup
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.tasks import (
    MLP,
    LogisticRegression,
    classification,
    draw_means,
    own_models,
    quadratic,
)
from fedjax_mm.theory import Problem, Rate, cohorts, mfa
from tests.boundary.parts import (
    DATA,
    EVERYBODY,
    FEDAVG,
    KEY,
    PARTS,
    QUADRATIC,
    Net,
    Streaming,
    X,
    Y,
    store,
)
from tests.helpers import slow_unless


class Table:
    """Looks to NumPy like a data frame or one of its columns."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)

    def __len__(self):
        return len(self.values)


class Bunch(dict):
    """A scikit-learn dataset."""

    __getattr__ = dict.__getitem__


PAIRS = [(X[rows], Y[rows]) for rows in PARTS]
POOL = Pool("own arrays", "real", 3, (X, Y), (X[:0], Y[:0]))
LISTS = POOL._replace(train=(X.tolist(), Y.tolist()))

DEALT = {
    "lists": lambda: federate((X.tolist(), Y.tolist()), PARTS),
    "a data frame and a column": lambda: federate((Table(X), Table(Y)), PARTS),
    "a data frame of objects": lambda: federate((Table(X.astype(object)), Table(Y)), PARTS),
    "labels in a frame of one column": lambda: federate((Table(X), Table(Y[:, None])), PARTS),
    "a Bunch": lambda: federate(Bunch(data=X, target=Y, DESCR="toy"), PARTS),
    "JAX arrays": lambda: federate((jnp.asarray(X), jnp.asarray(Y)), PARTS),
    "float64 features": lambda: federate((X.astype(np.float64), Y), PARTS),
    "int8 labels": lambda: federate((X, Y.astype(np.int8)), PARTS),
    "uint64 labels": lambda: federate((X, Y.astype(np.uint64)), PARTS),
    "whole float labels": lambda: federate((X, Y.astype(float)), PARTS),
    "object labels": lambda: federate((X, Y.astype(object)), PARTS),
    "a list of two arrays inside": lambda: federate((X, Y), np.stack(PARTS)),
    "rows in lists": lambda: federate((X, Y), [rows.tolist() for rows in PARTS]),
    "rows in ranges": lambda: federate((X, Y), [range(i, i + 6) for i in range(0, 24, 6)]),
    "rows uint8": lambda: federate((X, Y), [rows.astype(np.uint8) for rows in PARTS]),
    "num_classes int8": lambda: federate((X, Y), PARTS, num_classes=np.int8(3)),
    "big-endian": lambda: federate((X.astype(">f4"), Y.astype(">i2")), PARTS),
    "columns first in memory": lambda: federate((np.asfortranarray(X), Y), PARTS),
    "read-only": lambda: federate((np.frombuffer(X.tobytes(), "f4").reshape(24, 4), Y), PARTS),
    "unchecked": lambda: federate((X, Y), PARTS, check=False),
    "a pool of lists": lambda: federate(LISTS, PARTS, test_fraction=0.2),
    "a pool": lambda: federate(POOL, PARTS, test_fraction=0.2),
}

STORED = {
    "lists": lambda: client_data([(x.tolist(), y.tolist()) for x, y in PAIRS]),
    "frames and columns": lambda: client_data([(Table(x), Table(y)) for x, y in PAIRS]),
    "JAX arrays": lambda: client_data([(jnp.asarray(x), jnp.asarray(y)) for x, y in PAIRS]),
    "a tuple of clients": lambda: client_data(tuple(PAIRS)),
    "float64 and int64": lambda: client_data([(x * 1.0, y.astype(np.int64)) for x, y in PAIRS]),
    "flat": lambda: flat_client_data((X, Y), [6] * 4),
    "flat, lists": lambda: flat_client_data((X.tolist(), Y.tolist()), np.full(4, 6, np.uint8)),
    "flat, of JAX": lambda: flat_client_data((jnp.asarray(X), Y), jnp.full(4, 6)),
    "unchecked": lambda: client_data(PAIRS, check=False),
}


def same(found, wanted):
    """Asserts that two pytrees have equal arrays, types and structure."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("deal", DEALT.values(), ids=DEALT)
def test_federated_data_do_not_depend_on_the_kind_of_input(deal):
    same(deal(), DATA)


@pytest.mark.parametrize("make", STORED.values(), ids=STORED)
def test_stores_do_not_depend_on_the_kind_of_input(make):
    same(make(), store())


def losses(key=KEY, task=QUADRATIC, algorithm=FEDAVG, assignment=EVERYBODY, rounds=4, **more):
    """The losses of a short run. All runs have equal shapes, and most share a program."""
    return np.asarray(simulate(key, task, algorithm, assignment, rounds, **more)[1].metrics["loss"])


plain_losses = functools.cache(losses)


def closed_over():
    """Losses of a compiled run that closes over a task with NumPy arrays."""
    task = jax.tree.map(np.asarray, QUADRATIC)
    return np.asarray(
        jax.jit(lambda key: simulate(key, task, FEDAVG, EVERYBODY, 4))(KEY)[1].metrics["loss"]
    )


PROGRAMS = {
    "tasks in a list": {"task": [QUADRATIC]},
    "algorithms in a tuple": {"algorithm": (FEDAVG,)},
    "counts of any type": {
        "task": quadratic(np.uint8(4), np.int16(2), mu=0.1),
        "algorithm": fedavg(np.float32(0.1), local_steps=np.int64(2)),
        "assignment": mfa_rr(np.array(4), jnp.int32(1)),
        "rounds": np.uint8(4),
        "record_every": np.int8(1),
    },
}


def program(task=QUADRATIC, algorithm=FEDAVG, assignment=EVERYBODY, rounds=4, **more):
    """The lowered program of a run, which is not compiled."""
    traced = jax.jit(lambda task: simulate(0, task, algorithm, assignment, rounds, **more))
    return traced.lower(task).as_text()


@pytest.mark.parametrize("given", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_do_not_depend_on_the_kind_of_input(given):
    assert program(**given) == program()


RUNS = {
    "a plain seed": lambda: losses(0),
    "a seed of NumPy": lambda: losses(np.int64(0)),
    "a seed of JAX": lambda: losses(jnp.uint32(0)),
    "a seed in an array": lambda: losses(np.array(0)),
    "seeds under vmap": lambda: jax.vmap(losses_traced)(jnp.arange(2))[0],
    "a rate of JAX": lambda: losses(algorithm=fedavg(jnp.float32(0.1), local_steps=2)),
    "a constant schedule": lambda: losses(algorithm=fedavg(lambda t: 0.1, local_steps=2)),
    "a schedule of optax": lambda: losses(
        algorithm=fedavg(optax.constant_schedule(0.1), local_steps=2)
    ),
    "arrays of NumPy": lambda: losses(task=jax.tree.map(np.asarray, QUADRATIC)),
    "arrays of NumPy under jit": closed_over,
    "a server of optax": lambda: losses(
        algorithm=fedavg(0.1, local_steps=2, server_optimizer=optax.sgd(1.0))
    ),
    "a chunk of NumPy's type": lambda: losses(client_map=np.int32(4)),
    "parameters of NumPy": lambda: losses(params=np.zeros(9)),
}


def losses_traced(seed):
    """Losses of a run with a traced seed."""
    return simulate(seed, QUADRATIC, FEDAVG, EVERYBODY, 4)[1].metrics["loss"]


# One kind of seed and one kind of schedule remain in the quick tests.
SLOW = "a seed of NumPy", "a seed of JAX", "a plain seed", "a constant schedule"


@pytest.mark.parametrize(
    "call", [slow_unless(name not in SLOW, call) for name, call in RUNS.items()], ids=RUNS
)
def test_runs_do_not_depend_on_the_kind_of_input(call):
    np.testing.assert_allclose(call(), plain_losses(), rtol=1e-6)


def test_rates_that_end_at_zero_and_traced_schedules_pass():
    for schedule in (
        optax.linear_schedule(0.1, 0.0, 10),
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10),
    ):
        fedavg(schedule, local_steps=1)
    jaxpr = jax.make_jaxpr(lambda rate: (fedavg(lambda t: rate / t, local_steps=1), rate)[1])(0.1)
    assert not jaxpr.eqns  # checking a schedule adds nothing to the program
    jax.eval_shape(lambda rate: (fedavg(rate, local_steps=1), rate)[1], -1.0)


def test_other_functions_take_seeds_too():
    np.testing.assert_array_equal(draw_means(3, [0.0]), draw_means(jax.random.key(3), [0.0]))
    task = classification(DATA, LogisticRegression(3))
    same(own_models(0, task, learning_rate=0.1), own_models(KEY, task, learning_rate=0.1))


def test_a_sweep_takes_seeds_and_counts_of_any_type():
    def build(rate):
        return Setup(QUADRATIC, fedavg(rate, local_steps=2), EVERYBODY)

    plain = sweep(Grid(build, {"rate": [0.1, 0.2]}, num_rounds=2, num_seeds=2, seed=3))
    other = sweep(
        Grid(
            build,
            {"rate": np.array([0.1, 0.2])},
            num_rounds=np.int8(2),
            num_seeds=np.uint8(2),
            seed=np.uint32(3),
            first_seed=np.int64(0),
        )
    )
    np.testing.assert_array_equal(plain["loss"], other["loss"])
    assert Grid(build, {"rate": [0.1]}, num_rounds=2, seed=2**32 - 1).seed == 2**32 - 1


def test_run_takes_a_path(tmp_path, monkeypatch):
    path = tmp_path / "small.toml"
    path.write_text(
        'num_models = 1\nnum_rounds = 2\n[task]\nname = "quadratic"\nnum_clients = 4\n'
        "block_size = 2\n[algorithms.a]\nlearning_rate = 0.1\nlocal_steps = 2\n"
        '[algorithms.a.assignment]\nname = "mfa_rr"\n'
    )
    seen = []
    # Equal experiments have equal results, so nothing needs to be computed.
    monkeypatch.setattr("fedjax_mm.experiments.run.grid_of", lambda each, _: seen.append(each))
    for each in (path, str(path), load(Path(path), Experiment)):
        with pytest.raises(TypeError):
            run(each)
    assert seen[0] == seen[1] == seen[2]


def test_nnx_modules_apply_dropout_only_in_training():
    def task(rate):
        return classification(DATA, nnx.bridge.to_linen(Net, rate), rngs=("dropout",))

    half, none = task(0.5), task(0.0)
    params = half.init(KEY)
    same(params, none.init(KEY))
    same(half.metrics(KEY, params), none.metrics(KEY, params))
    batch = (jnp.arange(4), jnp.ones(4), KEY)
    assert half.loss(params, batch) != none.loss(params, batch)


class Wide(nn.Module):
    """A network that declares its random streams."""

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(nn.Dense(3)(x))


def test_other_networks_and_labels_pass():
    task = classification(DATA, Wide(), rngs="dropout")  # one name
    assert task.rngs == ("dropout",)
    same(task.init(KEY), Wide().init(KEY, X[:1])["params"])
    classification(DATA, MLP(3, hidden=(8, 4), dropout_rate=0.5), rngs=["dropout"])
    classification(DATA, MLP(3, hidden=(8, 4)), rngs=["dropout"])  # another rate might draw
    classification(DATA, Streaming("noise", 0.0), rngs=["noise"])
    classification(DATA, nnx.bridge.to_linen(Net), rngs=["default"])
    whole = federate((X, Y.astype(float)), PARTS)
    classification(whole, LogisticRegression(3))
    columns = np.stack([Y, Y], axis=1)
    data = DATA.__class__("two", "real", 3, store(y=columns), store(y=columns))
    assert classification(data, LogisticRegression(3), column=1).column == 1
    # Overlapping parts are no leak if test examples are separate.
    assert federate(((X, Y), (X, Y)), [[0, 1], [1, 2]]).num_clients == 2


def test_traced_data_pass():
    def loss(scale):
        data = flat_client_data((scale * X, Y), [6] * 4)
        data = DATA.__class__("traced", "real", 3, data, data)
        return classification(data, LogisticRegression(3)).weight(jnp.int32(0)) * scale

    assert jax.eval_shape(loss, 1.0).shape == ()
    assert jax.eval_shape(
        lambda data: classification(data, LogisticRegression(3)).train.counts, DATA
    ).shape == (4,)


def test_theory_takes_integers_of_any_type_and_real_numbers_if_documented():
    constants = {"N": 4, "E": 2, "mu": 1.0, "L": 12.5, "Gamma": 0.0, "G": 1.0, "sigma": 0.0}
    given = {"rate": Rate(2.0, 100.0), "D": 1.0}
    bounds = [mfa.theorem_1(1, Problem(M=M, **constants), **given) for M in (2, 2.0, np.uint8(2))]
    assert bounds[0] == bounds[1] == bounds[2]
    assert mfa.theorem_3(Problem(M=1.5, **constants), **given, epsilon=0.5) > 1
    assert cohorts.cohort_bound(100, Problem(N=10, C=2.5, E=5, L=2, G=1, Z=1, gap=1), gamma=0.1) > 0
    assert full_participation(np.uint8(200)).num_clients == 200
