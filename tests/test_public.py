"""The public surface, the import graph, and that nothing happens at import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedjax_mm

ROOT = Path(fedjax_mm.__file__).parent

ALLOWED = {
    "base": set(),
    "checks": set(),
    "schedules": {"base", "checks"},
    "draws": set(),
    "contribution": {"base"},
    "assignment": {"base", "draws"},
    "data": {"base", "checks", "draws"},
    "tasks": {"base", "checks", "data"},
    "algorithms": {"base", "checks", "contribution"},
    "metrics": set(),
    "minimize": {"checks"},
    "theory": {"base", "checks", "data", "tasks"},
    "kinds": {"base"},
    "simulate": {"base", "contribution", "kinds"},
    "results": {"simulate"},
    "devices": set(),
    "plan": {"base", "checks", "devices", "kinds", "simulate"},
    "checkpoint": {"devices", "results"},
    "sweep": {"checkpoint", "devices", "plan", "results", "simulate"},
    "task_configs": {"base", "data", "tasks"},
    "algorithm_configs": {
        *("algorithms", "assignment", "base", "schedules", "task_configs", "tasks"),
    },
    "experiment": {"algorithm_configs", "base", "data", "plan", "task_configs"},
    "runs": {"experiment", "plan", "sweep"},
    "bench": {
        *("algorithms", "assignment", "base", "data", "devices", "kinds"),
        *("plan", "simulate", "sweep", "tasks"),
    },
    "plots": {"results"},
    "papers": {
        *("algorithm_configs", "algorithms", "assignment", "base", "data", "devices"),
        *("experiment", "metrics", "minimize", "plan", "plots", "results", "runs", "schedules"),
        *("simulate", "sweep", "task_configs", "tasks", "theory"),
    },
    "cli": {
        *("bench", "checkpoint", "devices", "experiment", "papers", "plan", "plots", "results"),
        *("runs", "sweep", "task_configs", "theory"),
    },
}
"""What each module or package may import from the project; packages may import from themselves."""


def imports(path):
    """The project's modules that a file imports, by their first name below the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedjax_mm"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {name[1] for name in names if name[0] == "fedjax_mm" and len(name) > 1}
    return found


def test_the_public_surface_is_complete():
    names = {
        name
        for name, value in vars(fedjax_mm).items()
        if not name.startswith("_") and not isinstance(value, type(fedjax_mm))
    }
    assert set(fedjax_mm.__all__) == names
    assert len(fedjax_mm.__all__) == len(names)


def test_imports_point_one_way():
    modules = {path.stem if path.is_file() else path.name for path in ROOT.glob("[a-z]*")}
    assert modules - {"py"} == set(ALLOWED) | ({"py.typed"} & modules)
    for name, allowed in ALLOWED.items():
        files = (
            [ROOT / f"{name}.py"] if (ROOT / f"{name}.py").exists() else (ROOT / name).glob("*.py")
        )
        for path in files:
            assert imports(path) <= allowed | {name}, path


def test_the_import_graph_has_no_cycle():
    seen = []

    def visit(name, above=()):
        assert name not in above, f"cycle: {(*above, name)}"
        for other in ALLOWED[name]:
            visit(other, (*above, name))
        seen.append(name)

    for name in ALLOWED:
        visit(name)


@pytest.mark.parametrize(("library", "module"), [("matplotlib", "plots"), ("typer", "cli")])
def test_heavy_libraries_have_one_door(library, module):
    users = [
        path.relative_to(ROOT).parts[0].removesuffix(".py")
        for path in ROOT.rglob("*.py")
        if f"import {library}" in path.read_text() or f"from {library}" in path.read_text()
    ]
    assert set(users) <= {module, "papers"}


@pytest.mark.parametrize("module", ["fedjax_mm", "fedjax_mm.cli"])
def test_importing_starts_no_device_and_prints_nothing(module):
    code = (
        f"import {module}, jax\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'a backend was started'\n"
        "assert not jax.config.jax_enable_x64\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_public_object_says_what_it_does():
    for name in fedjax_mm.__all__:
        doc = getattr(fedjax_mm, name).__doc__
        assert doc, name
        assert doc.strip().splitlines()[0].endswith((".", ":")), name


@pytest.mark.parametrize(
    "name",
    [n for n in fedjax_mm.__all__ if n[0].islower() and n not in ("advance", "init")],
)
def test_every_public_function_has_a_runnable_example(name):
    assert ">>>" in getattr(fedjax_mm, name).__doc__
