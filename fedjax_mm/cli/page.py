"""Renders all results below a directory as one HTML page, or one Markdown page per item."""

from __future__ import annotations

import re
import shlex
from base64 import b64encode
from collections import Counter
from functools import partial
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, Template, select_autoescape
from markupsafe import Markup
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fedjax_mm.cli.collected import Collected, Item, Sentence, Summary, collect, readings_of
from fedjax_mm.papers import ALL
from fedjax_mm.papers.published import all_claims
from fedjax_mm.papers.schema import AGREEMENTS, LOOSE, OUTCOMES, VERDICTS, Reading
from fedjax_mm.tools.files import prepare_directory, write_aside

Kind = Literal["html", "md"]

LIMIT = 5 * 2**20
"""The size limit in bytes of a page, which should open quickly and be small enough for email."""

_SIGNS = {
    "verdicts": VERDICTS,
    "agreements": AGREEMENTS,
    "outcomes": OUTCOMES,
    "signs": dict(zip((*VERDICTS, *AGREEMENTS, *OUTCOMES), "✓✕✎≠?○=≠~○✓✕✓✕✓=✕?", strict=True)),
}

SHARE = LIMIT // 40
"""The size limit in bytes of a figure on a Markdown page."""


def write(directory: Path, kind: Kind, out: Path) -> Collected:
    """Writes the page of a directory.

    In Markdown, each item has its own page in a folder with the name of `out`, and figures are
    files in ``figures/``.

    Returns:
      The contents of the page.

    Raises:
      ValueError: if the directory does not exist or holds no result.
    """
    if kind == "md" and (not out.suffix or out.stem == "figures"):
        raise ValueError(
            f"{out.name} cannot name a page, because its items go to a folder of that name without "
            "the suffix; choose another name, such as results.md"
        )
    if not directory.is_dir():
        raise ValueError(f"directory {directory} does not exist; give one that contains results")
    found = collect(directory)
    if not any(found):
        raise ValueError(
            f"{directory} holds no result; make one with `fedjax-mm reproduce ID --out {directory}`"
        )
    files = {out: render(found, kind, out.stem).encode()}
    if kind == "md":
        folder, figures = out.with_suffix(""), out.with_name("figures")
        for item in found.items:
            text = _template("item.md").render(
                item=item, others=_other_readings(found, item), index=Markup(quote(out.name))
            )
            files[folder / f"{item.anchor}.md"] = text.encode()
            files[figures / f"{item.anchor}.png"] = shrunk(item.figure, SHARE)
        for number, run in enumerate(found.runs.values()):
            files[figures / f"claims-{number}.png"] = shrunk(run.figure, SHARE)
    for path, content in files.items():
        if content:
            prepare_directory(path.parent)
            write_aside(path, partial(Path.write_bytes, data=content))
    return found


def _other_readings(found: Collected, item: Item) -> list[tuple[str, Reading]]:
    """The verdicts on an item's statements under other readings, with the items."""
    return [
        (other.anchor, each)
        for other in found.items
        for each in other.summary.readings
        if each.statement.partition("/")[0] == item.summary.id
    ]


def _template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=select_autoescape(),
        finalize=_markdown if name.endswith(".md") else None,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"markdown": _markdown, "command": _command, "caption": _caption}
    environment.filters["owed"] = _owed
    return environment.get_template(name)


def render(found: Collected, kind: Kind, folder: str = "report") -> str:
    """Writes the page as text, which depends only on the results.

    Args:
      found: the collected results.
      kind: the page format.
      folder: the folder of the items' own pages, for links in Markdown.
    """
    page = _template(f"page.{kind}")
    papers = [
        (paper, list(items)) for paper, items in groupby(found.items, lambda item: item.paper)
    ]
    made = {item.summary.id for item in found.items}
    missing = {
        paper: [name for name in ALL if ALL.paper(name) == paper and name not in made]
        for paper, _ in papers
    }
    about = {"found": found, "papers": papers, "figures": {}, **_SIGNS, **_statements(found)}
    unflagged = [
        item
        for item in found.items
        if item.summary.manifest.xla_flags is None and "GPU" not in item.summary.runtime
    ]
    about |= {"missing": missing, "ALL": ALL, "unflagged": unflagged}
    if kind == "md":
        return page.render(about | {"folder": Markup(quote(folder))})
    # Split the remaining bytes among the figures, because base64 turns three bytes into four.
    room = LIMIT - len(page.render(about).encode())
    all_figures = {item.anchor: item.figure for item in found.items}
    all_figures |= {f"claims of {place}": run.figure for place, run in found.runs.items()}
    share = room * 3 // 4 // max(sum(map(bool, all_figures.values())), 1)
    figures = {name: b64encode(shrunk(x, share)).decode() for name, x in all_figures.items()}
    return page.render(about | {"figures": figures})


