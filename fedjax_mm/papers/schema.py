"""The schema of `summary.json`, shared by the items that write it and the report that reads it.

This module does not need JAX, so results can be shown on any machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from fedjax_mm.claims import parts as claims
from fedjax_mm.claims.parts import FEWEST, Schema

Verdict = Literal[
    "supported",
    "contradicted",
    "slip in print",
    "not reproduced",
    "not settled",
    "not tested",
]
Agreement = Literal["agrees", "differs", "too noisy", "not run"]
Word: TypeAlias = Verdict | Agreement
Outcome = Literal[
    "passed", "defect", "holds", "does not hold", "ahead", "level", "behind", "undecided"
]

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
AGREEMENTS: tuple[Agreement, ...] = get_args(Agreement)
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_OF_NUMBERS: dict[Word, Agreement] = {
    "supported": "agrees",
    "contradicted": "differs",
    "not settled": "too noisy",
    "not tested": "not run",
}


LOOSE = 100.0
"""A bound that is larger than this many times what it bounds, everywhere, hardly tests anything."""


class Part(claims.Part):
    """One comparison within a statement, with a word for its verdict that fits the statement."""

    verdict: Word


class Published(Schema):
    """A sentence of a paper, or some of its printed numbers, as in `published.toml`.

    Attributes:
      key: identifies the statement within its item.
      quote: the sentence, verbatim.
      where: the section, caption or appendix.
      numbers: how many printed numbers these are, or 0 for a sentence.
      rule: the interpretation of the sentence, including the quantity, direction and margin.
      unit: the unit of the evidence, such as "points".
      reading: our reading of the paper's protocol, if the paper leaves it open.
      slip: where the paper itself has it right, if the sentence is a slip in print.
      looked: the results that were known when the rule was made, if it was made after looking.
      data: the only dataset on which the sentence is tested, if any.
      takes: the requirements of a test.
      untested: the reason that no run can judge the statement, or empty if the code judges it.
    """

    key: str
    where: str
    quote: str = ""
    numbers: int = 0
    rule: str = ""
    unit: str = ""
    reading: str = ""
    slip: str = ""
    looked: str = ""
    data: str = ""
    takes: str = ""
    untested: str = ""

    def word(self, verdict: Word) -> Word:
        """The word for a verdict of the rules on this sentence, or on these numbers.

        Evidence against a sentence contradicts it only if no protocol that the paper allows could
        turn it. Where the paper leaves the protocol open, the sentence is not reproduced.
        """
        if self.numbers:
            return _OF_NUMBERS[verdict]
        if verdict == "contradicted" and self.slip:
            return "slip in print"
        return "not reproduced" if verdict == "contradicted" and self.reading else verdict


class Statement(Published):
    """A sentence of a paper, and the verdict of our runs.

    Attributes:
      verdict: the verdict on the whole sentence.
      parts: the comparisons within the sentence.
      about: evidence that belongs to no single comparison, or the reason for "not tested".
      looseness: the least ratio of a bound to the bounded quantity, if the statement is a bound.
    """

    verdict: Word
    parts: tuple[Part, ...] = ()
    about: str = ""
    looseness: float | None = None

    @property
    def is_under_reading(self) -> bool:
        """Whether the verdict rests on a reading that the paper leaves open."""
        return bool(self.reading) and self.verdict != "not tested"

    @property
    def agreements(self) -> Counter[str]:
        """The count of printed numbers by their agreement with ours."""
        if self.verdict == "not run":
            return Counter({self.verdict: self.numbers})
        return Counter(part.verdict for part in self.parts)

    @property
    def needed(self) -> int | None:
        """The number of seeds that would settle every comparison, or None if unknown."""
        needed = [part.needed for part in self._open]
        return None if None in needed else max(filter(None, needed), default=None)

    @property
    def remains(self) -> str:
        """The requirements for settling or testing a statement, or "" if it is settled."""
        if self.verdict == "not tested":
            return self.takes
        if self.verdict != "not settled":
            return ""
        if any((part.seeds or FEWEST) < FEWEST for part in self._open):
            return f"at least {FEWEST} seeds, from which to tell how many are needed"
        number = f"about {self.needed:,}" if self.needed else "more than 10,000"
        leans = {part.leans for part in self._open}
        side = "against it" if "against" in leans else "towards it" * (leans == {"for"})
        return f"{number} seeds; the evidence leans {side or 'to neither side'}"

    @property
    def _open(self) -> list[Part]:
        return [part for part in self.parts if part.verdict == "not settled"]

    @property
    def why_not_tested(self) -> str:
        """The reason for "not tested": replaced data or settings, or unreached targets."""
        lost = [part.evidence for part in self.parts if part.verdict in ("not tested", "not run")]
        return self.about or (lost[0] if lost else "")


class Claim(Schema):
    """A main claim of a paper, in our words, and the statements that judge it.

    Attributes:
      text: the claim.
      statements: items and keys of statements, such as "maxfl-table1/retains".
      under: the conditions of the verdicts.
    """

    text: str
    statements: tuple[str, ...]
    under: str = ""


class Reading(Schema):
    """The verdict on another item's statement under another reading, which is never counted.

    Attributes:
      statement: the item and the key of the statement, such as "maxfl-table1/retains".
      reading: the reading of the paper.
      verdict: the verdict under this reading.
      evidence: the numbers, as text.
    """

    statement: str
    reading: str
    verdict: Word
    evidence: str = ""


class Check(Schema):
    """One of our own checks, findings or comparisons.

    Attributes:
      text: the property or comparison.
      outcome: "passed" or "defect" for what our work must satisfy, "holds" or "does not hold" for a
        finding, "ahead", "level" or "behind" for a comparison, or "undecided".
      evidence: the numbers, as text.
    """

    text: str
    outcome: Outcome
    evidence: str = ""


class Table(Schema):
    """A header and rows of text, with a title that is empty for an item's first table."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


def not_run(published: Published, because: str) -> Statement:
    """A statement that no run has judged."""
    word = published.word("not tested")
    return Statement(**published.model_dump(), verdict=word, about=because)


def count(statements: Iterable[Statement]) -> Counter[str]:
    """Counts the statements by verdict."""
    return Counter(statement.verdict for statement in statements)


def published_statements(
    table: Mapping[str, Any], kind: Literal["statements", "numbers"] = "statements"
) -> tuple[Published, ...]:
    """The sentences, or the printed numbers, in an item's table of `published.toml`.

    The item's key `reading` is that of all its statements, except for those with one of their own.

    Raises:
      ValueError: if two statements share a key.
    """
    shared = {"reading": table.get("reading", "")}
    found = tuple(Published(**(shared | each)) for each in table.get(kind, ()))
    keys = Counter(each.key for each in found)
    if twice := [key for key, times in keys.items() if times > 1]:
        raise ValueError(f"{kind} has the key {twice[0]!r} twice; each has a key of its own")
    return found
