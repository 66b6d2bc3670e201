"""`python -m benchmarks.accelerator_peers`, whose rows of ours agree with NumPy."""

import json

import pytest

from benchmarks import accelerator_peers
from benchmarks.accelerator_peers import FULL, TINY, write_report


def test_our_rows_and_one_that_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # where no round can be a CUDA graph
    groups = ("--groups", "fedjax_mm", "PyTorch", "--works", "W1")
    accelerator_peers.main(["--tiny", "--jobs", "1", *groups, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "peers.json").read_text())
    assert found["versions"].keys() == {"python", "jax", "torch", "drjax", "fedjax"}
    one, many = (
        next(row for row in found["rows"] if row["variant"] == form)
        for form in ("one replica", "replicas")
    )
    assert one["difference"] < 1e-6 < 1e-2 < one["moved"]
    assert one["updates/s"] == one["updates"] / one["seconds"]
    assert one["steps/s"] == pytest.approx(5 * one["updates/s"])
    assert many["updates"] == 2 * 2 * 12  # replicas, rounds, clients
    assert any("error" in row for row in found["rows"])
    text = (tmp_path / "peers.md").read_text()
    lines = text.splitlines()[2:]
    assert {line.count("|") for line in lines} == {12}


def test_rows_have_names_of_their_own():
    for sizes in (TINY, FULL):
        names = [row.name for row in accelerator_peers.rows(sizes)]
        assert len(set(names)) == len(names)


def test_a_report_without_rows(tmp_path):
    write_report([], tmp_path)
    assert json.loads((tmp_path / "peers.json").read_text()) == {"rows": []}
