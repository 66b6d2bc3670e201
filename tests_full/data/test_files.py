"""Readers of CIFAR's binary files, NumPy files, and LEAF's FEMNIST and Shakespeare."""

import io
import zipfile
from types import SimpleNamespace

import jax
import numpy as np
import psutil
import pytest

from fedjax_mm import Experiment, fedavg, local_sgd, mfa_rr, simulate
from fedjax_mm.data import load_cifar, load_leaf, load_npz
from fedjax_mm.data.leaf import CHARACTERS
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.tasks import CharacterGRU, classification
from tests.experiments.test_experiment import learning
from tests_full.data.test_sources import leaf_file, write_leaf

RNG = np.random.default_rng(0)

# CIFAR

CIFAR_10 = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
CIFAR_100 = ["train.bin", "test.bin"]


def record(labels, image):
    """The bytes of the labels and of an image [32, 32, 3] by channel and row."""
    planes = (image[row, column, c] for c in range(3) for row in range(32) for column in range(32))
    return bytes(labels) + bytes(planes)


def write_cifar(folder, name="cifar-10", number=2):
    """Writes the files of a dataset, and returns the images and labels of each file."""
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = [], []
    for file in CIFAR_10 if name == "cifar-10" else CIFAR_100:
        x = RNG.integers(256, size=(number, 32, 32, 3), dtype=np.uint8)
        y = [[i % 10] if name == "cifar-10" else [i % 20, 99 - i] for i in range(number)]
        (folder / file).write_bytes(b"".join(map(record, y, x)))
        images.append(x)
        labels.append(y)
    return images, labels


@pytest.mark.parametrize("folder", ["", "cifar-10-batches-bin"])
def test_cifar_10_is_read_with_channels_last(folder, tmp_path):
    images, labels = write_cifar(tmp_path / folder)
    pool = load_cifar(tmp_path)
    assert (pool.name, pool.kind, pool.num_classes) == ("cifar-10", "real", 10)
    np.testing.assert_array_equal(pool.train[0], np.concatenate(images[:5]))
    np.testing.assert_array_equal(pool.train[1], np.concatenate(labels[:5])[:, 0])
    np.testing.assert_array_equal(pool.test[0], images[5])
    assert [array.dtype for array in pool.test] == [np.uint8, np.int32]
    assert pool.train[0].flags.c_contiguous


@pytest.mark.parametrize(
    ("labels", "column", "title", "classes"),
    [("fine", 1, "cifar-100", 100), ("coarse", 0, "cifar-100, coarse", 20)],
)
def test_cifar_100_has_two_kinds_of_labels(labels, column, title, classes, tmp_path):
    images, written = write_cifar(tmp_path / "cifar-100-binary", "cifar-100", 3)
    pool = load_cifar(tmp_path, dataset="cifar-100", labels=labels)
    assert (pool.name, pool.num_classes) == (title, classes)
    for split, x, y in zip((pool.train, pool.test), images, written, strict=True):
        np.testing.assert_array_equal(split[0], x)
        np.testing.assert_array_equal(split[1], np.array(y)[:, column])


# Arrays


def arrays(**changes):
    """Ten training and four test examples of three classes."""
    x, y = RNG.normal(size=(14, 5)), np.arange(14) % 3
    whole = {"x_train": x[:10], "y_train": y[:10], "x_test": x[10:], "y_test": y[10:]}
    return {name: value for name, value in (whole | changes).items() if value is not None}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_read_with_the_types_of_federate(save, tmp_path):
    given = arrays(y_test=np.arange(4)[:, None] % 3, further=np.zeros(3))
    save(tmp_path / "stars.npz", **given)
    pool = load_npz(tmp_path / "stars.npz")
    assert (pool.name, pool.kind, pool.num_classes) == ("stars", "real", 3)
    np.testing.assert_array_equal(pool.train[0], given["x_train"].astype(np.float32))
    np.testing.assert_array_equal(pool.test[1], [0, 1, 2, 0])
    assert load_npz(tmp_path / "stars.npz", num_classes=7).num_classes == 7


def test_only_grey_images_of_bytes_get_a_channel(tmp_path):
    for kind, shape in (("uint8", (10, 4, 4, 1)), ("float32", (10, 4, 4))):
        x = RNG.integers(256, size=(14, 4, 4)).astype(kind)
        np.savez(tmp_path / f"{kind}.npz", **arrays(x_train=x[:10], x_test=x[10:]))
        pool = load_npz(tmp_path / f"{kind}.npz")
        assert (pool.train[0].shape, pool.train[0].dtype) == (shape, kind)
        np.testing.assert_array_equal(pool.train[0].ravel(), x[:10].ravel())


