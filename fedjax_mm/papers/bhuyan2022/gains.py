"""Gains over sequential FedAvg against the number of models, in Figures 5 to 7 and Theorem 3."""

from typing import Annotated, Any

import xarray as xr
from pydantic import AfterValidator

from fedjax_mm import plots
from fedjax_mm.experiments.fields import Count
from fedjax_mm.metrics import first_round_below


def _from_one(num_models: tuple[int, ...]) -> tuple[int, ...]:
    if list(num_models) != sorted({1, *num_models}):
        raise ValueError("it must increase from 1, the baseline")
    return num_models


Models = Annotated[tuple[Count, ...], AfterValidator(_from_one)]
"""Numbers of models, the first of which is 1."""


def rounds_to(target: Any, curves: xr.DataArray) -> xr.DataArray:
    """Returns the first recorded round with at most the target; NaN if there is none."""
    curves = curves.transpose(..., "round")
    rounds = first_round_below(curves, curves["round"], target)
    return curves.isel(round=0, drop=True).copy(data=rounds)


def gain_panels(
    gains: xr.DataArray,
    errors: xr.DataArray | None = None,
    ylabel: str = "gain $g = M\\,T_1 / T_M$",
) -> list[plots.Panel]:
    """Returns a panel for each coordinate of the first dimension, with a line for each series.

    Args:
      gains: over ``(panel, series, "M")``; NaN where a target was not reached.
      errors: standard errors, likewise.
      ylabel: of every panel.
    """
    diagonal = plots.diagonal("g = M", gains.M.values)
    return plots.panels(
        gains, errors, xlabel="number of models $M$", ylabel=ylabel, more=[diagonal]
    )
