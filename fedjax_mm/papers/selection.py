"""The best point of a grid, chosen on other seeds than the judged ones.

The best of many points looks better than it is on the seeds that chose it. A page has settings with
`Selecting`, and runs in three steps:

1. `searched` runs all points of the grid on the selection seeds.
2. `best_point` chooses among their scores.
3. `training.stages` runs the best points on the seeds that are judged.

`unless_at_edge` and `check_inner` judge points that may lie at the edge of the grid.
"""

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import xarray as xr

from fedjax_mm.experiments.fields import Count, Seeded
from fedjax_mm.papers.rulings import check
from fedjax_mm.papers.schema import Check
from fedjax_mm.papers.training import Make, staged
from fedjax_mm.results.labels import places
from fedjax_mm.sweeps.execution import Execution

SELECTION = 10**6
"""The first of the selection seeds; judged seeds start at 0."""

_searched: dict[tuple[type, str], xr.Dataset] = {}


class Selecting(Seeded):
    """Settings of methods at the best points of a grid.

    Attributes:
      selection_seeds: the number of seeds that choose the points, which are never judged.
    """

    selection_seeds: Count = 3

    @property
    def selecting(self) -> Self:
        """The same settings on the selection seeds."""
        return self.with_seeds(SELECTION, self.selection_seeds)


def searched(config: Seeded, execution: Execution, make: Make) -> xr.Dataset:
    """Runs a grid on its selection seeds, as a stage.

    Equal settings run once per process, because batches of judged seeds share their points.

    Args:
      config: the settings, with the selection seeds.
      execution: the execution of the page.
      make: runs all points of the grid.
    """
    key = type(config), config.model_dump_json()
    if key not in _searched:
        _searched[key] = staged("selection", config, execution, make)
    return _searched[key]


def best_point(
    scores: xr.DataArray, over: Sequence[str], *ties: xr.DataArray
) -> dict[str, xr.DataArray]:
    """Finds the point with the highest mean score over seeds, as an argument of `isel`.

    A point with NaN for any seed, for example after divergence, is chosen only if all have NaN.
    The first of equal points is chosen.

    Args:
      scores: scores over the dimensions of a point, "seed", and any others.
      over: the dimensions of a point.
      *ties: further scores that decide between points with equal means.

    Example:
      >>> scores = xr.DataArray([[1.0, 3.0], [2.5, 2.5]], {"rate": [0.1, 0.2], "seed": [0, 1]})
      >>> scores.isel(best_point(scores, ["rate"]))["rate"].item()
      0.2
    """
    is_best = xr.ones_like(scores.isel(seed=0, drop=True), bool)
    for each in (scores, *ties):
        means = each.mean("seed", skipna=False).fillna(-np.inf).where(is_best, -np.inf)
        is_best = is_best & (means == means.max(over))
    return {str(dim): place for dim, place in is_best.argmax(over).items()}


def at_edge(chosen: xr.DataArray, grid: Sequence[float]) -> xr.DataArray:
    """Marks chosen values that are the smallest or the largest of their grid."""
    return (chosen <= min(grid)) | (chosen >= max(grid))


def unless_at_edge(
    found: Check, chosen: Mapping[str, xr.DataArray], grid: Sequence[float]
) -> Check:
    """A comparison of tuned methods, undecided if one of their rates is at the edge of its grid.

    Args:
      found: the comparison.
      chosen: the chosen rate of each method that is compared.
      grid: the rates, of which two have no inside.
    """
    ends = [name for name, rate in chosen.items() if len(grid) > 2 and at_edge(rate, grid)]
    if not ends:
        return found
    why = f"{found.evidence}, but the rate of {' and '.join(ends)} is at the edge of its grid"
    return Check(text=found.text, outcome="undecided", evidence=why)


def check_inner(
    chosen: xr.DataArray, grid: Sequence[float], label: str = "", of: str = "learning rate"
) -> Check:
    """Checks that every chosen number lies inside its grid, so that the grid is wide enough.

    Args:
      chosen: numbers over named dimensions.
      grid: the candidates, of which two have no inside.
      label: the name of a number in the evidence, with the dimensions in braces; by default the
        coordinates.
      of: what the numbers are.
    """
    is_inner = ~at_edge(chosen, grid)
    ends = [
        f"{label.format(**at) or ', '.join(words)}: {chosen.sel(at).item():g}"
        for at, words in places(chosen, *map(str, chosen.dims))
        if not is_inner.sel(at)
    ]
    text = f"every chosen {of} lies inside the grid"
    return check(text, is_inner.values if len(grid) > 2 else None, "; ".join(ends))
