"""Table 4: GM-Appeal and preferred-model accuracy by steps of warm-up."""

from collections.abc import Sequence

import xarray as xr

from fedjax_mm.papers.cho2022.comparison import exceeds, item, squeezed
from fedjax_mm.papers.cho2022.grid import Comparison, Requirement, methods
from fedjax_mm.papers.claims import Claim, within

LITTLE = 5.0
"""Points by which an appeal varies that does not vary much."""


def claims(measured: xr.Dataset, settings: Comparison) -> Sequence[Claim]:
    """Claims that MaxFL has most appeal, which the steps of warm-up hardly change."""
    text = f"GM-Appeal varies by at most {LITTLE:g} points with the number of warm-up steps"
    appeal = measured.sel(metric=["GM-Appeal, seen"])
    means = squeezed(appeal["mean"]).isel(metric=0, drop=True)
    spread = means.max("warm-up steps", skipna=False) - means.min("warm-up steps", skipna=False)
    return [within(text, spread, 0.0, LITTLE, ".1f"), *exceeds(appeal, settings)]


ITEMS = (
    item(
        id="maxfl-table4",
        title="Appeal with 50, 100 and 150 steps of warm-up",
        metrics=("appeal", "preferred_accuracy"),
        settings=Comparison(
            requirement=Requirement(num_steps=(50, 100, 150)),
            methods=methods("FedAvg", "FedProx", "MaxFL"),
        ),
        claims=claims,
    ),
)
"""Table 4."""
