"""Metrics of personal models: of Ditto and of any algorithm that has some."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    Experiment,
    apfl,
    ditto,
    fedavg,
    full_participation,
    local_sgd,
    mfa_rand,
    pfedme,
    run,
    simulate,
    to_dataset,
)
from fedjax_mm.base import ClientContext
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.metrics import fairness
from fedjax_mm.tasks import classification, quadratic, requiring, with_clients
from fedjax_mm.tasks.networks import LogisticRegression
from tests.helpers import Towards, labelled_data

N = 6
LOCAL = local_sgd(0.5, steps=2)
METHODS = {
    "ditto": ditto(LOCAL, lam=0.1),
    "apfl": apfl(LOCAL),
    "pfedme": pfedme(LOCAL, inner_rate=0.1, lam=1.0),
}


def problem():
    """Clients with test examples that differ from their training examples."""
    data, other = labelled_data(N), labelled_data(N)
    labels = (other.train.examples[1] + 1) % 3
    test = dataclasses.replace(other.train, examples=(other.train.examples[0], labels))
    return classification(dataclasses.replace(data, test=test), LogisticRegression(3))


@pytest.mark.parametrize(("name", "client_map"), [("ditto", 4), ("apfl", "vmap")])
def test_records_are_those_of_the_clients_models(name, client_map):
    task, algorithm = problem(), METHODS[name]
    watched = with_clients(task, ["loss", "test_accuracy"], share=0.4)
    assignment = mfa_rand(N, 2)
    state, trace = simulate(0, watched, algorithm, assignment, 4, client_map=client_map)
    _, plain = simulate(0, task, algorithm, assignment, 4, client_map=client_map)
    result = to_dataset(trace)
    models = state.models[0]
    for m in range(2):
        params = jax.tree.map(lambda x, m=m: x[m], models.params)
        losses, accuracies = [], []
        for k in range(N):
            own = jax.tree.map(lambda x, m=m, k=k: x[m, k], models.clients)
            v = algorithm.personal(params, own)
            losses.append(float(task.client_loss(v, jnp.int32(k))))
            accuracies.append(float(task.client_metrics(v, jnp.int32(k), task.test)["accuracy"]))
        n, last = np.asarray(task.train.counts), result.isel(round=-1, model=m)
        np.testing.assert_allclose(last.personal_client_loss, losses, rtol=1e-5)
        np.testing.assert_allclose(last.personal_client_test_accuracy, accuracies, rtol=1e-5)
        np.testing.assert_allclose(last.personal_loss, np.average(losses, weights=n), rtol=1e-5)
        expected = np.average(accuracies, weights=np.asarray(task.test.counts))
        np.testing.assert_allclose(last.personal_accuracy, expected, rtol=1e-5)
        worst = fairness(np.array(losses), share=0.4, larger_is_better=False).worst
        np.testing.assert_allclose(last.personal_loss_worst, worst, rtol=1e-5)
    assert set(plain.metrics) - set(task.metrics(jax.random.key(0), params)) == {
        "personal_loss",
        "personal_accuracy",
    }
    np.testing.assert_allclose(plain.metrics["personal_loss"], result.personal_loss, rtol=1e-6)


def test_at_the_start_personal_models_are_the_global_one():
    _, trace = simulate(0, problem(), METHODS["ditto"], full_participation(N), 1)
    metrics = {name: x[0, 0] for name, x in trace.metrics.items()}
    np.testing.assert_allclose(metrics["personal_loss"], metrics["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["personal_accuracy"], metrics["test_accuracy"], rtol=1e-5)


def test_ditto_without_a_pull_trains_locally():
    """Its personal loss is that of each client alone."""
    task, rounds = problem(), 3
    start = task.init(jax.random.key(0))
    start = jax.tree.map(jnp.zeros_like, start)
    how = {"params": start}
    _, trace = simulate(0, task, ditto(LOCAL, lam=0.0), full_participation(N), rounds, **how)
    losses = []
    for k in range(N):
        w, key = start, jax.random.key(0)
        for _ in range(rounds):
            context = ClientContext(key, jnp.int32(1), task, jnp.int32(k), w)
            w = jax.tree.map(jnp.add, w, LOCAL.train(context).update)
        losses.append(float(task.client_loss(w, jnp.int32(k))))
    expected = np.average(losses, weights=np.asarray(task.train.counts))
    np.testing.assert_allclose(trace.metrics["personal_loss"][-1, 0], expected, rtol=1e-5)


def test_others_have_the_metrics_of_the_global_model():
    task = quadratic(N, 2, mu=0.1)
    _, trace = simulate(0, task, fedavg(0.1, local_steps=1), mfa_rand(N, 2), 1)
    assert not [name for name in trace.metrics if name.startswith("personal")]
    targets = Towards(jnp.arange(6.0))  # without losses of clients
    _, trace = simulate(0, targets, METHODS["ditto"], mfa_rand(N, 2), 1)
    assert set(trace.metrics) == {"norm"}
    mixed = [METHODS["ditto"], fedavg(0.1, local_steps=1)]
    _, trace = simulate(0, task, mixed, mfa_rand(N, 2), 1)
    assert np.isfinite(trace.metrics["personal_loss"][:, 0]).all()
    result = to_dataset(trace)
    np.testing.assert_array_equal(result.personal_loss.sel(model=2), result.loss.sel(model=2))
    given = trace.metrics["personal_loss"][:, 0]
    np.testing.assert_array_equal(result.personal_loss.sel(model=1), given)
    other_means = requiring(problem(), np.ones(N))  # its loss is over test examples
    result = to_dataset(simulate(0, other_means, mixed, mfa_rand(N, 2), 1)[1])
    assert result.personal_loss.sel(model=2).isnull().all()


def test_a_file_records_personal_models():
    table = {"name": "pfedme", "learning_rate": 0.1, "local_steps": 2, "inner_rate": 0.1}
    settings = {
        "task": {"num_clients": 8, "mu": 0.1},
        "num_models": 2,
        "num_rounds": 2,
        "num_seeds": 2,
        "assignment": {"name": "mfa_rand"},
        "algorithms": {"A": table | {"lam": 1.0}, "B": {"learning_rate": 0.1, "local_steps": 2}},
    }
    result = run(validate(Experiment, settings))
    ours, theirs = result.sel(algorithm="A"), result.sel(algorithm="B")
    assert (ours.personal_loss != ours.loss).isel(round=-1).any("seed").all()
    np.testing.assert_array_equal(theirs.personal_loss, theirs.loss)


@pytest.mark.parametrize(
    ("personal", "words"),
    [
        (lambda params, state: params[:1], "returns from personal"),
        (lambda params, state: (params, state), "returns from personal"),
    ],
)
def test_wrong_personal_models_are_refused(personal, words):
    algorithm = METHODS["ditto"]._replace(personal=personal)
    with pytest.raises((ValueError, TypeError), match=words):
        simulate(0, quadratic(N, 2, mu=0.1), algorithm, mfa_rand(N, 2), 1)
    with pytest.raises(TypeError, match="the algorithm's personal is 1; give a function"):
        simulate(0, problem(), algorithm._replace(personal=1), mfa_rand(N, 2), 1)
