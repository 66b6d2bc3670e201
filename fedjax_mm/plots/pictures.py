"""Figures of results, and of how data are distributed over clients."""

import textwrap
from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from fedjax_mm.checks.instances import check_instance
from fedjax_mm.claims.judging import Verdicts
from fedjax_mm.data.federated import FederatedData, check_federated
from fedjax_mm.metrics import PERSONAL, final, standard_error
from fedjax_mm.plots.drawing import (
    COLORS,
    GRAY,
    STYLE,
    WIDTH,
    Panel,
    Picture,
    arrange,
    draw,
    finish,
    lines,
    panels,
    ticks_at,
)
from fedjax_mm.results.labels import label as in_words

_MOST_NAMED = 32  # models around a circle
_MOST_PANELS = 6
_OF_VERDICTS = {
    "supported": COLORS[2],
    "contradicted": COLORS[0],
    "not settled": COLORS[6],
    "not tested": GRAY,
}
_MOST_CLIENTS = 300  # columns, which are then at least a point wide


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
      hue: the axis with one line for each value; also "model" and, of a metric with a number for
        each client, "client".
      col: the axis with one panel for each value; also "model" and "client".
      metric: the metric to draw; defaults to that of the clients' models if a method has personal
        ones, or else the excess loss, the loss or the first metric.
      scale: of the y-axis, "linear" or "log"; by default logarithmic for positive means, but linear
        for accuracies, shares and other metrics between 0 and 1, except losses and distances.

    Returns:
      The figure. Runs in which a model diverged are left out, or with models as an axis only that
      model. A single seed has no band.

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
    over = [dim for dim in ("model",) if dim not in (x, hue, col)]
    values = result[metric].astype(float).where((result.diverged < 0).all(over))
    axes = [str(dim) for dim in values.dims if dim not in ("seed", "round", *over)]
    for name in {hue, col} - {None, *axes}:
        known = [str(key) for key, of in result.data_vars.items() if name in of.dims]
        hint = f"; metrics that have it are {', '.join(known)}" if known else ""
        raise ValueError(
            f"{metric} has no axis {name!r}, but {', '.join([*axes, *over]) or 'none'}{hint}"
        )
    if x not in ("round", *axes, *result.data_vars):
        raise ValueError(f"x is {x!r}; choose from round, {', '.join(map(str, result.variables))}")
    if others := [name for name in axes if name not in (x, hue, col)]:
        raise ValueError(
            f"the result has the axis {others[0]!r}, too; choose a value of it, as in "
            f"result.isel({others[0]}=0), or give it as hue or col"
        )
    runs = (values if x not in axes else values.isel(round=-1)).mean(over)
    mean, num_seeds = runs.mean("seed"), runs.sizes["seed"]
    error = mean.copy(data=standard_error(runs.values, runs.get_axis_num("seed")))
    along = x if x in axes else "round"
    how: dict[str, Any] = {"scale": scale or _scale(mean)}
    if x in axes:
        how |= {"ticks": ticks_at(mean[x].values), "xscale": _xscale(mean[x].values)}
    drawn = []
    for number in range(mean.sizes[col] if col else 1):
        here = {col: number} if col else {}
        order = (*[hue] * bool(hue), along)
        parts = [each.isel(here).transpose(*order) for each in (mean, error)]
        found = lines(parts[0], parts[1] if num_seeds > 1 else None, "-" if x not in axes else "-?")
        if x in result.data_vars:
            cost = result[x].mean(("seed", *over)).broadcast_like(mean).isel(here)
            places = cost.transpose(*order).values.reshape(-1, mean.sizes["round"])
            found = [line._replace(x=place) for line, place in zip(found, places, strict=True)]
        title = in_words(str(col).replace("_", " "), mean[col].values[number]) if col else ""
        drawn.append(Panel(title, x.replace("_", " "), _long_name(result[metric]), found, **how))
    spread = ", with bands of a standard error" * (num_seeds > 1)
    return draw(
        [drawn],
        caption=f"Means over {'models and ' * len(over)}{num_seeds} seeds{spread}.",
        share="figure",
    )


