"""Table 2: Table 1 with attackers that report large losses and send noise."""

from collections.abc import Iterator

import xarray as xr

from fedjax_mm.claims import at_most, more
from fedjax_mm.papers.cho2022.comparison import BOTH, item
from fedjax_mm.papers.cho2022.grid import OURS, Comparison, methods
from fedjax_mm.papers.cho2022.table1 import ACCURACY
from fedjax_mm.papers.rulings import Ruling, ruling

_LITTLE = 5.0  # points: the upper end of "only 1-5 %"
_SHARES = (0.05, 0.1)


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Ruling]:
    """Judges the loss of accuracy due to the attackers, in points."""
    percent = measured["percent"].isel({"warm-up steps": 0, "rate of the warm-up": 0}, drop=True)
    percent = percent.reindex(metric=list(ACCURACY), algorithm=[OURS, "MW-Fed"])
    without, attacked = (percent.reindex(attackers=list(x)) for x in ((0.0,), _SHARES))
    lost = without.isel(attackers=0, drop=True) - attacked
    ours, theirs = (lost.sel(algorithm=name, drop=True) for name in (OURS, "MW-Fed"))
    yield ruling("loses-little", at_most(ours, _LITTLE, form=".1f"))
    yield ruling("mw-fed-susceptible", more(theirs, by=_LITTLE, form=".1f"))


SETTINGS = Comparison(appealing_from=10, byzantine=(0.0, *_SHARES), methods=methods("MW-Fed", OURS))

ITEMS = (item("maxfl-table2", SETTINGS, BOTH, rules),)
"""Table 2."""
