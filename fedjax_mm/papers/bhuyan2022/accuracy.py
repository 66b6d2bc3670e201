"""What Figures 6 and 7 and Tables 4 and 5 of Bhuyan et al. have in common."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xarray as xr

from fedjax_mm.data.clients import ClientData
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.tasks import Config, Count, Seed
from fedjax_mm.papers.old import Judgement
from fedjax_mm.results.metrics import first_round_below

PARTS = ("train", "test")
SURROGATE = (
    "CelebA may not be redistributed: without --data DIR a surrogate of invented images runs the "
    "same pipeline (by default 28 x 28 pixels and 12 to 24 images a client instead of 84 x 84 and "
    "5 or more; set image_size, images_per_client), and its accuracies are not the paper's"
)
ABOVE_MAJORITY = 8  # points by which FedAvg should beat the most frequent class
NOT_GIVEN = "the text says what is trained, not the rate nor the batches; LEAF's defaults are used"
DRAWS = "the draw of the data moves accuracies by 4 to 14 points: means are over draws of the data"


class Trainings(Config):
    """What the experiments of section 7 have in common."""

    num_clients: Count
    num_rounds: Count
    """T_1, the rounds of FedAvg on one model."""
    num_seeds: Count
    seed: Seed = 0
    record_every: Count = 1
    """Rounds between records; the largest common divisor with T_1 is taken."""
    directory: Path | None = None
    """CelebA's own files; without them a surrogate is made."""

    @property
    def resolution(self) -> int:
        """Rounds between records."""
        return math.gcd(self.record_every, self.num_rounds)


def accuracies_of(
    result: xr.Dataset, config: Config, datasets: Sequence[FederatedData]
) -> xr.Dataset:
    """The accuracies of a sweep, with the settings and the datasets in the manifest."""
    names = [f"{part}_accuracy" for part in PARTS]
    accuracies = result[names]
    about = {
        "config": config.model_dump(mode="json"),
        "datasets": list(dict.fromkeys(data.name for data in datasets)),
    }
    accuracies.attrs["manifest"] = result.attrs["manifest"] | about
    return accuracies


def joined(first: xr.Dataset, second: xr.Dataset, dim: str) -> xr.Dataset:
    """The runs of two sweeps along an axis, with the wall seconds of both in the manifest."""
    both = xr.concat([first, second], dim, join="outer", combine_attrs="override")
    seconds = [each.attrs["manifest"]["wall_seconds"] for each in (first, second)]
    total = {name: sum(each[name] for each in seconds) for name in seconds[0]}
    return both.assign_attrs(manifest=second.attrs["manifest"] | {"wall_seconds": total})


def majority(store: ClientData, column: int | None = None) -> float:
    """The share of the most frequent label among one client store's examples."""
    first = int(store.offsets.min())
    labels = np.asarray(store.gathered().examples[1])[first : first + int(store.counts.sum())]
    labels = labels if labels.ndim == 1 else labels[:, column or 0]
    return float(np.bincount(labels).max() / len(labels))


def rounds_to_targets(accuracy: xr.DataArray, targets: xr.DataArray) -> xr.DataArray:
    """The first recorded round at which every model has reached its target; NaN if none.

    What a model has before it is trained does not count: the search begins after round 0.

    Args:
      accuracy: over ``(..., round, model)``; NaN where a model is not there.
      targets: for some of the other dimensions.
    """
    shortfall = (targets - accuracy).max("model")
    dims = [dim for dim in shortfall.dims if dim != "round"]
    values = shortfall.transpose(*dims, "round").sel(round=shortfall["round"] > 0)
    rounds = first_round_below(values.values, values["round"].values, 0.0)
    return xr.DataArray(rounds, {dim: values[dim] for dim in dims}, dims)


def verdict(judgement: Judgement) -> str:
    """Which claims do not hold, for a caption."""
    failed = [claim.claim for claim in judgement.claims if not claim.holds]
    if not failed:
        return "All claims hold."
    others = " The other claims hold." if len(failed) < len(judgement.claims) else ""
    return f"DOES NOT HOLD: {'; '.join(failed)}.{others}"
