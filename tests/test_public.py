"""The public surface, the import graph, and imports without side effects."""

import ast
import importlib
import inspect
import pickle
import re
import rlcompleter
import sys
import tomllib
import types
from collections import Counter
from pathlib import Path

import pytest

import fedjax_mm
from docs import hooks
from fedjax_mm import data

ROOT = Path(fedjax_mm.__file__).parent


LAYERS = [
    {"tools"},
    {"base"},
    {"checks"},
    {"data", "metrics", "schedules", "wrap"},
    {
        "assignments",
        "asynchrony",
        "availability",
        "compression",
        "local",
        "optimizers",
        "topologies",
    },
    {"privacy", "robust", "tasks"},
    {"algorithms", "simulator"},
    {"results"},
    {"claims"},
    {"plots", "sweeps"},
    {"theory"},
    {"experiments"},
    {"papers"},
    {"cli"},
    {"__main__"},
]


"""Layers of modules and folders. Each imports from its own layer and from earlier ones."""


def imports(path):
    """First names, below the package, of the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedjax_mm"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {name[1] for name in names if name[0] == "fedjax_mm" and len(name) > 1}
    return found


NAMESPACES = [
    *(
        "asynchrony",
        "availability",
        "base",
        "claims",
        "compression",
        "data",
        "metrics",
        "optimizers",
    ),
    *("plots", "privacy", "robust", "schedules", "sweeps", "tasks", "theory"),
    "topologies",
]


MODULES = [fedjax_mm, *(getattr(fedjax_mm, name) for name in NAMESPACES), data.partition]


STUBS = [module for module in MODULES if Path(module.__file__).with_suffix(".pyi").exists()]


def homes(package):
    """Maps the public names of a package to the modules in its stub, or to None."""
    tree = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    return {
        alias.name: node.module and f"{package.__name__}.{node.module}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def public():
    """Every public name with its namespace and value, except modules."""
    return [
        (module, name, value)
        for module in MODULES
        for name in module.__all__
        if not isinstance(value := getattr(module, name), types.ModuleType)
    ]


def documented():
    """Public classes and functions, without aliases of types."""
    return [each for each in public() if getattr(each[2], "__module__", "").startswith("fedjax_mm")]


"""Public names that are also modules, by package."""


def test_the_public_surface_is_complete():
    """Python and type checkers see the same names in the same modules."""
    assert {module.__name__ for module in STUBS} == {
        ".".join(path.parent.relative_to(ROOT.parent).parts) for path in ROOT.rglob("*.pyi")
    }
    for package in STUBS:
        (stub,) = (
            ast.literal_eval(node.value)
            for node in ast.parse(Path(package.__file__).with_suffix(".pyi").read_text()).body
            if isinstance(node, ast.Assign)
        )
        assert package.__all__ == sorted(set(stub)) == sorted(stub) == sorted(homes(package))
        for name, home in homes(package).items():
            value = getattr(package, name)
            if home is None:
                assert value is sys.modules[f"{package.__name__}.{name}"]
            else:
                assert value is getattr(importlib.import_module(home), name)
                assert value.__module__ == home


def test_the_papers_use_public_names_only():
    """Modules that the reference shows whole are public, too."""
    whole = {name for area in hooks.REFERENCE.values() for name in area.whole}
    known = {id(value) for _, _, value in public()}
    private = [
        f"{path.name}: {node.module}.{alias.name}"
        for path in (ROOT / "papers").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedjax_mm")
        if not node.module.startswith("fedjax_mm.papers") and node.module not in whole
        for alias in node.names
        if not isinstance(
            value := getattr(importlib.import_module(node.module), alias.name), types.ModuleType
        )
        if id(value) not in known
    ]
    assert private == []


def test_each_top_level_name_has_one_home():
    modules = [name for name, home in homes(fedjax_mm).items() if home is None]
    assert sorted(modules) == NAMESPACES
    for module in MODULES:
        assert module.__all__ == sorted(set(module.__all__)), module
    names = Counter(name for _, name, _ in public())
    assert [name for name, places in names.items() if places > 1] == []


def test_public_names_can_be_listed_completed_imported_and_pickled():
    assert set(fedjax_mm.__all__) <= set(dir(fedjax_mm))
    completer = rlcompleter.Completer({"fedjax_mm": fedjax_mm})
    assert any("fedjax_mm.sweep" in match for match in completer.attr_matches("fedjax_mm.swee"))
    for module in MODULES:
        names = {}
        exec(f"from {module.__name__} import *", names)
        assert set(names) - {"__builtins__"} == set(module.__all__)
    for _, _, value in documented():
        assert pickle.loads(pickle.dumps(value)) is value
    with pytest.raises(AttributeError, match="sweeep"):
        _ = fedjax_mm.sweeep


"""Importing a submodule must not replace the function of the same name in the package."""


def test_every_file_of_the_package_is_shipped():
    """The stubs matter most, because lazy imports read them."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    shipped = project["tool"]["setuptools"]["package-data"]["fedjax_mm"]
    others = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    found = [path for pattern in shipped for path in ROOT.glob(pattern)]
    assert others == {str(path.relative_to(ROOT)) for path in found}


