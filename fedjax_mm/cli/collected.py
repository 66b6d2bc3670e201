"""Everything below a directory that can be reported: summaries, figures, manifests.

JAX is not needed: whatever machine made the results, any other shows them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from PIL import Image
from pydantic import BaseModel, ValidationError

from fedjax_mm.papers import ALL

Content = TypeVar("Content", bound=BaseModel)

_LEADS = ("shows", "figure", "table", "statement", "text")
_SIGNS = {"unfinished", "result.nc", "figure.png"}  # of a result, however little of it


class Claim(BaseModel):
    """A claim in `summary.json`; a summary of an earlier version has neither verdict nor seeds."""

    claim: str
    holds: bool
    evidence: str
    verdict: Literal["holds", "fails", "open"] | None = None
    seeds: int | None = None

    @property
    def mark(self) -> str:
        """Returns the verdict."""
        return self.verdict or ("holds" if self.holds else "fails")


class Table(BaseModel):
    """A table in `summary.json`, of text."""

    header: list[str]
    rows: list[list[str]]
    title: str = ""


class Device(BaseModel):
    """The hardware in a manifest."""

    kind: str
    count: int
    cpu_cores: int | None = None


class Manifest(BaseModel):
    """The origin of a result, in `summary.json` or `manifest.json`."""

    versions: dict[str, str]
    device: Device
    seed: int
    prng: str
    git_revision: str | None = None
    data: str
    datasets: list[str] = []
    config: dict[str, Any]
    wall_seconds: dict[str, float]

    @property
    def lines(self) -> dict[str, str]:
        """Returns the origin in words, by what is told."""
        seconds = (f"{name} {value:.1f} s" for name, value in self.wall_seconds.items())
        return {
            "data": ": ".join(filter(None, (self.data, ", ".join(self.datasets)))),
            "versions": ", ".join(f"{name} {value}" for name, value in self.versions.items()),
            "device": f"{self.device.count} x {self.device.kind}, {self.device.cpu_cores} cores",
            "seed": f"{self.seed} ({self.prng})",
            "revision": self.git_revision or "not recorded",
            "wall time": ", ".join(seconds),
        }


class Summary(BaseModel):
    """The contents of `summary.json`; those of an earlier version have no tables and no changes."""

    id: str
    paper: dict[str, Any]
    claims: list[Claim]
    tables: list[Table] = []
    changed: list[str] | None = None
    manifest: Manifest

    @property
    def lead(self) -> str:
        """Returns what the item shows, in the words of `published.toml`."""
        return next((self.paper[key] for key in _LEADS if type(self.paper.get(key)) is str), "")

    @property
    def published(self) -> dict[str, str]:
        """Returns the published numbers and statements by their names."""
        rest = {key: self.paper[key] for key in self.paper if key not in ("open", "values")}
        texts = _flat(rest | self.paper.get("values", {}))
        return {name: text for name, text in texts if text != self.lead}

    @property
    def marks(self) -> Counter[str]:
        """Returns the number of claims by verdict."""
        return Counter(claim.mark for claim in self.claims)

    @property
    def seeds(self) -> str:
        """Returns the number of seeds, or the fewest and the most that a claim took."""
        taken = {claim.seeds for claim in self.claims if claim.seeds is not None}
        counts = sorted(taken or filter(None, [self.manifest.config.get("num_seeds")]))
        return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else "none"

    @property
    def settings(self) -> str:
        """Returns whether the settings are the defaults."""
        return {None: "not recorded", True: "changed", False: "default"}[
            None if self.changed is None else bool(self.changed)
        ]


class Item(NamedTuple):
    """A reproduced item: where it is, what it shows, and its figure, empty if there is none."""

    place: str
    anchor: str
    title: str
    paper: str
    summary: Summary
    figure: bytes


class Collected(NamedTuple):
    """Items, manifests of other runs by place, and what could not be read, in lines."""

    items: list[Item]
    runs: dict[str, Manifest]
    problems: list[str]


def collect(directory: Path) -> Collected:
    """Returns everything below a directory, the items in the order of `fedjax-mm list`."""
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
                found.runs[place] = _load(Manifest, folder / "manifest.json")
            elif names & _SIGNS or is_item:
                raise ValueError("summary.json is missing; make the item again, with --resume")
        except (OSError, ValueError) as error:
            found.problems.append(f"{place}: {error}")
    found.items.sort(key=lambda item: order.index(item.summary.id))
    return found


def _item(folder: Path, place: str, problems: list[str]) -> Item:
    """Returns an item; what is missing beside its summary is added to the problems."""
    summary = _load(Summary, folder / "summary.json")
    if summary.id not in list(ALL):
        raise ValueError(f"summary.json is of an unknown item, {summary.id!r}; update fedjax-mm")
    figure = b""
    try:
        figure = (folder / "figure.png").read_bytes()
        with Image.open(BytesIO(figure)) as image:
            image.verify()
    except FileNotFoundError:
        problems.append(f"{place}: figure.png is missing; make the item again")
    except (OSError, SyntaxError, ValueError):
        figure = b""
        problems.append(f"{place}: figure.png is broken; make the item again")
    if not (folder / "result.nc").is_file():
        problems.append(f"{place}: result.nc is missing; make the item again to have its data")
    name = summary.id if place == "." else place
    anchor = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return Item(name, anchor, ALL.title(summary.id), ALL.paper(summary.id), summary, figure)


def _load(kind: type[Content], path: Path) -> Content:
    """Returns what a file holds. Raises `ValueError` in one line."""
    try:
        return kind.model_validate(json.loads(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise ValueError(f"{path.name}: {where}: {first['msg']}; make it again") from None
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}; make it again") from None


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields numbers and statements with their names; those beside each other are one text."""
    if isinstance(value, Mapping):
        if name and not any(isinstance(each, Mapping | list) for each in value.values()):
            yield name, ", ".join(f"{key}: {each}" for key, each in value.items())
            return
        for key, each in value.items():
            yield from _flat(each, f"{name}, {key}" if name else str(key))
    else:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
