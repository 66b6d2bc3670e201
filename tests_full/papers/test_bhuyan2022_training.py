"""Figures 6 and 7, Tables 4 and 5: verdicts on made-up curves, and small runs."""

import itertools
import json
import signal

import numpy as np
import pytest
import xarray as xr
from scipy.stats import kendalltau

from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS
from fedjax_mm.papers.bhuyan2022 import fig6_and_7
from fedjax_mm.papers.bhuyan2022.accuracy import TARGETS, rounds_to_targets
from fedjax_mm.papers.bhuyan2022.fig6_and_7 import median
from fedjax_mm.papers.bhuyan2022.gains import Limits
from fedjax_mm.plots import save_figure
from fedjax_mm.sweeps import Checkpoints, Execution, InterruptedRunError, progress
from tests.helpers import traced_once

ROUNDS = 10
SMALL = {"num_models": (1, 2, 4), "num_rounds": ROUNDS, "num_seeds": 3, "num_clients": 20}


GAIN, TABLE = ITEMS["mfa-fig6a"], ITEMS["mfa-table5"]


def gain_config(**changes):
    return validate(type(GAIN.settings), GAIN.settings.model_dump() | SMALL | changes)


def judge_gain(dataset, item=GAIN):
    return item.findings(dataset, gain_config(num_seeds=dataset.sizes["seed"]))


def verdicts(findings):
    """Maps the key of every statement to its verdict."""
    return {each.key: each.verdict for each in findings.statements}


def numbers(findings):
    """The same for printed numbers."""
    return {each.key: each.verdict for each in findings.numbers}


def curves(turns, *, top=0.51, majority=0.3, last=30, num_seeds=3):
    """Accuracies that reach `top` in round `turns[algorithm, M]`, or never if it is None.

    The last of M models reaches it one round after the others. LEAF's data equal FedProx's.
    """
    models, rounds = [1, 2, 4], np.arange(last + 1)
    accuracy = np.full((2, 3, num_seeds, last + 1, 4), np.nan)
    for a, label in enumerate(("MFA-Rand", "MFA-RR")):
        for i, m in enumerate(models):
            for model in range(m):
                turn = turns[label, m]
                first = last + 1 if turn is None else turn - (model < m - 1)
                accuracy[a, i, :, :, model] = np.where(rounds >= first, top, 0.2)
    dims = ("source", "algorithm", "num_models", "seed", "round", "model")
    coords = {
        "source": ["FedProx", "LEAF"],
        "algorithm": ["MFA-Rand", "MFA-RR"],
        "num_models": models,
        "seed": range(num_seeds),
        "round": rounds,
        "model": range(1, 5),
    }
    both, shares = np.stack([accuracy] * 2), np.full((2, num_seeds), majority)
    variables = {f"{part}_accuracy": (dims, both.copy()) for part in ("train", "test")}
    variables |= {f"{part}_majority": (("source", "seed"), shares) for part in ("train", "test")}
    variables["largest_share"] = ("source", "seed"), shares
    dataset = xr.Dataset(variables, coords)
    dataset.attrs["manifest"] = {"data": "synthetic", "datasets": ["curves"], "draws": num_seeds}
    return dataset


def turns(rand=(10, 15, 20), rr=(10, 12, 16)):
    both = {"MFA-Rand": rand, "MFA-RR": rr}
    return {
        (name, m): t for name, each in both.items() for m, t in zip((1, 2, 4), each, strict=True)
    }


def test_the_target_of_every_model_must_be_reached():
    accuracy = xr.DataArray(
        [[[0.1, 0.5], [0.6, 0.5], [0.6, 0.7]], [[0.1, 0.1]] * 3],
        {"seed": [0, 1], "round": [0, 5, 10], "model": [1, 2]},
    )
    targets = xr.DataArray([0.6, 0.6], {"seed": [0, 1]})
    np.testing.assert_array_equal(rounds_to_targets(accuracy, targets), [10, np.nan])
    easier = xr.DataArray([0.6, 0.5], {"model": [1, 2]})
    np.testing.assert_array_equal(rounds_to_targets(accuracy, easier), [5, np.nan])
    met_before = xr.DataArray([0.05, 0.05], {"model": [1, 2]})
    np.testing.assert_array_equal(rounds_to_targets(accuracy, met_before), [5, 5])


