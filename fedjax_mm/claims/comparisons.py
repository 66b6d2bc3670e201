"""Comparisons of samples, one per seed: each returns the evidence of every comparison."""

from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import xarray as xr

from fedjax_mm.claims.evidence import LEVEL, Evidence, each_of, mean_test, rows_of, sign_test
from fedjax_mm.claims.parts import Verdict
from fedjax_mm.results.labels import label, places

Of = Literal["mean", "median"]


def more(
    a: xr.DataArray,
    b: xr.DataArray | None = None,
    *,
    by: Any = 0.0,
    of: Of = "mean",
    unreached: Any = None,
    unit: str = "",
    form: str = ".2f",
) -> list[Evidence]:
    """Tests whether a - b is above `by`. Samples that all equal `by` contradict it.

    Args:
      a: samples over ``(..., "seed")``. Each combination of the other coordinates is a comparison.
      b: samples or numbers to subtract, seed by seed, so that what both share cancels; 0 without.
      by: the margin, of medians also an array over the other dimensions.
      of: "mean", by Student's t reduced for skewed laws, or "median", by the sign test. Samples of
        a median may be NaN, where a target was not reached.
      unreached: an upper limit for samples that are NaN, or None if nothing is known about them.
      unit: the unit of the numbers, such as "points".
      form: the format of numbers.

    Raises:
      ValueError: if a and b have other seeds, or other coordinates.

    Example:
      >>> rows = {"algorithm": ["A", "B"], "seed": range(20)}
      >>> accuracy = xr.DataArray([[83.0, 82.0] * 10, [80.0, 80.0] * 10], rows)
      >>> [test] = more(accuracy.sel(algorithm="A"), accuracy.sel(algorithm="B"), by=1)
      >>> test.name, test.text, test.margin, test.supports < 0.00135
      ('A minus B', '2.50 ± 0.11', 'above 1', True)
    """
    return _beyond(a, b, by, of, unreached, unit, form, side=1)


def less(
    a: xr.DataArray,
    b: xr.DataArray | None = None,
    *,
    by: Any = 0.0,
    of: Of = "mean",
    unit: str = "",
    form: str = ".2f",
) -> list[Evidence]:
    """Tests whether a - b is below `by`, as `more` does. Samples that all equal `by` contradict it.

    Example:
      >>> [test] = less(xr.DataArray([0.2, 0.3] * 10, dims="seed"), by=0.5, of="median")
      >>> test.text, test.supports < 0.00135
      ('median 0.25, 20 of 20 seeds below 0.5', True)
    """
    return _beyond(a, b, by, of, None, unit, form, side=-1)


def at_least(
    measured: xr.DataArray, bound: Any, *, unit: str = "", form: str = ".2f"
) -> list[Evidence]:
    """Tests whether a mean is at least a bound. Samples that all equal it support this.

    Args:
      measured: samples, as in `more`.
      bound: a number, or a DataArray of numbers or samples, which are subtracted.
      unit: the unit of the numbers.
      form: the format of numbers.

    Example:
      >>> [test] = at_least(xr.DataArray([0.5] * 3, dims="seed"), 0.5)
      >>> test.text, test.margin, test.supports
      ('0.50 ± 0.00', 'at least 0.5', 0.0)
    """
    return _bounded(measured, bound, unit, form, side=1)


def at_most(
    measured: xr.DataArray, bound: Any, *, unit: str = "", form: str = ".2f"
) -> list[Evidence]:
    """Tests whether a mean is at most a bound, as `at_least` does.

    Example:
      >>> gap = xr.DataArray([[0.1, 0.1], [0.4, 0.4]], {"M": [1, 2], "seed": [0, 1]})
      >>> bound = xr.DataArray([0.2, 0.3], {"M": [1, 2]})
      >>> [(test.name, test.supports) for test in at_most(gap, bound)]
      [('M = 1', 0.0), ('M = 2', 1.0)]
    """
    return _bounded(measured, bound, unit, form, side=-1)


