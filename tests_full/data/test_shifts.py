"""Clients with noisy or rotated features, and arrays from rows."""

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fedjax_mm.data import federate, from_rows, noisy_features, partition, rotated

X = np.random.default_rng(0).integers(0, 256, (4000, 3, 3, 1)).astype(np.uint8)
Y = np.arange(4000) % 2
DATA = federate((X, Y), partition.iid(Y, 4), test_fraction=0.25)


def by_client(split):
    x, y = split.gathered().examples
    ends = np.cumsum(split.counts)[:-1]
    return list(zip(np.split(np.asarray(x), ends), np.split(np.asarray(y), ends), strict=True))


@pytest.mark.parametrize("name", ["train", "test"])
def test_noise_grows_with_the_client(name):
    changed = by_client(getattr(noisy_features(DATA, std=8.0, seed=1), name))
    for k, ((x, y), (noisy, labels)) in enumerate(
        zip(by_client(getattr(DATA, name)), changed, strict=True), 1
    ):
        noise, std = noisy - x.astype(float), 8.0 * k / 4
        assert noisy.dtype == np.float32
        np.testing.assert_array_equal(labels, y)
        assert abs(noise.std() - std) < 4 * std / np.sqrt(2 * noise.size)
        assert abs(noise.mean()) < 4 * std / np.sqrt(noise.size)


@pytest.mark.parametrize("name", ["train", "test"])
@pytest.mark.parametrize("turns", [None, [2, 0, 3, -1]])
def test_clients_images_are_turned(name, turns):
    changed = by_client(getattr(rotated(DATA, turns), name))
    for k, ((x, y), (turned, labels)) in enumerate(
        zip(by_client(getattr(DATA, name)), changed, strict=True)
    ):
        expected = x
        for _ in range((k if turns is None else turns[k]) % 4):  # [i, j] comes from [j, 2 - i]
            expected = np.stack([expected[:, j, 2 - i] for i in range(3) for j in range(3)], 1)
            expected = expected.reshape(x.shape)
        np.testing.assert_array_equal(turned, expected)
        np.testing.assert_array_equal(labels, y)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rotated(DATA, [1, 2]), "one whole number for each of 4 clients"),
        (lambda: noisy_features(DATA, std=-1.0), "std is -1.0; it must not be negative"),
        (
            lambda: noisy_features(federate(((X, Y), (X, Y)), partition.iid(Y, 4)), std=1.0),
            "the test set is one pool",
        ),
        (
            lambda: rotated(federate((X[..., 0, 0], Y), partition.iid(Y, 4), test_fraction=0.2)),
            "give square images",
        ),
        (lambda: from_rows({"a": [1]}, features="b", labels="a"), "no column 'b', but a"),
        (lambda: from_rows([{"a": 1}, {}], features="a", labels="a"), "not of dicts with equal"),
        (
            lambda: from_rows({"a": [[1], [1, 2]], "b": [0, 1]}, features="a", labels="b"),
            "give entries of equal shapes",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_rows_of_images_frames_and_words():
    images = [Image.fromarray(x[..., 0]) for x in X[:6]]
    x, y = from_rows({"image": images, "label": Y[:6].tolist()}, features="image", labels="label")
    np.testing.assert_array_equal(x, X[:6])
    np.testing.assert_array_equal(y, Y[:6])
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0], "c": ["z", "m"], "d": [0.5, 0.25]})
    x, y = from_rows(frame, features=["a", "b"], labels="c")
    assert (x.tolist(), y.tolist()) == ([[1.0, 3.0], [2.0, 4.0]], [1, 0])
    assert from_rows(frame, features=["a"], labels="d")[1].tolist() == [0.5, 0.25]
    records = from_rows(frame.to_dict("records"), features=["a", "b"], labels="c")
    assert all(map(np.array_equal, records, (x, y)))
