"""Binary attributes of real images with one network per attribute, not part of any paper.

Table 4 of Bhuyan et al. trains nine CNNs together, one per facial attribute of CelebA, whose
images must not be redistributed. In this experiment, attributes are sets of classes of MNIST and
Fashion-MNIST. FedAvg trains every network alone with all clients for T_1 rounds, and MFA-Rand and
MFA-RR train the first M networks at once until each matches the accuracies of FedAvg.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import model_validator

from fedjax_mm import plots
from fedjax_mm.claims import more
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.data.idx import check_idx
from fedjax_mm.experiments.fields import Count, Positive
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.bhuyan2022 import together
from fedjax_mm.papers.bhuyan2022.accuracy import PARTS, beats_majority
from fedjax_mm.papers.bhuyan2022.gains import gain_columns, gain_panels
from fedjax_mm.papers.bhuyan2022.learners import BaseLearner
from fedjax_mm.papers.bhuyan2022.together import Together, run_together
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.multi_maxfl import ask
from fedjax_mm.papers.multi_problems import deal, first_images
from fedjax_mm.papers.rulings import compare, finding
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.values import Several, Some
from fedjax_mm.sweeps.errors import RefusedError
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import McMahanCNN
from fedjax_mm.tasks.supervised import Supervised

DataName = Literal["mnist", "fashion-mnist"]

ATTRIBUTES: Mapping[DataName, Mapping[str, tuple[int, ...]]] = {
    "mnist": {
        "closed loop": (0, 6, 8, 9),
        "even": (0, 2, 4, 6, 8),
        "5 or more": (5, 6, 7, 8, 9),
        "straight strokes": (1, 4, 7),
    },
    "fashion-mnist": {
        "footwear": (5, 7, 9),
        "upper body": (0, 2, 3, 4, 6),
        "long sleeves": (2, 4, 6),
        "cold weather": (2, 4, 9),
    },
}
"""The classes with an attribute, by data set. In Fashion-MNIST: 0 T-shirt, 1 trousers, 2 pullover,
3 dress, 4 coat, 5 sandal, 6 shirt, 7 sneaker, 8 bag, 9 ankle boot."""


class ImagesLearner(BaseLearner):
    """A small version of McMahan's CNN on attributes of one data set, with a shared start."""

    name: DataName
    attributes: Several[str]
    learning_rate: Positive = 0.1
    local_steps: Count = 5
    alpha: Positive = 0.5
    """The parameter of the Dirichlet law over the ten classes that splits images among clients."""
    num_images: Count = 2_000
    """The number of images from the start of the training file. Four fifths are for training."""
    features: tuple[Count, Count] = (8, 16)
    width: Count = 64

    @model_validator(mode="after")
    def _attributes_are_known(self) -> Self:
        known = ATTRIBUTES[self.name]
        for attribute in self.attributes:
            if attribute not in known:
                raise ValueError(
                    f"attributes has {attribute!r}; those of {self.name} are {', '.join(known)}"
                )
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """The model names, one per attribute."""
        return self.attributes

    def check_files(self, directory: Path) -> None:
        """See `Trainings`."""
        check_idx(directory, dataset=self.name)

    def data(self, runs: Any) -> FederatedData:
        """A stack of partitions of the images, one per seed."""
        if runs.directory is None:
            raise RefusedError("MNIST and Fashion-MNIST are read from files; give --data DIR")
        few = first_images(runs.directory, self.name, self.num_images)
        having = [ATTRIBUTES[self.name][attribute] for attribute in self.attributes]
        dealt = deal(few, runs.num_clients, self.alpha, runs.data_seeds)
        return ask(dealt, lambda y: [np.isin(y, classes) for classes in having], num_classes=2)

    def task(self, data: FederatedData, column: Any) -> Supervised:
        """The task of one attribute's model on one draw."""
        module = McMahanCNN(2, self.features, self.width)
        return classification(data, module, scale=1 / 255, column=column)


