"""Figures drawn with matplotlib, which need no display."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.container import Container
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from fedjax_mm.checks.instances import check_instance
from fedjax_mm.metrics import standard_error
from fedjax_mm.results.labels import label as in_words
from fedjax_mm.tools.files import write_aside

__all__ = [
    "Line",
    "Panel",
    "client_distribution",
    "curves",
    "draw",
    "lines",
    "panels",
    "save_figure",
    "sweep_overview",
    "timelines",
]

_SMALL = 8.5  # points, of the smallest text
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that figures look alike everywhere
    "font.size": 9,
    "xtick.labelsize": _SMALL,
    "ytick.labelsize": _SMALL,
    "legend.fontsize": _SMALL,
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "none",
    "svg.hashsalt": "fedjax_mm",  # equal figures are equal files
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
# Okabe and Ito's colors, which differ for people with color blindness.
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4c4c4c", "#8a5a2b")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# Dashes and gaps of dotted lines, short enough to show three dots in a legend.
_DASHES = {"--": (2.5, 1.2), "-": (5.0, 1.2), ":": (1.0, 4.0)}
_DOT = (1.0, 1.2)
_MOST_PANELS = 6
_MOST_BARS = 12  # points with error bars; longer lines get an error band
_MOST_BARRED = 40  # error bars in a panel, which would hide each other
_SHIFT = 4.0  # points between neighboring error bars, so that they do not hide each other
_MOST_INSIDE = 3  # maximum number of legend entries inside a panel
GRAY = "0.55"
FORMATS = ("png", "pdf", "svg")
WIDTH = 6.5  # inches: that of a column of text, in which figures are shown without scaling
_IN_A_ROW = 2  # panels

Entries = Mapping[str, Any]
"""Legend entries, from labels to the objects that matplotlib drew."""


class Line(NamedTuple):
    """A curve, points or bars.

    Attributes:
      label: the label in the legend, or "" for none.
      x: ``[points]``.
      y: ``[points]``; NaN is skipped.
      errors: standard errors, drawn as error bars if given.
      style: "bar", or a matplotlib style such as "--" or "o", in which "?" stands for the marker
        chosen by the line's position.
      color: a number or a matplotlib color; None uses the line's position in its panel. There are 8
        colors; the next 8 numbers reuse them with a dot after each dash, and later ones with two.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    errors: np.ndarray | None = None
    style: str = "-"
    color: int | str | None = None


class Panel(NamedTuple):
    """Lines on one pair of axes.

    Attributes:
      title: the title above the axes.
      xlabel: the label of the x-axis.
      ylabel: the label of the y-axis.
      lines: the curves, points and bars.
      marks: the positions of vertical lines, by label.
      limits: the limits of the y-axis.
      scale: the scale of the y-axis, "linear" or "log".
      xscale: the scale of the x-axis.
      ticks: ticks of the x-axis by their text; if empty, matplotlib chooses them.
    """

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[Line]
    marks: Mapping[str, float] = MappingProxyType({})
    limits: tuple[float, float] | None = None
    scale: str = "linear"
    xscale: str = "linear"
    ticks: Mapping[str, float] = MappingProxyType({})


def diagonal(label: str, x: np.ndarray) -> Line:
    """Returns the line y = x, dashed and gray."""
    ends = np.array([x.min(), x.max()])
    return Line(label, ends, ends, style="--", color=GRAY)


