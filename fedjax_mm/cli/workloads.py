"""Benchmark workloads: quadratics, a sweep of them, and classifiers with FLOP counts."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignments.partitions import mfa_rand, mfa_rr
from fedjax_mm.base import Algorithm, Assignment
from fedjax_mm.data.clients import flat_client_data
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.data.synthetic import synthetic
from fedjax_mm.local import local_sgd
from fedjax_mm.sweeps.grid import Grid, Setup
from fedjax_mm.tasks.quadratic import quadratic

ASSIGNMENTS: dict[str, Callable[[int, int], Assignment]] = {"MFA-Rand": mfa_rand, "MFA-RR": mfa_rr}


class Workload(NamedTuple):
    """A quadratic (p = 4, E = 5, eta = 0.1) with one local training per client and round."""

    name: str
    num_clients: int
    num_models: int
    num_rounds: int
    num_seeds: int
    labels: tuple[str, ...] = tuple(ASSIGNMENTS)  # each one is timed separately

    @property
    def client_updates(self) -> int:
        """The number of local trainings in one run."""
        return self.num_clients * self.num_rounds * self.num_seeds


class SweepWorkload(NamedTuple):
    """A sweep on the quadratic of `Workload` over algorithms, model counts and learning rates."""

    name: str
    num_clients: int
    num_models: tuple[int, ...]
    num_rates: int
    num_rounds: int
    num_seeds: int
    record_every: int
    labels: tuple[str, ...] = ("sweep of both",)  # each is timed separately

    @property
    def client_updates(self) -> int:
        """The number of local trainings in the sweep."""
        points = len(ASSIGNMENTS) * len(self.num_models) * self.num_rates
        return points * self.num_seeds * self.num_rounds * self.num_clients

    def grid(self) -> Grid:
        """All runs."""

        def setup(algorithm: str, num_models: int, learning_rate: Any) -> Setup:
            assignment = ASSIGNMENTS[algorithm](self.num_clients, num_models)
            task = quadratic(self.num_clients, 4, mu=2e-4)
            return Setup(task, fedavg(learning_rate, local_steps=5), assignment)

        axes: dict[str, Sequence[Any]] = {
            "algorithm": list(ASSIGNMENTS),
            "num_models": self.num_models,
            "learning_rate": list(np.geomspace(0.01, 0.3, self.num_rates)),
        }
        return Grid(setup, axes, self.num_rounds, self.num_seeds, record_every=self.record_every)


class Model(NamedTuple):
    """A classifier with convolutions, each with ReLU, and dense layers.

    Attributes:
      example_shape: `[features]`, or `[height, width, channels]` for convolutions.
      channels: the outputs of each convolution.
      widths: the outputs of each dense layer, with ReLU in between; the last is the class count.
      kernel_size: the height and width of each convolution's kernel.
      is_padded: whether convolutions preserve the image size and 2 x 2 max pooling follows each of
        them; otherwise images shrink, and are pooled only after the last convolution.
      dropout_rates: of the dropout before the dense layers and after the first one.
    """

    example_shape: tuple[int, ...]
    channels: tuple[int, ...]
    widths: tuple[int, ...]
    kernel_size: int = 5
    is_padded: bool = True
    dropout_rates: tuple[float, float] = (0.0, 0.0)

    @property
    def padding(self) -> int:
        """The rows and columns of zeros at each side of an image."""
        return self.kernel_size // 2 if self.is_padded else 0

    def is_pooled(self, layer: int) -> bool:
        """Whether 2 x 2 max pooling follows a convolution, counted from 0."""
        return self.is_padded or layer == len(self.channels) - 1

    @property
    def outputs(self) -> list[list[int]]:
        """The height and width of each convolution's outputs, before pooling."""
        sizes, found = list(self.example_shape[:-1]), list[list[int]]()
        for layer in range(len(self.channels)):
            found.append([n + 2 * self.padding - self.kernel_size + 1 for n in sizes])
            sizes = [n // 2 if self.is_pooled(layer) else n for n in found[-1]]
        return found

    @property
    def kernel_shapes(self) -> list[tuple[int, ...]]:
        """Kernel shapes by layer: `[size, size, in, out]` or, if dense, `[in, out]`."""
        inputs = (self.example_shape[-1], *self.channels)
        shapes: list[tuple[int, ...]] = [
            (self.kernel_size, self.kernel_size, i, o)
            for i, o in zip(inputs, self.channels, strict=False)
        ]
        flat = math.prod(size // 2 for size in self.outputs[-1]) if self.channels else 1
        inputs = (flat * inputs[-1], *self.widths)
        return shapes + [(i, o) for i, o in zip(inputs, self.widths, strict=False)]

    def flops(self) -> int:
        """The FLOPs of one example's gradient, counting only matrix products.

        A layer is a product of `[m, k]` and `[k, n]`. A dense layer has m = 1, k = in, n = out; a
        convolution has m = height x width of its outputs, k = size x size x in, n = out. Each costs
        2 m n k for the forward pass, 2 m n k for the kernel's gradient and, except in the first
        layer, 2 m n k for the input's gradient.
        """
        places = [math.prod(size) for size in self.outputs] + [1] * len(self.widths)
        return sum(
            (2 if layer == 0 else 3) * 2 * m * math.prod(shape)
            for layer, (m, shape) in enumerate(zip(places, self.kernel_shapes, strict=True))
        )

    def module(self) -> Any:
        """Builds the flax module."""
        from fedjax_mm.tasks.networks import MLP, LogisticRegression, McMahanCNN, ReddiCNN

        *hidden, num_classes = self.widths
        if self.channels:
            (width,) = hidden
            if not self.is_padded and self.kernel_size == 3:
                return ReddiCNN(num_classes, self.channels, width, *self.dropout_rates)
            if not self.is_padded or self.kernel_size != 5 or any(self.dropout_rates):
                raise ValueError(f"there is no network for {self}")
            return McMahanCNN(num_classes, self.channels, width)
        return MLP(num_classes, tuple(hidden)) if hidden else LogisticRegression(num_classes)


LOGISTIC = Model((60,), (), (5,))
PERCEPTRON = Model((784,), (), (64, 30, 10))
MCMAHAN_CNN = Model((28, 28, 1), (32, 64), (512, 10))
REDDI_CNN = Model((32, 32, 3), (32, 64), (128, 10), kernel_size=3, is_padded=False)


class LearningWorkload(NamedTuple):
    """Federated averaging of a classifier: S of K clients per round, E steps on B of n examples.

    Examples are random, because the work does not depend on their values.

    Attributes:
      name: the name of the workload, such as W2.
      model: the classifier.
      num_clients: K.
      num_examples: n, the same for every client; None for Synthetic(1, 1), with 45 or more
        examples.
      cohort_size: S, the number of clients per round.
      num_steps: E, the number of SGD steps per client and round; None means one epoch.
      batch_size: B, the number of examples drawn per step; all examples if B = n.
      num_rounds: the number of rounds of a `fedjax_mm` run.
      learning_rate: eta.
    """

    name: str
    model: Model
    num_clients: int
    num_examples: int | None
    cohort_size: int
    num_steps: int | None
    batch_size: int
    num_rounds: int = 1
    learning_rate: float = 0.1
    labels: tuple[str, ...] = ("FedAvg",)  # each is timed separately

    @property
    def client_updates(self) -> int:
        """The number of local trainings in a run."""
        return self.cohort_size * self.num_rounds

    @property
    def flops(self) -> float:
        """The mean number of floating-point operations per client update."""
        if self.num_steps is None:
            total = self.data().train.num_examples if self.num_examples is None else 0
            return (self.num_examples or total / self.num_clients) * self.model.flops()
        return self.num_steps * self.batch_size * self.model.flops()

    def examples(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws inputs `[K, n, *example_shape]`, float32, and classes `[K, n]`, int32."""
        rng = np.random.default_rng(seed)
        shape = (self.num_clients, self.num_examples or 0)
        inputs = rng.standard_normal((*shape, *self.model.example_shape), np.float32)
        return inputs, rng.integers(self.model.widths[-1], size=shape, dtype=np.int32)

    def data(self) -> FederatedData:
        """Draws the examples of seed 0, for training and for testing."""
        if self.num_examples is None:
            return synthetic(self.num_clients)
        inputs, labels = self.examples(0)
        rows = inputs.reshape(-1, *self.model.example_shape), labels.ravel()
        clients = flat_client_data(rows, [self.num_examples] * self.num_clients)
        return FederatedData("random", "synthetic", self.model.widths[-1], clients, clients)

    def algorithm(self) -> Algorithm:
        """Federated averaging with the workload's settings."""
        size = None if self.batch_size == self.num_examples else self.batch_size
        epochs = 1 if self.num_steps is None else None
        how: Any = {"steps": self.num_steps, "epochs": epochs, "batch_size": size}
        return fedavg(local_sgd(self.learning_rate, **how))

    def assignment(self) -> Assignment:
        """An assignment that draws uniform cohorts."""
        return mfa_rand(self.num_clients, 1, cohort_size=self.cohort_size)


AnyWorkload = Workload | SweepWorkload | LearningWorkload

WORKLOADS: dict[str, AnyWorkload] = {
    workload.name: workload
    for workload in (
        Workload("W1", 24, 12, 1000, 20),
        Workload("W1b", 1000, 10, 200, 20),
        Workload("W1c", 1_000_000, 10, 20, 1),
        SweepWorkload("S1", 24, (2, 12), 16, 1000, 64, 10),
        # Choose the number of rounds so that a run takes about a second.
        LearningWorkload("W2", LOGISTIC, 100, 200, 100, 5, 20, num_rounds=2000),
        LearningWorkload("W2b", LOGISTIC, 10_000, 40, 1000, 5, 20, num_rounds=200),
        LearningWorkload("W3", PERCEPTRON, 100, 300, 10, 30, 32, num_rounds=50),
        LearningWorkload("W3b", PERCEPTRON, 100, 300, 100, 30, 32, num_rounds=10),
        LearningWorkload("W4", MCMAHAN_CNN, 10, 600, 10, 60, 10, num_rounds=1),
        # The recipe of pfl-research for CIFAR-10, but for its dropout and its order of examples.
        LearningWorkload("W5", REDDI_CNN, 1000, 50, 50, 5, 10, num_rounds=1),
        LearningWorkload("A8", LOGISTIC, 100, None, 100, None, 10, 10, learning_rate=0.01),
    )
}
