"""Table 1 with one partition and one draw of flips for all seeds.

The paper's standard deviations of three runs are much smaller than ours, which have clients of
their own.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import xarray as xr

from fedjax_mm.papers.cho2022 import comparison
from fedjax_mm.papers.cho2022.comparison import BOTH, item, measure, squeezed
from fedjax_mm.papers.cho2022.grid import METHODS, Comparison
from fedjax_mm.papers.cho2022.table1 import judged_table
from fedjax_mm.papers.rulings import under
from fedjax_mm.papers.schema import Reading, Table
from fedjax_mm.papers.tables import cells, columns, rows

_READING = "that of Table 1, with one partition and one draw of flips for all seeds"


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Reading]:
    """Judges Table 1 in this reading."""
    yield from under(_READING, "maxfl-table1", judged_table(measured))


def table(measured: xr.Dataset, settings: Comparison) -> Sequence[Table]:
    """The usual table, and one of standard deviations over seeds with the printed ones."""
    short = squeezed(measured)
    spread = short["percent"].std("seed", ddof=1)
    texts = cells(spread, published=short["published spread"], form=".1f")
    title = "Standard deviations over seeds, and those printed for 3 runs in parentheses:"
    own = rows(columns(texts, "metric"), ("algorithm",), title)
    return [*comparison.table(measured, settings), own]


_SETTINGS = Comparison(appealing_from=10, redraws=False, methods=METHODS, num_seeds=20)
_MEASURE = partial(measure, id="maxfl-table1", metrics=BOTH)

ITEMS = (item("maxfl-fixed", _SETTINGS, BOTH, rules, measure=_MEASURE, table=table),)
"""Table 1 with the same clients for all seeds."""
