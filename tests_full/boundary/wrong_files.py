"""More wrong files of data for rules of refusal that `tests/boundary` tests once."""

import numpy as np

from fedjax_mm.data import load_cifar, load_leaf
from tests.boundary.wrong_files import (
    ARRAYS,
    CIFAR_100,
    IMAGE,
    NAN,
    PIXELS,
    TEXT,
    X,
    Y,
    cifar,
    leaf,
    npz,
)

CASES = {
    "cifar empty": (
        cifar("cifar-10", "test_batch.bin", b""),
        "test_batch.bin: record 0 is cut off: a record has 3073 bytes, there are 0",
    ),
    "cifar fine label 100": (
        cifar("cifar-100", "train.bin", bytes([0, 100]) + IMAGE),
        r"train.bin: record 0 has the fine label 100, outside 0 \.\.\. 99",
    ),
    "cifar coarse label 20": (
        cifar("cifar-100", "test.bin", bytes([20, 0]) + IMAGE),
        r"test.bin: record 0 has the coarse label 20, outside 0 \.\.\. 19; give the files of",
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
    "cifar labels unknown": (
        cifar("cifar-100", "train.bin", CIFAR_100["train.bin"], labels="all"),
        "labels is 'all'; it must be 'fine' or 'coarse'",
    ),
    "npz empty": (npz(b""), "a.npz: not a file of arrays"),
    "npz cut off": (npz(b"PK\3\4" + bytes(40)), "a.npz: not a file of arrays"),
    "npz of other names": (
        npz(**dict.fromkeys(ARRAYS), X=X, y=Y),
        "a.npz: no array x_train; .* there is X, y",
    ),
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
