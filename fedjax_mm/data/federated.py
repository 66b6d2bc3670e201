"""Datasets: a pool of examples, or each client's training and test examples."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from fedjax_mm.checks.annotations import CountOrZero, check_argument
from fedjax_mm.checks.instances import check_instance
from fedjax_mm.checks.values import described
from fedjax_mm.data.arrays import check_labels, is_known
from fedjax_mm.data.clients import ClientData, stack_client_data

DataKind = Literal["real", "synthetic", "surrogate"]
"""The origin of data. A surrogate replaces real data that is not available."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FederatedData:
    """Each client's examples ``(features, labels)``, or ``(features, targets)``.

    Attributes:
      name: the name of the source, for titles and manifests.
      kind: real, synthetic or surrogate.
      num_classes: C; labels are 0 ... C - 1. 0 if there are targets of any type and shape instead.
      train: ``(x [examples, ...], y int32[examples])`` of N clients. Images are uint8 0 ... 255
        with channels last; other features are float32.
      test: test examples, either of the same N clients or in one pool that all clients share.
    """

    name: str = dataclasses.field(metadata={"static": True})
    kind: DataKind = dataclasses.field(metadata={"static": True})
    num_classes: int = dataclasses.field(metadata={"static": True})
    train: ClientData
    test: ClientData

    @property
    def num_clients(self) -> int:
        """The number of clients, N."""
        return self.train.num_clients

    def __repr__(self) -> str:
        # Read only shapes, because data may be traced or on a device.
        *draws, clients = np.shape(self.train.counts) or (1,)
        first, *_ = jax.tree.leaves(self.train.examples, is_leaf=lambda x: x is None)
        shape = np.shape(first)[1:]
        most = "at most " if draws else ""  # a bound for draws of unequal sizes
        classes = f"{self.num_classes} classes" if self.num_classes else "no classes"
        return (
            f"{f'{draws[0]} draws of ' if draws else ''}{clients} clients, {most}"
            f"{self.train.num_examples} + {self.test.num_examples} examples of {shape}, "
            f"{classes}"
        )

    def select(self, index: Any) -> "FederatedData":
        """Takes one dataset from a stack made by `stack_data`, where `index` may be traced."""
        return dataclasses.replace(
            self, train=self.train.select(index), test=self.test.select(index)
        )


def check_federated(data: Any, *, stacked: bool = False) -> FederatedData:
    """Checks that labels, shapes and clients fit together, and returns the clients' data.

    Traced labels are not checked.

    Args:
      data: any object.
      stacked: whether a stack made by `stack_data` is allowed.

    Raises:
      TypeError: if `data` is not `FederatedData`.
      ValueError: if labels, shapes or clients do not fit together.
    """
    remedy = "deal examples to clients, by data.federate((X, y), parts)"
    check_instance("data", data, FederatedData, remedy)
    num_classes = check_argument("num_classes", data.num_classes, CountOrZero)
    shapes = []
    for name, split in (("train", data.train), ("test", data.test)):
        check_instance(f"data.{name}", split, ClientData, "make it by data.client_data")
        if np.ndim(split.counts) != 1 and not stacked:
            ways = len(split.counts)
            raise ValueError(f"data is a stack of {ways} draws; choose one, such as data.select(0)")
        if not isinstance(split.examples, tuple | list) or len(split.examples) != 2:
            given = described(split.examples)
            raise ValueError(f"the {name} examples are {given}; give (features, labels)")
        features, labels = split.examples
        lengths = {np.shape(x)[:1] for x in jax.tree.leaves((features, labels))}
        if len(lengths) != 1 or (num_classes and np.ndim(labels) not in (1, 2)):
            raise ValueError(
                f"the {name} features have shape {np.shape(features)} and the labels "
                f"{np.shape(labels)}; give one label for each example, or one row of them"
            )
        if num_classes and is_known(labels):
            check_labels(f"the array of {name} labels", np.asarray(labels), num_classes)
        shapes.append(jax.tree.map(lambda x: np.shape(x)[1:], (features, labels)))
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"an example for training has shape {shapes[0][0]} and one for testing {shapes[1][0]}, "
            f"their labels {shapes[0][1]} and {shapes[1][1]}; make them equal"
        )
    if data.test.num_clients not in (1, data.num_clients):
        raise ValueError(
            f"{data.test.num_clients} clients have test examples and {data.num_clients} for "
            "training; give every client its own, or all of them one pool"
        )
    return data


class Pool(NamedTuple):
    """A dataset without clients, to be distributed by `federate`.

    Attributes:
      name: the name of the source.
      kind: real, synthetic or surrogate.
      num_classes: C; labels are 0 ... C - 1. 0 if there are other targets instead.
      train: ``(x [examples, ...], y int32[examples])``, NumPy arrays. Images are uint8 0 ... 255
        ``[examples, height, width, channels]``.
      test: test examples, in the same form.
    """

    name: str
    kind: DataKind
    num_classes: int
    train: tuple[np.ndarray, Any]
    test: tuple[np.ndarray, Any]

    def __repr__(self) -> str:
        sizes = [len(x) for x, _ in (self.train, self.test)]
        shape = np.shape(self.train[0])[1:]
        classes = f"{self.num_classes} classes" if self.num_classes else "no classes"
        return f"{self.name}, {self.kind}: {sizes[0]} + {sizes[1]} examples of {shape}, {classes}"


def stack_data(datasets: Sequence[FederatedData]) -> FederatedData:
    """Stacks datasets with the same number of clients, for `select` to choose from.

    Raises:
      ValueError: if the numbers of clients differ.

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
