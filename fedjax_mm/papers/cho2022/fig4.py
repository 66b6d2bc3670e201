"""Figure 4, a table of the GM-Appeal and preferred-model accuracy of unseen clients."""

from collections.abc import Iterator

import xarray as xr

from fedjax_mm.papers.cho2022.comparison import OURS, item, lead
from fedjax_mm.papers.cho2022.fig3 import BASELINES
from fedjax_mm.papers.cho2022.grid import CLUSTERED, Comparison, methods
from fedjax_mm.papers.rulings import Ruling, more, no_less, ruling

SMALL = 1.0
"""A loss below this many points counts as "the same or higher" in Figure 4 and Table 5."""

_LEAST = 47.0  # points of appeal: "at least 47 % for FMNIST"


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Ruling]:
    """Judges MaxFL's leads on unseen clients."""
    appeal, preferred = (
        lead(measured, BASELINES, name)
        for name in ("GM-Appeal, unseen", "preferred-model accuracy, unseen")
    )
    yield ruling("by-47", no_less(appeal, -_LEAST, ".1f"), no_less(preferred, SMALL, ".2f"))
    yield ruling("highest", more(appeal, form=".1f"), more(preferred, form=".2f"))


ITEMS = (
    item(
        id="maxfl-fig4",
        title="GM-Appeal and preferred-model accuracy of unseen clients",
        metrics=("unseen_appeal", "unseen_preferred_accuracy"),
        settings=Comparison(**CLUSTERED, methods=methods(*BASELINES, OURS)),
        rules=rules,
    ),
)
"""Figure 4."""
