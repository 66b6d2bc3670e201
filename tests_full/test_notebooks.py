"""Notebooks run from top to bottom without warnings, and are small and clean."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import numpy as np
import pytest
import xarray as xr
from nbclient import NotebookClient

from fedjax_mm import Experiment, run
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.overrides import load
from fedjax_mm.sweeps.program import programs_of
from tests.compiling import USUAL

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
SMALLER = {  # replacements that make a notebook small
    "01_first_experiment": {
        "[0, 250, 500, 750, 1000]": "[0, 15, 30, 45, 60]",
        "1000": "60",
        "key(1), 20)": "key(1), 3)",
        "num_seeds=20": "num_seeds=3",
        "num_seeds = 20": "num_seeds = 3",
        "num_models = [2, 12]": "num_models = [12]",
        # Keep one of the methods on the command line.
        '[algorithms.MFA-Rand]\nassignment.name = "mfa_rand"\nlearning_rate = 0.1\n'
        "local_steps = 5\n": "",
        "[0.02, 0.035, 0.06, 0.1, 0.18, 0.3, 0.5, 0.7]": "[0.1, 3.0]",
    },
    "02_multi_model_appeal": {
        '"digit modulo 5", "5 or more"]': '"digit modulo 5"]',
        "NUM_SEEDS = 20, 6": "NUM_SEEDS = 20, 2",
        ", steps=20": ", steps=2",
        '"num_steps": 20': '"num_steps": 2',
        "missing_over_rounds(60,": "missing_over_rounds(12,",
        "[[8, 17, 59]]": "[[8, 10, 11]]",
        "num_rounds=60": "num_rounds=12",
        "round=60": "round=12",
        "round=[9, 60]": "round=[9, 12]",
        # Each pair of an assignment and an aggregation is a program. Keep one of them.
        '"aggregation": list(AGGREGATIONS)': '"aggregation": ["MaxFL"]',
        'overall.sel(aggregation="FedAvg")': 'overall.sel(aggregation="MaxFL")',
        '"assignment": list(ASSIGNMENTS)': '"assignment": ["MFA-RR"]',
        '- overall.sel(assignment="MFA-Rand")': '- overall.sel(assignment="MFA-RR")',
    },
    "03_client_batching": {
        "SIZES = 24, [2, 4, 6, 8, 12, 24]": "SIZES = 24, [24]",
        "num_rounds=60": "num_rounds=6",
        "num_seeds=10": "num_seeds=2",
        "num_seeds=20": "num_seeds=2",
        '"num_seeds": 20': '"num_seeds": 2, "num_clients": 6, "contacts": 24',
    },
    "04_theory_beside_curves": {
        # One program for each of two methods, instead of twelve.
        "[1, 4, 12], [1, 5], 1200": "[4], [1], 48",
        "MODELS[1:]": "MODELS",
        "num_seeds=20": "num_seeds=3",
    },
    "05_your_data_and_network": {
        "= 30, 60, 8": "= 30, 2, 2",
    },
    "06_large": {
        "[1_000, 10_000, 100_000, 1_000_000]": "[1_000, 10_000]",
        "cohort_size=1_000": "cohort_size=100",
        # Skip a process that takes the time of the whole notebook. The test checks its input file.
        '[sys.executable, "-c", "from fedjax_mm.cli import main; main()", "--devices", "2"]': (
            '["echo"]'
        ),
        'MAPS = [100, 1_000, 10_000], ["vmap", 100, "scan"]': 'MAPS = [100], ["vmap", "scan"]',
        "for runs in (1, 4)": "for runs in (2,)",
        '["replicas", 4]': '["replicas", 2]',
        '["clients", 4]': '["clients", 2]',
        "100_000": "10_000",
        "num_rounds=20": "num_rounds=2",
        "record_every=20": "record_every=2",
    },
    "07_who_trains_what": {
        "= 30, 6, 60, 10": "= 6, 3, 6, 2",
        # Keep two of the methods, because each is a program.
        '    "bandit: weighted sum": bandit(**sizes, policy="weighted-sum"),\n': "",
        '    "bandit: Pareto": bandit(**sizes, policy="pareto"),\n': "",
        '    "FedFairMMFL": fedfair(**sizes, alpha=3.0),\n': "",  # swept below
        "[1.0, 2.0, 3.0, 5.0, 9.0]": "[1.0, 3.0]",
    },
}


KERNEL = """\
import functools, gc
from jax._src.interpreters import mlir
gc.set_threshold(100_000, 20, 20)
mlir.make_ir_context = functools.cache(mlir.make_ir_context)  # as in tests/conftest.py
del functools, gc, mlir
"""
APART = """\
import os
from jax.extend.backend import clear_backends
clear_backends()
os.mkdir({directory!r})
os.chdir({directory!r})
%reset -f
"""


def execute(notebooks, directory, environment):
    """Executes the notebooks in one kernel on the CPU and returns their cells with new outputs.

    Notebooks share only imported modules. Each begins with an empty namespace, in an empty
    directory with its name, and before JAX has started its devices.
    """
    cells = []
    for name, notebook in notebooks.items():
        apart = nbformat.v4.new_code_cell(APART.format(directory=str(directory / name)))
        cells += [apart, *notebook.cells]
    for number, cell in enumerate(cells):
        cell.id = str(number)  # ids may repeat between notebooks
    path = directory / "all.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    startup = directory / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "quick.py").write_text(KERNEL)
    command = [sys.executable, "-c", "from nbclient.cli import main; main()"]
    done = subprocess.run(
        [*command, "--allow-errors", "--inplace", path],
        env=os.environ
        | environment
        | {"JAX_PLATFORMS": "cpu"}
        | {"IPYTHONDIR": str(directory / "ipython")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cells = iter(nbformat.read(path, as_version=4).cells)
    return {
        name: [next(cells) for _ in range(1 + len(notebook.cells))]
        for name, notebook in notebooks.items()
    }


def read(path, replacements):
    """Reads a notebook and applies the replacements."""
    notebook = nbformat.read(path, as_version=4)
    for old, new in replacements.items():
        assert any(old in cell.source for cell in notebook.cells), old
        for cell in notebook.cells:
            cell.source = cell.source.replace(old, new)
    return notebook


def complaints(cells):
    """Errors and stderr output of cells. Warnings go to stderr."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return [
        output.get("text") or output.evalue
        for output in outputs
        if "stderr" in output.values() or output.output_type == "error"
    ]


