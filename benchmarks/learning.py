"""Learning workloads: federated averaging of classifiers by local SGD, the same in every system.

In a round S of K clients take E steps `w <- w - eta grad`, each on a minibatch of B of their n
examples, from the server's parameters w, to which the mean of the S changes is then added. The loss
is the mean cross-entropy of a softmax; everything is float32.

| | model | parameters | K | n | S | E | B |
|---|---|---:|---:|---:|---:|---:|---:|
| W2 | multinomial logistic regression 60-5 | 305 | 100 | 200 | 100 | 5 | 20 |
| W2b | the same | 305 | 10,000 | 40 | 1,000 | 5 | 20 |
| W3 | perceptron 784-64-30-10, ReLU | 52,500 | 100 | 300 | 10 | 30 | 32 |
| W3b | the same | 52,500 | 100 | 300 | 100 | 30 | 32 |
| W4 | two convolutions 5 x 5, dense 512, dense 10 | 1,663,370 | 10 | 600 | 10 | 60 | 10 |

W4's model is the CNN of McMahan et al. (AISTATS 2017), one epoch of 600 images 28 x 28. Data are
synthetic, of these shapes: the work does not depend on their values.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.peers import sample_cohorts

Params = list[tuple[np.ndarray, np.ndarray]]
Run = Callable[[], Params]


class Model(NamedTuple):
    """A classifier: convolutions 5 x 5 that keep the size, each with ReLU and 2 x 2 max; dense.

    Attributes:
      example_shape: `[features]`, or `[height, width, channels]` for convolutions.
      channels: outputs of each convolution.
      widths: outputs of each dense layer, ReLU between them; the last are the classes.
    """

    example_shape: tuple[int, ...]
    channels: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def kernel_shapes(self) -> list[tuple[int, ...]]:
        """Of every layer: `[5, 5, in, out]` of a convolution, `[in, out]` of a dense one."""
        inputs = (self.example_shape[-1], *self.channels)
        shapes = [(5, 5, i, o) for i, o in zip(inputs, self.channels, strict=False)]
        shrunk = [size // 2 ** len(self.channels) for size in self.example_shape[:-1]]
        inputs = (math.prod(shrunk) * inputs[-1], *self.widths)
        return shapes + [(i, o) for i, o in zip(inputs, self.widths, strict=False)]

    def flops(self) -> int:
        """Floating-point operations of one example's gradient, those of matrix products only.

        A layer is a product of `[m, k]` and `[k, n]`: for a dense one m = 1, k = in, n = out; for
        a convolution m = height x width, k = 25 in, n = out. It costs 2 m n k forward, 2 m n k for
        the gradient of the kernel, and, but in the first layer, 2 m n k for that of its input.
        """
        total = 0
        for layer, shape in enumerate(self.kernel_shapes):
            m = math.prod(self.example_shape[:-1]) // 4**layer if len(shape) == 4 else 1
            total += (2 if layer == 0 else 3) * 2 * m * math.prod(shape)
        return total


class Workload(NamedTuple):
    """Federated averaging of one model.

    Attributes:
      name: W2, ...
      model: what is trained.
      num_clients: K.
      num_examples: n of every client.
      cohort_size: S, clients in a round.
      num_steps: E, SGD steps of a client in a round.
      batch_size: B.
      learning_rate: eta.
    """

    name: str
    model: Model
    num_clients: int
    num_examples: int
    cohort_size: int
    num_steps: int
    batch_size: int
    learning_rate: float = 0.1

    @property
    def flops(self) -> int:
        """Floating-point operations of one client update: E B times those of `Model.flops`."""
        return self.num_steps * self.batch_size * self.model.flops()

    def cohorts(self, num_rounds: int, seed: int) -> np.ndarray:
        """Returns the clients of every round, `[T, S]`, uniform without replacement."""
        models = self.num_clients // self.cohort_size
        return sample_cohorts(num_rounds, self.num_clients, models, seed)

    def examples(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs `[K, n, *example_shape]`, float32, and classes `[K, n]`, int32."""
        rng = np.random.default_rng(seed)
        shape = (self.num_clients, self.num_examples)
        inputs = rng.standard_normal((*shape, *self.model.example_shape), np.float32)
        return inputs, rng.integers(self.model.widths[-1], size=shape, dtype=np.int32)

    def params(self, seed: int) -> Params:
        """Returns the kernel, scaled by 1 / sqrt(k), and the bias, 0, of every layer, float32."""
        rng = np.random.default_rng(seed)

        def layer(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
            scale = np.float32(math.prod(shape[:-1]) ** -0.5)
            return scale * rng.standard_normal(shape, np.float32), np.zeros(shape[-1], np.float32)

        return [layer(shape) for shape in self.model.kernel_shapes]


LOGISTIC = Model((60,), (), (5,))
PERCEPTRON = Model((784,), (), (64, 30, 10))
MCMAHAN_CNN = Model((28, 28, 1), (32, 64), (512, 10))

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W2", LOGISTIC, 100, 200, cohort_size=100, num_steps=5, batch_size=20),
        Workload("W2b", LOGISTIC, 10_000, 40, cohort_size=1000, num_steps=5, batch_size=20),
        Workload("W3", PERCEPTRON, 100, 300, cohort_size=10, num_steps=30, batch_size=32),
        Workload("W3b", PERCEPTRON, 100, 300, cohort_size=100, num_steps=30, batch_size=32),
        Workload("W4", MCMAHAN_CNN, 10, 600, cohort_size=10, num_steps=60, batch_size=10),
    )
}


def numpy_rounds(workload: Workload, batches: np.ndarray, seed: int = 0) -> Run:
    """The reference, float64, for models without convolutions: gradients written by hand.

    Args:
      workload: what to do.
      batches: examples of every step, `[T, S, E, B]`, numbered within their client.
      seed: of the data, the parameters and the cohorts.
    """
    inputs, labels = workload.examples(seed)
    targets = np.eye(workload.model.widths[-1])[labels]
    cohorts = workload.cohorts(len(batches), seed)

    def gradient(params: Params, x: np.ndarray, target: np.ndarray) -> Params:
        activations = [x]
        for layer, (kernel, bias) in enumerate(params):
            x = x @ kernel + bias
            if layer < len(params) - 1:
                x = np.maximum(x, 0)
            activations.append(x)
        softmax = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
        error = (softmax - target) / len(x)
        grads = []
        for (kernel, _), x in zip(params[::-1], activations[-2::-1], strict=True):
            grads.append((x.T @ error, error.sum(axis=0)))
            error = (error @ kernel.T) * (x > 0)
        return grads[::-1]

    def client_update(params: Params, client: int, steps: np.ndarray) -> Params:
        for batch in steps:
            grads = gradient(params, inputs[client, batch], targets[client, batch])
            params = [
                (w - workload.learning_rate * dw, b - workload.learning_rate * db)
                for (w, b), (dw, db) in zip(params, grads, strict=True)
            ]
        return params

    def run() -> Params:
        params = [(w.astype(float), b.astype(float)) for w, b in workload.params(seed)]
        for cohort, steps in zip(cohorts, batches, strict=True):
            results = [client_update(params, k, s) for k, s in zip(cohort, steps, strict=True)]
            params = [
                (np.mean([w for w, _ in layer], axis=0), np.mean([b for _, b in layer], axis=0))
                for layer in zip(*results, strict=True)
            ]
        return params

    return run
