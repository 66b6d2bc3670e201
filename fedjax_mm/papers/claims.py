"""Claims: statements of a paper, whether they hold in our runs, and the numbers that say so.

A claim about the mean of random samples, one for each seed and paired where methods share seeds,
*holds* if the mean is beyond its margin by more than 3 standard errors, *fails* if it is as far on
the other side, and is *open* otherwise, as with a single seed. Samples that are all equal are
decided by their side, and a run that diverged or never got there makes a claim fail. Of several
means one that fails makes the claim fail, and one that is open leaves it open.

The spread of a few seeds is itself uncertain: in place of 3 stands Student's quantile with the same
tails, which is 19.2 with 3 seeds, 9.2 with 4, 4.1 with 10 and 3.4 with 20. While seeds are added
verdicts are looked at again and again, and each look may err. Where the true mean is at its margin
and seeds are doubled from 3, 3 itself gives 6.5 % wrong verdicts in all (12 % from 2, 4.0 % from
4), Student's quantile at most 0.7 %.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
import xarray as xr

from fedjax_mm.metrics import standard_error
from fedjax_mm.results.labels import describe

Verdict = Literal["holds", "fails", "open"]

_SIGMAS = 3.0


class Claim(NamedTuple):
    """A statement of the paper, the verdict of our runs, and the numbers that say so.

    Attributes:
      claim: the statement.
      verdict: "open" where more seeds would decide.
      evidence: the numbers.
      seeds: how many decided a claim about random samples; None for other claims.
    """

    claim: str
    verdict: Verdict
    evidence: str
    seeds: int | None = None

    @property
    def holds(self) -> bool:
        """Returns whether the statement holds in our runs."""
        return self.verdict == "holds"


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
    return Claim(text, _verdict(holds, np.logical_not(holds)), evidence)


def _verdict(holds: Any, fails: Any) -> Verdict:
    """Returns the verdict of several entries; one of none fails."""
    entries = np.asarray(holds)
    if np.any(fails) or not entries.size:
        return "fails"
    return "holds" if entries.all() else "open"


def exceeds(
    text: str, samples: xr.DataArray, *, by: float = 0.0, form: str = ".2f", evidence: str = ""
) -> Claim:
    """Claims that every mean is above a margin.

    Args:
      text: the statement.
      samples: differences over ``(..., "seed")``.
      by: the margin.
      form: of the numbers in the evidence.
      evidence: instead of the means.
    """
    found = estimate(samples)
    room = found._replace(mean=found.mean - by)
    return _decided(text, room, samples, evidence or found.text(form), at_margin=False)


def not_below(text: str, samples: xr.DataArray, *, form: str = ".2f", evidence: str = "") -> Claim:
    """Claims that no mean is below 0; the arguments are those of `exceeds`."""
    found = estimate(samples)
    return _decided(text, found, samples, evidence or found.text(form), at_margin=True)


def sides(room: Estimate, num_seeds: int, *, at_margin: bool) -> tuple[xr.DataArray, xr.DataArray]:
    """Returns where means are beyond their margins, and where on the other side.

    Args:
      room: means minus their margins.
      num_seeds: samples of each mean.
      at_margin: the side of samples that are all at their margin.
    """
    from scipy.special import ndtr, stdtrit

    # NaN for one seed, whose claims are open: no number is beyond NaN.
    beyond = stdtrit(num_seeds - 1, ndtr(_SIGMAS)) * room.error
    is_level = (room.mean == 0) & (room.error == 0)
    holds = (room.mean > beyond) | (is_level & at_margin)
    fails = (room.mean < -beyond) | (is_level & (not at_margin)) | room.mean.isnull()
    return holds, fails


def _decided(
    text: str, room: Estimate, samples: xr.DataArray, evidence: str, *, at_margin: bool
) -> Claim:
    """Returns the claim that there is room above all margins."""
    num_seeds = samples.sizes["seed"]
    verdict = _verdict(*sides(room, num_seeds, at_margin=at_margin))
    if room.mean.isnull().any():
        evidence += "; unknown where a run diverged, did not get there or was left out"
    return Claim(text, verdict, evidence, num_seeds)


def increasing(text: str, values: xr.DataArray, along: str, evidence: str = "") -> Claim:
    """Claims that values rise from one coordinate to the next; they do not where one is NaN."""
    rises = np.diff(values.values, axis=values.get_axis_num(along)) > 0
    return claim(text, rises, evidence or describe(values))


def below(text: str, values: xr.DataArray, limit: Any, form: str = ".2f") -> Claim:
    """Claims that every value is below a limit, a number or an array.

    Example:
      >>> below("the error is small", xr.DataArray(0.1), 0.5)
      Claim(claim='the error is small', verdict='holds', evidence='0.10, against 0.50', seeds=None)
    """
    evidence = f"{describe(values, form=form)}, against {describe(xr.DataArray(limit), form=form)}"
    return claim(text, values < limit, evidence)


def within(
    text: str,
    values: xr.DataArray,
    target: Any,
    tolerance: Any,
    form: str = ".2f",
    evidence: str = "",
) -> Claim:
    """Claims that every value is at most a tolerance away from its target.

    Values over ``(..., "seed")`` are samples, whose means are meant.
    """
    goal, margin = xr.broadcast(xr.DataArray(target), xr.DataArray(tolerance))
    is_random = "seed" in values.dims
    means, errors = estimate(values) if is_random else (values, None)
    found = f"{describe(means, errors, form, 'unknown')}, against {describe(goal, margin, form)}"
    evidence = evidence or found
    room = tolerance - abs(means - target)
    if errors is None:
        return claim(text, room >= 0, evidence)
    return _decided(text, Estimate(room, errors), values, evidence, at_margin=True)


def trend(samples: xr.DataArray, along: str, *, rising: bool) -> float:
    """Returns the p-value of Page's test for a trend along a dimension; seeds are its blocks."""
    from scipy.stats import page_trend_test

    ranks = np.arange(1, samples.sizes[along] + 1)
    blocks = samples.transpose("seed", along).values
    return float(page_trend_test(blocks, predicted_ranks=ranks if rising else ranks[::-1]).pvalue)
