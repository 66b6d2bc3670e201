"""All multi-model methods compared: in small, by hand, and judged on invented curves."""

import json

import jax
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import bandit, fedavg, simulate
from fedjax_mm.cli import terminal
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS, multi_compare
from fedjax_mm.plots import save_figure

ITEM = ITEMS["multi-compare"]
SMALL = validate(
    type(ITEM.settings),
    ITEM.settings.model_dump()
    | {
        "problems": ["synthetic", "digits"],
        "methods": ["bandit: rank list", "FedAST"],
        "synthetic": {"num_clients": 6, "cohort_size": 3, "local_steps": 2},
        "digits": {"num_clients": 6, "cohort_size": 2, "local_steps": 2},
        "num_rounds": 6,
        "num_seeds": 2,
        "record_every": 3,
    },
)


@pytest.fixture(scope="module")
def result():
    return ITEM.make(SMALL)


def test_a_small_instance_runs_from_the_data_to_the_figure(result, tmp_path):
    assert dict(result.sizes) == {"problem": 2, "algorithm": 2, "seed": 2, "round": 3, "model": 3}
    accuracy = result["test_accuracy"]
    there = accuracy.sel(problem="synthetic").isel(model=slice(2))
    assert ((there >= 0) & (there <= 1)).all()
    assert accuracy.sel(problem="synthetic").isel(model=2).isnull().all()
    assert accuracy.sel(problem="digits").notnull().all()
    trained = result["client_updates"].isel(round=-1).sum("model")
    # Bandits begin with a round of all 6 clients for each model.
    assert (trained.sel(problem="synthetic", algorithm="bandit: rank list") == 2 * 6 + 4 * 3).all()
    assert (trained.sel(problem="digits", algorithm="bandit: rank list") == 3 * 6 + 3 * 2).all()
    # As many as others have clients in a round, though three models have three jobs at least.
    assert (trained.sel(problem="synthetic", algorithm="FedAST") == 6 * 3).all()
    assert (trained.sel(problem="digits", algorithm="FedAST") == 6 * 2).all()
    time = result["time"]
    assert (time.isel(round=0, model=0) == 0).all()
    assert (time.isel(model=0).diff("round") > 0).all()
    assert json.loads(result.attrs["manifest"])["datasets"][0].startswith("synthetic")
    measured, claims, tables = ITEM.judge(result, SMALL)
    assert claims == ()  # nobody to compare with
    assert tables[0].header == ("problem", "models", "clients", "clients a round")
    assert tables[0].rows == (("synthetic", "2", "6", "3"), ("digits", "3", "6", "2"))
    titles = [table.title.split(":")[0] for table in tables[1:]]
    assert titles == ["synthetic", "synthetic", "digits", "digits"]
    assert {len(table.rows) for table in tables[1:]} == {2}
    assert measured["time"].notnull().all()
    assert not any("target" in name for name in measured)  # there is no MFA-Rand
    figure = ITEM.figure(result, measured, SMALL)
    save_figure(figure, tmp_path / "figure.png")
    assert len(figure.axes) == 12


def test_it_is_what_one_puts_together_by_hand(result):
    """One run by `simulate`, with the key and the draws of its seed; a clock changes nothing."""
    seed, problem = 1, SMALL.synthetic
    assignment = bandit(6, 2, cohort_size=3, policy="rank-list")
    algorithm = fedavg(problem.learning_rate, local_steps=2, batch_size=problem.batch_size)

    @jax.jit
    def run(key, data):
        tasks = problem.tasks([stack.select(seed) for stack in data])
        return simulate(key, tasks, algorithm, assignment, 6, record_every=3)[1]

    key = jax.random.fold_in(jax.random.key(SMALL.seed), seed)
    trace = run(key, problem.data(SMALL))
    expected = result.sel(problem="synthetic", algorithm="bandit: rank list", seed=seed)
    actual = expected["test_accuracy"].transpose("round", "model")[:, :2]
    np.testing.assert_allclose(actual, trace.metrics["test_accuracy"], atol=1e-6)
    updates = expected["client_updates"].transpose("round", "model")[:, :2]
    np.testing.assert_array_equal(updates, np.cumsum(trace.client_updates, axis=0))


METHODS = tuple(multi_compare.METHODS)
FULL = validate(
    type(ITEM.settings),
    ITEM.settings.model_dump()
    | {"problems": ["synthetic", "digits"], "num_rounds": 10, "num_seeds": 4, "record_every": 1},
)