def within(
    a: xr.DataArray,
    b: xr.DataArray | None = None,
    *,
    margin: float,
    unit: str = "",
    form: str = ".2f",
) -> list[Evidence]:
    """Tests whether the mean of a - b is at most `margin` away from 0, using two one-sided tests.

    Args:
      a: samples, as in `more`.
      b: samples to subtract; 0 without.
      margin: the largest difference that counts as none.
      unit: the unit of the numbers.
      form: the format of numbers.

    Example:
      >>> [test] = within(xr.DataArray([0.1, -0.1] * 10, dims="seed"), margin=0.5)
      >>> test.margin, test.supports < 0.00135
      ('within 0.5', True)
    """
    samples, pair = _difference(a, b)
    found = []
    for name, values in rows_of(samples):
        low, high = (
            mean_test(name, values, -side * margin, form, side=side, tie=True) for side in (1, -1)
        )
        # Give each side half of the level, because either of them may contradict.
        contradicts = float(np.minimum(1.0, 2 * np.minimum(low.contradicts, high.contradicts)))
        supports = float(np.maximum(low.supports, high.supports))
        nearer = max((low, high), key=lambda side: side.supports)
        needed = nearer.needed
        if needed and contradicts < supports:
            needed = partial(_of_two, needed)
        one = low._replace(supports=supports, contradicts=contradicts, needed=needed)
        found.append(one._replace(margin=f"within {margin:.3g}", region=(-margin, margin)))
    return _named(found, pair, unit, b)


def _of_two(needed: Any, level: float) -> int | None:
    """The number of seeds if either of two sides may contradict."""
    found: int | None = needed(level / 2)
    return found


def increases(
    x: str, y: xr.DataArray, *, by: float = 0.0, unit: str = "", form: str = ".2f"
) -> list[Evidence]:
    """Tests whether each value of y along x is above the one before, paired by seed.

    Args:
      x: the name of an axis.
      y: samples, as in `more`.
      by: the margin of each step.
      unit: the unit of the numbers.
      form: the format of numbers.

    Example:
      >>> gain = xr.DataArray([[1.0, 1.1], [1.8, 1.9]], {"M": [1, 2], "seed": [0, 1]})
      >>> [(test.name, test.text) for test in increases("M", gain)]
      [('M from 1 to 2', '0.80')]
    """
    ends = [label(x, value).removeprefix(f"{x} = ") for value in y[x].values]
    names = {x: [f"{x} from {low} to {high}" for low, high in pairwise(ends)]}
    below, above = (y.isel({x: at}).assign_coords(names) for at in (slice(-1), slice(1, None)))
    return more(above, below, by=by, unit=unit, form=form)


def first(
    values: xr.DataArray,
    axis: str,
    best: Any,
    *,
    by: float = 0.0,
    largest: bool = True,
    unit: str = "",
    form: str = ".2f",
) -> list[Evidence]:
    """Tests whether one value of an axis is ahead of every other, paired by seed.

    Args:
      values: samples over the axis and others, as in `more`.
      axis: the name of the axis, such as "algorithm".
      best: the value that should be first.
      by: the margin over each other one.
      largest: False if the smallest is first, as of losses.
      unit: the unit of the numbers.
      form: the format of numbers.

    Example:
      >>> loss = xr.DataArray([[1.0, 1.1], [1.8, 1.9]], {"rule": ["A", "B"], "seed": [0, 1]})
      >>> [(test.name, test.text) for test in first(loss, "rule", "A", largest=False)]
      [('B', '0.80')]
    """
    one, others = values.sel({axis: best}, drop=True), values.drop_sel({axis: [best]})
    pair = (one, others) if largest else (others, one)
    return more(*pair, by=by, unit=unit, form=form)


def fact(holds: Any, evidence: str, name: str = "") -> list[Evidence]:
    """Wraps a deterministic fact as a test.

    Args:
      holds: whether the fact holds, or None or NaN if unknown. An array gives one part per element.
      evidence: the numbers, as text.
      name: the name of the part.

    Example:
      >>> fact(True, "3 of 3 models converged")[0].supports
      0.0
    """
    if isinstance(holds, xr.DataArray) and holds.dims:
        words = places(holds, *map(str, holds.dims))
        return [_fact(holds.sel(at).item(), evidence, ", ".join(text)) for at, text in words]
    return [_fact(holds, evidence, name)]


