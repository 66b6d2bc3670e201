"""Reproductions: settings, verdicts on data with known answers, and figures."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from scipy.stats import t as student

from fedjax_mm import papers, plots
from fedjax_mm.claims.evidence import LEVEL
from fedjax_mm.experiments.optimizers import InverseTime
from fedjax_mm.papers import ALL, BOUNDS, ITEMS
from fedjax_mm.papers.bhuyan2022.fig1_to_4 import Comparison, jackknife
from fedjax_mm.papers.bhuyan2022.fig5 import GainSweep
from fedjax_mm.plots import sweep_overview

LABELS = ("MFA-Rand", "MFA-RR")


COMPARISONS = [f"mfa-fig{number}" for number in range(1, 5)]


CURVES, GAIN = ITEMS["mfa-fig3"], ITEMS["mfa-fig5"]


judge_comparison, judge_gain = CURVES.findings, GAIN.findings


def swapped(dataset):
    """The curves with the labels of the two algorithms exchanged."""
    return dataset.assign_coords(algorithm=list(LABELS[::-1])).sel(algorithm=list(LABELS))


def verdicts(findings):
    """Maps the key of every statement to its verdict."""
    return {each.key: each.verdict for each in findings.statements}


def sources():
    """Yields the name and the source of every module of `fedjax_mm.papers`."""
    root = Path(papers.__file__).parent
    for path in sorted(root.rglob("[a-z]*.py")):
        name = ".".join(("fedjax_mm.papers", *path.relative_to(root).with_suffix("").parts))
        yield name, path.read_text()


def test_ids_are_unique_and_in_order():
    """The order is by paper, with theory last, and by the numbers in an id."""
    own = (
        "compression-curve",
        "methods-compare",
        "multi-attributes",
        "multi-compare",
        "multi-jct",
        "multi-maxfl",
        "private-curve",
        "robust-curve",
        "theory-later",
        "topology-edges",
        "topology-gossip",
    )
    papers = ("bhuyan2022", "cho2022", "pawlik2020", *own)

    def place(name):
        folder = type(ITEMS[name].settings).__module__.split(".")[2]
        numbers = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
        return papers.index(name if name in own else folder), name.startswith("theory"), numbers

    assert list(ITEMS) == sorted(ITEMS, key=place)
    assert len({ITEMS.title(name) for name in ITEMS}) == len(ITEMS)


def test_every_reproduced_figure_and_table_is_an_item():
    """No other test would notice a missing item."""
    mfa = {f"fig{number}" for number in (*range(1, 6), "6a", "6b", "6c", "7a", "7b", "7c")}
    maxfl = {f"fig{number}" for number in (3, 4, "5a", "5b", 6, 7, 8)}
    wanted = {f"mfa-{name}" for name in mfa | {"table4", "table5"}}
    wanted |= {f"maxfl-{name}" for name in maxfl | {f"table{number}" for number in range(1, 7)}}
    wanted |= {f"cb-{name}" for name in ("fig1", "fig2", "fig3", "table1", "optimal-cohort")}
    theory = ("gain", "mfa-rand", "mfa-rr", "mfa-growing", "remarks", "maxfl", "cohort-noise")
    wanted |= {f"theory-{name}" for name in (*theory, "cohorts")}
    ours = {"maxfl-literal", "maxfl-literal-qffl"} | {
        f"maxfl-{name}" for name in ("attackers", "demand", "fixed", "flexible", "flips", "weights")
    }
    ours |= {"compression-curve", "private-curve", "robust-curve"} | {
        f"multi-{name}" for name in ("attributes", "compare", "maxfl")
    }
    assert wanted | ours <= set(ITEMS)


def test_every_item_of_a_module_is_in_the_catalogue():
    modules = [
        importlib.import_module(name) for name, source in sources() if "\nITEMS = (" in source
    ]
    imported = {item.id: module for module in modules for item in module.ITEMS}
    assert imported.keys() == set(ALL)
    for name, module in imported.items():
        assert ALL[name] in module.ITEMS
        assert ALL[name].id == name
        assert ALL[name].title == ALL.title(name)
    assert {BOUNDS[name].id for name in BOUNDS} == {"bounds-mfa"}


def test_the_settings_are_those_of_the_paper():
    """Section 6 has N = 24, E = 5, 20 runs of 1000 rounds, and constant and decaying rates."""
    rates = {"mfa-fig1": 0.1, "mfa-fig2": InverseTime(beta=30, gamma=100), "mfa-fig3": 0.1}
    rates["mfa-fig4"] = InverseTime(beta=30, gamma=99, per="frame")
    num_models = {"mfa-fig1": 2, "mfa-fig2": 2, "mfa-fig3": 12, "mfa-fig4": 12}
    assert list(rates) == COMPARISONS
    for name in COMPARISONS:
        config = ITEMS[name].settings
        assert (config.num_models, config.learning_rate) == (num_models[name], rates[name])
        assert (config.num_rounds, config.num_seeds, config.local_steps) == (1000, 20, 5)
        experiment = config.at(config.num_models, config.local_steps)
        assert (experiment.task.num_clients, experiment.num_models) == (24, num_models[name])
        assignments = {
            label: algorithm.assignment.name for label, algorithm in experiment.algorithms.items()
        }
        assert assignments == {"MFA-Rand": "mfa_rand", "MFA-RR": "mfa_rr"}
        rand, rr = experiment.algorithms.values()
        assert rand.model_copy(update={"assignment": rr.assignment}) == rr
        assert rr.learning_rate == rates[name]


def test_the_gain_is_swept_over_numbers_of_models_and_steps():
    config = GainSweep()
    experiment = config.at(3, 10)
    assert experiment.num_models == 3
    assert [a.local_steps for a in experiment.algorithms.values()] == [10, 10]
    assert (config.num_models, config.local_steps) == ((1, 2, 3, 4, 6, 8, 12), (1, 5, 10))


SEEDS = 24
NOISE = np.resize([-1.5, -0.5, 0.5, 1.5], SEEDS)
NOISE_STD = NOISE.std(ddof=1)


def comparison(num_models, *, advantage, rand_scale, rr_scale):
    """Curves that are constant in the last fifth of 10 rounds, with RR better by `advantage`.

    Seed s adds its noise to the odd models and minus half of it to the even ones. The mean over
    models then varies by a quarter of the scale, a model on average by three quarters. Before the
    last fifth, the algorithms are exchanged and the values multiplied by -10.
    """
    of_model = np.resize([1.0, -0.5], num_models)
    noise = NOISE[:, None, None] * of_model
    last = np.stack([rand_scale * noise - 2.0, rr_scale * noise - 2.0 - advantage])
    before = -10 * last[::-1]
    gap = np.concatenate([np.repeat(before, 9, axis=2), np.repeat(last, 2, axis=2)], axis=2)
    coords = {"algorithm": list(LABELS), "seed": range(SEEDS), "round": range(11)}
    coords["model"] = range(1, num_models + 1)
    dims = ("algorithm", "seed", "round", "model")
    config = Comparison(num_models=num_models, learning_rate=0.1, num_rounds=10, num_seeds=SEEDS)
    return labelled({"gap": (dims, gap)}, coords), config


def labelled(variables, coords):
    """A result with a manifest."""
    return xr.Dataset(variables, coords, {"manifest": {"data": "synthetic"}})


def test_means_and_spreads_are_measured_on_the_last_fifth():
    findings = judge_comparison(*comparison(12, advantage=0.5, rand_scale=0.4, rr_scale=0.04))
    for label, mean, scale in (("MFA-Rand", -2.0, 0.4), ("MFA-RR", -2.5, 0.04)):
        here = findings.measured.drop_dims("seed").sel(algorithm=label, drop=True)
        assert {name: x.item() for name, x in here.items()} == pytest.approx(
            {
                "mean gap": mean,
                "standard error": 0.25 * scale * NOISE_STD / np.sqrt(SEEDS),
                "spread over seeds": 0.75 * scale * NOISE_STD,
                "gap at the end": mean,
            }
        )
    assert findings.statements[1].parts[0].evidence == "1.00 ± 0.00"  # log10 of a ratio of 10
    (table,) = findings.tables
    assert [row[0] for row in table.rows] == list(LABELS)
    assert table.rows[1][table.header.index("mean gap")] == "-2.5000"


SE = 0.25 * NOISE_STD / np.sqrt(SEEDS)  # standard error of one algorithm's mean at scale 1


T = student.isf(LEVEL, SEEDS - 1) + 5 * 40 / SEEDS**1.5  # at which a mean is decided


YES, NO, UNSETTLED = "supported", "contradicted", "not settled"


@pytest.mark.parametrize(
    ("name", "advantage", "rand_scale", "rr_scale", "expected"),
    [
        # Few models: the means are within 0.02, and RR's spread is below a third.
        ("mfa-fig1", 0.0, 0.01, 0.001, (YES, YES)),
        ("mfa-fig2", 0.019 - T * 0.009 * SE, 0.01, 0.001, (YES, YES)),
        ("mfa-fig1", 0.021 - T * 0.009 * SE, 0.01, 0.001, (UNSETTLED, YES)),
        ("mfa-fig1", T * 0.009 * SE - 0.021, 0.01, 0.001, (UNSETTLED, YES)),
        ("mfa-fig2", 0.05, 0.01, 0.001, (NO, YES)),
        ("mfa-fig2", -0.05, 0.01, 0.0035, (NO, NO)),
        ("mfa-fig1", 0.0, 0.01, 0.0032, (YES, YES)),
        # Many models: RR is better by more than 5.1 standard errors of the pairs.
        ("mfa-fig3", 2.0, 1.0, 0.1, (YES, YES)),
        ("mfa-fig3", 1.01 * T * 0.7 * SE, 1.0, 0.3, (YES, YES)),
        ("mfa-fig3", 0.99 * T * 0.7 * SE, 1.0, 0.3, (UNSETTLED, YES)),
        ("mfa-fig3", -0.99 * T * 0.7 * SE, 1.0, 0.3, (UNSETTLED, YES)),
        ("mfa-fig3", -2.0, 1.0, 0.36, (NO, NO)),
        ("mfa-fig4", 0.8, 0.1, 0.01, (YES, YES, YES)),
        ("mfa-fig4", 1.2, 0.1, 0.01, (YES, YES, NO)),
    ],
)
def test_verdicts_on_curves(name, advantage, rand_scale, rr_scale, expected):
    data = comparison(12, advantage=advantage, rand_scale=rand_scale, rr_scale=rr_scale)
    found = verdicts(ITEMS[name].findings(*data))
    keys = {"mfa-fig1": ("similar-means", "randomness"), "mfa-fig3": ("better-mean", "variance")}
    keys |= {"mfa-fig2": keys["mfa-fig1"]}
    keys |= {"mfa-fig4": (*keys["mfa-fig3"], "no-order-of-magnitude")}
    assert found == dict(zip(keys[name], expected, strict=True))


def test_swapped_algorithms_contradict_statements_about_curves():
    data, config = comparison(12, advantage=2.0, rand_scale=1.0, rr_scale=0.1)
    assert set(verdicts(judge_comparison(data, config)).values()) == {YES}
    assert set(verdicts(judge_comparison(swapped(data), config)).values()) == {NO}


def test_runs_without_any_spread_decide_no_statement_about_spreads():
    data, config = comparison(12, advantage=0.5, rand_scale=0.0, rr_scale=0.0)
    assert verdicts(judge_comparison(data, config)) == {
        "better-mean": YES,
        "variance": "not tested",
    }


def test_two_seeds_decide_no_statement_about_spreads():
    data, config = comparison(12, advantage=2.0, rand_scale=1.0, rr_scale=0.1)
    assert verdicts(judge_comparison(data.isel(seed=[0, 1]), config))["variance"] == "not tested"


def test_the_jackknife_gives_a_statistic_and_its_standard_error():
    """For the mean it returns the samples, for other statistics bias-corrected pseudovalues."""
    x = np.random.default_rng(0).exponential(size=15)
    samples = xr.DataArray(x, {"seed": range(15)})
    np.testing.assert_allclose(jackknife(samples, lambda y: y.mean().item()), x)
    found = jackknife(samples, lambda y: np.log(y.std(ddof=1).item()))
    left_out = np.array([np.log(np.delete(x, i).std(ddof=1)) for i in range(15)])
    bias = 14 * (left_out.mean() - np.log(x.std(ddof=1)))
    error = np.sqrt(14 / 15 * ((left_out - left_out.mean()) ** 2).sum())
    assert found.mean().item() == pytest.approx(np.log(x.std(ddof=1)) - bias)
    assert found.std(ddof=1).item() / np.sqrt(15) == pytest.approx(error)


TURNS = {  # by algorithm and M: the round at which each of two seeds reaches the target
    "MFA-Rand": {1: (10, 10), 2: (8, 12), 4: (15, 15)},
    "MFA-RR": {1: (10, 10), 2: (8, 12), 4: (20, 20)},
}


def gains(turns, copies=1, **changes):
    """Distances that fall from 4 to 2 at the round in `turns`, at E = 5, with seeds repeated."""
    rounds = np.arange(31)
    distance = [
        [[np.where(rounds < turn, 4.0, 2.0) for turn in copies * of_models[m]] for m in (1, 2, 4)]
        for of_models in turns.values()
    ]
    data = xr.DataArray(
        np.array(distance, np.float32)[:, None],
        {
            "algorithm": list(turns),
            "local_steps": [5],
            "num_models": [1, 2, 4],
            "seed": range(2 * copies),
            "round": rounds,
        },
    )
    config = GainSweep(
        num_models=(1, 2, 4), local_steps=(5,), num_rounds=30, num_seeds=2 * copies, **changes
    )
    # The dimensions are not in the order of the computation.
    axes = ("algorithm", "seed", "round", "local_steps", "num_models")
    return labelled({"distance": data.transpose(*axes)}, {}), config


def test_rounds_and_gains_are_measured():
    """The mean over seeds reaches the target of 3 as soon as one of them falls from 4 to 2."""
    findings = judge_gain(*gains(TURNS))
    assert findings.measured.target_distance == 3.0
    assert findings.measured.M.values.tolist() == [1, 2, 4]
    expected = {
        "MFA-Rand": {"rounds": [10, 8, 15], "gain": [1, 2.5, 8 / 3]},
        "MFA-RR": {"rounds": [10, 8, 20], "gain": [1, 2.5, 2]},
    }
    for label, values in expected.items():
        measured = findings.measured.sel(algorithm=label, E=5)
        for name in ("rounds", "gain"):
            np.testing.assert_allclose(measured[name], values[name])
        per_seed = np.array([20 / 8, 20 / 12])
        assert measured.gain_per_seed_mean[1] == pytest.approx(per_seed.mean())
        assert measured.gain_per_seed_standard_error.isnull().all()  # of two seeds
        np.testing.assert_allclose(measured.resolution, np.divide(values["gain"], values["rounds"]))
    (table,) = findings.tables
    assert table.header[2:] == ("M = 1", "M = 2", "M = 4")
    rand, rr = table.rows
    assert (rand[0], rand[4], rr[0], rr[4]) == ("MFA-Rand", "2.67\nT=15", "MFA-RR", "2.00\nT=20")


def parts_of(findings):
    """Maps algorithms to the verdicts on the parts of Figure 5's only statement."""
    (statement,) = findings.statements
    return {part.name.partition(",")[0]: part.verdict for part in statement.parts}


