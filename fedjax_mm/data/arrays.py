"""Checked conversion of user arrays to NumPy arrays with JAX's dtypes.

Each array is checked once, on the host, before it is copied to a device. Traced arrays are not
checked.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def leaves_of(tree: Any) -> tuple[list[Any], Any]:
    """Flattens a pytree, treating a list of numbers as one array.

    Example:
      >>> arrays, structure = leaves_of(([[1, 2], [3, 4]], np.zeros(2)))
      >>> len(arrays), structure
      (2, PyTreeDef((*, *)))
    """
    return jax.tree.flatten(tree, is_leaf=_is_list)


def _is_list(x: Any) -> bool:
    return type(x) is list and all(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(x))


def array_of(name: str, values: Any, *, check: bool = True) -> Any:
    """Converts numbers to an array with JAX's dtype: 32 bits, unless x64 is enabled.

    Args:
      name: the argument's name, for error messages.
      values: an array, a list, a data frame or one of its columns.
      check: False skips the check that the numbers are finite.

    Raises:
      ValueError: if the values are not numbers, do not fit the dtype, or are not finite.

    Example:
      >>> array_of("X", [[1.5, 2], [3, 4]]).dtype
      dtype('float32')
    """
    if isinstance(values, jax.Array) and not is_known(values):
        return values
    x = plain_array(name, values)
    kind = jax.dtypes.canonicalize_dtype(x.dtype)
    if check:
        check_fits(name, x, kind)
    with np.errstate(over="ignore"):  # the check below catches infinities
        x = x.astype(kind, copy=False)
    if check:
        check_finite(name, x)
    return x


def plain_array(name: str, values: Any, wanted: str = "numbers") -> np.ndarray:
    """Converts numbers to a NumPy array, or raises a `ValueError` with the remedy."""
    if np.ma.is_masked(values):
        raise ValueError(
            f"{name} has {np.ma.count_masked(values)} masked entries; drop or fill them, as by "
            ".filled(0)"
        )
    try:
        x = np.asarray(values)
        # Data frames with mixed column types or missing values have dtype object.
        x = np.asarray(x.tolist()) if x.dtype == object and x.ndim else x
    except ValueError as error:
        raise ValueError(f"{name} has rows of different lengths; give equal ones") from error
    if x.dtype.kind not in "buif" and not jnp.issubdtype(x.dtype, jnp.floating):
        sparse = ", as by .toarray()" if hasattr(values, "toarray") else ""
        raise ValueError(f"{name} has type {x.dtype}; give {wanted}{sparse}")
    return x


def check_fits(name: str, x: np.ndarray, kind: np.dtype) -> None:
    """Raises `ValueError` if integers do not fit an integer type."""
    if x.dtype.kind not in "iu" or x.dtype == kind or not x.size:
        return
    limits = np.iinfo(kind)
    if x.min() < limits.min or x.max() > limits.max:
        raise ValueError(
            f"{name} has numbers from {x.min()} to {x.max()}, which do not fit {kind}; give "
            "smaller ones"
        )


def is_known(x: Any) -> bool:
    """Whether an array's values can be read: not traced, and not on another host."""
    is_here = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return isinstance(x, np.ndarray) or (is_here and x.is_fully_addressable)


def check_finite(name: str, x: np.ndarray) -> None:
    """Raises a `ValueError` that names the first bad row if an array is not finite."""
    if x.dtype.kind in "biu":
        return
    with np.errstate(over="ignore", invalid="ignore"):
        # Try the sum first, because it takes one pass without a copy. If it is not finite, check
        # every entry, because a sum of finite numbers may overflow.
        if np.isfinite(np.sum(x)):
            return
    is_finite = np.isfinite(x).reshape(len(x), -1).all(1) if x.ndim else np.isfinite(x)[None]
    if not is_finite.all():
        raise ValueError(
            f"{name} is not finite in {np.sum(~is_finite)} of {len(is_finite)} examples, first in "
            f"row {np.argmin(is_finite)}; drop or fill them"
        )


def check_labels(name: str, y: np.ndarray, num_classes: int | None = None) -> None:
    """Raises a `ValueError` that names the first bad row if labels are not integers 0 ... C - 1.

    Args:
      name: the argument's name, for error messages.
      y: numbers, with one or more labels per row.
      num_classes: C; None allows any class that fits 31 bits.
    """
    limit = 2**31 if num_classes is None else num_classes
    # NaN is rejected too, because comparisons with it are false.
    if y.min() >= 0 and y.max() < limit and (y.dtype.kind in "biu" or np.all(y == np.floor(y))):
        return
    is_label = (y >= 0) & (y < limit) & (y == np.floor(y))
    place = np.unravel_index(np.argmin(is_label), y.shape)
    allowed = "0 ... C - 1" if num_classes is None else f"0 ... {num_classes - 1}"
    remedy = ""
    if num_classes is not None and y.min() == 1 and y.max() == num_classes:
        remedy = ", as by subtracting 1"
    elif num_classes is not None and y.max() >= num_classes:
        remedy = f", or num_classes={int(y.max()) + 1}"
    raise ValueError(
        f"{name} has {y[place].item()!r} in row {place[0]}; give labels as integers "
        f"{allowed}{remedy}"
    )
