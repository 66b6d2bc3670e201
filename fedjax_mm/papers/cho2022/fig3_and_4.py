"""Figures 3 and 4: GM-Appeal and preferred-model accuracy of seen and of unseen clients."""

from collections.abc import Iterator

import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.claims import at_least, more
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.cho2022 import comparison
from fedjax_mm.papers.cho2022.comparison import item, lead, preferred
from fedjax_mm.papers.cho2022.grid import OURS, Comparison, clustered
from fedjax_mm.papers.cho2022.table1 import APPEAL
from fedjax_mm.papers.rulings import Ruling, ruling

BASELINES = ("FedAvg", "FedProx", "SCAFFOLD", "MW-Fed")
_METRICS = ("appeal", "preferred_accuracy")
_UNSEEN = ("unseen_appeal", "unseen_preferred_accuracy")
_PREFERRED = ("preferred-model accuracy, seen", "preferred-model accuracy, unseen")
_LEAST = 47.0  # points of appeal: "at least 47 % for FMNIST"


def measure(result: xr.Dataset, settings: Comparison) -> xr.Dataset:
    """The final metrics, and their rank correlation over a run's records."""
    over_rounds = _percent(result)
    appeal, accuracy = (over_rounds.isel(metric=i, drop=True) for i in (0, 1))
    ends = comparison.measure(result, settings, id="maxfl-fig3", metrics=_METRICS)
    return ends.assign({"rise together": comparison.concordance(appeal, accuracy, "round")})


def _percent(result: xr.Dataset) -> xr.DataArray:
    return comparison.in_percent(comparison.unattacked(comparison.judged(result)), _METRICS)


def rules_of_seen(measured: xr.Dataset, settings: Comparison) -> Iterator[Ruling]:
    """Judges MaxFL's leads in both metrics, and whether the metrics rise together."""
    appeal = lead(measured, BASELINES, APPEAL[0])
    higher = preferred(measured, BASELINES, _PREFERRED[0])
    yield ruling("significantly-higher", more(appeal, form=".1f"), higher)
    together = measured["rise together"].reindex(algorithm=[OURS])
    yield ruling("rise-together", more(together))


def rules_of_unseen(measured: xr.Dataset, settings: Comparison) -> Iterator[Ruling]:
    """Judges MaxFL's leads on unseen clients."""
    appeal = lead(measured, BASELINES, APPEAL[1])
    same, higher = (
        preferred(measured, BASELINES, _PREFERRED[1], or_same=or_same) for or_same in (True, False)
    )
    yield ruling("by-47", at_least(appeal, _LEAST, form=".1f"), same)
    yield ruling("highest", more(appeal, form=".1f"), higher)


def figure(result: xr.Dataset, measured: xr.Dataset, settings: Comparison) -> Figure:
    """Draws one panel per metric, with each method at its best point."""
    mean, error = estimate(_percent(result))
    panels = plots.panels(mean, error, xlabel="round", ylabel="percent", style="-")
    # Stack the panels, because appeals and accuracies are too far apart to share a y-axis.
    return comparison.draw([[panel] for panel in panels], settings)


_SETTINGS = clustered(*BASELINES, OURS)
_SEEN = _METRICS, rules_of_seen

ITEMS = (
    item("maxfl-fig3", _SETTINGS, *_SEEN, measure=measure, figure=figure),
    item("maxfl-fig4", _SETTINGS, _UNSEEN, rules_of_unseen),
)
"""Figures 3 and 4."""
