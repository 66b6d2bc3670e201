"""W2, W2b, W3, W3b, W4, W5: federated averaging of classifiers, compared with other systems.

Run `pip install '.[bench]' && pytest benchmarks/test_learning.py`. There is one XLA device per CPU
core: the rows of `fedjax_mm` share the clients out over all of them, FedJAX and DrJAX use the first
one, whose threads are those of all cores. Neither is slower than in a process with one device.
"""

import itertools
import math
import os
import time

import jax
import numpy as np
import pytest

from benchmarks import handwritten, learning_peers, torch_peers
from benchmarks.learning import WORKLOADS, numpy_rounds, ours_rounds
from fedjax_mm.cli import speed as bench
from fedjax_mm.cli import workloads
from fedjax_mm.cli.workloads import LOGISTIC, MCMAHAN_CNN, PERCEPTRON, REDDI_CNN, Model

OWN = learning_peers.fedjax_own_rounds
FEDJAX, DRJAX = learning_peers.fedjax_rounds, learning_peers.drjax_rounds
BY_HAND = handwritten.learning_rounds
LOOP, VMAP, BADDBMM = torch_peers.loop_rounds, torch_peers.vmap_rounds, torch_peers.baddbmm_rounds

# DrJAX touches a deprecated name of jax; warnings are errors elsewhere.
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

SMALL = {
    "W2": WORKLOADS["W2"],
    "W2b": WORKLOADS["W2b"]._replace(num_clients=60, cohort_size=6),
    "W3": WORKLOADS["W3"]._replace(num_clients=8, cohort_size=4, num_steps=6),
}
CNN_SIZES = {"num_clients": 4, "num_examples": 20, "cohort_size": 2, "num_steps": 4}
SMALL_CNNS = {
    "W4": WORKLOADS["W4"]._replace(model=Model((8, 12, 2), (3, 4), (6, 5)), **CNN_SIZES),
    "W5": WORKLOADS["W5"]._replace(
        model=Model((8, 12, 2), (3, 4), (6, 5), kernel_size=3, is_padded=False), **CNN_SIZES
    ),
}


def _batches(workload, num_rounds=3):
    size = (num_rounds, workload.cohort_size, workload.num_steps, workload.batch_size)
    return np.random.default_rng(7).integers(workload.num_examples, size=size)


def _assert_close(params, expected):
    for layer, expected_layer in zip(params, expected, strict=True):
        for array, expected_array in zip(layer, expected_layer, strict=True):
            np.testing.assert_allclose(array, expected_array, rtol=0, atol=1e-5)


@pytest.mark.parametrize("build", [BY_HAND, FEDJAX, DRJAX, LOOP, VMAP, BADDBMM])
@pytest.mark.parametrize("name", SMALL)
def test_all_do_the_same_work(name, build):
    workload = SMALL[name]
    batches = _batches(workload)
    _assert_close(build(workload, 3, batches=batches)(), numpy_rounds(workload, batches)())


@pytest.mark.parametrize(
    ("name", "build"), [("W4", BY_HAND), *itertools.product(SMALL_CNNS, [DRJAX, LOOP, VMAP])]
)
def test_all_do_the_same_work_with_convolutions(name, build):
    workload = SMALL_CNNS[name]
    batches = _batches(workload)
    expected = FEDJAX(workload, 3, batches=batches)()
    _assert_close(build(workload, 3, batches=batches)(), expected)
    # ... and it is work: every array has moved further than the tolerance.
    for before, after in zip(workload.params(0), expected, strict=True):
        assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("build", [VMAP, BADDBMM])
def test_chunks_do_the_same_work(build):
    workload = SMALL["W2b"]
    batches = _batches(workload)
    expected = numpy_rounds(workload, batches)()
    _assert_close(build(workload, 3, batches=batches, chunk_size=4)(), expected)


@pytest.mark.parametrize("num_steps", [5, 6], ids=["all steps", "one step"])
def test_compiled_does_the_same_work(num_steps):
    workload = SMALL["W2"]._replace(num_steps=num_steps)
    batches = _batches(workload)
    run = VMAP(workload, 3, batches=batches, compiled=True)
    _assert_close(run(), numpy_rounds(workload, batches)())


@pytest.mark.parametrize("build", [BY_HAND, FEDJAX, DRJAX, LOOP, VMAP, BADDBMM])
def test_own_batches_learn(build):
    """Drawn batches visit the examples: on one client's, training approaches the labels."""
    workload = SMALL["W2"]._replace(
        num_clients=1, cohort_size=1, num_examples=20, num_steps=50, batch_size=10
    )
    ((kernel, bias),) = build(workload, 20)()
    inputs, labels = workload.examples(0)
    assert np.mean(np.argmax(inputs[0] @ kernel + bias, axis=1) == labels[0]) == 1.0


