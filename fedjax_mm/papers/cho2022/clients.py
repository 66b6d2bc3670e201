"""Clients of section 5 of Cho et al., including some that never train."""

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
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import MLP
from fedjax_mm.tasks.supervised import Supervised

Dataset = Literal["fmnist", "emnist", "sent140", "mnist", "digits"]
Partition = Literal["dirichlet", "dirichlet_labels", "clusters", "shuffled_clusters"]
"""The partition of the labels, by client as in Hsu et al., by label, or into clusters."""
Flips = Literal["training", "everywhere"]
"""The labels of a flipped client that are flipped, either its training labels or all."""

PIXEL_SCALE = 1 / 255
"""The factor of the pixels. In the paper, "normalized" may also mean mean 0 and variance 1."""
TEST_FRACTION = 0.4
NUM_CLUSTERS = 5
_IDX: dict[str, Name] = {"fmnist": "fashion-mnist", "mnist": "mnist", "emnist": "emnist"}


class Population(NamedTuple):
    """Numbers of clients and their heterogeneity.

    Attributes:
      num_clients: the number of clients that train.
      num_unseen: the number of clients that never train.
      cohort_size: m, the number of clients per round.
      alpha: the Dirichlet parameter, or None if the data set has natural clients.
      min_examples: the fewest examples per client.
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
"""The published populations, with a smaller one for the digits."""


def source_of(dataset: Dataset, directory: Path | None) -> str:
    """The name of the dataset, or of a substitute if no directory is given."""
    if directory is not None or dataset in ("digits", "sent140"):
        return dataset
    return "digits"


def check_files(dataset: Dataset, directory: Path | None) -> None:
    """Raises `OSError` if the directory lacks a file, or `ValueError` if it is not needed."""
    if directory is None:
        return
    if dataset == "digits":
        raise ValueError("the digits come with the package; leave out --data")
    check = check_sent140 if dataset == "sent140" else partial(check_idx, dataset=_IDX[dataset])
    check(directory)


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
    """A stack of draws, one per seed, with seen clients before unseen ones.

    Each client's examples are split 60 : 40 into training and test. The clients selected by
    `flipped_flags` have their labels flipped, either in training or in both parts.
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
        # Restore the name, because `flip_labels` appends the number of flips, which varies by draw.
        how: dict[str, Any] = {"fraction": flipped, "test": flips == "everywhere", "seed": seed}
        return dataclasses.replace(flip_labels(data, **how), name=data.name)

    return stack_data([draw(seed) for seed in seeds])


def flipped_flags(population: Population, *, flipped: float, seeds: list[int]) -> np.ndarray:
    """Whether each client of `draw_clients` is flipped, ``bool[seeds, clients]``."""
    num_clients = population.num_clients + population.num_unseen
    flags = np.zeros((len(seeds), num_clients), bool)
    for mine, seed in zip(flags, seeds, strict=True):
        mine[flipped_clients(num_clients, fraction=flipped, seed=seed)] = True
    return flags


def _pool(dataset: Dataset, directory: Path | None) -> Pool:
    return all_digits() if directory is None else load_idx(directory, dataset=_IDX[dataset])


def all_digits() -> Pool:
    """All digits as training examples, because clients have their own test examples."""
    both = digits()
    x, y = (np.concatenate(each) for each in zip(both.train, both.test, strict=True))
    return both._replace(train=(x, y))


def classifier(
    data: FederatedData, *, dropout_rate: float, column: int | None = None
) -> Supervised:
    """The perceptron of appendix D, with dropout after the first layer.

    The hidden layers are 64-30 on images and 128-86-30 on tweets.
    """
    is_image = data.train.examples[0].ndim > 2
    hidden, scale = ((64, 30), PIXEL_SCALE) if is_image else ((128, 86, 30), None)
    module = MLP(data.num_classes, hidden, dropout_rate)
    rngs = ("dropout",) if dropout_rate > 0 else ()
    return classification(data, module, rngs=rngs, scale=scale, column=column)
