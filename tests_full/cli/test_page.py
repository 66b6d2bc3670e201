"""The page of a directory: content, damaged results, and no external resources."""

import base64
import contextlib
import html
import io
import json
import os
import re
import shlex
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from markdown_it import MarkdownIt
from PIL import Image
from pydantic import BaseModel

from fedjax_mm import cli
from fedjax_mm.cli import collected, page
from fedjax_mm.experiments.overrides import changes, validate
from fedjax_mm.papers import BOUNDS, ITEMS
from fedjax_mm.papers.schema import Published

TEN = list(ITEMS)[:10]
STATEMENT = {
    "key": "lead",
    "quote": "A exceeds B",
    "where": "section 5",
    "rule": "A's mean minus B's is above 0",
    "verdict": "supported",
    "parts": [{"name": "", "verdict": "supported", "evidence": "1.00 ± 0.10", "seeds": 3}],
}
CHECK = {"text": "the bound holds", "outcome": "passed", "evidence": "0.10 below 0.50"}
TABLE = {"header": ["method", "|w|"], "rows": [["A*_1", "1.00 ± 0.10 (1.2)"]], "title": ""}
MANIFEST = {
    "versions": {"python": "3.11", "jax": "0.10.2"},
    "device": {"platform": "cpu", "kind": "cpu", "count": 2, "cpu_cores": 2},
    "seed": 7,
    "prng": "threefry2x32",
    "git_revision": None,
    "data": "real",
    "datasets": ["digits"],
    "config": {"num_seeds": 3},
    "wall_seconds": {"compile": 6.25, "run": 0.5},
}


def call(*arguments):
    """The exit code and the output of the command line."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main([str(argument) for argument in arguments])
    return ended.value.code, out.getvalue() + err.getvalue()


def png(size):
    """An image of noise, which hardly compresses."""
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def put(folder, name, size=(20, 30), **changed):
    """Writes a result like `reproduce`, with changes to its summary."""
    summary = {
        "id": name,
        "paper": {"figure": "Figure 1: curves", "gain": {"train": 2.5}, "open": ["eta is ours"]},
        "measured": {},
        "statements": [STATEMENT],
        "checks": [CHECK],
        "tables": [TABLE],
        "changed": ["num_seeds=3", "num_models=[1, 2]"],
        "data": "real",
        "manifest": MANIFEST,
    }
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary | changed))
    (folder / "figure.png").write_bytes(png(size))
    (folder / "result.nc").write_bytes(b"CDF")


def shown_markdown(path):
    """The HTML of a Markdown page and the pages of its items."""
    pages = [path, *sorted(path.with_suffix("").glob("*.md"))]
    return "".join(MarkdownIt().enable("table").render(page.read_text()) for page in pages)


class Reader(HTMLParser):
    """Collects the text, links and ids of a page, and checks that tags are closed."""

    def __init__(self, text):
        super().__init__()
        self.text, self.links, self.ids, self.tags, self._open = "", [], [], set(), []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in ("meta", "link", "img", "br"):
            self._open.append(tag)
        self.links += [value for key, value in attrs if key in ("src", "href", "srcset", "data")]
        self.ids += [value for key, value in attrs if key == "id"]

    def handle_endtag(self, tag):
        if tag == "img":  # img is self-closing in Markdown's output
            return
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(autouse=True, scope="module")
def no_statements():
    """Removes the statements of the papers."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(collected, "all_published", lambda kind: {})
        yield


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    """A directory with ten items whose figures have 2 MB each, and its page."""
    directory = tmp_path_factory.mktemp("ten")
    for name in TEN:
        put(directory / name, name, size=(700, 1000))
    assert call("report", directory)[0] == 0
    return directory, (directory / "report.html").read_text()


