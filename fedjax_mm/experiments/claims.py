"""Claims in files: comparisons of two selections of a result."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import xarray as xr
from pydantic import Field

from fedjax_mm.claims import Evidence, more, within
from fedjax_mm.experiments.fields import Config, Number, Positive
from fedjax_mm.metrics import final


class Claim(Config):
    """A claim about the means of a metric over models at the last record.

    All values of axes that neither selection fixes are compared, one by one.

    Attributes:
      metric: the metric, such as "excess_loss" or "test_accuracy".
      more: the runs with the larger metric, as values of `algorithm` and of axes.
      than: the runs with the smaller one.
      by: the margin.
      within: the largest difference, for a claim of equality; `by` has no meaning then.
      of: "mean" or "median".
      unit: the unit of the metric, such as "points".
      says: the claim as a clause, for sentences; defaults to its name.
    """

    metric: str
    more: dict[str, Any] = Field(min_length=1)
    than: dict[str, Any] = Field(min_length=1)
    by: Number = 0.0
    within: Positive | None = None
    of: Literal["mean", "median"] = "mean"
    unit: str = ""
    says: str = ""

    def check(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Raises `ValueError` unless both selections are among the coordinates of a result."""
        for side in (self.more, self.than):
            for axis, value in side.items():
                if axis not in values:
                    raise ValueError(f"{axis!r} is no axis, but {', '.join(values)}")
                if value not in values[axis]:
                    known = ", ".join(map(str, values[axis]))
                    raise ValueError(f"{axis} is {value!r}, and the runs have {known}")

    def named(self, name: str) -> Callable[[xr.Dataset], Iterator[list[Evidence]]]:
        """The claim as a function of a result, as `claims.judge` and `settle` take it."""

        def claim(result: xr.Dataset) -> Iterator[list[Evidence]]:
            values = final(result, self.metric)
            pair = values.sel(self.more), values.sel(self.than)
            if self.within is not None:
                yield within(*pair, margin=self.within, unit=self.unit, form=".3g")
            else:
                yield more(*pair, by=self.by, of=self.of, unit=self.unit, form=".3g")

        claim.__name__ = name
        claim.__doc__ = self.says or None
        return claim
