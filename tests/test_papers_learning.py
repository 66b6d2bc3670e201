"""Figures 6 and 7, Tables 4 and 5: judgements where the answer is known, and small runs."""

import json
import signal

import numpy as np
import pytest
import xarray as xr

from fedjax_mm import Checkpoints, Execution, InterruptedRunError
from fedjax_mm.experiments.experiment import validate
from fedjax_mm.papers import REPRODUCTIONS
from fedjax_mm.papers.bhuyan2022.accuracy import rounds_to_targets, verdict
from fedjax_mm.papers.bhuyan2022.gain import _median, judge_gain, plot_gain
from fedjax_mm.papers.bhuyan2022.together import judge_together, plot_together
from fedjax_mm.papers.old import Claim, Judgement
from fedjax_mm.results.plots import save_figure

ROUNDS = 10
SMALL = {"num_models": (1, 2, 4), "num_rounds": ROUNDS, "num_seeds": 3, "num_clients": 20}


def gain_config(**changes):
    item = REPRODUCTIONS["mfa-fig6a"]
    return validate(type(item.config), item.config.model_dump() | SMALL | changes)


def curves(turns, *, top=0.51, majority=0.3, data="synthetic", last=30):
    """Accuracies that reach `top` in the round that `turns[algorithm, M]` says, or never if None.

    Of M models the last is the latest; the others are there a round before.
    """
    models, rounds = [1, 2, 4], np.arange(last + 1)
    accuracy = np.full((2, 3, 3, last + 1, 4), np.nan)
    for a, label in enumerate(("MFA-Rand", "MFA-RR")):
        for i, m in enumerate(models):
            for model in range(m):
                turn = turns[label, m]
                first = last + 1 if turn is None else turn - (model < m - 1)
                accuracy[a, i, :, :, model] = np.where(rounds >= first, top, 0.2)
    dims = ("algorithm", "num_models", "seed", "round", "model")
    coords = {
        "algorithm": ["MFA-Rand", "MFA-RR"],
        "num_models": models,
        "seed": range(3),
        "round": rounds,
        "model": range(1, 5),
    }
    variables = {f"{part}_accuracy": (dims, accuracy.copy()) for part in ("train", "test")}
    variables |= {f"{part}_majority": ("seed", np.full(3, majority)) for part in ("train", "test")}
    dataset = xr.Dataset(variables, coords)
    dataset.attrs["manifest"] = {"data": data, "datasets": ["curves"], "draws": 3}
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
    judgement = judge_gain(curves(turns()), gain_config())
    for part in ("train", "test"):
        gains = judgement.measured["gain"][part]
        np.testing.assert_allclose(gains["MFA-Rand"]["median"], [1, 20 / 15, 2])
        np.testing.assert_allclose(gains["MFA-RR"]["median"], [1, 20 / 12, 2.5])
        np.testing.assert_allclose(gains["MFA-RR"]["standard_error"], 0)
        assert gains["MFA-RR"]["reached"].tolist() == [3, 3, 3]
    assert all(claim.holds for claim in judgement.claims)
    assert judgement.measured["fedavg"]["train"]["accuracy"] == pytest.approx(51)


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({"rand": (10, 21, 20)}, "above 1"),
        ({"rr": (10, 12, 30)}, "increases"),
        ({"rr": (10, 9, 16)}, "sub-linear"),
        ({"rr": (10, 18, 24)}, "not below MFA-Rand"),
        ({"rand": (10, 15, None)}, "above 1"),
        ({"rand": (10, 15, 20), "rr": (10, 12, None)}, "not below MFA-Rand"),
        ({"rand": (10, 15, None), "rr": (10, 12, None)}, "not below MFA-Rand"),
    ],
)
def test_a_claim_can_fail(change, fails):
    judgement = judge_gain(curves(turns(**change)), gain_config())
    failed = [claim.claim for claim in judgement.claims if not claim.holds]
    assert any(fails in claim for claim in failed)
    assert not any("FedAvg" in claim.split(":")[0] for claim in failed)


def test_the_verdict_names_what_fails_and_tells_of_others_only_if_there_are_any():
    good, bad = Claim("one", True, ""), Claim("two", False, "")
    texts = [verdict(Judgement({}, claims, ())) for claims in ((good,), (good, bad), (bad,))]
    assert texts == [
        "All claims hold.",
        "DOES NOT HOLD: two. The other claims hold.",
        "DOES NOT HOLD: two.",
    ]


def test_only_rr_reaching_its_targets_is_ahead():
    judgement = judge_gain(curves(turns(rand=(10, 15, None))), gain_config())
    ahead = [claim for claim in judgement.claims if "not below MFA-Rand" in claim.claim]
    assert all(claim.holds for claim in ahead)


