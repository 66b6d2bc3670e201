"""Supervised tasks of any targets, and their losses and metrics, against plain loops."""

import dataclasses
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from sklearn import metrics as reference

from fedjax_mm import (
    Experiment,
    ditto,
    fedavg,
    full_participation,
    local_sgd,
    simulate,
    sweep,
    to_dataset,
)
from fedjax_mm.data import client_data, digits, federate, load_npz, partition
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.sweeps import Grid, Setup
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks import (
    absolute_error,
    accuracy,
    auc,
    calibration_error,
    class_accuracy,
    classification,
    cross_entropy,
    f1,
    r2,
    squared_error,
    supervised,
    top_k_accuracy,
)
from fedjax_mm.tasks.modules import check_outputs
from fedjax_mm.tasks.networks import MLP, CelebACNN, LogisticRegression
from tests.helpers import labelled_data

NUM_EXAMPLES, C = 60, 4


def linear_init(rng_key, x):
    return {"w": jax.random.normal(rng_key, (x.shape[-1],)), "b": jnp.zeros(())}


def linear_apply(params, x):
    return x @ params["w"] + params["b"]


LINEAR = linear_init, linear_apply


def regression_data(seed=0):
    """Examples of 5 clients of unequal sizes, each with tests of its own."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(NUM_EXAMPLES, 3)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.5 * rng.normal(size=NUM_EXAMPLES)
    return federate((x, y), partition.quantity_skew(y, 5, "linear"), num_classes=0)


def rows_of(store):
    """Features and targets of each client."""
    cuts = np.asarray(store.offsets)[1:]
    return list(zip(*(np.split(np.asarray(each), cuts) for each in store.examples), strict=True))


@pytest.mark.parametrize("block_size", [7, None])
def test_regression_is_trained_and_measured_like_a_loop(block_size):
    data = regression_data()
    metrics = {"absolute_error": absolute_error, "r2": r2}
    task = supervised(data, LINEAR, loss=squared_error, metrics=metrics, block_size=block_size)
    start = {"w": jnp.array([0.3, 0.1, -0.2]), "b": jnp.array(0.1)}

    @jax.jit
    def run(task):
        how = fedavg(local_sgd(0.05, steps=2)), full_participation(5)
        _, trace = simulate(0, task, *how, num_rounds=2, params=start)
        of_clients = task.evaluate(start, task.test, per_client=True)
        return trace, of_clients, task.evaluate(start, task.test, num_clients=3)

    trace, of_clients, of_three = run(task)
    w = np.array([0.3, 0.1, -0.2, 0.1])
    stores = [
        [(np.c_[x, np.ones(len(x))], y) for x, y in rows_of(s)] for s in (data.train, data.test)
    ]
    for record in range(3):
        for prefix, clients in zip(("train_", "test_"), stores, strict=True):
            x, y = (np.concatenate(each) for each in zip(*clients, strict=True))
            found = {name: float(value[record, 0]) for name, value in trace.metrics.items()}
            name = "loss" if prefix == "train_" else "test_loss"
            assert found[name] == pytest.approx(np.mean((x @ w - y) ** 2), rel=1e-4)
            assert found[f"{prefix}absolute_error"] == pytest.approx(
                np.mean(np.abs(x @ w - y)), rel=1e-4
            )
            assert found[f"{prefix}r2"] == pytest.approx(reference.r2_score(y, x @ w), rel=1e-4)
            if record == 0 and prefix == "test_":
                each = [np.mean((x @ w - y) ** 2) for x, y in clients]
                np.testing.assert_allclose(of_clients["loss"], each, rtol=1e-4)
                assert "r2" not in of_clients
                x, y = (np.concatenate(each) for each in zip(*clients[:3], strict=True))
                want = reference.r2_score(y, x @ w)
                assert float(of_three["r2"]) == pytest.approx(want, rel=1e-4)
        change, sizes = np.zeros(4), [len(y) for _, y in stores[0]]
        for (x, y), n in zip(stores[0], sizes, strict=True):
            own = w.copy()
            for _ in range(2):
                own -= 0.05 * 2 * x.T @ (x @ own - y) / n
            change += n * (own - w) / sum(sizes)
        w = w + change


def test_rows_of_weight_0_do_not_change_the_loss_of_a_regression():
    task = supervised(regression_data(), LINEAR, loss=squared_error)
    params = task.init(jax.random.key(0))
    value = jax.jit(jax.value_and_grad(task.loss))
    expected = value(params, (jnp.array([3, 5, 4]), jnp.ones(3), None))
    filled = jnp.array([3, 0, 5, 4, 9]), jnp.array([1.0, 0, 1, 1, 0]), None
    for one, other in zip(*map(jax.tree.leaves, (value(params, filled), expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_targets_of_several_outputs_and_of_sequences():
    """Outputs and targets are dicts: a matrix of floats, and a sequence of labels."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 3)).astype(np.float32)
    y = {"price": rng.normal(size=(20, 2)), "words": rng.integers(0, C, (20, 6))}
    data = federate((x, y), partition.iid(np.zeros(20), 4), num_classes=0)
    assert data.train.examples[1]["words"].dtype == jnp.int32

    def init(rng_key, x):
        return jax.random.normal(rng_key, (3, 2 + 6 * C))

    def apply(params, x):
        out = x @ params
        return {"price": out[:, :2], "words": out[:, 2:].reshape(-1, 6, C)}

    def loss(outputs, targets):
        of_price = squared_error(outputs["price"], targets["price"])
        return of_price + cross_entropy(outputs["words"], targets["words"])

    def words_f1(outputs, targets, weights):
        return f1(outputs["words"], targets["words"], weights)

    def words(outputs, targets):
        return accuracy(outputs["words"], targets["words"])

    task = supervised(data, (init, apply), loss=loss, metrics={"f1": words_f1, "words": words})
    params = task.init(jax.random.key(0))
    found = jax.jit(lambda task: task.evaluate(params, task.train))(task)
    x, y = jax.tree.map(np.asarray, data.train.examples)
    out = x @ np.asarray(params)
    logits = out[:, 2:].reshape(-1, 6, C)
    of_words = reference.log_loss(
        y["words"].ravel(), probabilities_of(logits).reshape(-1, C), labels=range(C)
    )
    assert found["loss"] == pytest.approx(np.mean((out[:, :2] - y["price"]) ** 2) + of_words, 1e-4)
    flat = y["words"].ravel(), logits.argmax(-1).ravel()
    assert found["f1"] == pytest.approx(reference.f1_score(*flat, average="macro"), rel=1e-5)
    assert found["words"] == pytest.approx(np.mean(flat[0] == flat[1]), rel=1e-5)


