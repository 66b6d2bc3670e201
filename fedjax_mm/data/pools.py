"""Checked conversion of user arrays to a pool of examples."""

from typing import Any

import jax
import numpy as np

from fedjax_mm.checks.annotations import CountOrZero, check_argument, checked
from fedjax_mm.checks.values import described
from fedjax_mm.data.arrays import (
    array_of,
    check_finite,
    check_fits,
    check_labels,
    leaves_of,
    plain_array,
)
from fedjax_mm.data.federated import Pool

_NAME = "own arrays"


@checked
def pool_of(
    data: Any, num_classes: CountOrZero | None = None, *, check: bool = True
) -> tuple[Pool, bool]:
    """Converts data to a checked pool, and returns whether it has test examples.

    Without test examples, the pool's test set is empty.

    Args:
      data: ``(X, y)`` or ``((X, y), (X_test, y_test))``, a scikit-learn `Bunch`, or a pool. Images
        stay uint8; other features become float32, or int32 if they are integers.
      num_classes: C; if None, every class from 0 to the largest label must have an example; 0 if y
        are targets of any type and shape, or several arrays of them.
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
    are_labels = num_classes != 0
    train = _examples(data[0] if has_tests else data, "", check, are_labels)
    test: Any = jax.tree.map(lambda x: x[:0], train)
    if has_tests:
        test = _examples(data[1], "_test", check, are_labels)
    _check_alike(train[0], test[0])
    if are_labels:
        num_classes = _num_classes(np.concatenate([train[1], test[1]]), num_classes)
    return Pool(_NAME, "real", num_classes or 0, train, test), has_tests


def _examples(arrays: Any, suffix: str, check: bool, are_labels: bool) -> tuple[np.ndarray, Any]:
    """Converts features and labels to the dtypes that tasks expect."""
    names = f"X{suffix}", f"y{suffix}"
    if not isinstance(arrays, tuple | list) or len(arrays) != 2:
        raise ValueError(f"data has {described(arrays)}; give the tuple ({', '.join(names)})")
    x = plain_array(names[0], arrays[0])
    y = _labels(names[1], arrays[1]) if are_labels else _targets(names[1], arrays[1], check)
    _check_lengths(names, x, y, most_axes=1 if are_labels else None)
    if x.dtype != np.uint8:
        if check:
            check_fits(names[0], x, np.dtype(np.int32))
        with np.errstate(over="ignore"):  # the check below catches infinities
            x = x.astype(np.int32 if x.dtype.kind in "ui" else np.float32, copy=False)
        if check:
            check_finite(names[0], x)
    if not are_labels:
        return x, y
    check_labels(names[1], y)
    return x, y.astype(np.int32)


def _labels(name: str, values: Any) -> np.ndarray:
    wanted = "labels as integers 0 ... C - 1, such as np.unique(labels, return_inverse=True)[1]"
    y = plain_array(name, values, wanted)
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y  # a data frame with one column


def _targets(name: str, values: Any, check: bool) -> Any:
    leaves, structure = leaves_of(values)
    return jax.tree.unflatten(structure, [array_of(name, each, check=check) for each in leaves])


def _checked_pool(pool: Pool, check: bool) -> Pool:
    """Converts a pool's arrays to the types that tasks use, after checking that they fit."""
    num_classes = check_argument("num_classes", pool.num_classes, CountOrZero)
    done: dict[int, np.ndarray] = {}  # splits may share arrays

    def array(name: str, values: Any, *, are_labels: bool) -> Any:
        if id(values) not in done:
            if are_labels:
                x = plain_array(name, values)
                if x.size:
                    check_labels(name, x, num_classes)
                x = x.astype(np.int32, copy=False)
            else:
                x = _targets(name, values, check)
            done[id(values)] = x
        return done[id(values)]

    def split(which: str, examples: Any) -> tuple[np.ndarray, Any]:
        names = f"the {which} features", f"the {which} labels"
        if not isinstance(examples, tuple | list) or len(examples) != 2:
            raise ValueError(f"{which} of the Pool is {described(examples)}; give the tuple (X, y)")
        x, y = examples
        if which == "train" or len(x):
            _check_lengths(names, np.asarray(x), y, most_axes=2 if num_classes else None)
        x = array(names[0], x, are_labels=False)
        return x, array(names[1], y, are_labels=num_classes > 0)

    train, test = split("train", pool.train), split("test", pool.test)
    if len(test[0]):
        _check_alike(train[0], test[0])
    return pool._replace(num_classes=num_classes, train=train, test=test)


def _check_lengths(names: tuple[str, str], x: np.ndarray, y: Any, most_axes: int | None) -> None:
    shapes = [np.shape(each) for each in leaves_of(y)[0]]
    has_axes = most_axes is None or all(len(shape) <= most_axes for shape in shapes)
    if not has_axes or x.ndim < 1 or not len(x) or {each[:1] for each in shapes} != {x.shape[:1]}:
        raise ValueError(
            f"{names[0]} has shape {x.shape} and {names[1]} {', '.join(map(str, shapes))}; give X "
            "[examples, ...] and y [examples], one label for each example"
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
