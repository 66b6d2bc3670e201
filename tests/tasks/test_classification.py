"""Evaluation and losses of classification, against plain loops."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm.base.capabilities import EpochTask
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


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (DATA, {"reduction": "max"}, "reduction is 'max'"),
        (DATA, {"block_size": 0}, "block_size is 0"),
        (DATA, {"column": 0}, "give a column if and only if labels have columns"),
        (labelled_data(columns=2), {}, "give a column if and only if labels have columns"),
    ],
)
def test_wrong_arguments_are_refused(data, options, message):
    with pytest.raises(ValueError, match=message):
        classification(data, Plain(), **options)