def test_arrays_larger_than_the_memory_are_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "large.npz", **arrays(x_train=np.zeros((10, 5000))))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**5))
    with pytest.raises(ValueError, match=r"the arrays have 400,\d+ bytes, but 100,000 are free"):
        load_npz(tmp_path / "large.npz")


def test_nothing_is_unpickled(tmp_path):
    objects = np.array([{"a": 1}, None], dtype=object)
    np.savez(tmp_path / "objects.npz", **arrays(y_test=objects))
    with pytest.raises(ValueError, match="not a file of arrays: Object arrays cannot be loaded"):
        load_npz(tmp_path / "objects.npz")


def test_a_file_without_an_array_is_refused(tmp_path):
    content = io.BytesIO()
    np.savez(content, **arrays(x_train=None))
    with zipfile.ZipFile(content, "a") as archive:
        archive.writestr("x_train.npy", b"no array")
    (tmp_path / "odd.npz").write_bytes(content.getvalue())
    with pytest.raises(ValueError, match=r"odd\.npz: not a file of arrays: an array is not"):
        load_npz(tmp_path / "odd.npz")


# FEMNIST and Shakespeare


def femnist_user(labels):
    """The data of a user as LEAF writes them, with bytes divided by 255, and the bytes."""
    pixels = RNG.integers(256, size=(len(labels), 784))
    return ((pixels / 255).tolist(), labels), pixels.astype(np.uint8)


def test_femnist_has_images_by_writer(tmp_path):
    (one, first), (two, second), (test, _) = map(femnist_user, ([0, 61], [35], [9]))
    write_leaf(
        tmp_path,
        train_0=leaf_file(f0000_14=one, f0001_41=two),
        test_0=leaf_file(f0000_14=test, f0001_41=test),
    )
    data = load_leaf(tmp_path, dataset="femnist")
    assert (data.name, data.kind, data.num_classes) == ("femnist", "real", 62)
    x, y = map(np.asarray, data.train.examples)
    np.testing.assert_array_equal(x.reshape(3, -1), np.concatenate([first, second]))
    assert (x.shape, x.dtype, y.tolist()) == ((3, 28, 28, 1), np.uint8, [0, 61, 35])
    assert data.train.counts.tolist() == [2, 1]
    assert load_leaf(tmp_path, dataset="femnist", name="mine").name == "mine"
    plain = load_leaf(tmp_path, num_classes=62).train.examples[0]
    assert (plain.shape, plain.dtype) == ((3, 784), np.float32)


LINE = "  That, that is, is." + " " * 60
PLAYS = leaf_file(HAMLET=([LINE, LINE[1:] + "\n"], ["\n", "}"]), EGEON=([LINE], ["a"]))


def test_shakespeare_has_characters_by_role(tmp_path):
    write_leaf(tmp_path, train_0=PLAYS, test_0=PLAYS)
    data = load_leaf(tmp_path, dataset="shakespeare")
    assert (data.name, data.num_classes) == ("shakespeare", len(CHARACTERS))
    assert len(set(CHARACTERS)) == 80
    x, y = map(np.asarray, data.train.examples)
    assert (x.shape, x.dtype, y.dtype) == ((3, 80), np.uint8, np.int32)
    assert ["".join(CHARACTERS[i] for i in row) for row in x] == [LINE, LINE[1:] + "\n", LINE]
    assert [CHARACTERS[i] for i in y] == ["\n", "}", "a"]
    assert CHARACTERS.index("a") == 53  # as in LEAF


def test_a_gru_learns_the_next_character(tmp_path):
    """Each of three texts repeats one character, so that chance is right in a third of cases."""
    texts = [letter * 80 for letter in "abc"]
    write_leaf(tmp_path, **dict.fromkeys(("train_0", "test_0"), leaf_file(X=(texts, list("abc")))))
    task = classification(load_leaf(tmp_path, dataset="shakespeare"), CharacterGRU(80, 4, 8))
    algorithm = fedavg(local_sgd(0.5, steps=20))
    run = jax.jit(lambda task: simulate(0, task, algorithm, mfa_rr(1, 1), 10, record_every=10)[1])
    trace = run(task)
    assert trace.metrics["test_accuracy"][-1, 0] == 1
    assert trace.metrics["loss"][-1, 0] < 0.2 < trace.metrics["loss"][0, 0]


