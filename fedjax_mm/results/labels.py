"""Formats numbers and coordinates as text, for tables, figures and the evidence of claims."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from fedjax_mm.checks.values import check_name

_OF_XARRAY = ("indexers", "method", "tolerance", "drop", "missing_dims")
"""Arguments of xarray's `sel` and `isel`, which would silently shadow axes with these names."""


def check_selectable(axis: str) -> None:
    """Raises `ValueError` if an axis with this name could not be saved or selected with `sel`."""
    check_name("an axis", axis)
    if axis in _OF_XARRAY:
        raise ValueError(
            f"an axis is called {axis!r}, like an argument of sel and isel, which cannot "
            "select on it; rename it, for example to 'algorithm' or 'rule'"
        )


def label(dim: str, value: Any) -> str:
    """Formats a coordinate.

    Example:
      >>> label("algorithm", "MFA-RR"), label("M", 12), label("mu", 0.05)
      ('MFA-RR', 'M = 12', 'mu = 0.05')
    """
    value = value.item() if isinstance(value, np.generic | np.ndarray) else value
    return value if isinstance(value, str) else f"{dim} = {value:g}"


def places(
    values: xr.DataArray | xr.Dataset, *dims: str
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yields every combination of coordinates and their text, with the last changing fastest."""
    for combination in product(*(values[dim].values for dim in dims)):
        at = dict(zip(dims, combination, strict=True))
        yield at, [label(dim, value) for dim, value in at.items()]


def number(value: float, error: float = np.nan, form: str = ".2f", missing: str = "none") -> str:
    """Formats a value, with its standard error if known.

    Args:
      value: the value, or NaN if missing.
      error: the standard error, or NaN if unknown, as for a single seed.
      form: the format specification of both numbers.
      missing: the text for NaN.

    Example:
      >>> number(1.234, 0.05), number(1.234), number(float("nan"), missing="not reached")
      ('1.23 ± 0.05', '1.23', 'not reached')
    """
    if np.isnan(value):
        return missing
    return f"{value:{form}}" + (f" ± {error:{form}}" if np.isfinite(error) else "")


def describe(
    values: xr.DataArray,
    error: xr.DataArray | None = None,
    form: str = ".2f",
    missing: str = "not reached",
) -> str:
    """Formats all values, with those along the last dimension separated by commas.

    Example:
      >>> gains = xr.DataArray([[1.0, 1.9]], {"algorithm": ["MFA-RR"], "M": [1, 2]})
      >>> describe(gains)
      'MFA-RR: M = 1: 1.00, M = 2: 1.90'
    """
    if not values.dims:
        return number(values.item(), np.nan if error is None else error.item(), form, missing)
    errors = xr.full_like(values, np.nan, float) if error is None else error
    *outer, last = map(str, values.dims)
    groups = []
    for at, words in places(values, *outer):
        numbers = zip(values.sel(at).values, errors.sel(at).values, strict=True)
        names = [label(last, value) for value in values[last].values]
        each = ", ".join(
            f"{name}: {number(*pair, form, missing)}"
            for name, pair in zip(names, numbers, strict=True)
        )
        groups.append(f"{', '.join(words)}: {each}" if words else each)
    return "; ".join(groups)