@pytest.fixture
def tree_map():
    """`jax.tree_map`, which FedJAX's own algorithm calls."""
    with learning_peers.tree_map_restored():
        yield


@pytest.mark.usefixtures("tree_map")
@pytest.mark.parametrize("batch_size", [1, 4])
def test_fedjax_of_its_own_does_the_same_work(batch_size):
    """Where a client has one example all batches are alike."""
    workload = SMALL["W2b"]._replace(num_examples=1, batch_size=batch_size)
    batches = np.zeros((3, workload.cohort_size, workload.num_steps, batch_size), int)
    _assert_close(OWN(workload, 3)(), numpy_rounds(workload, batches)())


CLIENT_MAPS = {"auto": "auto", "vmap": "vmap", "scan": "scan", "chunk 10": 10}


@pytest.mark.parametrize("client_map", CLIENT_MAPS)
@pytest.mark.parametrize("num_examples", [1, 20])
@pytest.mark.parametrize("name", ["W2", "W3"])
def test_ours_do_the_same_work(name, num_examples, client_map):
    """On batches that are alike: of one example again and again, or of all examples."""
    workload = SMALL[name]._replace(
        num_clients=12, cohort_size=12, num_examples=num_examples, batch_size=20
    )
    batches = np.broadcast_to(
        np.arange(20) % num_examples, (3, 12, workload.num_steps, workload.batch_size)
    )
    expected = numpy_rounds(workload, batches)()
    _assert_close(ours_rounds(workload, 3, CLIENT_MAPS[client_map])(), expected)
    for before, after in zip(workload.params(0), expected, strict=True):
        assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("num_devices", [1, None])
@pytest.mark.parametrize("model", SMALL_CNNS)
def test_ours_do_the_same_work_with_convolutions(model, num_devices):
    workload = SMALL_CNNS[model].alike()
    expected = FEDJAX(workload, 2, batches=workload.all_examples(2))()
    devices = jax.devices()[:num_devices]
    _assert_close(ours_rounds(workload, 2, devices=devices)(), expected)


@pytest.mark.parametrize(
    ("model", "num_params"),
    [(LOGISTIC, 305), (PERCEPTRON, 52_500), (MCMAHAN_CNN, 1_663_370), (REDDI_CNN, 1_626_442)],
)
def test_number_of_parameters(model, num_params):
    assert sum(math.prod(shape) + shape[-1] for shape in model.kernel_shapes) == num_params


def test_operations():
    assert WORKLOADS["W2"].flops == 5 * 20 * 4 * 60 * 5
    dense = 4 * 784 * 64 + 6 * (64 * 30 + 30 * 10)
    assert WORKLOADS["W3"].flops == 30 * 32 * dense
    convolutions = 4 * 30**2 * 27 * 32 + 6 * 28**2 * 9 * 32 * 64
    assert WORKLOADS["W5"].flops == 50 * (convolutions + 6 * (12544 * 128 + 128 * 10))
    convolutions = 4 * 28**2 * 25 * 32 + 6 * 14**2 * 25 * 32 * 64
    assert WORKLOADS["W4"].flops == 600 * (convolutions + 6 * (3136 * 512 + 512 * 10))


def test_peak_counts_every_form():
    peak = bench.gemm_peak(sizes=(64,), repeats=1)
    assert peak.keys() >= {"NumPy", "jax"}
    assert min(peak.values()) > 0