def lines(
    values: xr.DataArray, errors: xr.DataArray | None = None, style: str = "-?", **how: Any
) -> list[Line]:
    """Returns one line per coordinate of the first dimension, with the second one as x.

    Args:
      values: values over ``(series, x)``, or ``(x,)`` for one line.
      errors: the standard errors, with the same dimensions.
      style: the style of all lines.
      **how: other attributes of all lines; a `label` is prepended to the series' labels.

    Example:
      >>> loss = xr.DataArray([[3.0, 1.0], [3.0, 2.0]], {"M": [2, 9], "round": [0, 10]})
      >>> [(line.label, line.y.tolist()) for line in lines(loss)]
      [('M = 2', [3.0, 1.0]), ('M = 9', [3.0, 2.0])]
    """
    prefix = how.pop("label", "")
    if values.ndim == 1:
        bars = None if errors is None else errors.values
        x = _numbers(values[values.dims[0]].values)
        return [Line(prefix, x, values.values, bars, style, **how)]
    series = str(values.dims[0])
    return [
        line._replace(label=f"{prefix}{in_words(series, at)}", color=how.get("color", number))
        for number, at in enumerate(values[series].values)
        for line in lines(values.isel({series: number}), _at(errors, series, number), style, **how)
    ]


def panels(
    values: xr.DataArray,
    errors: xr.DataArray | None = None,
    *,
    xlabel: str,
    ylabel: str,
    more: Sequence[Line] = (),
    style: str = "-?",
    **how: Any,
) -> list[Panel]:
    """Returns one panel per coordinate of the first dimension.

    Args:
      values: values over ``(panel, series, x)``, with NaN for missing ones. All x become ticks if
        they are words or a few numbers.
      errors: the standard errors, with the same dimensions.
      xlabel: the x-label of every panel.
      ylabel: the y-label of every panel.
      more: additional lines for every panel.
      style: the style of the lines.
      **how: other attributes of the panels.

    Example:
      >>> axes = {"M": [2, 9], "algorithm": ["MFA-RR"], "round": [0, 10]}
      >>> loss = xr.DataArray([[[3.0, 1.0]], [[3.0, 2.0]]], axes)
      >>> [panel.title for panel in panels(loss, xlabel="round", ylabel="loss")]
      ['M = 2', 'M = 9']
    """
    panel, _, x = map(str, values.dims)
    ticks = how.pop("ticks", _ticks(values[x].values)) if how.get("xscale") != "log" else {}
    return [
        Panel(
            in_words(panel, at),
            xlabel,
            ylabel,
            [*lines(values.isel({panel: i}), _at(errors, panel, i), style), *more],
            ticks=ticks,
            **how,
        )
        for i, at in enumerate(values[panel].values)
    ]


