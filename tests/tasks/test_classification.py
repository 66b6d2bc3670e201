"""Evaluation and losses of classification, against plain loops."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, full_participation, local_sgd, simulate, sweep
from fedjax_mm.base.capabilities import EpochTask
from fedjax_mm.sweeps import Grid, Setup
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import MLP, LogisticRegression
from tests.helpers import labelled_data, slow_unless
from tests.oracles import multi_model as reference

DATA = labelled_data()


SIZES = [1, 7, 1000, None]


some_sizes = pytest.mark.parametrize("block_size", [slow_unless(n in (7, None), n) for n in SIZES])


def per_client(store):
    """Lists the features and the labels of each client."""
    cuts = np.asarray(store.offsets)[1:]
    return [np.split(np.asarray(leaf), cuts) for leaf in store.examples]


def problem_of(store, sigmoid_head=False):
    features, labels = per_client(store)
    return reference.Softmax([x.astype(float) for x in features], labels, 3, sigmoid_head, "mean")


def some_params(seed=0):
    rng = np.random.default_rng(seed)
    bias, kernel = rng.normal(size=3), rng.normal(size=(3, 4))
    params = {"classes": {"bias": jnp.asarray(bias), "kernel": jnp.asarray(kernel)}}
    return params, np.concatenate([bias, kernel.ravel()])


@jax.jit
def metrics_of(task, params):
    return task.metrics(jax.random.key(0), params)


@jax.jit
def evaluated(task, params):
    """Metrics per client and pooled, of the training and of the test data."""
    return [
        [task.evaluate(params, store, per_client=per) for per in (True, False)]
        for store in (task.train, task.test)
    ]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("sigmoid_head", "block_size"),
    [slow_unless(head == (n in (1, None)), head, n) for head in (False, True) for n in SIZES],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_loss_and_accuracy_equal_those_of_a_loop(split, sigmoid_head, block_size):
    """Covers pooled and per-client metrics."""
    task = classification(DATA, LogisticRegression(3, sigmoid_head), block_size=block_size)
    store = getattr(DATA, split)
    problem, (params, w) = problem_of(store, sigmoid_head), some_params()
    apart, pooled = evaluated(task, params)[["train", "test"].index(split)]
    loss, accuracy = reference.softmax_metrics(problem, w, range(7))
    assert pooled["loss"] == pytest.approx(loss, rel=1e-12)
    assert pooled["accuracy"] == pytest.approx(accuracy, rel=1e-12)
    for k in range(7):
        loss, accuracy = reference.softmax_metrics(problem, w, [k])
        assert apart["loss"][k] == pytest.approx(loss, rel=1e-12)
        assert apart["accuracy"][k] == pytest.approx(accuracy, rel=1e-12)


@some_sizes
def test_metrics_cover_all_examples(block_size):
    task = classification(DATA, LogisticRegression(3), block_size=block_size)
    params, w = some_params(1)
    metrics = metrics_of(task, params)
    for names, store in (
        (("loss", "train_accuracy"), DATA.train),
        (("test_loss", "test_accuracy"), DATA.test),
    ):
        expected = reference.softmax_metrics(problem_of(store), w, range(7))
        for name, value in zip(names, expected, strict=True):
            assert metrics[name] == pytest.approx(value, rel=1e-5)


def test_ties_are_broken_like_argmax():
    """All logits are equal, so that the first class is predicted."""
    task = classification(DATA, LogisticRegression(3))
    zeros = jax.tree.map(jnp.zeros_like, task.init(jax.random.key(0)))
    result = task.evaluate(zeros, DATA.train)
    assert result["accuracy"] == pytest.approx(np.mean(DATA.train.examples[1] == 0))
    assert result["loss"] == pytest.approx(np.log(3))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("module", [LogisticRegression(3), MLP(3, hidden=(5,))])
def test_rows_of_weight_0_do_not_change_the_loss(module, reduction):
    task = classification(DATA, module, reduction=reduction)
    params = task.init(jax.random.key(0))
    value = jax.jit(jax.value_and_grad(task.loss))
    rows = jnp.array([3, 5, 4])
    expected = value(params, (rows, jnp.ones(3), None))
    filled = jnp.array([3, 0, 5, 4, 9]), jnp.array([1.0, 0, 1, 1, 0]), None
    for one, other in zip(*map(jax.tree.leaves, (value(params, filled), expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_scale_converts_bytes():
    store = dataclasses.replace(
        DATA.train,
        examples=((DATA.train.examples[0] * 50).astype(jnp.uint8), DATA.train.examples[1]),
    )
    floats = dataclasses.replace(
        store, examples=(store.examples[0].astype(jnp.float32) / 255, store.examples[1])
    )
    params, _ = some_params()
    losses = [
        classification(dataclasses.replace(DATA, train=s), LogisticRegression(3), scale=scale)
        .evaluate(params, s)["loss"]
        .item()
        for s, scale in ((store, 1 / 255), (floats, None))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_one_of_several_label_columns_is_learned():
    data = labelled_data(columns=4)
    params, _ = some_params()
    for column in range(4):
        alone = dataclasses.replace(
            data.train, examples=(data.train.examples[0], data.train.examples[1][:, column])
        )
        one = dataclasses.replace(data, train=alone, test=alone)
        want = metrics_of(classification(one, LogisticRegression(3)), params)
        got = metrics_of(classification(data, LogisticRegression(3), column=column), params)
        for name in ("loss", "train_accuracy"):
            assert got[name] == pytest.approx(float(want[name]))


def test_initial_parameters_are_those_of_the_module():
    task = classification(DATA, LogisticRegression(3))
    assert isinstance(task, EpochTask)
    assert task.num_clients == 7
    params = task.init(jax.random.key(0))
    want = LogisticRegression(3).init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    for one, other in zip(*map(jax.tree.leaves, (params, want)), strict=True):
        np.testing.assert_array_equal(one, other)


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


def test_wrong_arguments_are_refused():
    for data, options, message in [
        (DATA, {"reduction": "max"}, "reduction is 'max'"),
        (DATA, {"block_size": 0}, "block_size is 0"),
        (DATA, {"column": 0}, "give a column if and only if labels have columns"),
        (labelled_data(columns=2), {}, "give a column if and only if labels have columns"),
    ]:
        with pytest.raises(ValueError, match=message):
            classification(data, Plain(), **options)


class Dense(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="classes")(nn.relu(nn.Dense(5, name="hidden")(x)))


MODULE = Dense()


def plain_init(rng_key, x):
    """The flax module's initial parameters."""
    return MODULE.init(rng_key, x)["params"]


