"""Table 2 in other readings: attackers that may leave, and weaker and stronger attacks.

The paper gives neither the size of the attackers' losses and noise, nor whether attackers leave.
"""

from collections.abc import Iterator
from typing import Any

import xarray as xr

from fedjax_mm.papers.cho2022 import several, table2
from fedjax_mm.papers.cho2022.grid import OURS, Comparison, Point
from fedjax_mm.papers.rulings import under
from fedjax_mm.papers.schema import Reading

_PROTOCOLS: dict[str, dict[str, Any]] = {
    "leaving": {"attackers_stay": False},
    "weak": {"loss_factor": 2.0, "noise": 0.1},
    "strong": {"loss_factor": 100.0, "noise": 10.0},
}
_WORDS = {
    "leaving": "attackers that may leave like other clients",
    "weak": "attackers that report 2 times their loss and send noise of 0.1 times their update",
    "strong": "attackers that report 100 times their loss and send noise of 10 times their update",
}


def rules(measured: xr.Dataset, settings: Comparison) -> Iterator[Reading]:
    """Judges Table 2 in each reading."""
    for label, words in _WORDS.items():
        found = table2.rules(measured.sel(attack=label, drop=True), settings)
        yield from under(f"that of Table 2, with {words}", "maxfl-table2", found)


# The points that the published Table 2 has without attackers.
_POINTS = {
    name: Point(learning_rate=rate, local_steps=50, batch_size=32)
    for name, rate in (("MW-Fed", 0.05), (OURS, 0.1))
}
_SETTINGS = table2.SETTINGS.model_copy(update={"points": _POINTS, "num_seeds": 20})

ITEMS = (
    several.item(
        "maxfl-attackers", _SETTINGS, rules, "attack", _PROTOCOLS, numbers_of="maxfl-table2"
    ),
)
"""Table 2 in other readings of the attack."""
