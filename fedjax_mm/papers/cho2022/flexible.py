"""Table 1 with and without flexible participation, on the same clients and at the same points.

The paper explains the low accuracies of Table 1 by the clients that leave, but it has no run in
which nobody may leave.
"""

from collections.abc import Iterator

import xarray as xr

from fedjax_mm.claims import more
from fedjax_mm.papers.cho2022 import comparison
from fedjax_mm.papers.cho2022.comparison import BOTH, item, lead
from fedjax_mm.papers.cho2022.grid import METHODS, Comparison
from fedjax_mm.papers.cho2022.runs import best_points, run_comparison, select
from fedjax_mm.papers.cho2022.table1 import ACCURACY, BASELINES
from fedjax_mm.papers.rulings import Ruling, ruling
from fedjax_mm.papers.training import described, stages
from fedjax_mm.sweeps.execution import Execution

_FLEXIBLE, _FULL = "flexible", "full"
_POOR = ("FedProx", "SCAFFOLD", "PerFedAvg", "qFFL")


def run(config: Comparison, execution: Execution | None = None) -> xr.Dataset:
    """Runs Table 1, and then its methods at the same points with clients that never leave."""
    how = execution or Execution()
    scores = select(config, how)
    leaving = config.model_copy(update={"points": best_points(scores, config)})
    staying = leaving.model_copy(update={"appealing_from": None})
    parts = stages("participation", {_FLEXIBLE: leaving, _FULL: staying}, how, run_comparison)
    index = xr.IndexVariable("participation", list(parts))
    result = xr.concat(
        parts.values(), index, data_vars="all", coords="minimal", combine_attrs="override"
    )
    return described(result.merge(scores.drop_attrs()), list(parts.values()))


def measure(result: xr.Dataset, settings: Comparison) -> xr.Dataset:
    """The final metrics, over ``(metric, algorithm, participation, *DIMS)``."""
    nobody_leaves = settings.model_copy(update={"appealing_from": None})
    each = [
        comparison.measure(
            result.sel(participation=name, drop=True), nobody_leaves, id=_ID, metrics=BOTH
        )
        for name in result["participation"].values
    ]
    both = xr.concat(each, result["participation"], data_vars="all", coords="minimal")
    return both.transpose("metric", "algorithm", "participation", ...)


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Ruling]:
    """Judges the effect of clients that leave on the accuracies of Table 1."""
    percent = comparison.squeezed(measured["percent"]).reindex(metric=list(ACCURACY))
    lost = _minus(percent.reindex(algorithm=list(_POOR)), _FULL, _FLEXIBLE)
    yield ruling("few-data-points", more(lost, form=".1f"))
    ahead = lead(measured, BASELINES, *ACCURACY)
    yield ruling("even-more-imperative", more(_minus(ahead, _FLEXIBLE, _FULL), form=".1f"))


def _minus(values: xr.DataArray, one: str, other: str) -> xr.DataArray:
    first, second = (values.sel(participation=name, drop=True) for name in (one, other))
    return first - second


_ID = "maxfl-flexible"
_SETTINGS = Comparison(appealing_from=10, methods=METHODS)

ITEMS = (item(_ID, _SETTINGS, BOTH, rules, run=run, measure=measure),)
"""Table 1 with and without flexible participation."""
