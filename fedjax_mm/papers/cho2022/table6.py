"""Table 6: GM-Appeal and preferred-model accuracy of q-FFL."""

from collections.abc import Iterator

import xarray as xr

from fedjax_mm.claims import fact, more
from fedjax_mm.papers.cho2022.comparison import BY_ACCURACY, item, lead, preferred, selected
from fedjax_mm.papers.cho2022.grid import OURS, Comparison, Point, clustered, methods
from fedjax_mm.papers.cho2022.table1 import APPEAL
from fedjax_mm.papers.published import published
from fedjax_mm.papers.rulings import Ruling, ruling, under
from fedjax_mm.papers.schema import Reading

_AFL = {"AFL": {"name": "afl", "mixture_rate": 0.1}}
_ONE_STEP = Point(learning_rate=0.1, local_steps=1, batch_size=32)  # AFL takes no more steps
_QFFL = {f"qFFL, q = {q:g}": {"name": "qffl", "q": q} for q in (1.0, 10.0)}


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Ruling | Reading]:
    """Judges MaxFL's leads over q-FFL, and compares one sentence with the paper's own table."""
    yield from measured_leads(measured)
    if (other := selected(measured, "accuracy")) is not None:
        yield from under(BY_ACCURACY, "maxfl-table6", _fair(other))
    papers = published("maxfl-table6")["values"]
    printed = {
        f"printed, {data}, {name}": (row[0], row[0] >= 40 if name == OURS else row[0] < 1)
        for data, table in papers.items()
        for name, row in table.items()
    }
    parts = [fact(holds, f"{x:g} %", name) for name, (x, holds) in printed.items()]
    yield ruling("lower-than-0-01", *parts)


def measured_leads(measured: xr.Dataset) -> Iterator[Ruling]:
    """Judges MaxFL's measured leads over q-FFL."""
    yield from _fair(measured)
    higher = preferred(measured, list(_QFFL), "preferred-model accuracy, seen")
    yield ruling("preferred-higher", higher)


def _fair(measured: xr.Dataset) -> Iterator[Ruling]:
    yield ruling("fair-not-effective", more(lead(measured, list(_QFFL), APPEAL[0]), form=".1f"))


_ALL = _QFFL | _AFL | methods(OURS)
SETTINGS = clustered(methods=_ALL, points={"AFL": _ONE_STEP})

ITEMS = (item("maxfl-table6", SETTINGS, ("appeal", "preferred_accuracy"), rules),)
"""Table 6."""
