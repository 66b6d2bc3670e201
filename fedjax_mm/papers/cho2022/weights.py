"""Table 3 with the client weights of Algorithm 1, line 8.

With ``q = s (1 - s)``, clients far above or far below their threshold have almost no weight. With
clustered labels, clients far above their threshold are neglected and the appeal falls. With
``q = s``, these clients have the largest weights.
"""

from collections.abc import Iterator

import xarray as xr

from fedjax_mm.papers.cho2022.comparison import OURS, item, lead
from fedjax_mm.papers.cho2022.grid import CLUSTERED, METHODS, Comparison, methods
from fedjax_mm.papers.cho2022.table1 import APPEAL
from fedjax_mm.papers.rulings import check, more
from fedjax_mm.papers.schema import Check

_SIGMOID = "MaxFL with q = s"


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Check]:
    """Checks whether the printed weights appeal to more clients than the weights of eq. (4)."""
    printed = -lead(measured, [_SIGMOID], *APPEAL).isel(algorithm=0, drop=True)
    yield check("MaxFL appeals to more clients with q = s than with s (1 - s)", more(printed))


ITEMS = (
    item(
        id="maxfl-weights",
        title="Table 3 with MaxFL's weights q = s and q = s (1 - s)",
        metrics=("appeal", "unseen_appeal"),
        settings=Comparison(
            **CLUSTERED,
            tuning_steps=5,
            methods=methods("FedAvg", OURS) | {_SIGMOID: {**METHODS[OURS], "weight": "sigmoid"}},
        ),
        rules=rules,
    ),
)
"""The dependence of Table 3 on the client weights."""
