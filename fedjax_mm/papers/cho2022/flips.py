"""Table 1 in another reading, with flipped test labels and each label split by Dirichlet's law.

The paper does not specify which labels are flipped or how labels are distributed. `maxfl-table1`
flips only training labels and lets each client draw its labels.
"""

from collections.abc import Iterator
from functools import partial

import xarray as xr

from fedjax_mm.papers.cho2022 import fig7
from fedjax_mm.papers.cho2022.comparison import BOTH, item, measure
from fedjax_mm.papers.cho2022.grid import METHODS, Comparison
from fedjax_mm.papers.cho2022.table1 import judged_table
from fedjax_mm.papers.rulings import under
from fedjax_mm.papers.schema import Reading

_READING = (
    "flips in training and test labels, each label by Dirichlet's law, participation by the loss "
    "on training examples"
)


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Reading]:
    """Judges Table 1 and Figure 7's sentence under this reading."""
    yield from under(_READING, "maxfl-table1", judged_table(measured))
    yield from under(_READING, "maxfl-fig7", fig7.rules(measured, settings))


_SETTINGS = Comparison(
    partition="dirichlet_labels", flips="everywhere", appealing_from=10, methods=METHODS
)
_MEASURE = partial(measure, id="maxfl-table1", metrics=BOTH)

ITEMS = (item("maxfl-flips", _SETTINGS, BOTH, rules, measure=_MEASURE),)
"""Table 1 under the alternative reading of flips."""
