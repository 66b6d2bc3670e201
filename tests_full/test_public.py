"""The public surface, the import graph, and imports without side effects."""

import subprocess
import sys
from pathlib import Path

import pytest

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
