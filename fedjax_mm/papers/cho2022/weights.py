"""Table 3 with the client weights of Algorithm 1, line 8.

With ``q = s (1 - s)``, clients far above or far below their threshold have almost no weight. With
clustered labels, clients far above their threshold are neglected and the appeal falls. With
``q = s``, these clients have the largest weights.
"""

from collections.abc import Iterator

import xarray as xr

from fedjax_mm.papers.cho2022 import table3_and_5
from fedjax_mm.papers.cho2022.comparison import item, lead
from fedjax_mm.papers.cho2022.grid import METHODS, OURS, Comparison, clustered, methods
from fedjax_mm.papers.cho2022.table1 import APPEAL
from fedjax_mm.papers.rulings import compare, under
from fedjax_mm.papers.schema import Check, Reading

_MARGIN = 1.0  # points
_SIGMOID = "MaxFL with q = s"


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Check | Reading]:
    """Compares both weights, and judges Table 3's leads, of which only FedAvg's is run, by each."""
    printed = -lead(measured, [_SIGMOID], *APPEAL).isel(algorithm=0, drop=True)
    text = "MaxFL's GM-Appeal with q = s against that with s (1 - s), in points"
    yield compare(text, printed, _MARGIN)
    for name, weights in {OURS: "q = s (1 - s)", _SIGMOID: "q = s"}.items():
        one = measured.sel(algorithm=["FedAvg", name]).assign_coords(algorithm=["FedAvg", OURS])
        reading = f"that of Table 3, with a full grid of points and the weights {weights}"
        least = (each for each in table3_and_5.leads(one) if each.key == "at-least-10")
        yield from under(reading, "maxfl-table3", least)


_METHODS = methods("FedAvg", OURS) | {_SIGMOID: {**METHODS[OURS], "weight": "sigmoid"}}
_SETTINGS = clustered(methods=_METHODS, tuning_steps=5)

ITEMS = (item("maxfl-weights", _SETTINGS, ("appeal", "unseen_appeal"), rules),)
"""The dependence of Table 3 on the client weights."""
