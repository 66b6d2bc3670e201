"""Clients of section 5 of Cho et al., some of which are never seen."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_mm.data.digits import digits
from fedjax_mm.data.federate import federate, flip_labels, flipped_clients
from fedjax_mm.data.federated import FederatedData, Pool, stack_data
from fedjax_mm.data.idx import Name, check_idx, load_idx
from fedjax_mm.data.partition import dirichlet, dirichlet_clients, label_clusters
from fedjax_mm.data.sent140 import check_sent140, load_sent140
from fedjax_mm.data.surrogate import surrogate_tweets
from fedjax_mm.tasks.classification import Classification, classification
from fedjax_mm.tasks.networks import MLP

Dataset = Literal["fmnist", "emnist", "sent140", "mnist", "digits"]
Partition = Literal["dirichlet", "dirichlet_labels", "clusters", "shuffled_clusters"]
"""By client as in Hsu et al., or by label; neighbouring labels make clusters, or random ones."""
Flips = Literal["training", "everywhere"]
"""Which labels of a flipped client are flipped: those of its training examples, or all."""

PIXEL_SCALE = 1 / 255
"""Factor of the pixels; the paper's "normalized" images may have mean 0 and variance 1 as well."""
TEST_FRACTION = 0.4
NUM_CLUSTERS = 5
_IDX: dict[str, Name] = {"fmnist": "fashion-mnist", "mnist": "mnist", "emnist": "emnist"}


class Population(NamedTuple):
    """Numbers of clients, and their heterogeneity.

    Attributes:
      num_clients: that train.
      num_unseen: that never do.
      cohort_size: m, clients in a round.
      alpha: of the Dirichlet partition; None where examples belong to somebody by nature.
      min_examples: that each client has.
    """

    num_clients: int
    num_unseen: int
    cohort_size: int
    alpha: float | None
    min_examples: int = 50


POPULATIONS: dict[str, Population] = {
    "fmnist": Population(100, 100, 5, 0.5),
    "mnist": Population(100, 100, 5, 0.5),
    "emnist": Population(500, 500, 10, 0.05),
    "sent140": Population(308, 619, 10, None),
    "digits": Population(10, 10, 3, 0.5, min_examples=25),
}
"""The published ones; the digits are few."""


def source_of(dataset: Dataset, directory: Path | None) -> str:
    """Returns the name of the dataset, a substitute if no folder is given."""
    if directory is not None or dataset in ("digits", "sent140"):
        return dataset
    return "digits"


def check_files(dataset: Dataset, directory: Path | None) -> None:
    """Raises `ValueError` if the folder lacks a file that the data set needs."""
    if directory is None:
        return
    if dataset == "digits":
        raise ValueError("the digits come with the package; leave out --data")
    try:
        check = check_sent140 if dataset == "sent140" else partial(check_idx, name=_IDX[dataset])
        check(directory)
    except OSError as error:
        raise ValueError(str(error)) from error


def draw_clients(
    dataset: Dataset,
    directory: Path | None,
    population: Population,
    *,
    partition: Partition,
    flipped: float,
    flips: Flips,
    seeds: list[int],
) -> FederatedData:
    """Returns a stack of draws, one for each seed, of seen and then unseen clients.

    Each client's examples are divided 60 : 40 into training and test; a share of all clients has
    its labels flipped, in training or in both: those of `flipped_flags`.
    """
    num_clients = population.num_clients + population.num_unseen
    few: dict[str, Any] = {"min_examples": population.min_examples}
    alpha: dict[str, Any] = {"alpha": population.alpha}
    tweets = surrogate_tweets if directory is None else partial(load_sent140, directory)
    splits: dict[str, Any] = {
        "dirichlet": partial(dirichlet_clients, **alpha),
        "dirichlet_labels": partial(dirichlet, **few, **alpha),
        "clusters": partial(label_clusters, num_clusters=NUM_CLUSTERS),
        "shuffled_clusters": partial(label_clusters, num_clusters=NUM_CLUSTERS, shuffled=True),
    }
    pool = None if source_of(dataset, directory) == "sent140" else _pool(dataset, directory)

    def draw(seed: int) -> FederatedData:
        test: dict[str, Any] = {"test_fraction": TEST_FRACTION, "seed": seed}
        if pool is None:
            data = tweets(num_clients=num_clients, **few, **test)
        else:
            parts = splits[partition](pool.train[1], num_clients, seed=seed)
            data = federate(pool, parts, **test)
        # Keep the name, because `flip_labels` adds the number of flips and all draws need one name.
        how: dict[str, Any] = {"fraction": flipped, "test": flips == "everywhere", "seed": seed}
        return dataclasses.replace(flip_labels(data, **how), name=data.name)

    return stack_data([draw(seed) for seed in seeds])


def flipped_flags(population: Population, *, flipped: float, seeds: list[int]) -> np.ndarray:
    """Returns whether each client of `draw_clients` is flipped, ``bool[seeds, clients]``."""
    num_clients = population.num_clients + population.num_unseen
    flags = np.zeros((len(seeds), num_clients), bool)
    for mine, seed in zip(flags, seeds, strict=True):
        mine[flipped_clients(num_clients, fraction=flipped, seed=seed)] = True
    return flags


def _pool(dataset: Dataset, directory: Path | None) -> Pool:
    if directory is not None:
        return load_idx(directory, name=_IDX[dataset])
    # Clients have test examples of their own, so the pool's are dealt to them too.
    both = digits()
    x, y = (np.concatenate(each) for each in zip(both.train, both.test, strict=True))
    return both._replace(train=(x, y))


def classifier(
    data: FederatedData, *, dropout_rate: float, column: int | None = None
) -> Classification:
    """Returns the perceptron of appendix D, with dropout after its first layer.

    Its hidden layers are 64-30 on images, 128-86-30 on tweets.
    """
    is_image = data.train.examples[0].ndim > 2
    hidden, scale = ((64, 30), PIXEL_SCALE) if is_image else ((128, 86, 30), None)
    module = MLP(data.num_classes, hidden, dropout_rate)
    rngs = ("dropout",) if dropout_rate > 0 else ()
    return classification(data, module, rngs=rngs, scale=scale, column=column)
