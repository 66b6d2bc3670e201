"""Drifting data: agreement with NumPy, constant parts, wrappers, and traced settings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import advance, attacked, fedavg, init, join_traces, local_sgd, simulate, sweep
from fedjax_mm.base.capabilities import RoundTask
from fedjax_mm.data import federate, stack_data
from fedjax_mm.sweeps import Grid, Setup
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks import (
    LogisticRegression,
    classification,
    client_losses,
    drifting,
    own_models,
    requiring,
    with_metrics,
)
from fedjax_mm.tasks.drift import Times
from tests.helpers import replay, slow_unless
from tests.oracles import drifting as oracle

RNG = np.random.default_rng(1)
CLASSES, ROUNDS, RATE, STEPS = 3, 9, 0.3, 2
SIZES = (7, 4, 9)
X, Y = RNG.normal(size=(20, 2)).astype(np.float32), RNG.integers(CLASSES, size=20)
X_TEST, Y_TEST = RNG.normal(size=(12, 2)).astype(np.float32), RNG.integers(CLASSES, size=12)
ROWS = np.split(RNG.permutation(20), np.cumsum(SIZES)[:-1])
ROWS_TEST = np.split(np.arange(12), 3)
CONCEPT = [1, 2, 0]
COHORTS = [RNG.permutation(3)[:2] for _ in range(ROUNDS)]
OTHERS = [RNG.permutation(3)[:2] for _ in range(ROUNDS)]


def plain():
    """Logistic regression of three clients with separate test data."""
    data = federate(((X, Y), (X_TEST, Y_TEST)), ROWS, ROWS_TEST)
    return classification(data, LogisticRegression(CLASSES))


DRIFTS = {
    "sudden": {"concept": CONCEPT, "start": 4},
    "gradual": {"concept": [0, 0, 1], "start": 3, "length": 4},
    "recurring": {"concept": CONCEPT, "start": 2, "length": 2, "period": 6},
    "window": {"window": 0.5, "start": 2, "length": 5},
    "window that returns": {"window": 0.3, "start": 1, "period": 4},
    "both": {"concept": CONCEPT, "window": 0.7, "start": 3, "length": 4},
}


@pytest.mark.parametrize(
    "numbers", [(4, 1, None), (3, 5, None), (2, 1, 4), (5, 2, 4), (1, 3, 7), (0, 2.5, 6)]
)
def test_the_share_equals_that_of_the_oracle(numbers):
    share = Times(*numbers).share
    want = [oracle.share(t, *numbers) for t in range(25)]
    np.testing.assert_allclose([share(t) for t in range(25)], want, atol=1e-6)
    assert max(want) == 1
    assert min(want[1:]) == 0 or numbers[0] < 2


class Examples:
    """The oracle's examples of a round and client."""

    num_clients = 3

    def __init__(self, task, drift, x=X, y=Y, rows=ROWS, split=0):
        self.x, self.y, self.rows, self.drift = x, y, rows, drift
        draws = task.origins[split].draws
        ends = np.cumsum([0, *map(len, rows)])
        self.draws = [draws if draws is None else draws[slice(*ends[k : k + 2])] for k in range(3)]

    def __call__(self, t, k):
        times = [self.drift.get(name, other) for name, other in Times(1, 1, None)._asdict().items()]
        how = self.drift.get("concept"), self.drift.get("window"), oracle.share(t, *times)
        mine = oracle.own(self.y[self.rows[k]], self.draws[k], *how)
        return [(self.x[self.rows[k][i]].astype(float), label) for i, label in mine]