def test_the_page_is_small_and_has_every_figure(ten):
    directory, text = ten
    assert sum(path.stat().st_size for path in directory.rglob("figure.png")) > 20e6
    assert page.LIMIT / 4 < len(text.encode()) <= 5 * 2**20
    figures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert len(figures) == len(TEN)
    for figure in figures:
        with Image.open(io.BytesIO(base64.b64decode(figure))) as image:
            assert image.size[0] >= 300
            assert image.size[0] / image.size[1] == pytest.approx(10 / 7, abs=0.01)


def test_the_page_loads_no_external_resources(ten):
    _, text = ten
    reader = Reader(text)
    assert not {"script", "iframe", "object", "embed", "base"} & reader.tags
    assert not [link for link in reader.links if not link.startswith(("#", "data:"))]
    assert not re.search(r"https?://|url\(|@import|//[a-z]", re.sub(r"base64,[^\"]*", "", text))
    assert "default-src 'none'" in text


def test_every_item_is_named_first_and_linked_to_its_section(ten):
    _, text = ten
    reader = Reader(text)
    assert [link[1:] for link in reader.links if link[1:] in TEN] == TEN
    assert [name for name in reader.ids if name in TEN] == TEN
    assert len(set(reader.ids)) == len(reader.ids)
    first = text[: text.index("<section")]
    assert first.count('class="mark supported"') == len(TEN)


def test_a_section_contains_the_whole_summary(tmp_path):
    put(tmp_path / "mfa-fig1", "mfa-fig1")
    assert call("report", tmp_path)[0] == 0
    text = " ".join(Reader((tmp_path / "report.html").read_text()).text.split())
    for part in (
        ITEMS.title("mfa-fig1"),
        'Bhuyan, Moharir, Joshi, "Multi-Model Federated Learning',
        *("Figure 1: curves", "gain", "train: 2.5", "eta is ours"),
        *("A exceeds B", "section 5", "A's mean minus B's is above 0", "1.00 ± 0.10, 3 seeds"),
        *("the bound holds", "0.10 below 0.50", "|w|", "A*_1", "1.00 ± 0.10 (1.2)"),
        *("real: digits", "python 3.11, jax 0.10.2", "2 x cpu, 2 cores", "7 (threefry2x32)"),
        *("compile 6.2 s, run 0.5 s", "num_seeds=3, num_models=[1, 2]"),
        "fedjax-mm reproduce mfa-fig1 --set num_seeds=3 --set 'num_models=[1, 2]'",
    ):
        assert part in text


VERDICTS = {
    "contradicted": {"seeds": 8},
    "not settled": {"seeds": 64, "needed": 70},
    "not tested": {"seeds": 16},
}


@pytest.mark.parametrize("kind", ["html", "md"])
def test_statements_are_counted_by_verdict_with_their_remedies(tmp_path, kind, monkeypatch):
    made = [STATEMENT]
    for verdict, part in VERDICTS.items():
        parts = [STATEMENT["parts"][0] | {"verdict": verdict, **part}]
        key = verdict.replace(" ", "-")
        made.append(STATEMENT | {"key": key, "verdict": verdict, "parts": parts})
    made[-1] |= {"takes": "the faces", "about": "run on a surrogate instead of faces"}
    published = [
        {key: each.get(key, "") for key in ("key", "quote", "where", "rule")} for each in made
    ]
    other = Published(key="more", quote="B exceeds A", where="section 6")
    found = {
        ITEMS.paper("mfa-fig1"): {
            "mfa-fig1": tuple(Published(**each) for each in published),
            "mfa-fig2": (other,),
            "paper": (other.model_copy(update={"untested": "it is a proof"}),),
        },
        ITEMS.paper("cb-fig1"): {"cb-fig1": (other,)},
    }
    monkeypatch.setattr(
        collected, "all_published", lambda kind: found if kind == "statements" else {}
    )
    put(tmp_path / "mfa-fig1", "mfa-fig1", statements=made)
    assert call("report", tmp_path, "--format", kind)[0] == 0
    text = (tmp_path / f"report.{kind}").read_text()
    text = text if kind == "html" else shown_markdown(tmp_path / "report.md")
    (row,) = re.findall(r"<tr>\s*<td>Bhuyan.*?</tr>", text, re.DOTALL)
    # The paper has six: four of this item, one of an item that was not run, one without an item.
    assert re.findall(r"<td>(\d+)</td>", row) == ["6", "1", "1", "0", "0", "1", "3"]
    assert "Pawlik" not in text
    shown = " ".join(Reader(text).text.split())
    for words in (
        *("about 70 seeds", "3 to 64", "the faces", "run on a surrogate instead of faces"),
        *("its item was not run", "it is a proof", "64 seeds"),
    ):
        assert words in shown
    assert shown.index("about 70 seeds") < shown.rindex(ITEMS.title("mfa-fig1"))


