"""Figure 3: GM-Appeal and preferred-model accuracy against rounds."""

from collections.abc import Iterator

import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.cho2022 import comparison
from fedjax_mm.papers.cho2022.comparison import (
    OURS,
    concordance,
    in_percent,
    judged,
    lead,
    preferred,
    unattacked,
)
from fedjax_mm.papers.cho2022.grid import Comparison, clustered
from fedjax_mm.papers.rulings import Ruling, more, ruling

BASELINES = ("FedAvg", "FedProx", "SCAFFOLD", "MW-Fed")
_METRICS = ("appeal", "preferred_accuracy")
_ID = "maxfl-fig3"
_PREFERRED = "preferred-model accuracy, seen"


def measure(result: xr.Dataset, settings: Comparison) -> xr.Dataset:
    """The final metrics, and their rank correlation over a run's records."""
    over_rounds = in_percent(unattacked(judged(result)), _METRICS)
    appeal, accuracy = (over_rounds.isel(metric=i, drop=True) for i in (0, 1))
    ends = comparison.measure(result, settings, id=_ID, metrics=_METRICS)
    return ends.assign({"rise together": concordance(appeal, accuracy, "round")})


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Ruling]:
    """Judges MaxFL's leads in both metrics, and whether the metrics rise together."""
    appeal = lead(measured, BASELINES, "GM-Appeal, seen")
    higher = preferred(measured, BASELINES, _PREFERRED)
    yield ruling("significantly-higher", more(appeal, form=".1f"), higher)
    together = measured["rise together"].reindex(algorithm=[OURS])
    yield ruling("rise-together", more(together))


def figure(result: xr.Dataset, measured: xr.Dataset, settings: Comparison) -> Figure:
    """Draws one panel per metric, with each method at its best point."""
    mean, error = estimate(in_percent(unattacked(judged(result)), _METRICS))
    panels = plots.panels(mean, error, xlabel="round", ylabel="percent", style="-")
    # Stack the panels, because appeals and accuracies are too far apart to share a y-axis.
    return comparison.draw([[panel] for panel in panels], settings)


SETTINGS = clustered(*BASELINES, OURS)

ITEMS = (comparison.item(_ID, SETTINGS, _METRICS, rules, measure=measure, figure=figure),)
"""Figure 3."""
