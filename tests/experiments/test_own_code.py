"""Code of one's own in files, which runs only if it is allowed."""

import hashlib

import numpy as np
import pytest

from fedjax_mm import Experiment, fedprox, local_sgd, mfa_rand, run, sweep
from fedjax_mm.experiments.overrides import load
from fedjax_mm.sweeps import Setup
from fedjax_mm.tasks import quadratic
from tests.test_cli import call, words

CODE = """
from fedjax_mm import fedprox, mfa_rand, part
from fedjax_mm.base import Scalar
from fedjax_mm.tasks import quadratic

open("imported", "w").close()

def task(num_clients: int, curvature=0.1):
    return quadratic(num_clients, 2, mu=curvature)

@part
def method(local, strength: Scalar = 0.1):
    return fedprox(local, mu=strength / 2)

class Chosen:
    @staticmethod
    def pairs(num_clients, num_models):
        return mfa_rand(num_clients, num_models, cohort_size=2)
"""
FILE = """
num_models = 2
num_rounds = 4
num_seeds = 2
task = { name = "NAME:task", num_clients = 6 }
assignment = { name = "NAME:Chosen.pairs" }

[algorithms.Own]
name = "NAME:method"
learning_rate = 0.1
local_steps = 2

[axes]
task.curvature = [0.1, 0.2]
algorithms.Own.strength = [0.0, 0.5]
"""


def write(folder, module):
    """Writes a module, and a file that names its functions."""
    (folder / f"{module}.py").write_text(CODE)
    (folder / "own.toml").write_text(FILE.replace("NAME", module))


def test_code_is_not_imported_unless_it_is_allowed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, "refused_code")
    refusal = "'refused_code:task' is code, which is not run unless you allow it; read it, then"
    for options in ([], ["--dry-run"], ["--part", "1/2"], ["--set", "num_rounds=2"]):
        code, _, err = call("run", "own.toml", *options)
        assert (code, refusal in words(err)) == (2, True)
    for read in (run, lambda path: load(path, Experiment)):
        with pytest.raises(ValueError, match=refusal):
            read(tmp_path / "own.toml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.toml", "refused_code.py"]


def test_a_file_with_own_code_equals_python_and_keeps_the_digest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, "allowed_code")

    def build(curvature, strength):
        method = fedprox(local_sgd(0.1, steps=2), mu=strength / 2)
        return Setup(quadratic(6, 2, mu=curvature), method, mfa_rand(6, 2, cohort_size=2))

    axes = {"curvature": [0.1, 0.2], "strength": [0.0, 0.5]}
    expected = sweep(build, axes, num_rounds=4, num_seeds=2)
    found = run(tmp_path / "own.toml", allow_code=True)
    np.testing.assert_array_equal(found.loss.isel(algorithm=0), expected.loss)
    config = found.attrs["manifest"]["config"]
    tables = (config["task"], config["assignment"], config["algorithms"]["Own"])
    digest = hashlib.sha256(CODE.encode()).hexdigest()
    assert {table["code"] for table in tables} == {digest}
    pinned = [f"{table}.code=another" for table in ("task", "assignment")]
    with pytest.raises(ValueError, match="the code of allowed_code:task has changed"):
        load(tmp_path / "own.toml", Experiment, pinned, allow_code=True)
