"""Collects reportable results below a directory: summaries, figures and manifests.

This module does not need JAX, so that results can be shown on a different machine.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from PIL import Image
from pydantic import BaseModel, ValidationError

from fedjax_mm.papers import ALL
from fedjax_mm.papers.published import Kind, all_published
from fedjax_mm.papers.schema import (
    Check,
    Published,
    Reading,
    Statement,
    Table,
    count,
    not_run,
)
from fedjax_mm.tools.files import load_json, read_image

Content = TypeVar("Content", bound=BaseModel)

_LEADS = ("shows", "text")
_TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
_ROWS = 30  # table rows of an item on the page; further tables stay in the summary
_SIGNS = {"unfinished", "result.nc", "figure.png"}  # files of a result that may be incomplete


class Device(BaseModel):
    """The hardware in a manifest."""

    kind: str
    count: int
    cpu_cores: int | None = None


class Config(BaseModel, extra="allow"):
    """The settings in a manifest."""

    num_seeds: int | None = None


class Manifest(BaseModel):
    """The provenance of a result, from `summary.json` or `manifest.json`."""

    versions: dict[str, str]
    device: Device
    seed: int
    prng: str
    git_revision: str | None = None
    xla_flags: str | None = None
    data: str
    datasets: list[str] = []
    config: Config
    wall_seconds: dict[str, float]

    @property
    def lines(self) -> dict[str, str]:
        """The provenance as lines of text, by subject."""
        seconds = (f"{name} {value:.1f} s" for name, value in self.wall_seconds.items())
        return {
            "data": ": ".join(filter(None, (self.data, ", ".join(self.datasets)))),
            "versions": ", ".join(f"{name} {value}" for name, value in self.versions.items()),
            "device": f"{self.device.count} x {self.device.kind}, {self.device.cpu_cores} cores",
            "seed": f"{self.seed} ({self.prng})",
            "revision": self.git_revision or "not recorded",
            "XLA flags": "not recorded" if self.xla_flags is None else self.xla_flags,
            "wall time": ", ".join(seconds),
        }


class Paper(BaseModel, extra="allow"):
    """An item's entry in `published.toml`."""

    learns: str = ""
    open: list[str] = []
    values: dict[str, Any] = {}

    @property
    def others(self) -> dict[str, Any]:
        """All other keys."""
        return self.model_extra or {}


class Summary(BaseModel):
    """The contents of `summary.json`."""

    id: str
    paper: Paper
    statements: tuple[Statement, ...]
    numbers: tuple[Statement, ...] = ()
    checks: tuple[Check, ...]
    readings: tuple[Reading, ...] = ()
    tables: tuple[Table, ...]
    changed: list[str]
    manifest: Manifest

    @property
    def lead(self) -> str:
        """The item's subject, from `published.toml`."""
        texts = (self.paper.others.get(key) for key in _LEADS)
        return next((text for text in texts if isinstance(text, str)), "")

    @property
    def runtime(self) -> str:
        """The time that the run took, and the name of its GPU if it used one."""
        return self.lasting(1)

    def lasting(self, factor: float) -> str:
        """The time of that many times the run, on its device."""
        seconds, device = sum(self.manifest.wall_seconds.values()) * factor, self.manifest.device
        units = ((3600, "h", ".1f"), (60, "min", ".0f"), (1, "s", ".0f"))
        size, unit, form = next((each for each in units if seconds >= 1.5 * each[0]), units[-1])
        gpu = re.search(r"[AHVL]\d{2,3}", device.kind)
        return f"{max(seconds, 1) / size:{form}} {unit}{f', {gpu[0]} GPU' if gpu else ''}"

    @property
    def needs(self) -> str:
        """The names of the data sets that the run read from the folder of `--data`."""
        is_read = any(setting.startswith("directory=") for setting in self.changed)
        own = ("digits", "synthetic")  # which the package has or makes
        names = [each for each in self.manifest.datasets if not each.startswith(own)]
        return ", ".join(_TITLES.get(name, name) for name in names) if is_read else ""

    @property
    def published(self) -> dict[str, str]:
        """The published numbers and statements, by name."""
        texts = _flat(self.paper.others | self.paper.values)
        return {name: text for name, text in texts if text != self.lead}

    @property
    def seeds(self) -> str:
        """The number of seeds, or its range over the comparisons."""
        judged = self.statements + self.numbers
        parts = (part for statement in judged for part in statement.parts)
        taken = {part.seeds for part in parts if part.seeds is not None}
        counts = sorted(taken or filter(None, [self.manifest.config.num_seeds]))
        return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else "none"

    @property
    def verdicts(self) -> Counter[str]:
        """The number of statements by verdict."""
        return count(self.statements)

    @property
    def agreements(self) -> Counter[str]:
        """The count of printed numbers by their agreement with ours."""
        return sum((each.agreements for each in self.numbers), Counter())

    @property
    def under_reading(self) -> Counter[str]:
        """The number of statements under our reading, by verdict."""
        return count(each for each in self.statements if each.is_under_reading)

    @property
    def outcomes(self) -> Counter[str]:
        """The number of checks by outcome."""
        return Counter(check.outcome for check in self.checks)

    @property
    def main_tables(self) -> tuple[Table, ...]:
        """The item's first tables that fit on a screen together."""
        ends = itertools.accumulate(len(table.rows) for table in self.tables)
        return tuple(table for table, end in zip(self.tables, ends, strict=True) if end <= _ROWS)

    @property
    def other_tables(self) -> tuple[Table, ...]:
        """All tables except the main ones."""
        return self.tables[len(self.main_tables) :]

    @property
    def settings(self) -> str:
        """Whether the settings are the defaults, in one word."""
        return "changed" if self.changed else "default"


