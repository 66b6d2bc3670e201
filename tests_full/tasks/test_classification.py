"""Evaluation and losses of classification, against plain loops."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import local_sgd, mfa_rr, simulate
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.base import Batching
from fedjax_mm.data.clients import client_data, shared_client_data
from fedjax_mm.data.federated import stack_data
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import MLP, CelebACNN, LogisticRegression
from tests.helpers import labelled_data, slow_unless
from tests.tasks.test_classification import (
    DATA,
    SIZES,
    evaluated,
    metrics_of,
    some_params,
    some_sizes,
)


@functools.cache
def evaluations(num_draws):
    """`evaluated` for several draws of the data, one at a time."""
    params, _ = some_params()
    draws = [labelled_data(seed=seed) for seed in range(num_draws)]
    return [evaluated(classification(one, LogisticRegression(3)), params) for one in draws]


@some_sizes
def test_evaluation_of_a_selected_store_reads_no_other_store(block_size):
    """The stacked stores have different sizes."""
    both, (params, _) = stack_data([labelled_data(seed=seed) for seed in range(3)]), some_params()

    @jax.jit
    def selected(i):
        got = classification(both.select(i), LogisticRegression(3), block_size=block_size)
        return evaluated(got, params)[0]

    for i, expected in enumerate(evaluations(3)):
        for actual, wanted in zip(selected(i), expected[0], strict=True):
            for name, value in wanted.items():
                np.testing.assert_allclose(actual[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block_size", [7, None])
def test_shared_examples_are_evaluated_like_copies(block_size):
    params, _ = some_params()
    x, y = (np.asarray(leaf) for leaf in DATA.train.examples)
    rng = np.random.default_rng(2)
    ways = [[rng.choice(len(y), size) for size in rng.integers(1, 30, 5)] for _ in range(2)]
    store = shared_client_data((x, y), ways)

    @jax.jit
    def found(data):
        task = classification(data, LogisticRegression(3), block_size=block_size, check=False)
        loss = task.client_loss(params, jnp.int32(3))
        return (
            loss,
            task.evaluate(params, data.train),
            task.evaluate(params, data.train, per_client=True),
        )

    for i, way in enumerate(ways):
        copy = client_data([(x[rows], y[rows]) for rows in way])
        got, want = (
            found(dataclasses.replace(DATA, train=train, test=DATA.test))
            for train in (store.select(i), copy)
        )
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), got, want)


@pytest.mark.parametrize(
    ("num_clients", "block_size"),
    [
        slow_unless((n, size) in {(1, 1), (4, 7), (7, None)}, n, size)
        for n in (1, 4, 7)
        for size in SIZES
    ],
)
def test_the_first_clients_are_evaluated_without_the_others(num_clients, block_size):
    """The store is selected from a stack, with and without `vmap`."""
    draws = [labelled_data(seed=seed) for seed in range(3)]
    both, (params, _) = stack_data(draws), some_params()

    @jax.jit
    def first(i):
        task = classification(both.select(i), LogisticRegression(3), block_size=block_size)
        evaluate = partial(task.evaluate, params, num_clients=num_clients)
        return [
            (evaluate(data, per_client=True), evaluate(data)) for data in (task.train, task.test)
        ]

    stacked = jax.device_get(jax.jit(jax.vmap(first))(jnp.arange(3)))
    for i, (one, expected) in enumerate(zip(draws, evaluations(3), strict=True)):
        for got in (first(i), jax.tree.map(lambda x, i=i: x[i], stacked)):
            stores = (one.train, one.test)
            for (apart, pooled), (wanted, _), data in zip(got, expected, stores, strict=True):
                for name, each in wanted.items():
                    np.testing.assert_allclose(apart[name], each[:num_clients], rtol=1e-5)
                    mean = np.average(each[:num_clients], weights=data.counts[:num_clients])
                    assert pooled[name] == pytest.approx(mean, rel=1e-5)


@functools.cache
def of_images():
    """A task with CelebA's network, its parameters, and the data."""
    images = np.random.default_rng(0).normal(size=(len(DATA.train.examples[1]), 8, 8, 3))
    labels = np.asarray(DATA.train.examples[1]) % 2
    store = dataclasses.replace(
        DATA.train, examples=(jnp.asarray(images, jnp.float32), jnp.asarray(labels))
    )
    data = dataclasses.replace(DATA, train=store, test=store, num_classes=2)
    task = classification(data, CelebACNN())
    return task, jax.jit(task.init)(jax.random.key(0)), data


