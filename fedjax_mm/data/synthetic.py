"""Synthetic(alpha, beta): FedProx's and LEAF's generators, with heavy-tailed sample counts."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import numpy as np
from annotated_types import Ge
from jaxtyping import Float, Int64

from fedjax_mm.checks.annotations import Count, Fraction, TwoOrMore, checked
from fedjax_mm.data.clients import ClientData, flat_client_data
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.data.partition import generator as generator_of
from fedjax_mm.data.partition import seed_sequence

Generator = Literal["fedprox", "leaf"]

_TEST_FRACTION = {"fedprox": 0.1, "leaf": 0.4}
_BLOCK_EXAMPLES = 16_384  # examples to draw at a time, which does not affect the data
_LABEL_NOISE = 0.1  # LEAF's
_MODEL_SPREAD = 0.1  # LEAF's


@checked
def synthetic(
    num_clients: Count,
    *,
    alpha: Annotated[float, Ge(0)] = 1.0,
    beta: Annotated[float, Ge(0)] = 1.0,
    dim: Count = 60,
    num_classes: TwoOrMore = 5,
    seed: int = 0,
    generator: Generator = "fedprox",
    iid: bool = False,
    test_fraction: Fraction | None = None,
) -> FederatedData:
    """Draws Synthetic(alpha, beta), classification tasks that differ between clients.

    ``y = argmax(x W_k + b_k)`` with x ~ N(v_k, diag(j^-1.2)), and n_k from `sample_counts`. FedProx
    draws u_k ~ N(0, alpha), B_k ~ N(0, beta), v_k[j] ~ N(B_k, 1) and W_k, b_k ~ N(u_k, 1); the
    second argument of N is a standard deviation. With `iid`, W, b ~ N(0, 1) are the same for all
    clients and v_k[j] = B_k. LEAF draws B_k ~ N(0, 1), v_k[j] ~ N(B_k, 1), one Q ~ N(0, 1) of shape
    (dim + 1) x classes and W_k, b_k = Q m_k, where m_k ~ N(mu, 0.1), mu ~ N(loc, 1), loc ~ N(0, 1);
    N(0, 0.1) is added to each logit. LEAF's constant feature is left out, because models have a
    bias.

    The first clients do not change when `num_clients` grows.

    Args:
      num_clients: N, the number of clients.
      alpha: the spread of u_k, only for FedProx's generator. As published, u_k shifts all logits of
        an example equally, so alpha does not change any label. W_k and b_k still differ between
        clients.
      beta: how much the clients' features differ, only for FedProx's generator.
      dim: d, the number of features.
      num_classes: C, the number of classes.
      seed: the seed of all draws.
      generator: "fedprox" or "leaf".
      iid: whether to use FedProx's variant with one model for all clients.
      test_fraction: the fraction of each client's examples for testing; defaults to 0.1 (FedProx)
        or 0.4 (LEAF). Every client has at least one training and one test example.

    Raises:
      ValueError: if an argument is out of range, or LEAF's generator is given alpha, beta or iid.

    Example:
      >>> data = synthetic(100, alpha=0.5, beta=0.5, dim=30, num_classes=10)
      >>> x, y = data.train.examples
      >>> len(data.train.counts), x.shape[1], len(x) == data.train.counts.sum()
      (100, 30, Array(True, dtype=bool))

    Reference:
      Li et al., "Federated optimization in heterogeneous networks", 2020 (FedProx); Caldas et al.,
      "LEAF: a benchmark for federated settings", 2018.
    """
    if generator == "leaf" and (alpha != 1 or beta != 1 or iid):
        raise ValueError(
            "LEAF's generator has no alpha, beta and iid; leave them at their defaults"
        )
    fraction = _TEST_FRACTION[generator] if test_fraction is None else test_fraction
    counts = sample_counts(num_clients, generator=generator, seed=seed)
    law = _Law(alpha, beta, dim, num_classes, generator, iid)
    # Add 1e-9, because in floating point (1 - 0.4) * n may fall just below an integer.
    train_counts = np.clip(((1 - fraction) * counts + 1e-9).astype(np.int64), 1, counts - 1)
    name = f"synthetic({alpha:g}, {beta:g})" + (", iid" if iid else "")
    name = "synthetic (LEAF)" if generator == "leaf" else name
    train = _split(law, train_counts, seed, 0)
    test = _split(law, counts - train_counts, seed, 1)
    return FederatedData(name, "synthetic", num_classes, train, test)


@checked
def sample_counts(
    num_clients: Count, *, generator: Generator = "fedprox", seed: int = 0
) -> Int64[np.ndarray, " clients"]:
    """Draws each client's number of examples in `synthetic`, n_k, including test examples.

    FedProx: ``int(LogNormal(4, 2)) + 50``; LEAF: ``min(int(LogNormal(3, 2)) + 5, 1000)``.

    Args:
      num_clients: N, the number of clients.
      generator: "fedprox" or "leaf".
      seed: the seed of `synthetic`.

    Raises:
      ValueError: if `num_clients` is not positive, or the generator is unknown.

    Example:
      >>> int(sample_counts(1000).min()) >= 50, int(sample_counts(1000, generator="leaf").max())
      (True, 1000)
    """
    rng = _stream(seed, 0)
    if generator == "fedprox":
        return rng.lognormal(4, 2, num_clients).astype(np.int64) + 50
    return np.minimum(rng.lognormal(3, 2, num_clients).astype(np.int64) + 5, 1000)


@dataclasses.dataclass(frozen=True)
class _Law:
    """The distribution of clients and examples that the arguments of `synthetic` define."""

    alpha: float
    beta: float
    dim: int
    num_classes: int
    generator: Generator
    iid: bool


class _Clients(NamedTuple):
    """Parameters of several clients' example distributions."""

    means: Float[np.ndarray, "clients dim"]
    weights: Float[np.ndarray, "clients dim classes"]
    biases: Float[np.ndarray, "clients classes"]


