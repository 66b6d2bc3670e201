"""Reproductions: settings, judgements on data where the answer is known, and figures."""

import importlib
import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import xarray as xr
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

from fedjax_mm import papers, plots
from fedjax_mm.experiments.fields import FINISHED
from fedjax_mm.experiments.optimizers import InverseTime
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.experiments.run import run
from fedjax_mm.papers import BOUNDS, ITEMS
from fedjax_mm.papers.bhuyan2022.fig1_to_4 import Comparison, jackknife
from fedjax_mm.papers.bhuyan2022.fig5 import GainSweep
from fedjax_mm.plots import save_figure, sweep_overview

LABELS = ("MFA-Rand", "MFA-RR")
COMPARISONS = [f"mfa-fig{number}" for number in range(1, 5)]
CURVES, GAIN = ITEMS["mfa-fig3"], ITEMS["mfa-fig5"]
judge_comparison, judge_gain = CURVES.findings, GAIN.findings


def plot(item, data, config):
    return item.figure(data, item.measure(data, config), config)


plot_comparison, plot_gain = partial(plot, CURVES), partial(plot, GAIN)


def swapped(dataset):
    """The same curves with the algorithms' labels exchanged."""
    return dataset.assign_coords(algorithm=list(LABELS[::-1])).sel(algorithm=list(LABELS))


def verdicts(findings):
    """The verdict on every statement by its key."""
    return {each.key: each.verdict for each in findings.statements}


# Settings


def sources():
    """Every module of the papers by its name."""
    root = Path(papers.__file__).parent
    for path in sorted(root.rglob("[a-z]*.py")):
        name = ".".join(("fedjax_mm.papers", *path.relative_to(root).with_suffix("").parts))
        yield name, path.read_text()


FROM_FILES = [key for key in ITEMS if "directory" in type(ITEMS[key].settings).model_fields]


@pytest.mark.parametrize("name", FROM_FILES)
def test_finished_results_are_judged_without_their_data(name, tmp_path):
    """The data may have moved since, or the result comes from another machine."""
    settings = ITEMS[name].settings
    away = settings.model_dump() | {"directory": str(tmp_path / "moved")}
    with pytest.raises(ValueError, match="moved"):
        validate(type(settings), away)
    found = validate(type(settings), away, context=FINISHED)
    assert found.directory == tmp_path / "moved"


def test_ids_are_unique_and_in_order():
    """Paper by paper, theory after a paper's own; numbers in an id count as numbers."""
    own = ("compression_curve", "multi_attributes", "multi_compare", "multi_maxfl", "private_curve")
    papers = ("bhuyan2022", "cho2022", "pawlik2020", *own)

    def place(name):
        paper = type(ITEMS[name].settings).__module__.split(".")[2]
        numbers = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
        return papers.index(paper), name.startswith("theory"), numbers

    assert list(ITEMS) == sorted(ITEMS, key=place)
    assert len({ITEMS.title(name) for name in ITEMS}) == len(ITEMS)


def test_every_figure_and_table_that_is_reproduced_is_there():
    """A page that is lost is not missed otherwise."""
    mfa = {f"fig{number}" for number in (*range(1, 6), "6a", "6b", "6c", "7a", "7b", "7c")}
    maxfl = {f"fig{number}" for number in (3, 4, "5a", "5b", 6, 7, 8)}
    wanted = {f"mfa-{name}" for name in mfa | {"table4", "table5"}}
    wanted |= {f"maxfl-{name}" for name in maxfl | {f"table{number}" for number in range(1, 7)}}
    wanted |= {f"cb-{name}" for name in ("fig1", "fig2", "fig3", "table1", "optimal-cohort")}
    theory = ("gain", "mfa-rand", "mfa-rr", "mfa-growing", "remarks", "maxfl", "cohort-noise")
    wanted |= {f"theory-{name}" for name in (*theory, "cohorts")}
    ours = {"maxfl-demand", "maxfl-flips", "maxfl-weights"}
    ours |= {"compression-curve", "private-curve"} | {
        f"multi-{name}" for name in ("attributes", "compare", "maxfl")
    }
    assert wanted | ours <= set(ITEMS)


