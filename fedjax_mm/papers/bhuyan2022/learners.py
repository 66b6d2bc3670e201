"""What section 7 of Bhuyan et al. trains: LEAF's logistic regression and LEAF's CNN on CelebA."""

from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
from pydantic import Field

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.base import Algorithm
from fedjax_mm.data.celeba import load_celeba
from fedjax_mm.data.federated import FederatedData, stack_data
from fedjax_mm.data.surrogate import surrogate_faces
from fedjax_mm.data.synthetic import synthetic
from fedjax_mm.experiments.tasks import Config, Count, Positive, Seed
from fedjax_mm.tasks.classification import Classification, classification
from fedjax_mm.tasks.networks import CelebACNN, LogisticRegression

ATTRIBUTES = (
    *("Eyeglasses", "Bald", "Goatee", "Wearing_Necklace", "Smiling", "Mustache", "Male"),
    *("Wearing_Lipstick", "Double_Chin"),
)
"""The nine facial attributes of Table 4."""


def _seeds(seed: int, num_seeds: int) -> list[int]:
    """Seeds of data; those of another seed are others."""
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(num_seeds)]


class _Learner(Config):
    """How LEAF trains: epochs of minibatches with a summed loss, one start shared by all models."""

    learning_rate: Positive
    batch_size: Count = 10
    epochs: Count = 1
    start_seed: Seed = 0

    def algorithm(self) -> Algorithm:
        """FedAvg, weighted by examples."""
        return fedavg(self.learning_rate, epochs=self.epochs, batch_size=self.batch_size)

    def start(self, task: Classification) -> Any:
        """Initial parameters."""
        return task.init(jax.random.key(self.start_seed))


class SyntheticLearner(_Learner):
    """Logistic regression with LEAF's sigmoid head on Synthetic(alpha, beta)."""

    name: Literal["synthetic"] = "synthetic"
    dim: Count = 60
    num_classes: Annotated[Count, Field(ge=2)] = 5
    alpha: Positive = 1.0
    beta: Positive = 1.0
    learning_rate: Positive = 3e-4

    def data(
        self, num_clients: int, num_seeds: int, seed: int, directory: Path | None
    ) -> FederatedData:
        """A stack of draws, one for each seed."""
        del directory
        draws = [
            synthetic(
                num_clients,
                alpha=self.alpha,
                beta=self.beta,
                dim=self.dim,
                num_classes=self.num_classes,
                seed=each,
            )
            for each in _seeds(seed, num_seeds)
        ]
        return stack_data(draws)

    def task(self, data: FederatedData, column: int | None = None) -> Classification:
        """What one model learns; `data` is one of the stack."""
        del column
        module = LogisticRegression(self.num_classes, sigmoid_head=True)
        return classification(data, module, reduction="sum")


class FacesLearner(_Learner):
    """LEAF's CNN on one attribute of CelebA, or of a surrogate where there is no directory."""

    name: Literal["faces"] = "faces"
    attributes: Annotated[tuple[str, ...], Field(min_length=1)] = ATTRIBUTES[:1]
    image_size: Annotated[Count, Field(ge=16)] | None = None
    images_per_client: tuple[Count, Count] = (12, 24)
    learning_rate: Positive = 0.1

    def data(
        self, num_clients: int, num_seeds: int, seed: int, directory: Path | None
    ) -> FederatedData:
        """A stack of surrogates, one for each seed; of the files there is only one."""
        if directory is not None:
            faces = load_celeba(
                directory,
                attributes=self.attributes,
                image_size=self.image_size or 84,
                num_clients=num_clients,
                balance=len(self.attributes) == 1,
                seed=seed,
            )
            return stack_data([faces])
        draws = [
            surrogate_faces(
                num_clients,
                num_attributes=len(self.attributes),
                image_size=self.image_size or 28,
                examples_per_client=self.images_per_client,
                seed=each,
            )
            for each in _seeds(seed, num_seeds)
        ]
        return stack_data(draws)

    def task(self, data: FederatedData, column: int | None = 0) -> Classification:
        """What one model learns; `data` is one of the stack."""
        return classification(data, CelebACNN(2), reduction="sum", column=column, block_size=64)


Learner = Annotated[SyntheticLearner | FacesLearner, Field(discriminator="name")]
