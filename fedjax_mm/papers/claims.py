"""Claims: statements of a paper, whether they hold in our runs, and the numbers that say so.

A random claim is judged on its samples, one for each seed: paired where two methods share seeds,
and by their mean and its standard error. A single seed has no error: no random claim holds then.
"""

from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from fedjax_mm.results.labels import describe
from fedjax_mm.results.metrics import standard_error


class Claim(NamedTuple):
    """A statement of the paper, whether it holds in our run, and the numbers that say so."""

    claim: str
    holds: bool
    evidence: str


class Estimate(NamedTuple):
    """Means over seeds and their standard errors, over the samples' other dimensions."""

    mean: xr.DataArray
    error: xr.DataArray

    def text(self, form: str = ".2f") -> str:
        """Returns all means with their errors."""
        return describe(self.mean, self.error, form, missing="unknown")


def estimate(samples: xr.DataArray, over: str = "seed") -> Estimate:
    """Returns the mean over a dimension and its standard error, NaN for a single sample."""
    samples = samples.astype(float)
    mean = samples.mean(over, skipna=False)
    error = standard_error(samples.values, axis=samples.get_axis_num(over))
    return Estimate(mean, mean.copy(data=error))


def claim(text: str, holds: Any, evidence: str) -> Claim:
    """Returns the claim; it holds where all entries of `holds` are true, and there is one."""
    entries = np.asarray(holds)
    return Claim(text, bool(entries.size and entries.all()), evidence)


def exceeds(text: str, samples: xr.DataArray, *, by: float = 0.0, form: str = ".2f") -> Claim:
    """Claims that every mean is above 0 by more than 2 standard errors, and at least `by`.

    Args:
      text: the statement.
      samples: differences over ``(..., "seed")``.
      by: the least mean.
      form: of the numbers in the evidence.
    """
    found = estimate(samples)
    return claim(text, (found.mean > 2 * found.error) & (found.mean >= by), found.text(form))


def not_below(text: str, samples: xr.DataArray, *, form: str = ".2f") -> Claim:
    """Claims that no mean is below 0 by more than 2 standard errors."""
    found = estimate(samples)
    return claim(text, found.mean + 2 * found.error >= 0, found.text(form))


def increasing(text: str, values: xr.DataArray, along: str, evidence: str = "") -> Claim:
    """Claims that values rise from one coordinate to the next; they do not where one is NaN."""
    rises = np.diff(values.values, axis=values.get_axis_num(along)) > 0
    return claim(text, rises, evidence or describe(values))


def below(text: str, values: xr.DataArray, limit: Any, form: str = ".2f") -> Claim:
    """Claims that every value is below a limit, a number or an array.

    Example:
      >>> below("the error is small", xr.DataArray(0.1), 0.5)
      Claim(claim='the error is small', holds=True, evidence='0.10, against 0.50')
    """
    evidence = f"{describe(values, form=form)}, against {describe(xr.DataArray(limit), form=form)}"
    return claim(text, values < limit, evidence)


def within(
    text: str, values: xr.DataArray, target: Any, tolerance: Any, form: str = ".2f"
) -> Claim:
    """Claims that every value is at most a tolerance away from its target."""
    goal, margin = xr.broadcast(xr.DataArray(target), xr.DataArray(tolerance))
    evidence = f"{describe(values, None, form, 'unknown')}, against {describe(goal, margin, form)}"
    return claim(text, abs(values - target) <= tolerance, evidence)


def trend(samples: xr.DataArray, along: str, *, rising: bool) -> float:
    """Returns the p-value of Page's test for a trend along a dimension; seeds are its blocks."""
    from scipy.stats import page_trend_test

    ranks = np.arange(1, samples.sizes[along] + 1)
    blocks = samples.transpose("seed", along).values
    return float(page_trend_test(blocks, predicted_ranks=ranks if rising else ranks[::-1]).pvalue)
