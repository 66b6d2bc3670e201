"""Own models, thresholds, appeal, unseen clients, fine-tuning, opt-in, and prepared sweeps."""

import dataclasses
import functools
import itertools
import os
import signal
import sys
from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mm import (
    appealing,
    attacked,
    fedavg,
    full_participation,
    local_sgd,
    maxfl,
    mfa_rand,
    mfa_rr,
    mwfed,
    noisy,
    qffl,
    simulate,
    sweep,
)
from fedjax_mm.base import Batching, ClientContext, Cohort, DemandingTask, Look, keys
from fedjax_mm.data import client_data
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.local import train_locally
from fedjax_mm.sweeps import (
    Checkpoints,
    Execution,
    Grid,
    InterruptedRunError,
    Setup,
    layout,
    progress,
)
from fedjax_mm.tasks import (
    LogisticRegression,
    OwnModels,
    Tuning,
    classification,
    own_models,
    quadratic,
    requiring,
)
from fedjax_mm.tasks.supervised import Supervised
from fedjax_mm.tasks.view import client_losses, thresholds
from tests.helpers import (
    NOTHING_TO_SEE,
    Measured,
    Towards,
    counting,
    labelled_data,
    rows_of,
    slow_unless,
)

N, SEEN = 7, 5
RATE, STEPS = 0.3, 6
KEY = jax.random.key(4)


class Linear(nn.Module):
    """A classifier that starts with equal probabilities of two classes."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, kernel_init=nn.initializers.zeros)(x)


@functools.cache
def learners(double=True):
    """Logistic regression on clients with 1 to 9 training and 1 to 4 test examples."""
    with jax.enable_x64(double):
        return classification(labelled_data(N), LogisticRegression(3))


@jax.jit
def descend(task, params, client):
    """w_hat_k by plain full-gradient steps."""
    for _ in range(STEPS):
        step = jax.grad(task.client_loss)(params, client)
        params = jax.tree.map(lambda w, g: w - RATE * g, params, step)
    return params


@partial(jax.jit, static_argnums=4)
def train(rng_key, task, params, client, num_steps):
    """The client's parameters after local steps on batches of two."""
    local = ClientContext(rng_key, 0, task, client, params)
    return train_locally(local, optax.sgd(RATE), num_steps, Batching(2))[0]


@jax.jit
def of_client(task, params, client):
    """A client's training loss and test metrics."""
    return task.client_loss(params, client), task.client_metrics(params, client, task.test)


def own_by_hand(rng_key, task, params, batch_size=None, model=0):
    options = {"learning_rate": RATE, "num_steps": STEPS, "batch_size": batch_size}
    return own_models(rng_key, task, params, model=model, **options)


full_own_models = jax.jit(own_by_hand)
own_models_of_batches = jax.jit(partial(own_by_hand, batch_size=2))


# Own models.


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", [3, slow_unless(False, 4)])
def test_thresholds_are_losses_of_own_models(seed):
    """rho_k = F_k(w_hat_k) for every client, and the accuracy on its test examples."""
    task = learners()
    start = task.init(jax.random.key(seed))
    own = full_own_models(KEY, task, start)
    for k in range(N):
        loss, test = of_client(task, descend(task, start, jnp.int32(k)), jnp.int32(k))
        assert own.threshold[k] == pytest.approx(float(loss), rel=1e-5)
        assert own.accuracy[k] == pytest.approx(float(test["accuracy"]))
    assert len(np.unique(own.threshold)) == N


@pytest.mark.usefixtures("x64")
def test_own_models_use_separate_keys():
    """The key depends on the model and the client, and belongs to no round."""
    task, key = learners(), KEY
    for number in (0, 1 + 1, 1):  # round 0, model 1, its preparation
        key = jax.random.fold_in(key, number)
    start = task.init(jax.random.key(9))
    own = own_models_of_batches(KEY, task, start, model=1)
    for k in (0, 3, 6):
        trained = train(jax.random.fold_in(key, k), task, start, jnp.int32(k), STEPS)
        expected = of_client(task, trained, jnp.int32(k))[0]
        assert own.threshold[k] == pytest.approx(float(expected), rel=1e-5)


def test_own_models_of_tasks_without_test_examples():
    """They have no accuracy. Large models are trained a few at a time, with equal results."""
    targets = jnp.arange(1.0, 7.0)
    for dim in (3, 4096):  # two of the latter fit at once
        task = Measured(targets, dim)
        start = {"w": jnp.zeros(dim)}
        own = jax.jit(partial(own_models, learning_rate=0.5, num_steps=2))(KEY, task, start)
        assert own.accuracy is None
        np.testing.assert_allclose(own.threshold, dim / 2 * (targets / 4) ** 2, rtol=1e-5)


