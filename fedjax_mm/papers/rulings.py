"""Rules of decision: from samples, one for each seed, to the verdict on a statement.

A statement has one or more *parts*, such as a comparison with each of six methods. A part is two
one-sided tests at 3 standard errors, one for the statement and one against it: each errs with
probability 0.135 %. The spread of a few seeds is itself uncertain, so Student's quantile with that
tail replaces 3: 19.2 with 3 seeds, 6.6 with 5, 4.1 with 10, 3.4 with 20.

A statement is *supported* if every part is, *contradicted* if one of its K parts is at the level
0.135 % / K, because each of K parts may err, and otherwise *not settled*. A part whose samples
include NaN or an infinite number, because a run diverged or a target was not reached, is *not
tested*: it neither supports nor contradicts. Samples that are all equal decide without an error;
where they lie exactly at the margin, "at least" and "within" hold and "more than" does not.

Verdicts are looked at again whenever seeds are added, and each look may err. If seeds are doubled
from 3 to 96 and the true mean is exactly at its margin, one of the two errors is made with
probability 1.4 % (0.7 % for each side); with 3 standard errors instead of Student's quantile it
would be 12.7 %.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from fedjax_mm.metrics import standard_error
from fedjax_mm.papers.schema import Check, Outcome, Part, Verdict
from fedjax_mm.results.labels import number, places

LEVEL = math.erfc(3 / math.sqrt(2)) / 2
"""The probability of one error of one test: the one-sided tail beyond 3 standard errors."""

_MOST_SEEDS = 10_000  # that are named as what it would take
_ROUNDOFF = 1e-9  # of a difference of two equal numbers, relative to them


class Estimate(NamedTuple):
    """Means over seeds and their standard errors, over the samples' other dimensions."""

    mean: xr.DataArray
    error: xr.DataArray


class Evidence(NamedTuple):
    """Two one-sided tests of one comparison.

    Attributes:
      name: of the comparison, from its coordinates.
      text: the numbers.
      supports: the p-value of the evidence for the statement; NaN if it is not tested.
      contradicts: the p-value of the evidence against it.
      seeds: the number of samples; None if nothing was random.
      needed: the seeds at which one of the tests would decide.
    """

    name: str
    text: str
    supports: float
    contradicts: float
    seeds: int | None = None
    needed: int | None = None


class Ruling(NamedTuple):
    """The verdict on the statement with this key in `published.toml`."""

    key: str
    verdict: Verdict
    parts: tuple[Part, ...] = ()
    about: str = ""
    takes: str = ""


def estimate(samples: xr.DataArray, over: str = "seed") -> Estimate:
    """Returns the mean over a dimension and its standard error, NaN for a single sample."""
    samples = samples.astype(float)
    mean = samples.mean(over, skipna=False)
    error = standard_error(samples.values, axis=samples.get_axis_num(over))
    return Estimate(mean, mean.copy(data=error))


def ruling(key: str, *parts: Sequence[Evidence], about: str = "", takes: str = "") -> Ruling:
    """Returns the verdict on a statement from its parts.

    Args:
      key: of the statement.
      *parts: what `more`, `no_less`, `alike`, `median_more` and `fact` return.
      about: evidence that no part has.
      takes: what it would take to test a part that is not tested.
    """
    tests = [test for each in parts for test in each]
    found = tuple(_part(test, len(tests)) for test in tests)
    return Ruling(key, _combined(part.verdict for part in found), found, about, takes)


def untested(key: str, because: str, takes: str = "") -> Ruling:
    """Returns the ruling that these settings or data do not test a statement."""
    return Ruling(key, "not tested", about=because, takes=takes)


def check(text: str, passed: Any, evidence: str = "") -> Check:
    """Returns the outcome of a check of our own.

    Args:
      text: what is checked.
      passed: whether it passed, or an array of which all must be true; None or NaN if nothing
        decides; or tests, as of `more`, whose numbers then are the evidence.
      evidence: the numbers.
    """
    outcomes: dict[Verdict, Outcome] = {"supported": "passed", "contradicted": "failed"}
    if isinstance(passed, list):
        found = ruling("", passed)
        shown = evidence or "; ".join(
            filter(None, (f"{test.name}: {test.text}".removeprefix(": ") for test in passed))
        )
        return Check(text=text, outcome=outcomes.get(found.verdict, "undecided"), evidence=shown)
    entries = np.asarray(np.nan if passed is None else passed, float)
    is_known = entries.size > 0 and not np.isnan(entries).any()
    outcome: Outcome = ("passed" if entries.all() else "failed") if is_known else "undecided"
    return Check(text=text, outcome=outcome, evidence=evidence)


