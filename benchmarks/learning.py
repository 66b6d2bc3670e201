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
| W5 | two convolutions 3 x 3, dense 128, dense 10 | 1,626,442 | 1,000 | 50 | 50 | 5 | 10 |

W4's model is the CNN of McMahan et al. (AISTATS 2017), one epoch of 600 images 28 x 28. W5 is the
recipe of pfl-research for CIFAR-10, with the CNN of Reddi et al. (ICLR 2021), one epoch of 50
images 32 x 32 x 3; `recipe` has its dropout and its epochs, too. Data are synthetic, of these
shapes: the work does not depend on their values.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.peers import sample_cohorts
from fedjax_mm.base.chunks import ClientMap
from fedjax_mm.cli import speed as bench
from fedjax_mm.cli import workloads

Params = list[tuple[np.ndarray, np.ndarray]]
Run = Callable[[], Params]


class Workload(workloads.LearningWorkload):
    """Federated averaging of one model, with the cohorts and parameters that all systems share."""

    def cohorts(self, num_rounds: int, seed: int) -> np.ndarray:
        """Returns the clients of every round, `[T, S]`, uniform without replacement."""
        models = self.num_clients // self.cohort_size
        return sample_cohorts(num_rounds, self.num_clients, models, seed)

    def params(self, seed: int) -> Params:
        """Returns the kernel, scaled by 1 / sqrt(k), and the bias, 0, of every layer, float32."""
        rng = np.random.default_rng(seed)

        def layer(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
            scale = np.float32(math.prod(shape[:-1]) ** -0.5)
            return scale * rng.standard_normal(shape, np.float32), np.zeros(shape[-1], np.float32)

        return [layer(shape) for shape in self.model.kernel_shapes]

    def alike(self) -> "Workload":
        """Returns the same training, except that nothing is drawn.

        Each step takes all examples of a client, and each round all clients, so that systems that
        draw differently have equal results.
        """
        return self._replace(num_clients=self.cohort_size, num_examples=self.batch_size)

    def all_examples(self, num_rounds: int) -> np.ndarray:
        """Returns the batches of `alike`, `[T, S, E, B]`."""
        shape = (num_rounds, self.cohort_size, self.num_steps, self.batch_size)
        return np.broadcast_to(np.arange(self.batch_size), shape)


WORKLOADS = {
    name: Workload(*workload)
    for name, workload in workloads.WORKLOADS.items()
    if isinstance(workload, workloads.LearningWorkload)
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


def ours_rounds(
    workload: Workload,
    num_rounds: int,
    client_map: ClientMap = "auto",
    devices: Sequence[Any] | None = None,
) -> Run:
    """Sets up `fedjax_mm`, with the data and the parameters of seed 0, and its own draws."""
    model = workload.model
    to_ours = np.asarray if model.channels else np.transpose
    layers = [{"kernel": to_ours(kernel), "bias": bias} for kernel, bias in workload.params(0)]
    num_hidden = len(model.widths) - 1
    dense = ["dense"] if model.channels else [f"dense{1 + i}" for i in range(num_hidden)]
    names = [*dense, "classes"]
    params = dict(zip(names, layers[-len(names) :], strict=True))
    for i, layer in enumerate(layers[: -len(names)], start=1):
        params[f"convolution{i}"] = {"kernel": layer["kernel"]}
        params[f"bias{i}"] = {"bias": layer["bias"]}
    workload = workload._replace(num_rounds=num_rounds)
    program = bench.build(workload, "FedAvg", client_map, devices, params)

    def run() -> Params:
        ours = program.run()
        first = [
            (ours[f"convolution{1 + i}"]["kernel"], ours[f"bias{1 + i}"]["bias"])
            for i in range(len(model.channels))
        ]
        rest = [(to_ours(ours[name]["kernel"]), ours[name]["bias"]) for name in names]
        return [(np.asarray(kernel), np.asarray(bias)) for kernel, bias in first + rest]

    return run