def _metric(dataset: xr.Dataset, metric: str | None) -> str:
    """The metric to draw, which the dataset must have."""
    check_instance("dataset", dataset, xr.Dataset, "give the result of sweep or run")
    known = [name for name in (*PERSONAL, "excess_loss", "loss") if name in dataset]
    metric = metric or [*known, *map(str, dataset.data_vars)][0]
    if metric not in dataset:
        found = [name for name, values in dataset.data_vars.items() if "round" in values.dims]
        raise ValueError(f"metric is {metric!r}; choose from {', '.join(map(str, found))}")
    return metric


def _long_name(values: xr.DataArray) -> str:
    name, words = str(values.name), str(values.attrs.get("long_name", values.name))
    return name.replace("_", " ") if words == name else words


def _scale(mean: xr.DataArray) -> str:
    """Logarithmic for positive numbers, but linear for accuracies and other shares."""
    is_positive = bool((mean > 0).any() and not (mean <= 0).any())
    is_share = not any(word in str(mean.name) for word in ("loss", "distance"))
    return "log" if is_positive and not (is_share and bool(mean.max() <= 1)) else "linear"


def _xscale(x: np.ndarray) -> str:
    """Logarithmic for positive floats over a factor of 5 or more, such as learning rates."""
    return "log" if x.dtype.kind == "f" and 0 < 5 * x.min() <= x.max() else "linear"