def test_seeds_that_were_not_reached_forgive_nothing():
    """Of an infinite spread nothing is known; a claim must not hold because of it."""
    dataset = curves(turns(rr=(10, 18, 24)))
    rand = dataset.train_accuracy.sel(algorithm="MFA-Rand", num_models=4, seed=0)
    rand[...] = np.where(np.isnan(rand), np.nan, 0.2)  # never
    claims = judge_gain(dataset, gain_config()).claims
    (ahead,) = [c for c in claims if "train: MFA-RR's gain is not below" in c.claim]
    assert not ahead.holds
    assert len(ahead.evidence) < 200


@pytest.mark.parametrize(
    ("gains", "median", "has_error"),
    [
        ([2.0, 4.0], 3.0, True),
        ([2.0], 2.0, False),
        ([1.0, 2.0, 3.0, np.nan], 1.5, False),
        ([1.0, np.nan], np.nan, False),
        ([1.0, 5.0, 9.0], 5.0, True),
    ],
)
def test_medians(gains, median, has_error):
    """What was not reached is below everything; one seed has no error."""
    value, error = _median(np.array([gains]))
    np.testing.assert_array_equal(value, [median])
    assert np.isfinite(error[0]) == has_error or len(gains) > 2


@pytest.mark.parametrize(
    ("change", "fails"),
    [({"top": 0.7}, "published"), ({"majority": 0.45}, "most frequent class")],
)
def test_a_level_claim_can_fail(change, fails):
    judgement = judge_gain(curves(turns(), **change), gain_config())
    (failed,) = [claim.claim for claim in judgement.claims if not claim.holds]
    assert fails in failed


def test_a_surrogate_is_not_compared_with_published_accuracies():
    claims = judge_gain(curves(turns(), data="surrogate"), gain_config()).claims
    assert not any("published" in claim.claim for claim in claims)


def test_what_is_not_reached_is_said_and_not_clipped(tmp_path):
    dataset, config = curves(turns(rr=(10, 12, None))), gain_config()
    judgement = judge_gain(dataset, config)
    assert np.isnan(judgement.measured["gain"]["train"]["MFA-RR"]["median"][-1])
    assert judgement.measured["gain"]["train"]["MFA-RR"]["reached"][-1] == 0
    assert any("not reached\nin 3 of 3" in row for row in judgement.table)
    save_figure(plot_gain(dataset, config, judgement), tmp_path / "figure.png")


def together(alone, reached, last=8):
    """Accuracies of two models: alone after their turns of 4 rounds, together from a round on."""
    rounds = np.arange(last + 1)
    accuracy = np.full((2, 2, last + 1, 2), 0.1)
    for model in range(2):
        accuracy[0, :, :, model] = np.where(rounds >= 4 * (model + 1), alone[model], 0.1)
        accuracy[1, :, :, model] = np.where(rounds >= reached[model], 0.9, 0.1)
    dims = ("algorithm", "seed", "round", "model")
    coords = {
        "algorithm": ["FedAvg, one by one", "MFA-RR"],
        "seed": [0, 1],
        "round": rounds,
        "model": [1, 2],
    }
    variables = {f"{part}_accuracy": (dims, accuracy) for part in ("train", "test")}
    variables |= {f"{part}_majority": ("model", [0.5, 0.5]) for part in ("train", "test")}
    dataset = xr.Dataset(variables, coords)
    dataset.attrs["manifest"] = {"data": "surrogate", "datasets": ["one", "two"]}
    return dataset


@pytest.mark.parametrize(
    ("reached", "rounds", "gain", "holds"),
    [((3, 5), 5, 8 / 5, True), ((3, 9), np.nan, np.nan, False)],
)
def test_models_of_a_table_are_judged_by_their_own_targets(tmp_path, reached, rounds, gain, holds):
    item = REPRODUCTIONS["mfa-table5"]
    config = validate(type(item.config), item.config.model_dump() | {"num_rounds": 4})
    dataset = together((0.6, 0.8), reached)
    judgement = judge_together(dataset, config)
    for part in ("train", "test"):
        measured = judgement.measured[part]
        np.testing.assert_array_equal(measured["rounds"], [rounds] * 2)
        np.testing.assert_allclose(measured["gain"], [gain] * 2)
        np.testing.assert_allclose(measured["alone"], [60, 80])
    assert [claim.holds for claim in judgement.claims] == [holds, holds, True]
    assert any(("not reached" in cell) != holds for cell in judgement.table[-1])
    save_figure(plot_together(dataset, config, judgement), tmp_path / "figure.png")


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
    """Large batches, since what an epoch costs are its steps."""
    options = ["--rounds", 4, "--seeds", 2, "--clients", 4, "--set", "num_models=[1, 2]"]
    options += ["--set", "learner.batch_size=200"]
    summary, dataset = reproduce("mfa-fig6a", tmp_path, run_cli, *options)
    assert summary["data"] == "synthetic"
    assert dict(dataset.sizes) == {
        "algorithm": 2,
        "num_models": 2,
        "seed": 2,
        "round": 13,
        "model": 2,
    }
    single = dataset.train_accuracy.sel(num_models=1)
    np.testing.assert_array_equal(single[0], single[1])  # with one model both are FedAvg
    assert not np.array_equal(*single.isel(algorithm=0, model=0, round=4).values[:, None])
    assert single.sel(model=2).isnull().all()
    assert single.sel(round=slice(5, None)).isnull().all()  # FedAvg has T_1 rounds
    check_ends(dataset)


