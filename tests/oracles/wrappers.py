"""NumPy float64 oracle of FedAvg under absence, lateness, compression and clipping, in plain loops.

Clients descend ``F_k(w) = 1/2 |w - target_k|^2`` by E full gradients, and all have weight 1.
Nothing here is shared with the library under test.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def train(w: Array, target: Array, rate: float, steps: int) -> Array:
    own = w.copy()
    for _ in range(steps):
        own = own - rate * (own - target)
    return own - w


def fedavg(
    w: Array,
    targets: Array,
    rate: float,
    steps: int,
    groups: Sequence[Sequence[int]],
    message: Callable[[int, Array], Array] = lambda client, update: update,
    divisor: float | None = None,
) -> list[Array]:
    """The models after each round. A round without participants is idle.

    Args:
      w: the initial model.
      targets: of the clients.
      rate: eta.
      steps: E.
      groups: the participants of each round.
      message: maps a client and its update to its message.
      divisor: of the sum, by default the number of participants.
    """
    models = [w]
    for group in groups:
        total = np.zeros_like(w)
        for client in group:
            total = total + message(client, train(w, targets[client], rate, steps))
        if group:
            w = w + total / (len(group) if divisor is None else divisor)
        models.append(w)
    return models


def top_k(v: Array, k: int) -> Array:
    """The k largest coordinates, where ties go to lower indices."""
    order = sorted(range(len(v)), key=lambda i: (-abs(v[i]), i))
    sent = np.zeros_like(v)
    for i in order[:k]:
        sent[i] = v[i]
    return sent


def scaled_sign(v: Array) -> Array:
    """The signs times the mean absolute value."""
    return np.array([np.sign(x) for x in v]) * np.abs(v).sum() / len(v)


class Feedback:
    """Error feedback: a client sends C(e + v) and keeps the rest."""

    def __init__(self, compress: Callable[[Array], Array], num_clients: int, size: int) -> None:
        self.compress, self.errors = compress, np.zeros((num_clients, size))

    def __call__(self, client: int, update: Array) -> Array:
        whole = self.errors[client] + update
        sent = self.compress(whole)
        self.errors[client] = whole - sent
        return sent


def clipped(v: Array, norm: float) -> Array:
    """The update, scaled down to a norm if it is longer."""
    length = np.sqrt(np.sum(v**2))
    return v if length <= norm else v * norm / length


def places(times: Sequence[float], numbers: Sequence[int]) -> list[int]:
    """The rank of each client by time, where ties go to lower numbers."""
    order = sorted(range(len(times)), key=lambda i: (times[i], numbers[i]))
    return [order.index(i) for i in range(len(times))]