def test_items_found_by_reading_are_those_found_by_importing():
    modules = [
        importlib.import_module(name) for name, source in sources() if "\nITEMS = (" in source
    ]
    imported = {
        item.id: item.title
        for module in modules
        if isinstance(getattr(module, "ITEMS", None), tuple)
        for item in module.ITEMS
    }
    read = {name: ITEMS.title(name) for name in ITEMS}
    read |= {f"bounds-{name}": BOUNDS.title(name) for name in BOUNDS}
    assert read == imported
    assert {BOUNDS[name].id for name in BOUNDS} == {"bounds-mfa"}
    assert all(ITEMS[name].id == name for name in ITEMS)


@pytest.mark.parametrize("name", ITEMS)
def test_the_default_settings_survive_a_round_trip(name):
    config = ITEMS[name].settings
    assert validate(type(config), config.model_dump()) == config


@pytest.mark.parametrize("name", ITEMS)
def test_a_reproduction_says_what_the_paper_gives_and_leaves_open(name):
    paper = ITEMS[name].paper
    numbered = re.fullmatch(r"\w+-(fig|table)(\d)\w?", name)
    if numbered:
        kind, number = numbered.groups()
        assert kind.capitalize() in paper["shows"]
        assert number in paper["shows"]
    assert paper["shows"]
    assert paper["open"]


def test_the_papers_settings():
    """Section 6: N = 24, E = 5, 20 runs of 1000 rounds; constant and decaying rates."""
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


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_start_is_where_the_papers_plots_begin(name):
    """They begin near 0 to 0.5; zeros would begin at -1.71."""
    start = {}
    for kind in ("normal", "zeros"):
        config = validate(Comparison, ITEMS[name].settings.model_dump(), [f"task.start={kind}"])
        task = config.at(config.num_models, config.local_steps).task
        start[kind] = np.log10(
            task.build().metrics(jax.random.key(0), task.initial_params())["excess_loss"]
        )
    assert 0 < start["normal"] < 1
    assert start["zeros"] == pytest.approx(np.log10(0.019439088226487246), abs=1e-5)
    assert ITEMS[name].settings.task.start == "normal"


def test_the_gain_is_swept_over_models_and_steps():
    config = GainSweep()
    experiment = config.at(3, 10)
    assert experiment.num_models == 3
    assert [a.local_steps for a in experiment.algorithms.values()] == [10, 10]
    assert (config.num_models, config.local_steps) == ((1, 2, 3, 4, 6, 8, 12), (1, 5, 10))


# Figures 1 to 4

NOISE = np.array([-1.5, -0.5, 0.5, 1.5])  # over four seeds
NOISE_STD = np.sqrt(5 / 3)  # with ddof = 1


def comparison(num_models, *, advantage, rand_scale, rr_scale):
    """Constant curves in the last fifth of 10 rounds: RR is better by `advantage`.

    Seed s adds its noise to the odd models and half of it, negated, to the even ones, so that the
    mean over models spreads a quarter as much as a model does three quarters of the scale. Before
    the last fifth all is reversed and tenfold.
    """
    of_model = np.resize([1.0, -0.5], num_models)
    noise = NOISE[:, None, None] * of_model
    last = np.stack([rand_scale * noise - 2.0, rr_scale * noise - 2.0 - advantage])
    before = -10 * last[::-1]
    gap = np.concatenate([np.repeat(before, 9, axis=2), np.repeat(last, 2, axis=2)], axis=2)
    coords = {"algorithm": list(LABELS), "seed": range(4), "round": range(11)}
    coords["model"] = range(1, num_models + 1)
    dims = ("algorithm", "seed", "round", "model")
    config = Comparison(num_models=num_models, learning_rate=0.1, num_rounds=10, num_seeds=4)
    return labelled({"gap": (dims, gap)}, coords), config


