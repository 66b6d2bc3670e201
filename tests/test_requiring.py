"""Thresholds, appeal, unseen clients, tuning, and clients that stay away."""

import dataclasses
import itertools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fedjax_mm.algorithms.local import train_locally
from fedjax_mm.algorithms.views import client_losses, thresholds

from fedjax_mm import (
    LogisticRegression,
    appealing,
    byzantine,
    classification,
    client_data,
    fedavg,
    full_participation,
    maxfl,
    mfa_rand,
    mfa_rr,
    mwfed,
    qffl,
    quadratic,
    requiring,
    simulate,
)
from fedjax_mm.base import Batching
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.simulate import init
from fedjax_mm.tasks.classification import Classification
from tests.helpers import Measured, Towards, counting, labelled_data

N, SEEN = 7, 5
RATE, STEPS = 0.3, 6


class Linear(nn.Module):
    """Two classes that are equally likely, to begin with."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, kernel_init=nn.initializers.zeros)(x)


def learners():
    """Logistic regression of clients with 1 to 9 training and 1 to 4 test examples."""
    return classification(labelled_data(N), LogisticRegression(3))


def warm_up(task, params, client):
    """w_hat_k by plain full-gradient steps."""
    gradient = jax.grad(task.client_loss)
    for _ in range(STEPS):
        step = gradient(params, jnp.int32(client))
        params = jax.tree.map(lambda w, g: w - RATE * g, params, step)
    return params


def mean_of(task, params, data, name, clients):
    return np.mean([float(task.client_metrics(params, jnp.int32(k), data)[name]) for k in clients])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num_models", [1, 2])
def test_thresholds_are_losses_of_a_warm_up_by_hand(num_models):
    """rho_k = F_k(w_hat_k) for every client and model, each model from its own start."""
    task = learners()
    algorithm = requiring(fedavg(0.1, local_steps=1), learning_rate=RATE, num_steps=STEPS)
    keys = jax.random.split(jax.random.key(3), num_models)
    start = [task.init(key) for key in keys]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *start)
    state, _ = simulate(
        jax.random.key(0), task, algorithm, mfa_rand(N, num_models), 1, params=stacked
    )
    demands = state.models.clients
    for m, k in itertools.product(range(num_models), range(N)):
        own = warm_up(task, start[m], k)
        assert demands.threshold[m, k] == pytest.approx(
            float(task.client_loss(own, jnp.int32(k))), rel=1e-5
        )
        accuracy = task.client_metrics(own, jnp.int32(k), task.test)["accuracy"]
        assert demands.own_accuracy[m, k] == pytest.approx(float(accuracy))
    assert len(np.unique(demands.threshold)) == num_models * N


@pytest.mark.usefixtures("x64")
def test_own_models_of_before_may_be_given():
    """Thresholds and accuracies of a warm-up, given, are as good as the warm-up itself."""
    task, strategy = learners(), mfa_rand(SEEN, 1)
    start = task.init(jax.random.key(1))
    base, key = fedavg(0.1, local_steps=2), jax.random.key(0)
    warmed = requiring(base, learning_rate=RATE, num_steps=STEPS, num_unseen=N - SEEN)
    state, trace = simulate(key, task, warmed, strategy, 3, params=start)
    own = jax.tree.map(lambda x: x[0], state.models.clients)
    given = requiring(
        base,
        thresholds=own.threshold,
        own_accuracies=own.own_accuracy,
        num_unseen=N - SEEN,
    )
    _, again = simulate(key, task, given, strategy, 3, params=start)
    assert set(again.metrics) == set(trace.metrics)
    for name, values in trace.metrics.items():
        np.testing.assert_array_equal(again.metrics[name], values)
    alone = requiring(base, thresholds=own.threshold, num_unseen=N - SEEN)
    _, without = simulate(key, task, alone, strategy, 1, params=start)
    assert set(trace.metrics) - set(without.metrics) == {
        "preferred_accuracy",
        "unseen_preferred_accuracy",
    }


def test_own_accuracies_go_with_thresholds():
    base = fedavg(0.1, local_steps=1)
    with pytest.raises(ValueError, match="own_accuracies are given, but no thresholds"):
        requiring(base, learning_rate=0.1, own_accuracies=np.ones(N))
    algorithm = requiring(base, thresholds=np.ones(N), own_accuracies=np.ones(N + 1))
    with pytest.raises(ValueError, match=r"own_accuracies have shape \(8,\)"):
        simulate(jax.random.key(0), learners(), algorithm, mfa_rand(N, 1), 1)


def test_warm_up_draws_batches_with_keys_of_its_own():
    """By (seed, model, client); not those of round 1."""
    task, rng_key = learners(), jax.random.key(4)
    algorithm = requiring(
        fedavg(0.1, local_steps=1), learning_rate=RATE, batch_size=2, num_steps=STEPS
    )
    start = task.init(jax.random.key(9))
    state, _ = simulate(rng_key, task, algorithm, full_participation(N), 1, params=start)
    for k in (0, 3, 6):
        key = rng_key
        for number in (0, 1, 1, k):
            key = jax.random.fold_in(key, number)
        own = train_locally(key, task, jnp.int32(k), start, optax.sgd(RATE), STEPS, Batching(2))
        expected = float(task.client_loss(own, jnp.int32(k)))
        assert state.models.clients.threshold[0, k] == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("x64")
def test_metrics_are_means_over_clients():
    """Also of unseen ones, apart; a client to whom the model does not appeal uses its own."""
    task = learners()
    algorithm = requiring(
        fedavg(0.3, local_steps=4), learning_rate=RATE, num_steps=STEPS, num_unseen=N - SEEN
    )
    state, trace = simulate(jax.random.key(0), task, algorithm, full_participation(SEEN), 3)
    params = jax.tree.map(lambda x: x[0], state.models.params)
    demands = jax.tree.map(lambda x: np.asarray(x[0]), state.models.clients)
    for prefix, clients in (("", range(SEEN)), ("unseen_", range(SEEN, N))):
        values = {name: float(x[-1, 0]) for name, x in trace.metrics.items()}
        for name, data, of in (
            ("loss", task.test, "loss"),
            ("accuracy", task.test, "accuracy"),
            ("train_loss", task.train, "loss"),
        ):
            expected = mean_of(task, params, data, of, clients)
            assert values[prefix + name] == pytest.approx(expected, rel=1e-6)
        test = [task.client_metrics(params, jnp.int32(k), task.test) for k in clients]
        happy = [
            float(m["loss"]) < demands.threshold[k] for m, k in zip(test, clients, strict=True)
        ]
        content = [
            float(task.client_loss(params, jnp.int32(k))) < demands.threshold[k] for k in clients
        ]
        preferred = [
            float(m["accuracy"]) if is_happy else demands.own_accuracy[k]
            for m, k, is_happy in zip(test, clients, happy, strict=True)
        ]
        assert values[prefix + "appeal"] == pytest.approx(np.mean(happy))
        assert values[prefix + "train_appeal"] == pytest.approx(np.mean(content))
        assert values[prefix + "preferred_accuracy"] == pytest.approx(np.mean(preferred))
    assert len(trace.metrics) == 12


@pytest.mark.usefixtures("x64")
def test_tuning_takes_local_steps_before_measuring():
    task = learners()
    algorithm = requiring(
        fedavg(0.1, local_steps=1), learning_rate=RATE, num_steps=1, tuning_steps=STEPS
    )
    state, trace = simulate(jax.random.key(0), task, algorithm, full_participation(N), 2)
    params = jax.tree.map(lambda x: x[0], state.models.params)
    tuned = [warm_up(task, params, k) for k in range(N)]
    losses = [float(task.client_loss(w, jnp.int32(k))) for k, w in enumerate(tuned)]
    tests = [task.client_metrics(w, jnp.int32(k), task.test) for k, w in enumerate(tuned)]
    values = {name: float(x[-1, 0]) for name, x in trace.metrics.items()}
    assert values["train_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    expected = np.mean([float(each["accuracy"]) for each in tests])
    assert values["accuracy"] == pytest.approx(expected)
    rho = np.asarray(state.models.clients.threshold[0])
    assert values["train_appeal"] == pytest.approx(np.mean(losses < rho))
    assert (losses < rho).any()


def test_tuning_draws_batches_with_keys_of_its_own():
    """By (seed, round, model, client)."""
    task, rng_key = learners(), jax.random.key(4)
    algorithm = requiring(
        fedavg(0.1, local_steps=1),
        learning_rate=RATE,
        batch_size=2,
        num_steps=1,
        tuning_steps=STEPS,
    )
    state, trace = simulate(rng_key, task, algorithm, full_participation(N), 2, record_every=2)
    params, losses = jax.tree.map(lambda x: x[0], state.models.params), []
    for k in range(N):
        key = rng_key
        for number in (2, 3, 1, k):
            key = jax.random.fold_in(key, number)
        tuned = train_locally(key, task, jnp.int32(k), params, optax.sgd(RATE), STEPS, Batching(2))
        losses.append(float(task.client_loss(tuned, jnp.int32(k))))
    assert trace.metrics["train_loss"][-1, 0] == pytest.approx(np.mean(losses), rel=1e-5)


def test_states_of_the_wrapped_algorithm_start_with_keys_and_thresholds():
    """The keys are not those of the warm-up, and differ from client to client."""

    def start(rng_key, task, client, params, state):
        return jax.random.key_data(rng_key), task.threshold(client)

    nothing = jnp.zeros(2, jnp.uint32), jnp.zeros(())
    algorithm = counting()._replace(init=lambda task, params: ((), nothing), start=start)
    wrapped = requiring(algorithm, learning_rate=RATE, num_steps=1)
    task = Measured(jnp.arange(1.0, 5.0))
    models = init(jax.random.key(0), task, wrapped, full_participation(4)).models
    keys, rho = models.clients.state
    np.testing.assert_array_equal(rho, models.clients.threshold)
    for k in range(4):
        key = jax.random.key(0)
        for number in (0, 1, 1, k, 1):
            key = jax.random.fold_in(key, number)
        np.testing.assert_array_equal(keys[0, k], jax.random.key_data(key))


def test_a_loss_equal_to_the_threshold_does_not_appeal():
    """Neither on training nor on test examples; MW-Fed's weights grow."""
    rng = np.random.default_rng(0)
    clients = client_data([(rng.normal(size=(2, 3)), np.arange(2)) for _ in range(4)])
    task = classification(FederatedData("four", "synthetic", 2, clients, clients), Linear())

    @jax.jit
    def run(thresholds):
        algorithm = requiring(mwfed(1e-30, local_steps=1), thresholds=thresholds)
        return simulate(jax.random.key(0), task, algorithm, full_participation(4), 1)

    loss = run(jnp.zeros(4))[1].metrics["loss"][0, 0]
    for factor, appeal in ((1.0, 0.0), (1.001, 1.0)):
        state, trace = run(jnp.full(4, factor * loss))
        for name in ("appeal", "train_appeal"):
            np.testing.assert_array_equal(trace.metrics[name], appeal)
        np.testing.assert_array_equal(state.models.server.is_satisfied, bool(appeal))