def sweep_overview(dataset: xr.Dataset, metric: str | None = None) -> Figure:
    """Draws the final values of a sweep, with a numeric axis as x and another axis as panels.

    Args:
      dataset: the result of a sweep. Lines are the values of the axis ``algorithm`` or, without it,
        of the first axis of words, unless it is the only axis.
      metric: the metric to draw; defaults to that of the clients' models if a method has personal
        ones, or else the excess loss, the loss or the first metric.

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
    # A large result is read lazily, but would be loaded whole by `expand_dims`.
    dataset = dataset[[metric, "diverged"]].isel(round=slice(-1, None))
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
    end = final(dataset, metric).isel(dict.fromkeys(others, 0))
    if panel not in end.dims:
        end = end.expand_dims(panel)
    titles = [f"{panel} = {name}" for name in _shown(end[panel])] if panel in axes else [""]
    end = end.assign_coords({panel: titles}).isel({panel: slice(_MOST_PANELS)})
    mean, num_seeds = end.mean("seed", skipna=False), end.sizes["seed"]
    error = mean.copy(data=standard_error(end.values, end.get_axis_num("seed")))
    order = (panel, "algorithm", x)
    more = f"; the first {_MOST_PANELS} of {len(titles)} {panel}" * (len(titles) > _MOST_PANELS)
    fixed = "".join(f", {name} = {_shown(values[name][:1])[0]}" for name in others)
    figure_of = panels(
        mean.transpose(*order),
        error.transpose(*order),
        xlabel=x.replace("_", " "),
        ylabel=_long_name(values),
        xscale=_xscale(values[x].values),
        scale=_scale(mean),
    )
    return draw(
        [figure_of],
        title=f"After {values['round'].values[-1]} rounds{fixed}",
        caption=f"Means over models and {num_seeds} seeds, with standard errors over seeds; points "
        f"where a run diverged are not drawn{more}.",
        share="figure",
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
        ylabel=_long_name(dataset[metric]),
        style="-",
        ticks={},
    )
    more = f"; the first {_MOST_PANELS} of {shown} models" * (shown > _MOST_PANELS)
    return draw(
        [figure_of],
        title=f"Clients after {at} rounds{fixed}",
        caption=f"Values of {num_clients} clients, sorted in every run and averaged over "
        f"{num_seeds} seeds, with standard errors{more}.",
        share="figure",
    )


def claims(verdicts: Verdicts) -> Figure:
    """Draws the differences that claims compare, with simultaneous intervals and margins.

    Each claim is a panel, and each of its comparisons a line. The claim holds in the shaded region:
    a line inside it is supported, one outside contradicted, and one across its edge not settled. A
    comparison without numbers, such as a fact, is not drawn.

    Args:
      verdicts: of `settle`, or of `claims.judge`.

    Raises:
      ValueError: if no comparison has an interval.

    Example:
      >>> from fedjax_mm.claims import judge, more
      >>> lead = xr.DataArray([[1.0, 1.2] * 10], {"rule": ["A"]}, dims=("rule", "seed"))
      >>> def ahead(result):
      ...     yield more(result["lead"], by=0.5, unit="points")
      >>> figure = claims(judge(lead.to_dataset(name="lead"), ahead))
      >>> figure.axes[0].get_xlabel()
      'points'
    """
    check_instance("verdicts", verdicts, Verdicts, "give those of settle or claims.judge")
    drawn = []
    for claim in verdicts.claims:
        each = zip(claim.evidence, claim.parts, claim.intervals, strict=True)
        rows = [row for row in each if np.isfinite(row[0].center) and not np.isnan(row[2]).any()]
        drawn += [(claim, rows)] * bool(rows)
    if not drawn:
        raise ValueError("no comparison has an interval; facts and diverged runs are not drawn")
    sizes = [len(rows) + 1.2 for _, rows in drawn]
    with mpl.rc_context(STYLE):
        figure = Picture(figsize=(WIDTH, 0.6 + 0.28 * sum(sizes) + 0.35 * len(sizes)))
        every = figure.subplots(len(drawn), squeeze=False, height_ratios=sizes)[:, 0]
        for axes, (claim, rows) in zip(every, drawn, strict=True):
            centers = np.array([test.center for test, _, _ in rows])
            ends = np.array([interval for _, _, interval in rows])
            edges = np.array([test.region for test, _, _ in rows])
            shown = np.concatenate([centers, ends.ravel(), edges.ravel()])
            shown = shown[np.isfinite(shown)]
            pad = 0.08 * (np.ptp(shown) or 1.0)
            low, high = shown.min() - pad, shown.max() + pad
            for place, (test, part, interval) in enumerate(rows):
                color = _OF_VERDICTS[part.verdict]
                left, right = np.clip(test.region, low, high)
                axes.barh(place, right - left, 0.8, left, color="0.92", lw=0, zorder=0)
                axes.plot(np.clip(interval, low, high), [place, place], color=color, lw=2)
                axes.plot(test.center, place, "o", color=color)
            names = [_short(part.name or part.margin, part.seeds) for _, part, _ in rows]
            axes.set_yticks(range(len(rows)), names)
            axes.set_ylim(len(rows) - 0.4, -0.6)
            axes.set_xlim(low, high)
            axes.grid(visible=False, axis="y")
            title = textwrap.fill(f"{claim.text.rstrip('.')}: {claim.verdict}", 70)
            finish(axes, title, rows[0][0].unit or "difference", "")
        confidence = 100 * (1 - verdicts.level)
        caption = f"Intervals hold together with {confidence:g} %. Claims hold in the gray regions."
        arrange(figure, "", caption)
    return figure


def _short(name: str, seeds: int | None) -> str:
    return textwrap.fill(f"{name} ({seeds or 'no'} seeds)", 30)


def timelines(result: xr.Dataset) -> Figure:
    """Draws the clients that train each model per round, stacked, from record to record.

    With `finishing` and `arriving`, it shows which models get the clients of a finished model.

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
        figure = Picture(figsize=(WIDTH, 3.0))
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