def labelled(variables, coords):
    """A result with the manifest of a run."""
    return xr.Dataset(variables, coords, {"manifest": {"data": "synthetic"}})


def test_means_and_spreads_are_measured_on_the_last_fifth():
    findings = judge_comparison(*comparison(12, advantage=0.5, rand_scale=0.4, rr_scale=0.04))
    for label, mean, scale in (("MFA-Rand", -2.0, 0.4), ("MFA-RR", -2.5, 0.04)):
        here = findings.measured.drop_dims("seed").sel(algorithm=label, drop=True)
        assert {name: x.item() for name, x in here.items()} == pytest.approx(
            {
                "mean gap": mean,
                "standard error": 0.25 * scale * NOISE_STD / 2,
                "spread over seeds": 0.75 * scale * NOISE_STD,
                "gap at the end": mean,
            }
        )
    assert findings.statements[1].parts[0].evidence == "1.00 ± 0.00"  # log10 of a ratio of 10
    (table,) = findings.tables
    assert [row[0] for row in table.rows] == list(LABELS)
    assert table.rows[1][table.header.index("mean gap")] == "-2.5000"


SE = 0.25 * NOISE_STD / 2  # of one algorithm's mean at scale 1
T = 9.22  # Student's quantile with 4 seeds
YES, NO, UNSETTLED = "supported", "contradicted", "not settled"


@pytest.mark.parametrize(
    ("name", "advantage", "rand_scale", "rr_scale", "expected"),
    [
        # Few models: means within 0.02, and RR spreads less than a third.
        ("mfa-fig1", 0.0, 0.01, 0.001, (YES, YES)),
        ("mfa-fig2", 0.019 - T * 0.009 * SE, 0.01, 0.001, (YES, YES)),
        ("mfa-fig1", 0.021 - T * 0.009 * SE, 0.01, 0.001, (UNSETTLED, YES)),
        ("mfa-fig1", T * 0.009 * SE - 0.021, 0.01, 0.001, (UNSETTLED, YES)),
        ("mfa-fig2", 0.05, 0.01, 0.001, (NO, YES)),
        ("mfa-fig2", -0.05, 0.01, 0.0035, (NO, NO)),
        ("mfa-fig1", 0.0, 0.01, 0.0032, (YES, YES)),
        # Many: RR better by more than 9.2 standard errors of the 4 pairs.
        ("mfa-fig3", 2.0, 1.0, 0.1, (YES, YES)),
        ("mfa-fig3", 1.01 * T * 0.7 * SE, 1.0, 0.3, (YES, YES)),
        ("mfa-fig3", 0.99 * T * 0.7 * SE, 1.0, 0.3, (UNSETTLED, YES)),
        ("mfa-fig3", -0.99 * T * 0.7 * SE, 1.0, 0.3, (UNSETTLED, YES)),
        ("mfa-fig3", -2.0, 1.0, 0.36, (NO, NO)),
        ("mfa-fig4", 0.8, 0.1, 0.01, (YES, YES, YES)),
        ("mfa-fig4", 1.2, 0.1, 0.01, (YES, YES, NO)),
    ],
)
def test_statements_about_curves(name, advantage, rand_scale, rr_scale, expected):
    data = comparison(12, advantage=advantage, rand_scale=rand_scale, rr_scale=rr_scale)
    found = verdicts(ITEMS[name].findings(*data))
    keys = {"mfa-fig1": ("similar-means", "randomness"), "mfa-fig3": ("better-mean", "variance")}
    keys |= {"mfa-fig2": keys["mfa-fig1"]}
    keys |= {"mfa-fig4": (*keys["mfa-fig3"], "no-order-of-magnitude")}
    assert found == dict(zip(keys[name], expected, strict=True))


