"""Table 3: GM-Appeal of locally tuned models."""

from functools import partial

from fedjax_mm.papers.cho2022.comparison import exceeds, item
from fedjax_mm.papers.cho2022.grid import Comparison, methods

# Table 5 shows other metrics of the same runs: with equal settings they are run once.
SETTINGS = Comparison(
    tuning_steps=5,
    methods=methods("FedAvg", "FedProx", "SCAFFOLD", "PerFedAvg", "MW-Fed", "MaxFL"),
)

ITEMS = (
    item(
        id="maxfl-table3",
        title="Appeal after five local steps of tuning",
        metrics=("appeal", "unseen_appeal"),
        settings=SETTINGS,
        claims=partial(exceeds, by=10.0),
    ),
)
"""Table 3."""
