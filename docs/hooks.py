"""Makes the site's pages of tutorials and reference, and redirects and checks its links.

`mkdocs build` calls the functions `on_...`. Tutorials are the notebooks, the reference is made from
the public names, and pages such as the changelog are files of the repository.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pkgutil
import re
import tomllib
from base64 import b64decode
from collections.abc import Iterator
from functools import cache
from html import unescape
from html.parser import HTMLParser
from inspect import getdoc
from io import BytesIO
from itertools import groupby, pairwise
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
LOG = logging.getLogger("mkdocs.hooks.site")


def literature() -> dict[str, str]:
    """Returns what to write here for each name in the literature, which the search must find."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", (DOCS / "literature.md").read_text(), re.MULTILINE)
    each = {name: here for names, here in rows for name in names.split(", ")}
    return {name: here for name, here in each.items() if name != "in the literature"}


class Area(NamedTuple):
    """A page of the reference.

    Attributes:
      title: of the page.
      about: a sentence.
      homes: the modules and packages whose public names it has.
      whole: modules that it shows completely.
      first: names that come before the others.
      types: returned types that no namespace has.
      aliases: aliases of types that arguments have, which come last.
    """

    title: str
    about: str
    homes: tuple[str, ...]
    whole: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


def _modules(package: str) -> tuple[str, ...]:
    """Returns the names of a package's modules."""
    found = pkgutil.iter_modules([str(ROOT / package.replace(".", "/"))])
    return tuple(f"{package}.{each.name}" for each in found)


REFERENCE = {
    "simulate": Area(
        "Simulating",
        "The compiled loop, and its results.",
        ("simulator", "asynchrony"),
        first=("simulate", "State", "params_of", "init", "advance", "join_traces"),
        types=("fedjax_mm.simulator.record.Trace",),
        aliases=(
            "base.chunks.ClientMap",
            "asynchrony.delays.PerModel",
            "asynchrony.delays.PerClient",
            "asynchrony.delays.PerClientAndModel",
        ),
    ),
    "assignments": Area(
        "Assignments",
        "Assignments and availability.",
        ("assignments", "availability", "topologies"),
        aliases=(
            "availability.laws.Probability",
            "availability.jobs.Targets",
            "assignments.partitions.Processors",
            "assignments.bandits.Policy",
            "assignments.rotating.Flags",
            "assignments.scheduling.Eligible",
            *("topologies.Edges", "topologies.LinksFn", "topologies.MeanOf"),
        ),
    ),
    "algorithms": Area(
        "Algorithms",
        "Client contributions, server steps on their sum, and robust aggregation.",
        ("algorithms", "compression", "local", "optimizers", "privacy", "robust", "schedules"),
        (*_modules("fedjax_mm.local"), "fedjax_mm.base.shuffles"),
        aliases=(
            *("schedules.Schedule", "optimizers.Decay", "compression.SomeShare"),
            *("base.paths.Where", "robust.rules.AggregateFn"),
            *("robust.rules.Attackers", "robust.rules.HalfShare"),
        ),
    ),
    "tasks": Area(
        "Tasks",
        "Learning problems.",
        ("tasks",),
        tuple(f"fedjax_mm.tasks.{name}" for name in ("mean_estimation", "quadratic", "view")),
        aliases=(
            "tasks.modules.Network",
            "tasks.with_clients.ClientMetric",
            "tasks.with_metrics.Own",
        ),
    ),
    "data": Area(
        "Data",
        "Sources, and their partitions.",
        ("data",),
        tuple(f"fedjax_mm.data.{name}" for name in ("idx", "partition", "synthetic")),
        aliases=("data.federate.Examples", "data.federated.DataKind"),
    ),
    "sweeps": Area("Sweeps", "Many runs in few programs, devices and checkpoints.", ("sweeps",)),
    "experiments": Area(
        "Experiments",
        "Experiments in files, and fields for your own settings.",
        ("experiments",),
        tuple(
            f"fedjax_mm.experiments.{name}"
            for name in ("fields", "methods", "optimizers", "overrides", "point", "tasks")
        ),
        aliases=("experiments.axes.Axes", "experiments.executors.AnyExecutor"),
    ),
    "results": Area(
        "Results",
        "Labelled results, measures and figures.",
        ("results", "tools", "metrics", "plots"),
        (
            *(
                f"fedjax_mm.results.{name}"
                for name in ("dataset", "export", "finished", "labels", "manifest")
            ),
            *("fedjax_mm.tools.files", "fedjax_mm.plots.drawing"),
        ),
        aliases=("metrics.ClientShare",),
    ),
    "claims": Area(
        "Claims",
        "Whether a difference is real, and how many seeds it takes.",
        ("claims",),
        ("fedjax_mm.claims.evidence", "fedjax_mm.claims.parts"),
        first=("judge", "more"),
        aliases=("claims.judging.Claim", "claims.comparisons.Of", "claims.comparisons.Standing"),
    ),
    "theory": Area(
        "Theory",
        "The papers' theorems, one function each, which check their hypotheses.",
        ("theory",),
        _modules("fedjax_mm.theory"),
    ),
    "draws": Area(
        "Keys of draws",
        "The keys of all random draws, folded from the seed, the round, the model and the client.",
        (),
        ("fedjax_mm.base.keys",),
    ),
    "contract": Area(
        "The contract",
        "The types that your own tasks, methods and assignments implement, and their wrappers.",
        ("base", "checks", "wrap"),
        (
            *(
                f"fedjax_mm.base.{name}"
                for name in ("contract", "capabilities", "cohorts", "sums", "calls")
            ),
            *("fedjax_mm.checks.annotations", "fedjax_mm.wrap"),
        ),
    ),
}
NAMESPACES = (
    "fedjax_mm",
    *(
        f"fedjax_mm.{name}"
        for name in (
            *("asynchrony", "availability", "claims", "compression", "data", "privacy", "robust"),
            *("tasks", "theory", "topologies"),
            *("metrics", "optimizers", "plots", "schedules", "sweeps", "base"),
        )
    ),
)