def more(samples: xr.DataArray, by: float = 0.0, form: str = ".2f") -> list[Evidence]:
    """Tests that the mean is above `by`; samples that all equal it contradict that.

    Args:
      samples: over ``(..., "seed")``, paired differences if methods are compared.
      by: the margin.
      form: of the numbers in the evidence.

    Example:
      >>> lead = xr.DataArray([[3.0, 2.0, 3.0, 2.5]], dims=["metric", "seed"])
      >>> [test] = more(lead.assign_coords(metric=["accuracy"]))
      >>> ruling("lead", [test]).verdict, test.text
      ('supported', '2.62 ± 0.24')
    """
    return [_mean_test(name, each, -by, form, 1.0) for name, each in _each(samples)]


def no_less(samples: xr.DataArray, margin: float, form: str = ".2f") -> list[Evidence]:
    """Tests that the mean is at least -margin; samples that all equal it support that."""
    return [_mean_test(name, each, margin, form, 0.0) for name, each in _each(samples)]


def alike(samples: xr.DataArray, margin: float, form: str = ".2f") -> list[Evidence]:
    """Tests that the mean is at most `margin` away from 0, by two one-sided tests."""
    found = []
    for name, each in _each(samples):
        low, high = (_mean_test(name, sign * each, margin, form, 0.0) for sign in (1, -1))
        evidence = _mean_test(name, each, margin, form, 0.0).text
        # Either side may contradict, so that each has half of the level.
        contradicts = min(1.0, 2 * min(low.contradicts, high.contradicts))
        needed = (
            None if None in (low.needed, high.needed) else max(low.needed or 0, high.needed or 0)
        )
        supports = max(low.supports, high.supports)
        found.append(Evidence(name, evidence, supports, contradicts, low.seeds, needed))
    return found


def median_more(
    samples: xr.DataArray, by: Any, unreached: Any = None, form: str = ".2f"
) -> list[Evidence]:
    """Tests that the median is above `by`, by the number of seeds above and below it.

    Args:
      samples: over ``(..., "seed")``; NaN where a target was not reached.
      by: the margin, a number or an array over the other dimensions.
      unreached: an upper limit of samples that are NaN; nothing is known of them if None.
      form: of the numbers in the evidence.
    """
    limits = xr.DataArray(np.nan if unreached is None else unreached)
    _, margins, tops = xr.broadcast(samples.isel(seed=0, drop=True), xr.DataArray(by), limits)
    return [
        _sign_test(name, each, _at(margins, each), _at(tops, each), form)
        for name, each in _each(samples)
    ]


def fact(holds: Any, evidence: str, name: str = "") -> list[Evidence]:
    """Takes a deterministic fact for a test.

    Args:
      holds: whether it holds; None or NaN if it is not known; an array has a part for each place.
      evidence: the numbers.
      name: of the part.
    """
    if isinstance(holds, xr.DataArray) and holds.dims:
        words = places(holds, *map(str, holds.dims))
        return [_fact(holds.sel(at).item(), evidence, ", ".join(text)) for at, text in words]
    return [_fact(holds, evidence, name)]


def _fact(holds: Any, evidence: str, name: str) -> Evidence:
    known = float("nan") if holds is None else float(holds)
    return Evidence(name, evidence, 1 - known, known)


def _part(test: Evidence, num_parts: int) -> Part:
    """Returns a comparison with its verdict as one of several."""
    verdict: Verdict = "not settled"
    if math.isnan(test.supports) or math.isnan(test.contradicts):
        verdict = "not tested"
    elif test.supports < LEVEL:
        verdict = "supported"
    elif test.contradicts < LEVEL / num_parts:
        verdict = "contradicted"
    needed = test.needed if verdict == "not settled" else None
    return Part(
        name=test.name, verdict=verdict, evidence=test.text, seeds=test.seeds, needed=needed
    )


