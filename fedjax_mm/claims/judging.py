"""Judges claims about a result, with one error rate for all comparisons and all looks."""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Annotated, Any, NamedTuple

import xarray as xr
from annotated_types import Interval

from fedjax_mm.checks.annotations import checked
from fedjax_mm.checks.values import described
from fedjax_mm.claims.evidence import Evidence, combined
from fedjax_mm.claims.parts import Part, Verdict
from fedjax_mm.results.labels import number

Claim = Callable[[xr.Dataset], Iterable[Any]]
"""A function of a result that yields comparisons, such as those of `more`."""

_HEADER = ("claim", "difference", "interval", "holds if", "seeds", "verdict", "seeds needed")


class Judged(NamedTuple):
    """A claim and its verdict.

    Attributes:
      name: the name of its function.
      text: the first line of the function's docstring, or its name as text.
      verdict: "supported" if all comparisons are, "contradicted" if one is, or "not settled", or
        "not tested" if runs that diverged or missed a target could change the verdict.
      evidence: the comparisons.
      parts: their verdicts.
      levels: the probabilities that a comparison is beyond one end of its interval.
    """

    name: str
    text: str
    verdict: Verdict
    evidence: tuple[Evidence, ...]
    parts: tuple[Part, ...]
    levels: tuple[float, ...]

    @property
    def intervals(self) -> tuple[tuple[float, float], ...]:
        """The limits of each comparison, or NaN for facts and untested ones."""
        return tuple(
            (math.nan, math.nan) if test.interval is None else test.interval(level)
            for test, level in zip(self.evidence, self.levels, strict=True)
        )

    def sentence(self, confidence: float = 0.95) -> str:
        """The claim, its verdict, and the comparisons with this verdict, in a sentence.

        Args:
          confidence: the simultaneous confidence of the intervals.
        """
        parts = self.parts
        if len(parts) == 1:  # the claim names the comparison
            parts = (parts[0].model_copy(update={"name": ""}),)
        rows = zip(self.evidence, parts, self.intervals, strict=True)
        each = "; ".join(_in_words(*row) for row in rows if row[1].verdict == self.verdict)
        text = self.text.rstrip(".")
        words = {
            "supported": f"{text}: {each}",
            "contradicted": f"It is not so that {text[:1].lower()}{text[1:]}: {each}",
        }
        known = words.get(self.verdict, f"{self.verdict.capitalize()} whether {text}: {each}")
        return f"{known} ({100 * confidence:g} % simultaneous)."