_RECENT = "recent; their arguments may change"
EXPERIMENTAL = {
    tuple(
        f"algorithms.{name}"
        for name in ("apfl", "feddyn", "fednova", "mifa", "moon", "pfedme", "stalevr", "sharing")
    ): _RECENT,
    (
        *(
            "algorithms.gradient_tracking",
            "algorithms.reporting",
            "assignments.peers",
            "topologies",
        ),
        *("base.contract.MixFn", "base.contract.Mixed"),
    ): _RECENT,
    tuple(f"assignments.{name}" for name in ("clusters", "informed", "variance_reduced")): _RECENT,
    ("asynchrony",): _RECENT,
    ("availability",): _RECENT,
    ("compression",): _RECENT,
    ("optimizers",): _RECENT,
    ("privacy",): "recent; their arguments and what epsilon assumes may change",
    ("robust",): _RECENT,
    ("tasks.drift",): _RECENT,
    ("sweeps.cluster",): "the files of parts may change",
    ("sweeps.devices.agree", "sweeps.devices.layout"): "JAX's interface for devices may change",
    (
        "base.contract.Padded",
        "base.cohorts.Sampling",
        "base.sums.SparseUpdate",
        "base.sums.Stacked",
        "base.contract.Updates",
    ): ("only some tasks, methods and assignments need them, and others may need more"),
    ("theory",): "arguments follow the papers' notation, and may be grouped otherwise",
}
"""Modules and names that may change in every release, with the reason; all others are stable."""