def test_statements_about_curves_are_contradicted_when_the_algorithms_are_swapped():
    data, config = comparison(12, advantage=2.0, rand_scale=1.0, rr_scale=0.1)
    assert set(verdicts(judge_comparison(data, config)).values()) == {YES}
    assert set(verdicts(judge_comparison(swapped(data), config)).values()) == {NO}


@pytest.mark.parametrize("name", COMPARISONS)
def test_no_statement_about_curves_is_decided_by_runs_that_diverged(name):
    data, config = comparison(12, advantage=0.5, rand_scale=1.0, rr_scale=0.1)
    lost = data.copy(data={"gap": np.nan * data.gap})
    assert set(verdicts(ITEMS[name].findings(lost, config)).values()) == {"not tested"}


def test_runs_that_do_not_spread_at_all_say_nothing_about_spreads():
    data, config = comparison(12, advantage=0.5, rand_scale=0.0, rr_scale=0.0)
    assert verdicts(judge_comparison(data, config)) == {
        "better-mean": YES,
        "variance": "not tested",
    }


def test_two_seeds_say_nothing_about_spreads():
    data, config = comparison(12, advantage=2.0, rand_scale=1.0, rr_scale=0.1)
    assert verdicts(judge_comparison(data.isel(seed=[0, 1]), config))["variance"] == "not tested"


def test_the_jackknife_gives_a_statistic_and_its_standard_error():
    """For the mean it returns the samples, and for other statistics bias-corrected values."""
    x = np.random.default_rng(0).exponential(size=15)
    samples = xr.DataArray(x, {"seed": range(15)})
    np.testing.assert_allclose(jackknife(samples, lambda y: y.mean().item()), x)
    found = jackknife(samples, lambda y: np.log(y.std(ddof=1).item()))
    left_out = np.array([np.log(np.delete(x, i).std(ddof=1)) for i in range(15)])
    bias = 14 * (left_out.mean() - np.log(x.std(ddof=1)))
    error = np.sqrt(14 / 15 * ((left_out - left_out.mean()) ** 2).sum())
    assert found.mean().item() == pytest.approx(np.log(x.std(ddof=1)) - bias)
    assert found.std(ddof=1).item() / np.sqrt(15) == pytest.approx(error)


# Figure 5

TURNS = {  # by algorithm and M: the round at which each of two seeds reaches the target
    "MFA-Rand": {1: (10, 10), 2: (8, 12), 4: (15, 15)},
    "MFA-RR": {1: (10, 10), 2: (8, 12), 4: (20, 20)},
}


def gains(turns, copies=1, **changes):
    """Distances of 4 until the turn, then 2; NaN-free and at E = 5 only. Seeds are repeated."""
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
    # Not in the order of dimensions that is computed with.
    axes = ("algorithm", "seed", "round", "local_steps", "num_models")
    return labelled({"distance": data.transpose(*axes)}, {}), config


def test_rounds_and_gains_are_measured():
    """The mean of 4 and 2 is the target, 0.75 of 4: the mean error turns with the first seed."""
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
    """The verdict on every part of the one statement of Figure 5."""
    (statement,) = findings.statements
    return {part.name.partition(",")[0]: part.verdict for part in statement.parts}


