"""Comparison of all multi-model methods: a small run, and verdicts on made-up curves."""

import json

import jax
import numpy as np
import optax
import pytest
import xarray as xr

from fedjax_mm import fedavg, local_sgd, simulate
from fedjax_mm.asynchrony import fedast, shifted_exponential
from fedjax_mm.cli import reproductions, terminal
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS, multi_compare
from fedjax_mm.papers.selection import best_point
from fedjax_mm.plots import save_figure

ITEM = ITEMS["multi-compare"]
SMALL = validate(
    type(ITEM.settings),
    ITEM.settings.model_dump()
    | {
        "problems": ["synthetic"],
        "methods": ["bandit: Pareto", "FedAST"],
        "synthetic": {"num_clients": 6, "cohort_size": 3, "local_steps": 2},
        "learning_rates": [0.03, 0.1],
        "server_rates": [0.8, 0.5],
        "selection_seeds": 2,
        "num_rounds": 6,
        "num_seeds": 2,
        "record_every": 3,
    },
)
METHODS = tuple(multi_compare.METHODS)
FULL = validate(
    type(ITEM.settings),
    ITEM.settings.model_dump()
    | {"problems": ["synthetic", "digits"], "num_rounds": 10, "num_seeds": 20, "record_every": 1},
)


@pytest.fixture(scope="module")
def result():
    return ITEM.make(SMALL)


def test_a_small_instance_runs_from_data_to_figure(result, tmp_path):
    sizes = {"problem": 1, "algorithm": 2, "seed": 2, "round": 3, "model": 2}
    assert dict(result["test_accuracy"].sizes) == sizes
    assert result["test_accuracy"].notnull().all()
    assert result["round"].values.tolist() == [0, 3, 6]
    trained = result["client_updates"].isel(round=-1, problem=0).sum("model")
    # The bandit has 24 rounds: two train a model on all 6 clients, the other 22 on one to three.
    pareto = trained.sel(algorithm="bandit: Pareto")
    assert ((pareto >= 2 * 6 + 22) & (pareto <= 2 * 6 + 22 * 3)).all()
    assert (trained.sel(algorithm="FedAST") == 6 * 3).all()
    scores = result["selection_accuracy"].isel(problem=0)
    assert scores.dims == ("algorithm", "learning_rate", "server_rate", "selection_seed")
    assert scores.sel(algorithm="FedAST", server_rate=[0.8, 0.5]).notnull().all()
    assert scores.sel(algorithm="bandit: Pareto", server_rate=0.5).isnull().all()
    best = scores.mean("selection_seed").max(["learning_rate", "server_rate"])
    chosen = {name: result[f"chosen_{name}"].isel(problem=0) for name in multi_compare._RATES}
    at_chosen = scores.mean("selection_seed").sel(chosen)
    np.testing.assert_array_equal(at_chosen, best)
    about = json.loads(result.attrs["manifest"])
    assert about["datasets"][0].startswith("synthetic")
    findings = ITEM.findings(result, SMALL)
    # no baseline to compare with
    assert [check.text.split()[0] for check in findings.checks] == ["every"]
    # because there are only two rates
    assert [check.outcome for check in findings.checks] == ["undecided"]
    assert {len(table.rows) for table in findings.tables} == {1, 2}
    assert "accuracy in time" not in findings.measured
    assert findings.measured["trainings"].item() == 18
    figure = ITEM.figure(result, findings.measured, SMALL)
    save_figure(figure, tmp_path / "figure.png")
    assert len(figure.axes) == 1


def test_a_run_equals_simulate(result):
    """One run is repeated with the selected rates, on data that the selection does not use."""
    seed, problem = 1, SMALL.synthetic
    assert not set(SMALL.data_seeds) & set(SMALL.selecting.data_seeds)
    rates = [
        result[f"chosen_{name}"].sel(algorithm="FedAST").item() for name in multi_compare._RATES
    ]
    delay = shifted_exponential(6, mean=1.0)
    dispatch = fedast(6, 2, at_work=[2, 1], ratio=1, delay=delay, arrivals_per_round=3)

    @jax.jit
    def run(key, data, rates):
        tasks = problem.tasks([stack.select(seed) for stack in data])
        local = local_sgd(rates[0], steps=2, batch_size=problem.batch_size)
        algorithm = fedavg(local, server_optimizer=optax.sgd(rates[1]))
        return simulate(key, tasks, algorithm, dispatch, 6, record_every=3)[1]

    key = jax.random.fold_in(jax.random.key(SMALL.seed), seed)
    trace = run(key, problem.data(SMALL.data_seeds, None), np.array(rates, np.float32))
    expected = result.isel(problem=0).sel(algorithm="FedAST", seed=seed)
    actual = expected["test_accuracy"].transpose("round", "model")
    np.testing.assert_allclose(actual, trace.metrics["test_accuracy"], atol=1e-6)
    updates = expected["client_updates"].transpose("round", "model")
    np.testing.assert_array_equal(updates, np.cumsum(trace.client_updates, axis=0))