def _combined(verdicts: Iterable[Verdict]) -> Verdict:
    found = set(verdicts)
    order: tuple[Verdict, ...] = ("contradicted", "not tested", "not settled", "supported")
    return next((verdict for verdict in order if verdict in found), "not tested")


def _each(samples: xr.DataArray) -> list[tuple[str, xr.DataArray]]:
    """Returns the samples of every comparison, with its coordinates in words."""
    dims = [str(dim) for dim in samples.dims if dim != "seed"]
    return [(", ".join(words), samples.sel(at)) for at, words in places(samples, *dims)]


def _at(values: xr.DataArray, samples: xr.DataArray) -> float:
    """Returns the entry of values at the samples' coordinates."""
    return float(values.sel({dim: samples[dim].item() for dim in values.dims}).item())


def _mean_test(
    name: str, samples: xr.DataArray, margin: float, form: str, tie_contradicts: float
) -> Evidence:
    """Tests that the mean plus a margin is positive, or not negative if a tie supports that."""
    from scipy.special import stdtr

    size, values = samples.sizes["seed"], samples.values.astype(float)
    if not np.isfinite(values).all():
        lost = int((~np.isfinite(values)).sum())
        text = f"{lost} of {size} seeds diverged, did not get there or were left out"
        return Evidence(name, text, np.nan, np.nan, size)
    mean, error = (each.item() for each in estimate(samples))
    room, scale = mean + margin, max(abs(mean), abs(margin), 1e-300)
    evidence = number(mean, error, form)
    if size == 1:
        return Evidence(name, evidence, 1.0, 1.0, size)
    if error <= _ROUNDOFF * scale:
        contradicts = tie_contradicts if abs(room) <= _ROUNDOFF * scale else float(room < 0)
        return Evidence(name, evidence, 1 - contradicts, contradicts, size)
    t = room / error
    spread = error * math.sqrt(size)
    needed = _seeds_needed(abs(room) / spread)
    return Evidence(
        name, evidence, float(stdtr(size - 1, -t)), float(stdtr(size - 1, t)), size, needed
    )


def _seeds_needed(effect: float) -> int | None:
    """Returns the seeds at which a mean of so many standard deviations is decided."""
    from scipy.special import stdtr

    sizes = np.arange(2, _MOST_SEEDS + 1)
    is_enough = stdtr(sizes - 1, -effect * np.sqrt(sizes)) < LEVEL
    return int(sizes[is_enough.argmax()]) if is_enough.any() else None


def _sign_test(name: str, samples: xr.DataArray, by: float, top: float, form: str) -> Evidence:
    """Tests that more than half of the samples are above a margin."""
    from scipy.special import bdtrc

    values, size = samples.values.astype(float), samples.sizes["seed"]
    missing = np.isnan(values)
    # A censored sample is known to be low if its upper limit is; otherwise it counts for neither.
    low = int((values < by).sum()) + int(missing.sum()) * (top <= by)
    high, unknown = int((values > by).sum()), int(missing.sum()) * (not top <= by)
    ties = size - low - high - unknown
    filled = np.where(missing, -np.inf, values)
    middle = float(np.median(filled)) if size else np.nan
    text = "not reached" if not np.isfinite(middle) else f"{middle:{form}}"
    evidence = f"median {text}; {high} of {size} seeds above {by:g}"
    evidence += f", {int(missing.sum())} did not get there" if missing.any() else ""
    # P(X >= k) for X ~ Binomial(size, 1/2); ties and unknown samples help neither side.
    supports, contradicts = (float(bdtrc(k - 1, size, 0.5)) if k else 1.0 for k in (high, low))
    if ties == size:
        supports, contradicts = 1.0, 0.0
    decided = supports < LEVEL or contradicts < LEVEL
    if unknown and not decided:
        supports = contradicts = np.nan
    share = max(high, low) / size
    return Evidence(name, evidence, supports, contradicts, size, _seeds_for_sign(share))


def _seeds_for_sign(share: float) -> int | None:
    """Returns the seeds at which a share of them on one side of a margin is decided."""
    from scipy.special import bdtrc

    sizes = np.arange(2, _MOST_SEEDS + 1)
    is_enough = bdtrc(np.floor(share * sizes) - 1, sizes, 0.5) < LEVEL
    return int(sizes[is_enough.argmax()]) if is_enough.any() else None