@pytest.mark.parametrize(
    ("turns", "verdict"),
    [
        ((10, 19, 20), YES),
        ((10, 21, 20), NO),  # 1, 0.95, 2: one of three pairs is not in order, tau is 1/3
        ((10, 10, 20), YES),  # 1, 2, 2: tau is 2/3
        ((10, 10, 31), NO),  # not reached: at most 4/3, below the 2 of two models
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


def test_a_target_that_is_not_reached_is_said_and_not_clipped():
    findings = judge_gain(*gains(TURNS | {"MFA-RR": {1: (10, 10), 2: (8, 12), 4: (31, 31)}}))
    measured = findings.measured.sel(algorithm="MFA-RR", E=5)
    for name in ("rounds", "gain", "gain_per_seed_mean"):
        assert np.isnan(measured[name][2]), name
        assert not np.isnan(measured[name][:2]).any(), name
    rand, rr = findings.tables[0].rows
    assert rr[4] == "not reached"
    assert "not reached" not in rand


def test_the_threshold_is_a_fraction_of_the_start():
    """At 0.6 of 4 both seeds must have turned."""
    measured = judge_gain(*gains(TURNS, threshold=0.6)).measured
    assert measured.target_distance == pytest.approx(2.4)
    assert measured.rounds.sel(algorithm="MFA-Rand", E=5, M=2) == 12


@pytest.mark.parametrize(
    "points",
    [
        [(3, 1)],  # neither the first of the values nor in the order of the axes
        pytest.param([(1, 1), (1, 5), (3, 1), (3, 5)], marks=pytest.mark.slow),
    ],
    ids=["one point", "all"],
)
def test_the_sweep_runs_every_point(points):
    """Numbers of models and of local steps; every point differs from all others."""
    config = GainSweep(num_models=(1, 3), local_steps=(5, 1), num_rounds=3, num_seeds=2)
    dataset = GAIN.make(config)
    assert dataset.attrs["manifest"]["config"] == config.model_dump(mode="json")
    ends = dataset.distance.isel(round=-1).mean("seed").values
    assert len(np.unique(ends[..., 1:])) + len(np.unique(ends[..., :1])) > 5
    for num_models, steps in points:
        point = dataset.distance.sel(local_steps=steps, num_models=num_models)
        alone = run(config.at(num_models, steps)).distance.mean("model")
        np.testing.assert_allclose(point.transpose(*alone.dims), alone, rtol=1e-6)


# Figures


def legend_texts(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def caption(figure):
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())


@pytest.mark.parametrize("rr_scale", [0.1, 2.0])
def test_the_figure_of_a_comparison(rr_scale):
    data, config = comparison(12, advantage=0.5, rand_scale=1.0, rr_scale=rr_scale)
    figure = plot_comparison(data, config)
    left, right = figure.axes
    for axes in (left, right):
        assert axes.get_xlabel() == "round $t$"
        assert legend_texts(axes) == list(LABELS)
    assert left.get_ylabel() == "$F(w_t) - F(w_*)$"
    assert left.yaxis.get_major_formatter()(-1.0) == "$10^{-1}$"
    assert "M = 12" in figure.get_suptitle()
    assert r"\eta = 0.1" in figure.get_suptitle()
    # Model 1: its mean on the left, its four seeds on the right, in the legend's colours.
    curves = data.gap.sel(model=1)
    handles = {
        text: line.get_color()
        for text, line in zip(LABELS, left.get_legend().get_lines(), strict=True)
    }
    assert len(set(handles.values())) == 2
    for label in LABELS:
        seeds = curves.sel(algorithm=label).transpose("seed", "round").values
        for axes, expected in ((left, [seeds.mean(0)]), (right, seeds)):
            lines = [line for line in axes.lines if line.get_color() == handles[label]]
            np.testing.assert_allclose([line.get_ydata() for line in lines], expected)
    assert not re.search("holds?\\b", caption(figure), re.IGNORECASE)  # verdicts stand elsewhere


@pytest.mark.parametrize("last_turn", [20, 31])
def test_the_figure_of_the_gain(last_turn):
    """Also where a target was not reached: there is no point then."""
    turns = TURNS | {"MFA-RR": {1: (10, 10), 2: (8, 12), 4: (last_turn, last_turn)}}
    data, config = gains(turns)
    measured = judge_gain(data, config).measured
    figure = plot_gain(data, config)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["E = 5", "g = M"]
    for axes, label in zip(figure.axes, LABELS, strict=True):
        assert label in axes.get_title()
        assert "models" in axes.get_xlabel()
        drawn = {bars.get_label(): bars[0] for bars in axes.containers}
        assert drawn["E = 5"].get_xdata().tolist() == [1, 2, 4]
        expected = measured.gain.sel(algorithm=label, E=5)
        np.testing.assert_allclose(drawn["E = 5"].get_ydata(), expected)
        assert drawn["g = M"].get_xdata().tolist() == drawn["g = M"].get_ydata().tolist() == [1, 4]
    assert "gain" in figure.axes[0].get_ylabel()
    assert not re.search("holds?\\b", caption(figure), re.IGNORECASE)


@pytest.mark.parametrize(
    ("rate", "fragment"),
    [
        ({"beta": 30, "gamma": 100}, r"30 / (100 + t)"),
        ({"beta": 30, "gamma": 99, "per": "frame"}, r"30 / (99 + l)"),
    ],
)
def test_the_title_gives_the_rate(rate, fragment):
    data, config = comparison(12, advantage=0.5, rand_scale=1.0, rr_scale=0.1)
    config = validate(Comparison, config.model_dump() | {"learning_rate": rate})
    title = plot_comparison(data, config).get_suptitle()
    assert fragment in title
    assert ("(t-1)/M" in title) == ("per" in rate)


@pytest.fixture(params=["comparison", "gain"])
def figure(request):
    """One of each kind."""
    if request.param == "comparison":
        data, config = comparison(12, advantage=0.5, rand_scale=1.0, rr_scale=0.1)
        return plot_comparison(data, config)
    data, config = gains(TURNS)
    return plot_gain(data, config)


def test_nothing_in_a_figure_is_cut_or_covered(figure):
    """Rendered without a display: texts lie on the page, the panels between title and caption."""
    FigureCanvasAgg(figure).draw()
    page = figure.bbox
    title, below = sorted(figure.texts, key=lambda text: -text.get_position()[1])
    for text in (title, below):
        box = text.get_window_extent()
        assert page.x0 <= box.x0 < box.x1 <= page.x1
        assert page.y0 <= box.y0 < box.y1 <= page.y1
    for axes in figure.axes:
        panel = axes.get_tightbbox()
        assert below.get_window_extent().y1 < panel.y0 < panel.y1 < title.get_window_extent().y0
        assert page.x0 <= panel.x0 < panel.x1 <= page.x1


def test_a_figure_is_saved_as_png(tmp_path, figure):
    save_figure(figure, tmp_path / "figure.png")
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]
    height, width, channels = imread(tmp_path / "figure.png").shape
    assert (width, height) == pytest.approx(200 * figure.get_size_inches(), abs=1)
    assert channels == 4


# Sweeps


def sweep_result(**axes):
    """Two seeds, of means 3 and 1 over two models, times 10^-i at the i-th point; all finite."""
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


def drawn(figure):
    """By panel, by algorithm: x, y and the lengths of the error bars."""
    FigureCanvasAgg(figure).draw()
    return {
        axes.get_title(): {
            bars.get_label(): (
                bars[0].get_xdata().tolist(),
                bars[0].get_ydata().tolist(),
                [np.ptp(ends[:, 1]) / 2 for ends in bars[2][0].get_segments() if len(ends)],
            )
            for bars in axes.containers
        }
        for axes in figure.axes
    }


def check_line(line, x, y):
    """Means 3 and 1 over models of the two seeds: 2, with a standard error of 1."""
    np.testing.assert_allclose(line[0], x)
    np.testing.assert_allclose(line[1], 2 * np.array(y))
    np.testing.assert_allclose(line[2], [value for value in y if not np.isnan(value)])


def boxes(figure, artists):
    """Where they are in the picture."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return [artist.get_window_extent(canvas.get_renderer()) for artist in artists]


def panel_of(labels, style="-"):
    return plots.Panel("", "x", "y", [plots.Line(each, X, X, style=style) for each in labels])


X = np.array([1.0, 2.0])


@pytest.mark.parametrize("height", [1, 5])
def test_a_legend_of_many_stands_below_the_panels_and_nothing_overlaps(height):
    labels = [*"abcde", "a long one, too"]
    figure = plots.draw([[panel_of(labels)] * 2] * height, title="Title", caption="Caption " * 40)
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(labels)
    assert not any(axes.get_legend() for axes in figure.axes)
    title, below, caption, *panels = boxes(
        figure, [figure._suptitle, legend, figure.texts[0], *[axes.title for axes in figure.axes]]
    )
    assert not any(title.overlaps(panel) for panel in panels)
    drawn = [axes.get_tightbbox() for axes in figure.axes]
    assert not any(below.overlaps(panel) for panel in drawn)
    assert not below.overlaps(caption)


@pytest.mark.parametrize("styles", [["-"], ["-?"], ["-", "--", ":"]])
def test_no_two_of_20_lines_look_alike(styles):
    """They stay distinct with bounds, which share their line's color, in a single legend."""
    both = [panel_of(map(str, range(20)), style).lines for style in styles]
    lines = [
        line._replace(label=f"{line.label}{line.style}", color=number)
        for each in both
        for number, line in enumerate(each)
    ]
    panel = plots.Panel("", "x", "y", lines)
    figure = plots.draw([[panel, panel]], title="Title", caption="Caption")
    (legend,) = figure.legends
    for shown in (*figure.axes, legend):
        looks = [
            (line.get_color(), line.get_marker(), line._unscaled_dash_pattern)
            for line in shown.get_lines()
        ]
        assert len(set(looks)) == len(looks) == 20 * len(styles)
        assert len({color for color, *_ in looks}) == 8


def test_error_bars_at_the_same_x_stand_beside_each_other():
    lines = [plots.Line(label, X, X, np.ones(2)) for label in "abc"]
    (axes,) = plots.draw([[plots.Panel("", "x", "y", lines)]], title="", caption="").axes
    x = [bars[0].get_transform().transform(bars[0].get_xydata())[:, 0] for bars in axes.containers]
    np.testing.assert_allclose(np.diff(x, axis=0), 4 / 72 * axes.figure.dpi)
    assert {bars[0].get_xdata().tolist() == X.tolist() for bars in axes.containers} == {True}


def test_legends_that_differ_stay_with_their_panels():
    several, few = panel_of("abcd"), panel_of("ab", "--")  # "a" looks otherwise there
    figure = plots.draw([[several, few]], title="Title", caption="Caption")
    assert not figure.legends
    assert [legend_texts(axes) for axes in figure.axes] == [list("abcd"), list("ab")]
    full, axes = figure.axes[0].get_legend(), figure.axes[0]
    below, label, inside = boxes(figure, [full, axes.xaxis.label, axes.patch])
    assert not below.overlaps(label)
    assert not below.overlaps(inside)


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        ([0.1, 0.0310723250595386], ["0.1", "0.03107"]),
        ([0.10001, 0.10002], ["0.10001", "0.10002"]),  # four digits are the same
        (["1", "2"], ["1", "2"]),
    ],
)
def test_titles_of_panels_are_short_and_tell_them_apart(labels, shown):
    figure = sweep_overview(sweep_result(rate=[1.0, 2.0], mu=labels))
    assert [axes.get_title() for axes in figure.axes] == [
        f"({letter}) mu = {words}" for letter, words in zip("ab", shown, strict=True)
    ]