def test_the_best_rates_are_chosen_by_the_mean_over_seeds():
    nan = np.nan
    scores = xr.DataArray(
        [[[[1, 9], [4, 8]], [[nan, 99], [6, 5]]], [[[nan, 1], [nan, 1]], [[nan, 1], [3, 2]]]],
        {
            "algorithm": ["a", "b"],
            "learning_rate": [0.1, 0.3],
            "server_rate": [1, 0.5],
            "seed": [0, 1],
        },
    )
    best = scores.isel(best_point(scores, ("learning_rate", "server_rate")))
    assert best["learning_rate"].values.tolist() == [0.1, 0.3]
    assert best["server_rate"].values.tolist() == [0.5, 0.5]
    assert best["server_rate"].dims == ("algorithm",)


def invented(accuracy, pace=1, rate=0.1):
    """A result in which the models' accuracies rise to ``accuracy(problem, method)``.

    Seeds differ by a thousandth. A bandit trains ten clients per round, other methods five. A round
    of FedAST takes time `pace`, that of the other methods 2.
    """
    dims = "problem", "algorithm", "seed", "round", "model"
    coords = {
        "problem": ["synthetic", "digits"],
        "algorithm": list(METHODS),
        "seed": range(20),
        "round": range(11),
        "model": [1, 2, 3],
    }
    values = np.full([len(x) for x in coords.values()], np.nan)
    cost, time = np.zeros(values.shape, int), np.full(values.shape, np.nan)
    for p, problem in enumerate(coords["problem"]):
        for m, method in enumerate(METHODS):
            ends = np.array(accuracy(problem, method))
            noise = 1e-3 * (np.arange(20) % 4)[:, None, None] * (1 + (m % 3))
            rise = np.minimum(np.arange(11) / 8, 1)[:, None]
            values[p, m, :, :, : len(ends)] = rise * ends + noise
            each = np.arange(11)[:, None] * (10 if method.startswith("bandit") else 5)
            cost[p, m, :, :, 0] = each[:, 0]
            lasts = pace if method == "FedAST" else 2
            time[p, m, ..., : len(ends)] = lasts * np.arange(11)[:, None]
    found = {"time": (dims, time)}
    found |= {"test_accuracy": (dims, values), "client_updates": (dims, cost)}
    found |= {
        f"chosen_{name}": (dims[:2], np.full((2, len(METHODS)), rate))
        for name in multi_compare._RATES
    }
    names = {"datasets": ["synthetic(1, 1)", "digits"], "data": "real"}
    return xr.Dataset(found, coords, {"manifest": names})


def helpful(problem, method):
    """Accuracies in which FedFairMMFL lifts the worst model, and other methods lift all."""
    base = {"synthetic": [0.5, 0.3], "digits": [0.8, 0.7, 0.3]}[problem]
    if method == "FedFairMMFL":
        return [*base[:-1], 0.4]
    better = {"LVR": 1, "GVR": 1, "StaleVR": 2, "StaleVRE": 2, "FedAST": 1, "BODS": 1}
    better |= dict.fromkeys(("bandit: weighted sum", "bandit: Pareto", "bandit: rank list"), 1)
    return [x + 0.1 * better.get(method, 0) for x in base]


def test_scores_are_means_over_the_last_fifth_of_an_equal_number_of_trainings():
    measured = ITEM.measure(invented(helpful), FULL)
    assert measured["trainings"].values.tolist() == [50, 50]
    here = measured["accuracy per seed"].sel(seed=0)
    # A round of a bandit costs twice the trainings, so it has done 50 by round 5.
    for method, rise in {"MFA-Rand": 1.0, "FedFairMMFL": 1.0, "bandit: Pareto": 4.5 / 8}.items():
        for problem in ("synthetic", "digits"):
            percent = 100 * rise * np.array(helpful(problem, method))
            found = here.sel(problem=problem, algorithm=method)
            assert found.sel(score="mean") == pytest.approx(percent.mean())
            assert found.sel(score="worst") == pytest.approx(percent.min())
    ends = measured["time"].sel(problem="digits")
    assert ends.sel(algorithm=["MFA-Rand", "bandit: Pareto", "FedAST"]).values.tolist() == [
        20,
        10,
        10,
    ]
    # At times 8 to 10 of FedAST, MFA-Rand is in rounds 4 to 5.
    slow = measured["accuracy in time"].sel(seed=0, problem="digits")
    assert slow.sel(fast="FedAST") == pytest.approx(60 * 4.5 / 8)
    assert slow.sel(fast="BODS") == pytest.approx(60)  # rounds of BODS take the same time


def hindered(problem, method):
    """Accuracies with the leads of `helpful` reversed."""
    pairs = zip(helpful(problem, method), helpful(problem, "MFA-Rand"), strict=True)
    return [2 * base - x for x, base in pairs]


