"""Problems that compare methods with their NumPy loops on the same batches.

They are built once, in double precision.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from fedjax_mm.base import Batching, keys
from fedjax_mm.data import client_data
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.tasks import classification, least_squares
from fedjax_mm.tasks.networks import LogisticRegression
from tests.helpers import Featured
from tests.oracles import multi_model as reference
from tests.oracles.maxfl import Problem

SEED, MODELS, ROUNDS, BATCHES = 5, 2, 12, 12  # drawn for the oracle
LONG = 30  # rounds for methods with states
N, DIM, CLASSES, BATCH, RIDGE = 7, 4, 3, 3, 0.3


class Compared(NamedTuple):
    """A task of the library and the same problem for the oracle.

    Attributes:
      task: of the library.
      flat: maps parameters to vectors, with the same leading axes.
      start: maps vectors ``[models, d]`` to initial parameters.
      size: d.
      problem: maps a model's number and thresholds to the oracle's problem.
    """

    task: Any
    flat: Callable[[Any], np.ndarray]
    start: Callable[[np.ndarray], Any]
    size: int
    problem: Callable[[int, np.ndarray], Problem]


def examples(seed: int = 0) -> tuple[list, list, list, np.ndarray]:
    """Features, targets, labels and n_k of clients with 1 to 9 examples."""
    rng = np.random.default_rng(seed)
    counts = rng.permutation([1, 2, 4, 5, 7, 8, 9])
    features = [rng.normal(size=(n, DIM)) for n in counts]
    targets = [rng.normal(1.0, 2.0, size=n) for n in counts]
    labels = [rng.integers(0, CLASSES, n) for n in counts]
    return features, targets, labels, counts


@functools.cache
def all_rows() -> np.ndarray:
    """Rows within clients ``[M, LONG, N, batches, B]`` that such a task draws."""
    *_, counts = examples()
    clients = client_data([np.zeros(n) for n in counts])

    def rows(m: Any, t: Any, k: Any, i: Any) -> Any:
        (model_key,) = keys.model_keys(keys.round_key(jax.random.key(SEED), t), m[None])
        key = keys.client_key(model_key, k)
        return clients.batch(key, k, i, Batching(BATCH))[0] - clients.offsets[k]

    for place in (3, 2, 1, 0):
        rows = jax.vmap(rows, [0 if axis == place else None for axis in range(4)])
    numbers = np.arange(MODELS), np.arange(1, LONG + 1), np.arange(N), np.arange(BATCHES)
    return np.asarray(jax.jit(rows)(*(x.astype(np.int32) for x in numbers)))


def ridge_in_epochs(
    features: list, targets: list, how: Batching, num_rounds: int, **others: Any
) -> Problem:
    """The oracle's ridge regression of model 0, on the batches that such a task draws.

    Args:
      features: those of each client.
      targets: those of each client.
      how: how batches are drawn.
      num_rounds: the number of rounds.
      **others: further fields of the problem.
    """
    data, counts = reference.LeastSquares(features, targets, RIDGE), list(map(len, targets))
    rows = drawn_rows(counts, how, num_rounds, 24)

    def batch(t: int, k: int, i: int) -> list[int]:
        return [row for row, weight in zip(*rows(t, k, i), strict=True) if weight > 0]

    return Problem(
        lambda k, w, t, i: reference.least_squares_gradient(data, k, w, batch(t, k, i)),
        lambda k, w: reference.least_squares_gradient(data, k, w),
        lambda k, w: reference.least_squares_client_loss(data, k, w),
        np.array(counts, float),
        features=lambda k, t, i: [np.diag(x) for x in features[k][batch(t, k, i)]],
        **others,
    )


def drawn_rows(counts: Any, how: Batching, num_rounds: int, num_batches: int) -> Any:
    """Rows within clients of these sizes, and their weights, as a function of (t, k, i)."""
    clients = client_data([np.zeros(n) for n in counts])

    def draw(t: Any, k: Any, i: Any) -> Any:
        (model_key,) = keys.model_keys(keys.round_key(jax.random.key(SEED), t), np.zeros(1, int))
        drawn, weights = clients.batch(keys.client_key(model_key, k), k, i, how)
        return drawn - clients.offsets[k], weights

    for place in (2, 1, 0):
        draw = jax.vmap(draw, [0 if axis == place else None for axis in range(3)])
    numbers = np.arange(1, num_rounds + 1), np.arange(len(counts)), np.arange(num_batches)
    both = tuple(map(np.asarray, jax.jit(draw)(*(x.astype(np.int32) for x in numbers))))
    return lambda t, k, i: (both[0][t - 1, k, i], both[1][t - 1, k, i])


def logit_matrix(x: np.ndarray) -> np.ndarray:
    """A with ``A w = W x + b``, the logits."""
    return np.concatenate([np.eye(CLASSES), np.kron(np.eye(CLASSES), x)], axis=1)


class LogitFeatures(LogisticRegression):
    """Logistic regression with its logits as features, because a layer's inputs are constant."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        logits = super().__call__(x)
        self.sow("intermediates", "representation", logits)
        return logits


@functools.cache
def regression() -> Compared:
    """Ridge regression."""
    features, targets, _, counts = examples()
    task = Featured(least_squares(features, targets, ridge=RIDGE), N)
    data = reference.LeastSquares(features, targets, RIDGE)

    def problem(model: int, thresholds: np.ndarray) -> Problem:
        rows = all_rows()[model]
        return Problem(
            lambda k, w, t, i: reference.least_squares_gradient(data, k, w, rows[t - 1, k, i]),
            lambda k, w: reference.least_squares_gradient(data, k, w),
            lambda k, w: reference.least_squares_client_loss(data, k, w),
            counts.astype(float),
            thresholds,
            lambda k, t, i: [np.diag(x) for x in features[k][rows[t - 1, k, i]]],
        )

    return Compared(task, np.asarray, lambda w: w, DIM, problem)


@functools.cache
def softmax() -> Compared:
    """Multinomial logistic regression."""
    features, _, labels, counts = examples()
    clients = client_data(list(zip(features, labels, strict=True)))
    pool = FederatedData("seven", "synthetic", CLASSES, clients, clients)
    task = classification(pool, LogitFeatures(CLASSES))
    data = reference.Softmax(features, labels, CLASSES, sigmoid_head=False, reduction="mean")

    def loss(k: int, w: np.ndarray) -> float:
        pairs = zip(features[k], labels[k], strict=True)
        return float(np.mean([reference.softmax_loss(data, w, x, int(y)) for x, y in pairs]))

    def problem(model: int, thresholds: np.ndarray) -> Problem:
        rows = all_rows()[model]
        return Problem(
            lambda k, w, t, i: reference.softmax_gradient(data, k, w, rows[t - 1, k, i]),
            lambda k, w: reference.softmax_gradient(data, k, w, range(counts[k])),
            loss,
            counts.astype(float),
            thresholds,
            lambda k, t, i: [logit_matrix(x) for x in features[k][rows[t - 1, k, i]]],
        )

    def flat(params: Any) -> np.ndarray:
        bias, kernel = (np.asarray(params["classes"][name]) for name in ("bias", "kernel"))
        return np.concatenate([bias, kernel.reshape(*bias.shape[:-1], -1)], axis=-1)

    def start(w: np.ndarray) -> Any:
        kernel = w[:, CLASSES:].reshape(-1, CLASSES, DIM)
        return {"classes": {"bias": w[:, :CLASSES], "kernel": kernel}}

    return Compared(task, flat, start, CLASSES * (DIM + 1), problem)


PROBLEMS = {"least squares": regression, "softmax": softmax}