# Rounds so that a run takes one or two seconds, and the fastest options of each system.
PEERS = [
    *[
        (name, "JAX by hand", "tuned for it alone", BY_HAND, workload.num_rounds, {})
        for name, workload in WORKLOADS.items()
        if workload.num_examples is not None and workload.model.is_padded
    ],
    ("W2", "FedJAX", "its own fed_avg", OWN, 5, {}),
    ("W2", "FedJAX", "lean loop", FEDJAX, 10, {}),
    ("W2", "DrJAX", "vmap", DRJAX, 400, {}),
    ("W2", "PyTorch", "loop", LOOP, 20, {}),
    ("W2", "PyTorch", "vmap", VMAP, 150, {}),
    ("W2", "PyTorch", "baddbmm", BADDBMM, 250, {}),
    ("W2", "PyTorch", "compiled vmap", VMAP, 1000, {"compiled": True, "num_threads": 1}),
    ("W2b", "FedJAX", "its own fed_avg", OWN, 1, {}),
    ("W2b", "FedJAX", "lean loop", FEDJAX, 1, {}),
    ("W2b", "DrJAX", "vmap", DRJAX, 40, {}),
    ("W2b", "PyTorch", "loop", LOOP, 2, {}),
    ("W2b", "PyTorch", "vmap", VMAP, 25, {}),
    ("W2b", "PyTorch", "baddbmm", BADDBMM, 25, {"chunk_size": 100}),
    (
        "W2b",
        "PyTorch",
        "compiled vmap",
        VMAP,
        80,
        {"compiled": True, "chunk_size": 100, "num_threads": 1},
    ),
    ("W3", "FedJAX", "its own fed_avg", OWN, 10, {}),
    ("W3", "FedJAX", "lean loop", FEDJAX, 10, {}),
    ("W3", "DrJAX", "vmap", DRJAX, 50, {}),
    ("W3", "PyTorch", "loop", LOOP, 20, {}),
    ("W3", "PyTorch", "vmap", VMAP, 20, {}),
    ("W3", "PyTorch", "baddbmm", BADDBMM, 30, {}),
    ("W3b", "FedJAX", "its own fed_avg", OWN, 1, {}),
    ("W3b", "FedJAX", "lean loop", FEDJAX, 1, {}),
    ("W3b", "DrJAX", "vmap", DRJAX, 2, {}),
    ("W3b", "PyTorch", "loop", LOOP, 2, {}),
    ("W3b", "PyTorch", "vmap", VMAP, 2, {"chunk_size": 10}),
    ("W3b", "PyTorch", "baddbmm", BADDBMM, 2, {"chunk_size": 10}),
    ("W4", "FedJAX", "its own fed_avg", OWN, 1, {}),
    ("W4", "FedJAX", "lean loop", FEDJAX, 1, {}),
    ("W4", "DrJAX", "vmap", DRJAX, 1, {}),
    ("W4", "PyTorch", "loop", LOOP, 1, {}),
    ("W4", "PyTorch", "vmap", VMAP, 1, {}),
    ("W5", "FedJAX", "its own fed_avg", OWN, 1, {}),
    ("W5", "FedJAX", "lean loop", FEDJAX, 1, {}),
    ("W5", "DrJAX", "vmap", DRJAX, 1, {}),
    ("W5", "PyTorch", "loop", LOOP, 1, {}),
    ("W5", "PyTorch", "vmap", VMAP, 1, {}),
]


@pytest.mark.usefixtures("tree_map")
@pytest.mark.parametrize(
    ("name", "system", "form", "build", "num_rounds", "options"),
    PEERS,
    ids=["-".join(row[:3]) for row in PEERS],
)
def test_peer(benchmark, name, system, form, build, num_rounds, options):
    workload = WORKLOADS[name]
    if system == "PyTorch" and "num_threads" not in options:
        options = {**options, "num_threads": _fastest_threads(build, workload, options)}
    if "num_threads" in options:
        form = f"{form}, {options['num_threads']} thread(s)"
    run = build(workload, num_rounds, **options)
    _time(benchmark, (name, system, form), workload, num_rounds, run)


def _fastest_threads(build, workload, options):
    """One, or as many as there are cores: the faster here and now, by the second of two rounds.

    On a loaded machine two threads can be a hundred times slower than one.
    """
    if workload.model != LOGISTIC:  # a chunk or the cohort of ten tells
        workload = workload._replace(num_clients=10, cohort_size=10)
    seconds = {}
    for num_threads in (1, os.cpu_count()):
        run = build(workload, 1, num_threads=num_threads, **options)
        run()
        start = time.perf_counter()
        run()
        seconds[num_threads] = time.perf_counter() - start
    return min(seconds, key=seconds.get)


@pytest.mark.parametrize("client_map", CLIENT_MAPS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_ours(benchmark, name, client_map):
    workload = workloads.WORKLOADS[name]
    program = bench.build(workload, "FedAvg", CLIENT_MAPS[client_map])
    benchmark.extra_info.update(
        compile_seconds=program.compile_seconds, mebibytes=program.mebibytes
    )
    row = name, "fedjax_mm", client_map
    _time(benchmark, row, workload, workload.num_rounds, program.run)


def _time(benchmark, row, workload, num_rounds, run):
    benchmark.extra_info.update(
        row=row,
        client_updates=num_rounds * workload.cohort_size,
        flops=num_rounds * workload.cohort_size * workload.flops,
    )
    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
