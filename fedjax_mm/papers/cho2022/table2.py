"""Table 2: Table 1 with clients that report large losses and send noise."""

from collections.abc import Sequence

import xarray as xr

from fedjax_mm.papers import claims
from fedjax_mm.papers.cho2022.comparison import OURS, exceeds, item, of_method, squeezed
from fedjax_mm.papers.cho2022.grid import Comparison, methods
from fedjax_mm.papers.claims import Claim, claim, estimate

MOST_LOST = 10.0
"""Points that MaxFL may lose to attackers."""


def withstands(measured: xr.Dataset, settings: Comparison) -> Sequence[Claim]:
    """Claims that attackers take at most 10 points of accuracy from MaxFL, and more from MW-Fed."""
    made: list[Claim] = []
    names = measured.algorithm.values
    if OURS not in names or measured.sizes["attackers"] < 2:
        reason = "there are no attackers, or MaxFL is not among the methods"
        return [claim("MaxFL withstands attackers", False, reason)]
    percent = squeezed(measured["percent"])
    # Each share of attackers at its own best point.
    lost = percent.isel(attackers=0, drop=True) - percent.isel(attackers=slice(1, None))
    for metric in ("test accuracy, seen", "test accuracy, unseen"):
        ours, others = (of_method(lost.sel(metric=metric), name) for name in (OURS, "MW-Fed"))
        most = f"MaxFL loses at most {MOST_LOST:g} points to attackers"
        more = "MW-Fed loses more to attackers"
        evidence = f"points lost by {estimate(lost.sel(metric=metric)).text('.1f')}"
        made.append(claims.not_below(f"{metric}: {most}", MOST_LOST - ours, evidence=evidence))
        if "MW-Fed" in names:
            made.append(claims.exceeds(f"{metric}: {more}", others - ours, form=".1f"))
    return made


ITEMS = (
    item(
        id="maxfl-table2",
        title="MaxFL and MW-Fed under attack",
        metrics=("accuracy", "appeal", "unseen_accuracy", "unseen_appeal"),
        settings=Comparison(
            partition="dirichlet",
            appealing_from=10,
            byzantine=(0.0, 0.05, 0.1),
            methods=methods("MW-Fed", "MaxFL"),
        ),
        claims=lambda measured, settings: [
            *withstands(measured, settings),
            *exceeds(measured, settings),
        ],
    ),
)
"""Table 2."""