class Name(NamedTuple):
    """A public name: its import path, the module path of its code, and its first line."""

    path: str
    home: str
    about: str

    @property
    def short(self) -> str:
        """Returns the name without its namespace."""
        return self.path.rpartition(".")[2]

    @property
    def area(self) -> str:
        """Returns the page of the reference that has it."""
        first = self.home.split(".")[1]
        for page, area in REFERENCE.items():
            if first in area.homes:
                return page
        raise ValueError(
            f"{self.path} is on no page: put {first!r} into REFERENCE in docs/hooks.py"
        )

    @property
    def is_experimental(self) -> bool:
        """Whether the name may change in every release."""
        return any(self.is_in(parts) for parts in EXPERIMENTAL)

    def is_in(self, parts: tuple[str, ...]) -> bool:
        """Whether the name is one of these, or its code is in one of these modules."""
        return any(f"{self.home}.".startswith(f"fedjax_mm.{part}.") for part in parts)

    @property
    def is_in_a_module(self) -> bool:
        """Whether a page shows everything of its module."""
        return any(self.home.startswith(f"{each}.") for each in REFERENCE[self.area].whole)


@cache
def public() -> tuple[Name, ...]:
    """Returns the public names of the package and of its namespaces, each once."""
    found: dict[str, Name] = {}
    for namespace in NAMESPACES:
        try:
            module = importlib.import_module(namespace)
        except ModuleNotFoundError:
            continue
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            # Skip aliases of types, because only their module's page shows them.
            if getattr(value, "__module__", "").startswith("fedjax_mm") and hasattr(
                value, "__qualname__"
            ):
                home = f"{value.__module__}.{value.__qualname__}"
                about = (getdoc(value) or "").partition("\n")[0]
                found.setdefault(home, Name(f"{namespace}.{name}", home, about))
    return tuple(found.values())


def reference() -> dict[str, str]:
    """Returns the pages of the reference by their files, in Markdown."""
    rows = [f"| [{area.title}]({page}.md) | {area.about} |" for page, area in REFERENCE.items()]
    rows.append("| [Stable and experimental](stability.md) | What a release may change. |")
    head = ["# Reference\n", "Made from the docstrings, whose examples are tests.\n"]
    pages = {
        "reference/index.md": "\n".join([*head, "| page | has |", "|---|---|", *rows, ""]),
        "reference/stability.md": _stability(),
    }
    for page, area in REFERENCE.items():
        names = [each for each in public() if each.area == page]
        names.sort(key=lambda each: (*area.first, each.short).index(each.short))
        parts = [f"# {area.title}\n\n{area.about}\n"]
        if names:
            short = {each: each.path.removeprefix("fedjax_mm.") for each in names}
            lines = [
                f"| [`{short[each]}`][{each.home}]{' *' * each.is_experimental} | {each.about} |"
                for each in names
            ]
            if any(each.is_experimental for each in names):
                lines.append("\n\\* [experimental](stability.md)")
            parts.append("\n".join(["| `fedjax_mm.` | |", "|---|---|", *lines, ""]))
        own = [each.home for each in names if not each.is_in_a_module]
        own[1:1] = area.types
        own += [f"fedjax_mm.{each}" for each in area.aliases]
        parts += [f"::: {each}\n    options: {{heading_level: 2}}\n" for each in own]
        hidden = "{show_root_heading: false, show_root_toc_entry: false}"
        parts += [f"## {module}\n\n::: {module}\n    options: {hidden}\n" for module in area.whole]
        pages[f"reference/{page}.md"] = "\n".join(parts)
    return pages


STABILITY = """\
# Stable and experimental

| | a release 0.1.x | a release 0.2.0, 0.3.0, ... |
|---|---|---|
| stable | breaks no program | may change it; the changelog says what to write instead |
| experimental | may change it; the changelog says so | may change it; the changelog says so |
| not public | may change it | may change it |

Stable are also

- the commands, options and exit codes of `fedjax-mm`;
- the keys of [experiments in a file](../experiments.md);
- variables, dimensions and coordinates of `result.nc`.

A seed has the same draws in all releases 0.1.x with one version of JAX.

Experimental are also `summary.json`, `manifest.json`, and modules that the reference shows as a
whole, except for their names below. Only the version that began a run is sure to continue it. Not
public are names with an underscore, and names that the reference does not have. Import a name from
its namespace, because the modules inside may be divided otherwise.
"""