class Item(NamedTuple):
    """A reproduced item with its path, titles, summary, and figure, which may be empty."""

    place: str
    anchor: str
    title: str
    paper: str
    summary: Summary
    figure: bytes

    @property
    def name(self) -> str:
        """The item's place in its paper, and its title."""
        return ALL.name(self.summary.id)

    @property
    def caption(self) -> str:
        """The caption that `plots.save_figure` wrote into the figure."""
        if not self.figure:
            return ""
        with Image.open(BytesIO(self.figure)) as image:
            return str(getattr(image, "text", {}).get("Description", ""))


class Claims(BaseModel):
    """The verdicts on a file's claims, from `claims.json`."""

    header: list[str]
    rows: list[list[str]]
    sentences: list[str]


class Run(NamedTuple):
    """The manifest of a file's run, and its claims with their figure, which may be empty."""

    manifest: Manifest
    claims: Claims | None = None
    figure: bytes = b""


class Sentence(NamedTuple):
    """A statement of a paper, the item that judges it, and a link if the item was made."""

    paper: str
    item: str
    anchor: str
    statement: Statement


class Readings(NamedTuple):
    """Statements judged under several readings of a paper.

    Attributes:
      tried: the readings by letter, with the items that tried them.
      verdicts: for each statement, such as "maxfl-table1/retains", its verdicts by letter.
      counted: the letter of the verdict that counts, by statement.
      paper: the authors.
    """

    tried: dict[str, tuple[str, list[str]]]
    verdicts: dict[str, dict[str, str]]
    counted: dict[str, str]
    paper: str

    @property
    def never(self) -> list[str]:
        """The statements that no reading supports."""
        return [name for name in self.verdicts if not self._supporting(name)]

    @property
    def apart(self) -> list[tuple[str, list[str]]]:
        """Pairs of statements that readings support, but no single reading supports both."""
        found, told = [], set[str]()
        others = {name: self._without(name) for name in self.verdicts}
        for name in sorted(others, key=lambda name: -len(others[name])):
            told.add(name)
            if rest := [other for other in others[name] if other not in told]:
                found.append((name, rest))
        return found

    def _supporting(self, name: str) -> set[str]:
        return {letter for letter, each in self.verdicts[name].items() if each == "supported"}

    def _without(self, name: str) -> list[str]:
        mine = self._supporting(name)
        return [
            other
            for other in self.verdicts
            for theirs in [self._supporting(other)]
            if mine
            and theirs
            and not mine & theirs
            # Leave out pairs that no reading has tried together.
            and self.verdicts[name].keys() & self.verdicts[other].keys()
        ]


class Collected(NamedTuple):
    """Items, other runs by path, and one line per unreadable result."""

    items: list[Item]
    runs: dict[str, Run]
    problems: list[str]

    def sentences(self, kind: Kind = "statements") -> list[Sentence]:
        """Each statement of the papers with items in the directory, without duplicates.

        The same goes for their printed numbers. If an item has several results, the first one
        counts. Statements of items that were not made count as not tested.
        """
        found = []
        made = {item.summary.id: item for item in reversed(self.items)}
        papers = {item.paper for item in self.items}
        for paper, of_items in all_published(kind).items():
            for name, statements in of_items.items() if paper in papers else ():
                item = made.get(name)
                judged = {each.key: each for each in getattr(item.summary, kind)} if item else {}
                for each in statements:
                    known = judged.get(each.key) or _not_run(each, name)
                    found.append(Sentence(paper, name, item.anchor if item else "", known))
        return found