def test_gains_are_m_t1_over_tm():
    findings = judge_gain(curves(turns()))
    places = itertools.product(("FedProx", "LEAF"), ("train", "test"), TARGETS[:2])
    for source, part, target in places:
        here = findings.measured.sel(source=source, part=part, target=target)
        assert here.M.values.tolist() == [1, 2, 4]
        rand, rr = (here.sel(algorithm=name) for name in ("MFA-Rand", "MFA-RR"))
        np.testing.assert_allclose(rand.gain, [1, 20 / 15, 2])
        np.testing.assert_allclose(rr.gain, [1, 20 / 12, 2.5])
        np.testing.assert_allclose(rr.gain_standard_error, 0)
        assert rr.reached.values.tolist() == [3, 3, 3]
        np.testing.assert_allclose(here.accuracy_per_seed, 51)
        assert here.published == 51


MANY = 16  # seeds; a sign test needs at least 10


@pytest.mark.parametrize(
    ("change", "top", "expected"),
    [
        ({}, 0.51, {}),
        # The gain of two models is 20/21, below that of one.
        (
            {"rand": (10, 21, 20)},
            0.51,
            dict.fromkeys(("increases", "sub-linear", "advantageous"), "contradicted"),
        ),
        # Gains of 2 and 1.9: one of three pairs is out of order, so tau is 1/3.
        ({"rr": (10, 10, 21)}, 0.51, {"increases": "contradicted"}),
        # Gains of 2.2 and 5, which exceed M.
        ({"rr": (10, 9, 8)}, 0.51, {"sub-linear": "contradicted"}),
        # Gains equal to M, which are linear rather than below.
        ({"rr": (10, 10, 10)}, 0.51, {"sub-linear": "contradicted"}),
        # A target that is never reached: the gain of four is at most 4/3, and so below linear.
        (
            {"rr": (10, 12, None)},
            0.51,
            {"increases": "contradicted", "advantageous": "contradicted"},
        ),
        # The gain of two is at most 2/3, and that of four 2.5: the exponent is above 1.
        (
            {"rr": (10, None, 16)},
            0.51,
            dict.fromkeys(("increases", "sub-linear", "advantageous"), "contradicted"),
        ),
    ],
)
def test_statements_about_gains_are_decided_by_the_worse_algorithm(change, top, expected):
    findings = judge_gain(curves(turns(**change), top=top, num_seeds=MANY))
    keys = ("increases", "sub-linear", "advantageous")
    assert verdicts(findings) == dict.fromkeys(keys, "supported") | expected
    assert numbers(findings) == {"fedavg-accuracy": "agrees"}
    for each in findings.statements:
        assert len(each.parts) == (8 if each.key == "advantageous" else 4)
    assert "Spearman's rho" in findings.statements[1].about


def test_three_seeds_settle_no_median():
    found = verdicts(judge_gain(curves(turns())))
    assert found == dict.fromkeys(("increases", "sub-linear", "advantageous"), "not settled")


@pytest.mark.parametrize(
    ("apart", "spread", "word"),
    [
        (0, 0, "agrees"),
        (4, 5, "agrees"),
        (40, 5, "differs"),
        (15, 5, "too noisy"),
        (0, 20, "too noisy"),
    ],
)
def test_published_accuracies_are_those_of_one_draw(apart, spread, word):
    """Draws with a standard deviation of `spread` points around 51 and `apart` more."""
    dataset = curves(turns(), num_seeds=MANY)
    steps = np.linspace(-1, 1, MANY)
    off = xr.DataArray(apart + spread * steps / steps.std(ddof=1), dims="seed") / 100
    at_end = dataset["round"] >= 10
    for part in ("train", "test"):
        dataset[f"{part}_accuracy"] = dataset[f"{part}_accuracy"] + off.where(at_end, 0)
    assert numbers(judge_gain(dataset)) == {"fedavg-accuracy": word}


