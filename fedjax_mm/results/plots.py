"""Figures. The only module that draws with matplotlib; nothing here needs a display."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedjax_mm.files import write_aside

_STYLE: dict[Any, Any] = {
    "font.family": "serif",
    "mathtext.fontset": "cm",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
_COLORS = ("#c44e52", "#2b5c8a", "#55a868", "#8172b2", "#ccb974", "#64b5cd", "#4c4c4c", "#dd8452")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_MOST_PANELS = 6


def mean_and_runs(curves: xr.DataArray, *, title: str, ylabel: str, caption: str) -> Figure:
    """Two panels: (a) the mean over seeds, (b) every seed's curve, its last fifth enlarged.

    Args:
      curves: over ``(algorithm, seed, round)``.
      title: above both panels.
      ylabel: of both panels.
      caption: below them.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9.0, 4.1))
        left, right = figure.subplots(1, 2, sharex=True, sharey=True)
        labels = [str(label) for label in curves.algorithm.values]
        rounds = curves["round"].values
        inset = right.inset_axes((0.42, 0.36, 0.55, 0.36))
        last = slice(-max(2, len(rounds) // 5), None)
        for label, color in zip(labels, _cycle(_COLORS, labels), strict=True):
            runs = curves.sel(algorithm=label).transpose("seed", "round").values
            left.plot(rounds, runs.mean(0), color=color, lw=1.6)
            right.plot(rounds, runs.T, color=color, lw=0.5, alpha=0.55)
            inset.plot(rounds[last], runs.T[last], color=color, lw=0.5, alpha=0.7)
        inset.tick_params(labelsize=7)
        inset.set_xlim(rounds[last][0], rounds[-1])
        _finish(left, f"(a) mean of {curves.sizes['seed']} runs", "round $t$", ylabel)
        _finish(right, f"(b) {curves.sizes['seed']} runs each", "round $t$", "")
        lines = [Line2D([], [], color=c, lw=1.6) for c in _cycle(_COLORS, labels)]
        for axes in (left, right):
            axes.legend(lines, labels, loc="upper right")
            axes.set_xlim(rounds[0], rounds[-1])
        _arrange(figure, title, caption)
    return figure


def lines_with_errors(
    values: xr.DataArray,
    errors: xr.DataArray,
    *,
    x: str,
    series: str,
    panel: str,
    series_label: str,
    xlabel: str,
    ylabel: str,
    title: str,
    caption: str,
    diagonal: str | None = None,
    scales: tuple[str, str] = ("linear", "linear"),
) -> Figure:
    """One panel per entry of `panel`, one line with error bars per entry of `series`.

    Args:
      values: over ``(panel, series, x)``; NaN where there is no value.
      errors: standard errors, likewise.
      x: the name of that dimension.
      series: likewise.
      panel: likewise.
      series_label: a format such as ``"E = {}"``.
      xlabel: of every panel.
      ylabel: of the first panel.
      title: above the panels.
      caption: below them.
      diagonal: the label of the line y = x, drawn if given.
      scales: of x and of y, "linear" or "log".
    """
    with mpl.rc_context(_STYLE):
        panels = values[panel].values
        figure = Figure(figsize=(4.5 * len(panels), 4.1))
        row = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        names = values[series].values
        is_words = values[x].dtype.kind not in "fiu"
        places = np.arange(values.sizes[x]) if is_words else values[x].values
        for axes, name, letter in zip(row, panels, "abcdefgh", strict=False):
            for key, color, marker in zip(
                names, _cycle(_COLORS, names), _cycle(_MARKERS, names), strict=True
            ):
                at = {panel: name, series: key}
                axes.errorbar(
                    places,
                    values.sel(at).values,
                    errors.sel(at).values,
                    color=color,
                    marker=marker,
                    ms=5,
                    lw=1.3,
                    capsize=2.5,
                    label=series_label.format(key),
                )
            if diagonal:
                ends = [values[x].values.min(), values[x].values.max()]
                axes.plot(ends, ends, color="0.55", lw=0.9, ls="--", label=diagonal, zorder=0)
            axes.set(xscale=scales[0], yscale=scales[1])
            if is_words:
                axes.set_xticks(places, [textwrap.fill(str(word), 20) for word in values[x].values])
            elif scales[0] == "linear" and len(places) <= 12:
                axes.set_xticks(places)
            _finish(axes, f"({letter}) {name}", xlabel, ylabel if axes is row[0] else "")
            axes.legend(loc="best")
        _arrange(figure, title, caption)
    return figure


def curves_and_bounds(
    curves: xr.DataArray,
    bounds: xr.DataArray,
    *,
    panel_label: str,
    series_label: str,
    ylabel: str,
    title: str,
    caption: str,
) -> Figure:
    """Curves, solid, and bounds on them, dashed, over rounds on logarithmic axes.

    Args:
      curves: over ``(*panels, columns, series, round)``; all panels of a row differ in `columns`.
      bounds: likewise.
      panel_label: a format of all coordinates of a panel.
      series_label: a format such as ``"M = {}"``.
      ylabel: of the first column.
      title: above the panels.
      caption: below them.
    """
    with mpl.rc_context(_STYLE):
        *rows, columns, series, _ = curves.dims
        stacked, dashed = (values.stack(row=rows) for values in (curves, bounds))
        size = stacked.sizes["row"], stacked.sizes[columns]
        figure = Figure(figsize=(4.5 * size[1], 0.9 + 3.0 * size[0]))
        panels: Any = figure.subplots(*size, sharex=True, sharey="row", squeeze=False)
        names, rounds = curves[series].values, curves["round"].values + 1
        for i, j in np.ndindex(*size):
            axes: Axes = panels[i, j]
            at = {"row": i, columns: j}
            for k, color in enumerate(_cycle(_COLORS, names)):
                label = series_label.format(names[k])
                here = at | {series: k}
                axes.plot(rounds, stacked.isel(here).values, color=color, lw=1.5, label=label)
                axes.plot(rounds, dashed.isel(here).values, color=color, lw=1.0, ls="--")
            axes.set(xscale="log", yscale="log")
            place = (*stacked["row"].values[i], stacked[columns].values[j])
            is_last = i == size[0] - 1
            _finish(
                axes,
                panel_label.format(*place),
                "$t$ (the start is 1)" if is_last else "",
                ylabel if j == 0 else "",
            )
        panels[0, 0].legend(loc="best", fontsize=8, ncols=2)
        _arrange(figure, title, caption)
    return figure


def accuracy_and_gain(
    curves: xr.DataArray,
    levels: Mapping[str, Mapping[str, float]],
    gains: xr.DataArray,
    errors: xr.DataArray,
    *,
    title: str,
    caption: str,
) -> Figure:
    """Three panels: the accuracy of one model over rounds; the gain against M, train and test.

    Args:
      curves: accuracies in percent over ``(part, seed, round)``.
      levels: of every part, lines to compare with, by name.
      gains: over ``(part, algorithm, M)``; NaN where there is no value.
      errors: standard errors, likewise.
      title: above the panels.
      caption: below them.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(12.5, 4.3))
        first, second, third = figure.subplots(1, 3)
        rounds, num_seeds = curves["round"].values, curves.sizes["seed"]
        for part, color in zip(curves.part.values, _COLORS, strict=False):
            runs = curves.sel(part=part).transpose("seed", "round").values
            mean = runs.mean(0)
            error = runs.std(0, ddof=1) / np.sqrt(num_seeds) if num_seeds > 1 else 0 * mean
            first.plot(rounds, mean, color=color, lw=1.6, label=part)
            first.fill_between(rounds, mean - error, mean + error, color=color, alpha=0.2, lw=0)
            for (name, level), style in zip(levels[part].items(), ("--", ":"), strict=False):
                first.axhline(level, color=color, lw=1.0, ls=style, label=f"{part}, {name}")
        _finish(first, "(a) FedAvg on one model", "round $t$", "accuracy in percent")
        first.set_xlim(rounds[0], rounds[-1])
        first.legend(fontsize=7.5, ncols=2)
        models = gains.M.values
        for axes, part, letter in zip((second, third), gains.part.values, "bc", strict=True):
            for label, color, marker in zip(
                gains.algorithm.values, _COLORS, _MARKERS, strict=False
            ):
                at = {"part": part, "algorithm": label}
                mean, error = gains.sel(at).values, errors.sel(at).values
                axes.errorbar(
                    models,
                    mean,
                    error,
                    color=color,
                    marker=marker,
                    ms=5,
                    lw=1.3,
                    capsize=2.5,
                    label=label,
                )
            axes.plot(models, models, color="0.55", lw=0.9, ls="--", label="g = M", zorder=0)
            axes.set_xticks(models)
            _finish(axes, f"({letter}) gain, {part} accuracy", "number of models $M$", "gain $g$")
            axes.legend(loc="upper left")
        _arrange(figure, title, caption)
    return figure


def grouped_points(
    names: Sequence[str],
    groups: Mapping[str, Mapping[str, Any]],
    *,
    ylabel: str,
    title: str,
    caption: str,
) -> Figure:
    """One panel per group, in it one kind of point per series for every name along x.

    Args:
      names: along x.
      groups: by title, series by label: ``[names]``, or a pair of those and of standard errors; NaN
        is not drawn.
      ylabel: of the first panel.
      title: above the panels.
      caption: below them.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(6.2 * len(groups), 4.8))
        row = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
        places = np.arange(len(names))
        for axes, (heading, series), letter in zip(row, groups.items(), "abcdefgh", strict=False):
            shifts = np.linspace(-0.24, 0.24, len(series))
            for (label, values), shift, color, marker in zip(
                series.items(), shifts, _COLORS, _MARKERS, strict=False
            ):
                y, errors = values if isinstance(values, tuple) else (values, None)
                axes.errorbar(
                    *(places + shift, y, errors),
                    fmt=marker,
                    color=color,
                    ms=6,
                    capsize=2,
                    label=label,
                )
            axes.set_xticks(
                places, [name.replace("_", " ") for name in names], rotation=35, ha="right"
            )
            _finish(axes, f"({letter}) {heading}", "", ylabel if axes is row[0] else "")
        row[-1].legend(fontsize=7.5, loc="best")
        _arrange(figure, title, caption)
    return figure


class Line(NamedTuple):
    """A curve, points or bars; the colour is the line's number in its panel if not given.

    Attributes:
      label: in the legend, if not empty.
      x: ``[points]``.
      y: ``[points]``; NaN is not drawn.
      errors: standard errors, drawn as bars if given.
      style: of matplotlib, such as "--" or "o"; "" for points of the line's own kind; or "bar".
      color: a number.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    errors: np.ndarray | None = None
    style: str = "-"
    color: int | None = None


class Panel(NamedTuple):
    """Lines on one pair of axes.

    Attributes:
      title: above them.
      xlabel: below.
      ylabel: on the left.
      lines: what is drawn.
      marks: vertical lines, by label.
      limits: of y.
      scale: of y, "linear" or "log".
    """

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[Line]
    marks: Mapping[str, float] = MappingProxyType({})
    limits: tuple[float, float] | None = None
    scale: str = "linear"


def line_panels(rows: Sequence[Sequence[Panel]], *, title: str, caption: str) -> Figure:
    """Rows of panels.

    Args:
      rows: equally many panels in each.
      title: above them.
      caption: below them.
    """
    with mpl.rc_context(_STYLE):
        width, height = len(rows[0]), len(rows)
        figure = Figure(figsize=(max(9.0, 4.2 * width), 0.9 + 3.4 * height))
        grid = figure.subplots(height, width, squeeze=False)
        panels = [panel for row in rows for panel in row]
        for axes, panel, letter in zip(grid.flat, panels, "abcdefgh", strict=False):
            for i, line in enumerate(panel.lines):
                _draw(axes, line, i if line.color is None else line.color)
            for (label, x), style in zip(panel.marks.items(), ("-", "--"), strict=False):
                axes.axvline(x, color="0.45", lw=1.0, ls=style, label=label, zorder=0)
            axes.set(yscale=panel.scale, ylim=panel.limits)
            _finish(axes, f"({letter}) {panel.title}", panel.xlabel, panel.ylabel)
            axes.legend(fontsize=7.5, loc="best")
        _arrange(figure, title, caption)
    return figure


def _draw(axes: Axes, line: Line, number: int) -> None:
    color = _COLORS[number % len(_COLORS)]
    label = line.label or "_"
    if line.style == "bar":
        axes.bar(line.x, line.y, 0.23, yerr=line.errors, color=color, label=label, capsize=2)
        return
    axes.errorbar(
        line.x,
        line.y,
        line.errors,
        fmt=line.style or _MARKERS[number % len(_MARKERS)],
        color=color,
        ms=4.5,
        lw=1.3,
        capsize=2,
        label=label,
    )


def runs_by_size(
    values: xr.DataArray, *, panel: str, xlabel: str, ylabel: str, title: str, caption: str
) -> Figure:
    """One panel per entry of `panel`, one point for every run at its size, and the means.

    Args:
      values: over ``(panel, size, run)``.
      panel: the name of that dimension.
      xlabel: of every panel.
      ylabel: of the first panel.
      title: above the panels.
      caption: below them.
    """
    with mpl.rc_context(_STYLE):
        names = values[panel].values
        figure = Figure(figsize=(4.8 * len(names), 4.1))
        row = figure.subplots(1, len(names), sharex=True, sharey=True, squeeze=False)[0]
        sizes = values[values.dims[1]].values
        places = np.arange(len(sizes))
        for axes, name, letter in zip(row, names, "abcdefgh", strict=False):
            points = values.sel({panel: name}).values
            shifts = np.linspace(-0.28, 0.28, points.shape[1])
            x = np.broadcast_to(places[:, None] + shifts, points.shape)
            axes.plot(x.ravel(), points.ravel(), ".", color=_COLORS[0], ms=5, label="one run")
            axes.plot(places, points.mean(1), "_", color=_COLORS[1], ms=26, mew=2, label="mean")
            axes.set_xticks(places, [f"{size:g}" for size in sizes])
            _finish(axes, f"({letter}) {name}", xlabel, ylabel if axes is row[0] else "")
        row[-1].legend(loc="best")
        _arrange(figure, title, caption)
    return figure


def heat_map(
    values: xr.DataArray,
    lines: Mapping[str, np.ndarray],
    *,
    xlabel: str,
    ylabel: str,
    label: str,
    title: str,
    caption: str,
) -> Figure:
    """Colours over two positive coordinates, on logarithmic scales, and lines through them.

    Args:
      values: over ``(y, x)``, positive; their scale is logarithmic too.
      lines: y at every x, by label.
      xlabel: of the second dimension.
      ylabel: of the first one.
      label: of the colours.
      title: above the map.
      caption: below it.
    """
    with mpl.rc_context(_STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(8.0, 5.2))
        axes = figure.subplots()
        y, x = (values[dim].values.astype(float) for dim in values.dims)
        most = max(2.0, float(np.quantile(values.values, 0.95)))
        colors = axes.pcolormesh(
            _edges(x), _edges(y), values.values, cmap="viridis_r", norm=LogNorm(1.0, most)
        )
        figure.colorbar(colors, label=label, extend="max")
        for i, (name, places) in enumerate(lines.items()):
            style: dict[str, Any] = {"color": ("w", _COLORS[0])[i % 2], "marker": _MARKERS[i]}
            axes.plot(x, places, ls=("-", "--")[i % 2], ms=6, label=name, mec="0.2", **style)
        axes.set(xscale="log", yscale="log")
        axes.set_yticks(y, [f"{size:g}" for size in y], minor=False)
        axes.minorticks_off()
        _finish(axes, "", xlabel, ylabel)
        axes.legend(loc="upper left", frameon=True, facecolor="0.6", framealpha=0.85)
        _arrange(figure, title, caption)
    return figure


def _edges(centers: np.ndarray) -> np.ndarray:
    """Where cells of a logarithmic axis end."""
    logs = np.log(centers)
    middle = (logs[1:] + logs[:-1]) / 2
    return np.exp(np.concatenate([[2 * logs[0] - middle[0]], middle, [2 * logs[-1] - middle[-1]]]))


def sweep_overview(dataset: xr.Dataset, metric: str | None = None) -> Figure:
    """What a sweep found at its end: an axis of numbers along x, another axis as panels.

    Args:
      dataset: from a sweep over ``algorithm`` and other axes.
      metric: by default the excess loss, or else the loss, or else what comes first.
    """
    known = [name for name in ("excess_loss", "loss") if name in dataset]
    values = dataset[metric or [*known, *map(str, dataset.data_vars)][0]]
    axes = [str(dim) for dim in values.dims[1:-3]]
    # The first axis of real numbers, or else of counts, or else any.
    x = min(axes, key=lambda name: "fiu".find(values[name].dtype.kind) % 4)
    panel, *others = [name for name in axes if name != x] or ["panel"]
    # A mean over models skips those that are not there, but no diverged ones.
    is_whole = (dataset.diverged < 0).all("model")
    end = values.isel(round=-1).astype(float).mean("model").where(is_whole)
    end = end.isel(dict.fromkeys(others, 0))
    if panel not in end.dims:
        end = end.expand_dims(panel)
    titles = [f"{panel} = {name}" for name in end[panel].values] if panel in axes else [""]
    end = end.assign_coords({panel: titles}).isel({panel: slice(_MOST_PANELS)})
    mean, num_seeds = end.mean("seed", skipna=False), end.sizes["seed"]
    error = end.std("seed", ddof=1) / np.sqrt(num_seeds) if num_seeds > 1 else 0 * mean
    order = (panel, "algorithm", x)
    is_positive = bool((mean > 0).any() and not (mean <= 0).any())
    is_log = values[x].dtype.kind == "f" and bool((values[x] > 0).all())
    more = f" The first {_MOST_PANELS} of {len(titles)} {panel}." * (len(titles) > _MOST_PANELS)
    fixed = "".join(f", {name} = {values[name].values[0]}" for name in others)
    return lines_with_errors(
        mean.transpose(*order),
        error.transpose(*order),
        x=x,
        series="algorithm",
        panel=panel,
        series_label="{}",
        xlabel=x.replace("_", " "),
        ylabel=str(values.attrs["long_name"]),
        title=f"After {values['round'].values[-1]} rounds{fixed}",
        caption=f"Means over models and {num_seeds} seeds, with standard errors over seeds; points "
        "where a run diverged are not drawn." + more,
        scales=("log" if is_log else "linear", "log" if is_positive else "linear"),
    )


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a PNG, whole or not at all."""
    write_aside(path, lambda aside: figure.savefig(aside, format="png", dpi=200))


def _cycle(items: Sequence[Any], like: Sequence[Any] | np.ndarray) -> list[Any]:
    """As many items as there are in `like`, from the start again when they run out."""
    return [items[i % len(items)] for i in range(len(like))]


def _finish(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)


def _arrange(figure: Figure, title: str, caption: str) -> None:
    """The title above, the caption below, the panels between them."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(caption, int(width * 14.5))
    bottom = (0.12 + 0.165 * len(lines)) / height
    figure.suptitle(title, fontsize=11.5)
    figure.text(0.5, 0.05 / height, "\n".join(lines), ha="center", va="bottom", fontsize=8.5)
    figure.set_layout_engine("tight", rect=(0, bottom, 1, 1))