class MultiAttributes(Together):
    """The data sets with their attributes, the clients, and the run lengths."""

    learners: Some[ImagesLearner] = tuple(
        ImagesLearner(name=name, attributes=tuple(each)) for name, each in ATTRIBUTES.items()
    )
    algorithms: Several[Literal["MFA-Rand", "MFA-RR"]] = ("MFA-Rand", "MFA-RR")
    num_models: Several[Count] = (2, 4, 8)
    num_clients: Count = 24
    num_rounds: Count = 20
    num_seeds: Count = 8
    record_every: Count = 2
    budget: float = 4.0
    directory: Path | None = None
    """The directory of MNIST and Fashion-MNIST, either in subdirectories or together."""


def measure(result: xr.Dataset, config: MultiAttributes) -> xr.Dataset:
    """Adds accuracies after T_1 rounds and after T_M to the measures of `together.measure`."""
    measured = together.measure(result, config).drop_dims("round")
    # Use the largest M, which includes all models.
    several = measured.together.isel(M=-1, drop=True).to_dataset("algorithm")
    series = {"FedAvg": measured.alone, **several, "most frequent class": measured.majority}
    kinds = xr.IndexVariable("kind", list(map(str, series)))
    measured["accuracy"] = xr.concat(list(series.values()), kinds)
    return measured


_MARGIN = 0.1  # of a gain


def judge(measured: xr.Dataset, config: MultiAttributes) -> Iterator[Check]:
    """Checks that networks learn, and compares gains with 1, over M, and between assignments."""
    gains = measured.gain_per_seed.sel(target="g", drop=True)
    yield beats_majority("FedAvg", measured.alone - measured.majority)
    yield finding("the gain is above 1 for every M", more(gains, by=1))
    if gains.sizes["M"] > 1:
        yield finding("the gain rises from each M to the next", more(gains.diff("M")))
    if len(config.algorithms) > 1:
        rand, rr = (gains.sel(algorithm=name, drop=True) for name in ("MFA-Rand", "MFA-RR"))
        yield compare("MFA-RR's gain against MFA-Rand's", rr - rand, _MARGIN)


def table(measured: xr.Dataset, config: MultiAttributes) -> Sequence[Table]:
    """Gains, numbers of successful seeds, and each model's accuracies and rounds."""
    found = gain_columns(measured, config.num_seeds, "no mean")
    every = measured.isel(M=-1).sel(target="g", drop=True)
    title = f"{every.M.item()} models at once: accuracies in percent, and rounds T_M of each"
    levels = cells(*estimate(every.accuracy), form=".1f")
    own = cells(*estimate(every.own_rounds), form=".1f").rename(algorithm="kind")
    own = own.assign_coords(kind=[f"T_M, {name}" for name in own.kind.values])
    models = columns(xr.concat([levels, own], "kind").drop_vars("M", errors="ignore"), "kind")
    return [
        rows(found, ("part", "target", "algorithm")),
        rows(models, ("part", "model"), title),
    ]


def figure(result: xr.Dataset, measured: xr.Dataset, config: MultiAttributes) -> Figure:
    """Draws the gain against M, for training and test accuracy."""
    about, panels = result.attrs["manifest"], []
    for part in PARTS:
        here = measured.sel(part=part)
        gains = gain_panels(here.gain, here.gain_standard_error, "gain")
        panels.append([each._replace(title=f"{part}: {each.title}") for each in gains])
    names = " and ".join(about["datasets"])
    return plots.draw(
        panels,
        title=f"{names} ({about['data']} data), N = {config.num_clients}, "
        f"$T_1$ = {config.num_rounds}",
        caption=f"Means and standard errors of {config.num_seeds} seeds; "
        f"{config.about_gains(config.targets)}.",
    )


ITEMS = (Item("multi-attributes", MultiAttributes(), run_together, measure, judge, table, figure),)
"""Attributes of MNIST and Fashion-MNIST."""
