"""Flat client storage and minibatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm.base import Batching
from fedjax_mm.data import client_data
from fedjax_mm.data.clients import flat_client_data, shared_client_data, stack_client_data
from tests.data.test_client_data import DATA, LARGE, check_uniform, steps_of
from tests.helpers import slow_unless

EVERY_WAY = {
    "full": Batching(),
    "iid": Batching(4),
    "epochs": Batching(4, "epochs"),
    "growing": Batching(limit=0),  # `steps_of` replaces the limit
}


@pytest.mark.parametrize("client", range(3))
@pytest.mark.parametrize("how", EVERY_WAY.values(), ids=EVERY_WAY)
def test_batches_contain_only_the_clients_examples(how, client):
    values, weights = steps_of(client, how, 30)
    assert set(values.ravel()) <= set(DATA[client])
    assert set(weights.ravel()) <= {0, 1}
    assert (weights.sum(1) >= 1).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, bool])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_take_is_bit_exact(dtype, shape):
    numbers = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-3, -7, 255])
    is_float = jnp.issubdtype(dtype, jnp.floating)
    examples = jnp.asarray(numbers if is_float else np.arange(8), dtype)
    examples = jnp.broadcast_to(examples.reshape(-1, *[1] * len(shape)), (8, *shape))
    rows = np.array([[7, 1], [0, 2], [3, 4], [5, 6]])
    store = flat_client_data(examples, [3, 5], check=False)
    taken = jax.jit(jax.vmap(store.take))(rows)
    assert taken.dtype == dtype
    assert np.asarray(taken).tobytes() == np.asarray(examples)[rows].tobytes()


@functools.cache
def num_batches(size):
    data = client_data(LARGE)
    return np.asarray(jax.jit(jax.vmap(lambda k: data.num_batches(k, size)))(jnp.arange(3)))


@pytest.mark.parametrize("size", [1, 3, slow_unless(False, 4), slow_unless(False, 8), 40, 100])
@pytest.mark.parametrize("client", range(3))
def test_epochs_visit_every_example_once_in_a_new_order(client, size):
    """The last batch of an epoch is padded with rows of weight 0."""
    count = len(LARGE[client])
    per_epoch = -(-count // size)
    values, weights = steps_of(client, Batching(size, "epochs"), 5 * -(-40 // size), large=True)
    assert num_batches(size)[client] == per_epoch
    orders = set()
    for epoch in range(5):
        steps = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        seen = values[steps][weights[steps] > 0]
        np.testing.assert_array_equal(np.sort(seen), LARGE[client])
        filled = np.full(per_epoch * size, 1.0)
        filled[count:] = 0
        np.testing.assert_array_equal(weights[steps].ravel(), filled)
        orders.add(tuple(seen))
    assert len(orders) > 1
    if count == 40:
        assert len(orders) == 5


def test_epochs_differ_between_keys():
    """Each model, round and client has a different key."""
    data = client_data([np.arange(30.0), np.arange(30.0)])

    @jax.jit
    @jax.vmap
    def first_epoch(seed):
        how = Batching(30, "epochs")
        return data.batch(jax.random.key(seed), jnp.int32(0), jnp.int32(0), how)[0]

    assert len({tuple(order) for order in first_epoch(jnp.arange(5)).tolist()}) == 5


def test_places_in_an_epoch_are_uniform():
    """All places are tested, from the first to those in the partial last batch."""
    values, weights = steps_of(2, Batching(3, "epochs"), 3 * 5_000, large=True)
    values, weights = values.reshape(-1, 9), weights.reshape(-1, 9)
    assert (weights == [1] * 7 + [0] * 2).all()
    for place in range(7):
        check_uniform(values[:, place], LARGE[2])


@pytest.mark.parametrize(
    "limit", [0, *(slow_unless(n in (2, 7), n) for n in (1, 2, 6, 7)), slow_unless(False, 50)]
)
def test_a_growing_sample_is_drawn_without_replacement(limit):
    """min(N_s, n_k) distinct examples have weight 1, but at least one."""
    values, weights = steps_of(2, Batching(limit=0), 4_000, large=True, limit=limit)
    size = min(max(limit, 1), 7)
    np.testing.assert_array_equal(weights, np.tile(np.arange(40) < size, (4_000, 1)))
    chosen = values[:, :size]
    assert (np.diff(np.sort(chosen), axis=1) > 0).all()
    check_uniform(chosen[:, 0], LARGE[2])
    if size > 1:  # all pairs are equally likely
        pairs = np.sort(chosen[:, :2], axis=1) @ [1000, 1]
        counts = np.unique(pairs, return_counts=True)[1]
        assert len(counts) == 21
        assert np.abs(counts - 4_000 / 21).max() < 5 * np.sqrt(4_000 / 21)


def test_selected_stores_equal_the_stores():
    stores = [client_data(DATA), client_data([x + 1000 for x in LARGE])]
    both = stack_client_data(stores)
    assert both.select(0).examples is both.examples
    assert (both.min_count, both.max_count) == (1, 40)

    @jax.jit
    @jax.vmap
    def drawn(k):
        """Batches of the stack and of each store, for every order."""
        hows = Batching(4), Batching(4, "epochs")
        pairs = []
        for i, store in enumerate(stores):
            for how in hows:
                args = jax.random.key(7), k, jnp.int32(2), how
                of_store, of_stack = store.batch(*args), both.select(jnp.int32(i)).batch(*args)
                pairs.append(
                    [(s.take(rows), w) for s, (rows, w) in ((both, of_stack), (store, of_store))]
                )
        return pairs

    pairs = jax.device_get(drawn(jnp.arange(3)))
    assert len(pairs) == 4
    for got, want in pairs:
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


def test_several_partitions_share_examples_without_copies():
    """Each partition equals a store with copies, though clients share examples."""
    examples = {"x": np.arange(8.0), "y": np.arange(8) % 3}
    ways = [[[7, 1], [1, 1, 2, 6], [0]], [[3], [4, 5, 6, 7], [3, 2, 7]]]
    shared = shared_client_data(examples, ways)
    assert (shared.num_clients, shared.min_count, shared.max_count) == (3, 1, 4)
    assert (shared.num_examples, shared.examples["x"].shape) == (8, (8,))
    copies = [
        client_data([{name: x[rows] for name, x in examples.items()} for rows in way])
        for way in ways
    ]

    @jax.jit
    def drawn(store, k):
        found = []
        for how in (Batching(2), Batching(2, "epochs"), Batching()):
            rows, weights = store.batch(jax.random.key(7), k, jnp.int32(1), how)
            found.append((store.take(rows), weights, store.block(jnp.int32(1), 3)))
        return found

    for i, copy in enumerate(copies):
        mine = shared.select(jnp.int32(i))
        assert mine.examples["x"] is shared.examples["x"]
        for k in range(3):
            for (got, *a), (want, *b) in zip(*(drawn(s, k) for s in (mine, copy)), strict=True):
                np.testing.assert_array_equal(a[0], b[0])
                jax.tree.map(np.testing.assert_array_equal, a[1], b[1])
                counts = a[0] > 0
                for name in examples:
                    np.testing.assert_array_equal(got[name][counts], want[name][counts])
        gathered = mine.gathered()
        assert gathered.order is None
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(x[: len(y)], y),
            gathered.examples,
            copy.examples,
        )
    assert copies[0].gathered() is copies[0]
    both = stack_client_data([shared.select(0), shared.select(1)])
    second = both.select(1)
    rows = second.offsets[0] + jnp.arange(3)
    np.testing.assert_array_equal(second.take(rows)["x"], [3, 4, 5])
