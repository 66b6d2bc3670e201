"""Accuracy under attacks: a small reproduction, compared with `simulate`."""

import jax
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import fedavg, full_participation, local_sgd, simulate, to_dataset
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.data import synthetic
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS, curves
from fedjax_mm.plots import save_figure
from fedjax_mm.robust import attacking, ipm, robust, sign_flip, trimmed_mean
from fedjax_mm.tasks import LogisticRegression, classification

ITEM = ITEMS["robust-curve"]
SMALL = validate(
    type(ITEM.settings),
    ITEM.settings.model_dump()
    | {"num_clients": 6, "tolerated": 1, "shares": [0.0, 0.17], "local_steps": 1}
    | {"problems": ["non-IID"], "strengths": [1.0, 2.0], "rates": [0.1]}
    | {"num_rounds": 4, "num_seeds": 3, "selection_seeds": 1, "record_every": 2},
)
SOME = {
    "RULES": ("mean", "median", "trimmed mean", curves.BUCKETS, curves.MIXED),
    "ATTACKS": ("sign flip", "inner product"),
}


@pytest.fixture(scope="module", autouse=True)
def some():
    """Fewer rules and attacks, because each pair is a program."""
    with pytest.MonkeyPatch.context() as patch:
        rules = {name: SMALL.rule(name) for name in SOME["RULES"]}
        made = dict(zip(curves.ATTACKS, (sign_flip, None, None, ipm), strict=True))
        patch.setattr(type(SMALL), "rule", lambda self, name: rules[name])
        patch.setattr(type(SMALL), "attack", lambda self, name, by: made[name](by * 5.0))
        for name, value in SOME.items():
            patch.setattr(curves, name, value)
        yield


def test_a_point_equals_simulate_and_results_are_judged_and_drawn(tmp_path):
    result = ITEM.make(SMALL)
    data = synthetic(6, alpha=0.0, beta=0.0, seed=SMALL.data_seeds[1], test_fraction=0.2)
    task = classification(data, LogisticRegression(5))
    plain = fedavg(local_sgd(0.1, steps=1, batch_size=10))
    algorithm = attacking(robust(plain, trimmed_mean(1)), np.arange(6) < 1, ipm(10.0))
    (key,) = seed_keys(0, [1])
    assignment = full_participation(6)
    _, trace = jax.jit(lambda key: simulate(key, task, algorithm, assignment, 4, record_every=2))(
        key
    )
    attack = {"attack": "inner product", "strength": 2.0, "share": 0.17}
    point = result.sel(problem="non-IID", rule="trimmed mean", seed=1, **attack)
    np.testing.assert_allclose(point.loss, to_dataset(trace).loss, rtol=1e-5)
    assert point.attackers.values[:, 0].tolist() == [0, 1, 1]
    findings = ITEM.findings(result, SMALL)
    assert len(findings.checks) == 4 * 2 + 2 * 2 + 1
    worst, every, _ = findings.tables
    assert worst.header == ("problem", "share", *SOME["RULES"])
    assert every.header[:3] == ("problem", "attack", "strength")
    save_figure(ITEM.figure(result, findings.measured, SMALL), tmp_path / "figure.png")


def test_the_worst_attack_is_chosen_by_other_seeds():
    """Seed 0 is worst under the flip, but the others are worst under the inner product."""
    flip, forged = [10.0, 50.0, 50.0], [60.0, 20.0, 24.0]
    accuracy = xr.DataArray(
        np.array([flip, forged]).reshape(1, 1, 2, 1, 1, 3, 1, 1) / 100,
        dims=("problem", "rule", "attack", "strength", "share", "seed", "round", "model"),
        coords={"attack": ["sign flip", "inner product"], "strength": [1.0]},
    )
    result = xr.Dataset({"test_accuracy": accuracy})
    worst = ITEM.measure(result, SMALL)["worst percent"].values.ravel()
    np.testing.assert_allclose(worst, [60.0, 50.0, 50.0])
