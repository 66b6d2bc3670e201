"""Figures that only the papers' pages use, in the style of `plots`."""

from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MultipleLocator

from fedjax_mm.plots.drawing import (
    COLORS,
    MARKERS,
    STYLE,
    WIDTH,
    Line,
    Panel,
    Picture,
    arrange,
    finish,
)


def points(names: Sequence[str], title: str, series: Mapping[str, Any], ylabel: str) -> Panel:
    """A panel with one set of points per series, side by side above each name.

    Args:
      names: the names along the x-axis.
      title: the panel's title.
      series: values ``[names]`` by label, or pairs of values and standard errors. NaN is skipped.
      ylabel: the label of the y-axis.
    """
    places = np.arange(len(names))
    shifts = _shifts(len(series))
    pairs = [each if isinstance(each, tuple) else (each, None) for each in series.values()]
    drawn = [
        Line(label, places + shift, np.asarray(y, float), errors, "?")
        for (label, (y, errors)), shift in zip(zip(series, pairs, strict=True), shifts, strict=True)
    ]
    words = [name.replace("_", " ") for name in names]
    ticks = dict(zip(words, map(float, places), strict=True))
    return Panel(title, "", ylabel, drawn, ticks=ticks)


def _shifts(number: int) -> np.ndarray:
    """Offsets that are small enough to show which points belong together."""
    most = min(0.24, 0.08 * (number - 1))
    return np.linspace(-most, most, number)


def dots(
    values: xr.DataArray,
    errors: xr.DataArray,
    runs: xr.DataArray | None = None,
    *,
    xlabel: str,
    title: str,
    caption: str,
) -> Figure:
    """Draws adjacent panels with the same rows of dots, one column wide.

    Args:
      values: values over ``(panel, row, series)``, with the first row at the top.
      errors: standard errors, over the same dimensions.
      runs: samples over the same dimensions and "seed", drawn as faint points behind the dots.
      xlabel: the x-axis label of every panel.
      title: the first sentence of the caption.
      caption: the rest of the caption.
    """
    panel, row, series = map(str, values.dims)
    names = values[row].values.tolist()
    places, shifts = np.arange(len(names)), _shifts(values.sizes[series])
    with mpl.rc_context(STYLE):
        figure = Picture(figsize=(WIDTH, max(2.2, 0.9 + 0.27 * len(names))))
        grid = figure.subplots(1, values.sizes[panel], sharey=True, squeeze=False)[0]
        for axes, letter, at in zip(grid, ascii_lowercase, values[panel].values, strict=False):
            for number, label in enumerate(values[series].values.tolist()):
                here = {panel: at, series: label}
                x, bars = values.sel(here).values, errors.sel(here).values
                look: dict[str, Any] = {"fmt": MARKERS[number], "color": COLORS[number]}
                if runs is not None:
                    each = runs.sel(here).transpose(row, "seed").values
                    y = np.repeat(places + shifts[number], each.shape[1])
                    axes.plot(each.ravel(), y, ".", color=COLORS[number], ms=3, alpha=0.35, mew=0)
                axes.errorbar(
                    x, places + shifts[number], xerr=bars, label=label, ms=4.5, capsize=2, **look
                )
            finish(axes, f"({letter}) {at}" if len(grid) > 1 else at, xlabel, "")
            axes.margins(y=0.09)
        grid[0].set_yticks(places, names)
        grid[0].invert_yaxis()
        handles, labels = grid[0].get_legend_handles_labels()
        arrange(figure, title, caption, dict(zip(labels, handles, strict=True)))
    return figure