def test_a_module_with_weights_evaluates_the_first_clients():
    task, params, _ = of_images()

    @jax.jit
    def evaluate(task, params):
        how = {"per_client": True}
        return [task.evaluate(params, task.train, num_clients=n, **how) for n in (None, 3)]

    everybody, first = jax.device_get(evaluate(task, params))
    for name, values in everybody.items():
        np.testing.assert_allclose(first[name], values[:3], rtol=1e-6)


@jax.jit
@partial(jax.grad, argnums=1)
def total_gradient(task, params):
    """The gradient of the sum of the clients' losses times 1, 2, ..."""
    losses = jax.vmap(task.client_loss, (None, 0))(params, jnp.arange(7))
    return jnp.arange(1.0, 8) @ losses


@some_sizes
def test_per_client_losses_have_gradients(block_size):
    """The store is selected from a stack, with and without `vmap`."""
    draws = [labelled_data(seed=seed) for seed in range(2)]
    both, (params, _) = stack_data(draws), some_params()
    factors = jnp.arange(1.0, 8)

    @jax.jit
    def gradient(i):
        task = classification(both.select(i), LogisticRegression(3), block_size=block_size)

        def total(params):
            return factors @ task.evaluate(params, task.train, per_client=True)["loss"]

        return jax.grad(total)(params)

    stacked = jax.jit(jax.vmap(gradient))(jnp.arange(2))
    for i, one in enumerate(draws):
        task = classification(one, LogisticRegression(3))

        expected = total_gradient(task, params)
        for got in (gradient(i), jax.tree.map(lambda x, i=i: x[i], stacked)):
            for one_leaf, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
                np.testing.assert_allclose(one_leaf, other, rtol=1e-4, atol=1e-5)


def test_evaluation_memory_is_bounded_by_the_block():
    """Each example has a hidden layer of 1000 numbers."""
    data = labelled_data(2000, dim=3)
    module = MLP(3, hidden=(1000,))

    def temporaries(block_size):
        task = classification(data, module, block_size=block_size)
        params = task.init(jax.random.key(0))
        program = metrics_of.lower(task, params)
        return program.compile().memory_analysis().temp_size_in_bytes

    num_examples = len(data.train.examples[0])
    assert temporaries(num_examples) > num_examples * 1000 * 4
    assert temporaries(50) < 10 * 50 * 1000 * 4


@pytest.mark.parametrize("block_sizes", [(3, 100), slow_unless(False, (1,))])
def test_modules_that_take_weights_get_them(block_sizes):
    """CelebA's batch norm excludes padding rows, so that they do not affect the loss."""
    task, params, data = of_images()
    store = data.train
    assert task.takes_weights
    assert not classification(DATA, LogisticRegression(3)).takes_weights
    loss = jax.jit(task.loss)
    alone = loss(params, (np.array([1, 2]), np.ones(2, np.float32), None))
    filled = loss(params, (np.array([1, 2, 5]), np.array([1, 1, 0], np.float32), None))
    assert filled == pytest.approx(float(alone), rel=1e-5)
    # For any block size, the examples of each client are normalized as one batch.
    each = [
        float(loss(params, (start + np.arange(n), np.ones(n, np.float32), None)))
        for start, n in zip(store.offsets.tolist(), store.counts.tolist(), strict=True)
    ]
    for block_size in block_sizes:
        there = classification(data, CelebACNN(), block_size=block_size)
        apart, pooled = evaluated(there, params)[0]
        np.testing.assert_allclose(apart["loss"], each, rtol=1e-5)
        mean = np.average(each, weights=store.counts)
        assert pooled["loss"] == pytest.approx(mean, rel=1e-5)


def test_random_streams_are_fresh_every_step_and_off_in_evaluation():
    task = classification(DATA, MLP(3, hidden=(50,), dropout_rate=0.5), rngs=("dropout",))
    params = task.init(jax.random.key(0))

    @jax.jit
    def loss(step, seed=0):
        batch = task.batch(jax.random.key(seed), jnp.int32(0), jnp.int32(step), Batching())
        return task.loss(params, batch)

    assert loss(0) == loss(0)
    assert len({float(each) for each in (loss(0), loss(1), loss(0, seed=1))}) == 3
    plain = classification(DATA, MLP(3, hidden=(50,)))
    assert metrics_of(task, params)["loss"] == metrics_of(plain, params)["loss"]


def test_training_learns():
    data = labelled_data(dim=30)
    task = classification(data, LogisticRegression(3))
    algorithm = fedavg(local_sgd(0.3, epochs=2, batch_size=4))

    @jax.jit
    def run(task):
        how = {"num_rounds": 40, "record_every": 40}
        return simulate(jax.random.key(0), task, algorithm, mfa_rr(7, 2), **how)[1]

    trace = run(task)
    assert (trace.metrics["train_accuracy"][-1] > 0.9).all()