def draw(
    rows: Sequence[Sequence[Panel]], *, title: str, caption: str, share: bool = True
) -> Figure:
    """Draws a figure of panels, one column of text wide.

    Args:
      rows: rows of panels; a row of more than two panels is continued in the next one.
      title: a few words on all panels. Like the caption it is not drawn: a page shows both below
        the figure.
      caption: how the numbers were computed. `save_figure` writes it into the file.
      share: whether panels in a row with the same y-label share a y-axis.

    Example:
      >>> line = Line("FedAvg", np.array([0, 10]), np.array([3.0, 1.0]))
      >>> panel = Panel("Quadratic", "round", "loss", [line])
      >>> figure = draw([[panel, panel]], title="Two panels", caption="Loss of one seed.")
      >>> len(figure.axes), figure.get_label()
      (2, 'Two panels. Loss of one seed.')
    """
    pairs = [row[i : i + _IN_A_ROW] for row in rows for i in range(0, len(row), _IN_A_ROW)]
    with mpl.rc_context(STYLE):
        width, height = max(map(len, pairs)), len(pairs)
        figure = Figure(figsize=(WIDTH, 0.3 + 2.6 * height))
        grid = figure.subplots(height, width, squeeze=False)
        # Continue after "z" with "aa", because a grid of bounds can have more than 26 panels.
        letters = (first + last for first in ("", *ascii_lowercase) for last in ascii_lowercase)
        for row, columns in zip(pairs, grid, strict=True):
            for axes in columns[len(row) :]:
                axes.remove()
            for j, (axes, panel) in enumerate(zip(columns, row, strict=False)):
                is_shared = share and j > 0 and panel.ylabel == row[j - 1].ylabel
                if is_shared:
                    axes.sharey(columns[j - 1])
                _fill(axes, panel)
                ylabel = "" if is_shared else panel.ylabel
                name = f"({next(letters)}) {panel.title}" if width * height > 1 else panel.title
                finish(axes, _wrapped(name, 84 // width), panel.xlabel, ylabel)
        below = _legends(figure, [panel for row in pairs for panel in row])
        arrange(figure, title, caption, below)
    return figure


def _wrapped(text: str, width: int) -> str:
    """Returns text in lines of a width, counting a formula by what is shown of it."""
    shown = re.sub(r"\\[a-z]+", "x", text, flags=re.IGNORECASE)
    is_short = len(re.sub(r"[$^_{}]", "", shown)) <= width
    return text if is_short else textwrap.fill(text, width)


def _fill(axes: Axes, panel: Panel) -> None:
    is_crowded = sum(len(line.x) for line in panel.lines if _has_bars(line)) > _MOST_BARRED
    is_crowded &= not any("?" in line.style for line in panel.lines)  # points have no bands
    barred = [n for n, line in enumerate(panel.lines) if _has_bars(line) and not is_crowded]
    is_same = len({tuple(panel.lines[number].x) for number in barred}) == 1
    middle = (len(barred) - 1) / 2
    axes.margins(x=0.05 + 0.01 * len(barred))
    for number, line in enumerate(panel.lines):
        is_banded = number not in barred
        drawn = _draw(axes, line, number, _marked(panel, number), is_banded=is_banded)
        if is_same and number in barred:  # shift lines sideways, because their bars would overlap
            inches = _SHIFT * (barred.index(number) - middle) / 72
            offset = ScaledTranslation(inches, 0, axes.figure.dpi_scale_trans)
            for artist in drawn.get_children():
                artist.set_transform(artist.get_transform() + offset)
    for (label, x), style in zip(panel.marks.items(), ("-", "--"), strict=False):
        axes.axvline(x, color="0.45", lw=1.0, ls=style, label=label, zorder=0)
    axes.set(xscale=panel.xscale, yscale=panel.scale)
    if panel.limits is not None:
        axes.set_ylim(panel.limits)
    if panel.ticks:
        is_crowded = max(map(len, panel.ticks)) * len(panel.ticks) > 45
        turned: dict[str, Any] = {"rotation": 35, "ha": "right"} if is_crowded else {}
        # Do not wrap rotated labels, because two lines would overlap their neighbors.
        texts = [text if is_crowded else textwrap.fill(text, 20) for text in panel.ticks]
        axes.set_xticks(list(panel.ticks.values()), texts, **turned)


def _has_bars(line: Line) -> bool:
    return line.errors is not None and line.style != "bar" and len(line.x) <= _MOST_BARS


def _legends(figure: Figure, panels: Sequence[Panel]) -> Entries:
    """Draws the panels' legends, or returns the entries of a shared legend if that is better."""
    entries: list[Entries] = []
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries.append(dict(zip(labels, handles, strict=True)))
    # Share the legend if panels are too full, so that it does not hide lines, or if all legends are
    # equal.
    is_full = [len(texts) > _MOST_INSIDE for texts in entries]
    is_same = len(entries) > 1 and len(set(map(tuple, entries))) == 1
    looks = {entry for panel in panels for entry in _looks(panel)}
    is_clear = all(len(set(part)) == len(looks) for part in zip(*looks, strict=True))
    if (any(is_full) or is_same) and is_clear:
        return {text: handle for each in entries for text, handle in each.items()}
    for axes, texts, full in zip(figure.axes, entries, is_full, strict=True):
        if full:  # place the legend below the panel's x-label
            below: dict[str, Any] = {"bbox_to_anchor": (0.5, 0), "borderaxespad": 6, "ncols": 2}
            axes.legend(loc="upper center", **below)
        elif texts:
            axes.legend(loc="best")
    return {}


def _looks(panel: Panel) -> list[tuple[str, Any]]:
    """Returns the entries of a panel's legend and their appearance."""
    found: list[tuple[str, Any]] = []
    for number, line in enumerate(panel.lines):
        found += [(line.label, _look(line, number))] * bool(line.label)
    return found + [(label, ("mark", i)) for i, label in enumerate(panel.marks)]


def _look(line: Line, number: int) -> tuple[str, str, tuple[float, ...]]:
    """Returns a line's color, its style including marker, and its dashes if dotted."""
    color, turn = number if line.color is None else line.color, 0
    if isinstance(color, int):
        turn, color = divmod(color, len(COLORS))
        color = COLORS[color]
    # Use different markers too, because lines may share a color.
    style = line.style.replace("?", MARKERS[(number + turn) % len(MARKERS)])
    kind = next((kind for kind in _DASHES if style.startswith(kind)), None)
    return color, style, (*_DASHES[kind], *_DOT * turn) if kind and turn else ()


def _marked(panel: Panel, number: int) -> list[int]:
    """Returns points of a long line that get a marker, to tell it from others without color."""
    line = panel.lines[number]
    x = np.asarray(line.x, float)
    is_long = len(x) > _MOST_BARS // 2 and bool(np.isfinite(x).all())
    if line.style != "-" or len(panel.lines) < 2 or not is_long:
        return []
    if panel.xscale == "log":
        x = np.log(np.maximum(x, np.min(x[x > 0], initial=1)))
    shares = (np.arange(6) + 0.15 + 0.7 * (number % len(MARKERS)) / len(MARKERS)) / 6
    places = x.min() + np.ptp(x) * shares
    return np.unique(np.abs(x[:, None] - places).argmin(0)).tolist()


def _draw(
    axes: Axes, line: Line, number: int, marked: Sequence[int], *, is_banded: bool
) -> Container:
    color, style, dashes = _look(line, number)
    how: dict[str, Any] = {"color": color, "label": line.label or "_", "capsize": 2}
    if line.style == "bar":
        return axes.bar(line.x, line.y, 0.23, yerr=line.errors, **how)
    errors = line.errors
    if errors is not None and is_banded:  # error bars would overlap
        axes.fill_between(line.x, line.y - errors, line.y + errors, color=how["color"], alpha=0.2)
        errors = None
    if marked:
        style += MARKERS[(line.color if isinstance(line.color, int) else number) % len(MARKERS)]
        how |= {"markevery": list(marked)}
    curve = axes.errorbar(line.x, line.y, errors, fmt=style, ms=4.5, lw=1.3, **how)
    if dashes:
        curve[0].set_linestyle((0, dashes))
    return curve


def _at(errors: xr.DataArray | None, dim: str, index: int) -> xr.DataArray | None:
    return None if errors is None else errors.isel({dim: index})


def _numbers(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.kind in "fiu" else np.arange(len(x))


def _ticks(x: np.ndarray) -> dict[str, float]:
    if x.dtype.kind not in "fiu":
        return {str(word): float(place) for place, word in enumerate(x)}
    return {f"{value:g}": float(value) for value in x} if len(x) <= 12 else {}


def curves(
    result: xr.Dataset,
    x: str = "round",
    hue: str | None = None,
    col: str | None = None,
    *,
    metric: str | None = None,
    scale: str | None = None,
) -> Figure:
    """Draws means over models and seeds, with bands of a standard error over seeds.

    Args:
      result: the result of `sweep` or `run`.
      x: "round", an axis, at the last record, or a metric that counts, such as "client_updates".
      hue: the axis with one line for each value.
      col: the axis with one panel for each value.
      metric: the metric to draw; defaults to the excess loss, the loss, or else the first metric.
      scale: of the y-axis, "linear" or "log"; by default logarithmic if all means are positive.

    Returns:
      The figure. Runs in which a model diverged are left out. A single seed has no band.

    Raises:
      ValueError: if the result lacks a name, or has another axis, of which a value must be chosen.

    Example:
      >>> from fedjax_mm import fedavg, mfa_rand, mfa_rr, sweep
      >>> from fedjax_mm.sweeps import Setup
      >>> from fedjax_mm.tasks import quadratic
      >>> def build(assignment):
      ...     return Setup(quadratic(4, 1, mu=0.5), fedavg(0.1, local_steps=2), assignment(4, 2))
      >>> result = sweep(build, {"assignment": [mfa_rand, mfa_rr]}, num_rounds=20, num_seeds=3)
      >>> curves(result, hue="assignment").axes[0].get_legend_handles_labels()[1]
      ['mfa_rand', 'mfa_rr']
    """
    metric = _metric(result, metric)
    result = result if "model" in result.dims else result.expand_dims("model", -1)
    values = result[metric].astype(float).where((result.diverged < 0).all("model"))
    axes = [str(dim) for dim in values.dims if dim not in ("seed", "round", "model")]
    for name in {hue, col} - {None, *axes}:
        raise ValueError(f"the result has no axis {name!r}, but {', '.join(axes) or 'none'}")
    if x not in ("round", *axes, *result.data_vars):
        raise ValueError(f"x is {x!r}; choose from round, {', '.join(map(str, result.variables))}")
    if others := [name for name in axes if name not in (x, hue, col)]:
        raise ValueError(
            f"the result has the axis {others[0]!r}, too; choose a value of it, as in "
            f"result.isel({others[0]}=0), or give it as hue or col"
        )
    runs = (values if x not in axes else values.isel(round=-1)).mean("model")
    mean, num_seeds = runs.mean("seed"), runs.sizes["seed"]
    error = mean.copy(data=standard_error(runs.values, runs.get_axis_num("seed")))
    along = x if x in axes else "round"
    drawn = []
    for number in range(mean.sizes[col] if col else 1):
        here = {col: number} if col else {}
        order = (*[hue] * bool(hue), along)
        parts = [each.isel(here).transpose(*order) for each in (mean, error)]
        found = lines(parts[0], parts[1] if num_seeds > 1 else None, "-" if x not in axes else "-?")
        if x in result.data_vars:
            cost = result[x].mean(("seed", "model")).broadcast_like(mean).isel(here)
            places = cost.transpose(*order).values.reshape(-1, mean.sizes["round"])
            found = [line._replace(x=place) for line, place in zip(found, places, strict=True)]
        title = in_words(str(col).replace("_", " "), mean[col].values[number]) if col else ""
        drawn.append(Panel(title, x.replace("_", " "), _long_name(result[metric]), found))
    is_positive = bool((mean > 0).any() and not (mean <= 0).any())
    scale = scale or ("log" if is_positive else "linear")
    spread = ", with bands of a standard error" * (num_seeds > 1)
    return draw(
        [[panel._replace(scale=scale) for panel in drawn]],
        title="",
        caption=f"Means over models and {num_seeds} seeds{spread}.",
    )


def _metric(dataset: xr.Dataset, metric: str | None) -> str:
    """Returns the metric to draw, which the dataset must have."""
    check_instance("dataset", dataset, xr.Dataset, "give the result of sweep or run")
    known = [name for name in ("excess_loss", "loss") if name in dataset]
    metric = metric or [*known, *map(str, dataset.data_vars)][0]
    if metric not in dataset:
        found = [name for name, values in dataset.data_vars.items() if "round" in values.dims]
        raise ValueError(f"metric is {metric!r}; choose from {', '.join(map(str, found))}")
    return metric


def _long_name(values: xr.DataArray) -> str:
    return str(values.attrs.get("long_name", str(values.name).replace("_", " ")))


def sweep_overview(dataset: xr.Dataset, metric: str | None = None) -> Figure:
    """Draws the final values of a sweep, with a numeric axis as x and another axis as panels.

    Args:
      dataset: the result of a sweep. Lines are the values of the axis ``algorithm`` or, without it,
        of the first axis of words, unless it is the only axis.
      metric: the metric to draw; defaults to the excess loss, the loss, or else the first metric.

    Raises:
      ValueError: if the dataset lacks the metric.

    Example:
      >>> from fedjax_mm import fedavg, full_participation, local_sgd, sweep
      >>> from fedjax_mm.sweeps import Grid, Setup
      >>> from fedjax_mm.tasks import quadratic
      >>> def build(algorithm, learning_rate):
      ...     method = algorithm(local_sgd(learning_rate, steps=2))
      ...     return Setup(quadratic(2, 1, mu=0.5), method, full_participation(2))
      >>> axes = {"algorithm": [fedavg], "learning_rate": [0.1, 0.2]}
      >>> figure = sweep_overview(sweep(Grid(build, axes, num_rounds=5, num_seeds=2)))
      >>> figure.axes[0].get_xlabel()
      'learning rate'
    """
    metric = _metric(dataset, metric)
    if "algorithm" not in dataset.dims:  # use another axis of words, or draw a single line
        dims = list(map(str, dataset[metric].dims[:-3]))
        words = [dim for dim in dims if dataset[dim].dtype.kind not in "fiu"]
        if len(dims) > 1 and words:
            dataset = dataset.rename({words[0]: "algorithm"})
        else:
            dataset = dataset.expand_dims(algorithm=[""])
    values = dataset[metric]
    axes = [str(dim) for dim in values.dims[:-3] if dim != "algorithm"]
    # Prefer an axis of real numbers, then of counts, then any axis.
    x = min(axes, key=lambda name: "fiu".find(values[name].dtype.kind) % 4)
    panel, *others = [name for name in axes if name != x] or ["panel"]
    # Average over the models of a run, skipping models that are absent but not diverged ones.
    is_whole = (dataset.diverged < 0).all("model")
    end = values.isel(round=-1).astype(float).mean("model").where(is_whole)
    end = end.isel(dict.fromkeys(others, 0))
    if panel not in end.dims:
        end = end.expand_dims(panel)
    titles = [f"{panel} = {name}" for name in _shown(end[panel])] if panel in axes else [""]
    end = end.assign_coords({panel: titles}).isel({panel: slice(_MOST_PANELS)})
    mean, num_seeds = end.mean("seed", skipna=False), end.sizes["seed"]
    error = mean.copy(data=standard_error(end.values, end.get_axis_num("seed")))
    order = (panel, "algorithm", x)
    is_positive = bool((mean > 0).any() and not (mean <= 0).any())
    is_log = values[x].dtype.kind == "f" and bool((values[x] > 0).all())
    more = f"; the first {_MOST_PANELS} of {len(titles)} {panel}" * (len(titles) > _MOST_PANELS)
    fixed = "".join(f", {name} = {_shown(values[name][:1])[0]}" for name in others)
    figure_of = panels(
        mean.transpose(*order),
        error.transpose(*order),
        xlabel=x.replace("_", " "),
        ylabel=str(values.attrs["long_name"]),
        xscale="log" if is_log else "linear",
        scale="log" if is_positive else "linear",
    )
    return draw(
        [figure_of],
        title=f"After {values['round'].values[-1]} rounds{fixed}",
        caption=f"Means over models and {num_seeds} seeds, with standard errors over seeds; points "
        f"where a run diverged are not drawn{more}.",
    )


def client_distribution(dataset: xr.Dataset, metric: str, *, round: int | None = None) -> Figure:
    """Draws how a metric is distributed over clients, with a panel for each model.

    Clients are sorted by their values in every run, and the k-th smallest ones are averaged over
    seeds. A flat line means that all clients are alike, and its left end shows the clients with the
    smallest values.

    Args:
      dataset: a result over ``(..., seed, round, model, client)``, or without seeds. Lines are the
        values of the axis ``algorithm`` or, without it, of the first axis. Other axes are drawn at
        their first value.
      metric: a metric with one number per client, such as ``client_test_accuracy``.
      round: a recorded round; defaults to the last one.

    Raises:
      ValueError: if the dataset has no such metric over clients, or no such record.

    Example:
      >>> from fedjax_mm import fedavg, mfa_rand, sweep
      >>> from fedjax_mm.sweeps import Setup
      >>> from fedjax_mm.tasks import quadratic, with_clients
      >>> def build(learning_rate):
      ...     task = with_clients(quadratic(6, 1, mu=0.5), ["loss"])
      ...     return Setup(task, fedavg(learning_rate, local_steps=2), mfa_rand(6, 2))
      >>> result = sweep(build, {"learning_rate": [0.1, 0.2]}, num_rounds=5, num_seeds=2)
      >>> figure = client_distribution(result, "client_loss")
      >>> [axes.get_title() for axes in figure.axes]
      ['(a) model = 1', '(b) model = 2']
    """
    check_instance("dataset", dataset, xr.Dataset, "give the result of sweep, run or to_dataset")
    found = [str(name) for name, x in dataset.data_vars.items() if "client" in x.dims]
    if metric not in found:
        raise ValueError(
            f"metric is {metric!r}, and the metrics with a number for each client are "
            f"{', '.join(found) or 'none'}; record some by tasks.with_clients"
        )
    rounds = dataset["round"].values
    at = rounds[-1] if round is None else round
    if at not in rounds:
        raise ValueError(f"round is {round}, which was not recorded; choose from {list(rounds)}")
    values = dataset[metric].sel(round=at)
    if "seed" not in values.dims:
        values = values.expand_dims("seed")
    axes = [str(dim) for dim in values.dims if dim not in ("seed", "model", "client")]
    series, *others = sorted(axes, key=lambda axis: axis != "algorithm") or ["algorithm"]
    fixed = "".join(f", {name} = {_shown(values[name][:1])[0]}" for name in others)
    values = values.isel(dict.fromkeys(others, 0))
    if not axes:
        values = values.expand_dims(algorithm=[""])
    numbers = np.sort(values.transpose("model", series, "seed", "client").values, axis=-1)
    of_seeds = values.transpose("model", series, "seed", "client").copy(data=numbers)
    num_clients, num_seeds = of_seeds.sizes["client"], of_seeds.sizes["seed"]
    of_seeds = of_seeds.assign_coords(client=(np.arange(num_clients) + 0.5) / num_clients)
    mean = of_seeds.mean("seed", skipna=False)
    error = of_seeds.std("seed", ddof=1) / np.sqrt(num_seeds) if num_seeds > 1 else None
    shown = mean.sizes["model"]
    figure_of = panels(
        mean.isel(model=slice(_MOST_PANELS)),
        None if error is None else error.isel(model=slice(_MOST_PANELS)),
        xlabel="share of clients",
        ylabel=metric.replace("_", " "),
        style="-",
        ticks={},
    )
    more = f"; the first {_MOST_PANELS} of {shown} models" * (shown > _MOST_PANELS)
    return draw(
        [figure_of],
        title=f"Clients after {at} rounds{fixed}",
        caption=f"Values of {num_clients} clients, sorted in every run and averaged over "
        f"{num_seeds} seeds, with standard errors{more}.",
    )


def timelines(result: xr.Dataset) -> Figure:
    """Draws the clients that train each model per round, stacked, from record to record.

    With `finishing` and `arriving`, it shows who gets the clients of a model that is done.

    Args:
      result: a result over ``(round, model)`` or ``(seed, round, model)``, over whose seeds numbers
        are averaged.

    Raises:
      ValueError: if the result has other axes, of which values must be chosen, or one record.

    Example:
      >>> from fedjax_mm import fedavg, mfa_rr, simulate, to_dataset
      >>> from fedjax_mm.availability import arriving
      >>> from fedjax_mm.tasks import quadratic
      >>> assignment = arriving(mfa_rr(6, 2), [0, 3])
      >>> _, trace = simulate(0, quadratic(6, 1, mu=0.5), fedavg(0.1, local_steps=1), assignment, 6)
      >>> timelines(to_dataset(trace)).axes[0].get_ylabel()
      'clients per round'
    """
    check_instance("result", result, xr.Dataset, "give the result of sweep, run or to_dataset")
    total = result["client_updates"]
    if others := [str(dim) for dim in total.dims if dim not in ("seed", "round", "model")]:
        raise ValueError(
            f"the result has the axis {others[0]!r}, too; choose a value of it, as in "
            f"result.isel({others[0]}=0)"
        )
    if total.sizes["round"] < 2:
        raise ValueError("the result has one record; record more often (record_every)")
    total = total.mean("seed") if "seed" in total.dims else total
    rounds = total["round"].values
    each = total.transpose("model", "round").diff("round").values / np.diff(rounds)
    # The number of a record is that of the rounds since the record before.
    stacked = np.cumsum([0 * each[0], *each], axis=0)[:, [0, *range(each.shape[1])]]
    names = total["model"].values if "model" in total.coords else range(1, len(each) + 1)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.0))
        axes = figure.subplots()
        drawn = {}
        for number, name in enumerate(names):
            look: dict[str, Any] = {"color": COLORS[number % len(COLORS)], "lw": 0}
            below, above = stacked[number : number + 2]
            area = axes.fill_between(rounds, below, above, step="pre", alpha=0.8, **look)
            drawn[in_words("model", name)] = area
        axes.set_xlim(rounds[0], rounds[-1])
        axes.set_ylim(0, None)
        finish(axes, "", "round", "clients per round")
        arrange(figure, "", "The clients that train each model, from record to record.", drawn)
    return figure


def save_figure(figure: Figure, path: Path | str) -> None:
    """Writes a figure atomically, as a PNG, PDF or SVG file by the suffix of its name.

    The caption of `draw` becomes the file's description.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as directory:
      ...     save_figure(Figure(), path := f"{directory}/figure.png")
      ...     Path(path).read_bytes()[1:4]
      b'PNG'
    """
    kind = Path(path).suffix.removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(f"{Path(path).name} ends in none of .{', .'.join(FORMATS)}")
    about: dict[str, Any] = {"Subject" if kind == "pdf" else "Description": figure.get_label()}
    about |= {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[kind]

    def write(aside: Path) -> None:
        with mpl.rc_context(STYLE):
            figure.savefig(aside, format=kind, dpi=200, metadata=about)

    write_aside(Path(path), write)


def _shown(labels: xr.DataArray) -> list[str]:
    """Returns an axis's labels, with numbers rounded to four digits if they stay distinct."""
    values = labels.values
    short = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in values]
    return short if len(set(short)) == len(short) else list(map(str, values))


def finish(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    """Sets the title and axis labels of a panel."""
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)


def arrange(
    figure: Figure, title: str, caption: str, entries: Entries = MappingProxyType({})
) -> None:
    """Lays out the panels and a shared legend below them, and keeps the caption for `save_figure`.

    Args:
      figure: the figure.
      title: the first sentence of the caption.
      caption: the rest of it.
      entries: the shared legend.
    """
    figure.set_label(". ".join(filter(None, (title.rstrip("."), caption))))
    width, height = figure.get_size_inches()
    columns = max(1, int(width / (0.7 + 0.07 * max(map(len, entries), default=1))))
    rows = -(-len(entries) // columns)
    legend = 0.1 + 0.18 * rows if entries else 0.0  # inches
    if entries:
        columns = -(-len(entries) // rows)
        height += legend  # the panels must keep their size
        figure.set_size_inches(width, height)
        # Reorder the entries to read row by row, because matplotlib fills column by column.
        texts = [text for i in range(columns) for text in list(entries)[i::columns]]
        handles = [entries[text] for text in texts]
        place: dict[str, Any] = {"bbox_to_anchor": (0.5, 0), "borderaxespad": 0.2}
        figure.legend(handles, texts, ncols=columns, loc="lower center", **place)
    figure.set_layout_engine("tight", rect=(0, legend / height, 1, 1))
