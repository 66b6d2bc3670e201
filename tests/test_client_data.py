"""Flat client storage and minibatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import client_data, least_squares
from fedjax_mm.base import Batching

DATA = [np.arange(n, dtype=np.float32) + 100 * k for k, n in enumerate((3, 1, 5))]


def test_full_batches_weigh_every_example_once():
    data = client_data(DATA)
    for k, examples in enumerate(DATA):
        values, weights = data.batch(jax.random.key(0), jnp.int32(k), jnp.int32(0), Batching())
        assert values.shape == weights.shape == (5,)
        assert weights.sum() == len(examples)
        used = np.asarray(values)[np.asarray(weights) > 0]
        np.testing.assert_array_equal(used, examples)
        assert set(np.asarray(values)) <= set(examples), "no other client's example is read"


def test_minibatches_are_uniform_over_the_client_and_fresh_every_step():
    data = client_data(DATA)

    def draw(step):
        return data.batch(jax.random.key(1), jnp.int32(2), step, Batching(2))

    values, weights = jax.vmap(draw)(jnp.arange(20_000))
    np.testing.assert_array_equal(weights, 1)
    counts = np.array([(np.asarray(values) == value).sum() for value in DATA[2]])
    assert counts.sum() == 40_000
    assert np.abs(counts - 8000).max() < 4 * np.sqrt(40_000 * 0.2 * 0.8)
    pairs = (np.asarray(values[:-1, 0]) == np.asarray(values[1:, 0])).mean()
    assert abs(pairs - 0.2) < 4 * np.sqrt(0.2 * 0.8 / 20_000)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "there are no clients"),
        ([np.ones(2), np.ones(0)], r"client 1 has \[0\] examples"),
        ([(np.ones(2), np.ones(3))], r"client 0 has \[2, 3\] examples"),
    ],
)
def test_wrong_data_is_refused(clients, message):
    with pytest.raises(ValueError, match=message):
        client_data(clients)


def test_least_squares_refuses_what_does_not_match():
    with pytest.raises(ValueError, match="features of 2 clients but targets of 1"):
        least_squares([np.eye(2), np.eye(2)], [np.ones(2)], ridge=1.0)
    with pytest.raises(ValueError, match="ridge is 0"):
        least_squares([np.eye(2)], [np.ones(2)], ridge=0)