# Metrics, of one model with all options, and with some of them.


@functools.cache
def measured():
    """Parameters, own models, and metrics with own models and with thresholds alone."""
    with jax.enable_x64(True):
        task = learners()
        params, own = task.init(jax.random.key(8)), full_own_models(KEY, task, start_of(task))

        def metrics(task, params, own):
            return requiring(task, own, num_unseen=N - SEEN).metrics(KEY, params)

        program = jax.jit(metrics)
        return params, own, program(task, params, own), program(task, params, own.threshold)


def start_of(task):
    return task.init(jax.random.key(3))


def test_metrics_are_means_over_clients():
    """Unseen clients have separate means. Clients prefer their own model if it is better."""
    params, own, values, _ = measured()
    task = learners()
    with jax.enable_x64(True):
        each = [of_client(task, params, jnp.int32(k)) for k in range(N)]
    train_loss = np.array([float(loss) for loss, _ in each])
    loss, accuracy = (np.array([float(m[name]) for _, m in each]) for name in ("loss", "accuracy"))
    rho = np.asarray(own.threshold)
    expected = {
        "loss": loss,
        "accuracy": accuracy,
        "train_loss": train_loss,
        "appeal": loss < rho,
        "train_appeal": train_loss < rho,
        "preferred_accuracy": np.where(loss < rho, accuracy, np.asarray(own.accuracy)),
    }
    assert set(values) == {prefix + name for prefix in ("", "unseen_") for name in expected}
    for prefix, clients in (("", slice(SEEN)), ("unseen_", slice(SEEN, N))):
        for name, of_each in expected.items():
            assert values[prefix + name] == pytest.approx(of_each[clients].mean(), rel=1e-6)
    assert len({float(x) for x in values.values()}) > 6


def test_clients_may_opt_in_by_their_test_loss():
    """Clients that may train participate if f_k(w) < rho_k, which needs test examples."""
    params, *_ = measured()
    task = learners()
    with jax.enable_x64(True):
        each = [of_client(task, params, jnp.int32(k)) for k in range(N)]
        test = np.array([float(values["loss"]) for _, values in each])
        train = np.array([float(loss) for loss, _ in each])
        rho = (test + train) / 2
        for participation, losses in (("test", test), ("training", train)):
            for unseen in (0, N - SEEN):
                view = requiring(task, rho, num_unseen=unseen, participation=participation)
                np.testing.assert_array_equal(view.appeals(params), (losses < rho)[: N - unseen])
    assert (test < train).any()
    assert (test > train).any()
    with pytest.raises(ValueError, match="has no test examples"):
        requiring(Measured(jnp.ones(2)), jnp.ones(2), participation="test")
    with pytest.raises(ValueError, match="participation is 'all'"):
        requiring(task, rho, participation="all")


def test_thresholds_without_own_models_give_no_preferred_accuracy():
    """All other metrics are equal."""
    _, _, values, without = measured()
    assert set(values) - set(without) == {"preferred_accuracy", "unseen_preferred_accuracy"}
    for name, value in without.items():
        np.testing.assert_array_equal(value, values[name])


@pytest.mark.usefixtures("x64")
def test_metrics_are_measured_after_fine_tuning():
    task = learners()
    params, own = start_of(task), full_own_models(KEY, task, task.init(jax.random.key(8)))

    @jax.jit
    def metrics(task, rate):
        return requiring(task, own, tuning=Tuning(rate, STEPS)).metrics(KEY, params)

    values = metrics(task, RATE)
    each = [of_client(task, descend(task, params, jnp.int32(k)), jnp.int32(k)) for k in range(N)]
    losses = np.array([float(loss) for loss, _ in each])
    assert values["train_loss"] == pytest.approx(losses.mean(), rel=1e-5)
    accuracy = np.mean([float(test["accuracy"]) for _, test in each])
    assert values["accuracy"] == pytest.approx(accuracy)
    satisfied = losses < np.asarray(own.threshold)
    assert values["train_appeal"] == pytest.approx(satisfied.mean())
    assert 0 < satisfied.mean() < 1
    before = np.mean([float(of_client(task, params, jnp.int32(k))[0]) for k in range(N)])
    assert values["train_loss"] < before


@functools.cache
def tuned_run():
    """A run of two models with metrics after fine-tuning."""
    task = learners(double=False)
    wrapped = requiring(task, jnp.ones(N), num_unseen=N - SEEN, tuning=Tuning(RATE, STEPS, 2))

    def run(rng_key):
        algorithm = fedavg(local_sgd(0.1, epochs=2, batch_size=2))
        assignment = mfa_rand(SEEN, 2, cohort_size=4)
        return simulate(rng_key, wrapped, algorithm, assignment, 2, record_every=2)

    return jax.jit(run)(KEY)


