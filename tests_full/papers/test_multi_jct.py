"""Job completion times in a small run with unfinished models."""

import jax
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import simulate
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS, multi_jct
from fedjax_mm.plots import save_figure

ITEM = ITEMS["multi-jct"]
SMALL = validate(
    type(ITEM.settings),
    ITEM.settings.model_dump()
    | {
        "mixes": ["unequal", "scarce"],
        "methods": ["MFA-Rand", "MFA-Rand, clients kept", "Venn", "FedAST"],
        "num_models": 3,
        "num_clients": 10,
        "cohort_size": 6,
        "demand": 4,
        "target": 0.3,
        "rounds_between": 3,
        "num_rounds": 12,
        "num_seeds": 2,
        "selection_seeds": 2,
        "rates": [0.05, 0.1, 0.2],
    },
)


@pytest.fixture(scope="module")
def result():
    return ITEM.make(SMALL)


def test_a_small_instance_runs_from_data_to_figure(result, tmp_path):
    assert result["algorithm"].values.tolist() == list(SMALL.methods)
    ran = result["test_accuracy"].notnull().all(["round", "model", "seed"])
    assert ran.transpose("algorithm", "mix", "arrivals").values.tolist() == [
        [[True, True], [False, False]],
        [[True, True], [False, False]],
        [[True, True], [True, True]],
        [[True, True], [False, False]],
    ]
    updates = result["client_updates"].sel(mix="unequal")
    total = updates.sum("model").isel(round=-1, seed=0).sel(arrivals="at once")
    assert total.sel(algorithm="MFA-Rand, clients kept") == 6 * 12
    assert total.sel(algorithm="MFA-Rand") <= 6 * 12
    findings = ITEM.findings(result, SMALL)
    texts = [check.text for check in findings.checks]
    assert (
        "scarce: rounds that Venn saves in the mean completion time against MFA-Rand" not in texts
    )
    assert any(text.startswith("unequal: rounds that Venn saves") for text in texts)
    assert [len(table.rows) for table in findings.tables] == [4] * 8
    save_figure(ITEM.figure(result, findings.measured, SMALL), tmp_path / "figure.png")


def test_a_run_equals_simulate_and_its_times_are_those_of_the_loop(result):
    key = jax.random.fold_in(jax.random.key(SMALL.seed), 1)
    both = multi_jct.drawn(SMALL)
    rate = result["chosen_rate"].sel(algorithm="MFA-Rand", mix="unequal").item()
    setup = SMALL.build("unequal", "over time", rate, "MFA-Rand", both, 1)
    _, trace = simulate(key, *setup[:3], SMALL.num_rounds, record_every=SMALL.record_every)
    at = {"algorithm": "MFA-Rand", "mix": "unequal", "arrivals": "over time", "seed": 1}
    here = result["test_accuracy"].sel(at).transpose("round", "model")
    np.testing.assert_allclose(here, trace.metrics["test_accuracy"], atol=1e-6)
    finished = []
    for model in range(SMALL.num_models):
        met = trace.metrics["test_accuracy"][:, model] >= SMALL.target
        met &= np.asarray(trace.round) >= SMALL.rounds_between * model
        first = np.argmax(met)
        finished.append(float(trace.round[first]) if met.any() else np.nan)
    times = np.array(finished) - SMALL.rounds_between * np.arange(SMALL.num_models)
    measured = ITEM.measure(result, SMALL).sel(at)
    mean = measured["mean_completion_time in rounds per seed"].item()
    assert mean == pytest.approx(np.mean(times), nan_ok=True)
    last = [
        len(trace.round) - 1 if np.isnan(end) else list(trace.round).index(end) for end in finished
    ]
    trained = np.cumsum(trace.client_updates, 0)
    trainings = sum(trained[row, model] for model, row in enumerate(last))
    expected = trainings if np.isfinite(finished).all() else np.nan
    assert measured["trainings per seed"].item() == pytest.approx(expected, nan_ok=True)


def test_rates_have_the_least_time_on_the_selection_seeds(result):
    times = result["selection_time"]
    assert dict(times.sizes) == {
        "algorithm": 4,
        "mix": 2,
        "rate": 3,
        "selection_seed": 2,
    }
    means = times.sel(algorithm="FedAST", mix="unequal").mean("selection_seed")
    chosen = result["chosen_rate"].sel(algorithm="FedAST", mix="unequal")
    assert chosen == means["rate"][means.argmin("rate")]
    assert np.isnan(result["chosen_rate"].sel(algorithm="FedAST", mix="scarce"))


def test_a_seed_with_an_unfinished_model_has_no_mean_time():
    accuracy = [[[0.1, 0.1], [0.9, 0.9]], [[0.1, 0.1], [0.9, 0.2]]]
    dims = ("seed", "round", "model")
    made = xr.Dataset(
        {
            "test_accuracy": (dims, accuracy),
            "time": (dims, np.broadcast_to([[[0.0], [5.0]]], (2, 2, 2))),
            "arrived_at": (dims, np.zeros((2, 2, 2))),
            "client_updates": (dims, np.broadcast_to([[[0, 0], [3, 4]]], (2, 2, 2))),
            "chosen_rate": 0.1,
        },
        {"round": [0, 10]},
    ).expand_dims(algorithm=["MFA-Rand"], mix=["equal"], arrivals=["at once"])
    config = validate(type(ITEM.settings), SMALL.model_dump() | {"num_models": 2, "target": 0.5})
    measured = ITEM.measure(made, config).squeeze()
    np.testing.assert_array_equal(
        measured["mean_completion_time in rounds per seed"], [10.0, np.nan]
    )
    np.testing.assert_array_equal(measured["makespan in simulated time per seed"], [5.0, np.nan])
    assert np.isnan(measured["mean_completion_time in rounds"])
    np.testing.assert_array_equal(measured["trainings per seed"], [7, np.nan])
    np.testing.assert_array_equal(measured["least_mean_completion_time in rounds"], [10, 10])
    assert measured["finished"] == 75


@pytest.mark.parametrize(("least", "outcome"), [(90.0, "behind"), (20.0, "undecided")])
def test_an_unfinished_seed_is_behind_only_if_it_is_with_its_least_time(least, outcome):
    rows = {"algorithm": ["MFA-Rand", "MFA-RR"], "mix": ["equal"], "arrivals": ["at once"]}
    times = xr.DataArray(np.full((2, 1, 1, 10), 40.0), rows | {"seed": range(10)})
    times[1, ..., :7] = np.nan
    times[1, ..., 7:] = 60.0
    found = {"mean_completion_time in rounds per seed": times}
    found["least_mean_completion_time in rounds"] = times.fillna(least)
    found["chosen_rate"] = xr.DataArray([[0.1], [0.2]], {k: rows[k] for k in ("algorithm", "mix")})
    config = validate(type(SMALL), {"mixes": ["equal"]})
    check, inner = ITEM.judge(xr.Dataset(found), config)
    assert (check.outcome, inner.outcome) == (outcome, "passed")
    found["chosen_rate"][1] = max(config.rates)
    check, _ = ITEM.judge(xr.Dataset(found), config)
    assert "MFA-RR is at the edge" in check.evidence
