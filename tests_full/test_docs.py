"""Code in the README and on the site runs, and the site is complete."""

import inspect
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from operator import attrgetter
from pathlib import Path
from typing import get_args

import matplotlib.pyplot as plt
import numpy as np
import pytest
import typer
import xarray as xr
from jsonschema import Draft7Validator

import fedjax_mm
from docs import hooks
from fedjax_mm import Experiment, open_result, sweep, sweeps
from fedjax_mm.cli import app, collected, page
from fedjax_mm.experiments.executors import EXECUTORS
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.methods import ASSIGNMENT_TABLES, METHOD_TABLES, Byzantine, Privacy
from fedjax_mm.experiments.optimizers import (
    OPTIMIZER_TABLES,
    SCHEDULE_TABLES,
    SERVER_OPTIMIZER_TABLES,
    InverseTime,
)
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.experiments.own import allowing_code
from fedjax_mm.experiments.point import Target
from fedjax_mm.experiments.schema import schema
from fedjax_mm.experiments.tasks import PARTITION_TABLES
from fedjax_mm.papers import ALL
from fedjax_mm.papers.published import all_claims
from fedjax_mm.papers.schema import Agreement, Verdict
from fedjax_mm.sweeps import plan
from fedjax_mm.sweeps.program import programs_of
from tests.experiments.test_method_tables import METHOD
from tests.helpers import slow_unless
from tests_full.experiments.test_method_tables import EXAMPLES

SCHEMA = Draft7Validator(schema())
ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXPERIMENTS = (ROOT / "docs" / "experiments.md").read_text()


