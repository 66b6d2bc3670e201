"""Local trainings of different lengths: what is really executed, and that nothing else changes."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_mm import (
    client_data,
    fedavg,
    full_participation,
    layout,
    least_squares,
    mfa_rand,
    mfa_rr,
    simulate,
)
from fedjax_mm.data.synthetic import sample_counts
from fedjax_mm.simulate import chunks_of
from tests.helpers import STRATEGIES, Towards, replay


@settings(deadline=None, max_examples=300)
@given(
    steps=st.lists(st.integers(1, 10_000), min_size=1, max_size=300),
    chunk_size=st.integers(1, 400),
)
def test_growing_chunks_compute_at_most_twice_the_steps(steps, chunk_size):
    """Each chunk as long as its first client; places that only fill it compute too."""
    steps = sorted(steps, reverse=True)
    chunks = chunks_of(len(steps), chunk_size, growing=True)
    sizes = [size for size, count in chunks for _ in range(count)]
    assert max(sizes) <= max(chunk_size, 1)
    starts = np.cumsum([0, *sizes[:-1]])
    assert starts[-1] < len(steps) <= sum(sizes)
    executed = sum(steps[start] * size for start, size in zip(starts, sizes, strict=True))
    assert executed <= 2 * sum(steps)


@given(size=st.integers(1, 300), chunk_size=st.integers(1, 400))
def test_chunks_of_equal_lengths_are_equal(size, chunk_size):
    (chunk, count), *more = chunks_of(size, chunk_size, growing=False)
    assert not more
    assert chunk <= chunk_size
    assert (count - 1) * chunk < size <= count * chunk
    assert count == -(-size // chunk_size)  # no more of them than of full ones
    assert count * chunk - size < count  # nowhere more than one is padded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counted:
    """A task whose losses are counted, lane by lane, as they are computed."""

    counts: jax.Array

    @property
    def num_clients(self):
        return self.counts.shape[-1]

    def init(self, rng_key):
        return jnp.zeros(1)

    def weight(self, client):
        return self.counts[client].astype(float)

    def num_batches(self, client, size):
        return (self.counts[client] + size - 1) // size

    def batch(self, rng_key, client, step, how):
        return client + step

    def loss(self, params, batch):
        count = jax.pure_callback(
            count_lanes, jax.ShapeDtypeStruct((), jnp.float32), batch, vmap_method="expand_dims"
        )
        return jnp.sum(params) * count

    def metrics(self, params):
        return {}


executed = 0


def count_lanes(batch):
    global executed
    executed += np.size(batch)
    return np.zeros(np.shape(batch), np.float32)


def steps_executed(counts, assignment, client_map, num_rounds=1, **options):
    """Local steps that were computed, and those that count."""
    global executed
    task = Counted(jnp.asarray(counts, jnp.int32))
    algorithm = fedavg(1.0, epochs=1, batch_size=10)
    run = functools.partial(
        simulate,
        algorithm=algorithm,
        assignment=assignment,
        num_rounds=num_rounds,
        client_map=client_map,
    )
    program = jax.jit(lambda key, task: run(key, task))
    executed = 0
    _, trace = jax.block_until_ready(program(jax.random.key(0), task))
    jax.effects_barrier()
    return executed, int(trace.gradients.sum())


@pytest.mark.parametrize("client_map", ["auto", "vmap", "scan", 7, 16])
@pytest.mark.parametrize("num_models", [1, 4])
def test_at_most_twice_the_steps_are_executed(num_models, client_map):
    """Counts of Synthetic(1, 1), whose largest client has a hundred times the median's."""
    counts = sample_counts(50)
    counts[0] = counts.max()  # whatever stands in for padding must not be the longest
    computed, needed = steps_executed(counts, mfa_rr(50, num_models), client_map)
    assert needed == (-(-counts // 10)).sum()
    assert needed <= computed <= 2 * needed
    if client_map == "scan":
        assert computed == needed


def test_padding_does_not_wait_for_the_longest():
    """Client 0, who does not take part, has a thousand steps; the last chunk is mostly padding."""
    counts = [10_000, *[10] * 8]
    groups = replay([[[3, -1, 1, 2, -1], [4, 5, -1, -1, 6]]], 9)
    computed, needed = steps_executed(counts, groups, 4)
    assert needed == 6
    assert computed <= 2 * 8


# Results.


def clients(num_clients=13, seed=0):
    """A regression with 1 to 30 examples per client."""
    rng = np.random.default_rng(seed)
    features = [rng.normal(size=(n, 3)) for n in rng.integers(1, 31, num_clients)]
    return least_squares(features, [x.sum(1) + 1 for x in features], ridge=0.1)


def remembering(algorithm):
    """Clients keep a running sum of what they sent."""

    def init(task, params):
        return algorithm.init(task, params)[0], (jnp.zeros_like(params), jnp.int32(0))

    def client(rng_key, t, task, number, params, server_state, client_state):
        sent, count = client_state
        contribution, _ = algorithm.client(rng_key, t, task, number, params, server_state, ())
        return contribution, (sent + contribution.update, count + 1)

    return algorithm._replace(init=init, client=client)


EPOCHS = {
    "epochs": fedavg(0.05, epochs=2, batch_size=4),
    "growing sample": fedavg(0.05, local_steps=3, batch_size=lambda t: 2 * t),
    "epochs, states": remembering(fedavg(0.05, epochs=1, batch_size=4)),
}
every_algorithm = pytest.mark.parametrize("algorithm", EPOCHS)


def check(actual, expected, tolerance=1e-12):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (1 + np.abs(b).max()))
        elif not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("algorithm", "strategy"),
    list(zip(EPOCHS, ["mfa_rand cohort", "mfa_rr", "sequential"], strict=True)),
)
def test_every_client_map_and_device_agrees(algorithm, strategy):
    assignment = STRATEGIES[strategy](13)

    def program(**options):
        def one(key, task):
            return simulate(key, task, EPOCHS[algorithm], assignment, 6, **options)

        return one

    key, task = jax.random.key(0), clients()
    expected = jax.jit(program(client_map="scan"))(key, task)
    for client_map in ("vmap", 3, "auto"):
        check(jax.jit(program(client_map=client_map))(key, task), expected)
    for count in (2, 3):
        where = layout(1, jax.devices()[:count], "clients")
        one = jax.vmap(program(client_map=3, client_axis="clients"), (0, None))
        actual = jax.jit(where.over(one, (0, None)))(key[None], task)
        check(jax.tree.map(lambda x: x[0], actual), expected)