# Experiments


def experiment(folder, task):
    """The task of an experiment with the files in a folder."""
    name = {"npz": "file"}.get(task["name"], "directory")
    place = folder / "some.npz" if name == "file" else folder
    return validate(Experiment, learning({name: str(place), **task})).task


def write_all(folder):
    for name in ("cifar-10", "cifar-100"):
        write_cifar(folder, name, 4)
    np.savez(folder / "some.npz", **arrays())
    user, _ = femnist_user([3, 4])
    for place, file in (("femnist", leaf_file(a=user)), ("shakespeare", PLAYS)):
        (folder / place).mkdir()
        write_leaf(folder / place, train_0=file, test_0=file)


@pytest.mark.parametrize(
    ("task", "place", "clients", "shape", "scale"),
    [
        ({"name": "cifar", "num_clients": 4, "model": "mlp"}, "", 4, (32, 32, 3), 1 / 255),
        (
            {"name": "cifar", "dataset": "cifar-100", "labels": "coarse", "num_clients": 2},
            *("", 2, (32, 32, 3), 1 / 255),
        ),
        (
            {"name": "npz", "num_clients": 2, "partition": {"name": "iid"}, "test_fraction": 0.5},
            *("", 2, (5,), None),
        ),
        ({"name": "leaf", "dataset": "femnist"}, "femnist", 1, (28, 28, 1), 1 / 255),
        ({"name": "leaf", "dataset": "shakespeare", "model": "gru"}, "shakespeare", 2, (80,), None),
    ],
)
def test_experiments_read_all_kinds_of_files(task, place, clients, shape, scale, tmp_path):
    write_all(tmp_path)
    config = experiment(tmp_path / place, task)
    built = config.build(config.data())
    assert built.num_clients == clients
    assert built.train.examples[0].shape[1:] == shape
    assert built.scale == (None if scale is None else pytest.approx(scale))
    key = jax.random.key(0)
    made = jax.eval_shape(lambda task: task.metrics(key, task.init(key)), built)
    assert "test_accuracy" in made


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"name": "cifar"}, r"no data_batch_1\.bin in"),
        ({"name": "cifar", "dataset": "cifar-100"}, r"no train\.bin in"),
        ({"name": "cifar", "labels": "coarse"}, "cifar-10 has one kind of labels"),
        (
            {"name": "cifar", "dataset": "cifar"},
            "task.dataset = 'cifar'.*'cifar-10' or 'cifar-100'",
        ),
        ({"name": "npz"}, r"no some\.npz in"),
        ({"name": "npz", "num_classes": -1}, "task.num_classes = -1"),
        ({"name": "leaf", "dataset": "reddit"}, "task.dataset = 'reddit'"),
        ({"name": "leaf", "dataset": "shakespeare"}, "'logistic', but examples are texts; .*'gru'"),
        (
            {"name": "leaf", "dataset": "femnist", "model": "gru"},
            "'gru', but examples are no texts",
        ),
        ({"name": "digits", "model": "gru"}, "'gru', but examples are no texts; choose another"),
    ],
)
def test_wrong_tables_are_refused(task, words, tmp_path):
    if task["name"] == "digits":
        with pytest.raises(ValueError, match=words):
            validate(Experiment, learning(task))
        return
    with pytest.raises(ValueError, match=words):
        experiment(tmp_path, task)


def test_windows_of_leafs_script_are_read_in_order(tmp_path):
    """LEAF's script slides a window over a line after 80 blanks."""
    line = " " * 80 + "Who's there?\n"
    texts, characters = zip(*((line[i : i + 80], line[i + 80]) for i in range(13)), strict=True)
    user = leaf_file(BERNARDO=(texts, characters))
    write_leaf(tmp_path, train_0=user, test_0=user)
    x, y = map(np.asarray, load_leaf(tmp_path, dataset="shakespeare").train.examples)
    assert "".join(CHARACTERS[i] for i in y) == "Who's there?\n"
    np.testing.assert_array_equal(x[1:, -1], y[:-1])
    np.testing.assert_array_equal(x[1:, :-1], x[:-1, 1:])