def test_the_wrapped_algorithm_trains_as_it_would_alone():
    task, strategy = learners(), mfa_rand(N, 2, cohort_size=5)
    base = fedavg(0.1, epochs=2, batch_size=2)
    alone, _ = simulate(jax.random.key(0), task, base, strategy, 3)
    wrapped = requiring(base, learning_rate=RATE, num_steps=1)
    both, trace = simulate(jax.random.key(0), task, wrapped, strategy, 3)
    for a, b in zip(
        jax.tree.leaves(alone.models.params), jax.tree.leaves(both.models.params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert trace.metrics["appeal"].shape == (4, 2)


def test_unseen_clients_never_train():
    """Nor do their data matter: they are NaN."""
    targets = jnp.arange(1.0, N + 1).at[SEEN:].set(jnp.nan)
    task = Measured(targets)
    algorithm = requiring(counting(), thresholds=jnp.ones(N), num_unseen=N - SEEN)
    strategy = mfa_rand(SEEN, 2)
    state, trace = simulate(jax.random.key(0), task, algorithm, strategy, 6)
    assert (state.models.clients.state.count[:, SEEN:] == 0).all()
    assert state.models.clients.state.count[:, :SEEN].sum() == 6 * SEEN
    assert trace.client_updates[1:].sum(1).tolist() == [SEEN] * 6
    averaged = requiring(
        fedavg(0.5, local_steps=1, server_scale="1/N"), thresholds=jnp.ones(N), num_unseen=2
    )
    state, _ = simulate(
        jax.random.key(0),
        task,
        averaged,
        full_participation(SEEN),
        1,
        params={"w": jnp.zeros(3)},
    )
    np.testing.assert_allclose(state.models.params["w"], np.mean(targets[:SEEN]) / 2)


def test_given_thresholds_have_no_own_models():
    algorithm = requiring(fedavg(0.1, local_steps=1), thresholds=np.linspace(0.5, 2, N))
    state, trace = simulate(jax.random.key(0), learners(), algorithm, full_participation(N), 2)
    np.testing.assert_allclose(state.models.clients.threshold[0], np.linspace(0.5, 2, N), rtol=1e-6)
    assert "preferred_accuracy" not in trace.metrics
    assert np.isfinite(trace.metrics["appeal"]).all()


def test_tasks_without_test_examples_keep_their_own_metrics():
    algorithm = requiring(fedavg(0.1, local_steps=1), learning_rate=0.1, num_steps=2)
    task = quadratic(N, 2, mu=0.1)
    _, trace = simulate(jax.random.key(0), task, algorithm, full_participation(N), 2)
    names = {"loss", "excess_loss", "distance", "train_loss", "train_appeal"}
    assert set(trace.metrics) == names
    np.testing.assert_allclose(trace.metrics["loss"], trace.metrics["train_loss"], rtol=1e-5)


# Staying away.


def test_only_clients_to_whom_the_model_appeals_train():
    """From round 3 on; the pool is that of the model of the round, with its own thresholds."""
    task, rho = Measured(jnp.arange(1.0, 7.0)), jnp.array([0.1, 40.0, 0.1, 40.0, 40.0, 0.1])
    algorithm = requiring(counting(), thresholds=rho)
    strategy = appealing(full_participation(6), cohort_size=6, from_round=3)
    start = {"w": jnp.zeros(3)}
    early, trace = simulate(jax.random.key(0), task, algorithm, strategy, 2, params=start)
    assert trace.client_updates[1:, 0].tolist() == [6, 6]
    assert (early.models.clients.state.count == 2).all()
    from_start = appealing(full_participation(6), cohort_size=6, from_round=1)
    state, trace = simulate(jax.random.key(0), task, algorithm, from_start, 1, params=start)
    # F_k(0) = 3/2 (k + 1)^2 is below 40 for clients 1, 3 and 4.
    np.testing.assert_array_equal(state.models.clients.state.count[0], [0, 1, 0, 1, 1, 0])


@pytest.mark.parametrize("method", [fedavg, mwfed])
def test_the_pool_follows_the_model(method):
    """One client's target draws the model near enough for the other."""
    task = Measured(jnp.array([2.0, 4.0]))
    algorithm = requiring(method(0.9, local_steps=1), thresholds=jnp.array([1e3, 10.0]))
    strategy = appealing(full_participation(2), cohort_size=2, from_round=1)
    _, trace = simulate(jax.random.key(0), task, algorithm, strategy, 3, params={"w": jnp.zeros(3)})
    # F_2(0) = 24; after one step to 1.8 F_2 = 7.26.
    assert trace.client_updates[1:, 0].tolist() == [1, 2, 2]


def test_an_empty_pool_keeps_the_model():
    task = Measured(jnp.arange(1.0, 7.0))
    algorithm = requiring(fedavg(0.1, local_steps=2), thresholds=jnp.full(6, -1.0))
    strategy = appealing(full_participation(6), cohort_size=3, from_round=3)
    after, trace = simulate(jax.random.key(0), task, algorithm, strategy, 6)
    before, _ = simulate(jax.random.key(0), task, algorithm, strategy, 2)
    assert trace.client_updates[1:, 0].tolist() == [3, 3, 0, 0, 0, 0]
    assert trace.idle_rounds[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 1]
    np.testing.assert_array_equal(after.models.params["w"], before.models.params["w"])


@pytest.mark.parametrize("record_every", [1, 2, 4])
def test_idle_rounds_are_counted(record_every):
    """Two clients visit two models in turn; only one wants to train, and only from the third."""
    task, rho = Measured(jnp.array([2.0, 4.0])), jnp.array([-1.0, 1e3])
    algorithm = requiring(counting(), thresholds=rho)
    strategy = appealing(mfa_rr(2, 2), cohort_size=1, from_round=3)
    _, trace = simulate(jax.random.key(0), task, algorithm, strategy, 8, record_every=record_every)
    done = np.asarray(trace.round)
    np.testing.assert_array_equal(trace.idle_rounds[0], 0)
    idle = np.cumsum(trace.idle_rounds, axis=0)
    np.testing.assert_array_equal(idle.sum(1), np.maximum(done - 2, 0))
    ends = done % 2 == 0  # of frames
    np.testing.assert_array_equal(idle[ends, 0], idle[ends, 1])
    trained = np.cumsum(trace.client_updates, axis=0)
    np.testing.assert_array_equal(trained, done[:, None] - idle)


def test_one_model_may_idle_beside_another():
    """Of another kind: each has its own thresholds, and so its own algorithm."""
    task = Measured(jnp.arange(1.0, 7.0))
    algorithms = [requiring(counting(), thresholds=jnp.full(6, rho)) for rho in (-1.0, 1e9, -1.0)]
    strategy = appealing(mfa_rr(6, 3), cohort_size=2, from_round=5)
    _, trace = simulate(jax.random.key(0), task, algorithms, strategy, 9, record_every=3)
    assert trace.idle_rounds.tolist() == [[0, 0, 0], [0, 0, 0], [2, 0, 2], [3, 0, 3]]


looks = 0


def look(how_many, _):
    global looks
    looks += how_many


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched(Classification):
    """A task that counts the clients whose training examples are all looked at."""

    def client_loss(self, params, client):
        jax.debug.callback(partial(look, 1), client)
        return super().client_loss(params, client)

    def evaluate(self, params, data, *, per_client=False, num_clients=None):
        if data is self.train:
            jax.debug.callback(partial(look, num_clients or self.num_clients), data.counts[0])
        return super().evaluate(params, data, per_client=per_client, num_clients=num_clients)


def looks_per_round(algorithm, strategy):
    """Clients whose losses are computed in each of three rounds, beside those of two records."""
    global looks
    task = learners()
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}

    def run(rng_key, task):
        return simulate(rng_key, task, algorithm, strategy, 3, record_every=3)

    program = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})
    looks = 0
    jax.block_until_ready(program(jax.random.key(0), Watched(**fields)))
    jax.effects_barrier()
    return (looks - 2 * N) / 3


