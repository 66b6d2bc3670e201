"""Datasets: a pool of examples, and the training and test examples of every client."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from fedjax_mm.data.clients import ClientData, stack_client_data

DataKind = Literal["real", "synthetic", "surrogate"]
"""Origin of data; a surrogate replaces real data that is not available."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FederatedData:
    """Every client's examples ``(features, labels)``.

    Attributes:
      name: of the source, for titles and manifests.
      kind: real, synthetic or surrogate.
      num_classes: C; labels are 0 ... C - 1.
      train: ``(x [examples, ...], y int32[examples])`` of N clients. Images are uint8 0 ... 255
        with channels last; other features are float32.
      test: test examples, of the same N clients or of one pool that all share.
    """

    name: str = dataclasses.field(metadata={"static": True})
    kind: DataKind = dataclasses.field(metadata={"static": True})
    num_classes: int = dataclasses.field(metadata={"static": True})
    train: ClientData
    test: ClientData

    @property
    def num_clients(self) -> int:
        """N."""
        return self.train.num_clients

    def __repr__(self) -> str:
        # Shapes alone: data may be traced, or on a device.
        *draws, clients = np.shape(self.train.counts) or (1,)
        first, *_ = jax.tree.leaves(self.train.examples, is_leaf=lambda x: x is None)
        shape = np.shape(first)[1:]
        most = "at most " if draws else ""  # draws of unequal sizes have one bound
        return (
            f"{f'{draws[0]} draws of ' if draws else ''}{clients} clients, {most}"
            f"{self.train.num_examples} + {self.test.num_examples} examples of {shape}, "
            f"{self.num_classes} classes"
        )

    def select(self, index: Any) -> "FederatedData":
        """Returns one of the datasets in a stack of `stack_data`; `index` may be traced."""
        return dataclasses.replace(
            self, train=self.train.select(index), test=self.test.select(index)
        )


class Pool(NamedTuple):
    """Dataset without clients; `federate` deals it to clients.

    Attributes:
      name: of the source.
      kind: real, synthetic or surrogate.
      num_classes: C; labels are 0 ... C - 1.
      train: ``(x [examples, ...], y int32[examples])``, NumPy arrays. Images are uint8 0 ... 255
        ``[examples, height, width, channels]``.
      test: test examples, in the same form.
    """

    name: str
    kind: DataKind
    num_classes: int
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def stack_data(datasets: Sequence[FederatedData]) -> FederatedData:
    """Puts datasets of equally many clients, such as several draws, into one for `select`.

    Raises:
      ValueError: if numbers of clients differ.

    Example:
      >>> from fedjax_mm.data import stack_data, synthetic
      >>> draws = [synthetic(3, dim=4, seed=seed) for seed in (0, 1)]
      >>> both = stack_data(draws)
      >>> both.train.counts.shape, both.select(1).num_clients
      ((2, 3), 3)
    """
    return dataclasses.replace(
        datasets[0],
        train=stack_client_data([data.train for data in datasets]),
        test=stack_client_data([data.test for data in datasets]),
    )