def test_text_is_escaped(tmp_path):
    quote = "<script>alert(1)</script> a < b & [x](y)"
    put(tmp_path / "mfa-fig1", "mfa-fig1", statements=[STATEMENT | {"quote": quote}])
    for kind in ("html", "md"):
        assert call("report", tmp_path, "--format", kind)[0] == 0
    reader = Reader((tmp_path / "report.html").read_text())
    assert quote in reader.text
    assert "script" not in reader.tags
    shown = Reader(shown_markdown(tmp_path / "report.md"))
    assert quote in shown.text
    assert "y" not in shown.links


def broken(folder):
    """Maps a name to a way to damage a result and to the expected message."""

    def edit(**changed):
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | changed))

    def special(name, make):
        (folder / name).unlink()
        make(folder / name)

    def nested(levels):
        return '{"a": ' * levels + "1" + "}" * levels

    figure = (folder / "figure.png").read_bytes()
    huge = figure[:16] + (60_000).to_bytes(4) * 2 + figure[24:29]
    huge += zlib.crc32(huge[12:]).to_bytes(4) + figure[33:]
    junk = b"IDATjunk"
    undecodable = figure[:33] + (4).to_bytes(4) + junk + zlib.crc32(junk).to_bytes(4) + figure[-12:]
    zero = Path("/dev/zero")
    deep = "summary.json is not JSON: it is nested more than"
    return {
        "nested lists": (lambda: (folder / "summary.json").write_text("[" * 100_000), deep),
        "nested tables": (lambda: (folder / "summary.json").write_text(nested(500)), deep),
        "no number": (
            lambda: edit(manifest=MANIFEST | {"config": {"num_seeds": [1]}}),
            "summary.json: manifest.config.num_seeds: Input should be a valid integer",
        ),
        "no table": (
            lambda: edit(paper={"values": "x"}),
            "summary.json: paper.values: Input should",
        ),
        "no points": (lambda: edit(paper={"open": 1}), "summary.json: paper.open: Input should be"),
        "a pipe": (lambda: special("summary.json", os.mkfifo), "summary.json: not a regular file"),
        "a figure of a pipe": (lambda: special("figure.png", os.mkfifo), "figure.png is broken"),
        "a figure without end": (
            lambda: special("figure.png", lambda path: path.symlink_to(zero)),
            "figure.png is broken",
        ),
        "a figure of another directory": (
            lambda: (
                (folder / "figure.png").rename(folder.with_name("secret.png")),
                (folder / "figure.png").symlink_to(folder.with_name("secret.png")),
            ),
            "figure.png is broken, or a link",
        ),
        "a huge figure": (
            lambda: (folder / "figure.png").write_bytes(huge),
            "figure.png is broken",
        ),
        "a figure without pixels": (
            lambda: (folder / "figure.png").write_bytes(undecodable),
            "figure.png is broken",
        ),
        "no summary": ((folder / "summary.json").unlink, "summary.json is missing"),
        "not JSON": (lambda: (folder / "summary.json").write_text('{"id": "m'), "is not JSON"),
        "not text": (lambda: (folder / "summary.json").write_bytes(b"\xff\xfe"), "is not JSON"),
        "a list": (lambda: (folder / "summary.json").write_text("[]"), "summary.json: all of it"),
        "no statements": (lambda: edit(statements=None), "summary.json: statements"),
        "no words": (lambda: edit(statements=[{}]), "statements.0.key: Field required"),
        "unknown item": (lambda: edit(id="mfa-fig99"), "unknown item, 'mfa-fig99'"),
        "no figure": ((folder / "figure.png").unlink, "figure.png is missing"),
        "half a figure": (
            lambda: (folder / "figure.png").write_bytes(figure[: len(figure) // 2]),
            "figure.png is broken",
        ),
        "no picture": (lambda: (folder / "figure.png").write_bytes(b"x"), "figure.png is broken"),
        "no result": ((folder / "result.nc").unlink, "result.nc is missing"),
    }


@pytest.mark.parametrize("kind", ["html", "md"])
def test_damaged_results_have_a_line_and_others_are_shown(tmp_path, kind):
    put(tmp_path / "good", "mfa-fig3")
    (tmp_path / "log").mkdir()
    (tmp_path / "mfa-fig4" / "unfinished").mkdir(parents=True)
    put(tmp_path / "probe", "mfa-fig2")
    ways = list(broken(tmp_path / "probe"))
    for number, way in enumerate(ways):
        folder = tmp_path / f"spoilt-{number}"
        put(folder, "mfa-fig1")
        broken(folder)[way][0]()
    code, printed = call("report", tmp_path, "--format", kind)
    assert code == 0
    path = tmp_path / f"report.{kind}"
    text = shown_markdown(path) if kind == "md" else path.read_text()
    reader = Reader(text)
    assert "Files that could not be read" in reader.text
    lines = [html.unescape(line) for line in re.findall(r"<li>(.*?)</li>", text)]
    for number, way in enumerate(ways):
        (line,) = (line for line in lines if line.startswith(f"spoilt-{number}: "))
        assert broken(tmp_path / "probe")[way][1] in line
        assert line in printed
    assert len([line for line in lines if line.startswith("mfa-fig4: summary.json is mi")]) == 1
    # Items with a summary are shown: the good one, the probe, and nine without figure or result.
    shown = {page.stem for page in (tmp_path / "report").glob("*.md")}
    shown = shown if kind == "md" else set(reader.ids)
    assert {"good", *(f"spoilt-{ways.index(way)}" for way in ("no figure", "no result"))} <= shown
    assert "log" not in shown
    assert f"items: 11, other runs: 0, problems: {len(ways) + 1}; in {path}" in printed


CLAIMS = {"header": ["claim"], "rows": [["a|b"]], "sentences": ["A is better: by 2 <i>."]}


@pytest.mark.parametrize("kind", ["html", "md"])
def test_other_runs_have_a_line_and_verdicts(tmp_path, kind):
    mine = tmp_path / "sweeps" / "mine"
    mine.mkdir(parents=True)
    (mine / "manifest.json").write_text(json.dumps(MANIFEST))
    (mine / "result.nc").write_bytes(b"CDF")
    (mine / "claims.json").write_text(json.dumps(CLAIMS))
    (mine / "claims.png").write_bytes(png((20, 30)))
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "manifest.json").write_text("{}")
    code, printed = call("report", tmp_path, "--format", kind)
    assert code == 0
    assert "items: 0, other runs: 1, problems: 1" in printed
    path = tmp_path / f"report.{kind}"
    reader = Reader(shown_markdown(path) if kind == "md" else path.read_text())
    text = " ".join(reader.text.split())
    assert "Claims of sweeps/mine A is better: by 2 <i>. claim a|b" in text
    assert sum(link.startswith(("data:image", "figures/claims-0")) for link in reader.links) == 1
    assert (
        "sweeps/mine: data real: digits; versions python 3.11, jax 0.10.2; device 2 x cpu" in text
    )
    assert "half: manifest.json: versions: Field required" in text


@pytest.mark.parametrize("kind", ["html", "md"])
def test_the_same_results_give_the_same_page(tmp_path, kind):
    for name in ("one", "two"):
        put(tmp_path / name / "mfa-fig1", "mfa-fig1")
        put(tmp_path / name / "again" / "mfa-fig1", "mfa-fig1")
        arguments = ("--format", kind, "--out", tmp_path / name / f"page.{kind}")
        assert call("report", tmp_path / name, *arguments)[0] == 0
    one, two = ((tmp_path / name / f"page.{kind}").read_bytes() for name in ("one", "two"))
    assert one == two
    assert str(tmp_path).encode() not in one


def test_markdown_has_its_tables_and_figures(tmp_path):
    names = ["mfa-fig1", "cb-table1", "multi-maxfl"]  # in the order of ITEMS, which is not sorted
    for name in names:
        put(tmp_path / "results" / name, name)
    out = tmp_path / "docs" / "results.md"
    assert call("report", tmp_path / "results", "--format", "md", "--out", out)[0] == 0
    text = shown_markdown(out)
    tables = re.findall(r"<table>.*?</table>", text, re.DOTALL)
    measured = [table for table in tables if "<th>method</th>" in table]
    assert len(tables) == 9  # of each of 3 items: statements, checks and numbers
    assert len(measured) == 3
    cells = re.findall(r"<t[hd]>(.*?)</t[hd]>", measured[0])
    assert cells == ["method", "|w|", "A*_1", "1.00 ± 0.10 (1.2)"]
    assert "In no paper" in text
    index = Reader(MarkdownIt().enable("table").render(out.read_text()))
    assert index.links == [
        link
        for name in names
        for link in (f"results/{name}.md", f"figures/{name}.png", f"results/{name}.md")
    ]
    for name in names:
        item = out.parent / "results" / f"{name}.md"
        assert item.read_text().startswith(f"# {ITEMS.name(name)}\n")
        assert "Took 7 s on 2 CPU cores; needs no files of data;\n3 seeds" in item.read_text()
        figure, back = Reader(MarkdownIt().render(item.read_text())).links
        expected = (tmp_path / "results" / name / "figure.png").read_bytes()
        assert (item.parent / figure).read_bytes() == expected
        assert (item.parent / back).resolve() == out
    assert {path.name for path in out.parent.iterdir()} == {"figures", "results", "results.md"}
    command = "fedjax-mm reproduce mfa-fig1 --set num_seeds=3 --set 'num_models=[1, 2]'"
    assert f"<pre><code>{command}\n</code></pre>" in text


@pytest.mark.parametrize("kind", ["html", "md"])
def test_printed_numbers_have_a_table_of_their_own(tmp_path, kind, monkeypatch):
    about = {"key": "printed", "where": "Table 9", "numbers": 3, "rule": "within 5 points"}
    words = ("agrees", "differs", "too noisy")
    parts = [
        {
            "name": word,
            "verdict": word,
            "evidence": "50.0 ± 0.1, printed 52.0",
            "margin": "within 5",
        }
        for word in words
    ]
    numbers = [
        about | {"verdict": "differs", "parts": parts},
        about | {"key": "faces", "numbers": 7, "verdict": "not run", "about": "no faces"},
    ]
    of = {"statements": [STATEMENT], "numbers": numbers}
    found = {
        name: [
            Published(**{key: x[key] for key in Published.model_fields if key in x})
            for x in of[name]
        ]
        for name in of
    }
    monkeypatch.setattr(
        collected,
        "all_published",
        lambda kind: {collected.ALL.paper("mfa-fig1"): {"mfa-fig1": found[kind]}},
    )
    put(tmp_path / "mfa-fig1", "mfa-fig1", numbers=numbers)
    assert call("report", tmp_path, "--format", kind)[0] == 0
    path = tmp_path / f"report.{kind}"
    text = shown_markdown(path) if kind == "md" else path.read_text()
    cells = re.findall(r"<td>(.*?)</td>", text)
    # Sentences and numbers are counted apart: one sentence, and 1 + 1 + 1 + 7 numbers.
    rows = [cells[place : place + 7] for place in range(len(cells))]
    assert ["1", "1", "0", "0", "0", "0", "0"] in rows
    assert ["10", "1", "1", "1", "7"] in [row[:5] for row in rows]
    shown = " ".join(Reader(text).text.split())
    for part in ("50.0 ± 0.1, printed 52.0", "within 5 points", "Table 9", "no faces"):
        assert part in shown
    if kind == "md":
        assert "numbers: 7 not run" in path.read_text()


OURS, OTHER = "flips in training", "flips everywhere"


def judged_twice(key, ours, other):
    """A statement of mfa-fig1 under our reading, and the verdict of mfa-fig2 under another."""
    about = {"key": key, "reading": OURS, "verdict": ours, "rule": f"rule of {key}"}
    reading = {"statement": f"mfa-fig1/{key}", "reading": OTHER, "verdict": other}
    return STATEMENT | about, reading | {"evidence": f"evidence of {key}"}


@pytest.mark.parametrize("kind", ["html", "md"])
def test_verdicts_under_our_reading_are_marked_everywhere(tmp_path, kind, monkeypatch):
    yes, no, open_ = "supported", "not reproduced", "not settled"
    pairs = [judged_twice("one", yes, open_), judged_twice("two", open_, yes)]
    pairs += [judged_twice("three", no, open_), judged_twice("four", "not tested", yes)]
    statements = [*(statement for statement, _ in pairs), STATEMENT]
    quotes = [
        Published(**{key: each[key] for key in Published.model_fields if key in each})
        for each in statements
    ]
    found = {collected.ALL.paper("mfa-fig1"): {"mfa-fig1": quotes}}
    monkeypatch.setattr(
        collected, "all_published", lambda kind: found if kind == "statements" else {}
    )
    put(tmp_path / "mfa-fig1", "mfa-fig1", statements=statements)
    readings = [reading for _, reading in pairs]
    put(tmp_path / "mfa-fig2", "mfa-fig2", statements=[], readings=readings)
    assert call("report", tmp_path, "--format", kind)[0] == 0
    path = tmp_path / f"report.{kind}"
    text = shown_markdown(path) if kind == "md" else path.read_text()
    words = " ".join(Reader(text).text.split())
    assert f"under our reading: {OURS}" in words
    assert "evidence of one" in words
    # Each judged statement, in the counts and in the lists.
    cells = re.findall(r"<td>(.*?)</td>", text)
    one = "1 (1 under our reading)"
    counts = ["2 (1 under our reading)", "0", "0", one, one, "1"]
    assert counts in [cells[place : place + 6] for place in range(len(cells))]
    if kind == "html":
        return
    index = path.read_text()
    assert index.count("(section 5), under our reading |") == 2
    letters = dict(re.findall(r"^- ([A-Z]): (.*) \(mfa-fig\d, 3 seeds\)$", index, re.MULTILINE))
    assert letters == {"A": OURS, "B": OTHER}
    rows = re.findall(r"^\| (mfa-fig1/\w+) \| (.*) \| (.*) \| $", index, re.MULTILINE)
    found = {name: [re.sub("<.*?>", "", each) for each in verdicts] for name, *verdicts in rows}
    judged = {"one": [f"{yes} ★", open_], "two": [f"{open_} ★", yes], "three": [f"{no} ★", open_]}
    assert found == {f"mfa-fig1/{key}": each for key, each in judged.items()}
    assert "- No reading supports mfa-fig1/three: rule of three.\n" in index
    assert "- No single reading supports both mfa-fig1/one and mfa-fig1/two.\n" in index


def test_items_in_folders_of_like_names_have_pages_of_their_own(tmp_path):
    for number, name in enumerate(["a_b", "a-b", "\u4e00"]):
        put(tmp_path / name, "mfa-fig1", size=(10 + number, 10))
    assert call("report", tmp_path, "--format", "md")[0] == 0
    pages = sorted(page.stem for page in (tmp_path / "report").glob("*.md"))
    assert pages == ["a-b", "a-b-1", "mfa-fig1"]
    figures = {path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    assert figures == {png((10 + number, 10)) for number in range(3)}


@pytest.mark.parametrize("name", ["report", "figures.md"])
def test_a_page_with_the_path_of_its_items_is_refused(tmp_path, name):
    put(tmp_path / "mfa-fig1", "mfa-fig1")
    code, printed = call("report", tmp_path, "--format", "md", "--out", tmp_path / name)
    assert code == 2
    assert "choose another name, such as results.md" in " ".join(printed.split())
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (False, "results does not exist; give one that contains results"),
        (True, "results holds no result; make one with `fedjax-mm reproduce ID --out"),
    ],
)
def test_a_directory_without_results_is_refused(tmp_path, make, message):
    if make:
        (tmp_path / "results" / "log").mkdir(parents=True)
        (tmp_path / "results" / "notes.txt").touch()
    code, printed = call("report", tmp_path / "results", "--out", tmp_path / "page.html")
    assert code == 2
    assert message in printed
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_refused(tmp_path):
    put(tmp_path / "mfa-fig1", "mfa-fig1")
    (tmp_path / "file").touch()
    code, printed = call("report", tmp_path, "--out", tmp_path / "file" / "page.html")
    assert code == 2
    assert "choose another directory with --out" in printed


