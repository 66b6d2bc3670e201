"""Clients of section 3: MNIST images, with a new partition for every seed, and cohort training."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, PRNGKeyArray
from pydantic import ValidationInfo, model_validator

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignments.partitions import mfa_rand
from fedjax_mm.base import Batching, Index, Params
from fedjax_mm.base.shuffles import hash_words, shuffled
from fedjax_mm.data.clients import ClientData, client_data, shared_client_data
from fedjax_mm.data.digits import digits
from fedjax_mm.data.federated import FederatedData, Pool
from fedjax_mm.data.idx import load_idx
from fedjax_mm.data.partition import Parts
from fedjax_mm.experiments.fields import Count, Flag, Positive, Seeded, TwoOrMore
from fedjax_mm.local import local_sgd
from fedjax_mm.papers.training import train
from fedjax_mm.papers.values import Trend
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.sweeps.until import Until
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import McMahanCNN
from fedjax_mm.tasks.supervised import Supervised
from fedjax_mm.tasks.view import View

_TESTED_AT_ONCE = 200  # images of each run, because a hundred runs share a GPU's memory

EVALUATIONS = {"all images": "test_accuracy", "as-published": "published_accuracy"}
"""The ways to score a model, and the names of their accuracies in a result."""


def check_sizes(sizes: Iterable[int], num_clients: int, **costs: int) -> None:
    """Raises `ValueError` if a size exceeds the number of clients or does not divide a cost."""
    for size in sizes:
        if size > num_clients:
            raise ValueError(f"cohort_sizes has {size}; there are only num_clients = {num_clients}")
        for name, cost in costs.items():
            if cost % size:
                wrong = f"cohort_sizes has {size}, which does not divide {name} = {cost}"
                raise ValueError(f"{wrong}; rounds and batches are whole")


class Trained(Seeded):
    """Settings shared by Figures 1 to 3: McMahan's CNN and its clients."""

    paper_sizes: ClassVar[tuple[int, ...]]
    digits_sizes: ClassVar[tuple[int, ...]]

    num_clients: TwoOrMore | None = None
    """The number of clients. Defaults to 100 for MNIST and 24 for the digits."""
    cohort_sizes: Trend[Count] | None = None
    """Increasing cohort sizes. Defaults to the paper's sizes for MNIST, and to smaller ones for the
    digits."""
    learning_rate: Positive = 0.1
    local_epochs: Count
    num_seeds: TwoOrMore
    """The number of seeds, each of which has its own partition of the images."""
    programmed: Flag = True
    """Whether, as in the author's program, the last layer starts at 0 and batches are formed before
    shuffling. The paper mentions neither."""
    directory: Path | None = None
    """The directory of MNIST's files, or None to use the digits."""

    def check_files(self) -> None:
        """See `WithFiles`."""
        # Check only changed settings, because partitioning takes a while and the defaults are
        # known to work.
        if self.model_fields_set:
            self.deals(self.pool())

    @model_validator(mode="after")
    def _clients_fit(self, info: ValidationInfo) -> Self:
        for costs in self.costs:
            check_sizes(self.sizes, self.clients, **costs)
        return self.with_files(info)

    @property
    def sizes(self) -> list[int]:
        """The cohort sizes C."""
        default = self.digits_sizes if self.directory is None else self.paper_sizes
        return list(self.cohort_sizes or default)

    @property
    def clients(self) -> int:
        """The number of clients, N."""
        return self.num_clients or (24 if self.directory is None else 100)

    @property
    def costs(self) -> list[dict[str, int]]:
        """Costs that stay constant over the cohort sizes, by name, for each round limit."""
        return [{}]

    @abstractmethod
    def deal(self, labels: np.ndarray, seed: int) -> list[Parts]:
        """All partitions of the images for one seed."""

    def pool(self) -> Pool:
        """The images."""
        return digits() if self.directory is None else load_idx(self.directory)

    def deals(self, pool: Pool) -> list[Parts]:
        """All partitions of the first seed, then of the second, and so on."""
        return [way for seed in self.data_seeds for way in self.deal(pool.train[1], seed)]

    def setup(self, C: int, task: Supervised, deal: int, batch_size: int) -> Setup:
        """Sets up FedAvg with cohorts of C clients on one partition of the images."""
        rate, epochs = self.learning_rate, self.local_epochs
        algorithm = fedavg(local_sgd(rate, epochs=epochs, batch_size=batch_size), weighted=False)
        mine = dealt(
            task, deal, epochs=epochs, batch_size=batch_size, is_programmed=self.programmed
        )
        return Setup(mine, algorithm, mfa_rand(self.clients, 1, cohort_size=C))

    def train(
        self,
        build: Callable[..., Setup],
        axes: Mapping[str, Any],
        num_rounds: int,
        until: Until | None,
        execution: Execution | None,
    ) -> xr.Dataset:
        """Sweeps `build` over the cohort sizes, further axes and the seeds."""
        pool = self.pool()
        build = partial(build, task=images(pool, self.deals(pool)))
        how: dict[str, Any] = {"num_rounds": num_rounds, "until": until}
        result = train([pool], build, {"C": self.sizes, **axes}, self, execution, **how)
        return result.isel(model=0)

    def title(self, result: xr.Dataset, more: str) -> str:
        """The title of a figure."""
        return f"{result.attrs['manifest']['datasets'][0]}, {self.clients} clients, {more}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoredTwice(View):
    """A classifier tested on all images and, as in the author's program, on a few.

    Attributes:
      epochs: E.
      batch_size: B. The few images are E mini-batches of B adjacent images.
    """

    epochs: int = dataclasses.field(metadata={"static": True})
    batch_size: int = dataclasses.field(metadata={"static": True})

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> dict[str, Float[Array, ""]]:
        """Loss and accuracy on all test images, and accuracy on a few random ones."""
        test = self.task.test
        size = min(self.batch_size, test.num_examples)
        # Exclude the last mini-batch of test images if it is smaller than the others.
        num_batches = test.num_examples // size
        wanted = jnp.arange(min(self.epochs, num_batches))
        drawn = shuffled(hash_words(rng_key), wanted, num_batches)
        rows = (drawn[:, None] * size + jnp.arange(size)).ravel()
        # The drawn rows form an order in which `evaluate` gathers images block by block.
        counts, number = jnp.full(1, rows.size), rows.size
        some = ClientData(test.examples, test.offsets, counts, number, number, number, order=rows)
        every, few = (self.task.evaluate(params, data) for data in (test, some))
        accuracies = {"test_accuracy": every["accuracy"], "published_accuracy": few["accuracy"]}
        return {"loss": every["loss"]} | accuracies


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AsProgrammed(ScoredTwice):
    """A `ScoredTwice` with the initial model and the batches of the author's program.

    The program forms batches before it shuffles, so a client's batches never change, only their
    order in each round. Batches of non-IID labels contain a single label each.
    """

    def init(self, rng_key: PRNGKeyArray) -> Params:
        """Initial parameters in which the last layer's weights are 0."""
        params = super().init(rng_key)
        last = params["classes"]
        return params | {"classes": last | {"kernel": jnp.zeros_like(last["kernel"])}}

    def batch(self, rng_key: PRNGKeyArray, client: Index, step: Index, how: Batching) -> Any:
        """Adjacent examples of the client."""
        data, size = self.task.train, how.size or self.batch_size
        count, num_batches = data.counts[client], data.num_batches(client, size)
        # Shuffle the batches of all epochs together.
        place = shuffled(hash_words(rng_key), step, self.epochs * num_batches)
        rows = place % num_batches * size + jnp.arange(size)
        return (
            data.offsets[client] + jnp.minimum(rows, count - 1),
            (rows < count).astype(float),
            None,
        )


def images(pool: Pool, deals: Sequence[Parts]) -> Supervised:
    """McMahan's CNN on several partitions of the images, to be selected by `dealt`."""
    # Share one copy of the images, and give all partitions arrays of equal shapes.
    train = shared_client_data(pool.train, deals)
    tested = client_data([pool.test])
    data = FederatedData(pool.name, pool.kind, pool.num_classes, train, tested)
    # Skip the check, because data with several draws have no clients until a draw is selected.
    module = McMahanCNN(pool.num_classes)
    return classification(data, module, scale=1 / 255, block_size=_TESTED_AT_ONCE, check=False)


def dealt(
    task: Supervised, index: int, *, epochs: int, batch_size: int, is_programmed: bool = True
) -> ScoredTwice:
    """The task of one partition, as in the author's program or as in the paper."""
    mine = dataclasses.replace(task, train=task.train.select(index))
    view = AsProgrammed if is_programmed else ScoredTwice
    return view(mine, mine.num_clients, epochs, batch_size)
