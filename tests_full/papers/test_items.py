"""Reproductions: settings, verdicts on data with known answers, and figures."""

import re
from functools import partial

import jax
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

from fedjax_mm import plots
from fedjax_mm.experiments.fields import FINISHED
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.experiments.run import run
from fedjax_mm.papers import ITEMS
from fedjax_mm.papers.bhuyan2022.fig1_to_4 import Comparison
from fedjax_mm.papers.bhuyan2022.fig5 import GainSweep
from fedjax_mm.plots import save_figure, sweep_overview
from tests.papers.test_items import (
    COMPARISONS,
    CURVES,
    GAIN,
    LABELS,
    TURNS,
    X,
    comparison,
    gains,
    judge_gain,
    sweep_result,
    verdicts,
)


def plot(item, data, config):
    return item.figure(data, item.measure(data, config), config)


plot_comparison, plot_gain = partial(plot, CURVES), partial(plot, GAIN)


FROM_FILES = [key for key in ITEMS if "directory" in type(ITEMS[key].settings).model_fields]


@pytest.mark.parametrize("name", FROM_FILES)
def test_finished_results_are_judged_without_their_data(name, tmp_path):
    """The data may have moved, or the result may come from another machine."""
    settings = ITEMS[name].settings
    away = settings.model_dump() | {"directory": str(tmp_path / "moved")}
    with pytest.raises(ValueError, match="moved"):
        validate(type(settings), away)
    found = validate(type(settings), away, context=FINISHED)
    assert found.directory == tmp_path / "moved"


@pytest.mark.parametrize("name", ITEMS)
def test_the_default_settings_survive_a_round_trip(name):
    config = ITEMS[name].settings
    assert validate(type(config), config.model_dump()) == config


@pytest.mark.parametrize("name", ITEMS)
def test_every_reproduction_lists_the_papers_claims_and_gaps(name):
    paper = ITEMS[name].paper
    numbered = re.fullmatch(r"\w+-(fig|table)(\d)\w?", name)
    if numbered:
        kind, number = numbered.groups()
        assert kind.capitalize() in paper["shows"]
        assert number in paper["shows"]
    assert paper["shows"]
    assert paper["open"]


@pytest.mark.parametrize("name", COMPARISONS)
def test_runs_start_at_the_loss_of_the_papers_plots(name):
    """The plots begin at about 0 to 0.5 in log10, and a start at zero would give -1.71."""
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


@pytest.mark.parametrize("name", COMPARISONS)
def test_diverged_runs_decide_no_statement_about_curves(name):
    data, config = comparison(12, advantage=0.5, rand_scale=1.0, rr_scale=0.1)
    lost = data.copy(data={"gap": np.nan * data.gap})
    assert set(verdicts(ITEMS[name].findings(lost, config)).values()) == {"not tested"}


@pytest.mark.parametrize(
    "points",
    [
        [(3, 1)],  # neither at the first values nor in the order of the axes
        pytest.param([(1, 1), (1, 5), (3, 1), (3, 5)], marks=pytest.mark.slow),
    ],
    ids=["one point", "all"],
)
def test_the_sweep_runs_every_point(points):
    """Points of the sweep differ, and each equals a run alone."""
    config = GainSweep(num_models=(1, 3), local_steps=(5, 1), num_rounds=3, num_seeds=2)
    dataset = GAIN.make(config)
    assert dataset.attrs["manifest"]["config"] == config.model_dump(mode="json")
    ends = dataset.distance.isel(round=-1).mean("seed").values
    assert len(np.unique(ends[..., 1:])) + len(np.unique(ends[..., :1])) > 5
    for num_models, steps in points:
        point = dataset.distance.sel(local_steps=steps, num_models=num_models)
        alone = run(config.at(num_models, steps)).distance.mean("model")
        np.testing.assert_allclose(point.transpose(*alone.dims), alone, rtol=1e-6)


def legend_texts(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def caption(figure):
    return " ".join(figure.get_label().split())


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
    assert "M = 12" in figure.get_label()
    assert r"\eta = 0.1" in figure.get_label()
    # Model 1 has its mean on the left and its four seeds on the right, in the legend's colours.
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
    # verdicts are not in the caption
    assert not re.search("holds?\\b", caption(figure), re.IGNORECASE)


@pytest.mark.parametrize("last_turn", [20, 31])
def test_the_figure_of_the_gain(last_turn):
    """An unreached target has no point in the figure."""
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
    title = plot_comparison(data, config).get_label()
    assert fragment in title
    assert ("(t-1)/M" in title) == ("per" in rate)


@pytest.fixture(params=["comparison", "gain"])
def figure(request):
    if request.param == "comparison":
        data, config = comparison(12, advantage=0.5, rand_scale=1.0, rr_scale=0.1)
        return plot_comparison(data, config)
    data, config = gains(TURNS)
    return plot_gain(data, config)


def test_nothing_in_a_figure_is_cut_or_covered(figure):
    """Panels lie on the page, above the shared legend, and without title and caption."""
    FigureCanvasAgg(figure).draw()
    page = figure.bbox
    assert not figure.texts
    assert figure._suptitle is None
    bottom = max([0, *[legend.get_window_extent().y1 for legend in figure.legends]])
    for axes in figure.axes:
        panel = axes.get_tightbbox()
        assert bottom <= panel.y0 < panel.y1 <= page.y1
        assert page.x0 <= panel.x0 < panel.x1 <= page.x1


def test_a_figure_is_saved_as_png(tmp_path, figure):
    save_figure(figure, tmp_path / "figure.png")
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]
    height, width, channels = imread(tmp_path / "figure.png").shape
    assert (width, height) == pytest.approx(200 * figure.get_size_inches(), abs=1)
    assert channels == 4


