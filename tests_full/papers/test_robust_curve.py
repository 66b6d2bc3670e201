"""Accuracy under attacks: a small reproduction, compared with `simulate`."""

import jax
import numpy as np
import pytest

from fedjax_mm import fedavg, full_participation, local_sgd, simulate, to_dataset
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.data import synthetic
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS, curves
from fedjax_mm.plots import save_figure
from fedjax_mm.robust import attacking, ipm, robust, trimmed_mean
from fedjax_mm.tasks import LogisticRegression, classification

ITEM = ITEMS["robust-curve"]
SMALL = validate(
    type(ITEM.settings),
    ITEM.settings.model_dump()
    | {"num_clients": 6, "tolerated": 1, "shares": [0.0, 0.17], "local_steps": 1}
    | {"num_rounds": 4, "num_seeds": 3, "record_every": 2},
)
SOME = {"RULES": ("mean", "trimmed mean"), "ATTACKS": ("sign flip", "inner product")}


@pytest.fixture(scope="module", autouse=True)
def some():
    """Two rules and two attacks, because each pair is a program."""
    with pytest.MonkeyPatch.context() as patch:
        rules = {name: SMALL.rule(name) for name in SOME["RULES"]}
        attacks = {name: SMALL.attack(name) for name in SOME["ATTACKS"]}
        patch.setattr(type(SMALL), "rule", lambda self, name: rules[name])
        patch.setattr(type(SMALL), "attack", lambda self, name: attacks[name])
        for name, value in SOME.items():
            patch.setattr(curves, name, value)
        yield


def test_a_point_equals_simulate_and_results_are_judged_and_drawn(tmp_path):
    result = ITEM.make(SMALL)
    data = synthetic(6, alpha=0.0, beta=0.0, seed=0, test_fraction=0.2)
    task = classification(data, LogisticRegression(5))
    plain = fedavg(local_sgd(0.1, steps=1, batch_size=10))
    algorithm = attacking(robust(plain, trimmed_mean(1)), np.arange(6) < 1, ipm(5.0))
    (key,) = seed_keys(0, [1])
    assignment = full_participation(6)
    _, trace = jax.jit(lambda key: simulate(key, task, algorithm, assignment, 4, record_every=2))(
        key
    )
    point = result.sel(rule="trimmed mean", attack="inner product", share=0.17, seed=1)
    np.testing.assert_allclose(point.loss, to_dataset(trace).loss, rtol=1e-5)
    assert point.attackers.values[:, 0].tolist() == [0, 1, 1]
    findings = ITEM.findings(result, SMALL)
    assert len(findings.checks) == 3
    (table,) = findings.tables
    assert table.header == ("attack", "share", "mean", "trimmed mean")
    save_figure(ITEM.figure(result, findings.measured, SMALL), tmp_path / "figure.png")