def plain_apply(params, x):
    """The flax module's logits, computed without flax."""
    x = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return x @ params["classes"]["kernel"] + params["classes"]["bias"]


def test_a_pair_of_functions_trains_like_the_flax_module():
    """To the bit."""

    def run(task):
        algorithm = fedavg(local_sgd(0.1, epochs=1, batch_size=4))
        return simulate(jax.random.key(1), task, algorithm, full_participation(7), num_rounds=3)

    networks = MODULE, (plain_init, plain_apply)
    states = [jax.jit(run)(classification(DATA, network, scale=0.5)) for network in networks]
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(one, other)


def test_points_with_the_same_pair_are_one_program():
    def build(learning_rate):
        task = classification(DATA, (plain_init, plain_apply))
        return Setup(task, fedavg(learning_rate, local_steps=1), full_participation(7))

    grid = Grid(build, {"learning_rate": [0.1, 0.2, 0.4]}, 2)
    assert len(programs_of(grid)) == 1
    loss = sweep(grid).loss.values[:, 0, -1, 0]
    assert len({*loss.tolist()}) == 3


def test_a_pair_gets_a_key_in_training_alone_and_weights_always():
    """The logits of class 0 have noise, and those of class 1 the weights."""

    def init(rng_key, x):
        return jnp.zeros((x.shape[1], 3))

    def apply(params, x, *, rng_key, weights):
        logits = x @ params
        if rng_key is not None:
            logits = logits.at[:, 0].add(jax.random.normal(rng_key, len(x)))
        return logits.at[:, 1].add(weights)

    task = classification(DATA, (init, apply))
    params = task.init(jax.random.key(0))
    rows, weights = jnp.array([3, 5]), jnp.array([1.0, 0.0])
    losses = [float(task.loss(params, (rows, weights, jax.random.key(i)))) for i in range(3)]
    assert len({*losses}) == 3
    label = DATA.train.examples[1][3]
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), 0), 2)[0]
    want = -jax.nn.log_softmax(jnp.array([noise, 1.0, 0.0]))[label]
    assert losses[0] == pytest.approx(float(want), rel=1e-6)
    labels = DATA.train.examples[1]
    want = -jax.nn.log_softmax(jnp.array([0.0, 1.0, 0.0]))[labels].mean()
    assert float(task.metrics(jax.random.key(0), params)["loss"]) == pytest.approx(
        float(want), rel=1e-5
    )