def check_sweep_equals_the_command_line(cells, directory):
    for cell in cells:
        for text in re.findall(r"```toml\n(.*?)```", cell.source, re.DOTALL):
            expected = run(Experiment.model_validate(tomllib.loads(text)))
            name = re.search(r"`(\w+)\.toml`", cell.source)[1]
            with xr.open_dataset(directory / "results" / f"{name}.nc") as saved:
                saved = saved.sel({dim: expected[dim].values for dim in expected.dims})
                has_diverged = (saved.diverged >= 0).values
                np.testing.assert_array_equal(has_diverged, expected.diverged >= 0)
                good = ~has_diverged[..., None, :] & np.isfinite(expected.excess_loss.values)
                actual = saved.excess_loss.values[good]
                np.testing.assert_allclose(actual, expected.excess_loss.values[good], rtol=1e-3)


def test_there_is_a_notebook():
    assert NOTEBOOKS


def test_small_notebooks_run_without_warnings_and_errors(tmp_path):
    """They share a kernel, which with its imports costs more than most of them."""
    sources = "import warnings; warnings.warn('careful', stacklevel=1)", "raise ValueError('wrong')"
    faulty = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, sources)])
    small = {path.stem: read(path, SMALLER[path.stem]) for path in NOTEBOOKS}
    executed = execute({"faulty": faulty} | small, tmp_path, {})
    warning, error = complaints(executed.pop("faulty"))
    assert "UserWarning: careful" in warning
    assert error == "wrong"
    for name, cells in executed.items():
        assert complaints(cells) == [], name
        check_sweep_equals_the_command_line(cells, tmp_path / name)
        for experiment in (tmp_path / name).glob("*.toml"):
            assert programs_of(grid_of(load(experiment, Experiment)))


FIGURE = """\
import numpy as np
from fedjax_mm import plots
x = np.arange(3.0)
figure = plots.draw([[plots.Panel("", "x", "y", [plots.Line("", x, x)])]], title="", caption="")
figure"""


def test_a_figure_is_shown_once_in_a_fresh_notebook_and_with_an_inline_backend():
    cells = [nbformat.v4.new_code_cell(text) for text in (FIGURE, "%matplotlib inline\nfigure")]
    NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=120).execute()
    for cell in cells:
        assert [sorted(output["data"]) for output in cell.outputs] == [["image/png", "text/plain"]]


@pytest.mark.slow
@each_notebook
def test_notebook_runs_as_committed(path, tmp_path):
    """Compiles with optimisations, because the notebook computes longer than it compiles."""
    cells = execute({path.stem: read(path, {})}, tmp_path, USUAL)[path.stem]
    assert complaints(cells) == []
    check_sweep_equals_the_command_line(cells, tmp_path / path.stem)


@each_notebook
def test_committed_notebook_is_executed_small_and_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert complaints(code) == []
    # Pictures are those of `plots`, which are last values.
    pictures = [output for cell in code for output in cell.outputs if "image/png" in str(output)]
    assert {output.output_type for output in pictures} == {"execute_result"}
    assert not any("pyplot" in cell.source or ".plot(" in cell.source for cell in code)
    assert all(not cell.metadata for cell in notebook.cells)
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert path.stat().st_size < 400_000
    shown = [str(output) for cell in code for output in cell.outputs if "png" not in str(output)]
    assert not re.search(r"(?<![\w.])/(home|tmp|root|usr|work|Users|opt|var)/", " ".join(shown))
