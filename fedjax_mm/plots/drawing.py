"""Panels of lines, points and bars, drawn with matplotlib without a display."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from string import ascii_lowercase
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.container import Container
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from fedjax_mm.results.labels import label as in_words
from fedjax_mm.tools.files import write_aside

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
_MOST_BARS = 12  # points with error bars; longer lines get an error band
_MOST_BARRED = 40  # error bars in a panel, which would hide each other
_SHIFT = 4.0  # points between neighboring error bars, so that they do not hide each other
_MOST_INSIDE = 3  # maximum number of legend entries inside a panel
GRAY = "0.55"
FORMATS = ("png", "pdf", "svg")
WIDTH = 6.5  # inches, the width of a column of text, which shows figures unscaled
_IN_A_ROW = 2  # panels
_DOTS = 110  # per inch, in notebooks

Entries = Mapping[str, Any]
"""Legend entries, from labels to the objects that matplotlib drew."""


class Picture(Figure):
    """A figure that notebooks show as a cell's last value.

    IPython shows matplotlib's own figures only once a backend for notebooks is chosen.
    """

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        with mpl.rc_context(STYLE):
            self.savefig(file, format="png", dpi=_DOTS)
        return file.getvalue()


class Line(NamedTuple):
    """A curve, points or bars.

    Attributes:
      label: the label in the legend, or "" for none.
      x: ``[points]``.
      y: ``[points]``; NaN is skipped.
      errors: standard errors ``[points]``, or lengths below and above ``[2, points]``, drawn as
        error bars or, of a long curve, as a band.
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
    """Draws the line y = x, dashed and gray."""
    ends = np.array([x.min(), x.max()])
    return Line(label, ends, ends, style="--", color=GRAY)


