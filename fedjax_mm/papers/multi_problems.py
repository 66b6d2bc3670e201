"""Multi-model problems for comparing methods, with their clients, data and tasks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from fedjax_mm.data.federate import federate
from fedjax_mm.data.federated import FederatedData, Pool, stack_data
from fedjax_mm.data.idx import Name, load_idx
from fedjax_mm.data.partition import dirichlet
from fedjax_mm.data.synthetic import synthetic
from fedjax_mm.experiments.fields import Config, Count, Positive
from fedjax_mm.papers.cho2022.clients import all_digits
from fedjax_mm.papers.multi_maxfl import QUESTIONS, ask
from fedjax_mm.papers.multi_methods import Sizes
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import MLP, LogisticRegression
from fedjax_mm.tasks.supervised import Supervised

_TEST_FRACTION = 0.2


class Problem(Config):
    """The clients of a problem and their local training."""

    models: ClassVar[tuple[str, ...]]

    num_clients: Count
    cohort_size: Count
    local_steps: Count = 10
    batch_size: Count = 10

    def sizes(self, num_models: int, num_rounds: int) -> Sizes:
        """The sizes that assignments depend on."""
        return Sizes(self.num_clients, num_models, self.cohort_size, num_rounds)


class Synthetic(Problem):
    """Synthetic(1, 1) A and B, with two models of different sizes."""

    models = ("Synthetic A", "Synthetic B")

    num_clients: Count = 100
    cohort_size: Count = 20

    def data(self, seeds: Sequence[int], folder: Path | None) -> list[FederatedData]:
        """One stack of data draws per data set, with one draw per seed."""
        del folder
        shapes: list[dict[str, Any]] = [
            {"dim": 60, "num_classes": 5},
            {"dim": 30, "num_classes": 10},
        ]
        return [
            stack_data([synthetic(self.num_clients, seed=seed, **how) for seed in seeds])
            for how in shapes
        ]

    def tasks(self, data: Sequence[FederatedData]) -> list[Supervised]:
        """The models' tasks on one draw."""
        return [classification(each, LogisticRegression(each.num_classes)) for each in data]


class Digits(Problem):
    """Three questions about the same images, with one model each."""

    models = QUESTIONS

    num_clients: Count = 30
    cohort_size: Count = 6
    alpha: Positive = 0.5

    def data(self, seeds: Sequence[int], folder: Path | None) -> list[FederatedData]:
        """One stack of data draws per data set, with one draw per seed."""
        del folder
        return [ask(deal(all_digits(), self.num_clients, self.alpha, seeds))]

    def tasks(self, data: Sequence[FederatedData]) -> list[Supervised]:
        """The models' tasks on one draw."""
        module = MLP(data[0].num_classes, (64, 30))
        columns = range(len(QUESTIONS))
        return [classification(data[0], module, scale=1 / 255, column=i) for i in columns]


class Images(Problem):
    """MNIST and Fashion-MNIST, read from files, with one model each."""

    models = ("MNIST", "Fashion-MNIST")

    num_clients: Count = 50
    cohort_size: Count = 10
    alpha: Positive = 0.5
    num_images: Count = 6_000
    """The number of images, taken from the start of each data set and split among clients."""

    def data(self, seeds: Sequence[int], folder: Path | None) -> list[FederatedData]:
        """One stack of data draws per data set, with one draw per seed."""
        if folder is None:
            raise ValueError("MNIST and Fashion-MNIST are read from files; give --data DIR")
        stacks = []
        for name in FILES:
            few = first_images(folder, name, self.num_images)
            stacks.append(deal(few, self.num_clients, self.alpha, seeds))
        return stacks

    def tasks(self, data: Sequence[FederatedData]) -> list[Supervised]:
        """The models' tasks on one draw."""
        return [classification(each, MLP(10, (64, 30)), scale=1 / 255) for each in data]


def first_images(folder: Path, dataset: Name, number: int) -> Pool:
    """Reads images from the start of a training file."""
    pool = load_idx(folder, dataset=dataset)
    x, y = (each[:number] for each in pool.train)
    return pool._replace(train=(x, y))


FILES: tuple[Name, ...] = ("mnist", "fashion-mnist")


def deal(pool: Pool, num_clients: int, alpha: float, seeds: Sequence[int]) -> FederatedData:
    """Partitions a pool's training examples once per seed, and stacks the partitions.

    Args:
      pool: all examples.
      num_clients: N.
      alpha: the parameter of the Dirichlet law over the classes.
      seeds: the seeds, one for each draw.
    """

    def draw(seed: int) -> FederatedData:
        parts = dirichlet(pool.train[1], num_clients, alpha=alpha, min_examples=10, seed=seed)
        return federate(pool, parts, test_fraction=_TEST_FRACTION, seed=seed)

    return stack_data([draw(seed) for seed in seeds])