@pytest.mark.parametrize("rounds", [slow_unless(rounds == 20, rounds) for rounds in (20, 1000)])
def test_readme_code_runs(rounds, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 15
    assert "num_rounds=1000" in code
    code = code.replace("num_rounds=1000", f"num_rounds={rounds}")
    exec(compile(code, "README.md", "exec"), {})
    assert "learning_rate" in capsys.readouterr().out
    assert (tmp_path / "first.png").exists()
    assert code_of_the_front_page() == re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def code_of_the_front_page():
    """It has the first program of the README, and no other."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)


def test_readme_names_existing_commands_and_functions():
    commands = set(re.findall(r"^    fedjax-mm (\w+)", README, re.MULTILINE))
    assert commands == {
        command.name or command.callback.__name__
        for command in app.registered_commands
        if not command.hidden
    }
    for name in re.findall(r"^\| `(\w+)\(", README, re.MULTILINE):
        assert name in fedjax_mm.__all__
    assert len(README.splitlines()) <= 120


SUMMARIES = sorted((ROOT / "docs" / "summaries").glob("*.json"))


def test_the_results_pages_are_generated_from_the_summaries(tmp_path):
    """`fedjax-mm report` writes `docs/results.md` and `docs/results/`, which nobody edits."""
    assert len(SUMMARIES) >= 42
    figures = ROOT / "docs" / "figures"
    for path in SUMMARIES:
        folder = tmp_path / "results" / path.stem
        folder.mkdir(parents=True)
        shutil.copy(path, folder / "summary.json")
        shutil.copy(figures / f"{path.stem}.png", folder / "figure.png")
        (folder / "result.nc").touch()
    page.write(tmp_path / "results", "md", tmp_path / "results.md")
    made = {path.name: path.read_text() for path in (tmp_path / "results").glob("*.md")}
    assert {path.name: path.read_text() for path in (ROOT / "docs/results").glob("*")} == made
    assert (ROOT / "docs/results.md").read_text() == (tmp_path / "results.md").read_text()
    assert {path.stem for path in figures.iterdir()} == {path.stem for path in SUMMARIES}
    assert not re.search(r"/(home|root|tmp|work)/", "".join(map(Path.read_text, SUMMARIES)))


def test_readme_counts_the_statements_of_each_paper():
    results = (ROOT / "docs" / "results.md").read_text()
    rows = re.findall(r"^\| .*\(20\d\d\)\. \| \d+ \| (?:[^|]+\| ){6}$", results, re.MULTILINE)
    assert len(rows) == 3
    assert [row for row in rows if row not in README.splitlines()] == []


def card(index, item):
    """The verdicts on an item's card on the page of results."""
    return index.split(f"\n    `{item}`, ")[0].rpartition("](results/")[2]


def test_all_counts_are_those_of_the_summaries():
    """README's and the index's, recomputed from the summaries and the statements alone."""
    index = (ROOT / "docs" / "results.md").read_text()
    plain = re.sub(r"</?span.*?>", "", index)
    judged = {path.stem: json.loads(path.read_text()) for path in SUMMARIES}
    names = get_args(Verdict)
    listed: Counter[str] = Counter()
    printed: Counter[str] = Counter()
    for path in sorted((ROOT / "fedjax_mm" / "papers").glob("*/published.toml")):
        counts, marked, agreed = Counter(), Counter(), Counter()
        for item, table in tomllib.loads(path.read_text()).items():
            numbers = {each["key"]: each for each in judged.get(item, {}).get("numbers", ())}
            own = Counter()
            for each in table.get("numbers", ()):
                found = numbers.get(each["key"], {"parts": ()})["parts"]
                assert len(found) in (0, each["numbers"])  # each is compared once, or none is
                own.update(part["verdict"] for part in found)
                own["not run"] += each["numbers"] * (not found)
            agreed += own
            if item in judged:
                shown = re.findall(r"numbers: (\d+) ([a-z ]+)<", card(index, item))
                assert {word: int(number) for number, word in shown} == +own
            here = {each["key"]: each for each in judged.get(item, {}).get("statements", ())}
            stated = {each["key"] for each in table.get("statements", ())}
            assert not here or here.keys() == stated
            for key in stated:
                verdict = here[key]["verdict"] if here else "not tested"
                counts[verdict] += 1
                marked[verdict] += bool(here and here[key]["reading"]) and verdict != "not tested"
            if here:
                own = [each["verdict"] for each in here.values()]
                shown = re.findall(
                    r'<span class="chip [\w-]+">(\d+) ([a-z ]+)</span>', card(index, item)
                )
                number = {name: int(n) for n, name in shown}
                assert number == {name: own.count(name) for name in names if name in own}
        cells = [
            f"{counts[name]} ({marked[name]} under our reading)"
            if marked[name]
            else str(counts[name])
            for name in names
        ]
        row = f" | {counts.total()} | {' | '.join(cells)} | "
        assert sum(line.endswith(row) for line in plain.splitlines()) == 1
        assert sum(line.endswith(row) for line in README.splitlines()) == 1
        listed += counts
        row = [agreed.total(), *(agreed[name] for name in get_args(Agreement))]
        assert f" | {' | '.join(map(str, row))} | \n" in plain
        printed += agreed
    words = " ".join(README.split())
    for text in (
        f"Of {printed.total()}, given",
        f"{printed['agrees']} agree with ours, {printed['differs']} differ, and ",
        f"{printed['too noisy']} are too noisy to tell; {printed['not run']} are of data",
    ):
        assert text in words
    for name in ("contradicted", "slip in print", "not reproduced", "not settled"):
        section = plain.split(f"\n## {name.capitalize()}\n")[1].split("\n## ")[0]
        assert len(re.findall(r"^\| ", section, re.MULTILINE)) == listed[name] + 1  # the header
    section = plain.split("\n## Not tested\n")[1]
    keys = re.findall(r"^\| [^|]+ \| ([^|]+) \|", section, re.MULTILINE)[1:]
    keys = keys[: section.split("\n## ")[0].count("\n| ") - 1]
    several = (each.split("<br>") if "“" in each else each.split(", ") for each in keys)
    assert sum(map(len, several)) == listed["not tested"]
    claims = [claim for some in all_claims().values() for claim in some]
    section = plain.split("\n## Main claims\n")[1].split("\n## ")[0]
    assert all(f"\n| {claim.text} | " in section for claim in claims)
    outcomes = {
        item: Counter(each["outcome"] for each in about["checks"]) for item, about in judged.items()
    }
    for item, found in outcomes.items():
        shown = re.findall(r"own: (\d+) ([a-z ]+)<", card(index, item))
        assert {word: int(number) for number, word in shown} == found


# Run on CPUs before the safe setting of XLA's fusions was recorded. docs/xla.md compares them.
UNFLAGGED = {
    *(f"mfa-fig{name}" for name in ("6a", "7a", "7b")),
    *("maxfl-demand", "maxfl-flips", "maxfl-weights"),
    *("multi-attributes", "multi-compare"),
}
CHANGED = set[str]()  # run from a tree with changes that no revision has


def test_results_are_of_revisions_and_of_the_safe_setting():
    about = {path.stem: json.loads(path.read_text())["manifest"] for path in SUMMARIES}
    unsafe = {
        item
        for item, manifest in about.items()
        if manifest["device"]["platform"] == "cpu"
        and "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT" not in (manifest.get("xla_flags") or "")
    }
    assert unsafe == UNFLAGGED
    table = (ROOT / "docs" / "xla.md").read_text().split("| item | instance |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| ([a-z][^|]+) \|", table, re.MULTILINE)
    assert {item for row in rows for item in row.split(", ")} >= UNFLAGGED
    dirty = {
        item
        for item, each in about.items()
        if not re.fullmatch("[0-9a-f]{40}", each["git_revision"])
    }
    assert dirty == CHANGED


def read(text):
    """An experiment, which the schema accepts, too."""
    values = tomllib.loads(text)
    SCHEMA.validate(values)
    return validate(Experiment, values)


def test_the_documented_experiment_may_be_swept():
    """It runs in tests/experiments/test_method_tables.py."""
    text, *_ = re.findall(r"```toml\n(.*?)```", EXPERIMENTS, re.DOTALL)
    of_optimizers, axes, of_data = re.findall(
        r"^    \[axes\]\n.*?\n\n", EXPERIMENTS, re.DOTALL | re.MULTILINE
    )
    swept = read(text + axes)
    assert len(programs_of(grid_of(swept))) == 2  # one per algorithm
    swept = read(text + of_data)
    assert swept.task.data_seed == "seed"
    assert grid_of(swept).shape == (2, 2, 3)
    assert len(programs_of(grid_of(swept))) == 2
    optimizers, rate, tasks = re.findall(r"```toml\n(.*?)```", EXPERIMENTS, re.DOTALL)[1:]
    head = 'num_models = 2\nnum_rounds = 20\nassignment = { name = "mfa_rand" }\ntask = {}\n'
    one = read(head + optimizers + of_optimizers)
    assert len(programs_of(grid_of(one))) == 1
    one = read(head + optimizers.replace("learning_rate = 0.01", rate))
    schedule = one.algorithms["FedAvg"].schedule(2, 20)
    assert [float(schedule(t)) for t in (1, 6)] == pytest.approx([0, 0.1])
    no_task = head.replace("task = {}\n", "").replace("num_models = 2\n", "")
    assert read(no_task + tasks + optimizers).num_models == 3


def test_the_page_of_keys_has_every_key_of_every_table():
    rows = {}
    for line in hooks.keys().splitlines():
        if heading := re.match(r"(##+) (.*?) \{", line):
            section = heading[2] if heading[1] == "##" else section
            table = rows.setdefault((section, heading[2]), set())
        elif key := re.match(r"\| `(\w+)` \| [^|]+ \| [^|]* \| [^|]*[a-z][^|]* \|$", line):
            table.add(key[1])
    for section, tables in {
        "assignment": ASSIGNMENT_TABLES,
        "algorithms": METHOD_TABLES,
        "learning_rate": {**SCHEDULE_TABLES, "inverse_time": InverseTime},
        "optimizer": OPTIMIZER_TABLES,
        "server_optimizer": SERVER_OPTIMIZER_TABLES,
        "partition": PARTITION_TABLES,
        "executor": EXECUTORS,
    }.items():
        shared = rows[section, section]
        for name, table in tables.items():
            own = rows[section, name]
            assert (own | shared) - table.model_fields.keys() == set(), (section, name)
            assert table.model_fields.keys() - {"name", "schedule"} == own | shared - {"schedule"}
    assert rows["Experiment", "Experiment"] == {*Experiment.model_fields}
    for section, table in {"until": Target, "byzantine": Byzantine, "privacy": Privacy}.items():
        assert rows[section, section] == {*table.model_fields}


def test_methods_that_need_thresholds_are_documented():
    (names,) = re.findall(r"`(\w+)` and `(\w+)` need\s+`\[requirement\]`", EXPERIMENTS)
    for name in METHOD_TABLES:
        method = METHOD.validate_python({"name": name, "learning_rate": 0.1} | EXAMPLES[name][1])
        assert method.needs_thresholds == (name in names), name


PAGES = {str(path.relative_to(ROOT / "docs")): path for path in (ROOT / "docs").rglob("*.md")}
SHORTER = {  # replacements that make the code on a page small
    "index.md": {"num_rounds=1000": "num_rounds=20", "num_seeds=20": "num_seeds=2"},
    "how-to/data.md": {"num_rounds=10": "num_rounds=2"},
    "how-to/plots.md": {"num_rounds=200, num_seeds=10": "num_rounds=20, num_seeds=3"},
    "how-to/results.md": {"[mfa_rand, mfa_rr]": "[mfa_rr]"},
    "how-to/sweeps.md": {"[mfa_rand, mfa_rr]": "[mfa_rr]"},
}
OWN_CODE = "how-to/own-code.md"
ELSEWHERE = {
    "extending.md",
    "how-to/tuning.md",
    "how-to/clusters.md",
}  # tested in tests_full/simulator/test_extending.py and below


def blocks(path):
    """Yields the language and the text of each fenced or indented block of code on a page."""
    text = path.read_text()
    fences = re.findall(r"^( *)```(\w+)\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE)
    for indent, language, code in fences:  # of tabs too, which are indented
        yield language, re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
    plain = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"(?<=\n\n)((?:    .*\n|\n(?=    ))+)", plain):
        if re.match(r"    (fedjax-mm|srun|pip) ", code):
            yield "sh", code
        elif re.match(r"    (\[\w+\]$|\w+ = \S+$|\w+ = \{.*\}$)", code, re.MULTILINE):
            yield "toml", re.sub(r"^    ", "", code, flags=re.MULTILINE)


def pages_with(language):
    return sorted(
        name for name, path in PAGES.items() if any(kind == language for kind, _ in blocks(path))
    )


@pytest.mark.parametrize("name", sorted({*pages_with("python")} - ELSEWHERE))
def test_the_code_of_a_page_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # JAX has already started its devices.
    monkeypatch.setattr(sweeps, "use_cpu_devices", lambda count: None)
    code = "\n".join(code for language, code in blocks(PAGES[name]) if language == "python")
    for old, new in SHORTER.get(name, {}).items():
        assert old in code, old
        code = code.replace(old, new)
    exec(compile(code, name, "exec"), {"__name__": "page"})
    plt.close("all")


def test_the_script_of_the_clusters_page_computes_and_merges_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = PAGES["how-to/clusters.md"]
    code = "\n".join(code for language, code in blocks(page) if language == "python")
    (first, last) = re.findall(r"#SBATCH --array=(\d+)-(\d+) ", page.read_text())[-1]
    array = {"MIN": first, "MAX": last, "COUNT": last}

    def run(*words, **variables):
        monkeypatch.setattr(sys, "argv", ["study.py", *words])
        for name, value in variables.items():
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
        names = {"__name__": "page"}
        exec(compile(code, page.name, "exec"), names)
        return names

    for task in range(int(first), int(last) + 1):
        run(**array, ID=str(task))
    Path("results/mine/parts/2-of-4.npz").rename("kept")
    with pytest.raises(ValueError, match="part number 2 of 4 is missing: compute with"):
        run("merge")
    Path("kept").rename("results/mine/parts/2-of-4.npz")
    names = run("merge")
    found, expected = open_result("results/mine"), sweep(names["grid"])
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


def test_all_trials_on_the_tuning_page_share_a_program(monkeypatch):
    lower, texts = plan._lower, []

    def lowered(*arguments):
        made = lower(*arguments)
        texts.append(made.as_text())
        return made

    monkeypatch.setattr(plan, "_lower", lowered)
    page = PAGES["how-to/tuning.md"]
    code = "\n".join(code for language, code in blocks(page) if language == "python")
    assert "range(4)" in code
    names = {"__name__": "page"}
    exec(compile(code.replace("range(4)", "range(2)"), page.name, "exec"), names)
    first, other = texts  # the second batch of trials uses the program of the first one
    assert first != other
    assert names["events"]["/jax/compilation_cache/compile_requests_use_cache"] > 0
    assert names["study"].best_params["rate"] > 0.1
    assert {trial.state for trial in names["study"].trials} >= {names["TrialState"].COMPLETE}


@pytest.mark.parametrize("name", sorted({*pages_with("toml")} - {"experiments.md"}))
def test_the_experiments_of_a_page_are_valid(name, tmp_path, monkeypatch):
    """A table without algorithms changes the experiment above it. Files of data are empty ones.

    experiments.md, which has parts of experiments, has its own test.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    own, *_ = (code for language, code in blocks(PAGES[OWN_CODE]) if language == "py")
    Path("my_parts.py").write_text(own)
    whole = {}
    for code in (code for language, code in blocks(PAGES[name]) if language == "toml"):
        given = tomllib.loads(code)
        for file in re.findall(r'^file = "(\w+\.npz)"', code, re.MULTILINE):
            Path(file).touch()
        whole = given if "algorithms" in given else whole | given
        with allowing_code(name == OWN_CODE):
            validate(Experiment, whole)
        SCHEMA.validate(whole)
    assert whole


def test_the_recipe_for_hydra_runs(tmp_path):
    pytest.importorskip("hydra")
    (program,) = (x for _, x in blocks(PAGES[OWN_CODE]) if "import hydra" in x)
    (config,) = (x for language, x in blocks(PAGES[OWN_CODE]) if language == "yaml")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "experiment.yaml").write_text(config)
    (tmp_path / "main.py").write_text(program)
    words = ["num_rounds=4", "hydra.run.dir=out"]
    subprocess.run([sys.executable, "main.py", *words], cwd=tmp_path, check=True)
    found = xr.open_dataset(tmp_path / "out" / "result.nc")
    assert found.sizes["round"] == 5
    assert found.learning_rate.values.tolist() == [0.05, 0.1]


def commands_in(path):
    """Yields the command lines on a page, without the explanations after two spaces."""
    for language, code in blocks(path):
        for line in code.splitlines() if language in ("sh", "bash") else ():
            if "fedjax-mm" in line:
                yield re.split(r"\s{2,}", line[line.index("fedjax-mm") :])[0]


def parse(line):
    """Parses a command line into the command's parameters."""
    group = typer.main.get_command(app)
    with group.make_context("fedjax-mm", shlex.split(line)[1:]) as context:
        name, command, rest = group.resolve_command(context, context._protected_args + context.args)
        return command.make_context(name, rest, parent=context).params


def test_the_commands_on_all_pages_can_be_parsed():
    lines = [line for path in PAGES.values() for line in commands_in(path)]
    assert len(lines) > 12
    for line in lines:
        ids = parse(line).get("ids", ())
        assert set(ids) <= {*ALL, "ID"}, line
    with pytest.raises(Exception, match="No such option"):
        parse("fedjax-mm run grid.toml --dry")


def test_the_site_has_every_item_with_its_command_verdicts_time_and_data():
    index = (ROOT / "docs/results.md").read_text()
    listed = [page for each in hooks.results() for pages in each.values() for page in pages]
    assert [*hooks.results()[0]] == ["Bhuyan et al. 2022"]
    for name in ALL:
        path = ROOT / "docs" / "summaries" / f"{name}.json"
        if not path.exists():
            assert f"- `{name}`: " in index
            continue
        assert {ALL.name(name): f"results/{name}.md"} in listed
        command = name.replace("bounds-", "bounds ") if "bounds-" in name else f"reproduce {name}"
        text = (ROOT / "docs" / "results" / f"{name}.md").read_text()
        assert f"\nfedjax-mm {command}" in text
        summary = collected.Summary.model_validate_json(path.read_text())
        assert (ALL.runtime(name), ALL.needs(name)) == (summary.runtime, summary.needs)
        assert f"Took {summary.runtime}" in text
        assert f"`{name}`, {summary.runtime}, {summary.needs or 'no files of data'}, " in index


def test_the_reference_has_every_public_name_once():
    pages = hooks.reference()
    assert {each.path for each in hooks.public()} >= {
        f"fedjax_mm.{name}"
        for name in fedjax_mm.__all__
        if not inspect.ismodule(getattr(fedjax_mm, name))
    }
    for each in hooks.public():
        shown = [page for page, text in pages.items() if f"::: {each.home}\n" in text]
        whole = [
            f"reference/{page}.md"
            for page, area in hooks.REFERENCE.items()
            if any(each.home.startswith(f"{module}.") for module in area.whole)
        ]
        assert [f"reference/{each.area}.md"] == shown + whole, each


def test_every_public_name_is_stable_or_experimental():
    page = hooks.reference()["reference/stability.md"]
    stable, experimental = page.split("## Experimental")
    for each in hooks.public():
        link = f"][{each.home}]"
        assert (link in experimental) == each.is_experimental != (link in stable), each
    for part in itertools.chain(*hooks.EXPERIMENTAL):
        assert any(each.is_in((part,)) for each in hooks.public()), part


def test_the_map_of_the_papers_names_code_and_every_item():
    words = re.findall(r"`([\w.-]+)`", (ROOT / "docs" / "papers.md").read_text())
    items = {name for name in ALL if ALL.paper(name) != "In no paper"}
    for name in set(words) - items - {"fedjax_mm."}:
        attrgetter(name)(fedjax_mm)
    assert items <= set(words)


def test_short_answers_have_the_published_numbers():
    text = (ROOT / "docs" / "better.md").read_text()
    numbers = re.findall(r"\[([^\]]*\d[^\]]*)\]\(results/([\w-]+)\.md\)", text)
    assert len(numbers) > 20
    for number, item in numbers:
        summary = json.loads((ROOT / "docs" / "summaries" / f"{item}.json").read_text())
        assert number in json.dumps(summary, ensure_ascii=False), (number, item)


def test_links_between_files_lead_to_pages():
    page = "docs/how-to/data.md"
    assert hooks.destination(page, "../extending.md") == "extending.md"
    assert hooks.destination(page, "../../notebooks/a.ipynb") == "notebooks/a.ipynb"
    file = "../fedjax_mm/base/contract.py"
    assert hooks.destination("notebooks/a.ipynb", file) == "reference/contract.md"
    assert hooks.destination("notebooks/a.ipynb", "../README.md") == "index.md"
    assert hooks.destination(page, "../../tests/helpers.py") is None


def test_problems_of_a_built_site_are_named(tmp_path):
    (tmp_path / "search").mkdir()
    index, page = tmp_path / "search" / "search_index.json", tmp_path / "index.html"
    names = list(hooks.literature())
    assert {"FedAdam", "FedVARP", "FedBuff", "power-of-choice", "FedNova", "cohort"} <= {*names}
    index.write_text(json.dumps({"docs": [{"text": ", ".join(names)}]}))
    page.write_text('<h1 id="top"><a href="#top"></a><a href="https://a.example"></a></h1>')
    assert list(hooks.problems(tmp_path)) == []
    fewer = ", ".join(name for name in names if "MaxFL" not in name)
    index.write_text(json.dumps({"docs": [{"text": fewer}]}))
    page.write_text(
        '<a href="#no"></a><a href="b/"></a><script src="https://a.example/x"></script>'
    )
    assert list(hooks.problems(tmp_path)) == [
        "index.html links to nothing: #no",
        "index.html links to nothing: b/",
        "index.html asks another server: https://a.example/x",
        "the search does not know MaxFL",
    ]