def test_one_generator_suffices_to_contradict():
    dataset = curves(turns(), num_seeds=MANY)
    leaf = curves(turns(rr=(10, 9, 8)), num_seeds=MANY)
    one = xr.concat([dataset.isel(source=[0]), leaf.isel(source=[1])], "source")
    found = next(each for each in judge_gain(one).statements if each.key == "sub-linear")
    parts = {part.name: part.verdict for part in found.parts}
    assert parts.pop("LEAF, MFA-RR") == "contradicted"
    assert [*parts.values()] == ["supported"] * 3


@pytest.mark.parametrize(
    ("rr", "contradicted"),
    [
        ((10, 12, 16), {"dips"}),  # 1, 1.67, 2.5
        ((10, 9, 20), {"for-the-most-part", "dips"}),  # 1, 2.2, 2: only half of the steps are up
        ((10, 21, 20), {"for-the-most-part", "above-one", "dips"}),  # 1, 0.95, 2
    ],
)
def test_partial_participation_has_dips(rr, contradicted):
    dataset = curves(turns(rr=rr), top=0.612, num_seeds=MANY)
    found = verdicts(judge_gain(dataset, ITEMS["mfa-fig7a"]))
    assert found.keys() == {"for-the-most-part", "dips", "above-one"}
    assert {key for key, verdict in found.items() if verdict == "contradicted"} == contradicted
    # MFA-Rand's gains never fall, and each algorithm must have dips.
    assert set(found.values()) <= {"supported", "contradicted"}


def test_limits_bound_every_value_of_an_unreached_gain():
    """A fifth of the gains of 5 numbers of models and 40 seeds is only known to be at most 2."""
    rng = np.random.default_rng(0)
    gains = xr.DataArray(rng.uniform(0, 4, (5, 40)), dims=("M", "seed"))
    reached = xr.DataArray(rng.random((5, 40)) > 0.2, dims=("M", "seed"))
    limits = Limits(gains.where(reached, 0.0), gains.where(reached, 2.0))
    guesses = np.where(reached, gains, rng.uniform(0, 2, (2000, 5, 40)))
    earlier, later = np.triu_indices(5, 1)
    tau = np.sign(guesses[:, later] - guesses[:, earlier]).mean(1)
    rising = (np.diff(guesses, axis=1) > 0).mean(1)
    least, most = ((tau.min(0), rising.min(0)), (tau.max(0), rising.max(0)))
    assert kendalltau(range(5), gains[:, 0]).statistic == pytest.approx(
        Limits(gains, gains).trend.low[0].item()
    )
    found = [limits.trend, Limits(*((each > 0).mean("pair") for each in limits.steps))]
    for (low, high), lowest, highest in zip(found, least, most, strict=True):
        assert (low <= lowest + 1e-9).all()
        assert (high >= highest - 1e-9).all()
        known = reached.all("M").values
        np.testing.assert_allclose(low[known], lowest[known])
        np.testing.assert_allclose(high[known], lowest[known])
    sides = limits.trend.decided(0.5)
    assert 0 < sides.isnull().sum() < 40
    assert (sides.notnull().values | ~reached.all("M").values).all()
    assert ((sides > 0.5).values <= (least[0] > 0.5)).all()
    assert ((sides < 0.5).values <= (most[0] < 0.5)).all()


@pytest.mark.parametrize(
    ("gains", "expected", "has_error"),
    [
        ([2.0, 4.0], 3.0, True),
        ([2.0], 2.0, False),
        ([1.0, 2.0, 3.0, np.nan], 1.5, False),
        ([1.0, np.nan], -np.inf, False),
        ([1.0, 5.0, 9.0], 5.0, True),
    ],
)
def test_medians_of_gains(gains, expected, has_error):
    """Unreached gains rank lowest, and one seed has no error."""
    value, error = median(xr.DataArray([gains], dims=("M", "seed")).fillna(-np.inf))
    np.testing.assert_array_equal(value, [expected])
    assert np.isfinite(error[0]) == has_error or len(gains) > 2


