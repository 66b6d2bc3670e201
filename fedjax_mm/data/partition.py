"""Partitions of examples among clients, as one array of row indices per client.

Every partitioner takes ``labels [examples]``, the number of clients and a seed. Only `iid_share`
may assign an example to several clients.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from annotated_types import Ge, Gt
from jaxtyping import Float, Int64

from fedjax_mm.checks.annotations import Count, Percent, check_argument, checked
from fedjax_mm.checks.values import check_between

__all__ = [
    "Parts",
    "by_id",
    "dirichlet",
    "dirichlet_clients",
    "extended_dirichlet",
    "iid",
    "iid_clients",
    "iid_share",
    "label_clusters",
    "quantity_skew",
    "shards",
    "sizes",
]

Parts = list[np.ndarray]
"""The rows of each client's examples."""

SizeLaw: TypeAlias = Literal["equal", "linear", "square", "exponential", "lognormal", "dirichlet"]
"""A law of the clients' sizes."""

_MAX_DRAWS = 1000


@checked
def iid(labels: np.ndarray, num_clients: Count, *, seed: int = 0) -> Parts:
    """Divides all examples at random among clients, with sizes that differ by at most 1.

    Args:
      labels: ``[examples]``.
      num_clients: N, the number of clients.
      seed: the seed of the draw.

    Raises:
      ValueError: if there are fewer examples than clients.

    Example:
      >>> [len(rows) for rows in iid(np.zeros(7), 3)]
      [3, 2, 2]
    """
    _check(labels, num_clients)
    return np.array_split(generator(seed).permutation(len(labels)), num_clients)


@checked
def dirichlet(
    labels: np.ndarray,
    num_clients: Count,
    alpha: Annotated[float, Gt(0)],
    *,
    min_examples: Count = 1,
    seed: int = 0,
) -> Parts:
    """Divides the examples of each label among clients in proportions drawn from Dirichlet(alpha).

    The smaller alpha is, the fewer clients share a label. The proportions of all labels are redrawn
    until every client has at least `min_examples`.

    Args:
      labels: ``[examples]``.
      num_clients: N, the number of clients.
      alpha: the concentration parameter.
      min_examples: the minimum number of examples per client.
      seed: the seed of the draw.

    Raises:
      ValueError: if alpha is not positive, or no draw gives every client `min_examples`.

    Example:
      >>> parts = dirichlet(np.arange(1000) % 10, 5, alpha=0.5, min_examples=50)
      >>> sum(len(rows) for rows in parts)
      1000

    Reference:
      Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution", 2019; divided
      by label as in Yurochkin et al., "Bayesian nonparametric federated learning", 2019.
    """
    _check(labels, num_clients, examples_per_client=min_examples)
    rng = generator(seed)
    by_label = [rng.permutation(rows) for rows in by_id(labels)]
    sizes = np.array([len(rows) for rows in by_label])

    def draw() -> np.ndarray:
        shares = rng.dirichlet(np.full(num_clients, alpha), len(sizes))
        cuts = (np.cumsum(shares[:, :-1], axis=1) * sizes[:, None]).astype(np.int64)
        return np.diff(cuts, axis=1, prepend=0, append=sizes[:, None])

    return _divided(by_label, draw, alpha, min_examples)


def _divided(
    by_label: Parts, draw: Callable[[], np.ndarray], alpha: float, min_examples: int
) -> Parts:
    """Draws counts ``[labels, clients]`` until all clients have enough, and divides the rows."""
    for _ in range(_MAX_DRAWS):
        counts = draw()
        if counts.sum(axis=0).min() >= min_examples:
            break
    else:
        raise ValueError(
            f"in {_MAX_DRAWS} draws of Dirichlet({alpha}) a client had fewer than {min_examples} "
            "examples; raise alpha, or lower min_examples or num_clients"
        )
    cuts = np.cumsum(counts[:, :-1], axis=1)
    pieces = [np.split(rows, cut) for rows, cut in zip(by_label, cuts, strict=True)]
    return [np.concatenate(mine) for mine in zip(*pieces, strict=True)]


