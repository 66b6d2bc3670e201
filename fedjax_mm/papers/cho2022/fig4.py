"""Figure 4, which is a table: GM-Appeal and preferred-model accuracy of unseen clients."""

from collections.abc import Sequence

import xarray as xr

from fedjax_mm.papers.cho2022.clients import source_of
from fedjax_mm.papers.cho2022.comparison import exceeds, item, not_below
from fedjax_mm.papers.cho2022.grid import Comparison, methods
from fedjax_mm.papers.claims import Claim

# Points of appeal between MaxFL and the best other method in the paper.
_MARGINS = {"fmnist": 47.0, "sent140": 6.0}


def claims(measured: xr.Dataset, settings: Comparison) -> Sequence[Claim]:
    """Claims that MaxFL has far more appeal, and that preferred models are not worse."""
    margin = _MARGINS.get(source_of(settings.dataset, settings.directory), 0.0)
    appeal, preferred = (measured.isel(metric=[number]) for number in (0, 1))
    return [
        *exceeds(appeal, settings, by=margin),
        *not_below(preferred, settings),
    ]


ITEMS = (
    item(
        id="maxfl-fig4",
        title="Appeal and preferred-model accuracy of unseen clients",
        metrics=("unseen_appeal", "unseen_preferred_accuracy"),
        settings=Comparison(methods=methods("FedAvg", "FedProx", "SCAFFOLD", "MW-Fed", "MaxFL")),
        claims=claims,
    ),
)
"""Figure 4."""
