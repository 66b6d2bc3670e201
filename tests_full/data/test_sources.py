"""Readers of IDX, LEAF and CelebA files, damaged files, and the bundled digits."""

import gzip
import io
import json
import os
import pathlib
import struct
import tracemalloc
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from PIL import Image

from fedjax_mm.data import idx as idx_module
from fedjax_mm.data.celeba import load_celeba
from fedjax_mm.data.digits import digits
from fedjax_mm.data.idx import load_idx, read_idx
from fedjax_mm.data.leaf import load_leaf

DATA = pathlib.Path(idx_module.__file__).parent

# IDX


def idx(code, shape, body):
    return bytes([0, 0, code, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + body


IDX_FILES = {
    "bytes": (idx(8, (2, 3), bytes(range(6))), np.arange(6, dtype=np.uint8).reshape(2, 3)),
    "signed": (idx(9, (2,), b"\xff\x02"), np.array([-1, 2], np.int8)),
    "short": (idx(11, (2,), b"\x01\x02\xff\xfe"), np.array([258, -2], np.int16)),
    "int": (idx(12, (1, 1), b"\x00\x01\x00\x00"), np.array([[65536]], np.int32)),
    "float": (idx(13, (2,), struct.pack(">2f", 0.5, -3)), np.array([0.5, -3], np.float32)),
    "double": (idx(14, (1,), struct.pack(">d", 0.1)), np.array([0.1])),
    "empty": (idx(8, (0, 28, 28), b""), np.empty((0, 28, 28), np.uint8)),
}


@pytest.mark.parametrize("name", IDX_FILES)
@pytest.mark.parametrize("compressed", [False, True])
def test_idx_files_load_exactly(name, compressed, tmp_path):
    raw, expected = IDX_FILES[name]
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(raw) if compressed else raw)
    found = read_idx(path)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype
    assert found.dtype.isnative
    assert found.flags.writeable


FOUR = idx(8, (4, 2, 2), bytes(16))
COMPRESSED = gzip.compress(FOUR, mtime=0)  # names of tests must not depend on the time


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not an IDX file: it begins with nothing"),
        (b"\x89PNG" + bytes(20), "not an IDX file: it begins with 89 50 4e 47"),
        (b"\0\0\x07\x01" + bytes(20), "not an IDX file: it begins with 00 00 07 01"),
        (b"\0\0\x08\x00", "not an IDX file"),
        (FOUR[:10], "header: buffer is smaller than requested size"),
        (
            FOUR[:-1],
            "record 3 of 4 is cut off: the header declares 16 bytes of values, but there are 1",
        ),
        (FOUR[:-9], "record 1 of 4 is cut off"),
        (FOUR[:16], "record 0 of 4 is cut off"),
        (idx(8, (2**32 - 1, 2**32 - 1), b"12"), "the header declares .* bytes, but .* are free"),
        (gzip.compress(FOUR + bytes(10**6), mtime=0), "bytes follow the last of 4 records"),
        (FOUR + b"12", "bytes follow the last of 4 records"),
        (COMPRESSED[:-9], "the file is damaged: "),
        (COMPRESSED[:-6] + bytes(6), "the file is damaged: "),
    ],
)
def test_damaged_idx_files_are_refused(raw, message, tmp_path):
    path = tmp_path / "damaged"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=message) as error:
        read_idx(path)
    assert str(path) in str(error.value)