@checked
def dirichlet_clients(
    labels: np.ndarray, num_clients: Count, alpha: Annotated[float, Gt(0)], *, seed: int = 0
) -> Parts:
    """Gives every client the same number of examples, with different label proportions.

    Each client draws its label proportions from a symmetric Dirichlet distribution with
    concentration alpha, and then its examples without replacement, with the proportions
    renormalized over the labels that remain. Clients draw in random order, so that no client is
    always last. All examples are used, and sizes differ by at most 1.

    Args:
      labels: ``[examples]``.
      num_clients: N, the number of clients.
      alpha: the concentration parameter; the smaller it is, the fewer labels a client has.
      seed: the seed of all draws.

    Raises:
      ValueError: if alpha is not positive, or there are fewer examples than clients.

    Example:
      >>> parts = dirichlet_clients(np.arange(1000) % 10, 5, alpha=0.5)
      >>> [len(rows) for rows in parts]
      [200, 200, 200, 200, 200]

    Reference:
      Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution", 2019.
    """
    _check(labels, num_clients)
    rng = generator(seed)
    by_label = [rng.permutation(rows) for rows in by_id(labels)]
    left = np.array([len(rows) for rows in by_label])
    sizes = [len(piece) for piece in np.array_split(np.arange(len(labels)), num_clients)]
    parts: Parts = [np.empty(0, np.int64)] * num_clients
    for client in rng.permutation(num_clients):
        taken = _drawn(rng, sizes[client], rng.dirichlet(np.full(len(left), alpha)), left)
        pieces = zip(by_label, left, taken, strict=True)
        parts[client] = np.concatenate([rows[end - n : end] for rows, end, n in pieces])
        left = left - taken
    return parts


