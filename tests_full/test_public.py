"""The public surface, the import graph, and imports without side effects."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedjax_mm
from fedjax_mm.sweeps import Grid
from tests.test_public import STUBS, homes


def shadowed(package):
    """Public names of a package that are also names of its modules."""
    files = Path(package.__file__).parent.glob("*.py")
    return sorted(
        {path.stem for path in files} & {name for name, home in homes(package).items() if home}
    )


BOTH = {package.__name__: shadowed(package) for package in STUBS}


def child(code):
    """Runs code in a fresh interpreter and returns its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


COMPUTING = ("jax", "numpy", "optax", "flax", "orbax", "jaxtyping", "sklearn")


FILES = ("xarray", "pandas", "netCDF4", "matplotlib", "PIL")


TERMINAL = ("typer", "rich", "pydantic")


def all_orders():
    """Programs that import packages, their submodules and their functions in different orders."""
    assert BOTH == {
        "fedjax_mm": [],
        "fedjax_mm.asynchrony": [],
        "fedjax_mm.availability": [],
        "fedjax_mm.claims": [],
        "fedjax_mm.data": ["digits", "federate", "synthetic"],
        "fedjax_mm.privacy": [],
        "fedjax_mm.robust": [],
        "fedjax_mm.sweeps": [],
        "fedjax_mm.tasks": [
            "classification",
            "least_squares",
            "mean_estimation",
            "quadratic",
            "supervised",
            "with_clients",
            "with_metrics",
        ],
        "fedjax_mm.theory": [],
    }
    orders = [
        template.format(package=package, name=name)
        for package, names in BOTH.items()
        for name in names[:1]
        for template in (
            "import {package}.{name}",
            "import {package}; {package}.{name}; import {package}.{name}",
            "import {package}.{name} as module; assert callable(module)",
            "from {package} import {name}; assert callable({name})",
            "from {package}.{name} import {name}",
            "import importlib; importlib.import_module('{package}.{name}')",
        )
    ]
    return [
        *orders,
        "import fedjax_mm.cli.speed",
        "import fedjax_mm.experiments.run",
        "from fedjax_mm import *",
    ]


ORDERS = f"""
import importlib, sys, types
for order in {all_orders()}:
    for name in [name for name in sys.modules if name.split(".")[0] == "fedjax_mm"]:
        del sys.modules[name]
    exec(order, {{}})
    for package, names in {BOTH}.items():
        home = importlib.import_module(package)
        for name in names * 2:
            function = getattr(home, name)
            assert isinstance(function, types.FunctionType), (order, function)
            module = sys.modules[package + "." + name]
            assert isinstance(module, types.ModuleType), order
            assert getattr(module, name) is function, order
            exec("import " + package + "." + name)
"""


CHECK = """
import jax
from jax._src import xla_bridge
assert not xla_bridge._backends, 'a backend was started'
assert not jax.config.jax_enable_x64
"""


MORE = "import fedjax_mm.cli.speed; from fedjax_mm import papers; list(papers.ITEMS.values())"


@pytest.mark.parametrize(
    ("steps", "then"),
    [
        (
            {
                "import fedjax_mm; from fedjax_mm import data, sweeps, tasks, theory": COMPUTING
                + FILES
                + TERMINAL,
                "from fedjax_mm import fedavg, mfa_rr, simulate, tasks; tasks.quadratic": (
                    *("flax", "orbax", "sklearn"),
                    *(FILES + TERMINAL),
                ),
                "from fedjax_mm import fedavg, mfa_rr, sweep, sweeps, tasks\n"
                "sweeps.Setup; tasks.quadratic": (
                    *("flax", "orbax", "sklearn", "matplotlib", "PIL"),
                    *TERMINAL,
                ),
            },
            # Importing all starts no device, and no function is replaced by its module.
            f"from fedjax_mm import *\n{CHECK}{MORE}\n{CHECK}{ORDERS}{CHECK}",
        ),
        (
            {
                "from fedjax_mm.cli import app; app(['list'], standalone_mode=False)": (
                    COMPUTING + FILES
                )
            },
            "",
        ),
        (
            {
                "from fedjax_mm.cli import app, page": (
                    *("jax", "optax", "flax", "sklearn", "xarray", "netCDF4", "matplotlib"),
                )
            },
            "",
        ),
    ],
    ids=["package", "list", "report"],
)
def test_imports_are_lazy_and_have_no_side_effects(steps, then):
    """Checks the loaded modules after each step. The package itself prints nothing."""
    code = ["import sys", *(f"{step}\nprint('modules', *sys.modules)" for step in steps), then]
    lines = [line.split() for line in child("\n".join(code)).splitlines()]
    imported = [names for first, *names in filter(None, lines) if first == "modules"]
    assert not then or len(imported) == len(lines)
    for modules, unused in zip(imported, steps.values(), strict=True):
        assert {"fedjax_mm", *unused} & set(modules) == {"fedjax_mm"}


@pytest.mark.parametrize(
    ("program", "kind", "answer"),
    [
        (
            "fedjax_mm.krum",
            AttributeError,
            "in fedjax_mm.robust: from fedjax_mm.robust import krum",
        ),
        ("from fedjax_mm import fedadam", ImportError, "fedadam is in fedjax_mm.optimizers: from"),
        ("fedjax_mm.dirichlet", AttributeError, "from fedjax_mm.data.partition import dirichlet"),
        ("fedjax_mm.fedavgg", AttributeError, "no 'fedavgg'; did you mean fedavg?"),
        ("fedjax_mm.robust(1)", TypeError, "write robust.robust(algorithm, rule)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_in_the_wrong_place_are_answered(program, kind, answer):
    with pytest.raises(kind, match=re.escape(answer)):
        exec(program, {"fedjax_mm": fedjax_mm})


WRONG = """
from fedjax_mm import fedavg, mfa_rr, sweep
from fedjax_mm.sweeps import Setup
from fedjax_mm.tasks import quadratic


def build(learning_rate: float) -> Setup:
    return Setup(quadratic(24, 4, mu=0.1), fedavg(learning_rate, local_steps=5), mfa_rr(24, 2))


axes = {"learning_rate": [0.05, 0.1]}
sweep(build, axes, num_rounds=20, num_seeds=2, record_every=10).loss.mean()
sweep(build, axes, num_rounds=20, num_seeds="2")  # wrong
sweep(build, axes, num_rounds=2.5)  # wrong
sweep(build, axes, num_rounds=20, record_evry=2)  # wrong
fedavg(0.1, local_step=5)  # wrong
mfa_rr(24, "2")  # wrong
"""


def test_type_checkers_find_what_is_wrong_in_a_program(tmp_path):
    (tmp_path / "typed_by_a_user.py").write_text(WRONG)
    command = [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "typed_by_a_user.py")]
    root = Path(fedjax_mm.__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    found = re.findall(r"typed_by_a_user.py:(\d+): error", done.stdout)
    wrong = [number for number, line in enumerate(WRONG.splitlines(), 1) if "# wrong" in line]
    assert sorted({*map(int, found)}) == wrong, done.stdout + done.stderr


def test_sweep_names_the_settings_of_a_grid():
    (settings,) = inspect.signature(fedjax_mm.sweep).parameters["settings"].annotation.__args__
    fields = {field.name for field in dataclasses.fields(Grid)}
    assert settings.__optional_keys__ == fields - {"build", "axes", "keep"}