def mean_and_runs(curves: xr.DataArray, *, title: str, ylabel: str, caption: str) -> Figure:
    """Draws (a) the mean over seeds and (b) every seed's curve, zooming in on the last fifth.

    Args:
      curves: logarithms to base 10 over ``(algorithm, seed, round)``.
      title: the first sentence of the caption.
      ylabel: the y-axis label of both panels.
      caption: the rest of the caption.
    """
    with mpl.rc_context(STYLE):
        figure = Picture(figsize=(WIDTH, 2.9))
        left, right = figure.subplots(1, 2, sharex=True, sharey=True)
        labels = [str(label) for label in curves.algorithm.values]
        colors = [COLORS[i % len(COLORS)] for i in range(len(labels))]
        rounds = curves["round"].values
        inset = right.inset_axes((0.42, 0.36, 0.55, 0.36))
        last = slice(-max(2, len(rounds) // 5), None)
        for label, color in zip(labels, colors, strict=True):
            runs = curves.sel(algorithm=label).transpose("seed", "round").values
            left.plot(rounds, runs.mean(0), color=color, lw=1.6)
            right.plot(rounds, runs.T, color=color, lw=0.5, alpha=0.55)
            inset.plot(rounds[last], runs.T[last], color=color, lw=0.5, alpha=0.7)
        inset.locator_params("y", nbins=3)  # few and large, so that exponents are legible
        for axes in (left, inset):  # also applies to the right panel, which shares the left axis
            axes.yaxis.set_major_formatter(lambda y, _: f"$10^{{{y:g}}}$")
        left.yaxis.set_major_locator(MultipleLocator(1))
        inset.set_xlim(rounds[last][0], rounds[-1])
        finish(left, f"(a) mean of {curves.sizes['seed']} runs", "round $t$", ylabel)
        finish(right, f"(b) {curves.sizes['seed']} runs each", "round $t$", "")
        legend = [Line2D([], [], color=color, lw=1.6) for color in colors]
        for axes in (left, right):
            axes.legend(legend, labels, loc="upper right")
            axes.set_xlim(rounds[0], rounds[-1])
        arrange(figure, title, caption)
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
    """Draws a color map over two positive coordinates on logarithmic axes, with lines on top.

    Args:
      values: positive values over ``(y, x)``, shown on a logarithmic color scale.
      lines: y at every x, by label.
      xlabel: the label of the second dimension.
      ylabel: the label of the first dimension.
      label: the label of the color bar.
      title: the first sentence of the caption.
      caption: the rest of the caption.
    """
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        figure = Picture(figsize=(WIDTH, 4.2))
        axes = figure.subplots()
        y, x = (values[dim].values.astype(float) for dim in values.dims)
        most = max(2.0, float(np.quantile(values.values, 0.95)))
        colors = axes.pcolormesh(
            _edges(x), _edges(y), values.values, cmap="viridis_r", norm=LogNorm(1.0, most)
        )
        figure.colorbar(colors, label=label, extend="max")
        for i, (name, places) in enumerate(lines.items()):
            style: dict[str, Any] = {"color": ("k", COLORS[0])[i % 2], "marker": MARKERS[i]}
            axes.plot(x, places, ls=("-", "--")[i % 2], ms=6, label=name, mec="0.2", **style)
        axes.set(xscale="log", yscale="log")
        ticks = _apart(y)
        axes.set_yticks(ticks, [f"{size:g}" for size in ticks], minor=False)
        axes.minorticks_off()
        finish(axes, "", xlabel, ylabel)
        handles, labels = axes.get_legend_handles_labels()
        arrange(figure, title, caption, dict(zip(labels, handles, strict=True)))
    return figure


def _edges(centers: np.ndarray) -> np.ndarray:
    """The cell edges of a logarithmic axis."""
    logs = np.log(centers)
    middle = (logs[1:] + logs[:-1]) / 2
    return np.exp(np.concatenate([[2 * logs[0] - middle[0]], middle, [2 * logs[-1] - middle[-1]]]))


def _apart(sizes: np.ndarray) -> np.ndarray:
    """Selects sizes whose labels do not overlap on a logarithmic axis."""
    kept = list(sizes[:1])
    for size in sizes[1:]:
        if np.log(size / kept[-1]) >= 0.045 * np.log(sizes[-1] / sizes[0]):
            kept.append(size)
    return np.array(kept)
