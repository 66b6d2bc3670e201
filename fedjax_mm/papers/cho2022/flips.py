"""Table 1 in another reading, with flipped test labels and each label split by Dirichlet's law.

The paper does not specify which labels are flipped or how labels are distributed. `maxfl-table1`
flips only training labels and lets each client draw its labels.
"""

from collections.abc import Iterator
from functools import partial

import xarray as xr

from fedjax_mm.papers.cho2022.comparison import item, lead, measure
from fedjax_mm.papers.cho2022.grid import METHODS, Comparison
from fedjax_mm.papers.cho2022.table1 import ACCURACY, APPEAL, BASELINES
from fedjax_mm.papers.rulings import check, more
from fedjax_mm.papers.schema import Check

_METRICS = ("accuracy", "appeal", "unseen_accuracy", "unseen_appeal")


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Check]:
    """Checks that MaxFL also leads under this reading."""
    accuracy, appeal = (lead(measured, BASELINES, *names) for names in (ACCURACY, APPEAL))
    yield check("MaxFL has the highest test accuracy", more(accuracy, form=".1f"))
    yield check("MaxFL has the highest GM-Appeal", more(appeal, form=".1f"))


ITEMS = (
    item(
        id="maxfl-flips",
        title="Table 1 with flipped labels in training and test data",
        metrics=_METRICS,
        settings=Comparison(
            partition="dirichlet_labels", flips="everywhere", appealing_from=10, methods=METHODS
        ),
        rules=rules,
        measure=partial(measure, id="maxfl-table1", metrics=_METRICS),
    ),
)
"""Table 1 under the alternative reading of flips."""
