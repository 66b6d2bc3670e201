"""Metadata for package indexes and citations, and the installed command."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

import fedjax_mm
from fedjax_mm import cli

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_description_has_only_absolute_links():
    readme = (ROOT / "README.md").read_text()
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]
    text = description(readme)
    for target in re.findall(r"\]\(([^)]*)\)|src=\"([^\"]*)\"", text):
        assert "".join(target).startswith("https://"), target
    assert "[Results](docs/results.md)" in readme
    assert "Results (`docs/results.md`)" in text
    kept = "[jax](https://docs.jax.dev) and `x`"
    assert description(kept) == kept


def test_addresses_come_from_the_environment(monkeypatch):
    addresses = runpy.run_path(str(ROOT / "setup.py"))["addresses"]
    for name in ("REPO_URL", "SITE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert addresses() == {}
    monkeypatch.setenv("REPO_URL", "https://a.example/r")
    monkeypatch.setenv("SITE_URL", "https://s.example")
    assert addresses() == {
        "Documentation": "https://s.example",
        "Source": "https://a.example/r",
        "Issues": "https://a.example/r/issues",
        "Changelog": "https://a.example/r/blob/main/CHANGELOG.md",
    }
    assert {"readme", "urls"} == set(PROJECT["dynamic"])


def test_files_linked_from_the_readme_are_in_the_source_archive():
    manifest = (ROOT / "MANIFEST.in").read_text().split()
    paths = re.findall(r"\]\((?!https:)([^)#]*)|src=\"([^\"]*)\"", (ROOT / "README.md").read_text())
    for path in map("".join, paths):
        assert (ROOT / path).exists(), path
        assert path.split("/")[0] in manifest, path
    for folder in (
        ".ci",
        ".github",
        "benchmarks",
        "docs",
        "examples",
        "notebooks",
        "tests",
        "tests_full",
    ):  # read by tests
        assert f"graft {folder}" in (ROOT / "MANIFEST.in").read_text(), folder


def test_every_imported_library_is_a_dependency():
    optional = [each for extra in PROJECT["optional-dependencies"].values() for each in extra]
    allowed = {distribution(each) for each in PROJECT["dependencies"] + optional}
    needed = {distribution(each) for each in PROJECT["dependencies"]}
    homes = packages_distributions()
    for path in (ROOT / "fedjax_mm").rglob("*.py"):
        for at, name in imported(path):
            if name in sys.stdlib_module_names or name == "fedjax_mm":
                continue
            assert {*map(distribution, homes.get(name, [name]))} & (
                needed if at == 0 else allowed
            ), (
                path,
                name,
            )


def test_ci_runs_the_checks_with_every_python_and_with_the_oldest_jax():
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["checks"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    matrix = job["strategy"]["matrix"]
    classifiers = [f"Programming Language :: Python :: {each}" for each in matrix["python"]]
    assert [each for each in PROJECT["classifiers"] if ":: 3." in each] == classifiers
    assert PROJECT["requires-python"] == f">={matrix['python'][0]}"
    assert {*matrix["jax"], *(each["jax"] for each in matrix["include"])} == {"newest", "oldest"}
    oldest = re.findall(r"^(\w+)==([\d.]+)$", (ROOT / ".github/oldest-jax.txt").read_text(), re.M)
    bounds = dict(
        re.match(r"([\w.-]+)>=([\d.]+)", each).groups() for each in PROJECT["dependencies"]
    )
    assert {name: f"{bounds[name]}.0" for name in ("jax", "jaxlib")} == dict(oldest)


def test_issue_forms_and_hooks_are_valid():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"):
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= set(form), path
        ids = [each["id"] for each in form["body"]]
        assert len(ids) == len(set(ids)) > 0
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in local["hooks"]:
        assert hook["entry"] in (ROOT / ".ci/run").read_text().replace(" --check", "")


def distribution(requirement):
    """The normalized name of a requirement's distribution."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def imported(path):
    """Yields the column and the library of each import in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.col_offset, each.name.split(".")[0]) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.col_offset, (node.module or "").split(".")[0]


def test_the_citation_matches_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # required by the format
    for key in ("version", "license", "keywords"):
        assert citation[key] == PROJECT[key], key
    assert citation["abstract"].rstrip(".") == PROJECT["description"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    for paper in citation["references"][:2]:
        assert f"*{paper['title']}* ({paper['year']})" in readme


def test_the_version_is_consistent(capsys):
    assert fedjax_mm.__version__ == PROJECT["version"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"fedjax-mm {PROJECT['version']}\n"


def test_the_command_also_runs_as_a_module():
    command = [sys.executable, "-X", "importtime", "-m", "fedjax_mm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"fedjax-mm {PROJECT['version']}\n"
    assert not re.search(r"\| +(jax|numpy)$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(monkeypatch, capsys, shell):
    # Otherwise typer detects the shell that started the tests.
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, shell))
    with pytest.raises(SystemExit) as ended:
        cli.main(["--show-completion"])
    assert not ended.value.code
    script = capsys.readouterr().out
    assert "fedjax-mm" in script
    assert f"_FEDJAX_MM_COMPLETE=complete_{shell}" in script


def test_a_completion_lists_the_commands(monkeypatch, capsys):
    words = {
        "_FEDJAX_MM_COMPLETE": "complete_bash",
        "COMP_WORDS": "fedjax-mm re",
        "COMP_CWORD": "1",
    }
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert not ended.value.code
    assert capsys.readouterr().out.split() == ["reproduce", "report"]
