"""Tests of numbers that are known by a mean and an error alone, such as printed ones."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from fedjax_mm.claims.evidence import Evidence, each_of, rows_of
from fedjax_mm.metrics import standard_error
from fedjax_mm.results.labels import number, places

_CERTAIN = 1e9  # degrees of freedom of a known error
_TINY = 1e-9  # the smallest standard error, of draws that are all equal
_USUAL = 0.05  # the share of draws outside the interval in which a printed draw agrees


def near(
    text: str,
    apart: float,
    margin: float,
    error: float,
    *,
    name: str = "",
    freedom: float = _CERTAIN,
    tests: int = 1,
) -> Evidence:
    """Tests whether a difference is at most a margin, using two one-sided tests.

    Args:
      text: the numbers, as text.
      apart: the difference.
      margin: the largest difference that counts as near.
      error: the standard error of the difference.
      name: the name of the comparison.
      freedom: the degrees of freedom of the error.
      tests: the number of comparisons, of which this is the worst.

    Example:
      >>> near("", 0.1, 1.0, 0.1).supports < 0.00135 < near("", 0.9, 1.0, 0.1).supports
      True
    """
    from scipy.special import stdtr

    beyond = (abs(apart) - margin) / error
    # Give each side half of the level, because either of them may contradict.
    against = np.minimum(1.0, 2 * tests * stdtr(freedom, -beyond))
    within = f"within {margin:g}"
    return Evidence(name, text, float(stdtr(freedom, beyond)), float(against), margin=within)


def welch(
    samples: xr.DataArray, mean: Any, spread: Any, runs: int, margin: Any, form: str = ".1f"
) -> list[Evidence]:
    """Tests whether printed means are at most a margin from ours, by Welch's t.

    Args:
      samples: ours, over ``(..., "seed")``.
      mean: the printed means, over the other dimensions. There is no test where one is NaN.
      spread: their printed standard deviations.
      runs: the number of runs behind each printed mean.
      margin: the largest difference that counts as near.
      form: the format of numbers in the evidence.

    Example:
      >>> ours = xr.DataArray([[79.0, 81.0] * 10], {"rule": ["A"]}, dims=("rule", "seed"))
      >>> [test] = welch(ours, mean=80.2, spread=1.0, runs=10, margin=2.0)
      >>> test.text, test.supports < 0.01
      ('80.0 ± 0.2, printed 80.2 with sd 1.0', True)
    """
    found, size = [], samples.sizes["seed"]
    about = zip(*(each_of(samples, x) for x in (mean, spread, margin)), strict=True)
    for (name, ours), (mean, spread, most) in zip(rows_of(samples), about, strict=True):
        if np.isnan(mean + spread):
            continue
        center, error, theirs = ours.mean(), float(standard_error(ours)), spread / np.sqrt(runs)
        both = np.hypot(error, theirs)
        freedom = both**4 / (error**4 / max(size - 1, 1) + theirs**4 / (runs - 1))
        text = f"{number(center, error, form)}, printed {mean:{form}} with sd {spread:{form}}"
        test = near(text, center - mean, most, both, name=name, freedom=freedom)
        found.append(test._replace(seeds=size))
    return found if size > 1 else [x._replace(supports=1.0, contradicts=1.0) for x in found]


def one_draw(
    readings: Mapping[str, xr.DataArray], printed: Any, most: float, form: str = ".1f"
) -> list[Evidence]:
    """Tests whether numbers printed for a single draw lie among ours, which are draws, too.

    A number agrees inside the interval that holds 95 % of our draws, unless the interval is so wide
    that almost any number would, and differs outside that of a two-sided test at the usual level.
    Both are prediction intervals of Student's t.

    Args:
      readings: our draws over ``(..., "seed")``, by reading. A number agrees if it does so under
        all readings, and differs if it does so under all.
      printed: the printed numbers, over the other dimensions.
      most: the largest half width of an interval that says something.
      form: the format of numbers in the evidence.

    Example:
      >>> ours = xr.DataArray([79.0, 81.0] * 10, dims="seed")
      >>> [test] = one_draw({"": ours}, 80.2, most=5.0)
      >>> test.text, test.supports
      ('printed 80.2, 95 % of our draws are 77.8 to 82.2', 0.0)
    """
    from scipy.special import stdtr, stdtrit

    values, found = each_of(next(iter(readings.values())), printed), []
    for value, *rows in zip(values, *map(rows_of, readings.values()), strict=True):
        texts, p_values, is_wide = [], [], False
        for reading, (_, ours) in zip(readings, rows, strict=True):
            size, mean = len(ours), ours.mean()
            reach = np.maximum(standard_error(ours), _TINY) * np.sqrt(size + 1)
            p_values.append(float(2 * stdtr(size - 1, -abs(value - mean) / reach)))
            half = float(stdtrit(size - 1, 1 - _USUAL / 2) * reach)
            texts.append(f"{mean - half:{form}} to {mean + half:{form}} {reading}".strip())
            is_wide |= half > most
        text = f"printed {value:g}, 95 % of our draws are {', '.join(texts)}"
        least, largest = np.min(p_values), float(np.max(p_values))
        supports = np.nan if np.isnan(least) else float(least < _USUAL or is_wide)
        within = f"an interval within {most:g}"
        found.append(Evidence(rows[0][0], text, supports, largest, size, margin=within))
    return found


def mean_above(
    mean: xr.DataArray, error: xr.DataArray, by: float, draws: int, form: str = ".3f"
) -> list[Evidence]:
    """Tests whether means over many draws exceed `by`, from means and standard errors alone.

    Args:
      mean: the means, for example of more draws than a file keeps.
      error: their standard errors.
      by: the margin.
      draws: the number of draws.
      form: the format of numbers in the evidence.

    Example:
      >>> [test] = mean_above(xr.DataArray(1.0), xr.DataArray(0.1), 0.5, draws=10_000)
      >>> test.text, test.supports < 1e-6
      ('1.000 ± 0.100', True)
    """
    from scipy.special import ndtr

    found = []
    for at, words in places(mean, *map(str, mean.dims)):
        value, spread = mean.sel(at).item(), error.sel(at).item()
        # If all draws are equal, compare the means directly, because their spread is 0.
        score = (value - by) / spread if spread else np.copysign(np.inf, value - by)
        text = number(value, spread, form)
        tails = float(ndtr(-score)), float(ndtr(score))
        found.append(Evidence(", ".join(words), text, *tails, seeds=draws))
    return found