@pytest.mark.parametrize(
    ("algorithm", "look_alone", "look_appealing"),
    [
        (fedavg(0.1, local_steps=1), 0, N),
        (mwfed(0.1, local_steps=1), N, N),
        (maxfl(0.1, local_steps=1), N, N + 2),
        (qffl(0.1, q=1.0, local_steps=1), N, N + 2),
        (byzantine(mwfed(0.1, local_steps=1), jnp.arange(N) < 1), N, N),
        (byzantine(maxfl(0.1, local_steps=1), jnp.arange(N) < 1), N, N + 2),
    ],
    ids=["fedavg", "mwfed", "maxfl", "qffl", "byzantine mwfed", "byzantine maxfl"],
)
def test_a_round_looks_at_all_losses_at_most_once(algorithm, look_alone, look_appealing):
    """And at those of the participants, if they report them."""
    algorithm = requiring(algorithm, thresholds=jnp.full(N, 1e3))
    everybody = full_participation(N)
    assert looks_per_round(algorithm, everybody) == look_alone
    strategy = appealing(everybody, cohort_size=2, from_round=1)
    assert looks_per_round(algorithm, strategy) == look_appealing


@pytest.mark.parametrize("method", [fedavg, mwfed])
def test_nobody_looks_at_losses_of_the_unseen(method):
    algorithm = requiring(
        method(0.1, local_steps=1), thresholds=jnp.full(N, 1e3), num_unseen=N - SEEN
    )
    strategy = appealing(full_participation(SEEN), cohort_size=2, from_round=1)
    assert looks_per_round(algorithm, strategy) == SEEN