class Verdicts(NamedTuple):
    """The verdicts on some claims, which print as a table.

    Attributes:
      claims: the judged claims.
      level: the probability that any verdict is wrong, at any look.
      look: the number of looks before, or None if there is only one.
    """

    claims: tuple[Judged, ...]
    level: float
    look: int | None = None

    @property
    def is_settled(self) -> bool:
        """Whether no comparison is open."""
        return not any(part.verdict == "not settled" for each in self.claims for part in each.parts)

    def after(self, before: "Verdicts") -> "Verdicts":
        """These verdicts, except where an earlier look has decided already.

        Raises:
          ValueError: if the claims have another number of comparisons.
        """
        found = []
        for new, old in zip(self.claims, before.claims, strict=True):
            if len(new.parts) != len(old.parts):
                raise ValueError(
                    f"{new.name!r} had {len(old.parts)} comparisons and has {len(new.parts)}; the "
                    "number must not depend on the result"
                )
            rows = [
                later if earlier[1].verdict == "not settled" else earlier
                for later, earlier in zip(
                    zip(new.evidence, new.parts, new.levels, strict=True),
                    zip(old.evidence, old.parts, old.levels, strict=True),
                    strict=True,
                )
            ]
            evidence, parts, levels = map(tuple, zip(*rows, strict=True))
            verdict = combined(part.verdict for part in parts)
            found.append(Judged(new.name, new.text, verdict, evidence, parts, levels))
        return self._replace(claims=tuple(found))

    @property
    def sentences(self) -> tuple[str, ...]:
        """What to write about each claim."""
        return tuple(each.sentence(1 - self.level) for each in self.claims)

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """A header and a row of text for each comparison."""
        found = [_HEADER]
        for each in self.claims:
            for test, part, (low, high) in zip(
                each.evidence, each.parts, each.intervals, strict=True
            ):
                name = f"{each.name}: {part.name}".removesuffix(": ")
                is_known = math.isfinite(low) or math.isfinite(high)
                limits = f"{low:{test.form}} to {high:{test.form}}" if is_known else ""
                seeds = f"{part.seeds or ''}", part.verdict, f"{part.needed or ''}"
                text = f"{part.evidence} {test.unit}".strip()
                found.append((name, text, limits, part.margin, *seeds))
        return tuple(found)

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = [
            "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in self.rows
        ]
        return "\n".join([*lines, self._about])

    def _repr_html_(self) -> str:
        header, *rows = (
            "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
            for tag, row in zip(["th", *["td"] * len(self.rows)], self.rows, strict=False)
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><tr>{header}</tr>{body}</table><p>{escape(self._about)}</p>"

    @property
    def _about(self) -> str:
        looks = "" if self.look is None else f" after look {self.look + 1}"
        return f"Intervals hold together with a probability of {100 * (1 - self.level):g} %{looks}."


@checked
def judge(
    result: xr.Dataset,
    claims: Claim | Sequence[Claim],
    *,
    level: Annotated[float, Interval(gt=0, lt=1)] = 0.05,
    look: int | None = None,
) -> Verdicts:
    """Judges claims about a result, so that with probability 1 - level no verdict is wrong.

    Each of K comparisons has two one-sided tests, of which each gets the level / (2 K), by
    Bonferroni's inequality; hence all intervals hold at once, too. At look j = 0, 1, ... at growing
    samples the level is divided by (j + 1) (j + 2), whose inverses sum to 1, for any number of
    looks.

    Args:
      result: the result of `sweep` or `run`.
      claims: functions of the result that yield comparisons, such as those of `more`. Both
        comparisons and their number must be chosen without looking at the result.
      level: the probability that any verdict is wrong.
      look: the number of earlier looks at some of these seeds; None if seeds are not added until
        claims are decided, as `settle` does.

    Raises:
      ValueError: if a claim yields no comparison.

    Example:
      >>> from fedjax_mm.claims import more
      >>> rows = {"algorithm": ["A", "B"], "seed": range(20)}
      >>> accuracy = xr.DataArray([[83.0, 82.0] * 10, [80.0, 80.0] * 10], rows, name="accuracy")
      >>> def better(result):
      ...     '''A is better than B.'''
      ...     accuracy = result.accuracy
      ...     yield more(accuracy.sel(algorithm="A"), accuracy.sel(algorithm="B"), unit="points")
      >>> found = judge(accuracy.to_dataset(), better)
      >>> found.claims[0].verdict
      'supported'
      >>> found.sentences[0]
      'A is better than B: by 2.50 ± 0.36 points, 20 seeds, paired (95 % simultaneous).'

    Reference: Robbins, "Statistical Methods Related to the Law of the Iterated Logarithm" (1970),
    and Howard et al., "Time-uniform, nonparametric, nonasymptotic confidence sequences" (2021),
    for spending the level over looks.
    """
    functions = [claims] if callable(claims) else list(claims)
    tests = [evidence_of(claim, result) for claim in functions]
    of_each = level / (2 * sum(map(len, tests)))
    at_look = of_each if look is None else of_each / ((look + 1) * (look + 2))
    found = []
    for claim, evidence in zip(functions, tests, strict=True):
        parts = tuple(test.part((at_look, at_look), at_look) for test in evidence)
        name = getattr(claim, "__name__", "claim").replace("_", " ").strip()
        text = (inspect.getdoc(claim) or name).splitlines()[0]
        verdict = combined(part.verdict for part in parts)
        found.append(Judged(name, text, verdict, evidence, parts, (at_look,) * len(parts)))
    return Verdicts(tuple(found), level, look)


def evidence_of(claim: Claim, result: xr.Dataset) -> tuple[Evidence, ...]:
    """The comparisons of one claim."""
    if not callable(claim):
        raise TypeError(
            f"a claim is {described(claim)}; give a function of a result that yields comparisons, "
            "such as those of claims.more"
        )
    found = list[Evidence]()
    for each in claim(result):
        found += [each] if isinstance(each, Evidence) else each
    if not found:
        raise ValueError(f"{claim!r} yields no comparison; yield those of more or within")
    return tuple(found)


def _in_words(test: Evidence, part: Part, interval: tuple[float, float]) -> str:
    """The evidence of one comparison, with the wider half of its interval."""
    low, high = interval
    name = f"{part.name}, " if part.name else ""
    if not math.isfinite(high - low):
        text = f"{name}{part.evidence} {test.unit}".strip()
    else:
        half = max(high - test.center, test.center - low)
        text = f"{name}by {number(test.center, half, test.form)} {test.unit}".strip()
    if part.margin and 0 not in test.region:
        text += f" (holds if {part.margin})"
    if part.seeds:
        text += f", {part.seeds} seeds" + ", paired" * test.is_paired
    if part.verdict == "not settled" and part.needed:
        text += f", about {part.needed:,} would settle it"
    return text
