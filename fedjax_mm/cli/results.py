"""Shows results in the terminal, without computing on a device."""

import json
import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from fedjax_mm.cli.terminal import console, say, show_table, shown_progress
from fedjax_mm.metrics import estimate
from fedjax_mm.results.export import To, export_result
from fedjax_mm.results.finished import RESULT, open_result
from fedjax_mm.results.labels import places
from fedjax_mm.sweeps.errors import refusing

_FIRST = (
    *("personal_accuracy", "personal_*_worst*", "personal_loss", "excess_loss", "test_accuracy"),
    *("accuracy", "*_worst*", "appeal", "loss", "test_loss"),
)
"""Patterns of metrics in the order of the table's columns, before all others."""

_NO_METRICS = ("diverged", "ended")
_MOST_ROWS = 40


def show(path: Path) -> None:
    """Prints a result in a directory or in a file.

    Raises:
      RefusedError: if the path holds no result.
    """
    file = path / RESULT if path.is_dir() else path
    with refusing():
        dataset = open_result(path)
        try:
            about = _about(dataset)
        except Exception as error:  # foreign content can raise any exception
            raise ValueError(
                f"{file}: this is not a result; give a directory that run, sweep or reproduce wrote"
            ) from error
    show_table(("", str(file)), about, box=None, header_style="bold")
    console.print()
    with dataset:
        show_last(dataset)
    figure = file.parent / "figure.png"
    say(f"figure: {figure if figure.exists() else 'none'}")


def _about(dataset: xr.Dataset) -> list[tuple[str, str]]:
    """Summarizes the manifest and the dimensions."""
    about: dict[str, Any] = json.loads(dataset.attrs["manifest"])
    versions, device, wall = (about.get(key, {}) for key in ("versions", "device", "wall_seconds"))
    names = ("fedjax-mm", "jax")
    rows = {
        "data": about.get("data"),
        "root seed": about.get("seed"),
        "versions": ", ".join(f"{name} {versions[name]}" for name in names if name in versions),
        "revision": about.get("git_revision"),
        "device": f"{device['count']} x {device['kind']}" if device else None,
        "compiled, ran": ", ".join(f"{seconds:.1f} s" for seconds in wall.values()),
        "stopped": about.get("stopped"),
    }
    shown = [(name, str(x)) for name, x in rows.items() if x not in (None, "")]
    return shown + [(str(dim), _values(dataset, str(dim))) for dim in dataset.sizes]


def _values(dataset: xr.Dataset, dim: str) -> str:
    """Summarizes the coordinates of a dimension."""
    size = dataset.sizes[dim]
    if dim not in dataset.coords:
        return str(size)
    values = dataset[dim].values
    if size <= 6:
        return ", ".join(map(_label, values))
    return f"{_label(values[0])} ... {_label(values[-1])} ({size})"


def export(path: Path, to: To, store: str | None) -> None:
    """Exports a result to a tracker and prints where its runs are.

    Raises:
      RefusedError: if the path holds no result, or writing to the tracker fails.
    """
    with refusing(), shown_progress() as report:
        done = export_result(path, to, store, report)
    say(f"runs: {done.runs}, new: {done.new}; in {done.place}")
    if done.left_out:
        say(f"  arrays and links are not exported: {', '.join(done.left_out)}", style="dim")