def topology(W: ArrayLike, values: ArrayLike, *, label: str = "loss") -> Figure:
    """Draws models on a circle, from the top clockwise, coloured by their values, and their links.

    Args:
      W: the mixing matrix, see `topologies.mixing_matrix`; larger weights are wider lines.
      values: ``[models]``, such as the last losses.
      label: the name of the values.

    Raises:
      ValueError: if the matrix does not have a row and a column for each value.

    Example:
      >>> from fedjax_mm.topologies import mixing_matrix, ring
      >>> topology(mixing_matrix(ring(), 6), np.arange(6.0)).axes[1].get_ylabel()
      'loss'
    """
    matrix, shown = np.asarray(W, float), np.asarray(values, float)
    if shown.ndim != 1 or matrix.shape != shown.shape * 2:
        raise ValueError(
            f"W has the shape {matrix.shape} and values have {shown.shape}; give one value for "
            "each row of a square W"
        )
    angles = 2 * np.pi * np.arange(len(shown)) / len(shown)
    places = np.stack([np.sin(angles), np.cos(angles)], 1)
    weights = np.triu(np.maximum(matrix, matrix.T), 1)
    pairs = np.argwhere(weights > 0)
    widths = 2.5 * weights[weights > 0] / max(weights.max(), 1e-9)
    with mpl.rc_context(STYLE):
        figure = Picture(figsize=(0.7 * WIDTH, 0.55 * WIDTH))
        axes = figure.subplots()
        axes.add_collection(LineCollection(list(places[pairs]), linewidths=widths, colors=GRAY))
        size = np.clip(3000 / len(shown), 4, 140)
        points = axes.scatter(places[:, 0], places[:, 1], s=size, c=shown, zorder=3)
        for name, (x, y) in enumerate(places if len(shown) <= _MOST_NAMED else []):
            axes.text(1.14 * x, 1.14 * y, str(name), ha="center", va="center", fontsize=8.5)
        axes.set_aspect("equal")
        axes.axis("off")
        figure.colorbar(points, ax=axes, label=label)
        arrange(figure, "", f"The {label} of models, and the links between them.")
    return figure


