"""Tables of section 5 of Cho et al.: methods at their best points, beside published numbers."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.papers import claims
from fedjax_mm.papers.cho2022.clients import source_of
from fedjax_mm.papers.cho2022.grid import DIMS, POINT, Comparison
from fedjax_mm.papers.cho2022.runs import run_comparison
from fedjax_mm.papers.claims import Claim, estimate
from fedjax_mm.papers.figures import points
from fedjax_mm.papers.item import Item, published
from fedjax_mm.papers.tables import Table, cells, columns, rows
from fedjax_mm.results.labels import places

OURS = "MaxFL"
_METRICS = {
    "accuracy": "test accuracy",
    "appeal": "GM-Appeal",
    "preferred_accuracy": "preferred-model accuracy",
}
_PARTITIONS = {
    "dirichlet": "each client's labels by Dirichlet's law",
    "dirichlet_labels": "each label by Dirichlet's law",
    "clusters": "five clusters of neighbouring labels",
    "shuffled_clusters": "five clusters of random labels",
}


def item(id: str, title: str, settings: Comparison, metrics: Sequence[str], **others: Any) -> Item:
    """Returns an item that compares methods at their best points.

    Args:
      id: of the item.
      title: for `fedjax-mm list`.
      settings: the defaults.
      metrics: of the clients that were seen and, as "unseen_...", of the others, in the order of
        the published numbers.
      **others: the paper's `claims`; `measure` and `figure`, if not those of a table.
    """
    functions: dict[str, Any] = {"measure": partial(measure, id=id, metrics=metrics)}
    functions |= {"table": table, "figure": figure} | others
    return Item(id, title, settings, run_comparison, **functions)


def judged(result: xr.Dataset) -> xr.Dataset:
    """Returns what is judged, over ``(algorithm, *DIMS, seed, round)``, without the selection."""
    return result.drop_dims(["candidate", "selection_seed"], errors="ignore").rename(DIMS)


def in_percent(best: xr.Dataset, metrics: Sequence[str]) -> xr.DataArray:
    """Returns metrics of the best points, ``(metric, algorithm, ..., seed, round)``."""
    titles = [
        f"{_METRICS[name.removeprefix('unseen_')]}, {'un' * name.startswith('unseen_')}seen"
        for name in metrics
    ]
    return 100 * xr.concat([best[name] for name in metrics], xr.IndexVariable("metric", titles))


def measure(
    result: xr.Dataset, settings: Comparison, *, id: str, metrics: Sequence[str]
) -> xr.Dataset:
    """Returns metrics at the end, over ``(metric, algorithm, *DIMS)``."""
    best = judged(result).isel(round=-1, drop=True)
    percent = in_percent(best, metrics)
    # skipna=False: without a diverged seed the mean would look better.
    mean = percent.mean("seed", skipna=False)
    papers = published(__name__, id).get("values", {}).get(settings.dataset, {})
    numbers = [papers.get(row, [np.nan] * len(metrics)) for row in names_of(mean)]
    return xr.Dataset(
        {
            "percent": percent,
            "mean": mean,
            "standard error": estimate(percent).error,
            "published": mean.copy(data=np.transpose(numbers).reshape(mean.shape)),
            "skipped rounds": best["idle_rounds"],
            "diverged": (best["diverged"] >= 0).any("seed"),
            "diverged runs": (best["diverged"] >= 0).sum(),
            "grid points of a variant": settings.num_points,
        }
    )


def unattacked(values: Any) -> Any:
    """Returns values without attackers, after the first warm-up."""
    return values.isel(dict.fromkeys(DIMS.values(), 0), drop=True)


def squeezed(values: Any) -> Any:
    """Returns values without the dimensions that have one coordinate, but for the methods."""
    # Most tables have no attackers and one warm-up, and need no columns for them.
    alone = [dim for dim in DIMS.values() if values.sizes[dim] == 1]
    return values.squeeze(alone, drop=True)


def names_of(values: xr.DataArray) -> list[str]:
    """Returns the names of a table's rows, such as "MaxFL, attackers = 0.05"."""
    return _names(squeezed(values))


def _names(short: xr.DataArray) -> list[str]:
    one = short.isel(metric=0)
    return [", ".join(words) for _, words in places(one, *map(str, one.dims))]


def ahead(measured: xr.Dataset, metric: str, ours: str = OURS) -> xr.DataArray:
    """Returns a method's points above every other one, seed by seed; NaN if it is not there."""
    percent = squeezed(measured["percent"].sel(metric=metric, drop=True))
    lead = of_method(percent, ours) - percent.drop_sel(algorithm=ours, errors="ignore")
    return lead.assign_coords(algorithm=[f"ahead of {name}" for name in lead["algorithm"].values])


def of_method(values: xr.DataArray, name: str) -> xr.DataArray:
    """Returns the values of a method; NaN if it is not there."""
    # reindex, not sel: where a method is left out, claims about it do not hold; nothing is raised.
    return values.reindex(algorithm=[name]).isel(algorithm=0, drop=True)