def _split(law: _Law, counts: Int64[np.ndarray, " clients"], seed: int, split: int) -> ClientData:
    """Draws the training (0) or the test (1) examples of all clients."""
    draw_clients = _clients(law, seed)
    features, noise = _stream(seed, 3, split), _stream(seed, 4, split)
    decay = (np.arange(1, law.dim + 1) ** -0.6).astype(np.float32)
    x = np.empty((counts.sum(), law.dim), np.float32)
    y = np.empty(len(x), np.int32)
    ends = np.cumsum(counts)
    first = row = 0
    # Draw clients in blocks to bound memory. Read every stream in client order, so that the data do
    # not depend on the block size.
    while first < len(counts):
        last = max(first + 1, int(np.searchsorted(ends, row + _BLOCK_EXAMPLES, side="right")))
        rows, block = slice(row, int(ends[last - 1])), counts[first:last]
        clients = draw_clients(last - first)
        features.standard_normal(out=x[rows], dtype=np.float32)
        x[rows] *= decay
        x[rows] += np.repeat(clients.means.astype(np.float32), block, axis=0)
        # Use double precision, so that no label depends on the rounding of a library's matrix
        # product.
        wide, logits = x[rows].astype(np.float64), np.repeat(clients.biases, block, axis=0)
        block_ends = np.cumsum(block)
        for W, start, end in zip(clients.weights, block_ends - block, block_ends, strict=True):
            logits[start:end] += wide[start:end] @ W
        if law.generator == "leaf":
            logits += _LABEL_NOISE * noise.standard_normal(logits.shape)
        y[rows] = logits.argmax(axis=1)
        first, row = last, rows.stop
    return flat_client_data((x, y), counts)


def _clients(law: _Law, seed: int) -> Callable[[int], _Clients]:
    """Makes a function that draws the next `n` clients."""
    shared, rng = _stream(seed, 1), _stream(seed, 2)
    d, C = law.dim, law.num_classes
    loc, offset = shared.standard_normal(2)
    Q = shared.standard_normal((d + 1, C))

    def fedprox(num_clients: int) -> _Clients:
        z = rng.standard_normal((num_clients, 2 + d + d * C + C))
        u, B = law.alpha * z[:, :1], law.beta * z[:, 1:2]
        W = (u + z[:, d + 2 : -C]).reshape(num_clients, d, C)
        return _Clients(B + z[:, 2 : d + 2], W, u + z[:, -C:])

    def one_model(num_clients: int) -> _Clients:
        B = law.beta * rng.standard_normal((num_clients, 1))
        models = np.broadcast_to(Q, (num_clients, d + 1, C))
        return _Clients(np.repeat(B, d, axis=1), models[:, 1:], models[:, 0])

    def leaf(num_clients: int) -> _Clients:
        z = rng.standard_normal((num_clients, 2 + d))
        m = float(loc + offset) + _MODEL_SPREAD * z[:, 0]
        models = m[:, None, None] * Q
        return _Clients(z[:, 1:2] + z[:, 2:], models[:, 1:], models[:, 0])

    if law.generator == "leaf":
        return leaf
    return one_model if law.iid else fedprox


def _stream(seed: int, *key: int) -> np.random.Generator:
    # The first key selects an independent stream: 0 for counts, 1 for shared parameters, 2 for
    # clients, 3 for features, 4 for noise.
    return generator_of(seed_sequence(seed, *key))
