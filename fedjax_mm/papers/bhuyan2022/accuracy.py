"""Accuracies in section 7: run settings and rounds to a target accuracy."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import xarray as xr
from pydantic import Field

from fedjax_mm.claims import more
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.fields import Count, Flag, Seeded
from fedjax_mm.papers.bhuyan2022.gains import rounds_to
from fedjax_mm.papers.rulings import check
from fedjax_mm.papers.schema import Check
from fedjax_mm.sweeps.until import Until

PARTS = ("train", "test")
TARGETS = ("g", "g'", "window")
"""The names of the gains over FedAvg, which differ in the rounds compared by `rounds_to_all`."""
WIDE = 20.0
"""The largest half width, in points, of an interval of draws with which a number can agree."""
_ABOVE = 8  # points by which FedAvg should exceed the most frequent class


class Trainings(Seeded):
    """Settings shared by all experiments of section 7."""

    learners: tuple[Any, ...]
    num_clients: Count
    num_rounds: Count
    """T_1, the rounds of FedAvg on one model."""
    record_every: Count = 1
    """Rounds between records, reduced to the greatest common divisor with T_1."""
    window: Count = 10
    """The number of rounds up to T_1 over which accuracies are averaged to give a target.

    It is limited to T_1 and rounded up to a multiple of the recording interval."""
    stop: Flag = True
    """Whether a run stops once it reaches FedAvg's accuracies, instead of using all rounds.

    A stopped run has no means over a window, so the "window" gain is omitted.
    """
    directory: Path | None = None
    """The directory of the CelebA files, or None for a synthetic surrogate."""
    budget: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """The budget for several models, in units of T_1. It defaults to the largest M, because a run
    that needs more than M T_1 rounds has a gain below 1."""

    def check_files(self) -> None:
        """See `WithFiles`."""
        if self.directory is not None:
            if not any(learner.reads_files for learner in self.learners):
                raise ValueError(
                    f"directory is {self.directory}, but Synthetic is drawn; leave out --data"
                )
            for learner in self.learners:
                learner.check_files(self.directory)

    @property
    @abstractmethod
    def at_once(self) -> tuple[int, ...]:
        """The numbers M of models trained at once."""

    @property
    def most_rounds(self) -> int:
        """The budget in rounds, all of which are recorded."""
        budget = self.budget or max(self.at_once)
        return math.ceil(budget * self.num_rounds / self.resolution) * self.resolution

    @property
    def until(self) -> Until | None:
        """The target at which a run stops."""
        return Until("shortfall", at_most=0.0) if self.stop else None

    @property
    def resolution(self) -> int:
        """The number of rounds between records."""
        return math.gcd(self.record_every, self.num_rounds)

    @property
    def targets(self) -> list[str]:
        """The names of the gains that the runs are long enough to measure."""
        return [target for target in TARGETS if not (self.stop and target == "window")]

    @property
    def records_in_window(self) -> int:
        """The number of records in a window."""
        return math.ceil(min(self.window, self.num_rounds) / self.resolution)

    def about_gains(self, targets: Sequence[str]) -> str:
        """A clause for captions that defines the gains for the given targets."""
        length = self.records_in_window * self.resolution
        window = f", and a window's is of means over {length} rounds"
        return (
            "$g=MT_1/T_M$, where at $T_M$ every model first has FedAvg's accuracy after $T_1$ "
            "rounds, and $g'$ has for $T_1$ the first round at which FedAvg itself has it"
        ) + window * ("window" in targets)


def draw_of(stack: FederatedData, seed: int) -> FederatedData:
    """The data drawn for a run's seed."""
    # All seeds share a single draw of CelebA's files.
    return stack.select(seed % len(stack.train.counts))


def majorities(stack: FederatedData, part: str, num_seeds: int, column: int = 0) -> list[float]:
    """The share of the most frequent label, for every seed."""
    shares = []
    for seed in range(num_seeds):
        store = getattr(draw_of(stack, seed), part)
        first = int(store.offsets.min())
        labels = np.asarray(store.gathered().examples[1])[first : first + int(store.counts.sum())]
        labels = labels if labels.ndim == 1 else labels[:, column]
        shares.append(float(np.bincount(labels).max() / len(labels)))
    return shares


