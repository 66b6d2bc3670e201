"""Tables of labelled arrays for the terminal, in the form "mean ± error (published)"."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from fedjax_mm.papers.schema import Table
from fedjax_mm.results.labels import label, number, places


def cells(
    values: xr.DataArray,
    error: xr.DataArray | None = None,
    published: xr.DataArray | None = None,
    form: str = ".2f",
    missing: str = "not reached",
) -> xr.DataArray:
    """Formats every value as "mean ± error (published)", over the values' dimensions.

    Example:
      >>> mean, error = xr.DataArray([1.234], dims="M"), xr.DataArray([0.05], dims="M")
      >>> cells(mean, error, xr.DataArray([1.5], dims="M")).values.tolist()
      ['1.23 ± 0.05 (1.5)']
    """

    def text(value: float, error: float, paper: float) -> str:
        return number(value, error, form, missing) + f" ({paper:g})" * bool(np.isfinite(paper))

    nothing = xr.full_like(values, np.nan, float)
    arrays = (values, nothing if error is None else error, nothing)
    if published is not None:
        arrays = (*arrays[:2], published)
    # Use Python objects, because the strings differ in length.
    found: xr.DataArray = xr.apply_ufunc(text, *arrays, vectorize=True, output_dtypes=[object])
    return found


def columns(values: xr.DataArray, dim: str, form: str = "{}") -> dict[str, xr.DataArray]:
    """One column per coordinate of a dimension, keyed by the coordinate as text."""
    return {form.format(label(dim, at)): values.sel({dim: at}) for at in values[dim].values}


def rows(contents: Mapping[str, Any], over: tuple[str, ...], title: str = "") -> Table:
    """A table with one row per combination of coordinates.

    Args:
      contents: columns by header, as text over some of the dimensions in `over`.
      over: the dimensions whose coordinates fill the first columns.
      title: the title above the table.

    Example:
      >>> gains = xr.DataArray([[1.0, 1.9]], {"algorithm": ["MFA-RR"], "M": [1, 2]})
      >>> rows(columns(cells(gains), "M"), ("algorithm",)).rows
      (('MFA-RR', '1.00', '1.90'),)
    """
    arrays = {name: xr.DataArray(values) for name, values in contents.items()}
    dims = xr.merge([each.rename(name) for name, each in arrays.items()], compat="override")
    lines = tuple(
        (
            *(word.removeprefix(f"{dim} = ") for dim, word in zip(over, words, strict=True)),
            *(
                str(each.sel({dim: at[dim] for dim in each.dims if dim in at}).item())
                for each in arrays.values()
            ),
        )
        for at, words in places(dims, *over)
    )
    return Table(header=(*over, *arrays), rows=lines, title=title)
