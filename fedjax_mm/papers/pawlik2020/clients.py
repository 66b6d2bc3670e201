"""Whom Pawlik trains: clients with images of MNIST, dealt anew for every seed, in cohorts."""

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from pydantic import Field, model_validator

from fedjax_mm.base import Batching, Params
from fedjax_mm.data.clients import client_data, shared_client_data
from fedjax_mm.data.digits import digits
from fedjax_mm.data.federated import FederatedData, Pool
from fedjax_mm.data.idx import check_idx, load_idx
from fedjax_mm.data.partition import Parts
from fedjax_mm.experiments.tasks import Config, Count, Positive, Seed
from fedjax_mm.papers.pawlik2020.costs import check_sizes
from fedjax_mm.tasks.classification import Classification, classification
from fedjax_mm.tasks.networks import McMahanCNN
from fedjax_mm.tasks.view import View

STAND_IN = (
    "without --data DIR the digits of scikit-learn stand in for MNIST, with fewer clients and "
    "smaller cohorts; accuracies are then not the paper's"
)


class Trained(Config):
    """What the experiments of section 3 have in common: McMahan's CNN and its clients."""

    paper_sizes: ClassVar[tuple[int, ...]]
    digits_sizes: ClassVar[tuple[int, ...]]

    num_clients: Annotated[Count, Field(ge=2)] | None = None
    """100 of MNIST, 24 of the digits."""
    cohort_sizes: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """Increasing; by default the paper's with MNIST, smaller ones with the digits."""
    learning_rate: Positive = 0.1
    num_seeds: Annotated[Count, Field(ge=2)]
    """Each deals the images anew."""
    seed: Seed = 0
    directory: Path | None = None
    """Of MNIST's files; the digits stand in without them."""

    @model_validator(mode="after")
    def _clients_fit(self) -> Self:
        if self.directory is not None:
            try:
                check_idx(self.directory)
            except OSError as error:
                raise ValueError(str(error)) from error
        if self.sizes != sorted(set(self.sizes)):
            raise ValueError(f"cohort_sizes is {self.sizes}; they must increase")
        check_sizes(self.sizes, self.clients)
        if len(self.sizes) < 3:
            raise ValueError(f"cohort_sizes is {self.sizes}; a trend needs 3 or more")
        if self.model_fields_set:  # the defaults can be dealt
            self.deals(self.pool())
        return self

    @property
    def sizes(self) -> list[int]:
        """C."""
        default = self.digits_sizes if self.directory is None else self.paper_sizes
        return list(self.cohort_sizes or default)

    @abstractmethod
    def deal(self, labels: np.ndarray, seed: int) -> list[Parts]:
        """All ways in which the images are dealt with a seed."""

    @property
    def clients(self) -> int:
        """N."""
        return self.num_clients or (24 if self.directory is None else 100)

    def pool(self) -> Pool:
        """The images."""
        return digits() if self.directory is None else load_idx(self.directory)

    def deals(self, pool: Pool) -> list[Parts]:
        """All ways of the first seed, then all of the second, and so on."""
        seeds = np.random.SeedSequence(self.seed).generate_state(self.num_seeds)
        return [way for seed in seeds for way in self.deal(pool.train[1], int(seed))]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoredTwice(View):
    """A classifier that is tested on all images, and on a few as by the author's program.

    Attributes:
      num_scored: those few, E mini-batches of B.
    """

    num_scored: int = dataclasses.field(metadata={"static": True})

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> dict[str, Float[Array, ""]]:
        """Loss and accuracy on all test images, and the accuracy on some, drawn for this record."""
        test, size, first = self.task.test, self.num_scored, jnp.int32(0)
        rows, _ = test.batch(rng_key, first, first, Batching(size, "epochs"))
        some = dataclasses.replace(
            test,
            examples=test.take(rows),
            order=None,
            offsets=jnp.zeros(1, jnp.int32),
            counts=jnp.full(1, size),
            min_count=size,
            max_count=size,
            num_examples=size,
        )
        every, few = (self.task.evaluate(params, data) for data in (test, some))
        return {
            "loss": every["loss"],
            "test_accuracy": every["accuracy"],
            "published_accuracy": few["accuracy"],
        }


def images(pool: Pool, deals: Sequence[Parts]) -> Classification:
    """McMahan's CNN on images that are dealt in several ways; take one with `dealt`."""
    tested = client_data([pool.test])
    train = shared_client_data(pool.train, deals)
    data = FederatedData(pool.name, pool.kind, pool.num_classes, train, tested)
    return classification(data, McMahanCNN(pool.num_classes), scale=1 / 255)


def dealt(task: Classification, index: Any, num_scored: int) -> ScoredTwice:
    """The task of one way to deal; at most all test images are scored."""
    mine = dataclasses.replace(task, train=task.train.select(index))
    return ScoredTwice(mine, mine.num_clients, min(num_scored, task.test.num_examples))