def test_an_unreached_target_is_reported_instead_of_clipped(tmp_path):
    dataset, config = curves(turns(rr=(10, 12, None))), gain_config()
    findings = GAIN.findings(dataset, config)
    last = findings.measured.sel(source="LEAF", part="train", algorithm="MFA-RR", M=4)
    assert np.isnan(last.gain).all()
    assert np.isnan(last.gain_standard_error).all()
    assert last.reached.values.tolist() == [0] * 2
    table, levels, largest = findings.tables
    assert table.header == ("source", "part", "target", "algorithm", "M = 1", "M = 2", "M = 4")
    assert [row[2] for row in table.rows[::2]] == ["g", "g'"] * 4
    cells = [row[-1] for row in table.rows]
    assert cells == ["2.00 ± 0.00", "no median\nnot reached\nin 3 of 3"] * 8
    assert levels.rows[0] == ("FedProx", "train", "51.0 ± 0.0 (51)", "30.0")
    # The mean of g / M at M = 2 and 4, in which MFA-RR's gain at M = 4 counts as 0.
    assert [row[1:6] for row in largest.rows[:2]] == [
        ("MFA-Rand", "30 %", "30 %", "30 %", "0.58"),
        ("MFA-RR", "30 %", "30 %", "30 %", "0.42"),
    ]
    assert largest.rows[0][6:] == ("none", "none")
    save_figure(GAIN.figure(dataset, findings.measured, config), tmp_path / "figure.png")


def test_the_figure_shows_gains_on_training_and_test_examples():
    dataset, config = curves(turns()), gain_config()
    findings = GAIN.findings(dataset, config)
    axes = GAIN.figure(dataset, findings.measured, config).axes
    titles = [each.get_title().partition(" ")[-1] for each in axes]
    assert titles == [f"{x}, {part}" for x in ("FedProx", "LEAF") for part in ("train", "test")]
    for panel in axes:
        drawn = {bars.get_label(): bars[0].get_ydata() for bars in panel.containers}
        np.testing.assert_allclose(drawn["MFA-RR"], [1, 20 / 12, 2.5])
        np.testing.assert_allclose(drawn["g = M"], [1, 4])


def plain_gain(alone, models, window, target):
    """M T_1 / T_M from lists of accuracies by round, of FedAvg and of M models."""

    def mean(curve, t):
        return sum(curve[t - window + 1 : t + 1]) / window

    def at(curve, t):
        return curve[t] if target != "window" else mean(curve, t)

    first, end = (window if target == "window" else 1), len(alone[0]) - 1
    goals = [at(curve, end) for curve in alone]
    own = [
        next(t for t in range(first, end + 1) if at(curve, t) >= goal)
        for curve, goal in zip(alone, goals, strict=True)
    ]
    if target == "g":
        own = [end] * len(own)
    for t in range(first, len(models[0])):
        if all(at(c, t) >= goal for c, goal in zip(models, goals, strict=True)):
            return sum(own) / t
    return np.nan


def noisy(dataset, seed=0):
    """Replaces accuracies by noisy multiples of 1/64, so that many are equal."""
    rng, noisy = np.random.default_rng(seed), dataset.copy(deep=True)
    for name in ("train_accuracy", "test_accuracy"):
        rise = np.linspace(0.2, 0.5, dataset.sizes["round"])[:, None]
        drawn = np.round(64 * (rise + 0.15 * rng.standard_normal(dataset[name].shape))) / 64
        noisy[name] = dataset[name].copy(data=np.where(dataset[name].isnull(), np.nan, drawn))
    return noisy


@pytest.mark.parametrize("window", [1, 4, 10])
def test_all_gains_equal_those_of_plain_loops(window):
    dataset = noisy(curves(turns()), window + 40)
    # LEAF's data equal FedProx's here.
    measured = GAIN.findings(dataset, gain_config(window=window, stop=False)).measured
    missed = 0
    places = itertools.product(("train", "test"), TARGETS, measured.algorithm.values, (1, 2, 4))
    for part, target, algorithm, m in places:
        for seed in range(3):
            at = {"source": "LEAF", "algorithm": algorithm, "seed": seed}
            run = dataset[f"{part}_accuracy"].sel(at)
            alone = run.sel(num_models=1, model=1, round=slice(ROUNDS)).values.tolist()
            models = run.sel(num_models=m).transpose("model", "round").values[:m].tolist()
            expected = plain_gain([alone] * m, models, window, target)
            found = measured.gain_per_seed.sel(at | {"part": part, "target": target, "M": m})
            np.testing.assert_allclose(found, expected, rtol=1e-12)
            missed += np.isnan(expected)
    of_leaf = measured.sel(source="LEAF")
    assert 0 < missed < of_leaf.gain_per_seed.size
    assert of_leaf.reached.sum() == of_leaf.gain_per_seed.size - missed