def invented(accuracy, pace=1):
    """A result with ``accuracy(problem, method)`` for each of the models, which rises to the end.

    Seeds differ by a thousandth. A bandit trains ten clients a round, the others five. A round
    takes 2, that of FedAST its pace.
    """
    dims = "problem", "algorithm", "seed", "round", "model"
    coords = {
        "problem": ["synthetic", "digits"],
        "algorithm": list(METHODS),
        "seed": range(4),
        "round": range(11),
        "model": [1, 2, 3],
    }
    values = np.full([len(x) for x in coords.values()], np.nan)
    cost, time = np.zeros(values.shape, int), np.full(values.shape, np.nan)
    for p, problem in enumerate(coords["problem"]):
        for m, method in enumerate(METHODS):
            ends = np.array(accuracy(problem, method))
            noise = 1e-3 * np.arange(4)[:, None, None] * (1 + (m % 3))
            rise = np.minimum(np.arange(11) / 8, 1)[:, None]
            values[p, m, :, :, : len(ends)] = rise * ends + noise
            each = np.arange(11)[:, None] * (10 if method.startswith("bandit") else 5)
            cost[p, m, :, :, 0] = each[:, 0]
            lasts = pace if method == "FedAST" else 2
            time[p, m, ..., : len(ends)] = lasts * np.arange(11)[:, None]
    found = {"time": (dims, time)}
    found |= {"test_accuracy": (dims, values), "client_updates": (dims, cost)}
    found |= {"parameters_up": (dims, 100 * cost), "parameters_down": (dims, 150 * cost)}
    return xr.Dataset(found, coords)


def as_published(problem, method):
    """FedFair lifts the worst model; bandits that look and unequal sampling lift all."""
    base = {"synthetic": [0.5, 0.3], "digits": [0.8, 0.7, 0.3]}[problem]
    if method == "FedFairMMFL":
        return [*base[:-1], 0.4]
    better = {"LVR": 1, "GVR": 1, "StaleVR": 2, "StaleVRE": 2}
    better |= dict.fromkeys(multi_compare._BY_LOSSES, 1)
    return [x + 0.1 * better.get(method, 0) for x in base]


def test_scores_are_measured_at_the_end():
    measured = ITEM.measure(invented(as_published), FULL)
    here = measured["end per seed"].sel(seed=0)
    for method in ("MFA-Rand", "FedFairMMFL", "bandit: Pareto"):
        for problem in ("synthetic", "digits"):
            percent = 100 * np.array(as_published(problem, method))
            found = here.sel(problem=problem, algorithm=method)
            assert found.sel(score="mean") == pytest.approx(percent.mean())
            assert found.sel(score="worst") == pytest.approx(percent.min())
            assert found.sel(score="variance") == pytest.approx(percent.var())
    # A round of a bandit costs twice as much: 50 trainings are its round 5.
    equal = measured["at equal trainings per seed"].sel(seed=0, score="worst", problem="digits")
    assert equal.sel(algorithm="MFA-Rand") == pytest.approx(30)
    assert equal.sel(algorithm="bandit: Pareto") == pytest.approx(40 * 5 / 8)
    spent = measured["megabytes"].sel(problem="digits", algorithm="MFA-Rand")
    np.testing.assert_allclose(spent, 4 * 250 * 5 * np.arange(11) / 1e6)


def test_the_target_is_where_the_worse_of_both_ends():
    """FedAST ends at 55 % of MFA-Rand, which is there after 4.4 of its 8 rounds of rising."""

    def accuracy(problem, method):
        ends = np.array(as_published(problem, method))
        return (0.55 if method == "FedAST" else 0.5 if method == "MFA-RR" else 1) * ends

    measured = ITEM.measure(invented(accuracy, pace=3), FULL)
    here = measured.sel(seed=0, problem="digits")
    assert here["target per seed"] == pytest.approx(55 * np.mean([0.8, 0.7, 0.3]))
    taken = here["time to target per seed"]
    assert taken.sel(algorithm="MFA-Rand") == pytest.approx(2 * 4.4)
    assert taken.sel(algorithm="FedAST") == pytest.approx(3 * 8)
    assert taken.sel(algorithm="MFA-RR").isnull()
    assert measured["time"].sel(problem="digits", algorithm="FedAST").values.tolist() == [
        *range(0, 33, 3)
    ]
    problems, *_, costs = ITEM.table(measured, FULL)
    target = measured["target per seed"].sel(problem="digits").mean()
    assert problems.rows[1][:-1] == ("digits", "3", "30", "6")
    assert problems.rows[1][-1].startswith(f"{target:.1f} ± ")
    (row,) = (row for row in costs.rows if row[0] == "MFA-RR")
    assert row[-2:] == ("20", "not reached by all seeds")


