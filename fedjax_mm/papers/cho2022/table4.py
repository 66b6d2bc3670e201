"""Table 4: GM-Appeal and preferred-model accuracy by number of warm-up steps."""

from collections.abc import Iterator
from itertools import combinations

import xarray as xr

from fedjax_mm.claims import within
from fedjax_mm.papers.cho2022.comparison import item
from fedjax_mm.papers.cho2022.grid import Comparison, Requirement, clustered
from fedjax_mm.papers.rulings import Ruling, ruling

_LITTLE = 5.0  # an appeal that varies by less, in points, "does not vary much"
_METHODS = ("FedAvg", "FedProx", "MaxFL")
_STEPS = (50, 100, 150)


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Ruling]:
    """Judges the differences in appeal between numbers of warm-up steps, paired by seed."""
    percent = measured["percent"].isel({"attackers": 0, "rate of the warm-up": 0}, drop=True)
    appeal = percent.sel(metric="GM-Appeal, seen", drop=True).reindex(algorithm=list(_METHODS))
    after = {n: appeal.reindex({"warm-up steps": [n]}).isel({"warm-up steps": 0}) for n in _STEPS}
    pairs = {f"{b} minus {a} steps": after[b] - after[a] for a, b in combinations(_STEPS, 2)}
    changes = xr.concat(list(pairs.values()), xr.IndexVariable("steps", list(pairs)))
    yield ruling(
        "do-not-vary-much", within(changes.transpose("algorithm", ...), margin=_LITTLE, form=".1f")
    )


_SETTINGS = clustered(*_METHODS, requirement=Requirement(num_steps=_STEPS))

ITEMS = (item("maxfl-table4", _SETTINGS, ("appeal", "preferred_accuracy"), rules),)
"""Table 4."""
