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
    "cifar empty": (
        cifar("cifar-10", "test_batch.bin", b""),
        "test_batch.bin: record 0 is cut off: a record has 3073 bytes, there are 0",
    ),
    "cifar label 10": (
        cifar("cifar-10", "data_batch_1.bin", bytes([1]) + IMAGE + bytes([10]) + IMAGE),
        r"data_batch_1.bin: record 1 has the fine label 10, outside 0 \.\.\. 9",
    ),
    "cifar fine label 100": (
        cifar("cifar-100", "train.bin", bytes([0, 100]) + IMAGE),
        r"train.bin: record 0 has the fine label 100, outside 0 \.\.\. 99",
    ),
    "cifar coarse label 20": (
        cifar("cifar-100", "test.bin", bytes([20, 0]) + IMAGE),
        r"test.bin: record 0 has the coarse label 20, outside 0 \.\.\. 19; give the files of",
    ),
    "cifar file missing": (
        cifar("cifar-10", "data_batch_5.bin", None),
        r"no data_batch_5.bin in .* or .*cifar-10-batches-bin",
        FileNotFoundError,
    ),
    "files of cifar-100 as cifar-10": (
        cifar("cifar-100", "train.bin", CIFAR_100["train.bin"], dataset="cifar-10"),
        r"no data_batch_1.bin in .*; there is train.bin, of cifar-100: ask for 'cifar-100'",
        FileNotFoundError,
    ),
    "cifar-100 instead of cifar-10": (
        lambda: load_cifar(".", dataset="cifar"),
        "dataset is 'cifar'; it must be 'cifar-10' or 'cifar-100'",
    ),
    "cifar-10 with coarse labels": (
        cifar("cifar-10", "test_batch.bin", CIFAR["test_batch.bin"], labels="coarse"),
        "labels is 'coarse', but cifar-10 has one kind of labels; leave it out",
    ),
    "cifar labels unknown": (
        cifar("cifar-100", "train.bin", CIFAR_100["train.bin"], labels="all"),
        "labels is 'all'; it must be 'fine' or 'coarse'",
    ),
    "npz missing": (lambda: load_npz("nowhere.npz"), "no nowhere.npz in", FileNotFoundError),
    "npz of text": (npz(b"x_train = 3"), "a.npz: not a file of arrays"),
    "npz empty": (npz(b""), "a.npz: not a file of arrays"),
    "npz cut off": (npz(b"PK\3\4" + bytes(40)), "a.npz: not a file of arrays"),
    "npz without tests": (
        npz(x_test=None, y_test=None),
        "a.npz: no array x_test; give x_train, y_train, x_test, y_test, there is x_train, y_train",
    ),
    "npz of other names": (
        npz(**dict.fromkeys(ARRAYS), X=X, y=Y),
        "a.npz: no array x_train; .* there is X, y",
    ),
    "npz longer than its labels": (npz(y_train=Y[:5]), r"a.npz: X has shape \(6, 4\) and y"),
    "npz with NaN": (npz(x_train=NAN), "a.npz: X is not finite in 1 of 6 examples, .* row 3"),
    "npz labels from 1": (npz(y_train=Y + 1, y_test=Y[:2] + 1), "labels go up to 3, but none is 0"),
    "npz labels text": (npz(y_train=np.array(list("abcabc"))), "y has type <U1; give labels"),
    "npz other tests": (npz(x_test=X[:2, :3]), r"of X has shape \(4,\), but one of X_test \(3,\)"),
    "npz classes too few": (npz(num_classes=2), "a.npz: a label is 2, but num_classes is 2"),
    "npz classes -1": (npz(num_classes=-1), "num_classes is -1; it must be"),
    "femnist of other sizes": (
        leaf("femnist", [[0.0] * 100], [3]),
        r"user 'ann': x has shape \(100,\); images of FEMNIST have 784",
    ),
    "femnist as bytes": (leaf("femnist", [[255] * 784], [3]), "'ann': x must be bytes divided by"),
    "femnist standardized": (leaf("femnist", [[-0.5] * 784], [3]), "'ann': x must be bytes divide"),
    "femnist of other greys": (leaf("femnist", [[0.3] + [0.0015] * 783], [3]), "must be bytes div"),
    "femnist label 62": (leaf("femnist", PIXELS, [62]), "there is a label 62; num_classes is 62"),
    "femnist label -1": (leaf("femnist", PIXELS, [-1]), "'ann': y has -1 in row 0; give labels"),
    "femnist texts": (leaf("femnist", [TEXT], ["a"]), "'ann': x has type <U80; give numbers"),
    "shakespeare of numbers": (
        leaf("shakespeare", [[1] * 80], ["a"]),
        r"user 'ann': x\[0\] must be a text of 80 characters",
    ),
    "shakespeare too short": (
        leaf("shakespeare", [TEXT, TEXT[1:]], ["a", "b"]),
        r"user 'ann': x\[1\] must be a text of 80 characters",
    ),
    "shakespeare without a next character": (
        leaf("shakespeare", [TEXT], [""]),
        r"user 'ann': y\[0\] must be a text of 1 character",
    ),
    "shakespeare of other characters": (
        leaf("shakespeare", [TEXT, TEXT[1:] + "é"], ["a", "b"]),
        r"user 'ann': x\[1\] has 'é', not in LEAF's vocabulary",
    ),
    "shakespeare with a control character": (
        leaf("shakespeare", [TEXT], ["\0"]),
        r"user 'ann': y\[0\] has '\\x00', not in LEAF's vocabulary",
    ),
    "leaf of an unknown form": (
        lambda: load_leaf(".", dataset="reddit"),
        "dataset is 'reddit'; it must be 'femnist'.*'shakespeare'",
    ),
}