@pytest.mark.parametrize(
    "name", [slow_unless(name in ("gradual", "recurring", "both"), name) for name in DRIFTS]
)
def test_fedavg_on_drifting_data_agrees_with_the_oracle(name, x64):
    """Two models have different cohorts, and their drifts start in different rounds."""
    drifts = [DRIFTS[name], DRIFTS[name] | {"start": 1 + DRIFTS[name]["start"]}]
    base = plain()
    tasks = [drifting(base, **drift, seed=5) for drift in drifts]
    groups = np.stack([COHORTS, OTHERS], axis=1)
    run = fedavg(local_sgd(RATE, steps=STEPS)), replay(groups, 3), ROUNDS
    trace = jax.jit(lambda tasks: simulate(0, tasks, *run, params=start(base))[1])(tasks)
    for m, (task, drift) in enumerate(zip(tasks, drifts, strict=True)):
        w = start(base)["classes"]
        w = np.asarray(w["kernel"]), np.asarray(w["bias"])
        w, losses = oracle.fedavg(w, Examples(task, drift), groups[:, m], RATE, STEPS)
        np.testing.assert_allclose(trace.metrics["loss"][:, m], losses, rtol=1e-10)
        tests = Examples(task, drift, X_TEST, Y_TEST, ROWS_TEST, split=1)
        everything = [each for k in range(3) for each in tests(ROUNDS, k)]
        last = oracle.loss_and_gradient(w, everything)[0]
        np.testing.assert_allclose(trace.metrics["test_loss"][-1, m], last, rtol=1e-10)


def start(task):
    return task.init(jax.random.key(3))


def labels(task, t):
    """The training labels of a round, without unused slots."""
    data = task.at(t).train.gathered()
    return np.asarray(data.examples[1])[: int(np.sum(data.counts))]


def test_data_are_unchanged_before_the_drift():
    task = drifting(plain(), CONCEPT, start=4)
    want = np.asarray(plain().train.examples[1])
    for t in (0, 3):
        np.testing.assert_array_equal(labels(task, t), want)
    np.testing.assert_array_equal(labels(task, 4), np.array(CONCEPT)[want])
    assert isinstance(task, RoundTask)


def test_examples_change_at_random_and_permanently():
    """The fraction of changed labels is s(t), within 4 standard errors."""
    x, y = np.zeros((20_000, 1)), np.arange(20_000) % 2
    data = federate((x, y), np.split(np.arange(20_000), 4))
    base = classification(data, LogisticRegression(2))
    task, other = (drifting(base, [1, 0], length=10, seed=seed) for seed in (0, 1))
    first, before = np.asarray(base.train.examples[1]), np.zeros(16_000, bool)
    for t in (1, 3, 7, 10):
        changed = labels(task, t) != first
        share = t / 10
        assert abs(changed.mean() - share) <= 4 * np.sqrt(share * (1 - share) / 16_000)
        assert (changed >= before).all()
        before = changed
    assert (labels(task, 5) != labels(other, 5)).any()


def test_a_window_moves_from_the_smallest_labels_to_the_largest():
    task = drifting(plain(), window=0.5, length=4)
    for k, rows in enumerate(ROWS):
        size = max(1, round(len(rows) / 2))
        means = []
        for t in (0, 2, 4):
            data = task.at(t).train
            begin = int(data.offsets[k])
            mine = data.take(begin + jnp.arange(size))[1]
            assert data.counts[k] == task.weight(jnp.int32(k)) == size
            means.append(float(mine.mean()))
        assert means == sorted(means)
        assert means[0] == np.sort(Y[rows])[:size].mean()
        assert means[-1] == np.sort(Y[rows])[-size:].mean()


def test_a_shared_test_set_does_not_drift():
    data = federate(((X, Y), (X_TEST, Y_TEST)), ROWS)
    task = drifting(classification(data, LogisticRegression(CLASSES)), window=0.5)
    assert task.at(5).test.num_examples == 12
    assert task.at(5).test.order is None


