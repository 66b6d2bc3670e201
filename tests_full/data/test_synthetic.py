"""Synthetic(alpha, beta) and surrogate faces follow their distributions."""

import hashlib
import importlib
import itertools
import math

import numpy as np
import pytest

import fedjax_mm.data.surrogate as surrogate_module
from fedjax_mm.data.surrogate import surrogate_faces
from fedjax_mm.data.synthetic import sample_counts, synthetic
from tests.helpers import slow_unless

# A function of the package hides the module of the same name.
module = importlib.import_module("fedjax_mm.data.synthetic")


def of_clients(split):
    """Lists x and y of each client."""
    x, y = map(np.asarray, split.examples)
    cuts = np.cumsum(split.counts)[:-1]
    return list(zip(np.split(x, cuts), np.split(y, cuts), strict=True))


def same(one, other):
    """Checks that clients of both datasets are equal."""
    for split in ("train", "test"):
        pairs = zip(
            of_clients(getattr(one, split)), of_clients(getattr(other, split)), strict=False
        )
        for a, b in pairs:
            np.testing.assert_array_equal(a[0], b[0])
            np.testing.assert_array_equal(a[1], b[1])


def within(values, mean, errors=4):
    """Checks that the mean of independent values is within four standard errors of `mean`."""
    values = np.asarray(values, float)
    error = values.std(ddof=1) / math.sqrt(len(values))
    assert abs(values.mean() - mean) < errors * error, (values.mean(), mean, error)


@pytest.mark.parametrize(
    ("generator", "location", "shift", "cap"),
    [("fedprox", 4, 50, math.inf), ("leaf", 3, 5, 1000)],
)
def test_sample_counts_follow_their_distribution(generator, location, shift, cap):
    counts = sample_counts(40_000, generator=generator, seed=3)

    def cdf(value):
        z = (math.log(value) - location) / 2 if value > 0 else -math.inf
        return (1 + math.erf(z / math.sqrt(2))) / 2

    # P(n <= shift + j) = P(LogNormal < j + 1), and counts above the cap equal the cap.
    for j in (0, 1, 2, 5, 20, 55, 150, 400, 994):
        expected = cdf(j + 1) if shift + j < cap else 1
        error = math.sqrt(expected * (1 - expected) / len(counts))
        assert abs((counts <= shift + j).mean() - expected) < 4 * error + 1e-12, j
    assert counts.min() == shift
    assert counts.max() <= cap


@pytest.mark.parametrize(("generator", "train_share"), [("fedprox", 9), ("leaf", 6)])
def test_training_shares_are_those_of_the_papers(generator, train_share):
    data = synthetic(300, dim=3, generator=generator)
    counts = sample_counts(300, generator=generator)
    np.testing.assert_array_equal(data.train.counts, counts * train_share // 10)
    np.testing.assert_array_equal(np.add(data.train.counts, data.test.counts), counts)


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
def test_every_client_has_training_and_test_examples(fraction):
    data = synthetic(300, dim=2, generator="leaf", test_fraction=fraction)
    assert min(data.train.counts.min(), data.test.counts.min()) >= 1


@pytest.mark.parametrize(
    ("alpha", "beta"),
    [
        slow_unless((alpha, beta) in ((0.5, 0.0), (2.0, 1.5)), alpha, beta)
        for alpha in (0.0, 0.5, 2.0)
        for beta in (0.0, 1.5)
    ],
)
def test_features_have_the_defined_moments(alpha, beta):
    data = synthetic(2000, alpha=alpha, beta=beta, dim=4, seed=5)
    clients = [x for x, _ in of_clients(data.train)]
    # v_k[j] has variance beta^2 + 1, and two coordinates have covariance beta^2.
    means = np.array([x.mean(axis=0) for x in clients], float)
    noise = np.array([x.var(axis=0, ddof=1) / len(x) for x in clients], float)
    for j in range(4):
        within(means[:, j], 0)
        within(means[:, j] ** 2 - noise[:, j], beta**2 + 1)
        within([x[:, j].var(ddof=1) for x in clients], (j + 1) ** -1.2)
    within(means[:, 0] * means[:, 3], beta**2)


@pytest.mark.parametrize(("alpha", "num_classes"), [(0.0, 5), slow_unless(False, 1.0, 5), (3.0, 3)])
def test_labels_have_the_defined_frequencies(alpha, num_classes):
    """Label frequencies agree with an independent simulation of the definition."""
    num_clients, dim = 1000, 6
    data = synthetic(num_clients, alpha=alpha, beta=0.5, dim=dim, num_classes=num_classes, seed=2)
    rng = np.random.default_rng(99)
    largest, reference, labels_of_clients = [], [], [y for _, y in of_clients(data.train)]
    for y in labels_of_clients:
        largest.append(np.bincount(y, minlength=num_classes).max() / len(y))
        u, B = rng.normal(0, alpha), rng.normal(0, 0.5)
        v = rng.normal(B, 1, dim)
        W, b = rng.normal(u, 1, (dim, num_classes)), rng.normal(u, 1, num_classes)
        x = rng.normal(v, np.arange(1, dim + 1) ** -0.6, (len(y), dim))
        labels = (x @ W + b).argmax(axis=1)
        reference.append(np.bincount(labels, minlength=num_classes).max() / len(y))
    error = math.hypot(np.std(largest), np.std(reference)) / math.sqrt(num_clients)
    assert abs(np.mean(largest) - np.mean(reference)) < 4 * error
    # All classes are equally frequent over clients.
    for label in range(num_classes):
        within([(y == label).mean() for y in labels_of_clients], 1 / num_classes)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 2.0])
