"""The memory that a plan estimates, against the peak of a process of its own."""

import re
import subprocess
import sys

import pytest

SETTINGS = """
num_models = {0}
num_rounds = {1}
num_seeds = {2}

[task]
name = "quadratic"
num_clients = {3}

[algorithms.MFA-RR]
assignment = {{ name = "mfa_rr" }}
learning_rate = 0.1
local_steps = 5

[axes]
learning_rate = {{ start = 0.05, stop = 0.1, num = {4} }}
"""
SHAPES = {  # models, rounds, seeds, clients, rates
    "many records": (12, 1000, 200, 24, 4),
    "many clients": (10, 3, 1, 1_000_000, 2),
    "many models": (200, 100, 100, 1000, 2),
}
MEASURE = r"""
import pathlib, re, sys
from fedjax_mm.cli import main
try:
    main(sys.argv[1:])
finally:
    status = pathlib.Path("/proc/self/status").read_text()
    print("peak", int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_estimate_is_near_the_measured_peak(tmp_path, shape):
    """What dominates differs: the result; one batch; the process itself."""
    (tmp_path / "sweep.toml").write_text(SETTINGS.format(*SHAPES[shape]))
    command = [sys.executable, "-c", MEASURE, "--no-cache", "--devices", "2"]
    done = subprocess.run(
        [*command, "sweep", "sweep.toml", "--out", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    estimate = float(re.search(r"memory: ([\d.]+) GiB estimated", done.stderr)[1])
    peak = float(re.search(r"peak ([\d.]+)", done.stdout)[1])
    assert peak / 1.5 <= estimate <= peak * 1.5