def test_selected_draws_of_data_drift():
    """The stores of a stack have an order and unused slots."""
    draws = [federate(((X, Y), (X_TEST, Y_TEST)), rows, ROWS_TEST) for rows in (ROWS, ROWS[::-1])]
    both = stack_data(draws)
    for i, data in enumerate(draws):
        alone, chosen = (
            drifting(classification(each, LogisticRegression(CLASSES)), window=0.4, length=3)
            for each in (data, both.select(i))
        )
        for t in (0, 2, 3):
            np.testing.assert_array_equal(labels(alone, t), labels(chosen, t))


ALGORITHM, EVERYBODY = fedavg(local_sgd(RATE, steps=STEPS)), replay(np.stack([[COHORTS[0]]] * 9), 3)


@functools.cache
def one_run():
    task = drifting(plain(), CONCEPT, start=3, length=3)
    return task, jax.jit(lambda task: simulate(0, task, ALGORITHM, EVERYBODY, 6)[1])(task)


def test_wrappers_pass_on_the_round():
    """Thresholds, attackers and metrics around a drifting task use the data of the round."""
    task, want = one_run()
    wrapped = attacked(requiring(task, own_models(0, task, learning_rate=0.1)), jnp.arange(3) < 0)

    def more(task, params):
        return {"client_loss": client_losses(task, params)}

    wrapped = with_metrics(wrapped, more, per_client=["client_loss"])
    run = jax.jit(lambda task: simulate(0, task, ALGORITHM, EVERYBODY, 6)[1])
    got = run(wrapped)
    losses = np.asarray(got.metrics["client_loss"][:, 0]) @ np.array(SIZES) / 20
    np.testing.assert_allclose(losses, want.metrics["loss"][:, 0], rtol=1e-5)
    assert {"appeal", "train_appeal"} <= set(got.metrics)


def test_a_run_in_parts_equals_the_whole_run():
    task, want = one_run()
    run = task, ALGORITHM, EVERYBODY

    @jax.jit
    def in_parts(task):
        state, first = advance(init(0, task, *run[1:]), task, *run[1:], 2)
        return first, advance(state, task, *run[1:], 4)[1]

    got = join_traces(*in_parts(task))
    np.testing.assert_array_equal(got.metrics["loss"], want.metrics["loss"])


def build(begin, length):
    task = plain()
    drift = drifting(task, jnp.array(CONCEPT), window=0.8, start=begin, length=length)
    return Setup(drift, ALGORITHM, EVERYBODY, start(task))


def test_numbers_of_a_drift_share_a_program():
    axes = {"begin": [3.0, 5.0], "length": [1.0, 3.0]}
    grid = Grid(build, axes, num_rounds=6, num_seeds=1)
    assert len(programs_of(grid)) == 1
    result = sweep(grid).loss.isel(seed=0, model=0)
    params = start(plain())
    run = jax.jit(lambda task: simulate(0, task, ALGORITHM, EVERYBODY, 6, params=params)[1])
    for begin, length in ((3, 3), (5, 1)):
        want = run(build(begin, length).tasks)
        got = result.sel(begin=begin, length=length)
        np.testing.assert_allclose(got, want.metrics["loss"][:, 0], rtol=1e-5)


def test_an_assignment_sees_losses_on_the_data_of_its_round():
    """The assignment of round 3 sees losses on the data of round 3, with the models of round 2."""
    task = drifting(plain(), CONCEPT, start=3)
    seen = []

    def assign(rng_key, t, state, look):
        jax.debug.callback(lambda t, losses: seen.append((int(t), losses)), t, look.losses())
        return EVERYBODY.assign(rng_key, t, state, look)

    looking = EVERYBODY._replace(assign=assign)
    params = start(task)
    slow = fedavg(local_sgd(1e-30, steps=1))
    jax.jit(lambda task: simulate(0, task, slow, looking, 3, params=params))(task)
    jax.effects_barrier()
    for t, losses in seen:
        want = client_losses(task.at(t), params)
        np.testing.assert_allclose(losses[0], want, rtol=1e-5)
    assert {t for t, _ in seen} >= {2, 3}
