"""Arrays from datasets of rows with named columns, such as those of Hugging Face."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Columns = str | Sequence[str]
"""The name of a column, or the names of several."""


def from_rows(dataset: Any, *, features: Columns, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Converts a dataset of rows to arrays (X, y) for `federate`.

    Args:
      dataset: anything with columns by name, such as a `Dataset` of Hugging Face, a pandas or
        polars data frame, or a dict of lists; or a list of dicts with equal keys.
      features: the column of the features, such as "image", whose entries have equal shapes; or
        the columns of several numbers, which become the entries of a vector. Gray images get a
        channel.
      labels: the column of the labels, or of other targets. Words are numbered in sorted order.

    Raises:
      ValueError: if the dataset lacks a column, or entries of a column differ in shape.

    Example:
      >>> rows = {"width": [0.2, 1.4, 0.1], "length": [1.4, 4.7, 1.5], "kind": ["b", "c", "b"]}
      >>> X, y = from_rows(rows, features=["width", "length"], labels="kind")
      >>> X.shape, y.tolist()
      ((3, 2), [0, 1, 0])
    """
    if isinstance(dataset, list):
        dataset = {name: [row[name] for row in dataset] for name in _names(dataset)}
    if isinstance(features, str):
        x = _column(dataset, features)
        is_gray = x.ndim == 3 and x.dtype == np.uint8
        x = x[..., None] if is_gray else x
    else:
        x = np.stack([_column(dataset, name) for name in features], axis=-1)
    y = _column(dataset, labels)
    is_word = y.dtype.kind in "USO"
    return x, np.unique(y, return_inverse=True)[1].astype(np.int32) if is_word else y


def _names(rows: list[Any]) -> list[Any]:
    """The keys of rows, which must be dicts with equal keys."""
    if not rows or any(not isinstance(x, dict) or x.keys() != rows[0].keys() for x in rows):
        raise ValueError(
            "the dataset is a list, but not of dicts with equal keys; give such rows, or a dict of "
            "lists"
        )
    return [*rows[0]]


def _column(dataset: Any, name: str) -> np.ndarray:
    known = getattr(dataset, "column_names", None) or getattr(dataset, "columns", None)
    known = [*(dataset if known is None else known)]
    if name not in known:
        raise ValueError(f"the dataset has no column {name!r}, but {', '.join(map(str, known))}")
    entries = [np.asarray(entry) for entry in dataset[name]]
    shapes = {entry.shape for entry in entries}
    if len(shapes) != 1:
        raise ValueError(f"entries of {name!r} have shapes {shapes}; give entries of equal shapes")
    return np.stack(entries)
