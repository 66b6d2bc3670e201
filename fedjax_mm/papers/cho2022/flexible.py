"""Table 1 with and without flexible participation, on the same clients and at the same points.

The paper explains the low accuracies of Table 1 by the clients that leave, but it has no run in
which nobody may leave.
"""

from collections.abc import Iterator

import xarray as xr

from fedjax_mm.claims import more
from fedjax_mm.papers.cho2022 import comparison, several
from fedjax_mm.papers.cho2022.comparison import lead
from fedjax_mm.papers.cho2022.grid import METHODS, Comparison
from fedjax_mm.papers.cho2022.table1 import ACCURACY, BASELINES
from fedjax_mm.papers.rulings import Ruling, ruling

_PROTOCOLS = {"flexible": {}, "full": {"appealing_from": None}}
_POOR = ("FedProx", "SCAFFOLD", "PerFedAvg", "qFFL")


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Ruling]:
    """Judges the effect of clients that leave on the accuracies of Table 1."""
    percent = comparison.squeezed(measured["percent"]).reindex(metric=list(ACCURACY))
    lost = _minus(percent.reindex(algorithm=list(_POOR)), "full", "flexible")
    yield ruling("few-data-points", more(lost, form=".1f"))
    ahead = lead(measured, BASELINES, *ACCURACY)
    yield ruling("even-more-imperative", more(_minus(ahead, "flexible", "full"), form=".1f"))


def _minus(values: xr.DataArray, one: str, other: str) -> xr.DataArray:
    first, second = (values.sel(participation=name, drop=True) for name in (one, other))
    return first - second


_SETTINGS = Comparison(appealing_from=10, methods=METHODS)

ITEMS = (several.item("maxfl-flexible", _SETTINGS, rules, "participation", _PROTOCOLS),)
"""Table 1 with and without flexible participation."""
