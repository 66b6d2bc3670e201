"""`python -m benchmarks.accelerator_peers`: all systems agree with ours."""

import json

import numpy as np
import pytest

from benchmarks import accelerator_peers, peers, torch_peers
from benchmarks.learning import WORKLOADS

# DrJAX and PyTorch touch deprecated names; warnings are errors elsewhere.
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


def test_all_systems_agree(tmp_path):
    accelerator_peers.main(["--tiny", "--out", str(tmp_path)])
    for row in json.loads((tmp_path / "peers.json").read_text())["rows"]:
        if "CUDA graph" in row["variant"]:
            assert "no CUDA graphs" in row["error"]
            continue
        assert "error" not in row
        assert "not_compared" not in row
        assert row.get("difference", 0) < 5e-6
        assert row.get("moved", 1) > 1e-2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("num_models", [1, 12])
def test_pytorch_on_quadratics(num_models, compiled):
    workload = peers.Quadratic(num_models=num_models)
    expected = peers.numpy_rounds(20, num_models=num_models)()
    found = torch_peers.vmap_rounds(workload, 20, compiled=compiled)()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    loop = torch_peers.loop_rounds(workload, 20)()
    np.testing.assert_allclose(loop, expected, atol=1e-6)


def test_a_graphs_round_reads_its_number_from_the_device(monkeypatch):
    """With a stand-in for the graph, which computes the round again."""
    torch = torch_peers.torch

    def graph(one_round, initial):
        def play(num_rounds):
            server, t = initial, torch.zeros(1, dtype=torch.int64)
            for _ in range(num_rounds):
                server = one_round(server, t)
                t += 1
            return server

        return play

    monkeypatch.setattr(torch_peers, "_graph", graph)
    workload = WORKLOADS["W2"]._replace(num_clients=6, cohort_size=3)
    batches = np.random.default_rng(0).integers(workload.num_examples, size=(4, 3, 5, 20))
    run, graphed = (
        torch_peers.vmap_rounds(workload, 4, batches=batches, graphed=is_graphed)
        for is_graphed in (False, True)
    )
    for (kernel, bias), (other_kernel, other_bias) in zip(run(), graphed(), strict=True):
        np.testing.assert_array_equal(kernel, other_kernel)
        np.testing.assert_array_equal(bias, other_bias)
