"""Arrays of one's own as a pool of examples, checked."""

from typing import Any

import numpy as np

from fedjax_mm.data.federated import Pool

_NAME = "own arrays"


def pool_of(data: Any, num_classes: int | None = None) -> tuple[Pool, bool]:
    """Returns arrays as a pool, and whether there are test examples among them.

    Without them the pool's test examples are none.

    Args:
      data: ``(X, y)`` or ``((X, y), (X_test, y_test))``; images keep their bytes, other features
        become float32, or int32 if they are whole numbers.
      num_classes: C; if None every class from 0 to the largest label must have an example.

    Raises:
      ValueError: if lengths or shapes differ, features are not finite numbers, or labels are not
        0 ... C - 1.
    """
    if not isinstance(data, tuple) or len(data) != 2:
        given = type(data).__name__ + (f" of {len(data)}" if isinstance(data, tuple | list) else "")
        raise ValueError(
            f"data is a {given}; give a tuple (X, y) or ((X, y), (X_test, y_test)), or a Pool"
        )
    has_tests = isinstance(data[0], tuple)
    x, y = train = _examples(data[0] if has_tests else data)
    test = _examples(data[1], "_test") if has_tests else (x[:0], y[:0])
    if test[0].shape[1:] != x.shape[1:]:
        raise ValueError(
            f"an example of X has shape {x.shape[1:]}, but one of X_test {test[0].shape[1:]}; make "
            "them equal"
        )
    labels = np.concatenate([y, test[1]])
    return Pool(_NAME, "real", _num_classes(labels, num_classes), train, test), has_tests


def _examples(arrays: Any, suffix: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Returns features and labels of the types that tasks use."""
    x, y = map(np.asarray, arrays)
    names = f"X{suffix}", f"y{suffix}"
    if y.ndim != 1 or x.ndim < 1 or len(x) != len(y) or not len(y):
        raise ValueError(
            f"{names[0]} has shape {x.shape} and {names[1]} {y.shape}; give X [examples, ...] and "
            "y [examples], one label for each example"
        )
    if x.dtype.kind not in "buif":
        raise ValueError(f"{names[0]} has type {x.dtype}; give numbers")
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # what does not fit is infinite, and found below
            x = x.astype(np.int32 if x.dtype.kind in "ui" else np.float32)
    is_finite = np.isfinite(x).reshape(len(x), -1).all(1)
    if not is_finite.all():
        raise ValueError(
            f"{names[0]} is not finite in {np.sum(~is_finite)} of {len(x)} examples, first in row "
            f"{np.argmin(is_finite)}; drop or fill them"
        )
    if y.dtype.kind not in "buif":
        raise ValueError(f"{names[1]} has type {y.dtype}; give labels as integers 0 ... C - 1")
    is_label = (y >= 0) & (y < 2**31) & (y == np.floor(y))  # NaN is no label either
    if not is_label.all():
        row = int(np.argmin(is_label))
        raise ValueError(
            f"{names[1]} has {y[row].item()!r} in row {row}; give labels as integers 0 ... C - 1"
        )
    return x, y.astype(np.int32)


def _num_classes(labels: np.ndarray, num_classes: int | None) -> int:
    """Returns C, given or inferred."""
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