def test_the_gain_of_one_model_is_1_for_first_hit_targets():
    """The paper's g is above 1, because FedAvg reaches the target before round T_1."""
    config = gain_config(window=4, stop=False)
    one = GAIN.findings(noisy(curves(turns())), config).measured.sel(M=1)
    for target in ("g'", "window"):
        np.testing.assert_array_equal(one.gain_per_seed.sel(target=target), 1)
    assert (one.gain_per_seed.sel(target="g") >= 1).all()
    assert one.gain_per_seed.sel(target="g").mean() > 1.5


def test_a_lucky_round_does_not_change_the_window_gain():
    """All four models reach FedAvg's accuracy by chance in round 3, and again from round 16 on."""
    steady = curves(turns(rand=(5, 15, 20), rr=(5, 12, 16)))
    lucky, config = steady.copy(deep=True), gain_config(window=4, stop=False)
    for part in ("train", "test"):
        rr = lucky[f"{part}_accuracy"].sel(algorithm="MFA-RR", num_models=4, round=3)
        rr[...] = 0.51
    at = {"source": "LEAF", "algorithm": "MFA-RR", "M": 4}
    gains = GAIN.findings(lucky, config).measured.gain.sel(at)
    without = GAIN.findings(steady, config).measured.gain.sel(at)
    for found, expected in ((gains, [40 / 3, 20 / 3, 32 / 19]), (without, [2.5, 1.25, 32 / 19])):
        np.testing.assert_allclose(found, [expected] * 2)


def test_runs_that_stop_at_their_targets_have_no_window_gain():
    assert judge_gain(curves(turns())).measured.target.values.tolist() == ["g", "g'"]
    all_rounds = GAIN.findings(curves(turns()), gain_config(stop=False))
    assert all_rounds.measured.target.values.tolist() == [*TARGETS]


def reproduce(name, tmp_path, run_cli, *options):
    code = run_cli("reproduce", name, "--out", tmp_path, *options)
    assert code in (0, 3)
    summary = json.loads((tmp_path / name / "summary.json").read_text())
    assert (tmp_path / name / "figure.png").stat().st_size > 10_000
    with xr.open_dataset(tmp_path / name / "result.nc") as dataset:
        return summary, dataset.load()


@pytest.fixture
def run_cli():
    from fedjax_mm.cli import main

    def run(*arguments):
        with pytest.raises(SystemExit) as exit_:
            main(["--no-cache", *map(str, arguments)])
        return exit_.value.code

    return run


def test_a_small_gain_figure(tmp_path, run_cli):
    """Large batches keep the number of steps per epoch small."""
    both = (
        '[{name="synthetic", batch_size=200}, {name="synthetic", generator="leaf", batch_size=200}]'
    )
    options = ["--rounds", 4, "--seeds", 2, "--clients", 4, "--set", "num_models=[1, 2]"]
    options += ["--set", f"learners={both}", "--set", "stop=false"]
    summary, dataset = reproduce("mfa-fig6a", tmp_path, run_cli, *options)
    assert summary["data"] == "synthetic"
    assert summary["manifest"]["datasets"] == ["synthetic(1, 1)", "synthetic (LEAF)"]
    assert dict(dataset.sizes) == {
        "source": 2,
        "algorithm": 2,
        "num_models": 2,
        "seed": 2,
        "round": 9,
        "model": 2,
    }
    assert not np.array_equal(*dataset.train_accuracy.isel(num_models=1))
    assert (dataset.largest_share > dataset.largest_share.mean()).any()
    dataset = dataset.sel(source="FedProx")
    single = dataset.train_accuracy.sel(num_models=1)
    np.testing.assert_array_equal(single[0], single[1])  # with one model both are FedAvg
    assert not np.array_equal(*single.isel(algorithm=0, model=0, round=4).values[:, None])
    assert single.sel(model=2).isnull().all()
    assert single.sel(round=slice(5, None)).isnull().all()  # FedAvg has T_1 rounds
    # Windows are known for all rounds of the budget.
    assert dataset.train_accuracy.sel(num_models=2).notnull().all()
    assert summary["measured"]["coords"]["target"]["data"] == [*TARGETS]
    gains = np.asarray(summary["measured"]["data_vars"]["gain"]["data"], float)
    np.testing.assert_array_equal(gains[:, :, 1:, :, 0], 1)
    assert (dataset.diverged.sel(num_models=2) == -1).all()


