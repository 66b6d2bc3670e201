"""Clients of section 3: images of MNIST, dealt again for every seed, and training in cohorts."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, PRNGKeyArray
from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignments.partitions import mfa_rand
from fedjax_mm.base import Batching, Params
from fedjax_mm.data.clients import ClientData, client_data, shared_client_data
from fedjax_mm.data.digits import digits
from fedjax_mm.data.federated import FederatedData, Pool
from fedjax_mm.data.idx import load_idx
from fedjax_mm.data.partition import Parts
from fedjax_mm.experiments.fields import Count, Positive, Seeded
from fedjax_mm.sweeps.execute import sweep
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.classification import Classification, classification
from fedjax_mm.tasks.networks import McMahanCNN
from fedjax_mm.tasks.view import View


def check_sizes(sizes: Iterable[int], num_clients: int, **costs: int) -> None:
    """Raises `ValueError` unless clients fill every cohort and all sizes divide the costs."""
    for size in sizes:
        if size > num_clients:
            raise ValueError(f"cohort_sizes has {size}; there are only num_clients = {num_clients}")
        for name, cost in costs.items():
            if cost % size:
                wrong = f"cohort_sizes has {size}, which does not divide {name} = {cost}"
                raise ValueError(f"{wrong}; rounds and batches are whole")


def _increase(values: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
    if list(values) != sorted(set(values)):
        raise ValueError(f"{info.field_name} is {list(values)}; they must increase")
    return values


def _trend(values: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
    if len(values) < 3:
        raise ValueError(f"{info.field_name} is {list(values)}; a trend needs 3 or more")
    return _increase(values, info)


T = TypeVar("T")
Increasing = Annotated[tuple[T, ...], AfterValidator(_increase)]
Trend = Annotated[tuple[T, ...], AfterValidator(_trend)]


class Trained(Seeded):
    """Settings that Figures 1 to 3 share: McMahan's CNN and its clients."""

    paper_sizes: ClassVar[tuple[int, ...]]
    digits_sizes: ClassVar[tuple[int, ...]]

    num_clients: Annotated[Count, Field(ge=2)] | None = None
    """100 of MNIST, 24 of the digits."""
    cohort_sizes: Trend[Count] | None = None
    """Increasing; by default the paper's with MNIST, smaller ones with the digits."""
    learning_rate: Positive = 0.1
    local_epochs: Count
    num_seeds: Annotated[Count, Field(ge=2)]
    """Each deals the images again."""
    directory: Path | None = None
    """The folder of MNIST's files; the digits stand in without it."""

    @model_validator(mode="after")
    def _clients_fit(self) -> Self:
        check_sizes(self.sizes, self.clients, **self.costs)
        try:
            # The defaults can be dealt, which takes a while: only other settings are tried.
            if self.model_fields_set:
                self.deals(self.pool())
        except OSError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def sizes(self) -> list[int]:
        """C."""
        default = self.digits_sizes if self.directory is None else self.paper_sizes
        return list(self.cohort_sizes or default)

    @property
    def clients(self) -> int:
        """N."""
        return self.num_clients or (24 if self.directory is None else 100)

    @property
    def costs(self) -> dict[str, int]:
        """Costs that are constant over the cohort sizes, by name."""
        return {}

    @abstractmethod
    def deal(self, labels: np.ndarray, seed: int) -> list[Parts]:
        """Returns all ways in which the images are dealt with a seed."""

    def pool(self) -> Pool:
        """Returns the images."""
        return digits() if self.directory is None else load_idx(self.directory)

    def deals(self, pool: Pool) -> list[Parts]:
        """Returns all ways of the first seed, then all of the second, and so on."""
        return [way for seed in self.data_seeds for way in self.deal(pool.train[1], seed)]

    def setup(self, C: int, task: Classification, deal: Any, batch_size: int) -> Setup:
        """Returns FedAvg by cohorts of C of the clients, to whom images are dealt in one way."""
        rate, epochs = self.learning_rate, self.local_epochs
        algorithm = fedavg(rate, epochs=epochs, batch_size=batch_size, weighted=False)
        mine = dealt(task, deal, epochs * batch_size)
        return Setup(mine, algorithm, mfa_rand(self.clients, 1, cohort_size=C))

    def train(self, build: Callable[..., Setup], axes: Mapping[str, Any], **how: Any) -> xr.Dataset:
        """Returns the sweep of `build` over the cohort sizes, more axes and the seeds."""
        pool = self.pool()
        how |= {**self.replicas, "data": pool.kind}
        how["shared"] = {"task": images(pool, self.deals(pool))}
        how["per_seed"] = {"seed_number": np.arange(self.num_seeds)}
        result = sweep(build, {"C": self.sizes, **axes}, **how)
        about = result.attrs["manifest"] | {"datasets": [pool.name]}
        return result.isel(model=0).assign_attrs(manifest=about)

    def title(self, result: xr.Dataset, more: str) -> str:
        """Returns the title of a figure."""
        return f"{result.attrs['manifest']['datasets'][0]}, {self.clients} clients, {more}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoredTwice(View):
    """A classifier that is tested on all images, and on a few as by the author's program.

    Attributes:
      num_scored: those few, E mini-batches of B.
    """

    num_scored: int = dataclasses.field(metadata={"static": True})

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> dict[str, Float[Array, ""]]:
        """Returns loss and accuracy on all test images, and the accuracy on some drawn now."""
        test, size, first = self.task.test, self.num_scored, jnp.int32(0)
        rows, _ = test.batch(rng_key, first, first, Batching(size, "epochs"))
        # The drawn rows are an order, by which `evaluate` gathers images block by block.
        counts = jnp.full(1, size)
        some = ClientData(test.examples, test.offsets, counts, size, size, size, order=rows)
        every, few = (self.task.evaluate(params, data) for data in (test, some))
        accuracies = {"test_accuracy": every["accuracy"], "published_accuracy": few["accuracy"]}
        return {"loss": every["loss"]} | accuracies


def images(pool: Pool, deals: Sequence[Parts]) -> Classification:
    """Returns McMahan's CNN on images dealt in several ways, of which `dealt` takes one."""
    # The ways share one copy of the images: a traced number then chooses a seed's own clients.
    train = shared_client_data(pool.train, deals)
    tested = client_data([pool.test])
    data = FederatedData(pool.name, pool.kind, pool.num_classes, train, tested)
    # Data of several draws are no clients' data before one is taken.
    return classification(data, McMahanCNN(pool.num_classes), scale=1 / 255, check=False)


def dealt(task: Classification, index: Any, num_scored: int) -> ScoredTwice:
    """Returns the task of one way to deal; at most all test images are scored."""
    mine = dataclasses.replace(task, train=task.train.select(index))
    return ScoredTwice(mine, mine.num_clients, min(num_scored, task.test.num_examples))