def test_fine_tuning_uses_separate_keys():
    """Keys are derived from seed, round, model and client."""
    task, (state, trace) = learners(double=False), tuned_run()
    models = jax.device_get(state.models[0].params)
    for m in range(2):
        params, losses = jax.tree.map(lambda x, m=m: x[m], models), []
        for k in range(N):
            key = KEY
            for number in (2, 2**31 - 1, 1 + m, k):
                key = jax.random.fold_in(key, number)
            tuned = train(key, task, params, jnp.int32(k), STEPS)
            losses.append(float(of_client(task, tuned, jnp.int32(k))[0]))
        seen, unseen = np.mean(losses[:SEEN]), np.mean(losses[SEEN:])
        assert trace.metrics["train_loss"][-1, m] == pytest.approx(seen, rel=1e-5)
        assert trace.metrics["unseen_train_loss"][-1, m] == pytest.approx(unseen, rel=1e-5)


def test_a_wrapped_task_is_trained_like_the_task_itself():
    """All clients may train here, so fine-tuning and thresholds do not change training."""
    data = labelled_data(N)
    first = dataclasses.replace(
        data.train, offsets=data.train.offsets[:SEEN], counts=data.train.counts[:SEEN]
    )
    data = dataclasses.replace(data, train=first)
    # The test data include clients that never train, which the check would refuse.
    alone = classification(data, LogisticRegression(3), check=False)

    @jax.jit
    def run(rng_key):
        algorithm = fedavg(local_sgd(0.1, epochs=2, batch_size=2))
        assignment = mfa_rand(SEEN, 2, cohort_size=4)
        return simulate(rng_key, alone, algorithm, assignment, 2, record_every=2)

    (expected, counts), (state, trace) = run(KEY), tuned_run()
    for a, b in zip(*(jax.tree.leaves(x.models) for x in (state, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(trace.gradients, counts.gradients)
    assert trace.metrics["appeal"].shape == (2, 2)


def test_a_loss_equal_to_the_threshold_does_not_appeal():
    """This holds for training and test losses, and MW-Fed's weights grow."""
    rng = np.random.default_rng(0)
    clients = client_data([(rng.normal(size=(2, 3)), np.arange(2)) for _ in range(4)])
    task = classification(FederatedData("four", "synthetic", 2, clients, clients), Linear())
    params = task.init(KEY)

    @jax.jit
    def ask(rho):
        demanding = requiring(task, rho)
        weights, _ = mwfed(local_sgd(0.1, steps=1)).init(demanding, params)
        return demanding.metrics(KEY, params), demanding.appeals(params), weights

    first = jnp.arange(4) < 1
    loss = ask(jnp.zeros(4))[0]["loss"]
    metrics, appeals, weights = ask(jnp.where(first, jnp.float32(1.001) * loss, loss))
    assert metrics["appeal"] == metrics["train_appeal"] == 0.25
    np.testing.assert_array_equal(appeals, first)
    np.testing.assert_allclose(np.exp(weights), np.where(first, 1, 4) / 13, rtol=1e-6)


def test_tasks_without_test_examples_keep_their_metrics():
    """Their metrics are those of the global model even with fine-tuning."""
    task = quadratic(N, 2, mu=0.1)
    params = jnp.linspace(0.0, 1.0, task.dim)

    @partial(jax.jit, static_argnums=0)
    def metrics(is_tuned):
        tuning = Tuning(0.1, 1) if is_tuned else None
        return requiring(task, jnp.zeros(N), tuning=tuning).metrics(KEY, params)

    own = task.metrics(KEY, params)
    for is_tuned in (False, True):
        values = metrics(is_tuned)
        assert set(values) == {*own, "train_loss", "train_appeal"}
        for name, value in own.items():
            np.testing.assert_allclose(values[name], value, rtol=1e-6)
        is_lower = float(values["train_loss"]) < 0.999 * float(own["loss"])
        assert is_lower == is_tuned
        assert is_tuned or values["train_loss"] == pytest.approx(float(own["loss"]), rel=1e-5)


def test_unseen_clients_never_train():
    """Their NaN data have no effect, and "1/N" counts only clients that may train."""
    targets = jnp.arange(1.0, N + 1).at[SEEN:].set(jnp.nan)
    task = requiring(Measured(targets), jnp.arange(1.0, N + 1), num_unseen=N - SEEN)
    assert task.num_clients == SEEN

    @jax.jit
    def run(rng_key):
        averaged = fedavg(0.5, local_steps=1, server_scale="1/N")
        return simulate(rng_key, task, [counting(), averaged], mfa_rand(SEEN, 2), 6)

    state, trace = run(KEY)
    counted = state.models[0].clients
    assert counted.count.shape == (1, SEEN)
    assert trace.client_updates[1:].sum(1).tolist() == [SEEN] * 6
    start = {"w": jnp.zeros(3)}
    averaged = fedavg(0.5, local_steps=1, server_scale="1/N")

    @jax.jit
    def once(rng_key):
        everybody = full_participation(SEEN)
        return (
            simulate(rng_key, task, averaged, everybody, 1, params=start)[0].models[0].params["w"]
        )

    np.testing.assert_allclose(once(KEY), np.mean(targets[:SEEN]) / 2)


def test_the_last_thresholds_are_those_of_unseen_clients():
    """Algorithms see appeal, losses and thresholds only of clients that may train."""
    rho = np.array([0.1, 40.0, 0.1, 40.0, 40.0, 1e9, 0.0])
    task = requiring(Measured(jnp.arange(1.0, N + 1)), rho, num_unseen=N - SEEN)
    assert isinstance(task, DemandingTask)
    params = {"w": jnp.zeros(3)}
    # F_k(0) = 3/2 (k + 1)^2 is below 40 for clients 1, 3 and 4.
    np.testing.assert_array_equal(task.appeals(params), [False, True, False, True, True])
    np.testing.assert_allclose(thresholds(task), rho[:SEEN])
    np.testing.assert_allclose(client_losses(task, params), 1.5 * np.arange(1.0, 1 + SEEN) ** 2)
    values = task.metrics(KEY, params)
    assert values["train_appeal"] == pytest.approx(3 / 5)
    assert values["unseen_train_appeal"] == pytest.approx(1 / 2)
    assert values["train_loss"] == pytest.approx(1.5 * 11)
    assert values["unseen_train_loss"] == pytest.approx(1.5 * (36 + 49) / 2)


# Opt-in participation, by one program with thresholds and starts as arguments.

ROUNDS = 6


@functools.cache
def six(from_round, cohort_size, method=None):
    """A run of six clients that opt in to models from `from_round` on."""
    algorithm = counting() if method is None else method(local_sgd(0.9, steps=1))
    assignment = appealing(full_participation(6), cohort_size=cohort_size, from_round=from_round)

    def run(targets, rho, start):
        task, params = requiring(Measured(targets), rho), {"w": jnp.full(3, start)}
        return simulate(KEY, task, algorithm, assignment, ROUNDS, params=params)

    program = jax.jit(run)
    return lambda targets, rho, start=0.0: program(
        *(jnp.asarray(x, jnp.float32) for x in (targets, rho, start))
    )


SIX = np.arange(1.0, 7.0)


def test_only_clients_to_whom_the_model_appeals_train():
    """Opt-in begins in round 3, and then in round 1."""
    rho = np.array([0.1, 40.0, 0.1, 40.0, 40.0, 0.1])
    _, trace = six(3, 6)(SIX, rho)
    # F_k(0) = 3/2 (k + 1)^2 is below 40 for clients 1, 3 and 4; at 8, F_k is so only for 3 and 4.
    assert trace.client_updates[1:3, 0].tolist() == [6, 6]
    assert trace.client_updates[3:, 0].tolist() == [0] * (ROUNDS - 2)
    at_once, trace = six(1, 6)(SIX, rho)
    assert trace.client_updates[1:, 0].tolist() == [3, 2] + [0] * (ROUNDS - 2)
    np.testing.assert_array_equal(at_once.models[0].clients.count[0], [0, 1, 0, 2, 2, 0])


@pytest.mark.parametrize("method", [fedavg, mwfed])
def test_participants_follow_the_model(method):
    """One client moves the model close enough to the others for them to opt in."""
    targets, rho = np.array([2.0] + 5 * [4.0]), np.array([1e3] + 5 * [10.0])
    _, trace = six(1, 6, method)(targets, rho)
    # F_2(0) = 24, and F_2(1.8) = 7.26 after one step.
    assert trace.client_updates[1:, 0].tolist() == [1] + [6] * (ROUNDS - 1)


def test_a_round_without_participants_keeps_the_model():
    program = six(3, 3, fedavg)
    _, trace = program(SIX, np.full(6, -1.0))
    assert trace.client_updates[1:, 0].tolist() == [3, 3, 0, 0, 0, 0]
    assert trace.idle_rounds[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 1]
    norms = np.asarray(trace.metrics["train_loss"][:, 0])
    assert len(np.unique(norms[:3])) == 3
    np.testing.assert_array_equal(norms[3:], norms[2])


@pytest.mark.parametrize("record_every", [1, slow_unless(False, 2), 4])
def test_idle_rounds_are_counted(record_every):
    """Two clients visit two models in turn, and from round 3 on only one of them opts in."""
    task = requiring(Measured(jnp.array([2.0, 4.0])), jnp.array([-1.0, 1e3]))
    assignment = appealing(mfa_rr(2, 2), cohort_size=1, from_round=3)

    @jax.jit
    def run(rng_key):
        return simulate(rng_key, task, counting(), assignment, 8, record_every=record_every)[1]

    trace = run(KEY)
    done = np.asarray(trace.round)
    np.testing.assert_array_equal(trace.idle_rounds[0], 0)
    idle = np.cumsum(trace.idle_rounds, axis=0)
    np.testing.assert_array_equal(idle.sum(1), np.maximum(done - 2, 0))
    ends = done % 2 == 0  # of frames
    np.testing.assert_array_equal(idle[ends, 0], idle[ends, 1])
    trained = np.cumsum(trace.client_updates, axis=0)
    np.testing.assert_array_equal(trained, done[:, None] - idle)


def test_models_may_idle_separately():
    """Each model has its own thresholds."""
    rho = [jnp.full(6, value) for value in (-1.0, 1e9, -1.0)]
    tasks = [requiring(Measured(jnp.asarray(SIX)), each) for each in rho]
    assignment = appealing(mfa_rr(6, 3), cohort_size=2, from_round=5)

    @jax.jit
    def run(rng_key):
        return simulate(rng_key, tasks, counting(), assignment, 9, record_every=3)[1]

    assert run(KEY).idle_rounds.tolist() == [[0, 0, 0], [0, 0, 0], [2, 0, 2], [3, 0, 3]]


# Computed losses.

looks = 0


def look_at(how_many, _):
    global looks
    looks += how_many


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched(Measured):
    """A task that counts computed client losses."""

    def client_loss(self, params, client):
        jax.debug.callback(partial(look_at, 1), client)
        return super().client_loss(params, client)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WatchedExamples(Supervised):
    """Counts the client losses of a task that may compute all of them in one pass."""

    def client_loss(self, params, client):
        jax.debug.callback(partial(look_at, 1), client)
        return super().client_loss(params, client)

    def evaluate(self, params, data, *, per_client=False, num_clients=None):
        if data is self.train:
            jax.debug.callback(partial(look_at, num_clients or self.num_clients), data.counts[0])
        return super().evaluate(params, data, per_client=per_client, num_clients=num_clients)


def looks_per_round(task, algorithm, assignment):
    """Client losses computed per round over three rounds, without those of two records."""
    global looks

    def run(rng_key, task):
        return simulate(rng_key, task, algorithm, assignment, 3, record_every=3)

    program = jax.jit(run)
    looks = 0
    jax.block_until_ready(program(jax.random.key(0), task))
    jax.effects_barrier()
    return (looks - 2 * N) / 3


EVERYBODY = full_participation(N)
TWO = appealing(EVERYBODY, cohort_size=2, from_round=1)


ASKED = {  # losses for the method, and for the method and opt-in participation
    "fedavg": (fedavg(0.1, local_steps=1), 0, N),
    "mwfed": (mwfed(local_sgd(0.1, steps=1)), N + N / 3, 2 * N + N / 3),
    "maxfl": (maxfl(local_sgd(0.1, steps=1)), N, N + 2),
    "qffl": (qffl(local_sgd(0.1, steps=1), q=1.0), N, N + 2),
}


@pytest.mark.parametrize(
    "method", [slow_unless(name in ("fedavg", "mwfed"), name) for name in ASKED]
)
def test_methods_compute_only_the_losses_that_they_need(method):
    """MW-Fed also computes losses once before the first round."""
    task = requiring(Watched(jnp.arange(float(N))), jnp.full(N, 1e3))
    algorithm, look_alone, _ = ASKED[method]
    assert looks_per_round(task, algorithm, EVERYBODY) == pytest.approx(look_alone)


@pytest.mark.parametrize("method", [slow_unless(name == "qffl", name) for name in ASKED])
def test_assignments_compute_only_the_losses_that_they_need(method):
    """They need the losses of all clients, those of attackers only once."""
    task = requiring(Watched(jnp.arange(float(N))), jnp.full(N, 1e3))
    algorithm, _, look_appealing = ASKED[method]
    task, algorithm = attacked(task, jnp.arange(N) < 1), noisy(algorithm, jnp.arange(N) < 1)
    assert looks_per_round(task, algorithm, TWO) == pytest.approx(look_appealing)


def test_losses_of_unseen_clients_are_not_computed():
    task = learners(double=False)
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    task = requiring(WatchedExamples(**fields), jnp.full(N, 1e3), num_unseen=N - SEEN)
    assignment = appealing(full_participation(SEEN), cohort_size=2, from_round=1)
    looked = looks_per_round(task, mwfed(local_sgd(0.1, steps=1)), assignment)
    assert looked == pytest.approx(2 * SEEN + SEEN / 3)


def test_assignments_see_the_models_before_training_and_in_order():
    """The models are in the caller's order, even if they are trained in stacks."""
    tasks = [
        requiring(Measured(jnp.arange(2.0), dim), jnp.array([1.0, rho]))
        for dim, rho in ((1, 3.0), (2, 0.0), (1, 0.1))
    ]

    def assign(rng_key, round, state, look):
        held = Cohort.of_rows(jnp.array([[0], [1]]))
        cohort, _ = mfa_rr(2, 2).assign(rng_key, round, held, look)
        more = jnp.concatenate([cohort.clients, jnp.array([0])])
        return Cohort.of_rows(more[:, None]), (look.losses(), look.appeals())

    assignment = full_participation(2)._replace(num_models=3, assign=assign)
    nothing = jnp.zeros((3, 2)), jnp.zeros((3, 2), bool)
    assignment = assignment._replace(init=lambda rng_key, look: nothing)
    start = [{"w": jnp.full(dim, w)} for dim, w in ((1, 2.0), (2, 1.0), (1, 0.0))]

    @jax.jit
    def run(rng_key):
        algorithm = fedavg(0.5, local_steps=1)
        return simulate(rng_key, tasks, algorithm, assignment, 1, params=start)[0].assignment

    losses, appeals = run(KEY)
    np.testing.assert_allclose(losses, [[2.0, 0.5], [1.0, 0.0], [0.0, 0.5]])
    np.testing.assert_array_equal(appeals, [[False, True], [False, False], [True, False]])


# Draws among participants.


def choose(assignment, rng_key, round, appeals):
    look = Look(losses=None, appeals=lambda: appeals, metric=None)
    cohort, _ = assignment.assign(rng_key, round, assignment.init(rng_key, look), look)
    return rows_of(cohort, assignment.num_models)


def test_fewer_participants_than_the_cohort_size_are_all_drawn():
    assignment = appealing(full_participation(6), cohort_size=4, from_round=1)
    appeals = jnp.array([[False, True, False, False, True, False]])
    chosen = np.asarray(choose(assignment, jax.random.key(1), 1, appeals))
    assert sorted(chosen[0].tolist()) == [-1, -1, 1, 4]


@pytest.mark.parametrize("from_round", [9, 10])
def test_draws_are_uniform_among_participants(from_round):
    """A chi-squared test compares the counts of all pairs of 4 or 5 clients."""
    assignment = appealing(full_participation(5), cohort_size=2, from_round=from_round)
    appeals = jnp.array([[True, True, False, True, True]])
    keys = jax.random.split(jax.random.key(7), 12_000)
    select = jax.jit(jax.vmap(lambda key: choose(assignment, key, 9, appeals)[0]))
    pairs = [tuple(pair) for pair in np.sort(np.asarray(select(keys)), axis=1).tolist()]
    stay = [0, 1, 3, 4] if from_round == 9 else range(5)
    expected = list(itertools.combinations(stay, 2))
    counts = np.array([pairs.count(pair) for pair in expected])
    assert counts.sum() == len(keys)
    mean = len(keys) / len(expected)
    dof = len(expected) - 1
    assert np.sum((counts - mean) ** 2 / mean) < dof + 4 * np.sqrt(2 * dof)


def test_models_draw_independently():
    """Each model draws up to `cohort_size` clients of its cohort, and no padding."""
    inner = mfa_rand(7, 2)
    assignment = appealing(inner, cohort_size=2, from_round=1)
    keys = jax.random.split(jax.random.key(1), 200)

    @jax.jit
    @jax.vmap
    def draw(key):
        group = inner.assign(jax.random.split(key)[0], 1, (), NOTHING_TO_SEE)[0].clients
        return group, choose(assignment, key, 1, jnp.ones((2, 7), bool))

    groups, chosen = map(np.asarray, draw(keys))
    assert chosen.shape == (200, 2, 2)
    assert (chosen >= 0).all()
    places = set()
    for group, few in zip(groups.reshape(400, -1), chosen.reshape(400, 2), strict=True):
        places.add(frozenset(group.tolist().index(k) for k in few))
    assert len(places) == 6, "all pairs of the four places"
    assert (groups == -1).any()


def test_scales_stay_with_their_clients():
    scale = 10.0 * jnp.arange(1, 7)
    inner = full_participation(6)

    def assign(*args):
        groups, state = inner.assign(*args)
        return dataclasses.replace(groups, scale=scale), state

    assignment = appealing(inner._replace(assign=assign), cohort_size=4, from_round=1)
    appeals = jnp.array([[False, True, True, False, True, False]])
    look = Look(losses=None, appeals=lambda: appeals, metric=None)
    groups, _ = assignment.assign(jax.random.key(0), 1, (), look)
    present = np.asarray(groups.clients) >= 0
    assert groups.scale.shape == groups.clients.shape == (4,)
    assert sorted(groups.clients[present].tolist()) == [1, 2, 4]
    np.testing.assert_allclose(groups.scale[present], 10.0 * (groups.clients[present] + 1))


# Preparation before the first round of a sweep.

TARGETS, DRAWS = jnp.arange(1.0, 7.0), [0.0, 0.5]
SIZES = {"num_rounds": 6, "num_seeds": 2, "seed": 3}
prepared_for = []


def prepare(learning_rate, rng_key, setup):
    """Trains own models from a random start."""
    task = setup.tasks
    jax.debug.callback(lambda *args: prepared_for.append(args), learning_rate, task.targets[0] - 1)
    start = task.init(keys.preparation_key(rng_key))
    own = own_models(rng_key, task, start, learning_rate=learning_rate, num_steps=2)
    return setup._replace(tasks=requiring(task, own.threshold + 20.0), params=start)


def build(kind, learning_rate, seed):
    assignment = appealing(mfa_rr(6, 2), cohort_size=2, from_round=1 if kind == "some" else 9)
    return Setup(
        Measured(TARGETS + DRAWS[seed]),
        maxfl(local_sgd(learning_rate, steps=1)),
        assignment,
        prepare=functools.partial(prepare, learning_rate),
    )


AXES = {"kind": ["some"], "learning_rate": [0.1, 0.2]}


@pytest.fixture
def one_device(monkeypatch):
    """Avoids several devices, because each of them would report every replica."""
    where = layout(4, jax.devices()[:1])
    monkeypatch.setattr("fedjax_mm.sweeps.plan.layout", lambda num_replicas, axis: where)


@functools.cache
def swept():
    """The result of the sweep, and the arguments of its preparations."""
    prepared_for.clear()
    result = sweep(Grid(build, AXES, **SIZES))
    jax.effects_barrier()
    return result, [tuple(map(float, each)) for each in prepared_for]


@pytest.fixture
def whole(one_device):
    return swept()


def test_a_sweep_prepares_once_for_each_replica(whole):
    _, calls = whole
    assert len(calls) == 2 * 2
    rates = [np.float32(rate) for rate in AXES["learning_rate"]]
    assert sorted(calls) == sorted(itertools.product(rates, (0.0, 0.5)))


def test_prepared_runs_equal_those_of_simulate(whole):
    result, _ = whole

    @functools.partial(jax.jit, static_argnums=1)
    def run(rng_key, seed):
        setup = build("some", 0.2, seed)
        setup = setup.prepare(rng_key, setup)
        return simulate(rng_key, *setup[:3], 6, params=setup.params)[1]

    for seed in (0, 1):
        trace = run(jax.random.fold_in(jax.random.key(3), seed), seed)
        same = result.sel(kind="some", learning_rate=0.2, seed=seed)
        for name, values in trace.metrics.items():
            np.testing.assert_allclose(same[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
        updates = np.cumsum(trace.client_updates, axis=0)
        np.testing.assert_array_equal(same.client_updates, updates)
        assert 0 < trace.client_updates.sum() < 6 * 4


def test_a_prepared_sweep_resumes(whole, tmp_path, monkeypatch):
    """The results of the preparation are saved and not computed again."""
    monkeypatch.setattr(sys.modules["fedjax_mm.sweeps.execute"], "_SEGMENT_SECONDS", 0.0)
    expected, _ = whole

    def stop(_, done, total):
        if 0.3 * total < done < total:
            os.kill(os.getpid(), signal.SIGTERM)

    prepared_for.clear()
    with Checkpoints(tmp_path) as checkpoints:
        how = Execution(checkpoints=checkpoints, save_every=0, callbacks=[progress(stop)])
        with pytest.raises(InterruptedRunError):
            sweep(Grid(build, AXES, **SIZES), execution=how)
    jax.effects_barrier()
    assert len(prepared_for) == 4
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        rest = sweep(Grid(build, AXES, **SIZES), execution=Execution(checkpoints=checkpoints))
    jax.effects_barrier()
    assert len(prepared_for) == 4
    for name in expected.data_vars:
        np.testing.assert_array_equal(rest[name], expected[name], err_msg=name)


def test_a_preparation_returns_a_setup():
    def unprepared(kind):
        return build(kind, 0.1, 0)._replace(prepare=lambda rng_key, setup: setup.tasks)

    with pytest.raises(ValueError, match="prepare returned a Measured; return the changed Setup"):
        sweep(unprepared, {"kind": ["some"]}, num_rounds=1)


# Refusals.

base = Measured(jnp.ones(4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Tuning(0.0, 1), r"learning_rate is 0\.0; it must be positive"),
        (lambda: Tuning(0.1, 0), "num_steps is 0"),
        (lambda: Tuning(0.1, -1), "num_steps is -1"),
        (lambda: Tuning(0.1, 1, 0), "batch_size is 0"),
        (lambda: own_models(KEY, base, (), learning_rate=-1.0), r"learning_rate is -1\.0"),
        (lambda: own_models(KEY, base, (), learning_rate=0.1, num_steps=0), "num_steps is 0"),
        (
            lambda: own_models(KEY, Towards(jnp.ones(4)), (), learning_rate=0.1),
            "Towards is not a task with client_loss",
        ),
        (lambda: requiring(base, jnp.ones(3)), r"shape \(3,\); .* of 4 clients"),
        (lambda: requiring(base, 1.0), r"shape \(\); give one number for each"),
        (
            lambda: requiring(base, OwnModels(np.ones(4), np.ones(5))),
            r"shape \(5,\); .* of 4 clients",
        ),
        (
            lambda: requiring(Towards(jnp.ones(4)), jnp.ones(4)),
            "Towards is not a task with client_loss",
        ),
        (lambda: requiring(base, jnp.ones(4), num_unseen=4), "num_unseen is 4; .* 0 and 3"),
        (lambda: requiring(base, jnp.ones(4), num_unseen=-1), "num_unseen is -1"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_numbers_may_be_traced():
    """Thresholds and the rates of own models and fine-tuning are traced, as in a sweep."""
    task, params = Measured(jnp.arange(1.0, 5.0)), {"w": jnp.zeros(3)}

    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def losses(rate):
        own = own_models(KEY, task, params, learning_rate=rate, num_steps=1)
        metrics = requiring(task, own, tuning=Tuning(rate / 2, 1)).metrics(KEY, params)
        return own.threshold, metrics["train_loss"]

    for rate in (0.5, 1.0):
        thresholds, train_loss = losses(rate)
        first = 1.5 * np.arange(1.0, 5.0) ** 2
        np.testing.assert_allclose(thresholds, (1 - rate) ** 2 * first, atol=1e-6)
        np.testing.assert_allclose(train_loss, (1 - rate / 2) ** 2 * first.mean(), rtol=1e-6)


def test_the_assignment_has_only_clients_that_may_train():
    task = requiring(base, jnp.ones(4), num_unseen=1)
    with pytest.raises(ValueError, match=r"\[3\] clients"):
        simulate(KEY, task, fedavg(0.1, local_steps=1), full_participation(4), 1)


def test_a_shared_test_set_is_refused():
    """Appeal is measured on a client's own test examples."""
    data = dataclasses.replace(labelled_data(N), test=labelled_data(1).test)
    task = classification(data, LogisticRegression(3))
    with pytest.raises(ValueError, match="1 clients have test examples and 7 for training"):
        requiring(task, jnp.ones(N))


def test_opt_in_needs_thresholds():
    assignment = appealing(full_participation(4), cohort_size=2)
    with pytest.raises(
        ValueError, match=r"Measured is not a task whose clients have .* `requiring`"
    ):
        simulate(KEY, base, fedavg(0.1, local_steps=1), assignment, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cohort_size": 5}, "cohort_size is 5; it must lie between 1 and num_clients = 4"),
        ({"cohort_size": 0}, "cohort_size is 0"),
        (
            {"cohort_size": 2, "from_round": 0},
            "from_round is 0; it must be a positive whole number",
        ),
    ],
)
def test_wrong_cohorts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        appealing(full_participation(4), **arguments)


@pytest.mark.usefixtures("x64")
def test_losses_of_all_clients():
    """Computed in one pass or client by client, for all clients or the first few."""
    task = learners()
    params = task.init(jax.random.key(0))
    losses = jax.jit(client_losses, static_argnums=2)
    expected = [float(of_client(task, params, jnp.int32(k))[0]) for k in range(N)]
    np.testing.assert_allclose(losses(task, params), expected, rtol=1e-5)
    np.testing.assert_allclose(losses(task, params, 3), expected[:3], rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda params, task: client_losses(task, params).sum()))
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(gradient(params, task)))
    with pytest.raises(ValueError, match="Supervised is not a task whose clients have thresholds"):
        thresholds(task)