def readings_of(items: Iterable[Item]) -> Readings:
    """The statements that were judged under at least two readings, with all readings."""
    found: dict[str, dict[str, str]] = {}
    tried: dict[str, list[str]] = {}
    counted: dict[str, str] = {}

    def add(statement: str, reading: str, verdict: str, item: str) -> None:
        found.setdefault(statement, {})[reading] = verdict
        if item not in tried.setdefault(reading, []):
            tried[reading].append(item)

    summaries = {f"{item.summary.id}, {item.summary.seeds} seeds": item.summary for item in items}
    for name, summary in summaries.items():
        for each in summary.statements:
            if each.is_under_reading:
                add(f"{summary.id}/{each.key}", each.reading, each.verdict, name)
                counted[f"{summary.id}/{each.key}"] = each.reading
    for name, summary in summaries.items():
        for other in summary.readings:
            add(other.statement, other.reading, other.verdict, name)
    several = {name: each for name, each in found.items() if len(each) > 1}
    used = [text for text in tried if any(text in each for each in several.values())]
    letters = {text: _letter(place) for place, text in enumerate(used)}
    return Readings(
        {letter: (text, tried[text]) for text, letter in letters.items()},
        {
            name: {letters[text]: verdict for text, verdict in each.items()}
            for name, each in several.items()
        },
        {name: letters[text] for name, text in counted.items() if name in several},
        " and ".join(
            dict.fromkeys(ALL.paper(name.partition("/")[0]).partition(",")[0] for name in several)
        ),
    )


def _letter(place: int) -> str:
    return chr(ord("A") + place % 26) * (1 + place // 26)


def _not_run(statement: Published, item: str) -> Statement:
    """A statement whose item has no result."""
    if statement.untested or item not in ALL:
        return not_run(statement, statement.untested)
    takes = statement.takes or f"fedjax-mm reproduce {item}"
    return not_run(statement.model_copy(update={"takes": takes}), "its item was not run")


def collect(directory: Path) -> Collected:
    """Collects results below a directory, with items in the order of `fedjax-mm list`."""
    found, order = Collected([], {}, []), list(ALL)
    for folder in sorted((directory, *directory.rglob("*/"))):
        place = "." if folder == directory else folder.relative_to(directory).as_posix()
        try:
            paths = list(folder.iterdir())
            names = {path.name for path in paths}
            is_item = folder.name in order and not any(path.is_dir() for path in paths)
            if "summary.json" in names:
                found.items.append(_item(folder, place, found.problems))
            elif "manifest.json" in names:
                found.runs[place] = Run(_load(Manifest, folder / "manifest.json"))
                if "claims.json" in names:
                    claims = _load(Claims, folder / "claims.json")
                    figure = _figure(folder / "claims.png", place, found.problems)
                    found.runs[place] = found.runs[place]._replace(claims=claims, figure=figure)
            elif names & _SIGNS or is_item:
                raise ValueError("summary.json is missing; make the item again, with --resume")
        except (OSError, ValueError) as error:
            found.problems.append(f"{place}: {error}")
    found.items.sort(key=lambda item: order.index(item.summary.id))
    taken: set[str] = set()
    for number, item in enumerate(found.items):
        # Number anchors shared by several folders, because each anchor is a file name.
        anchor = item.anchor if item.anchor not in taken else f"{item.anchor}-{number}"
        taken.add(anchor)
        found.items[number] = item._replace(anchor=anchor)
    return found


def _item(folder: Path, place: str, problems: list[str]) -> Item:
    """Reads an item, adding missing or broken files to the problems."""
    summary = _load(Summary, folder / "summary.json")
    if summary.id not in list(ALL):
        raise ValueError(f"summary.json is of an unknown item, {summary.id!r}; update fedjax-mm")
    figure = _figure(folder / "figure.png", place, problems)
    if not (folder / "result.nc").is_file():
        problems.append(f"{place}: result.nc is missing; make the item again to have its data")
    name = summary.id if place == "." else place
    anchor = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or summary.id
    return Item(name, anchor, ALL.title(summary.id), ALL.paper(summary.id), summary, figure)


def _figure(path: Path, place: str, problems: list[str]) -> bytes:
    """Reads a figure, which is empty if it is missing or broken."""
    try:
        return read_image(path)
    except FileNotFoundError:
        problems.append(f"{place}: {path.name} is missing; make it again")
    except (OSError, ValueError):
        problems.append(f"{place}: {path.name} is broken, or a link; make it again")
    return b""


def _load(kind: type[Content], path: Path) -> Content:
    """Parses a file's content, raising a one-line `ValueError` if it is invalid."""
    try:
        return kind.model_validate(load_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise ValueError(f"{path.name}: {where}: {first['msg']}; make it again") from None
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}; make it again") from None


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields numbers and statements as (name, text), joining the innermost level."""
    if isinstance(value, Mapping):
        if name and not any(isinstance(each, Mapping | list) for each in value.values()):
            yield name, ", ".join(f"{key}: {each}" for key, each in value.items())
            return
        for key, each in value.items():
            yield from _flat(each, f"{name}, {key}" if name else str(key))
    else:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