def check_ends(dataset):
    """Several models end in the first round in which they are as good as one was after T_1."""
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
        if curve[0] <= 0:  # nothing was learned alone: there is no target
            assert end == last
            continue
        assert (curve[:end] > 0).all()
        assert end == last or curve[end] <= 0


def test_an_interrupted_gain_figure_goes_on_with_several_models(tmp_path):
    """FedAvg on one model, which sets the targets, is not computed again."""
    item = REPRODUCTIONS["mfa-fig6a"]
    small = {"num_models": (1, 2), "num_rounds": 4, "num_seeds": 2, "num_clients": 4}
    small["learner"] = item.config.learner.model_dump() | {"batch_size": 200}
    config = validate(type(item.config), item.config.model_dump() | small)
    expected, done = item.run(config, None), []

    def stop(label, so_far, total):
        if "num_models=2" in label and so_far > 0 and not done:
            done.append(label)
            signal.raise_signal(signal.SIGINT)

    with Checkpoints(tmp_path / "saved") as saved, pytest.raises(InterruptedRunError):
        item.run(config, Execution(checkpoints=saved, progress=stop, save_every=0))
    seen = []
    with Checkpoints(tmp_path / "saved", resume=True) as saved:
        how = Execution(checkpoints=saved, progress=lambda *each: seen.append(each))
        result = item.run(config, how)
        saved.discard()
    assert not list((tmp_path / "saved").rglob("part-*"))
    xr.testing.assert_identical(result.drop_attrs(deep=False), expected.drop_attrs(deep=False))
    assert not [label for label, *_ in seen if "num_models=1" in label]
    check_ends(result)


def test_a_small_table_of_different_models_is_one_program(tmp_path, run_cli):
    """A logistic regression and a CNN train in one compiled round."""
    learners = '[{name="synthetic", batch_size=200}, {name="faces", image_size=16, batch_size=50}]'
    options = ["--rounds", 1, "--seeds", 1, "--clients", 2, "--set", f"learners={learners}"]
    summary, dataset = reproduce("mfa-table5", tmp_path, run_cli, *options)
    assert summary["data"] == "surrogate"
    assert dataset.sizes["model"] == 2
    assert dataset.name.values.tolist() == ["Logistic regression", "Eyeglasses"]
    assert set(summary["paper"]["values"]) == set(dataset.name.values)


def test_models_that_learn_nothing_are_said_to():
    item = REPRODUCTIONS["mfa-table5"]
    config = validate(type(item.config), item.config.model_dump() | {"num_rounds": 4})
    level = judge_together(together((0.6, 0.55), (3, 5)), config).claims[-1]
    assert not level.holds
    assert "+10.0, +5.0" in level.evidence


def test_the_papers_reading_of_partial_participation_can_be_run():
    item = REPRODUCTIONS["mfa-fig7a"]
    assert item.config.redraw == "frame"
    assert any("redraw = round" in text for text in item.paper["open"])
    validate(type(item.config), item.config.model_dump() | {"redraw": "round"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mfa-fig3", "--data", "."], "mfa-fig3: it uses no files"),
        (["mfa-fig6c", "--data", "nowhere"], "there is no such directory"),
        (["mfa-fig6a", "--clients", "10"], "num_models is 16, more than the clients"),
        (["mfa-fig7a", "--clients", "20"], "cohort_size is 32"),
        (["mfa-fig6a", "--set", "num_models=[2, 4]"], "it must increase from 1"),
    ],
)
def test_wrong_settings_are_refused(arguments, words, run_cli, capsys, tmp_path):
    assert run_cli("reproduce", *arguments, "--out", tmp_path / "out") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
