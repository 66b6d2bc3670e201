"""Whom section 5 of Cho et al. trains: clients with their own data, some of them never seen."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_mm.data.digits import digits
from fedjax_mm.data.federate import federate, flip_labels
from fedjax_mm.data.federated import FederatedData, Pool, stack_data
from fedjax_mm.data.idx import check_idx, load_idx
from fedjax_mm.data.partition import dirichlet, label_clusters
from fedjax_mm.data.sent140 import check_sent140, load_sent140
from fedjax_mm.data.surrogate import surrogate_tweets
from fedjax_mm.tasks.classification import Classification, classification
from fedjax_mm.tasks.networks import MLP

Dataset = Literal["fmnist", "emnist", "sent140", "mnist", "digits"]
Partition = Literal["dirichlet", "clusters"]

TEST_FRACTION = 0.4
NUM_CLUSTERS = 5
_IDX: dict[str, Literal["mnist", "fashion-mnist", "emnist"]] = {
    "fmnist": "fashion-mnist",
    "mnist": "mnist",
    "emnist": "emnist",
}


class Population(NamedTuple):
    """How many clients there are, and how unlike each other.

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
"""As published; the digits are few."""

STAND_INS = (
    "without --data DIR the digits of scikit-learn stand in for images, and invented tweets for "
    "Sent140; accuracies and appeals are then not the paper's"
)


def source_of(dataset: Dataset, directory: Path | None) -> str:
    """Which data is taken: without a folder something stands in."""
    if directory is not None or dataset in ("digits", "sent140"):
        return dataset
    return "digits"


def check_files(dataset: Dataset, directory: Path | None) -> None:
    """Raises `ValueError` if the folder does not have what the data set needs."""
    if directory is None:
        return
    if dataset == "digits":
        raise ValueError("the digits come with scikit-learn; leave out --data")
    try:
        if dataset == "sent140":
            check_sent140(directory)
        else:
            check_idx(directory, name=_IDX[dataset])
    except OSError as error:
        raise ValueError(str(error)) from error


def draw_clients(
    dataset: Dataset,
    directory: Path | None,
    population: Population,
    *,
    partition: Partition,
    flipped: float,
    seeds: list[int],
) -> FederatedData:
    """A stack of draws, one for each seed, of seen and then unseen clients.

    Each client's examples are divided 60 : 40 into training and test; a share of all clients has
    its labels flipped, in both.
    """
    source = source_of(dataset, directory)
    pool = None if source == "sent140" else _pool(source, directory)
    num_clients = population.num_clients + population.num_unseen

    def draw(seed: int) -> FederatedData:
        if pool is None:
            data = _tweets(directory, num_clients, population.min_examples, seed)
        else:
            parts = _deal(pool.train[1], num_clients, population, partition, seed)
            data = federate(pool, parts, test_fraction=TEST_FRACTION, seed=seed)
        named = flip_labels(data, fraction=flipped, seed=seed)
        return dataclasses.replace(named, name=data.name)

    return stack_data([draw(seed) for seed in seeds])


def _pool(source: str, directory: Path | None) -> Pool:
    if directory is not None:
        return load_idx(directory, name=_IDX[source])
    both = digits()
    x, y = (np.concatenate(each) for each in zip(both.train, both.test, strict=True))
    return both._replace(train=(x, y))


def _deal(
    labels: np.ndarray, num_clients: int, population: Population, partition: Partition, seed: int
) -> list[np.ndarray]:
    if partition == "clusters":
        return label_clusters(labels, num_clients, num_clusters=NUM_CLUSTERS, seed=seed)
    assert population.alpha is not None
    return dirichlet(
        labels,
        num_clients,
        alpha=population.alpha,
        min_examples=population.min_examples,
        seed=seed,
    )


def _tweets(
    directory: Path | None, num_clients: int, min_examples: int, seed: int
) -> FederatedData:
    settings: dict[str, Any] = {"test_fraction": TEST_FRACTION, "seed": seed}
    if directory is None:
        return surrogate_tweets(num_clients, min_examples=min_examples, **settings)
    return load_sent140(directory, num_clients=num_clients, min_examples=min_examples, **settings)


def classifier(
    data: FederatedData, *, dropout_rate: float, column: int | None = None
) -> Classification:
    """The perceptron of appendix D: 64-30 on images, 128-86-30 on tweets; dropout after layer 1."""
    is_image = data.train.examples[0].ndim > 2
    hidden, scale = ((64, 30), 1 / 255) if is_image else ((128, 86, 30), None)
    module = MLP(data.num_classes, hidden, dropout_rate)
    rngs = ("dropout",) if dropout_rate > 0 else ()
    return classification(data, module, rngs=rngs, scale=scale, column=column)