def check_ends(dataset):
    """Checks that runs of two models end as soon as both reach FedAvg's accuracy."""
    last = int(dataset["round"][-1])
    short = xr.concat(
        [
            dataset[name].sel(num_models=1, model=1, round=4) - dataset[name].sel(num_models=2)
            for name in ("train_accuracy", "test_accuracy")
        ],
        "part",
    ).max(("part", "model"), skipna=False)
    curves = short.stack(run=("algorithm", "seed")).transpose("run", "round").values
    assert (curves[:, 0] > 0).any()
    for curve in curves:
        end = np.flatnonzero(np.isfinite(curve))[-1]
        if curve[0] <= 0:  # FedAvg learned nothing, so that no target ends the run
            assert end == last
            continue
        assert (curve[:end] > 0).all()
        assert end == last or curve[end] <= 0


@traced_once()
def test_an_interrupted_gain_figure_resumes_without_fedavg(tmp_path, monkeypatch):
    """FedAvg on one model sets the targets and is not computed again."""
    monkeypatch.setattr(fig6_and_7, "_ALGORITHMS", ("MFA-RR",))  # each one has six programs
    item = ITEMS["mfa-fig6a"]
    small = {"num_models": (1, 2), "num_rounds": 4, "num_seeds": 2, "num_clients": 4, "stop": True}
    small["learners"] = [item.settings.learners[0].model_dump() | {"batch_size": 200}]
    config = validate(type(item.settings), item.settings.model_dump() | small)
    expected, done = item.run(config, None), []

    def stop(label, so_far, total):
        if "num_models=2" in label and so_far > 0 and not done:
            done.append(label)
            signal.raise_signal(signal.SIGINT)

    with Checkpoints(tmp_path / "saved") as saved, pytest.raises(InterruptedRunError):
        item.run(config, Execution(checkpoints=saved, callbacks=[progress(stop)], save_every=0))
    seen = []
    with Checkpoints(tmp_path / "saved", resume=True) as saved:
        how = Execution(checkpoints=saved, callbacks=[progress(lambda *each: seen.append(each))])
        result = item.run(config, how)
        saved.discard()
    assert not list((tmp_path / "saved").rglob("part-*"))
    xr.testing.assert_identical(result.drop_attrs(deep=False), expected.drop_attrs(deep=False))
    assert not [label for label, *_ in seen if "num_models=1" in label]
    check_ends(result.sel(source="FedProx"))


def test_partial_participation_may_be_redrawn_every_round():
    item = ITEMS["mfa-fig7a"]
    assert item.settings.redraw == "frame"
    assert any("redraw = round" in text for text in item.paper["open"])
    validate(type(item.settings), item.settings.model_dump() | {"redraw": "round"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mfa-fig3", "--data", "."], "mfa-fig3: it uses no files"),
        (["mfa-fig6a", "--data", "."], "Synthetic is drawn; leave out --data"),
        (["mfa-fig6c", "--data", "."], "no list_attr_celeba.txt"),
        (["mfa-fig6c", "--data", "nowhere"], "directory nowhere does not exist"),
        (["mfa-fig6a", "--set", 'learners=[{name="faces"}, {name="faces"}]'], "data of its own"),
        (["mfa-fig6a", "--clients", "10"], "num_models is 16, more than the clients"),
        (["mfa-fig7a", "--clients", "20"], "cohort_size is 32"),
        (["mfa-fig6a", "--set", "num_models=[2, 4]"], "it must increase from 1"),
    ],
)
def test_wrong_settings_are_refused(arguments, words, run_cli, capsys, tmp_path):
    assert run_cli("reproduce", *arguments, "--out", tmp_path / "out") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
