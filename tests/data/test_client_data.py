"""Flat client storage and minibatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm.base import Batching
from fedjax_mm.data import client_data
from fedjax_mm.data.clients import flat_client_data, shared_client_data, stack_client_data
from fedjax_mm.tasks import least_squares

DATA = [np.arange(n, dtype=np.float32) + 100 * k for k, n in enumerate((3, 1, 5))]


LARGE = [np.arange(n, dtype=np.float32) + 100 * k for k, n in enumerate((3, 40, 7))]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _steps(data, how, steps, seed, limit):
    how = how if how.limit is None else how._replace(limit=limit)

    def draw(client, step):
        return data.batch(jax.random.key(seed), client, step, how)

    every_step = jax.vmap(draw, (None, 0))
    rows, weights = jax.vmap(every_step, (0, None))(jnp.arange(3), jnp.arange(steps))
    return data.examples[rows], weights


@functools.cache
def steps_of_all(how, steps, large, seed=1, limit=2):
    """Examples and weights ``[clients, steps, batch]`` of the first steps of all clients."""
    data = client_data(LARGE if large else DATA)
    return jax.device_get(_steps(data, how, steps, seed, limit))


def steps_of(client, how, steps, large=False, **options):
    """Examples and weights of the first steps of one client."""
    values, weights = steps_of_all(how, steps, large, **options)
    return values[client], weights[client]


def test_full_batches_contain_every_example_once():
    for client, examples in enumerate(DATA):
        values, weights = steps_of(client, Batching(), 2)
        assert values.shape == weights.shape == (2, 5)
        for row, weight in zip(values, weights, strict=True):
            np.testing.assert_array_equal(row[weight > 0], examples)


@pytest.mark.parametrize("client", range(3))
def test_a_padded_batch_begins_with_the_smaller_batch(client):
    rows, weights = steps_of(client, Batching(5, limit=2), 4, large=True)
    alone, ones = steps_of(client, Batching(2), 4, large=True)
    np.testing.assert_array_equal(rows[:, :2], alone)
    np.testing.assert_array_equal(weights, np.tile([1, 1, 0, 0, 0], (4, 1)))
    np.testing.assert_array_equal(ones, 1)


def test_minibatches_are_uniform_and_independent():
    values, weights = steps_of(2, Batching(2), 20_000)
    np.testing.assert_array_equal(weights, 1)
    check_uniform(values.ravel(), DATA[2])
    pairs = (values[:-1, 0] == values[1:, 0]).mean()
    assert abs(pairs - 0.2) < 4 * np.sqrt(0.2 * 0.8 / 20_000)


def check_uniform(values, examples):
    """Checks that counts are within 4 standard errors, with a Bonferroni correction."""
    counts = np.array([(values == value).sum() for value in examples])
    assert counts.sum() == len(values)
    p = 1 / len(examples)
    bound = np.sqrt(16 + 2 * np.log(len(examples)))
    assert np.abs(counts - len(values) * p).max() < bound * np.sqrt(len(values) * p * (1 - p))


def test_wrong_partitions_are_refused():
    for ways, says in [
        ([[[0], [1]], [[2]]], r"the ways have \[1, 2\] clients"),
        ([[[0], []]], "a client has no example"),
        ([[[0], [4]]], "rows are 0 to 4, of 4 examples"),
        ([[[-1], [3]]], "rows are -1 to 3, of 4 examples"),
        ([[]], "a client has no example"),
    ]:
        with pytest.raises(ValueError, match=says):
            shared_client_data(np.arange(4), ways)


def test_a_partition_must_be_selected_before_use():
    shared = shared_client_data(np.arange(4), [[[0], [1]], [[2], [3]]])
    with pytest.raises(ValueError, match="a stack of 2 stores; choose one with select"):
        stack_client_data([shared, shared])
    with pytest.raises(ValueError, match=r"examples have the lengths \[3, 4\]"):
        shared_client_data((np.arange(4), np.arange(3)), [[[0]]])


def test_stores_with_different_numbers_of_clients_are_not_stacked():
    with pytest.raises(ValueError, match=r"the stores have \[2, 3\] clients"):
        stack_client_data([client_data(DATA), client_data(DATA[:2])])


def test_wrong_counts_are_refused():
    for counts, message in [
        ([], "counts is"),
        ([2, 0, 1], "counts is"),
        ([2, 2], "counts add up to 4, but there are 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            flat_client_data(np.arange(3), counts)


def test_wrong_data_is_refused():
    for clients, message in [
        ([], "examples_per_client is empty; give at least one client"),
        ([np.ones(2), np.ones(0)], r"client 1 has \[0\] examples"),
        ([(np.ones(2), np.ones(3))], r"client 0 has \[2, 3\] examples"),
    ]:
        with pytest.raises(ValueError, match=message):
            client_data(clients)


def test_least_squares_refuses_mismatched_data():
    with pytest.raises(ValueError, match="features of 2 clients but targets of 1"):
        least_squares([np.eye(2), np.eye(2)], [np.ones(2)], ridge=1.0)
    with pytest.raises(ValueError, match="ridge is 0"):
        least_squares([np.eye(2)], [np.ones(2)], ridge=0)