def _stability() -> str:
    """Returns the page that says which public names are stable."""
    parts, names = [STABILITY, "## Stable\n\n| namespace | names |\n|---|---|"], public()
    for namespace, group in groupby(names, lambda each: each.path.rpartition(".")[0]):
        links = [_link(each) for each in group if not each.is_experimental]
        parts += [f"| `{namespace}` | {', '.join(links)} |"] if links else []
    parts.append("\n## Experimental\n\n| names | why |\n|---|---|")
    for modules, reason in EXPERIMENTAL.items():
        links = [_link(each) for each in names if each.is_in(modules)]
        parts.append(f"| {', '.join(links)} | {reason} |")
    return "\n".join([*parts, ""])


def _link(name: Name) -> str:
    return f"[`{name.short}`][{name.home}]"


def results() -> list[Any]:
    """Returns the navigation to the results: a list of pages by name for each paper."""
    from fedjax_mm.papers import ALL

    made = {path.stem for path in RESULTS.glob("*.md")}
    found = []
    for paper, group in groupby(ALL, ALL.paper):
        pages = [{ALL.name(name): f"results/{name}.md"} for name in group if name in made]
        if cited := re.match(r'(\w+)(.*), ".*\((\d+)\)', paper):
            first, others, year = cited.groups()
            paper = f"{first}{' et al.' if others else ''} {year}"
        found.append({paper: pages})
    return found