def _fact(holds: Any, evidence: str, name: str) -> Evidence:
    known = float("nan") if holds is None else float(holds)
    return Evidence(name, evidence, 1 - known, known)


Standing = Literal["ahead", "level", "behind", "undecided"]


def standing(
    lead: xr.DataArray, margin: float, form: str = ".2f", of: Of = "mean"
) -> list[Standing]:
    """Whether each mean or median is above a margin, within it, or below it.

    Args:
      lead: samples over ``(..., "seed")``, such as paired differences between methods.
      margin: the smallest lead of interest.
      form: the format of numbers in the evidence.
      of: as in `more`. The sign test never finds a median within a margin.

    Example:
      >>> standing(xr.DataArray([[3.0, 2.0] * 10, [0.1] * 20], dims=("M", "seed")), 1.0)
      ['ahead', 'level']
    """
    answers: dict[Standing, list[Evidence]] = {
        "ahead": more(lead, by=margin, form=form, of=of),
        "level": within(lead, margin=margin) if of == "mean" else [],
        "behind": less(lead, by=-margin, of=of),
    }

    def verdict(test: Evidence) -> Verdict:
        return test.verdict((LEVEL, LEVEL), LEVEL)

    return [
        next(
            (word for word, x in answers.items() if x and verdict(x[i]) == "supported"), "undecided"
        )
        for i in range(len(answers["ahead"]))
    ]


def _difference(a: xr.DataArray, b: xr.DataArray | None) -> tuple[xr.DataArray, str]:
    """The paired difference a - b, and a name from the coordinates that differ."""
    if b is None:
        return a, ""
    try:
        with xr.set_options(arithmetic_join="exact"):
            samples = a - b
    except ValueError as error:
        raise ValueError(
            "a and b cannot be paired, because their seeds or other coordinates differ; select the "
            f"same of both ({error})"
        ) from None
    words = [
        " minus ".join(label(str(name), each[name].item()) for each in (a, b))
        for name in a.coords
        if name in b.coords and a[name].ndim == b[name].ndim == 0
        if a[name].item() != b[name].item()
    ]
    return samples.transpose(*(dim for dim in a.dims), ...), ", ".join(words)


def _beyond(
    a: xr.DataArray, b: Any, by: Any, of: Of, unreached: Any, unit: str, form: str, *, side: int
) -> list[Evidence]:
    samples, pair = _difference(a, b)
    if of == "median":
        found = _medians(samples, by, unreached, form, side=side)
    else:
        found = [mean_test(*row, by, form, side=side, tie=False) for row in rows_of(samples)]
    return _named(found, pair, unit, b)


def _bounded(
    measured: xr.DataArray, bound: Any, unit: str, form: str, *, side: int
) -> list[Evidence]:
    pair, margin = "", bound
    if isinstance(bound, xr.DataArray):
        (measured, pair), margin = _difference(measured, bound), 0.0
    rows = rows_of(measured)
    found = [mean_test(*row, margin, form, side=side, tie=True) for row in rows]
    return _named(found, pair, unit, bound)


def _medians(
    samples: xr.DataArray, by: Any, unreached: Any, form: str, *, side: int
) -> list[Evidence]:
    limits = np.nan if unreached is None else unreached
    each = zip(rows_of(samples), each_of(samples, by), each_of(samples, limits), strict=True)
    return [sign_test(*row, margin, top, form, side=side) for row, margin, top in each]


def _named(found: list[Evidence], pair: str, unit: str, other: Any) -> list[Evidence]:
    names = [", ".join(filter(None, (pair, test.name))) for test in found]
    is_paired = isinstance(other, xr.DataArray) and "seed" in other.dims
    about: Any = {"unit": unit, "is_paired": is_paired}
    return [x._replace(name=name, **about) for x, name in zip(found, names, strict=True)]
