"""Synthetic(alpha, beta): the generators of FedProx and of LEAF, heavy-tailed sample counts."""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float, Float32, Int64

from fedjax_mm.checks import check_count
from fedjax_mm.data.clients import ClientData, flat_client_data
from fedjax_mm.data.federated import FederatedData

Generator = Literal["fedprox", "leaf"]

_TEST_FRACTION = {"fedprox": 0.1, "leaf": 0.4}
_BLOCK_EXAMPLES = 16_384  # drawn at once; the data do not depend on it
_LABEL_NOISE = 0.1  # LEAF's
_MODEL_SPREAD = 0.1  # LEAF's


def synthetic(
    num_clients: int,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    dim: int = 60,
    num_classes: int = 5,
    seed: int = 0,
    generator: Generator = "fedprox",
    iid: bool = False,
    test_fraction: float | None = None,
) -> FederatedData:
    """Synthetic(alpha, beta): classification tasks that differ between clients.

    ``y = argmax(x W_k + b_k)`` with x ~ N(v_k, diag(j^-1.2)), and n_k from `sample_counts`. FedProx
    draws u_k ~ N(0, alpha), B_k ~ N(0, beta), v_k[j] ~ N(B_k, 1) and W_k, b_k ~ N(u_k, 1); the
    second argument of N is a standard deviation. With `iid`, W, b ~ N(0, 1) are the same for all
    clients and v_k[j] = B_k. LEAF draws B_k ~ N(0, 1), v_k[j] ~ N(B_k, 1), one Q ~ N(0, 1) of shape
    (dim + 1) x classes and W_k, b_k = Q m_k, where m_k ~ N(mu, 0.1), mu ~ N(loc, 1), loc ~ N(0, 1);
    N(0, 0.1) is added to each logit, and its constant feature is left out: models bring a bias.

    The first clients do not change when `num_clients` grows.

    Args:
      num_clients: N.
      alpha: spread of u_k; FedProx's generator only. As published, u_k moves all logits of an
        example alike, so alpha does not change a label: W_k and b_k differ between clients anyway.
      beta: how much the clients' features differ; FedProx's generator only.
      dim: d, the number of features.
      num_classes: C.
      seed: of all draws.
      generator: "fedprox", or LEAF's, "leaf".
      iid: FedProx's variant with one model for all clients.
      test_fraction: of each client's examples; by default 0.1 (FedProx) or 0.4 (LEAF). Every client
        has at least one training and one test example.

    Raises:
      ValueError: if an argument is out of its range, or LEAF's generator is given alpha, beta, iid.

    Example:
      >>> data = synthetic(100, alpha=0.5, beta=0.5, dim=30, num_classes=10)
      >>> x, y = data.train.examples
      >>> len(data.train.counts), x.shape[1], len(x) == data.train.counts.sum()
      (100, 30, Array(True, dtype=bool))

    Reference:
      Li et al., "Federated optimization in heterogeneous networks", 2020 (FedProx); Caldas et al.,
      "LEAF: a benchmark for federated settings", 2018.
    """
    _check(alpha, beta, dim, num_classes, generator, iid)
    fraction = _TEST_FRACTION[generator] if test_fraction is None else test_fraction
    if not 0 < fraction < 1:
        raise ValueError(f"test_fraction is {test_fraction}; it must lie between 0 and 1")
    counts = sample_counts(num_clients, generator=generator, seed=seed)
    law = _Law(alpha, beta, dim, num_classes, generator, iid)
    # 1e-9: 0.6 * 5 is 3, whatever the last bit of 1 - 0.4.
    train_counts = np.clip(((1 - fraction) * counts + 1e-9).astype(np.int64), 1, counts - 1)
    return FederatedData(
        _name(law),
        "synthetic",
        num_classes,
        _split(law, train_counts, seed, 0),
        _split(law, counts - train_counts, seed, 1),
    )


def sample_counts(
    num_clients: int, *, generator: Generator = "fedprox", seed: int = 0
) -> Int64[np.ndarray, " clients"]:
    """The numbers of examples n_k, training and test, that `synthetic` gives its clients.

    FedProx: ``int(LogNormal(4, 2)) + 50``; LEAF: ``min(int(LogNormal(3, 2)) + 5, 1000)``.

    Args:
      num_clients: N.
      generator: "fedprox" or "leaf".
      seed: that of `synthetic`.

    Raises:
      ValueError: if `num_clients` is not positive, or the generator is unknown.

    Example:
      >>> int(sample_counts(1000).min()) >= 50, int(sample_counts(1000, generator="leaf").max())
      (True, 1000)
    """
    check_count("num_clients", num_clients)
    _check_generator(generator)
    rng = _stream(seed, 0)
    if generator == "fedprox":
        return rng.lognormal(4, 2, num_clients).astype(np.int64) + 50
    return np.minimum(rng.lognormal(3, 2, num_clients).astype(np.int64) + 5, 1000)


@dataclasses.dataclass(frozen=True)
class _Law:
    """The arguments of `synthetic` that say how clients and examples are drawn."""

    alpha: float
    beta: float
    dim: int
    num_classes: int
    generator: Generator
    iid: bool


class _Clients(NamedTuple):
    """What the examples of some clients are drawn from."""

    means: Float[np.ndarray, "clients dim"]
    weights: Float[np.ndarray, "clients dim classes"]
    biases: Float[np.ndarray, "clients classes"]