def test_a_compressed_file_is_read_up_to_its_declared_size(tmp_path):
    """A small compressed file may contain any number of zeros."""
    path = tmp_path / "bomb"
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(idx(8, (60, 8, 8), bytes(60 * 64)))
        for _ in range(200):
            file.write(bytes(2**20))
    tracemalloc.start()
    with pytest.raises(ValueError, match="bytes follow the last of 60 records"):
        read_idx(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**21


def test_images_beyond_the_free_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    path = tmp_path / "large"
    path.write_bytes(idx(8, (4, 64), bytes(256)))
    message = "the header declares 256 bytes, but 100 are free"
    with pytest.raises(ValueError, match=message):
        read_idx(path)


def test_a_named_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: not a regular file"):
        read_idx(tmp_path / "pipe")


def test_images_without_pixels_are_refused(tmp_path):
    write_pool(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(8, (2, 0, 0), b""))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte: 2 images of \(0, 0\) pixels"):
        load_idx(tmp_path)


def write_pool(folder, train="train", test="t10k", first=0, suffix=""):
    """Writes two training images and one test image of 2 x 3 pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    pack = gzip.compress if suffix else bytes
    for split, n in ((train, 2), (test, 1)):
        images, labels = (
            f"{split}-{kind}-ubyte{suffix}" for kind in ("images-idx3", "labels-idx1")
        )
        (folder / images).write_bytes(pack(idx(8, (n, 2, 3), bytes(range(6 * n)))))
        label_bytes = bytes([first + 1, first][-n:])
        (folder / labels).write_bytes(pack(idx(8, (n,), label_bytes)))


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("folder", ["", "fashion-mnist"])
def test_the_official_file_names_are_found(suffix, folder, tmp_path):
    write_pool(tmp_path / folder, suffix=suffix)
    pool = load_idx(tmp_path, dataset="fashion-mnist")
    assert (pool.name, pool.kind, pool.num_classes) == ("fashion-mnist", "real", 10)
    np.testing.assert_array_equal(pool.train[0], np.arange(12).reshape(2, 2, 3, 1))
    np.testing.assert_array_equal(pool.train[1], [1, 0])
    np.testing.assert_array_equal(pool.test[0], np.arange(6).reshape(1, 2, 3, 1))
    assert [array.dtype for array in pool.train] == [np.uint8, np.int32]


@pytest.mark.parametrize(
    ("split", "first", "num_classes"), [("byclass", 0, 62), ("balanced", 0, 47), ("letters", 1, 26)]
)
def test_emnist_is_transposed_and_labelled_from_zero(split, first, num_classes, tmp_path):
    write_pool(tmp_path, f"emnist-{split}-train", f"emnist-{split}-test", first, ".gz")
    pool = load_idx(tmp_path, dataset="emnist", split=split)
    np.testing.assert_array_equal(pool.train[0][0, ..., 0], [[0, 3], [1, 4], [2, 5]])
    np.testing.assert_array_equal(pool.train[1], [1, 0])
    assert (pool.num_classes, pool.train[0].shape) == (num_classes, (2, 3, 2, 1))


@pytest.mark.parametrize(
    ("file", "raw", "message"),
    [
        ("train-labels-idx1-ubyte", idx(8, (3,), bytes(3)), "2 images, but 3 labels"),
        ("train-labels-idx1-ubyte", idx(8, (2,), b"\x00\x0a"), "record 1 is label 10, outside 0"),
        ("t10k-labels-idx1-ubyte", idx(8, (1, 1), b"\x00"), "2 dimensions of uint8"),
        ("t10k-images-idx3-ubyte", idx(9, (1, 2, 3), bytes(6)), "3 dimensions of int8"),
        ("t10k-images-idx3-ubyte", idx(8, (1, 2, 3), bytes(5)), "record 0 of 1 is cut off"),
    ],
)
def test_mismatched_idx_files_are_refused(file, raw, message, tmp_path):
    write_pool(tmp_path)
    (tmp_path / file).write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        load_idx(tmp_path)


def test_missing_or_unknown_idx_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no train-images-idx3-ubyte \(or .*\.gz\) in"):
        load_idx(tmp_path)
    with pytest.raises(ValueError, match="dataset is 'cifar'"):
        load_idx(tmp_path, dataset="cifar")
    with pytest.raises(ValueError, match="split is 'all'"):
        load_idx(tmp_path, dataset="emnist", split="all")


@pytest.mark.skipif("FEDJAX_MM_DATA" not in os.environ, reason="FEDJAX_MM_DATA names no folder")
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_real_files_are_read(name):
    pool = load_idx(os.environ["FEDJAX_MM_DATA"], dataset=name)
    assert pool.train[0].shape == (60_000, 28, 28, 1)
    assert pool.test[0].shape == (10_000, 28, 28, 1)
    if name == "mnist":
        assert pool.test[1][:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
        assert np.bincount(pool.train[1]).tolist() == [
            *(5923, 6742, 5958, 6131, 5842),
            *(5421, 5918, 6265, 5851, 5949),
        ]
        assert pool.test[0][0].sum() == 18_454
    else:
        assert np.bincount(pool.test[1]).tolist() == [1000] * 10


# Digits


def test_digits_equal_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    source = load_digits()
    with np.load(DATA / "digits.npz") as kept:
        np.testing.assert_array_equal(kept["images"], source.images)
        np.testing.assert_array_equal(kept["labels"], source.target)


def test_digits_have_a_stratified_split():
    pool = digits(test_fraction=0.25, seed=1)
    everything = np.concatenate([pool.train[0], pool.test[0]])
    assert (pool.kind, everything.shape, everything.dtype) == ("real", (1797, 8, 8, 1), np.uint8)
    assert (everything.min(), everything.max()) == (0, 255)
    total = np.bincount(np.concatenate([pool.train[1], pool.test[1]]))
    assert total.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.abs(np.bincount(pool.test[1]) - total / 4).max() <= 0.5
    np.testing.assert_array_equal(pool.test[0], digits(test_fraction=0.25, seed=1).test[0])
    assert not np.array_equal(pool.test[0], digits(test_fraction=0.25, seed=2).test[0])
    with pytest.raises(ValueError, match="test_fraction is 1"):
        digits(test_fraction=1)


# LEAF


def leaf_file(**users):
    """The content of a LEAF file from user=(x, y)."""
    return {
        "users": list(users),
        "hierarchies": ["ignored"],
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }


A, B, C = ([[1, 2], [3, 4.5]], [0, 2]), ([[5, 6]], [1]), ([[7, 8], [9, 10], [11, 12]], [1, 1, 0])


def write_leaf(folder, **files):
    """Writes train_0, test_1, ... into the folders train and test."""
    for name, content in files.items():
        split, number = name.split("_")
        (folder / split).mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / split / f"all_data_{number}.json").write_text(text)


def test_leaf_files_are_merged_in_the_order_of_the_training_users(tmp_path):
    write_leaf(
        tmp_path,
        train_0=leaf_file(b=B, a=A),
        train_1=leaf_file(c=C),
        test_0=leaf_file(c=A, a=B),
        test_1=leaf_file(b=C),
    )
    data = load_leaf(tmp_path, name="toy")
    assert (data.name, data.kind, data.num_classes) == ("toy", "real", 3)
    for split, order in ((data.train, (B, A, C)), (data.test, (C, B, A))):
        x, y = split.examples
        np.testing.assert_array_equal(x, np.concatenate([user[0] for user in order]))
        np.testing.assert_array_equal(y, np.concatenate([user[1] for user in order]))
        assert split.counts.tolist() == [len(user[1]) for user in order]
        assert (x.dtype, y.dtype) == ("float32", "int32")


def wrong(change):
    content = leaf_file(a=A, b=B)
    change(content)
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"users": ["a"', "not a LEAF file: "),
        ("[1, 2]", "not a LEAF file: "),
        ({"users": [], "num_samples": []}, "not a LEAF file: user_data: Field required"),
        (leaf_file(), "the files have no users"),
        (
            wrong(lambda c: c["num_samples"].reverse()),
            r"user 'a': the lengths of x and y, and num_samples, are \[2, 2, 1\]",
        ),
        (
            wrong(lambda c: c["num_samples"].pop()),
            "num_samples and user_data do not have the same users",
        ),
        (wrong(lambda c: c["users"].__setitem__(1, "z")), "user_data do not have the same users"),
        (wrong(lambda c: c["users"].__setitem__(1, "a")), "user_data do not have the same users"),
        (wrong(lambda c: c["user_data"]["b"].pop("y")), r"user_data\.b\.y: Field required"),
        (
            wrong(lambda c: c["user_data"]["b"].update(x=["one tweet"])),
            "user 'b': x has type <U9; give numbers",
        ),
        (
            wrong(lambda c: c["user_data"]["b"].update(x=[None])),
            "user 'b': x has type object; give numbers",
        ),
        (
            wrong(lambda c: c["user_data"]["a"].update(x=[[1], [2, 3]])),
            "user 'a': x has rows of different lengths",
        ),
        (wrong(lambda c: c["user_data"]["b"].update(x=[[1, float("nan")]])), "x is not finite"),
        (wrong(lambda c: c["user_data"]["b"].update(x=[[1, 2, 3]])), r"'b': x has shape \(3,\)"),
        (wrong(lambda c: c["user_data"]["b"].update(y=[0.5])), "user 'b': y has 0.5 in row 0"),
        (wrong(lambda c: c["user_data"]["b"].update(y=[-1])), "user 'b': y has -1 in row 0"),
        (
            wrong(lambda c: c["user_data"]["b"].update(y=[[1]])),
            "user 'b': there must be numbers x, and one number y",
        ),
        (
            wrong(lambda c: c["user_data"]["b"].update(x=5)),
            r"user_data\.b\.x: Input should be a valid list",
        ),
        (leaf_file(a=A, b=([], [])), r"user_data\.b\.x: List should have at least 1 item"),
        (
            wrong(lambda c: c["user_data"]["b"].update(y=[True])),
            "user 'b': there must be numbers x",
        ),
        (
            wrong(lambda c: c["num_samples"].__setitem__(1, True)),
            r"num_samples\.1: Input should be",
        ),
        ("[" * 10**5, "not a LEAF file: maximum recursion depth"),
        (leaf_file(a=A), "train: user 'b' is missing"),
        (leaf_file(a=A, b=B, c=C), "test: user 'c' is missing"),
    ],
)
def test_wrong_leaf_files_are_refused(content, message, tmp_path):
    write_leaf(tmp_path, train_0=content, test_0=leaf_file(a=A, b=B))
    with pytest.raises(ValueError, match=message) as error:
        load_leaf(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_most_of_leafs_classes_must_occur(tmp_path):
    users = {"a": ([[1, 2]] * 3, [0, 1, 10**6])}
    write_leaf(tmp_path, train_0=leaf_file(**users), test_0=leaf_file(**users))
    message = "the largest label is 1000000, but only 3 labels occur; number them 0 ... 2, or give"
    with pytest.raises(ValueError, match=message):
        load_leaf(tmp_path)
    assert load_leaf(tmp_path, num_classes=10**6 + 1).num_classes == 10**6 + 1
    with pytest.raises(ValueError, match="there is a label 1000000; num_classes is 10"):
        load_leaf(tmp_path, num_classes=10)


def test_a_leaf_user_in_two_files_and_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train has no \.json files"):
        load_leaf(tmp_path)
    write_leaf(tmp_path, train_0=leaf_file(a=A), train_1=leaf_file(a=B), test_0=leaf_file(a=A))
    with pytest.raises(ValueError, match=r"user .a.: already in all_data_0\.json"):
        load_leaf(tmp_path)


# CelebA

COUNTS = {7: 6, 3: 9, 12: 4, 5: 8}
"""The number of images of each celebrity."""
NAMES = ["Bald", "Smiling", "Male"]


@pytest.fixture
def celeba(tmp_path):
    """A tiny CelebA in the official formats, whose image i has the uniform grey level 5 i."""
    owner = np.random.default_rng(0).permutation(np.repeat(list(COUNTS), list(COUNTS.values())))
    labels = np.stack([np.arange(27) % 9 == 0, np.arange(27) % 3 == 0, owner > 4], axis=1)
    files = [f"{i + 1:06}.jpg" for i in range(27)]
    rows = [
        f"{f}  " + " ".join(f"{2 * v - 1:2}" for v in row)
        for f, row in zip(files, labels, strict=True)
    ]
    text = "\n".join(["27", " ".join(NAMES) + " ", *rows, ""])
    (tmp_path / "list_attr_celeba.txt").write_text(text)
    pairs = [f"{f} {k}" for f, k in zip(files, owner, strict=True)]
    (tmp_path / "identity_CelebA.txt").write_text("\n".join([*pairs, ""]))
    (tmp_path / "img_align_celeba").mkdir()
    for i, file in enumerate(files):
        Image.new("RGB", (178, 218), (5 * i,) * 3).save(tmp_path / "img_align_celeba" / file)
    return tmp_path, owner, labels


def images_of(data):
    """The image numbers of each client, and the labels of each image."""
    clients, labels = [set() for _ in data.train.counts], {}
    for split in (data.train, data.test):
        x, y = map(np.asarray, split.examples)
        assert np.ptp(x, axis=(1, 2, 3)).max() <= 1
        number = np.rint(x.mean(axis=(1, 2, 3)) / 5).astype(int)
        owner = np.repeat(np.arange(len(split.counts)), split.counts)
        for k, i, row in zip(owner, number, y, strict=True):
            assert i not in labels
            clients[k].add(int(i))
            labels[int(i)] = row.tolist()
    return clients, labels


def test_celeba_clients_are_celebrities_with_enough_images(celeba):
    folder, owner, truth = celeba
    seen = []
    data = load_celeba(
        folder,
        attributes=["Male", "Bald"],
        image_size=20,
        test_fraction=0.25,
        progress=lambda done, total: seen.append((done, total)),
    )
    x, y = data.train.examples
    assert (x.dtype, x.shape[1:], y.dtype, y.shape[1]) == ("uint8", (20, 20, 3), "int32", 2)
    assert (data.name, data.kind, data.num_classes) == ("celeba", "real", 2)
    assert data.test.counts.tolist() == [2, 2, 2]  # of 9, 8 and 6 images
    clients, labels = images_of(data)
    assert clients == [set(np.flatnonzero(owner == k).tolist()) for k in (3, 5, 7)]
    for image, row in labels.items():
        assert row == [truth[image, 2], truth[image, 0]]
    assert seen == [(i, 23) for i in range(1, 24)]


def test_celeba_clients_are_drawn_at_random(celeba):
    folder, owner, _ = celeba
    drawn = {
        tuple(
            sorted(
                int(owner[min(mine)])
                for mine in images_of(
                    load_celeba(folder, attributes=["Bald"], image_size=4, num_clients=2, seed=seed)
                )[0]
            )
        )
        for seed in range(12)
    }
    assert drawn == {(3, 5), (3, 7), (5, 7)}


@pytest.mark.parametrize("num_clients", [None, 2])
@pytest.mark.parametrize("min_images", [2, 4])
def test_celeba_can_be_balanced(celeba, num_clients, min_images):
    folder, owner, _ = celeba
    made = 0
    for seed in range(12):
        try:
            data = load_celeba(
                folder,
                attributes=["Smiling"],
                image_size=4,
                min_images=min_images,
                balance=True,
                num_clients=num_clients,
                test_fraction=0.5,
                seed=seed,
            )
        except ValueError as error:
            if "min_images" in str(error):
                continue
            raise
        clients, labels = images_of(data)
        positive = sum(row[0] for row in labels.values())
        assert 2 * positive == len(labels) > 0
        assert min(map(len, clients)) >= min_images
        assert num_clients in (None, len(clients))
        assert all(len(set(owner[list(mine)])) == 1 for mine in clients)
        made += 1
    assert made > 2


def test_decoded_images_are_cached(celeba):
    folder, *_ = celeba

    def load(**arguments):
        seen = []
        data = load_celeba(
            folder,
            **{"attributes": ["Male"], "image_size": 4, "num_clients": 1} | arguments,
            progress=lambda done, total: seen.append(done),
        )
        return len(seen), np.asarray(data.train.examples[0])

    decoded, images = load()
    assert decoded > 0
    again, same = load(attributes=["Bald"])
    assert again == 0
    np.testing.assert_array_equal(images, same)
    assert load(image_size=5)[0] > 0
    assert load(num_clients=3)[0] > 0
    assert load(cache=folder / "elsewhere")[0] > 0
    kept = sorted((folder / "decoded").iterdir())
    assert {path.suffix for path in kept} == {".npy"}
    assert len(kept) == 3
    for path in kept:
        path.write_bytes(path.read_bytes()[:-1])
    assert load()[0] == decoded, "a damaged cache is decoded again"
    np.testing.assert_array_equal(load()[1], images)
    for path in (folder / "img_align_celeba").iterdir():
        Image.new("RGB", (30, 30), (200, 0, 0)).save(path)
    changed, red = load()
    assert changed == decoded
    assert (red[..., 0] > 150).all()


def replace_line(folder, file, number, text):
    path = folder / file
    lines = path.read_text().splitlines()
    lines[number - 1] = text
    path.write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("damage", "arguments", "error", "message"),
    [
        (
            None,
            {"attributes": ["smiling"]},
            ValueError,
            "'smiling' is unknown; did you mean Smiling",
        ),
        (None, {"attributes": ["X"]}, ValueError, "'X' is unknown; there are Bald, Smiling, Male"),
        (None, {"attributes": []}, ValueError, "attributes is empty"),
        (None, {"num_clients": 9}, ValueError, "3 celebrities have 5 images or more; lower num"),
        (None, {"min_images": 1}, ValueError, "min_images is 1"),
        (None, {"image_size": 0}, ValueError, "image_size is 0"),
        (None, {"balance": True, "attributes": NAMES}, ValueError, "exactly one attribute"),
        (None, {"balance": True, "min_images": 9, "attributes": ["Bald"]}, ValueError, "0 celebr"),
        (
            ("list_attr_celeba.txt", 1, "28"),
            {},
            ValueError,
            "line 1 declares 28 images, but there are 27",
        ),
        (("list_attr_celeba.txt", 1, "Bald"), {}, ValueError, "invalid literal for int"),
        (
            ("list_attr_celeba.txt", 5, "000003.jpg 1 1"),
            {},
            ValueError,
            "requires 4 columns but 3 were found at row 3",
        ),
        (
            ("list_attr_celeba.txt", 5, "000003.jpg 1 1 0"),
            {},
            ValueError,
            "000003.jpg has values other than 1 and -1",
        ),
        (
            ("list_attr_celeba.txt", 5, "../../x.jpg 1 1 1"),
            {},
            ValueError,
            "list_attr_celeba.txt: '../../x.jpg' is a path; give a file's name",
        ),
        (
            ("identity_CelebA.txt", 4, "000004.jpg"),
            {},
            ValueError,
            "requires 2 columns but 1 were found at row 4",
        ),
        (("identity_CelebA.txt", 4, "x.jpg 3"), {}, ValueError, "no line for 000004.jpg"),
    ],
)
def test_wrong_celeba_is_refused(celeba, damage, arguments, error, message):
    folder, *_ = celeba
    if damage:
        replace_line(folder, *damage)
    with pytest.raises(error, match=message):
        load_celeba(folder, **{"attributes": ["Bald"], "image_size": 4} | arguments)


def test_missing_and_unreadable_images(celeba):
    folder, owner, _ = celeba
    images = sorted((folder / "img_align_celeba").iterdir())
    victim = images[int(np.flatnonzero(owner == 5)[2])]
    whole = victim.read_bytes()
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "PNG")
    for raw in (b"not an image", whole[: len(whole) // 2], buffer.getvalue()[:-24]):
        victim.write_bytes(raw)
        with pytest.raises(ValueError, match=f"{victim.name}: unreadable image"):
            load_celeba(folder, attributes=["Bald"], image_size=4)
    victim.unlink()
    with pytest.raises(FileNotFoundError, match=f"no {victim.name} in "):
        load_celeba(folder, attributes=["Bald"], image_size=4)
    assert not list(pathlib.Path(folder).glob("decoded/*"))
    (folder / "identity_CelebA.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"no identity_CelebA\.txt in "):
        load_celeba(folder, attributes=["Bald"])
