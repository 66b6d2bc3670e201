"""Accuracies in section 7: settings of the runs, and the rounds that they take to a target."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.fields import Count, Seeded
from fedjax_mm.papers.bhuyan2022.gains import rounds_to
from fedjax_mm.papers.claims import Claim, claim

PARTS = ("train", "test")
_ABOVE = 8  # points by which FedAvg should beat the most frequent class


class Trainings(Seeded):
    """Settings that all experiments of section 7 have."""

    num_clients: Count
    num_rounds: Count
    """T_1, the rounds of FedAvg on one model."""
    record_every: Count = 1
    """Rounds between records; the largest common divisor with T_1 is taken."""
    directory: Path | None = None
    """Folder of CelebA's own files; without it a surrogate is made."""

    @property
    def resolution(self) -> int:
        """Returns the rounds between records."""
        return math.gcd(self.record_every, self.num_rounds)


def draw_of(stack: FederatedData, seed: Any) -> FederatedData:
    """Returns the draw of the data that a run with this seed has; `seed` may be traced."""
    # CelebA's files are a single draw for all seeds.
    return stack.select(seed % len(stack.train.counts))


def majorities(stack: FederatedData, part: str, num_seeds: int, column: int = 0) -> list[float]:
    """Returns the share of the most frequent label in the data of every seed."""
    shares = []
    for seed in range(num_seeds):
        store = getattr(draw_of(stack, seed), part)
        first = int(store.offsets.min())
        labels = np.asarray(store.gathered().examples[1])[first : first + int(store.counts.sum())]
        labels = labels if labels.ndim == 1 else labels[:, column]
        shares.append(float(np.bincount(labels).max() / len(labels)))
    return shares


def accuracies_of(result: xr.Dataset, stacks: Sequence[FederatedData]) -> xr.Dataset:
    """Returns the accuracies of a sweep, with the names of the data in the manifest."""
    names = list(dict.fromkeys(stack.name for stack in stacks))
    about = result.attrs["manifest"] | {"datasets": names}
    return result[[f"{part}_accuracy" for part in PARTS]].assign_attrs(manifest=about)


def by_part(result: xr.Dataset, name: str) -> xr.DataArray:
    """Returns shares of the training and the test examples, over a first dimension "part"."""
    parts = xr.IndexVariable("part", list(PARTS))
    return xr.concat([result[f"{part}_{name}"].rename(name) for part in PARTS], parts)


def rounds_to_targets(accuracy: xr.DataArray, targets: xr.DataArray) -> xr.DataArray:
    """Returns the first recorded round at which every model has reached its target; NaN if none.

    Args:
      accuracy: over ``(..., round, model)``; NaN where a model is not there.
      targets: for some of the other dimensions.
    """
    # A model that is good by its start has not learned anything: round 0 does not count.
    trained = accuracy.sel(round=accuracy["round"] > 0)
    return rounds_to(0.0, (targets - trained).max("model"))


def beats_majority(who: str, ahead: xr.DataArray, evidence: str) -> Claim:
    """Claims that accuracies are far enough ahead of the most frequent class, in points."""
    text = f"{who} is at least {_ABOVE} points above the most frequent class"
    return claim(text, ahead >= _ABOVE, evidence)
