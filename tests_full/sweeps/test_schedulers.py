"""Sweeps on Ray, MPI and Parsl, as in `docs/how-to/clusters.md`, equal those of one process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedjax_mm.tools.compiler import SAFE

STUDY = """
import numpy as np

from fedjax_mm import fedavg, mfa_rr, sweep
from fedjax_mm.sweeps import Execution, Grid, Setup
from fedjax_mm.tasks import quadratic


def build(num_models, learning_rate):
    algorithm = fedavg(learning_rate, local_steps=2)
    return Setup(quadratic(6, 2, mu=0.1), algorithm, mfa_rr(6, num_models))


grid = Grid(build, {"num_models": [2, 3], "learning_rate": [0.1, 0.2]}, num_rounds=3, num_seeds=2)


def check(executor):
    found = sweep(grid, Execution(executor=executor, num_parts=3))
    assert found.attrs["manifest"]["parts"] == 3
    assert found.drop_attrs(deep=False).identical(sweep(grid).drop_attrs(deep=False))
    print("equal bit for bit")


"""

RAY = """
import ray


class Ray:
    put = staticmethod(functools.cache(ray.put))  # the sweep is sent once

    def submit(self, fn, sent, *args):
        return ray.remote(fn).remote(self.put(sent), *args).future()


ray.init(num_cpus=2, include_dashboard=False)
check(Ray())
"""

MPI = """
from mpi4py.futures import MPIPoolExecutor

if __name__ == "__main__":
    with MPIPoolExecutor() as executor:
        check(executor)
"""

PARSL = """
from parsl import Config, HighThroughputExecutor
from parsl.concurrent import ParslPoolExecutor

if __name__ == "__main__":
    here = HighThroughputExecutor(max_workers_per_node=2, address="127.0.0.1")
    with ParslPoolExecutor(Config(executors=[here], run_dir="parsl")) as executor:
        check(executor)
"""


def finish(directory, script, *before):
    path = directory / "study.py"
    path.write_text("import functools\n" + STUDY + script)
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XLA_FLAGS": SAFE,
        "JAX_PLATFORMS": "cpu",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    done = subprocess.run(
        [*before, sys.executable, *(["-m", "mpi4py.futures"] if before else []), str(path)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "equal bit for bit" in done.stdout, done.stdout + done.stderr


def test_ray(tmp_path):
    pytest.importorskip("ray")
    finish(tmp_path, RAY)


def test_mpi(tmp_path):
    pytest.importorskip("mpi4py")
    mpiexec = Path(sys.executable).with_name("mpiexec")
    found = str(mpiexec) if mpiexec.exists() else shutil.which("mpiexec")
    if not found:
        pytest.skip("mpiexec is not installed")
    finish(tmp_path, MPI, found, "-n", "3")


def test_parsl(tmp_path):
    pytest.importorskip("parsl")
    finish(tmp_path, PARSL)
