"""W1, W1b, W1c: client updates per second, with compile and run times, against other systems.

Run `pip install '.[bench]' && pytest benchmarks`; every row is one program on one device.
"""

import jax
import numpy as np
import pytest

from benchmarks import handwritten, peers
from fedjax_mm.cli import speed as bench
from fedjax_mm.cli import workloads

PEERS = {
    # Rounds so that a run takes about a second; 2 of 24 clients train one of 12 models in each.
    "FedJAX": (peers.fedjax_rounds, 2_000),
    "DrJAX": (peers.drjax_rounds, 100_000),
    "NumPy float64": (peers.numpy_rounds, 20_000),
}


# DrJAX touches a deprecated name of jax; warnings are errors elsewhere.
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


@pytest.mark.parametrize("build", [peers.fedjax_rounds, peers.drjax_rounds])
def test_peers_do_the_same_work(build):
    np.testing.assert_allclose(build(50)(), peers.numpy_rounds(50)(), atol=1e-6)


def test_by_hand_does_the_same_work():
    cohort = peers.sample_cohorts(50, 24, 12, seed=0)
    # The models are alike: each has the clients that the peers' one model has.
    run = handwritten.quadratic_rounds(50, cohorts=np.tile(cohort[:, None], (1, 12, 1)))
    np.testing.assert_allclose(run()[0, 3], peers.numpy_rounds(50)(), atol=1e-6)


@pytest.mark.parametrize("name", ["W1", "W1b"])
def test_by_hand(benchmark, name):
    sizes = workloads.WORKLOADS[name]._asdict()
    how = {key: sizes[key] for key in ("num_clients", "num_models", "num_seeds")}
    run = handwritten.quadratic_rounds(sizes["num_rounds"], **how)
    benchmark.extra_info.update(
        row=(name, "JAX by hand", "MFA-Rand, all models"),
        client_updates=workloads.WORKLOADS[name].client_updates,
    )
    benchmark.pedantic(run, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("system", PEERS)
def test_peer(benchmark, system):
    build, num_rounds = PEERS[system]
    run = build(num_rounds)
    benchmark.extra_info.update(
        row=("W1", system, "one model of 12"), client_updates=2 * num_rounds
    )
    benchmark.pedantic(run, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("client_map", ["vmap", 1, 10], ids=["vmap", "scan", "chunk 10"])
@pytest.mark.parametrize("label", workloads.ASSIGNMENTS)
@pytest.mark.parametrize("workload", ["W1", "W1b"])
def test_small(benchmark, workload, label, client_map):
    _ours(benchmark, workloads.WORKLOADS[workload], label, client_map)


@pytest.mark.parametrize("client_map", ["vmap", 10_000], ids=["vmap", "chunk 10,000"])
@pytest.mark.parametrize("label", workloads.ASSIGNMENTS)
def test_a_million_clients(benchmark, label, client_map):
    _ours(benchmark, workloads.WORKLOADS["W1c"], label, client_map)


def _ours(benchmark, workload, label, client_map):
    program = bench.build(workload, label, client_map, jax.devices()[:1])
    benchmark.extra_info.update(
        row=(workload.name, f"fedjax_mm {label}", f"client_map={client_map}"),
        client_updates=workload.client_updates,
        compile_seconds=program.compile_seconds,
        mebibytes=program.mebibytes,
    )
    benchmark.pedantic(program.run, rounds=5, warmup_rounds=1)