def import_graph():
    """Maps each module or folder to the other ones that it imports."""
    graph = {}
    for path in ROOT.rglob("*.py"):
        home = path.relative_to(ROOT).parts[0].removesuffix(".py")
        graph.setdefault(home, set()).update(imports(path) - {home})
    del graph["__init__"]
    return graph


def test_imports_respect_the_layers():
    place = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    graph = import_graph()
    assert set(graph) == set(place)
    for name, others in graph.items():
        assert all(place[other] <= place[name] for other in others), (name, others)


def test_the_import_graph_has_no_cycle():
    graph = import_graph()

    def visit(name, above=()):
        assert name not in above, f"cycle: {(*above, name)}"
        for other in graph[name]:
            visit(other, (*above, name))

    for name in graph:
        visit(name)


def test_heavy_libraries_are_imported_in_one_place():
    for library, module in [
        ("matplotlib", "plots"),
        ("typer", "cli"),
        ("mlflow", "results"),
        ("tensorboardX", "results"),
    ]:
        users = [
            path.relative_to(ROOT).parts[0].removesuffix(".py")
            for path in ROOT.rglob("*.py")
            if f"import {library}" in path.read_text() or f"from {library}" in path.read_text()
        ]
        assert set(users) <= {module, "papers"}


def test_the_page_of_the_literature_names_public_functions_and_their_arguments():
    known = {name: value for _, name, value in public()}
    spans = re.findall(r"`([^`]+)`", " ".join(hooks.literature().values()))
    trees = [ast.parse(span) for span in spans]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
    assert named - set(known) <= {"sgd", "muon"}, "of optax"
    for call in calls:
        factory = known.get(ast.unparse(call.func).rpartition(".")[2])
        if factory is not None:
            arguments = {keyword.arg for keyword in call.keywords}
            assert arguments <= set(inspect.signature(factory).parameters), ast.unparse(call)


def test_each_table_of_the_literature_imports_what_it_names():
    known = {name for _, name, _ in public()}
    _, *sections = re.split(r"^## ", (hooks.DOCS / "literature.md").read_text(), flags=re.MULTILINE)
    for section in sections:
        (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        imported = {
            alias.name for node in ast.parse(code).body for alias in getattr(node, "names", ())
        }
        rows = re.findall(r"^\| .+? \| (.+) \|$", section, re.MULTILINE)
        spans = re.findall(r"`([^`]+)`", " ".join(rows))
        named = {
            node.id
            for span in spans
            for node in ast.walk(ast.parse(span))
            if isinstance(node, ast.Name)
        }
        assert named & known <= imported, section.splitlines()[0]


def test_every_public_object_has_a_docstring():
    for module, name, value in documented():
        assert value.__doc__, (module, name)
        assert value.__doc__.strip().splitlines()[0].endswith((".", ":")), (module, name)


def test_every_public_function_has_a_runnable_example():
    without = [
        f"{module.__name__}.{name}"
        for module, name, value in public()
        if isinstance(value, types.FunctionType) and ">>>" not in value.__doc__
    ]
    assert without == ["fedjax_mm.advance", "fedjax_mm.init"]  # shown in `simulate`
