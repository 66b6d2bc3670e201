"""Table 5: preferred-model accuracy with locally tuned models."""

from collections.abc import Iterator

import xarray as xr

from fedjax_mm.papers.cho2022.comparison import EQUAL, item, lead, preferred
from fedjax_mm.papers.cho2022.grid import Comparison
from fedjax_mm.papers.cho2022.table1 import APPEAL
from fedjax_mm.papers.cho2022.table3 import SETTINGS
from fedjax_mm.papers.rulings import Ruling, more, no_less, ruling

_OTHERS = ("FedAvg", "FedProx", "PerFedAvg", "MW-Fed")  # the table omits SCAFFOLD
_SEEN, _UNSEEN = ("preferred-model accuracy, seen", "preferred-model accuracy, unseen")


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Ruling]:
    """Judges preferred-model accuracies and the appeal to unseen clients."""
    unseen, appeal = (lead(measured, _OTHERS, name) for name in (_UNSEEN, APPEAL[1]))
    seen, hardly = (preferred(measured, _OTHERS, name, or_same=True) for name in (_SEEN, _UNSEEN))
    yield ruling("seen-same-or-higher", seen)
    behind = unseen.sel(algorithm=["FedProx"])
    yield ruling(
        "fedprox-slightly-higher",
        more((-behind).assign_coords(algorithm=["FedProx minus MaxFL"])),
        no_less(behind.assign_coords(algorithm=["MaxFL minus FedProx, slightly"]), EQUAL),
        more(appeal.sel(algorithm=["FedProx"]), form=".1f"),
        about="the appeal of 0.46 is PerFedAvg's in the paper's own Table 3; FedProx has 0.41",
    )
    yield ruling("loses-very-little", hardly, more(appeal, form=".1f"))


_METRICS = ("preferred_accuracy", "unseen_preferred_accuracy", "unseen_appeal")

ITEMS = (item("maxfl-table5", SETTINGS, _METRICS, rules),)
"""Table 5."""