def scored(kind):
    """Outputs, targets, and the weights of rows of which some are padding."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(50, C)).astype(np.float32).round(1)  # some are equal
    labels = rng.integers(0, C - (kind == "no last class"), 50)
    if kind == "binary":
        return logits[:, 0], (labels > 0).astype(int)
    if kind == "numbers":
        return logits[:, :2], logits[:, :2] + rng.normal(size=(50, 2))
    return logits, labels


def expected_calibration_error(logits, labels, bins):
    probabilities = probabilities_of(logits)
    confidence, found = probabilities.max(1), 0.0
    for low in range(bins):
        rows = (confidence > low / bins) & (confidence <= (low + 1) / bins)
        if rows.any():
            right = logits[rows].argmax(1) == labels[rows]
            found += rows.mean() * abs(right.mean() - confidence[rows].mean())
    return found


def probabilities_of(logits):
    return scipy.special.softmax(np.asarray(logits, np.float64), axis=-1)


SCORES = {
    "accuracy": (accuracy, "labels", lambda x, y: reference.accuracy_score(y, x.argmax(1))),
    "top 2": (
        partial(top_k_accuracy, k=2),
        "labels",
        lambda x, y: np.mean([y[i] in np.argsort(-x[i], kind="stable")[:2] for i in range(len(y))]),
    ),
    "cross-entropy": (
        cross_entropy,
        "labels",
        lambda x, y: reference.log_loss(y, probabilities_of(x), labels=range(C)),
    ),
    "squared error": (squared_error, "numbers", lambda x, y: reference.mean_squared_error(y, x)),
    "absolute error": (absolute_error, "numbers", lambda x, y: reference.mean_absolute_error(y, x)),
    "classes": (
        class_accuracy,
        "labels",
        lambda x, y: reference.recall_score(y, x.argmax(1), average=None, labels=range(C)),
    ),
    "macro": (f1, "labels", lambda x, y: reference.f1_score(y, x.argmax(1), average="macro")),
    "macro of fewer": (
        f1,
        "no last class",
        lambda x, y: reference.f1_score(y, x.argmax(1), average="macro"),
    ),
    "micro": (
        partial(f1, average="micro"),
        "labels",
        lambda x, y: reference.f1_score(y, x.argmax(1), average="micro"),
    ),
    "auc": (auc, "binary", lambda x, y: reference.roc_auc_score(y, x)),
    "auc of classes": (
        auc,
        "labels",
        lambda x, y: reference.roc_auc_score(y, probabilities_of(x), multi_class="ovr"),
    ),
    "r2": (r2, "numbers", lambda x, y: reference.r2_score(y, x)),
    "calibration": (
        partial(calibration_error, bins=8),
        "labels",
        lambda x, y: expected_calibration_error(x, y, 8),
    ),
}


def test_outputs_are_traced_for_each_precision():
    """A process may have tasks in double precision before others."""
    features = np.zeros((4, 5), np.uint8)
    for is_double, kind in ((True, jnp.float64), (False, jnp.float32)):
        with jax.enable_x64(is_double):
            assert check_outputs(LogisticRegression(3), features, 4, (), False).dtype == kind


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("score", "kind", "want"), SCORES.values(), ids=SCORES)
def test_scores_equal_the_reference(score, kind, want):
    """Every third row is padding."""
    outputs, targets = scored(kind)
    is_there = np.arange(len(outputs)) % 3 != 1
    expected = want(outputs[is_there], targets[is_there])
    arrays = jnp.asarray(outputs, float), jnp.asarray(targets)
    if "weights" in inspect.signature(score).parameters:
        found = score(*arrays, weights=jnp.asarray(is_there, float))
    else:
        found = np.average(score(*arrays), weights=is_there)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_scores_without_an_answer_are_nan():
    ones = jnp.ones(3)
    assert jnp.isnan(r2(jnp.arange(3.0), ones, ones))
    assert jnp.isnan(auc(jnp.arange(3.0), ones, ones))
    assert jnp.isnan(class_accuracy(jnp.eye(3), jnp.zeros(3, int), ones)[2])
    assert jnp.isnan(auc(jnp.array([1.0, jnp.nan, 0.0]), jnp.array([0, 1, 1]), ones))


def test_a_network_with_weights_has_metrics_of_all_examples():
    """Each client's examples are one batch."""
    data = labelled_data()
    rng = np.random.default_rng(0)
    store = dataclasses.replace(
        data.train,
        examples=(
            jnp.asarray(rng.normal(size=(len(data.train.examples[1]), 8, 8, 3)), jnp.float32),
            data.train.examples[1],
        ),
    )
    data = dataclasses.replace(data, train=store, test=store)
    task = classification(data, CelebACNN(num_classes=3), metrics={"f1": f1})
    params = jax.jit(task.init)(jax.random.key(0))

    @jax.jit
    def found(task, params):
        weights = jnp.ones(len(store.examples[1]))
        logits = []
        for start, n in zip(store.offsets.tolist(), store.counts.tolist(), strict=True):
            x = store.examples[0][start : start + n]
            logits.append(task.module.apply({"params": params}, x, weights=weights[:n]))
        outputs = jnp.concatenate(logits)
        return task.evaluate(params, store)["f1"], f1(outputs, store.examples[1], weights)

    got, want = found(task, params)
    assert got == pytest.approx(float(want), rel=1e-5)


