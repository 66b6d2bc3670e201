"""The notebooks run from top to bottom without a warning, and are kept small and clean."""

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

from fedjax_mm import Experiment, run
from tests.compiling import USUAL

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
SMALLER = {  # what stands in a notebook, and what a small instance of it has there
    "01_first_experiment": {
        "[0, 250, 500, 750, 1000]": "[0, 15, 30, 45, 60]",
        "1000": "60",
        "key(1), 20)": "key(1), 3)",
        "num_seeds=20": "num_seeds=3",
        "num_seeds = 20": "num_seeds = 3",
        "num_models = [2, 12]": "num_models = [12]",
        # Of the command line's methods one.
        '[algorithms.MFA-Rand]\nassignment.name = "mfa_rand"\nlearning_rate = 0.1\n'
        "local_steps = 5\n": "",
        "[0.02, 0.035, 0.06, 0.1, 0.18, 0.3, 0.5, 0.7]": "[0.1, 3.0]",
    },
    "02_multi_model_appeal": {
        '"digit modulo 5", "5 or more"]': '"digit modulo 5"]',
        "subplots(1, 3,": "subplots(1, 2,",
        "    3, 3, figsize": "    3, 2, figsize",
        "NUM_SEEDS = 20, 6": "NUM_SEEDS = 20, 2",
        "local_steps=20": "local_steps=2",
        '"num_steps": 20': '"num_steps": 2',
        "missing_over_rounds(60,": "missing_over_rounds(12,",
        "[[8, 17, 59]]": "[[8, 10, 11]]",
        "num_rounds=60": "num_rounds=12",
        "round=60": "round=12",
        "round=[9, 60]": "round=[9, 12]",
        # As committed it compares both assignments; each is two programs.
        'DASHES = {"MFA-Rand": "--", "MFA-RR": "-"}': 'DASHES = {"MFA-RR": "-"}',
        '"assignment": list(ASSIGNMENTS)': '"assignment": ["MFA-RR"]',
        '- overall.sel(assignment="MFA-Rand")': '- overall.sel(assignment="MFA-RR")',
    },
    "03_client_batching": {
        "SIZES = 24, [2, 4, 6, 8, 12, 24]": "SIZES = 24, [12, 24]",
        "num_rounds=60": "num_rounds=6",
        "num_seeds=10": "num_seeds=2",
        "num_seeds=20": "num_seeds=2",
        '"num_seeds": 20': '"num_seeds": 2',
    },
    "04_theory_beside_curves": {
        # Two programs, one for each method, instead of twelve.
        "[1, 4, 12], [1, 5], 1200": "[4], [1], 48",
        "MODELS[1:]": "MODELS",
        "num_seeds=20": "num_seeds=3",
    },
    "05_your_data_and_network": {
        "= 30, 60, 8": "= 30, 4, 4",
    },
    "06_large": {
        "[1_000, 10_000, 100_000, 1_000_000]": "[1_000, 10_000]",
        "[100, 1_000, 10_000]": "[100]",
        "cohort_size=1_000": "cohort_size=100",
        '([], ["--set", "record_every=1000"])': "([],)",
        "for runs in (1, 4)": "for runs in (2,)",
        '["replicas", 4]': '["replicas", 2]',
        '["clients", 4]': '["clients", 2]',
        "100_000": "10_000",
        "num_rounds=20": "num_rounds=2",
        "record_every=20": "record_every=2",
    },
    "07_who_trains_what": {
        "= 30, 6, 60, 10": "= 6, 3, 6, 2",
        # Of the methods, each of which is a program, three.
        '    "bandit: weighted sum": bandit(**sizes, policy="weighted-sum"),\n': "",
        '    "bandit: Pareto": bandit(**sizes, policy="pareto"),\n': "",
        '"#2b5c8a", "#4c9a6a", ': "",
        "[1.0, 2.0, 3.0, 5.0, 9.0]": "[1.0, 3.0]",
    },
}


def execute(path, directory, replacements, environment):
    """The notebook with new outputs; a copy of it runs in the directory, on the CPU."""
    notebook = nbformat.read(path, as_version=4)
    for old, new in replacements.items():
        assert any(old in cell.source for cell in notebook.cells), old
        for cell in notebook.cells:
            cell.source = cell.source.replace(old, new)
    copy = directory / path.name
    nbformat.write(notebook, copy)
    startup = directory / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "quick.py").write_text("import gc; gc.set_threshold(100_000, 20, 20); del gc")
    done = subprocess.run(
        [sys.executable, "-c", "from nbclient.cli import main; main()", "--inplace", copy],
        env=os.environ
        | environment
        | {"JAX_PLATFORMS": "cpu"}
        | {"IPYTHONDIR": str(directory / "ipython")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return nbformat.read(copy, as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def complaints(notebook):
    """What went to stderr, where warnings go; errors end the execution."""
    return [output.text for output in outputs(notebook) if output.get("name") == "stderr"]


def test_there_is_a_notebook():
    assert NOTEBOOKS


@each_notebook
@pytest.mark.parametrize("size", ["small", pytest.param("as committed", marks=pytest.mark.slow)])
def test_notebook_runs_and_its_sweep_is_that_of_the_command_line(path, size, tmp_path):
    """As committed it computes longer than it compiles, and is optimised as a user's is."""
    small = size == "small"
    notebook = execute(path, tmp_path, SMALLER[path.stem] if small else {}, {} if small else USUAL)
    assert complaints(notebook) == []
    for cell in notebook.cells:
        for text in re.findall(r"```toml\n(.*?)```", cell.source, re.DOTALL):
            expected = run(Experiment.model_validate(tomllib.loads(text)))
            name = re.search(r"`(\w+)\.toml`", cell.source)[1]
            with xr.open_dataset(tmp_path / "results" / f"{name}.nc") as saved:
                saved = saved.sel({dim: expected[dim].values for dim in expected.dims})
                has_diverged = (saved.diverged >= 0).values
                np.testing.assert_array_equal(has_diverged, expected.diverged >= 0)
                good = ~has_diverged[..., None, :] & np.isfinite(expected.excess_loss.values)
                actual = saved.excess_loss.values[good]
                np.testing.assert_allclose(actual, expected.excess_loss.values[good], rtol=1e-3)


@each_notebook
def test_committed_notebook_is_executed_small_and_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert complaints(notebook) == []
    assert all(output.output_type != "error" for output in outputs(notebook))
    assert all(not cell.metadata for cell in notebook.cells)
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert path.stat().st_size < 400_000
    shown = " ".join(str(output) for output in outputs(notebook) if "png" not in str(output))
    assert not re.search(r"(?<![\w.])/(home|tmp|root|usr|work|Users|opt|var)/", shown)


def test_a_warning_is_noticed(tmp_path):
    path = tmp_path / "made" / "warns.ipynb"
    path.parent.mkdir()
    cell = nbformat.v4.new_code_cell("import warnings; warnings.warn('careful', stacklevel=1)")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    assert "careful" in complaints(execute(path, tmp_path, {}, {}))[0]
