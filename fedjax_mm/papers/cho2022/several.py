"""Comparisons under several protocols, with the same methods at the same points."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import xarray as xr

from fedjax_mm.papers.cho2022 import comparison
from fedjax_mm.papers.cho2022.comparison import BOTH, Rules
from fedjax_mm.papers.cho2022.grid import Comparison
from fedjax_mm.papers.cho2022.runs import best_points, run_comparison, select
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.training import described, stages
from fedjax_mm.sweeps.execution import Execution


def item(
    id: str,
    settings: Comparison,
    rules: Rules,
    name: str,
    protocols: Mapping[str, Mapping[str, Any]],
    numbers_of: str | None = None,
) -> Item:
    """An item that runs each method at its point under several protocols.

    Args:
      id: the item's id.
      settings: the default settings, under which points are chosen.
      rules: as in `comparison.item`.
      name: the name of the dimension of protocols.
      protocols: changes of the settings by the label of a protocol.
      numbers_of: the item whose published numbers are shown; defaults to this one.
    """
    how: dict[str, Any] = {
        "run": partial(run, name=name, protocols=protocols),
        "measure": partial(measure, name=name, id=numbers_of or id),
    }
    return comparison.item(id, settings, BOTH, rules, **how)


def run(
    config: Comparison,
    execution: Execution | None = None,
    *,
    name: str,
    protocols: Mapping[str, Mapping[str, Any]],
) -> xr.Dataset:
    """Chooses points under the settings, and runs them under each protocol.

    Returns the Dataset of `run_comparison` with the dimension `name`.
    """
    how = execution or Execution()
    scores = select(config, how)
    points = {"points": best_points(scores, config)}
    each = {
        label: config.model_copy(update={**points, **changes})
        for label, changes in protocols.items()
    }
    parts = stages(name, each, how, run_comparison)
    index = xr.IndexVariable(name, list(parts))
    result = xr.concat(
        parts.values(), index, data_vars="all", coords="minimal", combine_attrs="override"
    )
    return described(result.merge(scores.drop_attrs()), list(parts.values()))


def measure(result: xr.Dataset, settings: Comparison, *, name: str, id: str) -> xr.Dataset:
    """The final metrics, over ``(metric, algorithm, name, *DIMS)``."""
    nobody_leaves = settings.model_copy(update={"appealing_from": None})
    each = [
        comparison.measure(result.sel({name: label}, drop=True), nobody_leaves, id=id, metrics=BOTH)
        for label in result[name].values
    ]
    both = xr.concat(each, result[name], data_vars="all", coords="minimal")
    return both.transpose("metric", "algorithm", name, ...)
