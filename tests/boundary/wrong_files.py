"""Wrong files of datasets: name, call and error message."""

import json
import tempfile
from pathlib import Path

import numpy as np

from fedjax_mm.data import load_cifar, load_leaf, load_npz

IMAGE = bytes(3072)
CIFAR = {f"data_batch_{i}.bin": bytes([i]) + IMAGE for i in range(1, 6)}
CIFAR |= {"test_batch.bin": bytes([9]) + IMAGE}
CIFAR_100 = dict.fromkeys(("train.bin", "test.bin"), bytes([19, 99]) + IMAGE)
X, Y = np.zeros((6, 4)), np.arange(6) % 3
ARRAYS = {"x_train": X, "y_train": Y, "x_test": X[:2], "y_test": Y[:2]}
NAN = np.where(np.arange(24).reshape(6, 4) == 13, np.nan, 0)


def cifar(source, file, content, **options):
    """A call of `load_cifar` with one file replaced, or missing."""

    def call():
        folder = Path(tempfile.mkdtemp())
        whole = CIFAR if source == "cifar-10" else CIFAR_100
        for each, right in (whole | {file: content}).items():
            if each == file and content is None:
                continue
            (folder / each).write_bytes(right)
        load_cifar(folder, **{"dataset": source} | options)

    return call


def npz(content=None, *, num_classes=None, **changes):
    """A call of `load_npz` with changed arrays, or with other bytes."""

    def call():
        path = Path(tempfile.mkdtemp(), "a.npz")
        if content is None:
            arrays = {k: v for k, v in (ARRAYS | changes).items() if v is not None}
            np.savez(path, **arrays)
        else:
            path.write_bytes(content)
        load_npz(path, num_classes=num_classes)

    return call


def leaf(dataset, x, y):
    """A call of `load_leaf` with one user, Ann."""

    def call():
        folder = Path(tempfile.mkdtemp())
        user = {"ann": {"x": x, "y": y}}
        content = {"users": ["ann"], "num_samples": [len(y)], "user_data": user}
        for split in ("train", "test"):
            (folder / split).mkdir()
            (folder / split / "data.json").write_text(json.dumps(content))
        load_leaf(folder, dataset=dataset)

    return call


PIXELS, TEXT = [[0.0] * 784], " " * 80

CASES = {
    "cifar cut off": (
        cifar("cifar-10", "data_batch_3.bin", bytes([1]) + IMAGE + b"\1\2"),
        "data_batch_3.bin: record 1 is cut off: a record has 3073 bytes, there are 2",
    ),
    "cifar label 10": (
        cifar("cifar-10", "data_batch_1.bin", bytes([1]) + IMAGE + bytes([10]) + IMAGE),
        r"data_batch_1.bin: record 1 has the fine label 10, outside 0 \.\.\. 9",
    ),
    "cifar file missing": (
        cifar("cifar-10", "data_batch_5.bin", None),
        r"no data_batch_5.bin in .* or .*cifar-10-batches-bin",
        FileNotFoundError,
    ),
    "cifar-10 with coarse labels": (
        cifar("cifar-10", "test_batch.bin", CIFAR["test_batch.bin"], labels="coarse"),
        "labels is 'coarse', but cifar-10 has one kind of labels; leave it out",
    ),
    "npz missing": (lambda: load_npz("nowhere.npz"), "no nowhere.npz in", FileNotFoundError),
    "npz of text": (npz(b"x_train = 3"), "a.npz: not a file of arrays"),
    "npz without tests": (
        npz(x_test=None, y_test=None),
        "a.npz: no array x_test; give x_train, y_train, x_test, y_test, there is x_train, y_train",
    ),
    "npz longer than its labels": (npz(y_train=Y[:5]), r"a.npz: X has shape \(6, 4\) and y"),
    "femnist label 62": (leaf("femnist", PIXELS, [62]), "there is a label 62; num_classes is 62"),
}