def _drawn(rng: np.random.Generator, size: int, shares: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Draws the number of examples of each label that a client gets."""
    taken = np.zeros_like(left)
    # This takes few passes, because each pass draws all missing examples or exhausts a label.
    while missing := size - taken.sum():
        is_left = taken < left
        weights = np.where(is_left, shares, 0.0)
        if not weights.sum() > 0:  # a small alpha may make all shares 0
            weights = np.where(is_left, left - taken, 0.0)
        drawn = rng.multinomial(missing, weights / weights.sum())
        taken = np.minimum(taken + drawn, left)
    return taken


@checked
def extended_dirichlet(
    labels: np.ndarray,
    num_clients: Count,
    alpha: Annotated[float, Gt(0)],
    *,
    labels_per_client: Count = 2,
    min_examples: Count = 1,
    seed: int = 0,
) -> Parts:
    """Gives every client a few labels, and examples of them in proportions from Dirichlet(alpha).

    Every client draws C of the K labels; all draw again until every label has at least
    ``max(floor(C N / K / 5), 1)`` clients. Each label's examples are then divided among its clients
    in proportions p ~ Dirichlet(alpha). A client with n / N or more examples gets none of later
    labels, unless this holds for all clients of a label; the last client of a label gets what
    rounding leaves. Proportions are redrawn until every client has `min_examples`. With C = K it is
    a Dirichlet partition with such a balance of sizes, and with a large alpha and C = 1 clients
    have one label and almost equal shares of it.

    Args:
      labels: ``[examples]``.
      num_clients: N, the number of clients.
      alpha: the concentration parameter.
      labels_per_client: C, the maximum number of labels per client.
      min_examples: the minimum number of examples per client; 10 in the authors' code.
      seed: the seed of all draws.

    Raises:
      ValueError: if alpha is not positive, clients would have more labels than there are, or no
        draw gives every label clients and every client `min_examples`.

    Example:
      >>> labels = np.arange(1000) % 10
      >>> parts = extended_dirichlet(labels, 20, alpha=10.0, labels_per_client=2)
      >>> max(len(set(labels[rows].tolist())) for rows in parts)
      2

    Reference:
      Li and Lyu, "Convergence analysis of sequential federated learning on heterogeneous data",
      2023, appendix, and the code of its authors.
    """
    _check(labels, num_clients, examples_per_client=min_examples)
    rng = generator(seed)
    by_label = [rng.permutation(rows) for rows in by_id(labels)]
    num_labels = len(by_label)
    check_between("labels_per_client", labels_per_client, 1, num_labels, "the number of labels")
    least = max(labels_per_client * num_clients // num_labels // 5, 1)
    if labels_per_client * num_clients < num_labels:
        raise ValueError(
            f"{num_clients} clients with {labels_per_client} labels each cannot have all "
            f"{num_labels} labels; raise labels_per_client or num_clients"
        )
    for _ in range(_MAX_DRAWS):
        order = np.argsort(rng.random((num_clients, num_labels)), axis=1)
        has_label = (order < labels_per_client).T  # [labels, clients]
        if has_label.sum(1).min() >= least:
            break
    else:
        raise ValueError(
            f"in {_MAX_DRAWS} draws a label had fewer than {least} clients; raise "
            "labels_per_client or num_clients"
        )
    sizes = [len(rows) for rows in by_label]
    draw = partial(_balanced_counts, rng, alpha, sizes, has_label)
    return _divided(by_label, draw, alpha, min_examples)


def _balanced_counts(
    rng: np.random.Generator, alpha: float, num_examples: Sequence[int], has_label: np.ndarray
) -> Int64[np.ndarray, "labels clients"]:
    limit = sum(num_examples) / has_label.shape[1]
    counts = np.zeros(has_label.shape, np.int64)
    for label, size in enumerate(num_examples):
        mine = np.flatnonzero(has_label[label])
        shares = rng.dirichlet(np.full(len(mine), alpha))
        is_below = counts[:, mine].sum(0) < limit
        if not (shares * is_below).sum() > 0:  # also if a small alpha makes all these shares 0
            is_below[:] = True
        shares = shares * is_below / (shares * is_below).sum()
        counts[label, mine] = (shares * size).astype(np.int64)
        counts[label, mine[-1]] += size - counts[label].sum()
    return counts


@checked
def sizes(
    num_examples: Count,
    num_clients: Count,
    law: SizeLaw,
    *,
    sigma: Annotated[float, Gt(0)] = 1.0,
    beta: Annotated[float, Gt(0)] = 0.5,
    min_examples: Count = 1,
    shuffled: bool = True,
    seed: int = 0,
) -> Int64[np.ndarray, " clients"]:
    """Divides a number of examples among clients of unequal sizes.

    Client i of 1, ..., N gets ``n f_i / sum_j f_j`` examples, rounded by the largest remainder,
    with f_i = 1 (equal), i (linear), i^2 (square), e^i (exponential), e^(sigma z_i) with standard
    normal z_i (lognormal), or f ~ Dirichlet(beta) (dirichlet). Clients below `min_examples` get
    exactly `min_examples`, and the others divide the remaining examples by the same law.

    Args:
      num_examples: n, the number of examples.
      num_clients: N, the number of clients.
      law: f, the law of the sizes.
      sigma: the standard deviation of the logarithm of a lognormal size.
      beta: the concentration parameter of Dirichlet sizes; the smaller, the less equal.
      min_examples: the minimum number of examples per client.
      shuffled: whether clients get the sizes at random, instead of in the order of the law.
      seed: the seed of all draws.

    Returns:
      Sizes ``[clients]`` with the sum n.

    Raises:
      ValueError: if the law is unknown, sigma or beta is not positive, or there are fewer than
        ``N min_examples`` examples.

    Example:
      >>> sizes(100, 5, "linear", shuffled=False).tolist()
      [7, 13, 20, 27, 33]

    Reference:
      Li et al., "Federated learning on non-IID data silos", 2022, for Dirichlet sizes.
    """
    if num_examples < num_clients * min_examples:
        raise ValueError(
            f"{num_examples} examples are too few for {num_clients} clients with {min_examples} or "
            "more each; lower num_clients or min_examples"
        )
    draws, order = (np.random.Generator(np.random.PCG64(x)) for x in seed_sequence(seed).spawn(2))
    place = np.arange(1, num_clients + 1)
    # Scale by the largest value, because e^i is infinite for more than 709 clients.
    share = {
        "equal": lambda: np.ones(num_clients),
        "linear": lambda: place / num_clients,
        "square": lambda: (place / num_clients) ** 2,
        "exponential": lambda: np.exp(place - float(num_clients)),
        "lognormal": lambda: _exp(sigma * draws.standard_normal(num_clients)),
        "dirichlet": lambda: draws.dirichlet(np.full(num_clients, beta)),
    }[law]()
    quotas = share / share.sum() * num_examples
    is_small = np.zeros(num_clients, bool)
    # Repeat, because the examples that small clients gain may leave others below the minimum.
    while ((made := _rounded(quotas)) < min_examples).any():
        is_small |= made < min_examples
        rest = num_examples - is_small.sum() * min_examples
        quotas = np.where(is_small, min_examples, share / share[~is_small].sum() * rest)
    return order.permutation(made) if shuffled else made


def _exp(x: np.ndarray) -> np.ndarray:
    return np.exp(x - x.max())


def _rounded(quotas: Float[np.ndarray, " clients"]) -> Int64[np.ndarray, " clients"]:
    """Rounds numbers with a whole sum by the largest remainder, and breaks ties by position."""
    floors = np.floor(quotas + 1e-9).astype(np.int64)
    missing = round(float(quotas.sum())) - int(floors.sum())
    first = np.argsort(floors - quotas, kind="stable")[:missing]
    floors[first] += 1
    return floors


@checked
def quantity_skew(
    labels: np.ndarray,
    num_clients: Count,
    law: SizeLaw,
    *,
    sigma: Annotated[float, Gt(0)] = 1.0,
    beta: Annotated[float, Gt(0)] = 0.5,
    min_examples: Count = 1,
    seed: int = 0,
) -> Parts:
    """Divides all examples at random among clients whose sizes are those of `sizes` with this seed.

    Args:
      labels: ``[examples]``.
      num_clients: N, the number of clients.
      law: the law of the sizes: "equal", "linear", "square", "exponential", "lognormal" with
        `sigma`, or "dirichlet" with `beta`.
      sigma: the standard deviation of the logarithm of a lognormal size.
      beta: the concentration parameter of Dirichlet sizes.
      min_examples: the minimum number of examples per client.
      seed: the seed of all draws.

    Raises:
      ValueError: if the law is unknown, sigma or beta is not positive, or there are fewer than
        ``N min_examples`` examples.

    Example:
      >>> parts = quantity_skew(np.zeros(100), 5, "square")
      >>> sorted(len(rows) for rows in parts)
      [2, 7, 16, 29, 46]

    Reference:
      Li et al., "Federated learning on non-IID data silos", 2022.
    """
    _check(labels, num_clients, examples_per_client=min_examples)
    how: Any = {"sigma": sigma, "beta": beta, "min_examples": min_examples, "seed": seed}
    numbers = sizes(len(labels), num_clients, law, **how)
    _, order = seed_sequence(seed).generate_state(2).tolist()
    return np.split(generator(order).permutation(len(labels)), np.cumsum(numbers)[:-1])


@checked
def shards(
    labels: np.ndarray, num_clients: Count, *, shards_per_client: Count = 2, seed: int = 0
) -> Parts:
    """Sorts the examples by label, cuts them into equal shards and assigns the shards at random.

    Args:
      labels: ``[examples]``.
      num_clients: N, the number of clients.
      shards_per_client: the number of shards per client, 2 for the 100 clients of McMahan et al.
      seed: the seed of the shuffles within labels and of the random assignment.

    Raises:
      ValueError: if there are fewer examples than shards.

    Example:
      >>> labels = np.arange(100) % 10
      >>> [len(set(labels[rows].tolist())) for rows in shards(labels, 5)]
      [2, 2, 2, 2, 2]

    Reference:
      McMahan et al., "Communication-efficient learning", 2017; Pawlik, section 2.2.2.
    """
    _check(labels, num_clients, examples_per_client=shards_per_client)
    rng = generator(seed)
    ordered = np.concatenate([rng.permutation(rows) for rows in by_id(labels)])
    pieces = np.array_split(ordered, num_clients * shards_per_client)
    deal = rng.permutation(len(pieces)).reshape(num_clients, shards_per_client)
    return [np.concatenate([pieces[i] for i in mine]) for mine in deal]


@checked
def label_clusters(
    labels: np.ndarray,
    num_clients: Count,
    *,
    num_clusters: Count = 5,
    shuffled: bool = False,
    seed: int = 0,
) -> Parts:
    """Assigns labels and clients to clusters, and each cluster's examples equally to its clients.

    Clusters depend only on the seed and on the numbers of labels, clients and clusters, so training
    and test labels get the same clusters.

    Args:
      labels: ``[examples]``.
      num_clients: N, the number of clients.
      num_clusters: the number of clusters; with 10 labels, 5 clusters have 2 labels each.
      shuffled: whether the labels of a cluster are drawn at random. If false, clusters consist of
        neighboring labels, such as (0, 1) and (2, 3).
      seed: the seed of the clusters and of the examples' assignment.

    Raises:
      ValueError: if the clusters cannot have the same number of labels, there are more clusters
        than clients, or a cluster has fewer examples than clients.

    Example:
      >>> labels = np.arange(100) % 10
      >>> parts = label_clusters(labels, 10)
      >>> [len(set(labels[rows].tolist())) for rows in parts] == [2] * 10
      True

    Reference:
      Cho et al., "Maximizing global model appeal in federated learning", figures 3, 4, table 3.
    """
    _check(labels, num_clients)
    names = np.unique(labels)
    if len(names) % num_clusters:
        raise ValueError(f"{len(names)} labels do not make {num_clusters} equal clusters")
    if num_clusters > num_clients:
        raise ValueError(
            f"num_clusters is {num_clusters}, but num_clients is {num_clients}; give every cluster "
            "at least one client"
        )
    rng = generator(seed)
    drawn = rng.permutation(names)  # always draw, so that `shuffled` does not change the clients
    label_cluster = np.array_split(drawn if shuffled else names, num_clusters)
    client_cluster = np.array_split(rng.permutation(num_clients), num_clusters)
    parts: Parts = [np.empty(0, np.int64)] * num_clients
    for mine, clients in zip(label_cluster, client_cluster, strict=True):
        rows = rng.permutation(np.flatnonzero(np.isin(labels, mine)))
        if len(rows) < len(clients):
            raise ValueError(
                f"labels {mine.tolist()} have {len(rows)} examples for {len(clients)} clients; "
                "lower num_clients or num_clusters"
            )
        for client, piece in zip(clients, np.array_split(rows, len(clients)), strict=True):
            parts[client] = piece
    return parts


@checked
def iid_share(
    labels: np.ndarray,
    num_clients: Count,
    *,
    percent: Percent,
    labels_per_client: Count = 2,
    overlap: bool = True,
    seed: int = 0,
) -> Parts:
    """Gives every client a percentage of IID examples and the rest from a few random labels.

    A percentage of each label's examples forms a pool. A client takes ``ceil(percent / 100 * n)``
    of its ``n = examples // clients`` examples from the pool, and the rest in equal parts from the
    remaining examples of random labels. Clients draw their labels independently, so a label may
    have too few examples. Clients then share examples, as in the paper, but no example of a label
    is used k + 1 times before all are used k times. No client gets an example twice.

    Args:
      labels: ``[examples]``.
      num_clients: N, the number of clients.
      percent: p, from 0 to 100.
      labels_per_client: the number of labels that a client draws.
      overlap: whether clients may share examples. If false, sharing raises an error. With the
        paper's sizes, MNIST requires sharing, because its labels are too unequal in size.
      seed: the seed of all draws.

    Raises:
      ValueError: if percent is out of range, a client would need an example twice, or, without
        `overlap`, two clients would need the same one.

    Example:
      >>> parts = iid_share(np.arange(1000) % 10, 10, percent=80)
      >>> [len(rows) for rows in parts] == [100] * 10
      True

    Reference:
      Pawlik, section 2.2.1.
    """
    _check(labels, num_clients)
    by_label = by_id(labels)
    check_between("labels_per_client", labels_per_client, 1, len(by_label), "the number of labels")
    rng = generator(seed)
    cut = [np.split(rng.permutation(r), [round(percent / 100 * len(r))]) for r in by_label]
    deal_iid = _dealer(rng.permutation(np.concatenate([pool for pool, _ in cut])), overlap)
    deal_label = [_dealer(rest, overlap) for _, rest in cut]
    size = len(labels) // num_clients
    num_iid = math.ceil(percent * size / 100)
    rest = np.array_split(np.arange(size - num_iid), labels_per_client)
    parts = []
    for _ in range(num_clients):
        mine = rng.choice(len(by_label), labels_per_client, replace=False)
        pieces = [deal_label[k](len(part)) for k, part in zip(mine, rest, strict=True)]
        parts.append(np.concatenate([deal_iid(num_iid), *pieces]))
    return parts


@checked
def iid_clients(
    labels: np.ndarray,
    num_clients: Count,
    *,
    percent: Percent,
    shards_per_client: Count = 2,
    seed: int = 0,
) -> Parts:
    """Gives `iid` examples to a percentage of clients, drawn at random, and `shards` to the others.

    Args:
      labels: ``[examples]``.
      num_clients: N, the number of clients.
      percent: p, from 0 to 100.
      shards_per_client: the number of shards of each non-IID client.
      seed: the seed of all draws.

    Raises:
      ValueError: if percent is out of range, or there are too few examples.

    Example:
      >>> labels = np.arange(1000) % 10
      >>> parts = iid_clients(labels, 10, percent=50)
      >>> sorted(len(set(labels[rows].tolist())) == 10 for rows in parts)[4:6]
      [False, True]
    """
    labels = np.asarray(labels)
    _check(labels, num_clients, examples_per_client=shards_per_client)
    first, second, third = seed_sequence(seed).generate_state(3).tolist()
    num_iid = round(percent / 100 * num_clients)
    rows = generator(first).permutation(len(labels))
    mixed, rest = np.split(rows, [len(rows) * num_iid // num_clients])
    parts = list(np.array_split(mixed, num_iid)) if num_iid else []
    if num_iid < num_clients:
        others = shards(
            labels[rest], num_clients - num_iid, shards_per_client=shards_per_client, seed=second
        )
        parts += [rest[other] for other in others]
    return [parts[i] for i in generator(third).permutation(num_clients)]


def by_id(ids: np.ndarray) -> Parts:
    """Divides examples by their ids, with one client per distinct id, in sorted order.

    Args:
      ids: ``[examples]``, numbers or text.

    Raises:
      ValueError: if `ids` is empty, has several axes or mixed types, or has None, NaN or masked
        entries.

    Example:
      >>> [rows.tolist() for rows in by_id(np.array(["b", "a", "b"]))]
      [[1], [0, 2]]
    """
    # Get masks only from masked arrays, because NumPy does not know the dtypes of pandas columns.
    is_masked = np.ma.getmaskarray(ids) if isinstance(ids, np.ma.MaskedArray) else False
    ids = np.asarray(ids)
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"ids has shape {ids.shape}; give one id for each of at least one example")
    is_missing = is_masked | _is_missing(ids)
    if is_missing.any():
        raise ValueError(
            f"ids lack {is_missing.sum()} of {len(ids)} examples, first that in row "
            f"{np.argmax(is_missing)}; drop these examples, or give them an id"
        )
    if ids.dtype == object and len(kinds := sorted({type(x).__name__ for x in ids.tolist()})) > 1:
        raise ValueError(f"ids are of types {', '.join(kinds)}; give numbers, or text")
    _, counts = np.unique(ids, return_counts=True)
    return np.split(np.argsort(ids, kind="stable"), np.cumsum(counts)[:-1])


def _dealer(rows: np.ndarray, overlap: bool) -> Callable[[int], np.ndarray]:
    # Assign rows cyclically, so that the numbers of uses differ by at most 1.
    dealt = 0

    def deal(number: int) -> np.ndarray:
        nonlocal dealt
        if number > len(rows):
            raise ValueError(
                f"a client needs {number} of {len(rows)} examples; raise num_clients or "
                "labels_per_client, or change percent"
            )
        if not overlap and dealt + number > len(rows):
            raise ValueError(
                f"clients need more than the {len(rows)} examples of a label or of the pool; "
                "raise num_clients, or allow overlap as the paper does"
            )
        start, dealt = dealt, dealt + number
        return rows[np.arange(start, dealt) % len(rows)] if number else rows[:0]

    return deal


def _check(labels: np.ndarray, num_clients: int, *, examples_per_client: int = 1) -> None:
    if np.ndim(labels) != 1:
        raise ValueError(f"labels has shape {np.shape(labels)}; give one label for each example")
    if len(labels) < num_clients * examples_per_client:
        raise ValueError(
            f"{len(labels)} examples are too few for {num_clients} clients with "
            f"{examples_per_client} or more each; lower num_clients"
        )


def consecutive(counts: Int64[np.ndarray, " clients"]) -> Parts:
    """Rows of each client, for examples sorted by client."""
    return np.split(np.arange(counts.sum()), np.cumsum(counts)[:-1])


def generator(seed: int | np.random.SeedSequence) -> np.random.Generator:
    """Makes NumPy's PCG64 generator with a given seed."""
    if not isinstance(seed, np.random.SeedSequence):
        seed = seed_sequence(seed)
    # Avoid `default_rng`, because NumPy may change it, and a seed must always give the same data.
    return np.random.Generator(np.random.PCG64(seed))


def seed_sequence(seed: int, *key: int) -> np.random.SeedSequence:
    """Makes NumPy's seed sequence, which gives independent draws for different keys.

    Raises:
      ValueError: if the seed is not a nonnegative integer.
    """
    number = check_argument("seed", seed, Annotated[int, Ge(0)])
    return np.random.SeedSequence(number, spawn_key=key)


def _is_missing(ids: np.ndarray) -> np.ndarray:
    """Marks the ids that are None, NaN or pandas' NA."""
    if ids.dtype.kind in "fcM":
        return ids != ids
    if ids.dtype != object:
        return np.zeros(len(ids), bool)
    # Compare the type's name, because NA is neither equal nor unequal to itself, and pandas may not
    # be installed.
    is_none = [x is None or type(x).__name__ in ("NAType", "NaTType") for x in ids]
    return np.array(is_none) | [isinstance(x, float) and math.isnan(x) for x in ids]
