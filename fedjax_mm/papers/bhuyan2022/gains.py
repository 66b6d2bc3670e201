"""Gains over sequential FedAvg against the number of models, for Figures 5 to 7 and Theorem 3."""

from collections.abc import Iterable, Mapping
from itertools import combinations, pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
import xarray as xr
from pydantic import AfterValidator

from fedjax_mm import plots
from fedjax_mm.assignments.partitions import mfa_rand, mfa_rr
from fedjax_mm.experiments.fields import Count
from fedjax_mm.metrics import first_round_below
from fedjax_mm.papers.tables import cells, columns


def _from_one(num_models: tuple[int, ...]) -> tuple[int, ...]:
    if list(num_models) != sorted({1, *num_models}):
        raise ValueError("it must increase from 1, the baseline")
    return num_models


ASSIGNMENTS: Mapping[str, Any] = {"MFA-Rand": mfa_rand, "MFA-RR": mfa_rr}
"""The paper's two methods, which differ in their assignment."""

Models = Annotated[tuple[Count, ...], AfterValidator(_from_one)]
"""Numbers of models, starting from 1."""


def rounds_to(target: Any, curves: xr.DataArray) -> xr.DataArray:
    """The first recorded round at which a curve is at or below the target, or NaN."""
    curves = curves.transpose(..., "round")
    rounds = first_round_below(curves, curves["round"], target)
    return curves.isel(round=0, drop=True).copy(data=rounds)


class Limits(NamedTuple):
    """Lower and upper limits of a quantity for each seed, equal if the target was reached.

    Attributes:
      low: lower limits, over ``(..., "seed")``.
      high: upper limits, over the same dimensions.
    """

    low: xr.DataArray
    high: xr.DataArray

    def decided(self, margin: float) -> xr.DataArray:
        """The limit that shows which side of the margin a seed is on, or NaN if unknown."""
        sure = (self.low > margin) | (self.low == self.high)
        return self.low.where(sure, self.high.where(self.high < margin))

    def orders(self, pairs: Iterable[tuple[int, int]]) -> "Limits":
        """1, 0 or -1 for each pair of M if its second value is greater, equal or smaller.

        The result has a dimension "pair".
        """
        found = [(self.isel(i), self.isel(j)) for i, j in pairs]
        low = [later.low - earlier.high for earlier, later in found]
        high = [later.high - earlier.low for earlier, later in found]
        return Limits(*(_signs(xr.concat(each, "pair")) for each in (low, high)))

    def isel(self, place: int) -> "Limits":
        """The limits at a position along "M"."""
        return Limits(*(each.isel(M=place, drop=True) for each in self))

    @property
    def steps(self) -> "Limits":
        """The order of each M relative to the next."""
        return self.orders(pairwise(range(self.low.sizes["M"])))

    @property
    def exponents(self) -> "Limits":
        """The exponent of M in a least-squares power law through the values at M > 1."""
        with np.errstate(divide="ignore"):  # a gain whose lower limit is 0
            low, high = (np.log(each.sel(M=each.M > 1)) for each in self)
        several = self.low.M[self.low.M > 1]
        steps = several.copy(data=np.log(several.values))
        weights = (steps - steps.mean()) / ((steps - steps.mean()) ** 2).sum()
        ends = xr.where(weights > 0, low, high), xr.where(weights < 0, low, high)
        return Limits(*(each.dot(weights, dim="M") for each in ends))

    @property
    def trend(self) -> "Limits":
        """Kendall's tau between M and the quantity, the mean order over all pairs of M."""
        orders = self.orders(combinations(range(self.low.sizes["M"]), 2))
        return Limits(orders.low.mean("pair"), orders.high.mean("pair"))


def _signs(values: xr.DataArray) -> xr.DataArray:
    return values.copy(data=np.sign(values.values))


def gain_columns(measured: xr.Dataset, num_seeds: int, missing: str) -> dict[str, xr.DataArray]:
    """One column of gains per number of models, with the seeds that missed their targets.

    Args:
      measured: ``gain`` and ``gain_standard_error``, and the seeds ``reached``, over M and others.
      num_seeds: the number of all seeds.
      missing: the text of a gain that is NaN.
    """
    missed = num_seeds - measured.reached
    text = "\nnot reached\nin " + missed.astype(str).astype(object) + f" of {num_seeds}"
    gains = cells(measured.gain, measured.gain_standard_error, missing=missing)
    return columns(gains + xr.where(missed > 0, text, ""), "M")


def gain_panels(
    gains: xr.DataArray,
    errors: xr.DataArray | None = None,
    ylabel: str = "gain $g = M\\,T_1 / T_M$",
) -> list[plots.Panel]:
    """One panel per coordinate of the first dimension, with one line per series.

    Args:
      gains: over ``(panel, series, "M")``; NaN where a target was not reached.
      errors: standard errors, over the same dimensions.
      ylabel: the y-axis label of every panel.
    """
    diagonal = plots.drawing.diagonal("g = M", gains.M.values)
    return plots.panels(
        gains, errors, xlabel="number of models $M$", ylabel=ylabel, more=[diagonal]
    )
