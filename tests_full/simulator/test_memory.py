"""The memory that a plan estimates, against the peak of a separate process."""

import os
import re
import subprocess
import sys

import pytest

from tests.compiling import USUAL

SETTINGS = """
num_models = {0}
num_rounds = {1}
num_seeds = {2}

[task]
name = "quadratic"
num_clients = {3}

[algorithms.A]
name = "{5}"
assignment = {{ name = "mfa_rr" }}
learning_rate = 0.1
local_steps = 1

[axes]
learning_rate = {{ start = 0.05, stop = 0.1, num = {4} }}
"""
SHAPES = [  # models, rounds, seeds, clients, rates, method
    pytest.param((4, 300, 1200, 4, 2, "fedavg"), id="many records"),
    pytest.param((12, 1000, 200, 24, 4, "fedavg"), marks=pytest.mark.slow, id="four times as many"),
    pytest.param((10, 3, 1, 200_000, 2, "fedavg"), marks=pytest.mark.slow, id="many clients"),
    pytest.param((10, 3, 1, 1_000_000, 2, "fedavg"), marks=pytest.mark.slow, id="a million"),
    pytest.param((200, 10, 10, 1000, 2, "fedavg"), marks=pytest.mark.slow, id="many models"),
    pytest.param((200, 100, 100, 1000, 2, "fedavg"), marks=pytest.mark.slow, id="as many for long"),
    pytest.param((4, 2, 2, 3000, 2, "mifa"), marks=pytest.mark.slow, id="MIFA's updates"),
    pytest.param((4, 2, 2, 3000, 2, "stalevr"), marks=pytest.mark.slow, id="StaleVRE's updates"),
]
PEAK = r"""
import pathlib, re
status = pathlib.Path("/proc/self/status").read_text()
print("peak", int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 2**20)
"""
MEASURE = f"""
import sys
from fedjax_mm.cli import main
try:
    main(sys.argv[1:])
finally:
    exec({PEAK!r})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_estimate_is_near_the_measured_peak(tmp_path, shape):
    """The result, a batch, the process itself or client states dominate in different cases."""
    (tmp_path / "sweep.toml").write_text(SETTINGS.format(*shape))
    command = [sys.executable, "-c", MEASURE, "--no-cache", "--devices", "2"]
    done = subprocess.run(
        [*command, "sweep", "sweep.toml", "--out", "out"],
        cwd=tmp_path,
        env=os.environ | USUAL,
        capture_output=True,
        text=True,
        check=True,
    )
    estimate = float(re.search(r"memory: ([\d.]+) GiB estimated", done.stderr)[1])
    peak = float(re.search(r"peak ([\d.]+)", done.stdout)[1])
    assert peak / 1.5 <= estimate <= peak * 1.5


ROUNDS = r"""
import sys
import jax, jax.numpy as jnp, numpy as np
from fedjax_mm import fedavg, mfa_rand, simulate
from fedjax_mm.data.clients import flat_client_data
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import LogisticRegression
def measure(num_clients, cohort):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(num_clients * 40, 60)).astype(np.float32)
    labels = rng.integers(0, 5, num_clients * 40).astype(np.int32)
    train = flat_client_data((features, labels), [40] * num_clients)
    del features, labels
    data = FederatedData("many", "synthetic", 5, train, train)
    def run(key, data):
        task = classification(data, LogisticRegression(5))
        algorithm = fedavg(0.1, epochs=1, batch_size=10)
        return simulate(key, task, algorithm, mfa_rand(num_clients, 1, cohort_size=cohort), 2,
                        client_map=32)[1]
    trace = jax.jit(run)(jax.random.key(0), data)
    assert np.isfinite(trace.metrics["loss"]).all()
    assert trace.gradients.tolist()[-1] == [4 * cohort]
    print("data", sum(x.nbytes for x in train.examples) / 2**30)
    exec(PEAK)
for each in sys.argv[1:]:
    measure(*map(int, each.split(",")))
"""
MANY_CLIENTS = [  # per process: clients, cohort size, GiB above the data
    pytest.param([(2_000, 1_000, 1.0), (10_000, 1_000, 1.5)], marks=pytest.mark.slow, id="W2b"),
    pytest.param([(100_000, 100_000, 4.0)], marks=pytest.mark.slow, id="100000"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
@pytest.mark.parametrize("sizes", MANY_CLIENTS)
def test_the_peak_of_many_clients_is_their_data_and_a_chunk(sizes):
    """Clients have 40 examples of 60 features. The limit above the data includes the process.

    The peak of a process never falls, so larger sizes come later.
    """
    arguments = [f"{num_clients},{cohort}" for num_clients, cohort, _ in sizes]
    done = subprocess.run(
        [sys.executable, "-c", f"PEAK = {PEAK!r}" + ROUNDS, *arguments],
        env=os.environ | USUAL,
        capture_output=True,
        text=True,
        check=True,
    )
    data = re.findall(r"data ([\d.]+)", done.stdout)
    peaks = re.findall(r"peak ([\d.]+)", done.stdout)
    for size, peak, (*_, limit) in zip(data, peaks, sizes, strict=True):
        assert float(peak) - float(size) < limit
