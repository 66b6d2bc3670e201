"""Table 1 by the rate of the warm-up, which the paper leaves open: how much it decides."""

from fedjax_mm.papers.cho2022.comparison import exceeds, item
from fedjax_mm.papers.cho2022.grid import METHODS, Comparison, Requirement

ITEMS = (
    item(
        id="maxfl-demand",
        title="Table 1 with warm-ups at rates of 0.1, 0.05 and 0.01",
        metrics=("accuracy", "appeal", "unseen_accuracy", "unseen_appeal"),
        settings=Comparison(
            partition="dirichlet",
            appealing_from=10,
            requirement=Requirement(learning_rates=(0.1, 0.05, 0.01)),
            methods=METHODS,
        ),
        claims=exceeds,
    ),
)
"""How Table 1 depends on what clients require."""