def show_last(dataset: xr.Dataset) -> None:
    """Prints a result's last values, averaged over models and seeds, with standard errors.

    Each row is a point. If there are too many points, evenly spaced ones are shown. Metrics that do
    not fit the width, or have a number for each client, are named below the table. If algorithms
    are the only axis, each row is a metric instead.
    """
    by_round = [
        str(name)
        for name, values in dataset.data_vars.items()
        if name not in _NO_METRICS and "round" in values.dims
    ]
    # A metric with a number per client has a dimension after these two.
    metrics = sorted((x for x in by_round if dataset[x].dims[-1] in ("round", "model")), key=_rank)
    if not metrics:
        return
    mean, error = _last(dataset, metrics)
    title = f"After {dataset['round'].values[-1]:,} rounds, means over models and seeds"
    if "ended" in dataset:
        say(_stopped(dataset.ended.values))
        title = "In the round that stopped the run, or else the last, means over models and seeds"
    axes = [str(dim) for dim in mean.sizes]
    points = [at for at, _ in places(mean, *axes)]
    number = len(points)
    if number > _MOST_ROWS and axes != [
        "algorithm"
    ]:  # evenly spaced, because the first points may be of one algorithm
        points = [points[i * number // _MOST_ROWS] for i in range(_MOST_ROWS)]
    digits = 6 if axes == ["algorithm"] else 4
    cells = {
        name: [_text(mean.sel(at), error.sel(at), name, digits) for at in points]
        for name in metrics
    }
    labels = {axis: [_label(at[axis]) for at in points] for axis in axes}
    if axes == ["algorithm"]:
        rows = [(name, *cells[name]) for name in metrics]
        show_table(("", *labels["algorithm"]), rows, title=title)
        _name_others(by_round, metrics)
        return
    room = console.width - sum(map(_width, labels.items())) - 1
    shown = list(cells)
    while len(shown) > 1 and sum(_width((name, cells[name])) for name in shown) > room:
        shown.pop()
    columns = labels | {name: cells[name] for name in shown}
    rows = list(zip(*columns.values(), strict=True))
    show_table([*columns], rows, title=title)
    if len(points) < number:
        words = f"{len(points)} of {number:,} points, evenly spread; the file has all"
        say(f"  {words}", style="dim")
    _name_others(dict.fromkeys([*metrics, *by_round]), shown)


def _name_others(names: Iterable[str], shown: Sequence[str]) -> None:
    if rest := [name for name in names if name not in shown]:
        say(f"  also in the file: {', '.join(rest)}", style="dim")


def _rank(metric: str) -> int:
    ranks = (rank for rank, pattern in enumerate(_FIRST) if fnmatchcase(metric, pattern))
    return next(ranks, len(_FIRST))


def _stopped(ended: np.ndarray) -> str:
    """Describes the number of runs that reached their target, and their mean round."""
    rounds = ended[ended >= 0]
    when = f", in round {rounds.mean():.1f} on average" if rounds.size else ""
    return f"stopped at the target: {rounds.size:,} of {ended.size:,} runs{when}"


def show_end(dataset: xr.Dataset, directory: Path, files: str) -> None:
    """Prints the compile and run times of a result, and the names of its files."""
    about = dataset.attrs["manifest"]
    wall, parts = about["wall_seconds"], about.get("parts")
    times = f"compiled in {wall['compile']:.1f} s, ran in {wall['run']:.2f} s"
    times += f", in all {parts} parts together" if parts else ""
    say(f"  {times}; in {directory}: {files}\n", style="dim")


def _last(dataset: xr.Dataset, metrics: Sequence[str]) -> tuple[xr.Dataset, xr.Dataset]:
    """Means and standard errors over the seeds, with NaN at points with diverged runs."""
    values = dataset[list(metrics)]
    last = values.isel(round=-1)
    if "ended" in dataset:
        last_round = dataset["round"].values[-1]
        last = values.sel(round=dataset.ended.where(dataset.ended >= 0, last_round))
    last = last.drop_vars("round").astype(float)
    if "model" in last.dims:  # the mean skips NaN, which marks absent models
        last = last.mean("model")
    if "diverged" in dataset:
        # Negate the comparison, because NaN marks an absent run and compares as false.
        is_whole = ~(dataset.diverged >= 0).any("model")
        last = last.where(is_whole).assign(is_whole=is_whole)
    if "seed" not in last.dims:
        return last, last * math.nan
    found = {name: estimate(values) for name, values in last.items()}
    mean, error = ({name: each[i] for name, each in found.items()} for i in (0, 1))
    return xr.Dataset(mean), xr.Dataset(error)


def _text(mean: xr.Dataset, error: xr.Dataset, name: str, digits: int) -> str:
    """Formats a metric at a point, with its standard error if known."""
    value, around = mean[name].item(), error[name].item()
    if math.isnan(value):
        return "diverged" if "is_whole" in mean and mean.is_whole < 1 else "none"
    return f"{value:.{digits}g}" + (f" ± {around:.2g}" if math.isfinite(around) else "")


def _label(value: Any) -> str:
    """Formats a coordinate."""
    plain = value.item() if hasattr(value, "item") else value
    return f"{plain:g}" if isinstance(plain, float) else str(plain)


def _width(column: tuple[str, Sequence[str]]) -> int:
    """The width of a column, including header, padding and border."""
    header, cells = column
    return max(map(len, (header, *cells))) + 3
