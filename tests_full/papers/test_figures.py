"""Figures of results are drawn again from `docs/summaries`, without running anything."""

import json
import math
from pathlib import Path

import matplotlib.text
import pytest
import xarray as xr
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from fedjax_mm import plots
from fedjax_mm.experiments.fields import FINISHED
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ALL

ROOT = Path(__file__).parent.parent.parent
SUMMARIES = ROOT / "docs" / "summaries"
COLUMN = 6.5  # inches, the width of a column of text
SHARED = {"maxfl-fig4": "maxfl-fig3", "maxfl-table5": "maxfl-table3", "cb-fig3": "cb-fig2"}
OF_NUMBERS = (  # drawn from the numbers in their summaries alone
    *("bounds-mfa", "cb-table1", "compression-curve", "maxfl-fig5a", "maxfl-fig6", "mfa-fig5"),
    *("mfa-fig7a", "mfa-table5", "private-curve", "theory-gain", "theory-mfa-rand"),
    "theory-mfa-rr",
)
NAMES = sorted({*OF_NUMBERS, *SHARED, *(path.stem for path in SUMMARIES.glob("*.nc"))})


def finite(value):
    """Puts NaN where JSON has null."""
    if isinstance(value, list):
        return [finite(each) for each in value]
    return math.nan if value is None else value


def drawn(name):
    """The figure of an item, from the file of its runs or the numbers in its summary."""
    item, summary = ALL[name], json.loads((SUMMARIES / f"{name}.json").read_text())
    about = summary["manifest"]
    config = validate(type(item.settings), about["config"], context=FINISHED)
    if name in OF_NUMBERS:
        found = summary["measured"]
        for each in (found["data_vars"] | found["coords"]).values():
            each["data"] = finite(each["data"])
        return item.figure(
            xr.Dataset(attrs={"manifest": about}), xr.Dataset.from_dict(found), config
        )
    with xr.open_dataset(SUMMARIES / f"{SHARED.get(name, name)}.nc") as opened:
        result = opened.load().assign_attrs(manifest=about)
    return item.figure(result, item.measure(result, config), config)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:Mean of empty slice:RuntimeWarning")
def test_a_figure_is_legible_in_a_column_of_text(name):
    """Texts have at least 8 points after scaling, and at most two panels stand side by side."""
    figure = drawn(name)
    FigureCanvasAgg(figure).draw()
    width, _ = figure.get_size_inches()
    texts = [each for each in figure.findobj(matplotlib.text.Text) if each.get_text().strip()]
    assert min(each.get_fontsize() for each in texts if each.get_visible()) * COLUMN / width >= 8
    # Panels of these items share their rows of names.
    most = {"multi-compare": 3, "multi-jct": 4}.get(name, 2)
    for row in {
        axes.get_subplotspec().rowspan.start for axes in figure.axes if axes.get_subplotspec()
    }:
        here = [
            axes
            for axes in figure.axes
            if axes.get_subplotspec() and axes.get_subplotspec().rowspan.start == row
        ]
        assert len(here) <= most
    assert figure.get_label()
    assert not figure.texts
    assert figure._suptitle is None  # the page has the caption


@pytest.mark.parametrize("name", NAMES)
def test_the_published_figure_has_its_caption(name):
    with Image.open(ROOT / "docs" / "figures" / f"{name}.png") as image:
        assert image.text["Description"]
        assert abs(image.width / 200 - COLUMN) < 0.02 or image.width < 200 * COLUMN


@pytest.mark.parametrize("kind", plots.drawing.FORMATS)
def test_a_figure_has_the_format_of_its_name(tmp_path, kind):
    figure = plots.draw(
        [[plots.Panel("", "x", "y", plots.lines(xr.DataArray([1.0, 2.0], {"t": [0, 1]})))]],
        title="Title",
        caption="Caption.",
    )
    plots.save_figure(figure, path := tmp_path / f"figure.{kind}")
    start = path.read_bytes()[:2000]
    assert {"png": b"PNG", "pdf": b"%PDF", "svg": b"<svg"}[kind] in start
    with pytest.raises(ValueError, match=r"ends in none of .png, .pdf, .svg"):
        plots.save_figure(figure, tmp_path / "figure.jpg")


def result_of_a_sweep():
    """Losses 1, 3 and 5 of three seeds at two rates, times 10 for the second method."""
    loss = xr.DataArray([1.0, 3.0, 5.0], dims="seed") * xr.DataArray([1.0, 10.0], dims="algorithm")
    loss = (loss.expand_dims(rate=2, round=4, model=2)).transpose(
        "algorithm", "rate", "seed", "round", "model"
    )
    coords = {"algorithm": ["A", "B"], "rate": [0.1, 0.2], "round": [0, 10, 20, 30]}
    result = xr.Dataset({"loss": loss}, coords)
    sent = (result["round"] * 2.0).expand_dims(seed=3, model=2).transpose("seed", "round", "model")
    diverged = xr.full_like(result.loss.isel(round=0, drop=True), -1, int)
    return result.assign(client_updates=sent, diverged=diverged)


def test_curves_have_means_and_bands_over_seeds():
    figure = plots.curves(result_of_a_sweep(), hue="algorithm", col="rate")
    assert [axes.get_title() for axes in figure.axes] == ["(a) rate = 0.1", "(b) rate = 0.2"]
    a, b = figure.axes[0].containers
    assert (a.get_label(), b.get_label()) == ("A", "B")
    assert b[0].get_ydata().tolist() == [30] * 4
    assert a[2][0].get_segments()[0][:, 1] == pytest.approx([3 - 2 / 3**0.5, 3 + 2 / 3**0.5])
    assert figure.axes[0].get_yscale() == "log"
    assert "3 seeds, with bands of a standard error" in figure.get_label()


def test_curves_may_have_another_x():
    result = result_of_a_sweep()
    figure = plots.curves(result, "client_updates", hue="algorithm", col="rate", scale="linear")
    assert figure.axes[0].containers[1][0].get_xdata().tolist() == [0, 20, 40, 60]
    figure = plots.curves(result, "rate", hue="algorithm")
    assert figure.axes[0].containers[0][0].get_xdata().tolist() == [0.1, 0.2]
    single = plots.curves(result.isel(seed=[0], rate=0), hue="algorithm")
    assert "bands" not in single.get_label()
    of_one = plots.curves(result.isel(model=0, rate=0), hue="algorithm")
    assert of_one.axes[0].containers[1][0].get_ydata().tolist() == [30] * 4


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"hue": "method"}, "no axis 'method', but algorithm, rate"),
        ({"hue": "algorithm"}, r"axis 'rate', too; choose a value .* result.isel\(rate=0\)"),
        ({"x": "epoch"}, "x is 'epoch'; choose from round"),
        ({"metric": "lss"}, "metric is 'lss'; choose from loss"),
    ],
)
def test_curves_of_unknown_names_are_refused(how, message):
    with pytest.raises(ValueError, match=message):
        plots.curves(result_of_a_sweep(), **how)