def compared(data):
    """The outcomes of all comparisons, by method, problem and question."""
    *checks, rates = ITEM.findings(data, FULL).checks
    assert rates.outcome == "passed"
    found = {}
    for each in checks:
        where, _, question = (
            each.text.partition(": mean")
            if ": mean" in each.text
            else (each.text.partition(": worst"))
        )
        found[where, "same simulated time" in question] = each
    assert len(found) == len(checks) == 2 * (1 + 2 + 2 + 3 + 2 + 2)
    return found


@pytest.mark.parametrize(
    ("accuracy", "pace", "outcome"), [(helpful, 1, "ahead"), (hindered, 3, "behind")]
)
def test_questions_are_answered_by_the_curves(accuracy, pace, outcome):
    found = compared(invented(accuracy, pace))
    assert {each.outcome for each in found.values()} == {outcome}


def test_a_difference_within_a_point_is_level_and_a_noisy_one_is_undecided():
    def close(problem, method):
        gain = {"LVR": 0.001, "FedFairMMFL": 0.01}.get(method, 0)
        return [x + gain for x in helpful(problem, "MFA-Rand")]

    data = invented(close)
    found = compared(data)
    assert {
        found[f"{name} on {problem}", False].outcome
        for name in ("LVR", "GVR")
        for problem in ("synthetic", "digits")
    } == {"level"}
    data["test_accuracy"].loc[{"algorithm": "FedFairMMFL", "seed": list(range(1, 20, 2))}] += 0.1
    found = compared(data)
    assert {
        found[f"FedFairMMFL on {problem}", False].outcome for problem in ("synthetic", "digits")
    } == {"undecided"}


def test_a_diverged_run_leaves_its_check_undecided():
    data = invented(helpful)
    data["test_accuracy"].loc[{"problem": "digits", "algorithm": "FedFairMMFL", "seed": 2}] = np.nan
    findings = ITEM.findings(data, FULL)
    undecided = [check for check in findings.checks if check.outcome == "undecided"]
    assert [check.text.split(":")[0] for check in undecided] == ["FedFairMMFL on digits"]
    assert "diverged" in undecided[0].evidence
    assert ["diverged" in str(table.rows) for table in findings.tables] == [
        True,
        True,
        False,
        False,
    ]


def test_a_rate_at_the_end_of_its_grid_is_said():
    *others, rates = ITEM.findings(invented(helpful, rate=0.6), FULL).checks
    assert rates.outcome == "defect"
    assert {each.outcome for each in others} == {"undecided"}  # of methods that are not tuned
    assert all("at the edge of its grid" in each.evidence for each in others)
    assert "MIFA on digits: 0.6" in rates.evidence


def test_the_figure_has_a_panel_for_each_problem_with_the_best_method_first():
    data = invented(helpful)
    figure = ITEM.figure(data, ITEM.measure(data, FULL), FULL)
    assert [axes.get_title() for axes in figure.axes] == ["(a) synthetic", "(b) digits"]
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert set(names[:2]) == {"StaleVR", "StaleVRE"}
    assert set(names) == set(METHODS)
    assert figure.axes[0].yaxis_inverted()
    assert figure.get_size_inches()[0] <= 7.5
    mean, worst = figure.axes[1].containers
    place = names.index("FedFairMMFL")
    assert mean[0].get_xdata()[place] == pytest.approx(100 * 1.9 / 3, abs=0.5)
    assert worst[0].get_xdata()[place] == pytest.approx(40, abs=0.5)


def test_tables_fit_into_80_columns(monkeypatch, capsys):
    """Headers are broken over lines, but cells are not, even with the largest numbers."""
    data = invented(helpful)
    data["client_updates"] = 100 * data["client_updates"]
    data["test_accuracy"].loc[{"algorithm": "FedAST", "seed": list(range(1, 20, 2))}] /= 2
    findings = ITEM.findings(data, FULL)._replace(checks=())
    monkeypatch.setattr(terminal.console, "_width", 80)
    reproductions.show_findings("title", findings, "")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [row for table in findings.tables for row in table.rows]
    for row in rows:
        assert any(all(f" {cell} " in line for cell in row) for line in lines), row
    assert {"5000", "0.1, 0.1", "20"} <= {cell for row in rows for cell in row}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ["MFA"]}, "methods has 'MFA'; choose from FedAvg, one by one, MFA-Rand"),
        ({"problems": ["images"]}, "are in files; give --data DIR"),
        ({"problems": ["digits", "digits"]}, "repeats a value"),
        ({"learning_rates": [0.1, 0.1]}, "repeats a value"),
        ({"digits": {"num_clients": 6, "cohort_size": 7}}, "cohort_size is 7"),
        ({"directory": "there/is/no/such"}, "there/is/no/such"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        validate(type(ITEM.settings), ITEM.settings.model_dump() | change)
