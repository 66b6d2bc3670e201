"""Figure 3: GM-Appeal and preferred-model accuracy over the rounds."""

import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.papers.cho2022.comparison import draw, exceeds, in_percent, item, judged, unattacked
from fedjax_mm.papers.cho2022.grid import Comparison, methods
from fedjax_mm.papers.claims import estimate

_METRICS = ("appeal", "preferred_accuracy")


def figure(result: xr.Dataset, measured: xr.Dataset, settings: Comparison) -> Figure:
    """Draws a panel for each metric, and each method at its best point."""
    mean, error = estimate(in_percent(unattacked(judged(result)), _METRICS))
    panels = plots.panels(mean, error, xlabel="round", ylabel="percent", style="-")
    # One below the other: appeals and accuracies are too far apart for one y-axis.
    return draw([[panel] for panel in panels], settings)


ITEMS = (
    item(
        id="maxfl-fig3",
        title="Appeal and preferred-model accuracy over the rounds",
        metrics=_METRICS,
        settings=Comparison(methods=methods("FedAvg", "FedProx", "SCAFFOLD", "MW-Fed", "MaxFL")),
        claims=exceeds,
        figure=figure,
    ),
)
"""Figure 3."""
