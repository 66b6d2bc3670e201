"""Metrics of every client and of their distribution, in Python and in experiment files."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import Experiment, fedavg, full_participation, run, simulate, to_dataset
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.metrics import client_fairness, fairness
from fedjax_mm.tasks import classification, requiring, with_clients
from fedjax_mm.tasks.networks import LogisticRegression
from tests.helpers import labelled_data

N = 6
NAMES = ("loss", "train_accuracy", "test_loss", "test_accuracy")


def federated():
    """Clients with training and test examples of their own."""
    data = labelled_data(N)
    return dataclasses.replace(data, test=data.train)


@functools.cache
def recorded(weighted):
    """A result of three rounds, with all metrics of clients."""
    task = classification(federated(), LogisticRegression(3))
    task = with_clients(task, NAMES, share=0.3, weighted=weighted)
    algorithm, everybody = fedavg(0.5, local_steps=2), full_participation(N)
    state, trace = simulate(jax.random.key(0), task, algorithm, everybody, 3)
    return task, state, to_dataset(trace)


@pytest.mark.parametrize("weighted", [False, True])
def test_records_are_those_of_each_client(weighted):
    task, state, result = recorded(weighted)
    params = jax.tree.map(lambda x: x[0], state.models[0].params)
    for name in NAMES:
        part, _, of = name.rpartition("_")
        data = task.task.test if part == "test" else task.task.train
        each = [task.task.client_metrics(params, jnp.int32(k), data)[of] for k in range(N)]
        found = result[f"client_{name}"].isel(round=-1, model=0)
        np.testing.assert_allclose(found, each, rtol=1e-5)
        how = {"share": 0.3, "larger_is_better": "accuracy" in name}
        counts = np.asarray(data.counts) if weighted else None
        end = "_weighted" * weighted
        expected = fairness(np.array(each), weights=counts, **how)
        for field, value in expected._asdict().items():
            of_run = result[f"{name}_{field}{end}"].values[-1, 0]
            np.testing.assert_allclose(of_run, value, rtol=1e-4, atol=1e-6)
        after = client_fairness(result, f"client_{name}", weights=counts, **how)
        for field in expected._fields:
            of_run = result[f"{name}_{field}{end}"]
            assert after[field].dims == of_run.dims
            np.testing.assert_allclose(of_run, after[field], rtol=1e-4, atol=1e-6)
    if weighted:
        np.testing.assert_allclose(result.loss_mean_weighted, result.loss, rtol=1e-5)
        np.testing.assert_allclose(
            result.test_accuracy_mean_weighted, result.test_accuracy, rtol=1e-5
        )


def test_clients_that_never_train_are_not_measured():
    task = classification(federated(), LogisticRegression(3))
    task = with_clients(requiring(task, np.ones(N), num_unseen=2), NAMES)
    metrics = jax.eval_shape(lambda key: task.metrics(key, task.init(key)), jax.random.key(0))
    assert {metrics[f"client_{name}"].shape for name in NAMES} == {(N - 2,)}


DIGITS = {"name": "digits", "num_clients": 4, "test_fraction": 0.3}


def settings(task=DIGITS, **clients):
    """An experiment whose clients are recorded."""
    return {
        "task": task,
        "num_models": 2,
        "num_rounds": 2,
        "num_seeds": 2,
        "assignment": {"name": "mfa_rand"},
        "algorithms": {"A": {"learning_rate": 0.1, "local_steps": 2, "batch_size": 5}},
        "clients": clients,
    }


def test_a_file_records_clients():
    each = {"metrics": ["test_accuracy"], "share": 0.5, "weighted": True}
    result = run(validate(Experiment, settings(**each)))
    assert result.client_test_accuracy.dims == ("algorithm", "seed", "round", "model", "client")
    assert result.sizes["client"] == 4
    worst, best = result.test_accuracy_worst_weighted, result.test_accuracy_best_weighted
    assert bool((worst <= best).all())
    assert bool((worst < best).any())


def test_a_file_records_clients_with_requirements():
    given = settings(metrics=["loss"], each=False) | {"requirement": {"num_steps": 1}}
    result = run(validate(Experiment, given))
    assert "client" not in result.dims
    assert "loss_worst" in result


def test_wrong_settings_are_refused():
    for given, words in [
        (settings(metrics=[]), "clients.metrics"),
        (settings(metrics=["appeal"]), "clients.metrics.*'appeal'"),
        (settings(metrics=["loss", "loss"]), "repeats a value"),
        (settings(metrics=["loss"], share=0.0), "clients.share"),
        (settings({"num_clients": 8}, metrics=["test_loss"]), "no examples: give 'loss'"),
        (
            settings({"name": "digits", "num_clients": 4}, metrics=["test_loss"]),
            "give task.test_fraction",
        ),
        (settings(metrics=["loss"]) | {"axes": {"clients.share": [0.1]}}, "run one for each"),
    ]:
        with pytest.raises(ValueError, match=words):
            validate(Experiment, given)