def test_models_have_the_defined_moments(alpha):
    law = module._Law(alpha, 1.0, 3, 2, "fedprox", False)
    clients = module._clients(law, seed=0)(20_000)
    W, b = clients.weights, clients.biases
    assert (W.shape, b.shape) == ((20_000, 3, 2), (20_000, 2))
    for entries in (W[:, 0, 0], W[:, 2, 1], b[:, 1]):
        within(entries, 0)
        within(entries**2, alpha**2 + 1)
    if alpha:
        within(W[:, 1, 0] * b[:, 0], alpha**2)


def test_alpha_does_not_change_the_labels():
    """Alpha adds the same number to all logits of an example."""
    same(synthetic(50, alpha=0, dim=10, seed=1), synthetic(50, alpha=3, dim=10, seed=1))


def test_iid_clients_share_one_model():
    data = synthetic(2000, beta=1.0, dim=3, num_classes=2, iid=True, seed=1)
    clients = of_clients(data.train)
    means = np.array([x.mean(axis=0) for x, _ in clients], float)
    noise = np.array([x.var(axis=0, ddof=1) / len(x) for x, _ in clients], float)
    within((means[:, 0] - means[:, 2]) ** 2 - noise[:, 0] - noise[:, 2], 0)
    within(means[:, 1] ** 2 - noise[:, 1], 1)
    # A single hyperplane separates the labels of all clients.
    x, y = (np.concatenate(a) for a in zip(*clients[:300], strict=True))
    from sklearn.linear_model import LogisticRegression

    assert LogisticRegression(C=1e4, max_iter=1000).fit(x, y).score(x, y) > 0.998
    other = of_clients(synthetic(2000, dim=3, num_classes=2, seed=1).train)[:300]
    x, y = (np.concatenate(a) for a in zip(*other, strict=True))
    assert LogisticRegression(max_iter=1000).fit(x, y).score(x, y) < 0.9


def test_leafs_generator_has_the_defined_moments():
    data = synthetic(4000, dim=4, num_classes=3, generator="leaf", seed=8)
    clients = [x for x, _ in of_clients(data.train) if len(x) > 5]
    means = np.array([x.mean(axis=0) for x in clients], float)
    noise = np.array([x.var(axis=0, ddof=1) / len(x) for x in clients], float)
    within(means[:, 1] ** 2 - noise[:, 1], 2)
    within(means[:, 1] * means[:, 2], 1)
    within([x[:, 3].var(ddof=1) for x in clients], 4**-1.2)
    # All clients share one Q. Its scale m_k > 0 keeps the order of the logits, so that one model
    # fits all labels, except for the noise of the logits.
    x, y = (np.concatenate(a) for a in zip(*of_clients(data.train)[:200], strict=True))
    from sklearn.linear_model import LogisticRegression

    assert 0.85 < LogisticRegression(C=100, max_iter=2000).fit(x, y).score(x, y) < 1


@pytest.mark.parametrize(
    ("arguments", "digest"),
    [
        ({}, "58b1919483bb1596"),
        ({"iid": True}, "23ec60d477f98d0a"),
        ({"generator": "leaf"}, "e2a2661150e677b8"),
    ],
)
def test_a_seed_gives_the_same_data_on_every_machine(arguments, digest):
    """Values are rounded, because their last bit depends on the machine."""
    data = synthetic(20, dim=5, seed=7, **arguments)
    found = hashlib.sha256()
    for split in (data.train, data.test):
        x, y = map(np.asarray, split.examples)
        for numbers in (split.counts, y, np.floor(x[:200] * 64)):
            found.update(np.asarray(numbers, "<i8").tobytes())
    assert found.hexdigest()[:16] == digest


@pytest.mark.parametrize("arguments", [{}, {"iid": True}, {"generator": "leaf"}])
def test_data_do_not_depend_on_blocks_and_further_clients(arguments, monkeypatch):
    data = synthetic(30, dim=3, seed=1, **arguments)
    same(data, synthetic(30, dim=3, seed=1, **arguments))
    same(data, synthetic(40, dim=3, seed=1, **arguments))
    monkeypatch.setattr(module, "_BLOCK_EXAMPLES", 100)
    same(data, synthetic(30, dim=3, seed=1, **arguments))
    other = synthetic(30, dim=3, seed=2, **arguments)
    assert not np.array_equal(other.train.counts, data.train.counts)


