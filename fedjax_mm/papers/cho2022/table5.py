"""Table 5: preferred-model accuracy with locally tuned models."""

from fedjax_mm.papers.cho2022.comparison import item, not_below
from fedjax_mm.papers.cho2022.table3 import SETTINGS

ITEMS = (
    item(
        id="maxfl-table5",
        title="Preferred-model accuracy after local tuning",
        metrics=("preferred_accuracy", "unseen_preferred_accuracy"),
        settings=SETTINGS,
        claims=not_below,
    ),
)
"""Table 5."""
