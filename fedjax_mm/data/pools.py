"""Checked conversion of user arrays to a pool of examples."""

from typing import Any

import numpy as np

from fedjax_mm.checks.annotations import Count, check_argument, checked
from fedjax_mm.checks.values import described
from fedjax_mm.data.arrays import (
    array_of,
    check_finite,
    check_fits,
    check_labels,
    plain_array,
)
from fedjax_mm.data.federated import Pool

_NAME = "own arrays"


@checked
def pool_of(
    data: Any, num_classes: Count | None = None, *, check: bool = True
) -> tuple[Pool, bool]:
    """Converts data to a checked pool, and returns whether it has test examples.

    Without test examples, the pool's test set is empty.

    Args:
      data: ``(X, y)`` or ``((X, y), (X_test, y_test))``, a scikit-learn `Bunch`, or a pool. Images
        stay uint8; other features become float32, or int32 if they are integers.
      num_classes: C; if None, every class from 0 to the largest label must have an example.
      check: False skips the check that all features are finite.

    Raises:
      ValueError: if lengths or shapes differ, features are not finite numbers, or labels are not
        0 ... C - 1.
    """
    if isinstance(data, Pool):
        if num_classes is not None:
            raise ValueError(f"num_classes is {num_classes}, but a Pool has its own; leave it out")
        return _checked_pool(data, check), True
    if isinstance(data, dict) and {"data", "target"} <= data.keys():
        data = data["data"], data["target"]
    if not isinstance(data, tuple) or len(data) != 2:
        raise ValueError(
            f"data is {described(data)}; give a tuple (X, y) or ((X, y), (X_test, y_test)), or a "
            "Pool"
        )
    has_tests = isinstance(data[0], tuple)
    x, y = train = _examples(data[0] if has_tests else data, "", check)
    test = _examples(data[1], "_test", check) if has_tests else (x[:0], y[:0])
    _check_alike(x, test[0])
    labels = np.concatenate([y, test[1]])
    return Pool(_NAME, "real", _num_classes(labels, num_classes), train, test), has_tests


def _examples(arrays: Any, suffix: str, check: bool) -> tuple[np.ndarray, np.ndarray]:
    """Converts features and labels to the dtypes that tasks expect."""
    names = f"X{suffix}", f"y{suffix}"
    if not isinstance(arrays, tuple | list) or len(arrays) != 2:
        raise ValueError(f"data has {described(arrays)}; give the tuple ({', '.join(names)})")
    x = plain_array(names[0], arrays[0])
    wanted = "labels as integers 0 ... C - 1, such as np.unique(labels, return_inverse=True)[1]"
    y = plain_array(names[1], arrays[1], wanted)
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y  # a data frame with one column
    _check_lengths(names, x, y, most_axes=1)
    if x.dtype != np.uint8:
        if check:
            check_fits(names[0], x, np.dtype(np.int32))
        with np.errstate(over="ignore"):  # the check below catches infinities
            x = x.astype(np.int32 if x.dtype.kind in "ui" else np.float32, copy=False)
        if check:
            check_finite(names[0], x)
    check_labels(names[1], y)
    return x, y.astype(np.int32)


def _checked_pool(pool: Pool, check: bool) -> Pool:
    """Converts a pool's arrays to the types that tasks use, after checking that they fit."""
    num_classes = check_argument("num_classes", pool.num_classes, Count)
    done: dict[int, np.ndarray] = {}  # splits may share arrays

    def array(name: str, values: Any, *, are_labels: bool) -> np.ndarray:
        if id(values) not in done:
            x = plain_array(name, values)
            if are_labels:
                if x.size:
                    check_labels(name, x, num_classes)
                x = x.astype(np.int32, copy=False)
            else:
                x = array_of(name, x, check=check)
            done[id(values)] = x
        return done[id(values)]

    def split(which: str, examples: Any) -> tuple[np.ndarray, np.ndarray]:
        names = f"the {which} features", f"the {which} labels"
        if not isinstance(examples, tuple | list) or len(examples) != 2:
            raise ValueError(f"{which} of the Pool is {described(examples)}; give the tuple (X, y)")
        x, y = map(np.asarray, examples)
        if which == "train" or len(y):
            _check_lengths(names, x, y)
        x = array(names[0], examples[0], are_labels=False)
        return x, array(names[1], examples[1], are_labels=True)

    train, test = split("train", pool.train), split("test", pool.test)
    if len(test[1]):
        _check_alike(train[0], test[0])
    return pool._replace(num_classes=num_classes, train=train, test=test)


def _check_lengths(
    names: tuple[str, str], x: np.ndarray, y: np.ndarray, most_axes: int = 2
) -> None:
    if not 1 <= y.ndim <= most_axes or x.ndim < 1 or len(x) != len(y) or not len(y):
        raise ValueError(
            f"{names[0]} has shape {x.shape} and {names[1]} {y.shape}; give X [examples, ...] and "
            "y [examples], one label for each example"
        )


def _check_alike(x: np.ndarray, x_test: np.ndarray) -> None:
    if x_test.shape[1:] != x.shape[1:]:
        raise ValueError(
            f"an example of X has shape {x.shape[1:]}, but one of X_test {x_test.shape[1:]}; make "
            "them equal"
        )


def _num_classes(labels: np.ndarray, num_classes: int | None) -> int:
    largest = int(labels.max())
    if num_classes is None:
        found = np.unique(labels)
        missing = np.flatnonzero(found != np.arange(len(found)))
        if len(missing):
            raise ValueError(
                f"labels go up to {largest}, but none is {missing[0]}; number the classes 0 ... "
                f"C - 1, or give num_classes={largest + 1}"
            )
        return largest + 1
    if largest >= num_classes:
        raise ValueError(
            f"a label is {largest}, but num_classes is {num_classes}: labels are 0 ... "
            f"{num_classes - 1}; give num_classes={largest + 1} or other labels"
        )
    return num_classes