def test_types_and_shapes():
    data = synthetic(5, dim=7, num_classes=3)
    x, y = data.train.examples
    assert (x.dtype, y.dtype, x.shape[1], data.kind) == ("float32", "int32", 7, "synthetic")
    assert set(np.unique(y)) <= {0, 1, 2}
    trained, tested = (np.asarray(split.examples[0]) for split in (data.train, data.test))
    assert not np.isin(trained[:, 0], tested[:, 0]).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_clients": 0}, "num_clients is 0"),
        ({"alpha": -1}, "alpha is -1"),
        ({"beta": math.nan}, "beta is nan"),
        ({"dim": 0}, "dim is 0"),
        ({"num_classes": 1}, "num_classes is 1"),
        ({"generator": "LEAF"}, "generator is 'LEAF'"),
        ({"generator": "leaf", "alpha": 0.5}, "LEAF's generator has no alpha"),
        ({"test_fraction": 1}, "test_fraction is 1"),
        ({"test_fraction": 0}, "test_fraction is 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        synthetic(**{"num_clients": 3, **arguments})


FACES = surrogate_faces(40, num_attributes=3, image_size=24, seed=4)


def test_faces_are_balanced_by_attribute_and_uneven_by_client():
    for split in (FACES.train, FACES.test):
        x, y = map(np.asarray, split.examples)
        assert (x.dtype, x.shape[1:], y.shape) == ("uint8", (24, 24, 3), (len(x), 3))
        assert set(np.unique(y)) == {0, 1}
        assert np.abs(y.sum(axis=0) - len(y) / 2).max() <= 0.5
    total = np.add(FACES.train.counts, FACES.test.counts)
    assert (total.min() >= 20, total.max() <= 40, FACES.kind) == (True, True, "surrogate")

    def spread(skew):
        data = surrogate_faces(200, num_attributes=3, image_size=6, label_skew=skew)
        shares = np.array([y.mean(axis=0) for _, y in of_clients(data.train)])
        return shares.var(axis=0).mean() - (0.25 / np.asarray(data.train.counts)).mean()

    assert spread(0) < 0.005 < 0.03 < spread(1)


def test_clients_have_different_backgrounds():
    means = np.array([x.mean(axis=0) for x, _ in of_clients(FACES.train)], float)
    within_client = np.mean([x.var(axis=0, dtype=float).mean() for x, _ in of_clients(FACES.train)])
    between = means.var(axis=0).mean()
    assert between > 0.3 * within_client


@pytest.mark.parametrize("signal", [0.5, slow_unless(False, 1.5)])
def test_the_best_linear_classifier_has_the_documented_accuracy(signal):
    """It is a linear discriminant on small images with a clipped Gaussian background."""
    data = surrogate_faces(
        300, num_attributes=2, image_size=12, signal=signal, label_skew=0, test_fraction=0.5
    )
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    (x, y), (xt, yt) = (map(np.asarray, split.examples) for split in (data.train, data.test))
    promised = (1 + math.erf(signal / math.sqrt(2))) / 2
    for a in range(2):
        model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.01)
        score = model.fit(x.reshape(len(x), -1) / 255.0, y[:, a])
        accuracy = score.score(xt.reshape(len(xt), -1) / 255.0, yt[:, a])
        assert promised - 0.05 < accuracy < promised + 0.02


def test_faces_depend_only_on_their_seed(monkeypatch):
    same(FACES, surrogate_faces(40, num_attributes=3, image_size=24, seed=4))
    monkeypatch.setattr(surrogate_module, "_BLOCK_IMAGES", 7)
    same(FACES, surrogate_faces(40, num_attributes=3, image_size=24, seed=4))
    other = surrogate_faces(40, num_attributes=3, image_size=24, seed=5)
    assert not np.array_equal(other.train.counts, FACES.train.counts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_attributes": 109}, "num_attributes is 109; .* patterns = 108"),
        ({"examples_per_client": (1, 5)}, r"examples_per_client is \(1, 5\)"),
        ({"examples_per_client": (5, 4)}, r"examples_per_client is \(5, 4\)"),
        ({"test_fraction": 1.0}, "test_fraction is 1.0"),
        ({"signal": 0}, "signal is 0"),
        ({"label_skew": -1}, "label_skew is -1"),
    ],
)
def test_impossible_faces_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        surrogate_faces(2, **arguments)


def test_two_examples_are_split():
    data = surrogate_faces(5, image_size=4, num_attributes=1, examples_per_client=(2, 2))
    assert list(itertools.chain(data.train.counts, data.test.counts)) == [1] * 10