def test_fewer_than_asked_all_come():
    strategy = appealing(full_participation(6), cohort_size=4, from_round=1)
    groups, _ = strategy.assign(jax.random.key(0), 1, ())
    appeal = jnp.array([[False, True, False, False, True, False]])
    selected = np.asarray(strategy.select(jax.random.key(1), 1, groups, appeal))
    assert sorted(selected[0].tolist()) == [-1, -1, 1, 4]


@pytest.mark.parametrize("from_round", [1, 10])
def test_draws_are_uniform_among_those_that_stay(from_round):
    """All pairs of them equally often: chi-squared over the 6 (or, of 5 clients, 10) pairs."""
    strategy = appealing(full_participation(5), cohort_size=2, from_round=from_round)
    appeal = jnp.array([[True, True, False, True, True]])
    groups, _ = strategy.assign(jax.random.key(0), 1, ())
    keys = jax.random.split(jax.random.key(7), 12_000)
    select = jax.jit(jax.vmap(lambda key: strategy.select(key, 9, groups, appeal)[0]))
    pairs = [tuple(pair) for pair in np.sort(np.asarray(select(keys)), axis=1).tolist()]
    stay = [0, 1, 3, 4] if from_round == 1 else range(5)
    expected = list(itertools.combinations(stay, 2))
    counts = np.array([pairs.count(pair) for pair in expected])
    assert counts.sum() == len(keys)
    mean = len(keys) / len(expected)
    dof = len(expected) - 1
    assert np.sum((counts - mean) ** 2 / mean) < dof + 4 * np.sqrt(2 * dof)