def test_a_target_that_diverged_is_told_from_one_that_is_not_reached():
    def accuracy(problem, method):
        slow = {"MFA-RR": 0.5, "FedAST": 0.9, "MFA-Rand": 0.9}
        return slow.get(method, 1) * np.array(as_published(problem, method))

    data = invented(accuracy)
    data["test_accuracy"].loc[{"problem": "digits", "algorithm": "FedAST", "seed": 2}] = np.nan
    data["test_accuracy"].loc[{"problem": "synthetic", "algorithm": "LVR", "seed": 2}] = np.nan
    problems, _, synthetic, _, digits = ITEM.table(ITEM.measure(data, FULL), FULL)
    assert problems.rows[1][-1] == "diverged"
    assert {row[-1] for row in digits.rows} == {"target diverged"}
    ends = {row[0]: row[-1] for row in synthetic.rows}
    assert "target diverged" not in ends.values()
    # Of a method that diverged itself there is a target, which it does not reach.
    late = [method for method in METHODS if "not reached" in ends[method]]
    assert late == ["MFA-RR", "LVR"]


def reversed_(problem, method):
    """The worst model is worse with FedFair, and bandits do badly."""
    return [
        2 * b - x
        for x, b in zip(
            as_published(problem, method), as_published(problem, "MFA-Rand"), strict=True
        )
    ]


def test_claims_hold_or_fail_with_the_curves():
    for accuracy, pace, verdict in ((as_published, 1, "holds"), (reversed_, 3, "fails")):
        _, claims, _ = ITEM.judge(invented(accuracy, pace), FULL)
        assert len(claims) == 2 * (2 + 2 + 2 + 3 + 4 + 1)
        for claim in claims:
            is_level = "bandit: random is not below" in claim.claim
            assert claim.verdict == ("holds" if is_level else verdict), claim


def test_a_run_that_diverged_makes_claims_fail():
    data = invented(as_published)
    data["test_accuracy"].loc[{"problem": "digits", "algorithm": "FedFairMMFL", "seed": 2}] = np.nan
    _, claims, tables = ITEM.judge(data, FULL)
    failed = [claim.claim for claim in claims if claim.verdict == "fails"]
    assert failed
    assert all(text.startswith("digits: FedFairMMFL") for text in failed)
    assert len(failed) == 2
    assert ["diverged" in str(table.rows) for table in tables] == [False] * 3 + [True, False]
    assert sum("diverged" in row for row in tables[3].rows) == 1


def test_tables_are_read_at_80_columns(monkeypatch, capsys):
    """Headers are broken, but no cell is, with numbers as large as they come."""
    data = invented(as_published)
    data["client_updates"] = 100 * data["client_updates"]
    data["parameters_up"] = 10_000 * data["parameters_up"]
    data["test_accuracy"].loc[{"algorithm": "FedAST", "seed": [1, 3]}] /= 2
    findings = ITEM.judge(data, FULL)._replace(claims=())
    monkeypatch.setattr(terminal.console, "_width", 80)
    terminal.show_findings("title", findings, "")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [row for table in findings.tables for row in table.rows]
    for row in rows:
        assert any(all(f" {cell} " in line for cell in row) for line in lines), row
    assert {"10000", "400.1", "not reached by all seeds"} <= {cell for row in rows for cell in row}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ["MFA"]}, "methods has 'MFA'; choose from FedAvg, one by one, MFA-Rand"),
        ({"problems": ["images"]}, "are in files; give --data DIR"),
        ({"problems": ["digits", "digits"]}, "repeats a value"),
        ({"digits": {"num_clients": 6, "cohort_size": 7}}, "cohort_size is 7"),
        ({"directory": "there/is/no/such"}, "there/is/no/such"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        validate(type(ITEM.settings), ITEM.settings.model_dump() | change)