def test_metrics_of_clients_models_have_the_names_of_the_task():
    """With Ditto, and next to it FedAvg, whose clients use the global model."""
    data = regression_data()

    def build(algorithm):
        task = supervised(
            data, LINEAR, loss=squared_error, metrics={"error": absolute_error, "r2": r2}
        )
        method = partial(ditto, lam=0.1) if algorithm == "Ditto" else fedavg
        return Setup(task, method(local_sgd(0.05, steps=2)), full_participation(5))

    result = sweep(build, {"algorithm": ["Ditto", "FedAvg"]}, num_rounds=2)
    assert "personal_error" in result
    assert "personal_r2" not in result
    own, common = (result.isel(algorithm=i) for i in range(2))
    np.testing.assert_array_equal(common.personal_error, common.test_error)
    np.testing.assert_array_equal(common.personal_loss, common.loss)
    assert (own.personal_error != own.test_error).isel(round=-1).all()


def test_points_whose_partials_have_equal_options_are_one_program():
    data = labelled_data()

    def build(learning_rate):
        metrics = {"top": partial(top_k_accuracy, k=2), "ece": partial(calibration_error, bins=5)}
        task = classification(data, LogisticRegression(3), metrics=metrics)
        return Setup(task, fedavg(learning_rate, local_steps=1), full_participation(7))

    assert len(programs_of(Grid(build, {"learning_rate": [0.1, 0.2]}, 2))) == 1