def test_models_draw_independently():
    """Of a group of its own each, at most `cohort_size`; padding stays out."""
    strategy = appealing(mfa_rand(7, 2), cohort_size=2, from_round=1)
    groups, _ = strategy.assign(jax.random.key(0), 1, ())
    appeal = jnp.ones((2, 7), bool)
    keys = jax.random.split(jax.random.key(1), 200)
    selected = np.asarray(jax.vmap(lambda key: strategy.select(key, 1, groups, appeal))(keys))
    assert selected.shape == (200, 2, 2)
    assert (selected >= 0).all()
    for m in range(2):
        assert set(np.unique(selected[:, m])) == {k for k in groups[m].tolist() if k >= 0}


# What does not fit.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give the rate of a warm-up or thresholds"),
        ({"learning_rate": 0.1, "thresholds": [1.0]}, "give the rate of a warm-up, or thresholds"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be positive"),
        ({"learning_rate": 0.1, "num_steps": 0}, "num_steps is 0"),
        ({"learning_rate": 0.1, "batch_size": 0}, "batch_size is 0"),
        ({"learning_rate": 0.1, "num_unseen": -1}, "num_unseen is -1"),
        ({"learning_rate": 0.1, "tuning_steps": -1}, "tuning_steps is -1"),
        ({"thresholds": [1.0], "tuning_steps": 1}, "the rate of tuning"),
    ],
)
def test_wrong_options_are_refused_before_compilation(arguments, message):
    with pytest.raises(ValueError, match=message):
        requiring(fedavg(0.1, local_steps=1), **arguments)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (Measured(jnp.ones(4)), {"thresholds": jnp.ones(3)}, r"shape \(3,\); .* of 4 clients"),
        (Measured(jnp.ones(4)), {"thresholds": 1.0}, r"shape \(\); give one number for each"),
        (Towards(jnp.ones(4)), {"learning_rate": 0.1}, "Towards has no client_loss"),
        (Measured(jnp.ones(4)), {"thresholds": jnp.ones(4), "num_unseen": 4}, r"\[0\] clients"),
        (Measured(jnp.ones(4)), {"thresholds": jnp.ones(4), "num_unseen": 1}, r"\[3\] clients"),
    ],
)
def test_what_does_not_fit_the_task_is_refused(task, options, message):
    algorithm = requiring(maxfl(0.1, local_steps=1), **options)
    with pytest.raises(ValueError, match=message):
        simulate(jax.random.key(0), task, algorithm, full_participation(4), 1)


