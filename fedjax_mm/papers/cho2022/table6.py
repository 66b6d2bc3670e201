"""Table 6: GM-Appeal and preferred-model accuracy of q-FFL."""

from collections.abc import Iterator

import xarray as xr

from fedjax_mm.papers.cho2022.comparison import OURS, item, lead
from fedjax_mm.papers.cho2022.grid import CLUSTERED, Comparison, methods
from fedjax_mm.papers.published import published
from fedjax_mm.papers.rulings import Ruling, fact, more, ruling

_QFFL = {f"qFFL, q = {q:g}": {"name": "qffl", "q": q} for q in (1.0, 10.0)}


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Ruling]:
    """Judges MaxFL's leads over q-FFL, and compares one sentence with the paper's own table."""
    appeal, preferred = (
        lead(measured, list(_QFFL), f"{name}, seen")
        for name in ("GM-Appeal", "preferred-model accuracy")
    )
    yield ruling("fair-not-effective", more(appeal, form=".1f"))
    yield ruling("preferred-higher", more(preferred))
    papers = published(__name__, "maxfl-table6")["values"]
    printed = {
        f"printed, {data}, {name}": (row[0], row[0] >= 40 if name == OURS else row[0] < 1)
        for data, table in papers.items()
        for name, row in table.items()
    }
    parts = [fact(holds, f"{x:g} %", name) for name, (x, holds) in printed.items()]
    yield ruling("lower-than-0-01", *parts)


ITEMS = (
    item(
        id="maxfl-table6",
        title="MaxFL and q-FFL, a fair method",
        metrics=("appeal", "preferred_accuracy"),
        settings=Comparison(**CLUSTERED, methods=_QFFL | methods("MaxFL")),
        rules=rules,
    ),
)
"""Table 6."""