def exceeds(
    measured: xr.Dataset, settings: Comparison, *, by: float = 0.0, ours: str = OURS
) -> list[Claim]:
    """Claims that a method is above every other by more than `by` points, in all metrics."""
    text = f"{ours} exceeds every other method" + (f" by more than {by:g} points" if by else "")
    return _in_all_metrics(measured, partial(claims.exceeds, by=by), text, ours)


def not_below(measured: xr.Dataset, settings: Comparison) -> list[Claim]:
    """Claims that MaxFL is not below any other method, in all metrics."""
    text = "MaxFL is not below any other method"
    return _in_all_metrics(measured, claims.not_below, text)


def _in_all_metrics(
    measured: xr.Dataset, claimed: Callable[..., Claim], text: str, ours: str = OURS
) -> list[Claim]:
    leads = {title: ahead(measured, title, ours) for title in measured["metric"].values}
    return [claimed(f"{title}: {text}", lead, form=".1f") for title, lead in leads.items()]


def table(measured: xr.Dataset, settings: Comparison) -> Sequence[Table]:
    """Returns a row for each method, number of attackers and length of the warm-up."""
    short = squeezed(measured)
    texts = cells(short["mean"], short["standard error"], short["published"], ".1f", "none")
    point = [short[name] for name in (*POINT, "diverged")]
    contents = columns(texts, "metric") | {
        "best point": xr.apply_ufunc(_text, *point, vectorize=True, output_dtypes=[object]),
        "skipped rounds": cells(short["skipped rounds"].mean("seed"), form=".0f"),
    }
    return [rows(contents, tuple(map(str, short["diverged"].dims)))]


def _text(variant: str, learning_rate: float, local_steps: int, batch_size: int, bad: bool) -> str:
    own = variant.partition(" (")[2].removesuffix(")")
    settings = [f"lr {learning_rate:g}", f"tau {local_steps}", f"B {batch_size}", own]
    return ", ".join(filter(None, [*settings, "diverged" * bad]))


def figure(result: xr.Dataset, measured: xr.Dataset, settings: Comparison) -> Figure:
    """Draws a panel for each kind of metric: seen and unseen clients, ours and the paper's.

    Too many names for one panel have a row of panels for each number of attackers and warm-up.
    """
    short = squeezed(measured[["mean", "standard error", "published"]])
    others = [str(dim) for dim in short["published"].dims if dim not in ("metric", "algorithm")]
    apart = others if math.prod(short.sizes[dim] for dim in ("algorithm", *others)) > 10 else []
    first = short["published"].isel(metric=0)
    drawn = [_panels(short.sel(at), ", ".join(words)) for at, words in places(first, *apart)]
    return draw(drawn, settings)


def _panels(short: xr.Dataset, where: str) -> list[plots.Panel]:
    panels: dict[str, dict[str, Any]] = {}
    for metric in short["metric"].values:
        kind, _, who = metric.partition(", ")
        kind = ", ".join(filter(None, (kind, where)))
        mean, error, paper = (
            short[name].sel(metric=metric).values.ravel()
            for name in ("mean", "standard error", "published")
        )
        series = panels.setdefault(kind, {})
        series[f"{who} clients"] = mean, error
        if np.isfinite(paper).any():
            series[f"{who}, published"] = paper
    # Lines of a tick may break at spaces, but not at these: a value stays with its setting.
    names = [name.replace(" = ", "\xa0=\xa0") for name in _names(short["mean"])]
    return [points(names, *panel, "percent") for panel in panels.items()]


def draw(panels: Sequence[Sequence[plots.Panel]], settings: Comparison) -> Figure:
    """Draws rows of panels, and says below what they show."""
    who, invited = settings.population, "all clients may be drawn in every round"
    source = source_of(settings.dataset, settings.directory)
    standing = f" standing in for {settings.dataset}" * (source != settings.dataset)
    invented = " (invented tweets)" * (source == "sent140" and settings.directory is None)
    if settings.appealing_from:
        invited = f"from round {settings.appealing_from} on only clients train to whom the model "
        invited += "appeals"
    chosen = "Each method at a point that the settings give"
    if settings.selection:
        chosen = (
            f"Each method at the best of {settings.num_points} points of the grid, by accuracy "
        )
        chosen += f"on {settings.selection_seeds} other seeds"
    tuned = f" {settings.tuning_steps} local steps of tuning." * (settings.tuning_steps > 0)
    return plots.draw(
        panels,
        title=f"{source}{standing}{invented}, {who.num_clients} seen and {who.num_unseen} unseen "
        f"clients, {who.cohort_size} a round, T = {settings.num_rounds}",
        caption=f"Means over {settings.num_seeds} seeds with clients of their own, with standard "
        f"errors; {_PARTITIONS[settings.partition]}; {invited}. {chosen}.{tuned}",
    )
