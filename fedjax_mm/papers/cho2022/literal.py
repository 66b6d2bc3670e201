"""Tables 3, 5 and 6 with points by test accuracy and a warm-up at the learning rate of MaxFL.

Appendix D.1 has points by test accuracy and a warm-up at the rate of local training, and section 5
the same thresholds for all methods. Our own reading of these tables has neither.
"""

from collections.abc import Iterator
from typing import Any

import xarray as xr

from fedjax_mm.papers.cho2022 import table3_and_5, table6
from fedjax_mm.papers.cho2022.comparison import item
from fedjax_mm.papers.cho2022.grid import Comparison, Requirement
from fedjax_mm.papers.rulings import under
from fedjax_mm.papers.schema import Reading

_READING = (
    "points by test accuracy and one warm-up at MaxFL's learning rate, as appendix D.1 says, five "
    "clusters of labels, flips in training and test labels"
)


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Reading]:
    """Judges Tables 3 and 5 in this reading."""
    yield from under(_READING, "maxfl-table3", table3_and_5.leads(measured))
    yield from under(_READING, "maxfl-table5", table3_and_5.rules_of_accuracy(measured, settings))


def rules_of_qffl(measured: xr.Dataset, settings: Comparison) -> Iterator[Reading]:
    """Judges Table 6 in this reading."""
    yield from under(_READING, "maxfl-table6", table6.measured_leads(measured))


_AT_TRAINING = Requirement(learning_rates="training")
_LITERAL: dict[str, Any] = {"requirement": _AT_TRAINING, "chosen_by": "accuracy", "num_seeds": 20}
_TUNED = table3_and_5.SETTINGS.model_copy(update=_LITERAL)
_QFFL = table6.SETTINGS.model_copy(update=_LITERAL)
_METRICS = ("appeal", "unseen_appeal", "preferred_accuracy", "unseen_preferred_accuracy")

ITEMS = (
    item("maxfl-literal", _TUNED, _METRICS, rules),
    item("maxfl-literal-qffl", _QFFL, ("appeal", "preferred_accuracy"), rules_of_qffl),
)
"""Tables 3, 5 and 6 in the literal reading of appendix D.1."""