def _split(law: _Law, counts: Int64[np.ndarray, " clients"], seed: int, split: int) -> ClientData:
    """The training (0) or the test (1) examples of all clients.

    Some clients at a time, so that memory stays bounded; every stream is read in the order of the
    clients, so the blocks leave no trace in the data.
    """
    draw = _clients(law, seed)
    features, noise = _stream(seed, 3, split), _stream(seed, 4, split)
    x = np.empty((counts.sum(), law.dim), np.float32)
    y = np.empty(len(x), np.int32)
    ends = np.cumsum(counts)
    first = row = 0
    while first < len(counts):
        last = max(first + 1, int(np.searchsorted(ends, row + _BLOCK_EXAMPLES, side="right")))
        rows, block = slice(row, int(ends[last - 1])), counts[first:last]
        clients = draw(last - first)
        _fill_features(x[rows], clients, block, features)
        y[rows] = _labels(x[rows], clients, block, noise if law.generator == "leaf" else None)
        first, row = last, rows.stop
    return flat_client_data((x, y), counts)


def _clients(law: _Law, seed: int) -> Callable[[int], _Clients]:
    """A function that draws the next so many clients."""
    shared, rng = _stream(seed, 1), _stream(seed, 2)
    if law.generator == "fedprox" and not law.iid:
        return lambda num_clients: _fedprox(law, num_clients, rng)
    loc, offset = shared.standard_normal(2)
    model = shared.standard_normal((law.dim + 1, law.num_classes))
    if law.iid:
        return lambda num_clients: _one_model(law, num_clients, rng, model)
    return lambda num_clients: _leaf(law, num_clients, rng, model, float(loc + offset))


def _fedprox(law: _Law, num_clients: int, rng: np.random.Generator) -> _Clients:
    d, C = law.dim, law.num_classes
    z = rng.standard_normal((num_clients, 2 + d + d * C + C))
    u, B = law.alpha * z[:, :1], law.beta * z[:, 1:2]
    v = B + z[:, 2 : d + 2]
    W = (u + z[:, d + 2 : -C]).reshape(num_clients, d, C)
    return _Clients(v, W, u + z[:, -C:])


def _one_model(
    law: _Law,
    num_clients: int,
    rng: np.random.Generator,
    model: Float[np.ndarray, "inputs classes"],
) -> _Clients:
    """FedProx's iid variant: v_k = B_k 1."""
    B = law.beta * rng.standard_normal((num_clients, 1))
    v = np.repeat(B, law.dim, axis=1)
    W = np.broadcast_to(model[1:], (num_clients, law.dim, law.num_classes))
    return _Clients(v, W, np.broadcast_to(model[0], (num_clients, law.num_classes)))


def _leaf(
    law: _Law,
    num_clients: int,
    rng: np.random.Generator,
    Q: Float[np.ndarray, "inputs classes"],
    mean: float,
) -> _Clients:
    z = rng.standard_normal((num_clients, 2 + law.dim))
    m = mean + _MODEL_SPREAD * z[:, 0]
    v = z[:, 1:2] + z[:, 2:]
    model = m[:, None, None] * Q
    return _Clients(v, model[:, 1:], model[:, 0])


def _fill_features(
    x: Float32[np.ndarray, "examples dim"],
    clients: _Clients,
    counts: Int64[np.ndarray, " clients"],
    rng: np.random.Generator,
) -> None:
    """Writes draws of N(v_k, diag(j^-1.2)) into x."""
    rng.standard_normal(out=x, dtype=np.float32)
    x *= (np.arange(1, x.shape[1] + 1) ** -0.6).astype(np.float32)
    x += np.repeat(clients.means.astype(np.float32), counts, axis=0)


def _labels(
    x: Float32[np.ndarray, "examples dim"],
    clients: _Clients,
    counts: Int64[np.ndarray, " clients"],
    noise: np.random.Generator | None,
) -> Int64[np.ndarray, " examples"]:
    """The argmax of x W_k + b_k, in double precision: no label hangs on a library's last bit."""
    logits = np.repeat(clients.biases, counts, axis=0)
    wide = x.astype(np.float64)
    ends = np.cumsum(counts)
    for W, start, end in zip(clients.weights, ends - counts, ends, strict=True):
        logits[start:end] += wide[start:end] @ W
    if noise is not None:
        logits += _LABEL_NOISE * noise.standard_normal(logits.shape)
    return logits.argmax(axis=1)


def _stream(seed: int, *key: int) -> np.random.Generator:
    """An independent stream: 0 counts, 1 what clients share, 2 clients, 3 features, 4 noise."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


def _name(law: _Law) -> str:
    if law.generator == "leaf":
        return "synthetic (LEAF)"
    return f"synthetic({law.alpha:g}, {law.beta:g})" + (", iid" if law.iid else "")


def _check(
    alpha: float, beta: float, dim: int, num_classes: int, generator: Generator, iid: bool
) -> None:
    _check_generator(generator)
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not 0 <= value < np.inf:
            raise ValueError(f"{name} is {value}; it is a standard deviation, 0 or more")
    check_count("dim", dim)
    check_count("num_classes", num_classes)
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}; there must be 2 or more")
    if generator == "leaf" and (alpha != 1 or beta != 1 or iid):
        raise ValueError(
            "LEAF's generator has no alpha, beta and iid; leave them at their defaults"
        )


def _check_generator(generator: str) -> None:
    if generator not in get_args(Generator):
        raise ValueError(f"generator is {generator!r}; it must be 'fedprox' or 'leaf'")
