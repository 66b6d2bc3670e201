"""Figure 4, a table of the GM-Appeal and preferred-model accuracy of unseen clients."""

from collections.abc import Iterator

import xarray as xr

from fedjax_mm.papers.cho2022.comparison import item, lead, preferred
from fedjax_mm.papers.cho2022.fig3 import BASELINES, SETTINGS
from fedjax_mm.papers.cho2022.grid import Comparison
from fedjax_mm.papers.cho2022.table1 import APPEAL
from fedjax_mm.papers.rulings import Ruling, more, no_less, ruling

_PREFERRED = "preferred-model accuracy, unseen"
_LEAST = 47.0  # points of appeal: "at least 47 % for FMNIST"


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Ruling]:
    """Judges MaxFL's leads on unseen clients."""
    appeal = lead(measured, BASELINES, APPEAL[1])
    same, higher = (
        preferred(measured, BASELINES, _PREFERRED, or_same=or_same) for or_same in (True, False)
    )
    yield ruling("by-47", no_less(appeal, -_LEAST, ".1f"), same)
    yield ruling("highest", more(appeal, form=".1f"), higher)


ITEMS = (item("maxfl-fig4", SETTINGS, ("unseen_appeal", "unseen_preferred_accuracy"), rules),)
"""Figure 4."""
