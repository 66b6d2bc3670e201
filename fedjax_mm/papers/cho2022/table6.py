"""Table 6: GM-Appeal and preferred-model accuracy of q-FFL."""

from fedjax_mm.papers.cho2022.comparison import exceeds, item
from fedjax_mm.papers.cho2022.grid import Comparison, methods

_QFFL = {f"qFFL, q = {q:g}": {"name": "qffl", "q": q} for q in (1.0, 10.0)}

ITEMS = (
    item(
        id="maxfl-table6",
        title="MaxFL and q-FFL, which is fair",
        metrics=("appeal", "preferred_accuracy"),
        settings=Comparison(methods=_QFFL | methods("MaxFL")),
        claims=exceeds,
    ),
)
"""Table 6."""
