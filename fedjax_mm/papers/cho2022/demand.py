"""Table 1 at other warm-up learning rates, because our rate differs from the paper's."""

from collections.abc import Iterator, Sequence
from typing import Any

import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.papers.cho2022 import comparison
from fedjax_mm.papers.cho2022.comparison import lead, squeezed
from fedjax_mm.papers.cho2022.grid import METHODS, Comparison, Requirement
from fedjax_mm.papers.cho2022.table1 import ACCURACY, APPEAL, BASELINES
from fedjax_mm.papers.rulings import check, more
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows

_RATE = "rate of the warm-up"


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Check]:
    """Checks, at each rate, whether MaxFL has the highest GM-Appeal on seen clients."""
    leads = lead(measured, BASELINES, APPEAL[0])
    if _RATE in leads.dims:
        for rate in leads[_RATE].values:
            text = (
                f"with a warm-up rate of {rate:g}, MaxFL has the highest GM-Appeal on seen clients"
            )
            at = leads.sel({_RATE: rate}, drop=True).isel(metric=0, drop=True)
            yield check(text, more(at, form=".1f"))


def table(measured: xr.Dataset, settings: Comparison) -> Sequence[Table]:
    """Returns one row per method, with its appeal and accuracy on seen clients at every rate."""
    short = measured.isel({"attackers": 0, "warm-up steps": 0}).rename({_RATE: "rate"})
    texts = cells(short["mean"], short["standard error"], form=".1f", missing="none")
    contents: dict[str, xr.DataArray] = {}
    for metric in (APPEAL[0], ACCURACY[0]):
        contents |= columns(texts.sel(metric=metric), "rate", f"{metric.partition(',')[0]}, {{}}")
    return [rows(contents, ("algorithm",))]


def figure(result: xr.Dataset, measured: xr.Dataset, settings: Comparison) -> Figure:
    """Draws the appeal and accuracy on seen clients over the rate, with one line per method."""
    short = squeezed(measured.isel({"attackers": [0], "warm-up steps": [0]}))
    shown = short[["mean", "standard error"]].sel(metric=[APPEAL[0], ACCURACY[0]])
    if _RATE not in shown.dims:
        shown = shown.expand_dims(_RATE)
    ordered = shown.transpose("metric", "algorithm", _RATE)
    how: dict[str, Any] = {"xlabel": _RATE, "ylabel": "percent", "xscale": "log"}
    panels = plots.panels(ordered["mean"], ordered["standard error"], **how)
    return comparison.draw([panels], settings)


ITEMS = (
    comparison.item(
        id="maxfl-demand",
        title="Table 1 with warm-up learning rates of 0.1, 0.05 and 0.01",
        metrics=("accuracy", "appeal", "unseen_accuracy", "unseen_appeal"),
        settings=Comparison(
            partition="dirichlet",
            appealing_from=10,
            requirement=Requirement(learning_rates=(0.1, 0.05, 0.01)),
            methods=METHODS,
        ),
        rules=rules,
        table=table,
        figure=figure,
    ),
)
"""The dependence of Table 1 on the clients' requirements."""
