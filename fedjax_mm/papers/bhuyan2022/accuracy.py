"""Accuracies in section 7: settings of the runs, and rounds to a target."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.fields import Count, Flag, Seeded
from fedjax_mm.papers.bhuyan2022.gains import rounds_to
from fedjax_mm.papers.rulings import check, more
from fedjax_mm.papers.schema import Check

PARTS = ("train", "test")
TARGETS = ("g", "g'", "window")
"""Gains over FedAvg, by what they count; see `rounds_to_all`."""
_ABOVE = 8  # points by which FedAvg should beat the most frequent class


class Trainings(Seeded):
    """Settings common to all experiments of section 7."""

    num_clients: Count
    num_rounds: Count
    """T_1, the rounds of FedAvg on one model."""
    record_every: Count = 1
    """Rounds between records; the largest common divisor with T_1 is taken."""
    window: Count = 10
    """Rounds before T_1 whose mean accuracy is a target: at most T_1, and whole records."""
    stop: Flag = True
    """Whether runs end once they have reached FedAvg's accuracies, or go on for all rounds.

    A run that has ended says nothing about means over a window: that gain is then left out.
    """
    directory: Path | None = None
    """Folder of CelebA's own files; without it a surrogate is made."""

    @property
    def resolution(self) -> int:
        """Returns the rounds between records."""
        return math.gcd(self.record_every, self.num_rounds)

    @property
    def targets(self) -> list[str]:
        """Returns the gains that the runs are long enough for."""
        return [target for target in TARGETS if not (self.stop and target == "window")]

    @property
    def records_in_window(self) -> int:
        """Returns the records whose mean is compared with a mean."""
        return math.ceil(min(self.window, self.num_rounds) / self.resolution)

    def about_gains(self, targets: Sequence[str]) -> str:
        """Returns the definitions of the gains for some targets, as a clause of captions."""
        length = self.records_in_window * self.resolution
        window = f", and a window's is of means over {length} rounds"
        return (
            "$g=MT_1/T_M$, where at $T_M$ every model first has FedAvg's accuracy after $T_1$ "
            "rounds, and $g'$ has for $T_1$ the first round at which FedAvg itself has it"
        ) + window * ("window" in targets)


def draw_of(stack: FederatedData, seed: Any) -> FederatedData:
    """Returns the draw of the data for a run with this seed, which may be traced."""
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


def largest_shares(stack: FederatedData, num_seeds: int) -> list[float]:
    """Returns the largest client's share of the training examples in the data of every seed."""
    counts = [np.asarray(draw_of(stack, seed).train.counts) for seed in range(num_seeds)]
    return [float(each.max() / each.sum()) for each in counts]


def accuracies_of(result: xr.Dataset, stacks: Sequence[FederatedData]) -> xr.Dataset:
    """Returns the accuracies and divergences of a sweep, with the data's names in the manifest."""
    names = list(dict.fromkeys(stack.name for stack in stacks))
    about = result.attrs["manifest"] | {"datasets": names}
    kept = [*(f"{part}_accuracy" for part in PARTS), "diverged"]
    return result[kept].assign_attrs(manifest=about)


def by_part(result: xr.Dataset, name: str) -> xr.DataArray:
    """Returns shares of the training and the test examples, over a first dimension "part"."""
    parts = xr.IndexVariable("part", list(PARTS))
    return xr.concat([result[f"{part}_{name}"].rename(name) for part in PARTS], parts)


def rounds_to_targets(accuracy: xr.DataArray, targets: xr.DataArray) -> xr.DataArray:
    """Returns the first recorded round at which every model has reached its target, or NaN.

    Args:
      accuracy: over ``(..., round, model)``; NaN for absent models.
      targets: for some of the other dimensions.
    """
    # Skip round 0, because a model that is good at the start has not learned anything.
    trained = accuracy.sel(round=accuracy["round"] > 0)
    return rounds_to(0.0, (targets - trained).max("model"))


def running_mean(accuracy: xr.DataArray, size: int) -> xr.DataArray:
    """Returns the means of `size` successive records, or NaN at the first records."""
    # Add up record by record, because the last digit of a sum over an axis depends on the memory's
    # order, so that one model would not reach its own mean.
    exact = accuracy.astype(float)
    return sum((exact.shift(round=lag) for lag in range(1, size)), exact) / size


class Rounds(NamedTuple):
    """Rounds to the targets of several models, over a dimension "target".

    Attributes:
      alone: T_1, those of FedAvg on each model.
      together: T_M, after which every model has reached its target; NaN if they do not.
    """

    alone: xr.DataArray
    together: xr.DataArray


def rounds_to_all(alone: xr.DataArray, together: xr.DataArray, size: int) -> Rounds:
    """Returns the rounds that the gains compare.

    The targets of "g" and "g'" are FedAvg's accuracies after T_1 rounds. Accuracies go up and
    down: FedAvg may have had its own long before. "g" counts its T_1 rounds all the same, and "g'"
    those until it had it first, so that one model's gain is 1. The targets of "window" are FedAvg's
    mean accuracies over the last records up to T_1, which are compared with running means.

    Args:
      alone: FedAvg's accuracies over ``(..., round)``, until T_1.
      together: those of several models over ``(..., round, model)``.
      size: the records of a window.
    """

    def first(alone: xr.DataArray, together: xr.DataArray) -> Rounds:
        targets = alone.isel(round=-1, drop=True)
        return Rounds(rounds_to(0.0, targets - alone), rounds_to_targets(together, targets))

    # Leave round 0 out of the windows, too, because nothing has been learned in it.
    curves = [each.sel(round=each["round"] > 0) for each in (alone, together)]
    at_once, on_average = first(*curves), first(*(running_mean(each, size) for each in curves))
    all_of_it = xr.full_like(at_once.alone, alone["round"][-1].item())
    of_targets = xr.IndexVariable("target", list(TARGETS))
    return Rounds(
        xr.concat([all_of_it, at_once.alone, on_average.alone], of_targets),
        xr.concat([at_once.together, at_once.together, on_average.together], of_targets),
    )


def beats_majority(who: str, ahead: xr.DataArray) -> Check:
    """Checks that accuracies are far enough ahead of the most frequent class.

    Args:
      who: the name of the method or model.
      ahead: points over ``(..., "seed")``.
    """
    text = f"{who} is more than {_ABOVE} points above the most frequent class"
    return check(text, more(ahead, by=_ABOVE, form=".1f"))
