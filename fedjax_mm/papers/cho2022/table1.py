"""Table 1: test accuracy and GM-Appeal of clients who may leave, seen and unseen."""

from fedjax_mm.papers.cho2022.comparison import exceeds, item
from fedjax_mm.papers.cho2022.grid import METHODS, Comparison

ITEMS = (
    item(
        id="maxfl-table1",
        title="MaxFL and six baselines where clients may leave",
        metrics=("accuracy", "appeal", "unseen_accuracy", "unseen_appeal"),
        settings=Comparison(partition="dirichlet", appealing_from=10, methods=METHODS),
        claims=exceeds,
    ),
)
"""Table 1."""