ROOT_PAGES = {
    "changelog.md": "CHANGELOG.md",
    "code_of_conduct.md": "CODE_OF_CONDUCT.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
"""Pages that are files of the repository's root."""


CITATION = """\
# Citation

{message}

```bibtex
@software{{fedjax_mm,
  title = {{{title}: {abstract}}},
  author = {{{{{author}}}}},
  version = {{{version}}},
}}
```

The papers that it reproduces:

{papers}
"""


def about() -> dict[str, str]:
    """Returns the pages about the package, from the files of the repository."""
    import yaml

    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    papers = [
        f"- {', '.join(each['family-names'] for each in paper['authors'])}, "
        f"*{paper['title']}* ({paper['year']})"
        for paper in cited["references"]
    ]
    author = " and ".join(each["name"] for each in cited["authors"])
    text = CITATION.format(**cited | {"author": author, "papers": "\n".join(papers)})
    return {page: (ROOT / file).read_text() for page, file in ROOT_PAGES.items()} | {
        "citation.md": text
    }


def version() -> str:
    """Returns the version of the package."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def tutorials() -> dict[str, str]:
    """Returns the titles of the notebooks by their files."""
    found = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        found[f"notebooks/{path.name}"] = first.partition("\n")[0].removeprefix("# ")
    return found


KEYS = """\
# Keys of experiment files

Made from the signatures and docstrings of the functions that the tables call, like the
[schema for editors](experiment.schema.json). [Experiments in a file](experiments.md) explains how
tables work together.
"""


def keys() -> str:
    """Returns the page of all keys of experiment files, made from their JSON schema."""
    from fedjax_mm.experiments.schema import schema

    made = schema()
    definitions, parts = made["definitions"], [KEYS]
    titles = {("",): "Experiment"}
    tables = {("",): [made]}
    while tables:
        names = next(iter(tables))
        title, alternatives = titles[names], tables.pop(names)
        for table in alternatives:
            for key, value in table["properties"].items():
                inner = tuple(_tables_in(value)) if key != "axes" else ()
                if inner and inner not in titles:
                    titles[inner] = key
                    tables[inner] = [definitions[name] for name in inner]
        first, *others = alternatives
        shared = {
            key: value
            for key, value in first["properties"].items()
            if all(each["properties"].get(key) == value for each in others)
        }
        about = "" if others else f"\n{_cell(first['description'])}\n"
        parts += [f"## {title} {{: #{title} }}\n{about}", *_keys_of(first, shared, titles)]
        for table in alternatives if others else ():
            chosen, name = _name_in(table)
            own = {key: x for key, x in table["properties"].items() if key not in shared}
            default = "" if chosen in table.get("required", ()) else " This is the default."
            parts.append(f"### {name} {{: #{title}-{name} }}\n")
            parts.append(f'`{chosen} = "{name}"`: {_cell(table["description"])}{default}\n')
            del own[chosen]
            parts += _keys_of(table, own, titles)
    return "\n".join(parts)


def _tables_in(value: Any) -> Iterator[str]:
    """Yields the definitions of the tables that a value may be or hold."""
    if "$ref" in value:
        yield value["$ref"].rpartition("/")[2]
    inner = [each for key in ("anyOf", "oneOf", "allOf") for each in value.get(key, ())]
    inner += [value[key] for key in ("items", "additionalProperties") if value.get(key)]
    for each in inner:
        if isinstance(each, dict):
            yield from _tables_in(each)


def _name_in(table: Any) -> tuple[str, str]:
    """Returns the key that distinguishes a table from others, and its value."""
    keys = ("name", "schedule")
    return next((key, x["const"]) for key in keys if (x := table["properties"].get(key)))


def _keys_of(table: Any, keys: dict[str, Any], titles: dict[Any, str]) -> list[str]:
    """Returns rows for some keys of a table."""
    rows = []
    for key, value in keys.items():
        is_required = key in table.get("required", ())
        default = f"`{json.dumps(value['default'])}`" if "default" in value else ""
        kind, meaning = _kind(value, titles), _cell(value.get("description", ""))
        rows.append(f"| `{key}` | {kind} | {'required' if is_required else default} | {meaning} |")
    return ["| key | value | default | meaning |", "|---|---|---|---|", *rows, ""] if rows else []


def _cell(text: str) -> str:
    """Returns text of a docstring for a cell of a table in Markdown."""
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("|", "&#124;")


_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _kind(value: Any, titles: dict[Any, str]) -> str:
    """Returns the type and the bounds of a value in words."""
    if tables := tuple(_tables_in(value)):
        numbers = [
            each for each in value.get("anyOf", ()) if "type" in each and "items" not in each
        ]
        title = titles.get(tables)
        table = f"table [{title}](#{title})" if title else "table"
        if "array" in (value.get("type"), *(x.get("type") for x in value.get("anyOf", ()))):
            table = f"list of {table}"
        if value.get("type") == "object":
            table = f"{table} by label"
        return " or ".join([*(_kind(each, titles) for each in numbers), table])
    if "anyOf" in value:
        return " or ".join(_kind(each, titles) for each in value["anyOf"])
    choices = value.get("enum") or ([value["const"]] if "const" in value else [])
    if choices:
        return " or ".join(f"`{json.dumps(each)}`" for each in choices)
    if value["type"] == "array":
        items = value.get("items", {})
        items = items if isinstance(items, list) else [items]
        return f"list of {' and '.join(_kind(each, titles) for each in items)}"
    # Every count is below 2^31 and every seed below 2^32, which would make the table hard to read.
    bounds = [
        f"{sign} {value[key]:g}" for key, sign in _SIGNS.items() if value.get(key, 2**31) < 2**31
    ]
    names = {
        "object": "table",
        "string": "text",
        "boolean": "true or false",
        "integer": "whole number",
    }
    return " ".join([names.get(value["type"], value["type"]), " and ".join(bounds)]).strip()


SHOWN = (
    "mfa-fig3",
    "mfa-fig5",
    "maxfl-fig5a",
    "private-curve",
    "compression-curve",
    "multi-compare",
)


def gallery() -> dict[str, str | bytes]:
    """Returns the gallery and its thumbnails by their files: tutorials, figures and scripts."""
    from fedjax_mm.papers import ALL

    pages: dict[str, str | bytes] = {}
    parts = ["# Gallery\n", "Every picture leads to the page that makes it.\n", "## Tutorials\n"]
    cards = []
    for file, title in tutorials().items():
        picture = f"thumbnails/{Path(file).stem}.png"
        pages[picture] = one_panel(_first_picture(ROOT / file))
        cards.append(_card(title, picture, file))
    for path in sorted((DOCS / "figures").glob("*.png")):
        pages[f"thumbnails/{path.name}"] = one_panel(path.read_bytes())
    parts += [*_grid(cards), "## Figures of papers, and more\n"]
    parts += _grid(
        [_card(ALL.name(name), f"thumbnails/{name}.png", f"results/{name}.md") for name in SHOWN]
    )
    parts.append("## Scripts of one page\n")
    for path in sorted((ROOT / "examples").glob("*.py")):
        parts.append(f'```python title="examples/{path.name}"\n{path.read_text()}```\n')
    return {"gallery.md": "\n".join(parts), **pages}


def one_panel(figure: bytes) -> bytes:
    """Returns the first panel of a figure between its axes, or all of it if it has none."""
    import numpy as np
    from PIL import Image

    with Image.open(BytesIO(figure)) as opened:
        image = opened.convert("RGB")
    dark = np.asarray(image.convert("L")) < 130
    for left in np.flatnonzero(dark.sum(0) > 0.1 * image.width * 0.6):
        top, bottom = _longest(dark[:, left])
        near = dark[bottom - 1 : bottom + 8, left + 2 :]  # the other axis
        right = int(np.argmin(np.pad(near, ((0, 0), (0, 1))), axis=1).max())
        if bottom - top > 0.15 * image.width and right > 0.2 * image.width:
            image = image.crop((left, top, left + right, bottom))
            break
    image.thumbnail((480, 360))
    image.save(file := BytesIO(), "PNG", optimize=True)
    return file.getvalue()


def _longest(dark: Any) -> tuple[int, int]:
    """Returns the start and the end of the longest run of dark pixels."""
    ends = [0, *(number for number, is_dark in enumerate(dark) if not is_dark), len(dark)]
    length, end = max((end - start, end) for start, end in pairwise(ends))
    return end - length + bool(length), end


def _card(title: str, picture: str, page: str) -> str:
    return f"-   [![{title}]({picture})]({page})\n\n    [{title}]({page})\n"


def _grid(cards: list[str]) -> list[str]:
    return ['<div class="grid cards items" markdown>\n', *cards, "</div>\n"]


def _first_picture(notebook: Path) -> bytes:
    """Returns the first picture among the outputs of a notebook."""
    for cell in json.loads(notebook.read_text())["cells"]:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                return b64decode(output["data"]["image/png"])
    raise ValueError(f"{notebook.name} has no picture; run it, and commit its outputs")


def destination(page: str, target: str) -> str | None:
    """Returns the page of the site to which a link between files of the repository leads.

    Args:
      page: the file that has the link, from the root of the repository.
      target: of the link, relative to that file.

    Returns:
      A file as the site names it, or None if the site has no such page.
    """
    path = PurePosixPath(os.path.normpath(PurePosixPath(page).parent / target))
    match path.parts:
        case ("docs", *rest):
            return "/".join(rest)
        case ("notebooks", _):
            return str(path)
        case ("examples", _):
            return "gallery.md"
        case ("README.md",):
            return "index.md"
        case (file,) if file in ROOT_PAGES.values():
            return file.lower()
        case ("fedjax_mm", *_, _) if path.suffix == ".py":
            return _described(path)
    return None


def _described(path: PurePosixPath) -> str | None:
    module = ".".join(path.with_suffix("").parts)
    for page, area in REFERENCE.items():
        if module in area.whole or path.with_suffix("").parts[1] in area.homes:
            return f"reference/{page}.md"
    return "results.md" if path.parts[1] == "papers" else None


_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((\.\.?/[^)#\s:]+)(#[^)\s]*)?\)")
_ROOT_LINK = re.compile(_LINK.pattern.replace(r"\.\.?/", ""))
_FENCE = re.compile(r"(^```.*?^```$|^(?: {4}[^\n]*\n)+)", re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    """Adds the generated pages to the navigation, and a menu of versions to a published site."""
    if config.site_url:
        config.extra["version"] = {"provider": "mike"}
    if not config.repo_url:
        config.edit_uri = None
    config.copyright = f"fedjax_mm {version()}, {config.copyright}"
    made = {
        "Tutorials": [{title: file} for file, title in tutorials().items()],
        "Results": results(),
        "Reference": [*reference(), "keys.md"],
    }
    for entry in config.nav:
        for title in entry.keys() & made.keys():
            entry[title] = entry[title] + made[title]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the notebooks and the generated pages."""
    from mkdocs.structure.files import File

    for name in tutorials():
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    from fedjax_mm.experiments.schema import FILE, schema

    files_of_experiments = {"keys.md": keys(), FILE: json.dumps(schema(), indent=1)}
    for name, text in (gallery() | about() | reference() | files_of_experiments).items():
        file = File.generated(config, name, content=text)
        if name in ROOT_PAGES:
            file.edit_uri = f"../{ROOT_PAGES[name]}"
        files.append(file)
    return files


on_files.mkdocs_priority = 100  # before mkdocs-jupyter looks for notebooks


BOOSTS = {
    "how-to": 8,
    "notebooks": 4,
    "literature": 3,
    "install": 8,
    "experiments": 8,
    "extending": 8,
    "keys": 3,
    "concepts": 8,
    "index": 8,
}
"""How much more the search values the pages that say how; results and the reference have 1."""


def tags() -> dict[str, list[str]]:
    """Returns words that the search must find, for pages that cannot list them at their top."""
    return {
        "literature.md": [name for name in literature() if " " not in name],
        "results.md": ["reproduce", "reproducibility", "papers"],
    }


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Redirects links from files of the repository to pages, and links names to the reference."""
    here = page.file.src_uri
    page.meta.setdefault("tags", tags().get(here, []))
    page.meta.setdefault("search", {"boost": BOOSTS.get(re.split(r"[/.]", here)[0], 1)})
    if here.startswith("results") or here == "index.md":
        page.meta["hide"] = ["toc"] if here != "index.md" else ["toc", "navigation"]
    if page.edit_url and here.startswith("notebooks/"):  # which are not in docs/
        page.edit_url = page.edit_url.replace(f"docs/{here}", here)
    elif here.startswith("results"):  # which nobody edits
        page.edit_url = None
    source = ROOT_PAGES.get(here, f"docs/{here}")

    def lead(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        there = destination(source, target)
        return f"[{text}]({_relative(there, here)}{anchor})" if there else text

    if here.startswith(("reference/", "gallery")):
        return markdown
    if here == "results.md":
        return markdown.replace("](figures/", "](thumbnails/")
    links = _ROOT_LINK if here in ROOT_PAGES else _LINK
    parts = _FENCE.split(markdown)
    seen: set[str] = set()
    return "".join(
        part if number % 2 else _name(links.sub(lead, part), seen)
        for number, part in enumerate(parts)
    )


def _relative(there: str, here: str) -> str:
    return os.path.relpath(there, PurePosixPath(here).parent).replace(os.sep, "/")


def _name(text: str, seen: set[str]) -> str:
    """Links the first mention of a public name on a page, or a call of it, to its description."""
    homes = {each.short: each.home for each in public()}

    def lead(match: re.Match[str]) -> str:
        name = match[1]
        if name not in homes or name in seen:
            return match[0]
        seen.add(name)
        return f"[{match[0]}][{homes[name]}]"

    return re.sub(r"(?<![\[`#|])`(\w+)(?:\([^`\n]*\))?`(?![\]`])", lead, text)


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """Shows formulas as MathML, labels cells for phones, and corrects what nbconvert writes."""
    here = page.file.src_uri
    html = re.sub(
        r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', _formula, html, flags=re.DOTALL
    )
    if here == "keys.md":
        rows = r'<div class="rows">\g<0></div>'
        html = re.sub(r"<table>.*?</table>", rows, html, flags=re.DOTALL)
    if not here.startswith("notebooks/"):
        return re.sub(r'<div class="rows">.*?</div>', _labelled, html, flags=re.DOTALL)

    def lead(match: re.Match[str]) -> str:
        there = destination(here, match[1])
        url = files.get_file_from_path(there).url_relative_to(page.file) if there else ""
        return f'<a href="{url}{match[2] or ""}">{match[3]}</a>' if there else match[3]

    html = re.sub(r'<a href="((?!http)[^"#]+)(#[^"]*)?">(.*?)</a>', lead, html, flags=re.DOTALL)
    download = f'<p><a class="md-button" href="{Path(here).name}" download>Download</a></p>'
    html = re.sub(r"</h1>", rf"</h1>{download}", html, count=1)
    html = re.sub(r"<script[^>]*(?:mathjax|MathJax).*?</script>", "", html, flags=re.DOTALL)
    return re.sub(r"<p>.*?</p>", _formulas, html, flags=re.DOTALL)


def _labelled(tables: re.Match[str]) -> str:
    """Returns tables whose cells have the heads of their columns, which a phone shows as cards."""
    heads = [re.sub("<.*?>", "", each) for each in re.findall(r"<th[^>]*>(.*?)</th>", tables[0])]

    def row(match: re.Match[str]) -> str:
        names = iter(heads)
        return re.sub(r"<td", lambda _: f'<td data-label="{next(names)}"', match[0])

    return re.sub(r"<tr>\s*<td.*?</tr>", row, tables[0], flags=re.DOTALL)


def _formula(match: re.Match[str]) -> str:
    """Returns a formula in MathML, which a browser shows without a script."""
    from latex2mathml.converter import convert

    if match[1] == "div":  # a phone scrolls the formula instead of the page
        return f'<div class="formula">{convert(unescape(match[2]), display="block")}</div>'
    return convert(unescape(match[2]), display="inline")


def _formulas(paragraph: re.Match[str]) -> str:
    """Returns a paragraph of a notebook with its formulas in MathML."""
    return re.sub(r"()\$([^$]+)\$", _formula, paragraph[0])


class _Page(HTMLParser):
    """The links of a page, the files that it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "preconnect", "icon"):
            self.loads.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])


def problems(site: Path) -> Iterator[str]:
    """Yields the problems of a built site: broken links, and requests to other servers."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    pages.pop(site / "404.html", None)  # because its links are absolute
    for path, page in pages.items():
        for url in page.links + page.loads:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                if url in page.loads and parts.scheme != "data":
                    yield f"{path.relative_to(site)} asks another server: {url}"
                continue
            there = (
                Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            )
            there = there / "index.html" if there.is_dir() else there
            anchors = pages[there].anchors if there in pages else {parts.fragment}
            if not there.exists() or unquote(parts.fragment) not in anchors:
                yield f"{path.relative_to(site)} links to nothing: {url}"
    index = json.loads((site / "search" / "search_index.json").read_text())
    known = "\n".join(unescape(entry["text"]) for entry in index["docs"])
    yield from (f"the search does not know {name}" for name in literature() if name not in known)


def on_post_build(config: Any) -> None:
    """Warns of problems, which `mkdocs build --strict` makes errors."""
    for problem in problems(Path(config.site_dir)):
        LOG.warning(problem)


on_post_build.mkdocs_priority = -100  # after the search has written its index
