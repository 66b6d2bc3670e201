"""Table 1 at other warm-up learning rates, because our rate differs from the paper's."""

from collections.abc import Iterator, Sequence
from typing import Any

import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.papers.cho2022 import comparison, fig7
from fedjax_mm.papers.cho2022.comparison import BOTH, squeezed
from fedjax_mm.papers.cho2022.grid import METHODS, Comparison, Requirement
from fedjax_mm.papers.cho2022.table1 import ACCURACY, APPEAL, judged_table
from fedjax_mm.papers.rulings import under
from fedjax_mm.papers.schema import Reading, Table
from fedjax_mm.papers.tables import cells, columns, rows

_RATE = "rate of the warm-up"


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Reading]:
    """Judges Table 1 and Figure 7's sentence at each rate."""
    for rate in measured[_RATE].values:
        at, reading = measured.sel({_RATE: [rate]}), f"that of Table 1, with a warm-up at {rate:g}"
        yield from under(reading, "maxfl-table1", judged_table(at))
        yield from under(reading, "maxfl-fig7", fig7.rules(at, settings))


def table(measured: xr.Dataset, settings: Comparison) -> Sequence[Table]:
    """One row per method, with its appeal and accuracy on seen clients at every rate."""
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


_RATES = Requirement(learning_rates=(0.1, 0.05, 0.01))
_SETTINGS = Comparison(appealing_from=10, requirement=_RATES, methods=METHODS)

ITEMS = (comparison.item("maxfl-demand", _SETTINGS, BOTH, rules, table=table, figure=figure),)
"""The dependence of Table 1 on the clients' requirements."""