def lines(
    values: xr.DataArray, errors: xr.DataArray | None = None, style: str = "-?", **how: Any
) -> list[Line]:
    """Draws one line per coordinate of the first dimension, with the second one as x.

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
        line._replace(
            label=prefix + in_words(series.replace("_", " "), at), color=how.get("color", number)
        )
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
    """Draws one panel per coordinate of the first dimension.

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
    ticks = how.pop("ticks", ticks_at(values[x].values))
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
    rows: Sequence[Sequence[Panel]],
    *,
    title: str = "",
    caption: str = "",
    share: bool | Literal["figure"] = True,
) -> Figure:
    """Draws a figure of panels, one column of text wide.

    Args:
      rows: rows of panels; a row of more than two panels is continued in the next one.
      title: a few words on all panels. Like the caption it is not drawn: a page shows both below
        the figure.
      caption: how the numbers were computed. `save_figure` writes it into the file.
      share: whether panels in a row with the same y-label share a y-axis. "figure" means panels of
        all rows.

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
        figure = Picture(figsize=(WIDTH, 0.3 + 2.6 * height))
        grid = figure.subplots(height, width, squeeze=False)
        # Continue after "z" with "aa", because a grid of bounds can have more than 26 panels.
        letters = (first + last for first in ("", *ascii_lowercase) for last in ascii_lowercase)
        first: dict[str, Axes] = {}
        for row, columns in zip(pairs, grid, strict=True):
            for axes in columns[len(row) :]:
                axes.remove()
            if share != "figure":
                first = {}
            for j, (axes, panel) in enumerate(zip(columns, row, strict=False)):
                if share and first.setdefault(panel.ylabel, axes) is not axes:
                    axes.sharey(first[panel.ylabel])
                _fill(axes, panel)
                is_named = not share or j == 0 or panel.ylabel != row[j - 1].ylabel
                ylabel = _wrapped(panel.ylabel, 36) if is_named else ""
                name = f"({next(letters)}) {panel.title}" if width * height > 1 else panel.title
                finish(axes, _wrapped(name, 84 // width), panel.xlabel, ylabel)
        below = _legends(figure, [panel for row in pairs for panel in row])
        arrange(figure, title, caption, below)
    return figure


def dots(
    series: Mapping[str, Mapping[str, float]],
    groups: Mapping[str, Sequence[str]],
    *,
    xlabel: str,
    lines: Sequence[float],
    title: str,
    caption: str,
) -> Picture:
    """Draws positive numbers as dots, with a row for each name and a head for each group.

    Args:
      series: the numbers of each series by name; a name may be absent.
      groups: the names of each group, from the top.
      xlabel: the label of the x-axis, which is logarithmic.
      lines: the positions of vertical lines, of which the first is solid.
      title: as in `draw`.
      caption: as in `draw`.

    Example:
      >>> figure = dots({"W2": {"krum": 1.2}}, {"rule": ["krum"]}, xlabel="x", lines=[1],
      ...     title="Times", caption="")
      >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
      ['krum']
    """
    places, heads, y = dict[str, float](), dict[str, float](), 0.0
    for group, names in groups.items():
        heads[group] = y
        places |= {name: y + 1 + number for number, name in enumerate(names)}
        y += 1.3 + len(names)
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        figure = Picture(figsize=(WIDTH, 0.6 + 0.15 * y))
        axes = figure.subplots()
        for number, (label, found) in enumerate(series.items()):
            look: dict[str, Any] = {"marker": MARKERS[number], "color": COLORS[number], "s": 18}
            axes.scatter(
                [*found.values()], [places[name] for name in found], label=label, zorder=3, **look
            )
        for place in places.values():
            axes.axhline(place, color="0.9", lw=0.6, zorder=0)
        for x, style in zip(lines, ("-", *["--"] * len(lines)), strict=False):
            axes.axvline(x, color="0.45", lw=1.0, ls=style, zorder=1)
        axes.set_yticks([*places.values()], [*places])
        for group, place in heads.items():
            at: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right"}
            at |= {"textcoords": "offset points", "va": "center", "weight": "bold"}
            axes.annotate(group, (0, place), (-4, 0), **at)
        most = max(x for found in series.values() for x in found.values())
        ticks = [x for x in (0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100) if x <= 1.2 * most]
        axes.set(xscale="log", ylim=(y - 0.6, -0.8))
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.set_xticks([], minor=True)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(series), borderaxespad=0)
        finish(axes, "", xlabel, "")
        arrange(figure, title, caption)
    return figure


def _wrapped(text: str, width: int) -> str:
    """Breaks text into lines of a width, and counts a formula as wide as it is drawn."""
    shown = re.sub(r"\\[a-z]+", "x", text, flags=re.IGNORECASE)
    is_short = len(re.sub(r"[$^_{}]", "", shown)) <= width
    return text if is_short else textwrap.fill(text, width)


def _fill(axes: Axes, panel: Panel) -> None:
    is_crowded = sum(len(line.x) for line in panel.lines if _has_bars(line)) > _MOST_BARRED
    is_crowded &= not any("?" in line.style for line in panel.lines)  # points have no bands
    barred = [n for n, line in enumerate(panel.lines) if _has_bars(line) and not is_crowded]
    is_named = any(f"{place:g}" != text for text, place in panel.ticks.items())
    middle = (len(barred) - 1) / 2
    axes.margins(x=0.05 + 0.01 * len(barred))
    for number, line in enumerate(panel.lines):
        is_banded = number not in barred
        drawn = _draw(axes, line, number, _marked(panel, number), is_banded=is_banded)
        if is_named and number in barred:  # the space between categories has no meaning
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
        axes.xaxis.set_minor_locator(NullLocator())
    elif panel.xscale == "linear" and all(np.asarray(x.x).dtype.kind in "iu" for x in panel.lines):
        steps = [1, 2, 2.5, 5, 10]  # as by default, but no half rounds
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=steps, integer=True))


def _has_bars(line: Line) -> bool:
    is_short = len(line.x) <= _MOST_BARS or line.style in ("?", *MARKERS)  # points have no band
    return line.errors is not None and line.style != "bar" and is_short


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
    """Entries of a panel's legend and their appearance."""
    found: list[tuple[str, Any]] = []
    for number, line in enumerate(panel.lines):
        found += [(line.label, _look(line, number))] * bool(line.label)
    return found + [(label, ("mark", i)) for i, label in enumerate(panel.marks)]


def _look(line: Line, number: int) -> tuple[str, str, tuple[float, ...]]:
    """The color of a line, its style including marker, and its dashes if dotted."""
    color, turn = number if line.color is None else line.color, 0
    if isinstance(color, int):
        turn, color = divmod(color, len(COLORS))
        color = COLORS[color]
    # Use different markers too, because lines may share a color.
    style = line.style.replace("?", MARKERS[(number + turn) % len(MARKERS)])
    kind = next((kind for kind in _DASHES if style.startswith(kind)), None)
    return color, style, (*_DASHES[kind], *_DOT * turn) if kind and turn else ()


def _marked(panel: Panel, number: int) -> list[int]:
    """Points of a long line that get a marker, which distinguishes it from others without color."""
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
        below, above = np.broadcast_to(errors, (2, len(line.x)))
        axes.fill_between(line.x, line.y - below, line.y + above, color=how["color"], alpha=0.2)
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


def ticks_at(x: np.ndarray) -> dict[str, float]:
    """Ticks at the values of an axis, if they are words or a few numbers."""
    if x.dtype.kind not in "fiu":
        return {str(word): float(place) for place, word in enumerate(x)}
    return {f"{value:g}": float(value) for value in x} if len(x) <= 12 else {}


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