def cells(
    values: xr.DataArray, names: Sequence[str] = (), *, label: str = "", caption: str = ""
) -> Figure:
    """Draws an array as colored cells, such as the model of each client in each round.

    Args:
      values: numbers over ``(row, column)``, or over ``(panel, row, column)``, with the first row
        at the bottom.
      names: the meaning of 0, 1, ... in the legend, if these are the only values; otherwise, the
        darker a cell, the larger its number.
      label: the label of the color bar, which is drawn without names.
      caption: as in `draw`.

    Raises:
      ValueError: if the array has another number of dimensions.

    Example:
      >>> models = xr.DataArray([[0, 1], [1, 0]], dims=("client", "round"))
      >>> [text.get_text() for text in cells(models, ["digits", "faces"]).legends[0].texts]
      ['digits', 'faces']
    """
    check_instance("values", values, xr.DataArray, "name the dimensions: xr.DataArray(x, dims=...)")
    if values.ndim not in (2, 3):
        raise ValueError(f"values have dimensions {values.dims}; give (row, column), or panels too")
    values = values if values.ndim == 3 else values.expand_dims(panel=[""])
    panel, *sides = map(str, values.dims)
    count = values.sizes[panel]
    width, height = min(count, 2), -(-count // 2)
    colors: Sequence[str] = ("0.9", COLORS[2]) if values.dtype == bool else COLORS
    how: dict[str, Any] = {"vmin": 0, "vmax": float(values.max()), "cmap": "Blues"}
    if names:
        colors = [colors[number % len(colors)] for number in range(len(names))]
        how = {"cmap": ListedColormap(colors), "vmin": -0.5, "vmax": len(names) - 0.5}
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        figure = Picture(figsize=(WIDTH, 0.4 + 2.6 * height))
        ratios = [1] * width + [0.05] * (not names)  # the last column has the color bar
        places = figure.add_gridspec(height, len(ratios), width_ratios=ratios)
        for number, at in enumerate(values[panel].values):
            axes = figure.add_subplot(places[number // width, number % width])
            y, x = (_edges(values[side].values) for side in sides)
            image = axes.pcolormesh(x, y, values[number].astype(float), rasterized=True, **how)
            for side, axis in zip(reversed(sides), (axes.xaxis, axes.yaxis), strict=True):
                axis.set_major_locator(MaxNLocator(integer=True))
                if values[side].dtype.kind not in "fiu":
                    axis.set_ticks(range(values.sizes[side]), values[side].values)
            title = (
                f"({ascii_lowercase[number % 26]}) {in_words(panel, at)}" if count > 1 else str(at)
            )
            finish(axes, title, sides[1], sides[0] if number % width == 0 else "")
        entries = {name: Patch(color=color) for name, color in zip(names, colors, strict=False)}
        if not names:
            figure.colorbar(image, cax=figure.add_subplot(places[0, width]), label=label)
        arrange(figure, "", caption, entries)
    return figure


def _edges(x: np.ndarray) -> np.ndarray:
    """The sides of cells, which are halfway between neighboring numbers."""
    x = x.astype(float) if x.dtype.kind in "fiu" else np.arange(float(len(x)))
    between = (x[1:] + x[:-1]) / 2
    ends = (
        (2 * x[0] - between[0], 2 * x[-1] - between[-1]) if len(x) > 1 else (x[0] - 0.5, x[0] + 0.5)
    )
    return np.array([ends[0], *between, ends[1]])


def partition(data: FederatedData | Mapping[str, FederatedData], *, column: int = 0) -> Figure:
    """Draws how many training examples of each label every client has.

    Clients are columns, labels are rows, and the darker a cell, the more examples. Of more than 300
    clients, 300 are drawn, from the fewest examples to the most.

    Args:
      data: the clients' data, or several to compare, each a panel with its name.
      column: the label, if examples have several.

    Raises:
      TypeError: if `data` has another type.
      ValueError: if `data` is a stack of draws, has no classes, or its labels no such column.

    Example:
      >>> from fedjax_mm.data import digits, federate, partition as deal
      >>> pool = digits()
      >>> data = federate(pool, clients=deal.dirichlet(pool.train[1], 20, alpha=0.3))
      >>> partition(data).axes[0].get_xlabel()
      'client'
    """
    found = data if isinstance(data, Mapping) else {"": data}
    parts = [_held(each, column) for each in found.values()]
    held = xr.concat(parts, xr.Variable("", list(found)), join="outer")
    caption = f"Training examples of clients; if more than {_MOST_CLIENTS}, sorted by their number."
    return cells(held, label="training examples", caption=caption)


def _held(data: FederatedData, column: int) -> xr.DataArray:
    """Counts of examples over (label, client)."""
    check_federated(data)
    if not data.num_classes:
        raise ValueError("the data have no classes, so no labels to draw; give labelled data")
    train = data.train
    labels = np.asarray(train.examples[1])
    labels = labels[:, None] if labels.ndim == 1 else labels
    if not 0 <= column < labels.shape[1]:
        count = labels.shape[1]
        raise ValueError(f"column is {column}, and examples have {count} label{'s' * (count > 1)}")
    counts, offsets = np.asarray(train.counts), np.asarray(train.offsets)
    owner = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(counts.sum()) + np.repeat(offsets - (np.cumsum(counts) - counts), counts)
    rows = places if train.order is None else np.asarray(train.order)[places]
    cells = owner * data.num_classes + labels[rows, column]
    held = np.bincount(cells, minlength=len(counts) * data.num_classes)
    held = held.reshape(len(counts), data.num_classes)
    if len(counts) > _MOST_CLIENTS:
        shown = np.linspace(0, len(counts) - 1, _MOST_CLIENTS).astype(int)
        held = held[np.argsort(counts, kind="stable")[shown]]
    axes = {"label": range(data.num_classes), "client": range(len(held))}
    return xr.DataArray(held.T, axes)


def _shown(labels: xr.DataArray) -> list[str]:
    """Labels of an axis, with numbers rounded to four digits if they stay distinct."""
    values = labels.values
    short = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in values]
    return short if len(set(short)) == len(short) else list(map(str, values))