def test_one_pool_of_test_examples_is_refused():
    """A client's own are what its appeal is measured on."""
    data = labelled_data(N)
    task = classification(
        dataclasses.replace(data, test=labelled_data(1).test), LogisticRegression(3)
    )
    algorithm = requiring(fedavg(0.1, local_steps=1), learning_rate=0.1)
    with pytest.raises(ValueError, match="1 clients have test examples and 7 train"):
        simulate(jax.random.key(0), task, algorithm, full_participation(N), 1)


def test_staying_away_needs_appeal():
    strategy = appealing(full_participation(4), cohort_size=2)
    with pytest.raises(ValueError, match="wrap it with `requiring`"):
        simulate(jax.random.key(0), Measured(jnp.ones(4)), fedavg(0.1, local_steps=1), strategy, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cohort_size": 5}, "cohort_size is 5; it must lie between 1 and num_clients = 4"),
        ({"cohort_size": 0}, "cohort_size is 0"),
        ({"cohort_size": 2, "from_round": 0}, "from_round is 0; it must be at least 1"),
    ],
)
def test_wrong_cohorts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        appealing(full_participation(4), **arguments)


def test_losses_and_thresholds_of_all_clients():
    """One pass over the examples, and one client after the other."""
    task = learners()
    params = task.init(jax.random.key(0))
    losses = client_losses(task, params)
    expected = [float(task.client_loss(params, jnp.int32(k))) for k in range(N)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda params, task: client_losses(task, params).sum()))(
        params, task
    )
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(gradient))
    with pytest.raises(ValueError, match="have no thresholds"):
        thresholds(task)
