"""Rulings on a paper's statements, and checks of our own, from the evidence of `fedjax_mm.claims`.

A statement has one or more *parts*, such as a comparison with each of six methods. Each has two
one-sided tests at the tail of 3 standard errors, one for the statement and one against it, each of
which errs with probability 0.135 % at most. A mean takes 20 seeds.

A statement is *supported* if every part is, *contradicted* if one of its K parts is contradicted at
the level 0.135 % / K, because each of K parts may err, and otherwise *not settled*. A part that is
*not tested* neither supports nor contradicts. `Published.word` has the words for evidence against a
sentence, and for printed numbers.

Verdicts are recomputed whenever seeds are added, and each verdict may err. If seeds are doubled
from 20 to 640 and the true mean is exactly at its margin, one of the two errors is made with
probability 0.8 % for normal samples. `fedjax_mm.settle` has levels for looking repeatedly.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import xarray as xr

from fedjax_mm.claims import Evidence, less, more, standing
from fedjax_mm.claims.evidence import LEVEL, combined
from fedjax_mm.claims.parts import Part
from fedjax_mm.papers.schema import Check, Outcome, Reading, Word


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
      *parts: results of comparisons of `fedjax_mm.claims`, such as `more` or `fact`.
      about: evidence that belongs to no part.
      takes: the requirements for testing an untested part.
      looseness: the least ratio of a bound to the bounded quantity.
      is_shared: whether the parts share the level, as those of a sentence do. Printed numbers have
        a verdict each.
    """
    tests = [test for each in parts for test in each]
    levels = LEVEL, LEVEL / (len(tests) or 1 if is_shared else 1)
    found = tuple(test.part(levels, LEVEL) for test in tests)
    loose = None if looseness is None else float(looseness)
    return Ruling(key, combined(part.verdict for part in found), found, about, takes, loose)


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


def compare(
    text: str,
    lead: xr.DataArray,
    margin: float,
    form: str = ".2f",
    of: Literal["mean", "median"] = "mean",
) -> Check:
    """Whether all means or medians are above a margin, within it, or below it.

    Args:
      text: the question.
      lead: samples over ``(..., "seed")``, for example paired differences between methods.
      margin: the smallest lead of interest.
      form: the format of numbers in the evidence.
      of: as in `more`.
    """
    words = standing(lead, margin, form, of)
    ahead, behind = (
        more(lead, by=margin, form=form, of=of),
        less(lead, by=-margin, form=form, of=of),
    )
    nearer = [one if one.center > 0 else two for one, two in zip(ahead, behind, strict=True)]
    shown = [f"{test.name}: {test.text}".removeprefix(": ") for test in nearer]
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