@pytest.mark.parametrize(
    ("turns", "verdict"),
    [
        ((10, 19, 20), YES),
        ((10, 21, 20), NO),  # 1, 0.95, 2: one of three pairs is out of order, so tau is 1/3
        ((10, 10, 20), YES),  # 1, 2, 2: tau is 2/3
        ((10, 10, 31), NO),  # unreached: at most 4/3, below the 2 of two models
        ((10, 20, 31), "not tested"),  # 1, 1 and at most 4/3
        ((31, 10, 20), "not tested"),  # the baseline is not reached
    ],
)
def test_a_gain_must_increase_with_the_number_of_models(turns, verdict):
    good = {1: (10, 10), 2: (10, 10), 4: (10, 10)}
    bad = {m: (t, t) for m, t in zip((1, 2, 4), turns, strict=True)}
    found = parts_of(judge_gain(*gains({"MFA-Rand": good, "MFA-RR": bad}, copies=8)))
    assert found == {"MFA-Rand": YES, "MFA-RR": verdict}
    assert set(parts_of(judge_gain(*gains(TURNS))).values()) == {UNSETTLED}  # 2 seeds


def test_an_unreached_target_is_reported_instead_of_clipped():
    findings = judge_gain(*gains(TURNS | {"MFA-RR": {1: (10, 10), 2: (8, 12), 4: (31, 31)}}))
    measured = findings.measured.sel(algorithm="MFA-RR", E=5)
    for name in ("rounds", "gain", "gain_per_seed_mean"):
        assert np.isnan(measured[name][2]), name
        assert not np.isnan(measured[name][:2]).any(), name
    rand, rr = findings.tables[0].rows
    assert rr[4] == "not reached"
    assert "not reached" not in rand