def drawn(figure):
    """Maps panel and algorithm to x, y and the lengths of the error bars."""
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
    """Checks that a line has mean 2 and standard error 1, times `y`."""
    np.testing.assert_allclose(line[0], x)
    np.testing.assert_allclose(line[1], 2 * np.array(y))
    np.testing.assert_allclose(line[2], [value for value in y if not np.isnan(value)])


def boxes(figure, artists):
    """Bounding boxes of artists in the rendered figure."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return [artist.get_window_extent(canvas.get_renderer()) for artist in artists]


def panel_of(labels, style="-"):
    return plots.Panel("", "x", "y", [plots.Line(each, X, X, style=style) for each in labels])


@pytest.mark.parametrize("height", [1, 5])
def test_a_long_legend_is_below_the_panels_without_overlap(height):
    labels = [*"abcde", "a long one, too"]
    figure = plots.draw([[panel_of(labels)] * 2] * height, title="Title", caption="Caption " * 40)
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(labels)
    assert not any(axes.get_legend() for axes in figure.axes)
    (below,) = boxes(figure, [legend])
    drawn = [axes.get_tightbbox() for axes in figure.axes]
    assert not any(below.overlaps(panel) for panel in drawn)


@pytest.mark.parametrize("styles", [["-"], ["-?"], ["-", "--", ":"]])
def test_no_two_of_20_lines_look_alike(styles):
    """Lines stay distinct even with bounds in the same color, and share a single legend."""
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


def test_legends_that_differ_stay_with_their_panels():
    several, few = panel_of("abcd"), panel_of("ab", "--")  # "a" has another style there
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
        ([0.10001, 0.10002], ["0.10001", "0.10002"]),  # the first four digits are equal
        (["1", "2"], ["1", "2"]),
    ],
)
def test_titles_of_panels_are_short_and_distinct(labels, shown):
    figure = sweep_overview(sweep_result(rate=[1.0, 2.0], mu=labels))
    assert [axes.get_title() for axes in figure.axes] == [
        f"({letter}) mu = {words}" for letter, words in zip("ab", shown, strict=True)
    ]


def figure_lines(dataset):
    """The number of points of every line in a figure with one panel."""
    (panel,) = drawn(sweep_overview(dataset)).values()
    return [len(x) for x, *_ in panel.values()]


def test_a_sweep_without_algorithms_has_a_line_for_each_label_of_another_axis():
    def renamed(**axes):
        return sweep_result(**axes).rename(algorithm="rule")

    figure = sweep_overview(renamed(rate=[0.1, 0.2], momentum=[0.0, 0.9]))
    panels = drawn(figure)
    assert list(panels) == ["(a) momentum = 0", "(b) momentum = 0.9"]
    assert [list(panel) for panel in panels.values()] == [["A", "B"]] * 2
    numbers = renamed(rate=[0.1, 0.2]).isel(rule=0, drop=True)
    assert figure_lines(numbers) == [2]
    assert figure_lines(renamed()) == [2]  # labels along x


def test_a_sweep_is_drawn_along_a_real_axis_with_a_panel_for_each_value_of_another():
    dataset = sweep_result(num_models=[2, 12], rate=[0.1, 0.2, 0.5], mu=[1.0, 5.0])
    figure = sweep_overview(dataset)
    panels = drawn(figure)
    assert list(panels) == ["(a) num_models = 2", "(b) num_models = 12"]
    for i, panel in enumerate(panels.values()):
        assert list(panel) == ["A", "B"]
        for j, line in enumerate(panel.values()):
            y = [10.0 ** -(12 * j + 6 * i + 2 * k) for k in range(3)]
            check_line(line, [0.1, 0.2, 0.5], y)
    axes = figure.axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("rate", "global loss")
    assert figure.get_label().startswith("After 7 rounds, mu = 1. Means over models")


def test_counts_and_labels_are_drawn_on_a_linear_axis():
    for labels, places in (([2, 12], [2, 12]), (["half", "all"], [0, 1])):
        figure = sweep_overview(sweep_result(size=labels))
        ((title, panel),) = drawn(figure).items()
        assert title == ""
        check_line(panel["B"], places, [1e-2, 1e-3])
        axes = figure.axes[0]
        assert [tick.get_text() for tick in axes.get_xticklabels()] == [str(x) for x in labels]
        assert axes.get_xscale() == "linear"


def test_points_with_a_diverged_run_are_not_drawn():
    """They are skipped even if one seed or model is finite, but absent models do not matter."""
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


def test_a_sweep_is_drawn_if_all_runs_diverged_or_with_one_seed():
    dataset = sweep_result(rate=[0.1, 0.2])
    drawn(sweep_overview(dataset.assign(diverged=dataset.diverged + 4, loss=np.nan * dataset.loss)))
    (panel,) = drawn(sweep_overview(dataset.isel(seed=[1]), "loss")).values()
    assert panel["A"][2] == []  # one seed has no error bar


def test_panels_without_room_are_mentioned():
    figure = sweep_overview(sweep_result(num_models=list(range(1, 9)), rate=[0.1, 0.2]))
    assert len(figure.axes) == 6
    text = figure.get_label()
    assert "the first 6 of 8 num_models." in text
