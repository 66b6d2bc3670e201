"""Table 4: GM-Appeal and preferred-model accuracy by steps of warm-up."""

from collections.abc import Sequence

import xarray as xr

from fedjax_mm.papers.cho2022.comparison import exceeds, item
from fedjax_mm.papers.cho2022.grid import Comparison, Requirement, methods
from fedjax_mm.papers.claims import Claim, within
from fedjax_mm.results.labels import describe

LITTLE = 5.0
"""Points by which an appeal varies that does not vary much."""


def claims(measured: xr.Dataset, settings: Comparison) -> Sequence[Claim]:
    """Claims that MaxFL has most appeal, which the steps of warm-up hardly change."""
    text = f"GM-Appeal varies by at most {LITTLE:g} points with the number of warm-up steps"
    appeal = measured.sel(metric=["GM-Appeal, seen"])
    percent, steps = appeal["percent"].isel(metric=0, drop=True), "warm-up steps"
    mean = percent.mean("seed", skipna=False)
    spread = mean.max(steps, skipna=False) - mean.min(steps, skipna=False)
    evidence = f"by {describe(spread.squeeze(drop=True), form='.1f', missing='unknown')}"
    # A spread is the largest difference of two numbers of steps, which seeds pair.
    apart = percent - percent.rename({steps: "others"})
    return [within(text, apart, 0.0, LITTLE, evidence=evidence), *exceeds(appeal, settings)]


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