def test_the_threshold_is_a_fraction_of_the_start():
    """A target of 0.6 times 4 is reached by the mean only after both seeds."""
    measured = judge_gain(*gains(TURNS, threshold=0.6)).measured
    assert measured.target_distance == pytest.approx(2.4)
    assert measured.rounds.sel(algorithm="MFA-Rand", E=5, M=2) == 12


def sweep_result(**axes):
    """Losses with means over models of 3 and 1 for two seeds, times 10^-i at the i-th point."""
    axes = {"algorithm": ["A", "B"]} | axes
    shape = [len(labels) for labels in axes.values()]
    points = 10.0 ** -np.arange(np.prod(shape)).reshape(shape)
    loss = points[..., None, None, None] * np.reshape([[2, 4], [0, 2]], (2, 1, 2))
    dims = (*axes, "seed", "round", "model")
    coords = axes | {"seed": [0, 1], "round": [7], "model": [1, 2]}
    dataset = xr.Dataset({"loss": (dims, loss)}, coords)
    dataset["diverged"] = xr.full_like(dataset.loss.isel(round=0, drop=True), -1, int)
    dataset.loss.attrs["long_name"] = "global loss"
    return dataset


X = np.array([1.0, 2.0])


def test_error_bars_move_off_their_x_only_at_words():
    lines = [plots.Line(label, X, X, np.ones(2)) for label in "abc"]
    for ticks, shift in [({"a": 1.0, "b": 2.0}, 4), ({"1": 1.0}, 0), ({}, 0)]:
        panel = plots.Panel("", "x", "y", lines, ticks=ticks)
        (axes,) = plots.draw([[panel]], title="", caption="").axes
        bars = [container[0] for container in axes.containers]
        x = [each.get_transform().transform(each.get_xydata())[:, 0] for each in bars]
        np.testing.assert_allclose(np.diff(x, axis=0), shift / 72 * axes.figure.dpi)
        assert {each.get_xdata().tolist() == X.tolist() for each in bars} == {True}


def test_an_unknown_metric_is_refused():
    with pytest.raises(ValueError, match="metric is 'lss'; choose from loss"):
        sweep_overview(sweep_result(rate=[1.0, 2.0]), "lss")