def _statements(found: Collected) -> dict[str, Any]:
    """Sorts the papers' statements by verdict, with counts, and the untested ones by reason."""
    sentences = found.sentences()
    chosen = {
        verdict: [each for each in sentences if each.statement.verdict == verdict]
        for verdict in VERDICTS
    }
    counts: dict[str, Counter[str]] = {}
    printed: dict[str, Counter[str]] = {}
    numbers = found.sentences("numbers")
    for each in numbers:
        printed.setdefault(each.paper, Counter()).update(each.statement.agreements)
    under: dict[str, Counter[str]] = {}
    for each in sentences:
        counts.setdefault(each.paper, Counter())[each.statement.verdict] += 1
        own = under.setdefault(each.paper, Counter())
        own[each.statement.verdict] += each.statement.is_under_reading
    untested: dict[tuple[str, str, str], list[Sentence]] = {}
    for each in chosen["not tested"]:
        why = each.item, each.statement.why_not_tested, each.statement.remains
        untested.setdefault(why, []).append(each)
    about: dict[str, Any] = {
        "sentences": sentences,
        "numbers": numbers,
        "chosen": chosen,
        "counts": counts,
        "untested": untested,
    }
    loose = [each for each in chosen["supported"] if (each.statement.looseness or 0) > LOOSE]
    about["loose"] = loose
    named = {f"{each.item}/{each.statement.key}": each for each in sentences}
    claims = {
        paper: [each for each in all_claims().get(paper, ()) if named.keys() >= {*each.statements}]
        for paper in counts
    }
    about |= {"printed": printed, "named": named, "claims": claims}
    return about | {"under": under, "readings": readings_of(found.items)}


def _command(summary: Summary, seeds: int | None = None) -> str:
    """The command that reproduces an item, with DIR for the user's data folder."""
    is_bounds = summary.id.startswith("bounds-")
    words = ["fedjax-mm", *(summary.id.split("-") if is_bounds else ("reproduce", summary.id))]
    settings = summary.changed
    if seeds:
        others = [each for each in settings if not each.startswith("num_seeds=")]
        settings = [f"num_seeds={seeds}", *others]
    for setting in settings:
        is_data = setting.startswith("directory=")
        words += ["--data", "DIR"] if is_data else ["--set", shlex.quote(setting)]
    return " ".join(words)


def _owed(summary: Summary) -> str:
    """The command with the seeds that would settle what is open, and its time, or ""."""
    now = summary.manifest.config.num_seeds
    needed = [each.needed or 0 for each in summary.statements if each.verdict == "not settled"]
    seeds = max(needed, default=0)
    return f"{_command(summary, seeds)}  # {summary.lasting(seeds / now)}" if now and seeds else ""


def _markdown(value: Any) -> Any:
    """Escapes text for Markdown, and puts it on one line."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    text = re.sub(r"\s+", " ", value)
    for letter in "&<~$|":  # some dialects do not support backslash escapes for these
        text = text.replace(letter, f"&#{ord(letter)};")
    return re.sub(r"[\\`*_>\[\]]|(?<!&)#", lambda match: "\\" + match[0], text)


def _caption(text: str, is_markdown: bool = True) -> str:
    """Formats a figure's caption, whose formulas only Markdown shows as such."""
    parts = re.split(r"(\$[^$]+\$)", text)
    if not is_markdown:
        return "".join(re.sub(r"\\,|[$\\{}]", "", part) for part in parts)
    return "".join(part if part.startswith("$") else _markdown(part) for part in parts)


def shrunk(figure: bytes, limit: int) -> bytes:
    """Makes a PNG of at most `limit` bytes, with fewer colors or pixels, or empty bytes."""
    for width in (1600, 1200, 900, 600, 300):
        if len(figure) <= limit:
            return figure
        buffer = BytesIO()
        with Image.open(BytesIO(figure)) as image:
            fewer, about = image.convert("RGB"), PngInfo()
            for key, text in getattr(image, "text", {}).items():
                about.add_text(key, text)
        fewer.thumbnail((width, fewer.height))
        # Use octree quantization, which is the fastest and good enough for lines and text.
        fewer.quantize(128, Image.Quantize.FASTOCTREE).save(buffer, "PNG", pnginfo=about)
        figure = buffer.getvalue()
    return figure if len(figure) <= limit else b""
