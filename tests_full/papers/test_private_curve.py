"""The cost of privacy: a small reproduction, compared with `simulate`."""

import jax
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import fedavg, local_sgd, mfa_rand, simulate
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.data import synthetic
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS
from fedjax_mm.plots import save_figure
from fedjax_mm.privacy import private
from fedjax_mm.tasks import LogisticRegression, classification

ITEM = ITEMS["private-curve"]
SMALL = validate(
    type(ITEM.settings),
    ITEM.settings.model_dump()
    | {
        "num_clients": 20,
        "num_models": [2],
        "noise_multipliers": [0.0, 3.0],
        "local_steps": 2,
        "num_rounds": 4,
        "num_seeds": 2,
        "record_every": 4,
    },
)


@pytest.fixture(scope="module")
def result():
    return ITEM.make(SMALL)


def test_a_point_equals_simulate(result):
    data = synthetic(20, alpha=0.0, beta=0.0, iid=True, seed=0, test_fraction=0.2)
    task = classification(data, LogisticRegression(5))
    algorithm = private(
        fedavg(local_sgd(0.3, steps=2, batch_size=10)),
        clip=1.0,
        noise_multiplier=3.0,
        clients_per_round=10,
    )
    (key,) = seed_keys(0, [1])
    _, trace = jax.jit(
        lambda key: simulate(key, [task] * 2, algorithm, mfa_rand(20, 2), 4, record_every=4)
    )(key)
    point = result.sel(num_models=2, noise_multiplier=3.0, seed=1)
    np.testing.assert_allclose(point.loss, trace.metrics["loss"], rtol=1e-5)


def test_epsilon_equals_its_closed_form(result):
    """The composition of 4 Gaussian mechanisms with z = 3 has mu = 2 / 3."""
    measured = ITEM.measure(result, SMALL)
    assert measured.epsilon[0] == np.inf
    assert float(measured.epsilon[1]) == pytest.approx(2.7534, abs=0.005)


def test_results_are_judged_and_drawn(result, tmp_path):
    findings = ITEM.findings(result, SMALL)
    assert [each.text.split(",")[0] for each in findings.checks] == ["with the most models"]
    (table,) = findings.tables
    assert table.header == ("noise_multiplier", "epsilon", "num_models = 2")
    assert [row[1] for row in table.rows] == ["inf", "2.75"]
    save_figure(ITEM.figure(result, findings.measured, SMALL), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists()


@pytest.mark.parametrize(("gap", "outcome"), [(5.0, "holds"), (-5.0, "does not hold")])
def test_checks_follow_the_accuracies(gap, outcome):
    """Noise costs `gap` with one model and twice that with four."""
    settings = validate(type(SMALL), SMALL.model_dump() | {"num_models": [1, 4]})
    seeds = np.linspace(0.0, 0.3, 20)
    falls = np.array([[0.0, gap], [0.0, 2 * gap]])
    percent = xr.DataArray(
        80 - falls[:, :, None] + seeds,
        {"num_models": [1, 4], "noise_multiplier": [0.0, 3.0], "seed": range(20)},
    )
    percent = percent + 0.01 * np.cos(np.arange(percent.size)).reshape(percent.shape)
    checks = list(ITEM.judge(xr.Dataset({"percent": percent}), settings))
    assert [each.outcome for each in checks] == [outcome] * 2