@every_algorithm
def test_a_second_call_compiles_nothing(algorithm):
    task, assignment = clients(), mfa_rand(13, 3)
    program = jax.jit(lambda key, task: simulate(key, task, EPOCHS[algorithm], assignment, 3)[1])
    first = program(jax.random.key(0), task)
    other = dataclasses.replace(task, ridge=task.ridge * 2)
    second = program(jax.random.key(1), other)
    assert program._cache_size() == 1
    assert not np.array_equal(first.metrics["loss"][-1], second.metrics["loss"][-1])


def test_seeds_vmapped_equal_seeds_looped():
    task, assignment = clients(), mfa_rand(13, 3)

    def run(key):
        return simulate(key, task, EPOCHS["epochs"], assignment, 4)

    keys = jax.random.split(jax.random.key(0), 3)
    together = jax.jit(jax.vmap(run))(keys)
    for i in range(3):
        check(jax.tree.map(operator.itemgetter(i), together), jax.jit(run)(keys[i]), 1e-6)


def test_equal_lengths_are_computed_in_lockstep():
    """One whole number for all where every client has as many batches."""
    same = client_data([np.ones(n) for n in (11, 20, 15)])
    assert same.num_batches(jnp.int32(0), 10) == 2
    assert isinstance(same.num_batches(jnp.int32(0), 10), int)
    assert not isinstance(same.num_batches(jnp.int32(0), 9), int)
    assert [int(same.num_batches(jnp.int32(k), 9)) for k in range(3)] == [2, 3, 2]
    assert same.num_batches(jnp.int32(0), None) == 1


def test_epochs_need_a_task_that_has_them():
    with pytest.raises(ValueError, match="Towards has no num_batches; give local_steps"):
        simulate(
            jax.random.key(0),
            Towards(jnp.ones(3)),
            fedavg(0.1, epochs=1),
            full_participation(3),
            1,
        )
