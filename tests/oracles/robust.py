"""NumPy float64 oracles of robust aggregation and attacks, in plain loops over clients.

Updates are lists of vectors, without padding. Ties go to the first client. Nothing here is shared
with the library under test.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def mean(x: Sequence[Array], weights: Sequence[float] | None = None) -> Array:
    a = [1.0] * len(x) if weights is None else list(weights)
    total = np.zeros_like(x[0])
    for weight, each in zip(a, x, strict=True):
        total = total + weight * each
    return total / sum(a)


def median(x: Sequence[Array]) -> Array:
    def of(values: list[float]) -> float:
        n, ordered = len(values), sorted(values)
        return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2

    return np.array([of([float(each[j]) for each in x]) for j in range(len(x[0]))])


def trimmed_mean(x: Sequence[Array], b: int) -> Array:
    kept = [sorted(float(each[j]) for each in x)[b : len(x) - b] for j in range(len(x[0]))]
    return np.array([sum(values) / len(values) for values in kept])


def squared(x: Array, y: Array) -> float:
    return sum(float(a - b) ** 2 for a, b in zip(x, y, strict=True))


def krum_scores(x: Sequence[Array], number: int) -> list[float]:
    """Sums of the squared distances to the `number` nearest others."""
    return [
        sum(sorted(squared(x[i], x[j]) for j in range(len(x)) if j != i)[:number])
        for i in range(len(x))
    ]


def multi_krum(x: Sequence[Array], f: int, m: int, weights: Sequence[float] | None = None) -> Array:
    scores = krum_scores(x, len(x) - f - 2)
    best = sorted(range(len(x)), key=lambda i: (scores[i], i))[:m]
    return mean([x[i] for i in best], None if weights is None else [weights[i] for i in best])


def bulyan_picks(x: Sequence[Array], f: int) -> list[int]:
    """Clients chosen by repeated Krum, in order."""
    left, picks = list(range(len(x))), []
    for _ in range(len(x) - 2 * f):
        scores = krum_scores([x[i] for i in left], max(1, len(left) - f - 2))
        best = min(range(len(left)), key=lambda i: scores[i])
        picks.append(left.pop(best))
    return picks


def bulyan(x: Sequence[Array], f: int, picks: Sequence[int] | None = None) -> Array:
    chosen = [x[i] for i in (bulyan_picks(x, f) if picks is None else picks)]
    middle, number = median(chosen), len(chosen) - 2 * f
    result = []
    for j in range(len(middle)):
        values = [float(each[j]) for each in chosen]
        near = sorted(range(len(values)), key=lambda i: abs(values[i] - middle[j]))[:number]
        result.append(sum(values[i] for i in near) / number)
    return np.array(result)


def geometric_median(
    x: Sequence[Array], steps: int, nu: float, weights: Sequence[float] | None = None
) -> Array:
    z = np.zeros_like(x[0])
    a = [1.0] * len(x) if weights is None else list(weights)
    for _ in range(steps):
        z = mean(
            x, [w / max(math.sqrt(squared(each, z)), nu) for w, each in zip(a, x, strict=True)]
        )
    return z


def centered_clipping(x: Sequence[Array], v: Array, tau: float, steps: int) -> Array:
    for _ in range(steps):
        moves = []
        for each in x:
            length = math.sqrt(squared(each, v))
            moves.append((each - v) * (min(1.0, tau / length) if length else 1.0))
        v = v + mean(moves)
    return v


def buckets(x: Sequence[Array], order: Sequence[int], size: int) -> list[Array]:
    """Means of `size` consecutive updates of a permutation."""
    return [mean([x[i] for i in order[first : first + size]]) for first in range(0, len(x), size)]


def mixed(x: Sequence[Array], f: int) -> list[Array]:
    """Means of the nearest n - f updates of each, itself included."""
    near = [
        sorted(range(len(x)), key=lambda j: (squared(each, x[j]), j))[: len(x) - f] for each in x
    ]
    return [mean([x[j] for j in group]) for group in near]


def fltrust(x: Sequence[Array], g: Array) -> Array:
    def norm(v: Array) -> float:
        return math.sqrt(squared(v, np.zeros_like(v)))

    trust, total = 0.0, np.zeros_like(g)
    for each in x:
        if norm(each) == 0:
            continue
        cosine = sum(float(a * b) for a, b in zip(each, g, strict=True)) / norm(each) / norm(g)
        trust += max(0.0, cosine)
        total = total + max(0.0, cosine) * norm(g) / norm(each) * each
    return total / trust if trust > 0 else total


def deviation(x: Sequence[Array]) -> Array:
    """Sample standard deviations of the coordinates."""
    middle = mean(x)
    squares: Any = sum((each - middle) ** 2 for each in x)
    return np.sqrt(squares / max(len(x) - 1, 1))


def is_stamped(j: int, share: float) -> bool:
    """Whether an attacker's example j has the patch: multiples of the golden ratio, modulo 1."""
    return j * (math.sqrt(5) - 1) / 2 % 1 < share


def with_patch(image: Array, size: int, value: float) -> Array:
    """An image [height, width] whose lower right corner has one value."""
    made = np.array(image, float)
    height, width = made.shape
    for row in range(height - size, height):
        for column in range(width - size, width):
            made[row, column] = value
    return made


def poisoned(
    images: Sequence[Array],
    labels: Sequence[int],
    *,
    target: int,
    size: int,
    value: float,
    share: float,
) -> tuple[list[Array], list[int]]:
    """What an attacker with a backdoor trains on."""
    seen, told = [], []
    for j, (image, label) in enumerate(zip(images, labels, strict=True)):
        hit = is_stamped(j, share)
        seen.append(with_patch(image, size, value) if hit else np.array(image, float))
        told.append(target if hit else label)
    return seen, told


def scores(w: Array, image: Array, num_classes: int) -> Array:
    """Logits of softmax regression with parameters (biases, kernel)."""
    bias, kernel = w[:num_classes], w[num_classes:].reshape(num_classes, -1)
    return np.array(
        [float(kernel[c] @ np.ravel(image)) + float(bias[c]) for c in range(num_classes)]
    )


def softmax_update(
    w: Array, images: Sequence[Array], labels: Sequence[int], num_classes: int, rate: float, E: int
) -> Array:
    """Local minus global parameters after E full gradient steps on the mean cross-entropy."""
    own = w.copy()
    for _ in range(E):
        total = np.zeros_like(own)
        for image, label in zip(images, labels, strict=True):
            z = scores(own, image, num_classes)
            p = np.exp(z - z.max())
            p = p / p.sum()
            p[label] -= 1
            total += np.concatenate([p, np.outer(p, np.ravel(image)).ravel()])
        own = own - rate * total / len(labels)
    return own - w


def attack_success(
    w: Array,
    images: Sequence[Array],
    labels: Sequence[int],
    num_classes: int,
    *,
    target: int,
    size: int,
    value: float,
) -> float:
    """Share of stamped images of the other classes that are classified as the target."""
    hits = [
        int(np.argmax(scores(w, with_patch(image, size, value), num_classes))) == target
        for image, label in zip(images, labels, strict=True)
        if label != target
    ]
    return sum(hits) / len(hits)