def figure_lines(dataset):
    """The points of every line in a figure of one panel."""
    (panel,) = drawn(sweep_overview(dataset)).values()
    return [len(x) for x, *_ in panel.values()]


def test_a_sweep_without_algorithms_has_lines_of_another_axis_of_words_or_one():
    def renamed(**axes):
        return sweep_result(**axes).rename(algorithm="rule")

    figure = sweep_overview(renamed(rate=[0.1, 0.2], momentum=[0.0, 0.9]))
    panels = drawn(figure)
    assert list(panels) == ["(a) momentum = 0", "(b) momentum = 0.9"]
    assert [list(panel) for panel in panels.values()] == [["A", "B"]] * 2
    numbers = renamed(rate=[0.1, 0.2]).isel(rule=0, drop=True)
    assert figure_lines(numbers) == [2]
    assert figure_lines(renamed()) == [2]  # words along x


def test_a_metric_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="metric is 'lss'; choose from loss"):
        sweep_overview(sweep_result(rate=[1.0, 2.0]), "lss")


def test_a_sweep_is_drawn_along_its_numbers_in_panels_of_another_axis():
    dataset = sweep_result(num_models=[2, 12], rate=[0.1, 0.2, 0.4], mu=[1.0, 5.0])
    figure = sweep_overview(dataset)
    panels = drawn(figure)
    assert list(panels) == ["(a) num_models = 2", "(b) num_models = 12"]
    for i, panel in enumerate(panels.values()):
        assert list(panel) == ["A", "B"]
        for j, line in enumerate(panel.values()):
            y = [10.0 ** -(12 * j + 6 * i + 2 * k) for k in range(3)]
            check_line(line, [0.1, 0.2, 0.4], y)
    axes = figure.axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("rate", "global loss")
    assert figure.get_suptitle() == "After 7 rounds, mu = 1"


