"""Decision rules that turn samples, one per seed, into the verdict on a statement.

A statement has one or more *parts*, such as a comparison with each of six methods. A part consists
of two one-sided tests at the tail of 3 standard errors, one for the statement and one against it,
each of which errs with probability 0.135 % at most:

- A mean is decided from 20 seeds on, by Student's t reduced by 5 (g + 40 / N) / sqrt(N), where g is
  the skewness of the N samples towards the margin, if that is positive. Student's t alone is exact
  for normal samples only: with 20 seeds it errs with probability 1.9 % if the law is exponential,
  and the reduced one with 0.09 %. Both numbers of the reduction come from simulations of normal,
  exponential and two-humped laws, with 20 to 400 seeds. Fewer seeds may miss a whole hump: of a law
  with 30 % of its mass in a second hump, 8 samples see only the first with probability 5.8 %.
- A median is decided by the sign test, which is exact for every law.
- Samples that are all equal decide without an error. If they lie exactly at the margin, "at least"
  and "within" hold and "more than" does not.

If a sample's mean and median are more than a standard error apart, the evidence has both.

A statement is *supported* if every part is, *contradicted* if one of its K parts is contradicted at
the level 0.135 % / K, because each of K parts may err, and otherwise *not settled*. A part whose
samples include NaN or an infinite number, because a run diverged or missed a target, is *not
tested*, unless these samples cannot change its verdict: it neither supports nor contradicts.
`Published.word` has the words for evidence against a sentence, and for printed numbers.

Verdicts are recomputed whenever seeds are added, and each verdict may err. If seeds are doubled
from 20 to 640 and the true mean is exactly at its margin, one of the two errors is made with
probability 0.8 % for normal samples.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from fedjax_mm.metrics import standard_error
from fedjax_mm.papers.schema import FEWEST, Check, Outcome, Part, Reading, Verdict, Word
from fedjax_mm.results.labels import number, places

LEVEL = math.erfc(3 / math.sqrt(2)) / 2
"""The error probability of one test: the one-sided tail beyond 3 standard errors."""

_ONE_ERROR = math.erfc(1 / math.sqrt(2)) / 2  # the tail beyond 1 standard error
_MOST_SEEDS = 10_000  # the largest number reported as needed to settle a statement
_ROUNDOFF = 1e-9  # relative difference of numbers that count as equal
_MEANS_FROM = 20  # the fewest seeds that decide a mean


class Evidence(NamedTuple):
    """Two one-sided tests of one comparison.

    Attributes:
      name: the name of the comparison, derived from its coordinates.
      text: the numbers, as text.
      supports: the p-value of the evidence for the statement, or NaN if it is not tested.
      contradicts: the p-value of the evidence against the statement.
      seeds: the number of samples, or None if nothing was random.
      needed: returns the number of seeds with which the smaller p-value would be below a level.
      margin: the limit of the comparison, as text.
    """

    name: str
    text: str
    supports: float
    contradicts: float
    seeds: int | None = None
    needed: Callable[[float], int | None] | None = None
    margin: str = ""


class Ruling(NamedTuple):
    """The verdict on the statement with this key in `published.toml`."""

    key: str
    verdict: Word
    parts: tuple[Part, ...] = ()
    about: str = ""
    takes: str = ""
    looseness: float | None = None


def ruling(
    key: str,
    *parts: Sequence[Evidence],
    about: str = "",
    takes: str = "",
    looseness: Any = None,
    is_shared: bool = True,
) -> Ruling:
    """Combines the parts of a statement into its verdict.

    Args:
      key: the statement's key.
      *parts: results of `more`, `less`, `no_less`, `alike`, `median_more`, `welch` or `fact`.
      about: evidence that belongs to no part.
      takes: the requirements for testing an untested part.
      looseness: the least ratio of a bound to the bounded quantity.
      is_shared: whether the parts share the level, as those of a sentence do. Printed numbers have
        a verdict each.
    """
    tests = [test for each in parts for test in each]
    found = tuple(_part(test, len(tests) if is_shared else 1) for test in tests)
    loose = None if looseness is None else float(looseness)
    return Ruling(key, _combined(part.verdict for part in found), found, about, takes, loose)


def untested(key: str, because: str, takes: str = "") -> Ruling:
    """A ruling that these settings or data do not test a statement."""
    return Ruling(key, "not tested", about=because, takes=takes)


def under(reading: str, item: str, rulings: Iterable[Ruling | Check]) -> Iterator[Reading]:
    """Yields the verdicts on an item's statements under another reading.

    The evidence is that of the first comparison with the verdict of the whole. Evidence against a
    sentence does not contradict it, because other readings remain.
    """
    for each in rulings:
        if isinstance(each, Ruling):
            alike = [part for part in each.parts if part.verdict == each.verdict]
            texts = [f"{part.name}: {part.evidence}".removeprefix(": ") for part in alike[:1]]
            texts += [f"and {len(alike) - 1} more"] * (len(alike) > 1)
            yield Reading(
                statement=f"{item}/{each.key}",
                reading=reading,
                verdict="not reproduced" if each.verdict == "contradicted" else each.verdict,
                evidence=", ".join(texts) or each.about,
            )


def check(text: str, passed: Any, evidence: str = "") -> Check:
    """The outcome of one of our own checks, which our work must pass.

    Args:
      text: the property that is checked.
      passed: whether the check passed; an array must be all true, and None or NaN means undecided.
        Tests, such as the result of `more`, also provide the evidence.
      evidence: the numbers.
    """
    return _checked(text, passed, evidence, ("passed", "defect"))


def finding(text: str, holds: Any, evidence: str = "") -> Check:
    """The outcome of a check of a property that need not hold, see `check`."""
    return _checked(text, holds, evidence, ("holds", "does not hold"))


def compare(text: str, lead: xr.DataArray, margin: float, form: str = ".2f") -> Check:
    """Whether all means are above a margin, within it, or below it.

    Args:
      text: the question.
      lead: samples over ``(..., "seed")``, for example paired differences between methods.
      margin: the smallest lead of interest.
      form: the format of numbers in the evidence.
    """
    ahead = more(lead, by=margin, form=form)
    answers: dict[Outcome, list[Evidence]] = {
        "ahead": ahead,
        "level": alike(lead, margin),
        "behind": less(lead, by=-margin),
    }
    words: list[Outcome] = [
        next((word for word, tests in answers.items() if tests[i].supports < LEVEL), "undecided")
        for i in range(len(ahead))
    ]
    shown = [f"{test.name}: {test.text}".removeprefix(": ") for test in ahead]
    if len(set(words)) > 1:
        shown = [f"{each} ({word})" for each, word in zip(shown, words, strict=True)]
    outcome: Outcome = words[0] if len(set(words)) == 1 else "undecided"
    return Check(text=text, outcome=outcome, evidence="; ".join(shown))


def _checked(text: str, holds: Any, evidence: str, words: tuple[Outcome, Outcome]) -> Check:
    outcomes: dict[Word, Outcome] = {"supported": words[0], "contradicted": words[1]}
    if isinstance(holds, list):
        found = ruling("", holds)
        shown = evidence or "; ".join(
            filter(None, (f"{test.name}: {test.text}".removeprefix(": ") for test in holds))
        )
        return Check(text=text, outcome=outcomes.get(found.verdict, "undecided"), evidence=shown)
    entries = np.asarray(np.nan if holds is None else holds, float)
    is_known = entries.size > 0 and not np.isnan(entries).any()
    word = words[0] if entries.all() else words[1]
    return Check(text=text, outcome=word if is_known else "undecided", evidence=evidence)


def more(samples: xr.DataArray, by: float = 0.0, form: str = ".2f") -> list[Evidence]:
    """Tests whether the mean is above `by`. Samples that all equal `by` contradict it.

    Args:
      samples: samples over ``(..., "seed")``, for example paired differences between methods.
      by: the margin.
      form: the format of numbers in the evidence.

    Example:
      >>> lead = xr.DataArray([[3.0, 2.0] * 10], dims=["metric", "seed"])
      >>> [test] = more(lead.assign_coords(metric=["accuracy"]))
      >>> ruling("lead", [test]).verdict, test.text
      ('supported', '2.50 ± 0.11')
    """
    return [_mean_test(*row, by, form, side=1, tie=False) for row in rows_of(samples)]


def less(samples: xr.DataArray, by: float = 0.0, form: str = ".2f") -> list[Evidence]:
    """Tests whether the mean is below `by`. Samples that all equal `by` contradict it."""
    return [_mean_test(*row, by, form, side=-1, tie=False) for row in rows_of(samples)]


def no_less(samples: xr.DataArray, margin: float, form: str = ".2f") -> list[Evidence]:
    """Tests whether the mean is at least -margin. Samples that all equal -margin support this."""
    return [_mean_test(*row, -margin, form, side=1, tie=True) for row in rows_of(samples)]


def no_more(samples: xr.DataArray, by: float, form: str = ".2f") -> list[Evidence]:
    """Tests whether the mean is at most `by`. Samples that all equal `by` support this."""
    return [_mean_test(*row, by, form, side=-1, tie=True) for row in rows_of(samples)]


def alike(samples: xr.DataArray, margin: float, form: str = ".2f") -> list[Evidence]:
    """Tests whether the mean is at most `margin` away from 0, using two one-sided tests."""
    found = []
    for name, values in rows_of(samples):
        low, high = (
            _mean_test(name, values, -side * margin, form, side=side, tie=True) for side in (1, -1)
        )
        # Give each side half of the level, because either of them may contradict.
        contradicts = float(np.minimum(1.0, 2 * np.minimum(low.contradicts, high.contradicts)))
        supports = float(np.maximum(low.supports, high.supports))
        nearer = max((low, high), key=lambda side: side.supports)
        needed = nearer.needed
        if needed and contradicts < supports:
            needed = partial(_of_two, needed)
        found.append(
            Evidence(name, low.text, supports, contradicts, low.seeds, needed, _in(margin))
        )
    return found


def _in(margin: float) -> str:
    return f"within {margin:.3g}"


def _of_two(needed: Callable[[float], int | None], level: float) -> int | None:
    """The number of seeds if either of two sides may contradict."""
    return needed(level / 2)


def median_more(
    samples: xr.DataArray, by: Any, unreached: Any = None, form: str = ".2f"
) -> list[Evidence]:
    """Tests whether the median is above `by`, from the number of seeds above and below it.

    Args:
      samples: samples over ``(..., "seed")``, with NaN where a target was not reached.
      by: the margin, a number or an array over the other dimensions.
      unreached: an upper limit for samples that are NaN, or None if nothing is known about them.
      form: the format of numbers in the evidence.
    """
    first = samples.isel(seed=0, drop=True)
    limits = xr.DataArray(np.nan if unreached is None else unreached)
    margins, tops = (
        xr.DataArray(each).broadcast_like(first).transpose(*first.dims).values.ravel()
        for each in (by, limits)
    )
    return [
        _sign_test(*row, margin, top, form)
        for row, margin, top in zip(rows_of(samples), margins, tops, strict=True)
    ]


def median_less(samples: xr.DataArray, by: float, form: str = ".2f") -> list[Evidence]:
    """Tests whether the median is below `by`, from the number of seeds below and above it."""
    return [_sign_test(*row, by, np.nan, form, side=-1) for row in rows_of(samples)]


def fact(holds: Any, evidence: str, name: str = "") -> list[Evidence]:
    """Wraps a deterministic fact as a test.

    Args:
      holds: whether the fact holds, or None or NaN if unknown. An array gives one part per element.
      evidence: the numbers, as text.
      name: the name of the part.
    """
    if isinstance(holds, xr.DataArray) and holds.dims:
        words = places(holds, *map(str, holds.dims))
        return [_fact(holds.sel(at).item(), evidence, ", ".join(text)) for at, text in words]
    return [_fact(holds, evidence, name)]


def _fact(holds: Any, evidence: str, name: str) -> Evidence:
    known = float("nan") if holds is None else float(holds)
    return Evidence(name, evidence, 1 - known, known)


def _part(test: Evidence, num_parts: int) -> Part:
    """One of several comparisons with its verdict."""
    verdict: Verdict = "not settled"
    if math.isnan(test.supports) or math.isnan(test.contradicts):
        verdict = "not tested"
    elif test.supports < LEVEL:
        verdict = "supported"
    elif test.contradicts < LEVEL / num_parts:
        verdict = "contradicted"
    about: dict[str, Any] = {"name": test.name, "verdict": verdict, "evidence": test.text}
    about["margin"] = test.margin
    if verdict == "not settled":
        is_for = test.supports < test.contradicts
        if min(test.supports, test.contradicts) < _ONE_ERROR:
            about["leans"] = "for" if is_for else "against"
        if test.needed and (test.seeds or 0) >= FEWEST:
            about["needed"] = test.needed(LEVEL if is_for else LEVEL / num_parts)
    return Part(**about, seeds=test.seeds)


def _combined(verdicts: Iterable[Word]) -> Verdict:
    found = set(verdicts)
    order: tuple[Verdict, ...] = ("contradicted", "not tested", "not settled", "supported")
    return next((verdict for verdict in order if verdict in found), "not tested")


def rows_of(samples: xr.DataArray) -> list[tuple[str, np.ndarray]]:
    """The samples ``[seeds]`` of every comparison, with its coordinates as text."""
    dims = [str(dim) for dim in samples.dims if dim != "seed"]
    values = samples.transpose(*dims, "seed").values.astype(float)
    names = [", ".join(words) for _, words in places(samples, *dims)]
    return list(zip(names, values.reshape(len(names), -1), strict=True))


def _mean_test(
    name: str, samples: np.ndarray, margin: float, form: str, *, side: int, tie: bool
) -> Evidence:
    """Tests whether the mean is above (side 1) or below (-1) a margin; `tie` if all are equal."""
    size, words = len(samples), {1: ("above", "at least"), -1: ("below", "at most")}
    beyond = f"{words[side][tie]} {margin + 0:.3g}"
    if not np.isfinite(samples).all():
        lost = size - int(np.isfinite(samples).sum())
        text = f"{lost} of {size} seeds diverged, did not reach the target or were left out"
        text = "not run" if lost == size and np.isnan(samples).all() else text
        return Evidence(name, text, np.nan, np.nan, size, margin=beyond)
    mean, error, median = samples.mean(), float(standard_error(samples)), np.median(samples)
    evidence, room = number(mean, error if size > 2 else np.nan, form), side * (mean - margin)
    if size == 1:
        return Evidence(name, evidence, 1.0, 1.0, size, margin=beyond)
    roundoff = _ROUNDOFF * max(abs(mean), abs(margin))
    if error <= roundoff:
        holds = tie if abs(room) <= roundoff else room > 0
        return Evidence(name, evidence, float(not holds), float(holds), size, margin=beyond)
    evidence += f" (median {median:{form}})" * bool(size > 2 and abs(mean - median) > 1.01 * error)
    effect = room / (error * math.sqrt(size))
    skewness = side * float(np.mean((samples - mean) ** 3) / np.mean((samples - mean) ** 2) ** 1.5)
    # A tail that was not drawn can only be on the side of the margin if it is to change the answer.
    supports, contradicts = (
        partial(_p_value, effect=sign * effect, skewness=-sign * skewness) for sign in (1, -1)
    )
    needed = partial(_least, supports if room > 0 else contradicts)
    p_values = float(supports(size)), float(contradicts(size))
    return Evidence(name, evidence, *p_values, size, needed, beyond)


def _p_value(size: Any, effect: float, skewness: float) -> Any:
    """The p-value of Student's t, reduced where the law may be skewed towards the margin.

    Args:
      size: n, the number of samples.
      effect: t / sqrt(n), positive for the conclusion.
      skewness: the sample's skewness, positive if its longer tail is on the side of the margin.
    """
    from scipy.special import stdtr

    size = np.asarray(size)
    t = np.sqrt(size) * effect
    # The quantile of an exponential law's t is that of a normal one's plus about 10 / sqrt(n), for
    # a skewness of 2. A sample without its tail looks less skewed, the more so the smaller it is.
    reduced = t - 5 * np.maximum(skewness + 40 / size, 0) / np.sqrt(size)
    undecided = np.maximum(stdtr(size - 1, -t), LEVEL)
    return np.where(size < _MEANS_FROM, undecided, stdtr(size - 1, -reduced))


def _sign_test(
    name: str, samples: np.ndarray, by: float, top: float, form: str, side: int = 1
) -> Evidence:
    """Tests whether more than half of the samples are above (side 1) or below (-1) a margin."""
    from scipy.special import bdtrc

    size, missing = len(samples), np.isnan(samples)
    samples, beyond = side * samples, f"{'above' if side > 0 else 'below'} {by:g}"
    by *= side
    # A censored sample counts as low if its upper limit is low, and otherwise for neither side.
    is_low = top <= by
    low = int((samples < by).sum()) + int(missing.sum()) * is_low
    high, unknown = int((samples > by).sum()), int(missing.sum()) * (not is_low)
    middle = side * float(np.median(np.where(missing, -np.inf, samples)))
    median = f"{middle:{form}}" if np.isfinite(middle) else "not reached"
    text = f"median {median}, {high} of {size} seeds {beyond}"
    text += f", {int(missing.sum())} did not reach the target" if missing.any() else ""
    # Use P(X >= k) for X ~ Binomial(size, 1/2). Ties and unknown samples count for neither side.
    supports, contradicts = (float(bdtrc(k - 1, size, 0.5)) if k else 1.0 for k in (high, low))
    if high == low == unknown == 0:  # all samples equal the margin, so none is above it
        supports, contradicts = 1.0, 0.0
    # Unknown samples matter only if one of the tests would decide with all of them on its side.
    best = float(bdtrc(max(high, low) + unknown - 1, size, 0.5))
    if unknown and min(supports, contradicts) >= LEVEL > best:
        supports = contradicts = np.nan
    share = max(high, low) / size
    needed = partial(_least, lambda sizes: bdtrc(np.floor(share * sizes) - 1, sizes, 0.5))
    return Evidence(name, text, supports, contradicts, size, needed, f"median {beyond}")


def _least(p_value: Callable[[Any], Any], level: float) -> int | None:
    """The smallest number of seeds with a p-value below a level, or None if too large."""
    sizes = range(2, _MOST_SEEDS + 1)
    found = bisect_left(sizes, True, key=lambda size: bool(p_value(size) < level))
    return sizes[found] if found < len(sizes) else None
