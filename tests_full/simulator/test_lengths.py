"""Local trainings of different lengths: few wasted steps, and the same results."""

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_mm import fedavg, full_participation, local_sgd, mfa_rand, mfa_rr, sequential, simulate
from fedjax_mm.base import Assignment, ClientContext, Cohort, keys
from fedjax_mm.base.chunks import chunks_of
from fedjax_mm.data import client_data
from fedjax_mm.data.synthetic import sample_counts
from fedjax_mm.simulator.preflight import run_of
from fedjax_mm.sweeps import layout
from fedjax_mm.tasks import least_squares
from tests.helpers import Towards, replay, roll_out, slow_unless


@settings(deadline=None, max_examples=300)
@given(
    steps=st.lists(st.integers(1, 10_000), min_size=1, max_size=300),
    chunk_size=st.integers(1, 400),
)
def test_growing_chunks_compute_at_most_twice_the_steps(steps, chunk_size):
    """Each slot of a chunk, padding included, takes the steps of its first client."""
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
    assert count == -(-size // chunk_size)  # no more chunks than full ones
    assert count * chunk - size < count  # at most one slot per chunk is padding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counted:
    """A task that counts every loss that is computed, lane by lane."""

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

    def metrics(self, rng_key, params):
        return {}


executed = 0


def count_lanes(batch):
    global executed
    executed += np.size(batch)
    return np.zeros(np.shape(batch), np.float32)


def steps_executed(counts, assignment, client_map):
    """Counts the computed and the useful local steps of one round."""
    global executed
    task = Counted(jnp.asarray(counts, jnp.int32))
    algorithm = fedavg(local_sgd(1.0, epochs=1, batch_size=10))
    run = functools.partial(simulate, algorithm=algorithm, assignment=assignment)
    program = jax.jit(lambda key, task: run(key, task, num_rounds=1, client_map=client_map))
    executed = 0
    _, trace = jax.block_until_ready(program(jax.random.key(0), task))
    jax.effects_barrier()
    return executed, int(trace.gradients.sum())


@pytest.mark.parametrize(
    ("num_models", "client_map"),
    [
        *((1, "scan"), (1, 7), (4, "auto"), (4, "vmap")),
        *(slow_unless(False, *each) for each in ((1, "auto"), (4, "scan"), (4, 16))),
    ],
)
def test_at_most_twice_the_steps_are_executed(num_models, client_map):
    """Counts are from Synthetic(1, 1), whose largest client has a hundred times the median."""
    counts = sample_counts(50)
    counts[0] = counts.max()  # padding must not take the steps of client 0
    computed, needed = steps_executed(counts, mfa_rr(50, num_models), client_map)
    assert needed == (-(-counts // 10)).sum()
    assert needed <= computed <= 2 * needed
    if client_map == "scan":
        assert computed == needed


def test_padding_does_not_wait_for_the_longest():
    """Absent client 0 has a thousand steps, and the last chunk is mostly padding."""
    counts = [10_000, *[10] * 8]
    groups = replay([[[3, -1, -1, -1, -1, -1, -1], [4, 5, 6, -1, 7, 8, -1]]], 9)
    computed, needed = steps_executed(counts, groups, 4)
    assert needed == 6
    assert computed == 8  # four chunks of one, then two clients with two slots of padding


# Results.


def clients(num_clients=13, seed=0):
    """A regression with 1 to 30 examples per client."""
    rng = np.random.default_rng(seed)
    features = [rng.normal(size=(n, 3)) for n in rng.integers(1, 31, num_clients)]
    return least_squares(features, [x.sum(1) + 1 for x in features], ridge=0.1)


def remembering(algorithm):
    """Wraps an algorithm so that clients keep the sum and the number of their updates."""

    def init(task, params):
        return algorithm.init(task, params)[0], (jnp.zeros_like(params), jnp.int32(0))

    def client(local, server_state, client_state):
        sent, count = client_state
        contribution, _ = algorithm.client(local, server_state, ())
        return contribution, (sent + contribution.update, count + 1)

    return algorithm._replace(init=init, client=client)


N, M, ROUNDS = 13, 3, 4
EPOCHS = remembering(fedavg(local_sgd(0.05, epochs=2, batch_size=4)))
GROWING = fedavg(local_sgd(0.05, steps=3, batch_size=lambda t: 2 * t))
EACH = [EPOCHS, GROWING, EPOCHS]  # two stacks


class Seen(NamedTuple):
    """Observations of an assignment in all rounds."""

    clients: jax.Array  # [T, M, n]
    losses: jax.Array  # [T, M, n]
    sums: jax.Array  # [M]
    assigned: jax.Array  # rounds


def watching(groups, scale):
    """An assignment with given cohorts ``[T, M, n]`` and scales that records its observations."""
    groups, scale = jnp.asarray(groups), jnp.asarray(scale)

    def assign(rng_key, round, state, look):
        state = state._replace(assigned=state.assigned + 1)
        return Cohort.of_rows(groups[round - 1], scale[round - 1]), state

    def observe(round, cohort, reports, state):
        rows = [x.reshape(M, -1) for x in (cohort.clients, reports["loss"])]
        losses = rows[1]
        seen = [x.at[round - 1].set(row) for x, row in zip(state[:2], rows, strict=True)]
        return Seen(*seen, state.sums + losses.sum(1), state.assigned)

    shape = groups.shape
    nothing = Seen(jnp.zeros_like(groups), jnp.zeros(shape), jnp.zeros(M), jnp.int32(0))
    return Assignment(N, M, lambda rng_key, look: nothing, assign, observe)


@functools.cache
def cases():
    """Stacked keys, randomly padded cohorts and scales of two runs."""
    rng, rng_keys = np.random.default_rng(1), jax.random.split(jax.random.key(0), 2)
    assignments = mfa_rand(N, M, cohort_size=9), sequential(N, M, rounds_per_model=1)
    groups = [roll_out(*each, ROUNDS) for each in zip(assignments, rng_keys, strict=True)]
    groups = [
        rng.permuted(
            np.pad(each, ((0, 0), (0, 0), (0, N - each.shape[2])), constant_values=-1), axis=2
        )
        for each in groups
    ]
    scale = rng.uniform(0.5, 2.0, np.shape(groups))
    return rng_keys, np.stack(groups), np.where(np.stack(groups) >= 0, scale, np.nan)


def program(**options):
    """A run whose data are an argument."""

    def run(rng_key, groups, scale, task):
        return simulate(rng_key, task, EACH, watching(groups, scale), ROUNDS, **options)

    return run


def vmapped(**options):
    """Vmaps `program` over keys, cohorts and scales."""
    return jax.vmap(program(**options), (0, 0, 0, None))


def check(actual, expected, tolerance=1e-12):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (1 + np.abs(b).max()))
        elif not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def expected():
    """Results of both cases with one client at a time. Other data do not trace again."""
    chex.clear_trace_counter()
    with jax.enable_x64(True):
        one, task = jax.jit(chex.assert_max_traces(program(client_map="scan"), n=1)), clients()
        results = [one(*(x[i] for x in cases()), task) for i in range(2)]
        assert results[0][0].assignment.assigned == ROUNDS  # `observe` gets the state from `assign`
        other = one(*(x[0] for x in cases()), dataclasses.replace(task, ridge=2 * task.ridge))
        loss = results[0][1].metrics["loss"][-1]
        assert not np.array_equal(other[1].metrics["loss"][-1], loss)
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


@pytest.mark.usefixtures("x64")
@pytest.mark.slow
@pytest.mark.parametrize("client_map", ["vmap", 3])
def test_every_client_map_agrees(client_map, expected):
    """Vmapped runs agree with single runs, too. The devices below use the same chunks of three."""
    check(jax.jit(vmapped(client_map=client_map))(*cases(), clients()), expected)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num_devices", [2, slow_unless(False, 3)])
def test_devices_that_share_clients_agree(num_devices, expected):
    where = layout(1, jax.devices()[:num_devices], "clients")
    shared = where.over(vmapped(client_map=3, client_axis="clients"), (0, 0, 0, None))
    check(jax.jit(shared)(*cases(), clients()), expected)


def test_reports_come_in_the_order_of_the_cohort(expected):
    """Reports are aligned with their clients in any computing order, with zeros for padding."""
    rng_keys, groups, _ = cases()
    seen = jax.tree.map(np.asarray, expected[0].assignment)
    np.testing.assert_array_equal(seen.clients, groups)
    present = groups >= 0
    np.testing.assert_array_equal(seen.losses[~present], 0)
    np.testing.assert_allclose(seen.sums, seen.losses.sum((1, 3)), rtol=1e-12)
    assert np.isfinite(np.asarray(expected[0].models[0].params)).all(), "padding has no scale"
    # In round 1 all start at 0.
    with jax.enable_x64(True):
        for m, algorithm in enumerate(EACH):
            each = np.stack([first_losses(algorithm, key, m) for key in rng_keys])
            for r, i in np.argwhere(present[:, 0, m]):
                loss = each[r, groups[r, 0, m, i]]
                assert seen.losses[r, 0, m, i] == pytest.approx(loss, rel=1e-12)
            assert len(np.unique(each)) > N


@functools.cache
def reporter(algorithm):
    """Computes the losses that clients report in round 1, from zeros."""

    def report(model_key, client, task):
        params = jnp.zeros(3)
        local = ClientContext(keys.client_key(model_key, client), 1, task, client, params)
        states = algorithm.init(task, params)
        return algorithm.client(local, *states)[0].report["loss"]

    return jax.jit(jax.vmap(report, (None, 0, None)))


def first_losses(algorithm, rng_key, model):
    (model_key,) = keys.model_keys(keys.round_key(rng_key, 1), [model])
    return np.asarray(reporter(algorithm)(model_key, jnp.arange(N), clients()))


def test_equal_lengths_are_computed_in_lockstep():
    """If all clients have equally many batches, their number is an int while tracing."""
    same = client_data([np.ones(n) for n in (11, 20, 15)])
    assert same.num_batches(jnp.int32(0), 10) == 2
    assert isinstance(same.num_batches(jnp.int32(0), 10), int)
    assert not isinstance(same.num_batches(jnp.int32(0), 9), int)
    assert [int(same.num_batches(jnp.int32(k), 9)) for k in range(3)] == [2, 3, 2]
    assert same.num_batches(jnp.int32(0), None) == 1
    features = [np.ones((n, 1)) for n in (11, 20, 15)]
    task = least_squares(features, [x[:, 0] for x in features], ridge=0.1)
    for size, is_equal in ((10, True), (9, False)):
        algorithm = fedavg(local_sgd(0.1, epochs=1, batch_size=size))
        (stack,) = run_of(task, algorithm, full_participation(3)).stacks
        assert stack.has_equal_steps(()) == is_equal
    (stack,) = run_of(task, fedavg(0.1, local_steps=2), full_participation(3)).stacks
    assert stack.has_equal_steps(())


def test_epochs_need_an_epoch_task():
    task, algorithm = Towards(jnp.ones(3)), fedavg(local_sgd(0.1, epochs=1))
    with pytest.raises(ValueError, match="Towards is not a task with num_batches"):
        simulate(jax.random.key(0), task, algorithm, full_participation(3), 1)
