"""FedAvg on factors of a change of a matrix, in NumPy float64 (Hu et al., 2022, section 4.1).

The logits of features x are ``x (W + s A B)``; the loss is the mean cross-entropy of a client.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def gradient(W: Array, features: Array, labels: NDArray[np.integer]) -> Array:
    """Gradient with respect to the whole matrix."""
    logits = features @ W
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    shares[np.arange(len(labels)), labels] -= 1
    change: Array = features.T @ shares / len(labels)
    return change


def fedavg(
    W: Array,
    A: Array,
    B: Array,
    scale: float,
    data: list[tuple[Array, NDArray[np.integer]]],
    learning_rate: float,
    steps: int,
    rounds: int,
) -> tuple[Array, Array]:
    """All clients take full-batch steps, and the server averages A and B by numbers of examples."""
    sizes = np.array([len(labels) for _, labels in data], float)
    for _ in range(rounds):
        factors = []
        for features, labels in data:
            a, b = A, B
            for _ in range(steps):
                G = gradient(W + scale * a @ b, features, labels)
                # d/da <G, s a b> = s G b', and d/db = s a' G, both at the old factors.
                a, b = a - learning_rate * scale * G @ b.T, b - learning_rate * scale * a.T @ G
            factors.append((a, b))
        shares = sizes / sizes.sum()
        A = sum(share * a for share, (a, _) in zip(shares, factors, strict=True))
        B = sum(share * b for share, (_, b) in zip(shares, factors, strict=True))
    return A, B
