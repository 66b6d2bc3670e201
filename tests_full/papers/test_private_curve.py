"""The cost of privacy: a small reproduction, compared with `simulate`."""

import jax
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import fedavg, local_sgd, mfa_rand, simulate
from fedjax_mm.availability import available, bernoulli
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.data import synthetic
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS
from fedjax_mm.plots import save_figure
from fedjax_mm.privacy import noise_for, private
from fedjax_mm.tasks import LogisticRegression, classification

ITEM = ITEMS["private-curve"]
SMALL = validate(
    type(ITEM.settings),
    ITEM.settings.model_dump()
    | {
        "num_clients": 20,
        "num_models": [2],
        "sampling": [1, 0.5],
        "epsilons": [3.0],
        "rates": [0.3],
        "clips": [1.0],
        "selection_seeds": 1,
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
    data = synthetic(20, alpha=0.0, beta=0.0, iid=True, seed=SMALL.data_seeds[1], test_fraction=0.2)
    task = classification(data, LogisticRegression(5))
    assignment = available(mfa_rand(20, 2), bernoulli(0.5))
    noise = noise_for(assignment, epsilon=3.0, num_rounds=4, delta=1e-5)
    algorithm = private(
        fedavg(local_sgd(0.3, steps=2, batch_size=10)),
        clip=1.0,
        noise_multiplier=noise,
        clients_per_round=5,
    )
    (key,) = seed_keys(0, [1])
    _, trace = jax.jit(
        lambda key: simulate(key, [task] * 2, algorithm, assignment, 4, record_every=4)
    )(key)
    point = result.sel(num_models=2, sampling=0.5, epsilon="3", seed=1)
    np.testing.assert_allclose(point.loss, trace.metrics["loss"], rtol=1e-5)


def test_noise_multipliers_equal_their_closed_form(result):
    """The composition of 4 Gaussian mechanisms with epsilon 2.7534 has mu = 2 / 3, so z = 3."""
    assert SMALL.noise_multiplier(1, 2.7534) == pytest.approx(3.0, abs=0.005)
    assert SMALL.noise_multiplier(0.5, 2.7534) < 2.5
    assert SMALL.noise_multiplier(1, np.inf) == 0


def test_results_are_judged_and_drawn(result, tmp_path):
    findings = ITEM.findings(result, SMALL)
    assert len(findings.checks) == 2 + 1 + 2  # by sampling; sampling; rates and clips
    accuracy, _ = findings.tables
    assert accuracy.header == ("sampling", "epsilon", "noise multiplier", "num_models = 2")
    save_figure(ITEM.figure(result, findings.measured, SMALL), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists()


@pytest.mark.parametrize(("gap", "outcome"), [(5.0, "holds"), (-5.0, "does not hold")])
def test_checks_follow_the_accuracies(gap, outcome):
    """Noise costs `gap` with one model and twice that with four, and less with sampling."""
    changed = {"num_models": [1, 4], "rates": [0.3], "clips": [0.1, 1.0, 3.0]}
    settings = validate(type(SMALL), SMALL.model_dump() | changed)
    seeds = np.linspace(0.0, 0.3, 20)
    falls = np.array([[0.0, gap], [0.0, 2 * gap]])
    falls = np.stack([falls, 0.9 * falls], axis=1)
    percent = xr.DataArray(
        80 - falls[..., None] + seeds,
        {"num_models": [1, 4], "sampling": [1, 0.5], "epsilon": [np.inf, 3.0], "seed": range(20)},
    )
    percent = percent + 0.01 * np.cos(np.arange(percent.size)).reshape(percent.shape)
    ones = xr.ones_like(percent.isel(seed=0, drop=True))
    # Without noise the largest clip is no defect.
    clips = ones.where(ones.epsilon == 3.0, 3.0)
    measured = xr.Dataset({"percent": percent, "chosen_rate": ones, "chosen_clip": clips})
    checks = list(ITEM.judge(measured, settings))
    assert [each.outcome for each in checks] == [outcome] * 5 + ["undecided", "passed"]
    measured["chosen_clip"] = 3 * ones
    *_, inner = ITEM.judge(measured, settings)
    assert inner.outcome == "defect"