def test_a_figure_that_cannot_be_shrunk_is_left_out():
    figure = png((600, 900))
    assert page.shrunk(figure, len(figure)) == figure
    assert 0 < len(page.shrunk(figure, len(figure) // 5)) <= len(figure) // 5
    assert page.shrunk(figure, 100) == b""


# The command that makes a result again

CHANGED = {
    "mfa-fig4": ["task.start=zeros", "learning_rate=1e-05", "precision=float64"],
    "mfa-fig5": ["num_models=[1, 3]", "learning_rate={beta = 3, gamma = 9, per = 'frame'}"],
    "mfa-fig6a": ["window=5"],
    "maxfl-table1": ["methods.qFFL.q=[2.0]", "dataset=digits"],
    "maxfl-fig7": ["methods={'My own' = {name = 'fedprox', mu = [0.5]}}", "seed=1"],
}


@pytest.mark.parametrize("name", ITEMS)
def test_changes_restore_the_configuration(name):
    default = ITEMS[name].settings
    kind, values = type(default), default.model_dump(mode="json")
    assert changes(values, values) == []
    config = validate(kind, default.model_dump(), CHANGED.get(name, []))
    found = changes(config.model_dump(mode="json"), values)
    assert len(found) == len(CHANGED.get(name, []))
    assert validate(kind, default.model_dump(), found) == config


class Loose(BaseModel, extra="allow"):
    """A configuration that accepts any key."""


@pytest.mark.parametrize(
    "value", ["a word", "true", "5", "1e3", "", "it's", 'a "b"', "[x]", "ü\n", 1e-7, np.inf, False]
)
def test_changes_survive_a_round_trip(value):
    (found,) = changes({"key": value, "none": None}, {"key": "other", "none": 1})
    (word,) = shlex.split(shlex.quote(found))
    assert validate(Loose, {}, [word]).model_dump() == {"key": value}


def test_commands_have_a_placeholder_for_the_data_directory(tmp_path):
    changed = ["directory=/home/me/my data", "num_rounds=5"]
    put(tmp_path / "mfa-fig6a", "mfa-fig6a", changed=changed)
    put(tmp_path / "bounds-mfa", BOUNDS["mfa"].id, changed=["rate=0.5"])
    assert call("report", tmp_path)[0] == 0
    text = (tmp_path / "report.html").read_text()
    assert "fedjax-mm reproduce mfa-fig6a --data DIR --set num_rounds=5" in text
    assert "fedjax-mm bounds mfa --set rate=0.5" in text
