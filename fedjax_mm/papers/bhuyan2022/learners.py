"""Learners of section 7: LEAF's logistic regression on Synthetic and LEAF's CNN on CelebA."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jax
from pydantic import Field

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.base import Algorithm
from fedjax_mm.data.celeba import check_celeba, load_celeba
from fedjax_mm.data.federated import FederatedData, stack_data
from fedjax_mm.data.surrogate import surrogate_faces
from fedjax_mm.data.synthetic import Generator, synthetic
from fedjax_mm.experiments.fields import Config, Count, Positive, Seed, TwoOrMore
from fedjax_mm.local import local_sgd
from fedjax_mm.papers.bhuyan2022.accuracy import Trainings
from fedjax_mm.papers.values import Some
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import CelebACNN, LogisticRegression
from fedjax_mm.tasks.supervised import Supervised

ATTRIBUTES = (
    *("Eyeglasses", "Bald", "Goatee", "Wearing_Necklace", "Smiling", "Mustache", "Male"),
    *("Wearing_Lipstick", "Double_Chin"),
)
"""The nine facial attributes of Table 4."""


class BaseLearner(Config):
    """FedAvg with local steps or epochs of minibatches, from a shared initial model."""

    reads_files: ClassVar[bool] = True

    name: str
    learning_rate: Positive
    batch_size: Count = 10
    start_seed: Seed = 0

    @property
    def source(self) -> str:
        """The name of the data, which identifies the learner."""
        return self.name

    def check_files(self, directory: Path) -> None:
        """Raises `OSError` if the directory lacks a file that the learner reads."""

    def rate(self, runs: Trainings) -> float:
        """The learning rate."""
        del runs
        return self.learning_rate

    def algorithm(self, runs: Trainings) -> Algorithm:
        """FedAvg with clients weighted by their number of examples."""
        keys = {"epochs": "epochs", "local_steps": "steps"}
        length = {keys[key]: value for key, value in self if key in keys}
        return fedavg(local_sgd(self.rate(runs), **length, batch_size=self.batch_size))

    def start(self, task: Supervised) -> Any:
        """The initial parameters."""
        return task.init(jax.random.key(self.start_seed))


class SyntheticLearner(BaseLearner):
    """Logistic regression with LEAF's sigmoid head and a summed loss on Synthetic(alpha, beta)."""

    reads_files = False

    name: Literal["synthetic"] = "synthetic"
    epochs: Count = 1
    dim: Count = 60
    num_classes: TwoOrMore = 5
    alpha: Positive = 1.0
    beta: Positive = 1.0
    generator: Generator = "fedprox"
    learning_rate: Positive = 3e-4

    @property
    def source(self) -> str:
        """The name of the generator."""
        return {"fedprox": "FedProx", "leaf": "LEAF"}[self.generator]

    @property
    def models(self) -> tuple[str, ...]:
        """The name of the single model."""
        return ("Logistic regression",)

    def data(self, runs: Trainings) -> FederatedData:
        """A stack of draws, one per seed."""
        how = self.model_dump(include={"alpha", "beta", "dim", "num_classes", "generator"})
        return stack_data([synthetic(runs.num_clients, seed=s, **how) for s in runs.data_seeds])

    def task(self, data: FederatedData, column: int = 0) -> Supervised:
        """The task of the single model on one draw."""
        del column
        module = LogisticRegression(self.num_classes, sigmoid_head=True)
        return classification(data, module, reduction="sum")


class FacesLearner(BaseLearner):
    """LEAF's CNN with a summed loss on attributes of CelebA, or of a surrogate without files."""

    name: Literal["faces"] = "faces"
    epochs: Count = 1
    attributes: Some[str] = ATTRIBUTES[:1]
    image_size: Annotated[Count, Field(ge=16)] | None = None
    images_per_client: tuple[Count, Count] = (12, 24)
    learning_rate: Positive = 0.1
    """The learning rate on CelebA's files, as in LEAF."""
    surrogate_rate: Positive = 0.003
    """The learning rate on the surrogate, where networks collapse to one class at LEAF's rate."""

    def check_files(self, directory: Path) -> None:
        """Raises `OSError` if the directory lacks CelebA's files."""
        check_celeba(directory)

    def rate(self, runs: Trainings) -> float:
        """LEAF's rate for CelebA's files, or the surrogate's rate without files."""
        return self.learning_rate if runs.directory is not None else self.surrogate_rate

    @property
    def models(self) -> tuple[str, ...]:
        """The model names, one per attribute."""
        return self.attributes

    def data(self, runs: Trainings) -> FederatedData:
        """A stack of surrogates, one per seed, or CelebA's files as a single draw."""
        how: dict[str, Any]
        many, size = len(self.attributes), self.image_size
        if runs.directory is not None:
            # Balance only a single attribute, because no set of images is balanced in several.
            how = {"num_clients": runs.num_clients, "balance": many == 1, "seed": runs.seed}
            how |= {"attributes": self.attributes, "image_size": size or 84}
            return stack_data([load_celeba(runs.directory, **how)])
        how = {"num_attributes": many, "image_size": size or 28}
        how |= {"examples_per_client": self.images_per_client}
        return stack_data(
            [surrogate_faces(runs.num_clients, seed=seed, **how) for seed in runs.data_seeds]
        )

    def task(self, data: FederatedData, column: int = 0) -> Supervised:
        """The task of one attribute's model on one draw."""
        return classification(data, CelebACNN(2), reduction="sum", column=column, block_size=64)


Learner = Annotated[SyntheticLearner | FacesLearner, Field(discriminator="name")]