def test_counts_and_words_are_drawn_where_there_are_no_numbers():
    for labels, places in (([2, 12], [2, 12]), (["half", "all"], [0, 1])):
        figure = sweep_overview(sweep_result(size=labels))
        ((title, panel),) = drawn(figure).items()
        assert title == ""
        check_line(panel["B"], places, [1e-2, 1e-3])
        axes = figure.axes[0]
        assert [tick.get_text() for tick in axes.get_xticklabels()] == [str(x) for x in labels]
        assert axes.get_xscale() == "linear"


def test_points_where_a_run_diverged_are_not_drawn():
    """They are skipped even if one seed or model remains, and absent models are ignored."""
    dataset = sweep_result(rate=[0.1, 0.2, 0.4, 0.8])
    dataset.loss[0, 1, 0, 0, 1], dataset.diverged[0, 1, 0, 1] = np.nan, 3
    dataset.loss[0, 2, 1], dataset.diverged[0, 2, 1] = np.inf, 3
    both = dataset.loss[1, 3].mean("model")
    dataset.loss[1, 3, :, :, 0], dataset.loss[1, 3, :, :, 1] = both, np.nan
    figure = sweep_overview(dataset)
    (panel,) = drawn(figure).values()
    check_line(panel["A"], [0.1, 0.2, 0.4, 0.8], [1, np.nan, np.nan, 1e-3])
    check_line(panel["B"], [0.1, 0.2, 0.4, 0.8], [1e-4, 1e-5, 1e-6, 1e-7])
    assert figure.axes[0].get_yscale() == "log"


def test_a_sweep_is_drawn_though_all_of_it_diverged_or_there_is_one_seed():
    dataset = sweep_result(rate=[0.1, 0.2])
    drawn(sweep_overview(dataset.assign(diverged=dataset.diverged + 4, loss=np.nan * dataset.loss)))
    (panel,) = drawn(sweep_overview(dataset.isel(seed=[1]), "loss")).values()
    assert panel["A"][2] == [0, 0]


def test_what_there_is_no_room_for_is_said():
    figure = sweep_overview(sweep_result(num_models=list(range(1, 9)), rate=[0.1, 0.2]))
    assert len(figure.axes) == 6
    text = " ".join(" ".join(text.get_text() for text in figure.texts).split())
    assert "the first 6 of 8 num_models." in text