def test_a_file_makes_the_same_tasks(tmp_path):
    """Also its static parts, such as the network, the loss and the metrics."""
    rng = np.random.default_rng(0)
    file = str(tmp_path / "numbers.npz")
    x, y = rng.normal(size=(30, 3)), rng.normal(size=(30, 2))
    np.savez(file, x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    numbers = {"name": "npz", "file": file, "num_classes": 0, "num_clients": 4}
    numbers |= {"model": "mlp", "hidden": [5], "loss": "absolute_error", "metrics": ["r2"]}
    top = {"name": "top_k_accuracy", "k": 3}
    images = {"name": "digits", "num_clients": 4, "metrics": [top, "f1", "auc"]}
    made = []
    for table in (numbers, images):
        values = {"task": table, "algorithms": {"A": {"learning_rate": 0.1, "local_steps": 1}}}
        how = {"num_models": 1, "num_rounds": 1, "assignment": {"name": "mfa_rand"}}
        task = validate(Experiment, values | how).task
        made.append(task.build(task.data()))
    pools = load_npz(file, num_classes=0), digits(seed=0)
    first, second = (
        federate(pool, partition.iid(np.zeros(len(pool.train[0])), 4)) for pool in pools
    )
    scores = {"top_k_accuracy": partial(top_k_accuracy, k=3), "f1": f1, "auc": auc}
    wanted = [
        supervised(first, MLP(2, (5,)), loss=absolute_error, metrics={"r2": r2}),
        classification(second, LogisticRegression(10), scale=1 / 255, metrics=scores),
    ]
    for got, want in zip(made, wanted, strict=True):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_array_equal(one, other)


def test_array_metrics_have_a_dimension():
    task = classification(
        labelled_data(), LogisticRegression(3), metrics={"of_class": class_accuracy}
    )
    run = task, fedavg(0.1, local_steps=1), full_participation(7)
    assert to_dataset(simulate(0, *run, 1)[1]).test_of_class.shape == (2, 1, 3)


def test_data_without_classes_keep_their_targets():
    x = np.zeros((4, 2))
    store = client_data([(x, np.array([True, False, True, True])), (x[:1], np.ones(1, bool))])
    data = FederatedData("flags", "synthetic", 0, store, store)
    task = supervised(data, LINEAR, loss=squared_error)
    assert task.train.examples[1].dtype == bool
    assert repr(data).endswith("no classes")