def largest_shares(stack: FederatedData, num_seeds: int) -> list[float]:
    """The largest client's share of the training examples, for every seed."""
    counts = [np.asarray(draw_of(stack, seed).train.counts) for seed in range(num_seeds)]
    return [float(each.max() / each.sum()) for each in counts]


def accuracies_of(result: xr.Dataset) -> xr.Dataset:
    """A sweep's accuracies and divergences."""
    return result[[*(f"{part}_accuracy" for part in PARTS), "diverged"]]


def by_part(result: xr.Dataset, name: str) -> xr.DataArray:
    """Stacks the training and test shares along a leading dimension "part"."""
    parts = xr.IndexVariable("part", list(PARTS))
    return xr.concat([result[f"{part}_{name}"].rename(name) for part in PARTS], parts)


def rounds_to_targets(accuracy: xr.DataArray, targets: xr.DataArray) -> xr.DataArray:
    """The first recorded round at which every model has reached its target, or NaN.

    Args:
      accuracy: over ``(..., round, model)``; NaN for absent models.
      targets: over some of the other dimensions.
    """
    # Skip round 0, because a model that is good at the start has not learned anything.
    trained = accuracy.sel(round=accuracy["round"] > 0)
    return rounds_to(0.0, (targets - trained).max("model"))


def running_mean(accuracy: xr.DataArray, size: int) -> xr.DataArray:
    """Running means of `size` consecutive records, which are NaN for the first records."""
    # Add record by record, because the last digit of a sum over an axis depends on the memory
    # layout, and a single model could then miss its own mean.
    exact = accuracy.astype(float)
    return sum((exact.shift(round=lag) for lag in range(1, size)), exact) / size


class Rounds(NamedTuple):
    """Rounds to the targets of one or several models, over a dimension "target".

    Attributes:
      alone: T_1, the rounds of FedAvg on each model.
      together: T_M, the rounds until every model has reached its target; NaN if never reached.
    """

    alone: xr.DataArray
    together: xr.DataArray


def rounds_to_all(alone: xr.DataArray, together: xr.DataArray, size: int) -> Rounds:
    """The rounds that each gain compares.

    For "g" and "g'" the targets are FedAvg's accuracies after T_1 rounds. FedAvg may reach them
    before T_1, because accuracies fluctuate. "g" still counts T_1 rounds, whereas "g'" counts the
    rounds until FedAvg first reaches them, so the gain of a single model is 1. For "window" the
    targets are FedAvg's mean accuracies over the last records up to T_1, compared to running means.

    Args:
      alone: accuracies of FedAvg over ``(..., round)``, up to T_1.
      together: accuracies of several models over ``(..., round, model)``.
      size: the number of records in a window.
    """

    def first(alone: xr.DataArray, together: xr.DataArray) -> Rounds:
        targets = alone.isel(round=-1, drop=True)
        return Rounds(rounds_to(0.0, targets - alone), rounds_to_targets(together, targets))

    # Exclude round 0 from the windows as well, because no model has been trained yet.
    curves = [each.sel(round=each["round"] > 0) for each in (alone, together)]
    at_once, on_average = first(*curves), first(*(running_mean(each, size) for each in curves))
    all_of_it = xr.full_like(at_once.alone, alone["round"][-1].item())
    of_targets = xr.IndexVariable("target", list(TARGETS))
    return Rounds(
        xr.concat([all_of_it, at_once.alone, on_average.alone], of_targets),
        xr.concat([at_once.together, at_once.together, on_average.together], of_targets),
    )


def beats_majority(name: str, ahead: xr.DataArray) -> Check:
    """Checks that accuracies exceed the share of the most frequent class by a margin.

    Args:
      name: the name of the method or model.
      ahead: the lead in points, over ``(..., "seed")``.
    """
    text = f"{name} is more than {_ABOVE} points above the most frequent class"
    return check(text, more(ahead, by=_ABOVE, form=".1f"))
