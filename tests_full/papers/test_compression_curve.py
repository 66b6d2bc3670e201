"""The savings of compression: a small reproduction, compared with `simulate`."""

import jax
import numpy as np
import pytest

from fedjax_mm import fedavg, local_sgd, mfa_rand, simulate, to_dataset
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.compression import compressed, top_k
from fedjax_mm.data import synthetic
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS, curves
from fedjax_mm.plots import save_figure
from fedjax_mm.tasks import LogisticRegression, classification

ITEM = ITEMS["compression-curve"]
SMALL = validate(
    type(ITEM.settings),
    ITEM.settings.model_dump()
    | {"problems": ["synthetic"], "num_clients": 6, "local_steps": 1, "rates": [0.1]}
    | {"num_rounds": 4, "num_seeds": 2, "selection_seeds": 1, "record_every": 2},
)


@pytest.fixture(scope="module")
def result():
    """Results of three compressors, because each one is a program."""
    labels = (curves.PLAIN, curves.TOP, curves.TOP_ALONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "LABELS", labels)
        yield ITEM.make(SMALL)


def test_a_point_equals_simulate(result):
    data = synthetic(6, alpha=0.1, beta=0.1, seed=SMALL.data_seeds[1], test_fraction=0.2)
    task = classification(data, LogisticRegression(5))
    algorithm = compressed(fedavg(local_sgd(0.1, steps=1, batch_size=10)), top_k(0.05))
    (key,) = seed_keys(0, [1])
    _, trace = jax.jit(
        lambda key: simulate(key, [task] * 2, algorithm, mfa_rand(6, 2), 4, record_every=2)
    )(key)
    expected = to_dataset(trace)
    here = result.sel(problem="synthetic")
    point = here.sel(message="top-k", seed=1)
    np.testing.assert_allclose(point.loss, expected.loss, rtol=1e-5)
    np.testing.assert_array_equal(point.bits_up, expected.bits_up)
    plain = here.sel(message="all numbers", seed=1)
    np.testing.assert_array_equal(plain.bits_up, 32 * plain.parameters_up)


def test_results_are_judged_and_drawn(result, tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "LABELS", tuple(result.message.values))
    findings = ITEM.findings(result, SMALL)
    (bits,) = (each for each in findings.checks if "of the bits" in each.text)
    assert bits.outcome == "passed"  # 305 numbers of 32 bits
    (table,) = findings.tables
    assert table.header[:3] == ("problem", "message", "accuracy")
    assert table.header[4:] == ("megabits up", "megabits down")
    save_figure(ITEM.figure(result, findings.measured, SMALL), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists()
