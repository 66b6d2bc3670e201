"""From a dataset and the rows of each client to the data of a federation."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from fedjax_mm.checks import check_count
from fedjax_mm.data.clients import ClientData, flat_client_data
from fedjax_mm.data.federated import FederatedData, Pool
from fedjax_mm.data.partition import Parts


def split_parts(parts: Parts, *, test_fraction: float, seed: int = 0) -> tuple[Parts, Parts]:
    """Every client's rows, shuffled and divided into training and test rows.

    Args:
      parts: for each client its rows, 2 or more.
      test_fraction: of each client's rows, rounded; at least one row goes to each side.
      seed: of the shuffles.

    Raises:
      ValueError: if the fraction does not lie between 0 and 1, or a client has fewer than 2 rows.

    Example:
      >>> train, test = split_parts([np.arange(10), np.arange(10, 12)], test_fraction=0.4)
      >>> [len(rows) for rows in train], [len(rows) for rows in test]
      ([6, 1], [4, 1])
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction is {test_fraction}; it must lie between 0 and 1")
    rng = np.random.Generator(np.random.PCG64(seed))
    train, test = [], []
    for client, rows in enumerate(parts):
        if len(rows) < 2:
            raise ValueError(
                f"client {client} has {len(rows)} examples; a training and a test set need 2"
            )
        num_test = min(max(round(test_fraction * len(rows)), 1), len(rows) - 1)
        shuffled = rng.permutation(rows)
        test.append(shuffled[:num_test])
        train.append(shuffled[num_test:])
    return train, test


def federate(
    pool: Pool,
    parts: Sequence[np.ndarray],
    parts_test: Sequence[np.ndarray] | None = None,
    *,
    test_fraction: float | None = None,
    seed: int = 0,
) -> FederatedData:
    """Deals a dataset to clients.

    Args:
      pool: the dataset.
      parts: for each client its rows of the pool's training examples.
      parts_test: for each client its rows of the pool's test examples; by default the whole test
        set is one pool that stands for all clients.
      test_fraction: instead of `parts_test`: divides each client's `parts` into a training and a
        test set, as `split_parts` does; the pool's own test examples are not used.
      seed: of that division.

    Raises:
      ValueError: if a client has no example, a row does not exist, the parts are of different
        numbers of clients, or both `parts_test` and `test_fraction` are given.

    Example:
      >>> labels = np.arange(100, dtype=np.int32) % 10
      >>> pool = Pool("toy", "synthetic", 10, (labels[:, None], labels), (labels[:, None], labels))
      >>> federate(pool, np.split(np.arange(100), 4)).train.counts.tolist()
      [25, 25, 25, 25]
    """
    if parts_test is not None and test_fraction is not None:
        raise ValueError("give parts_test or test_fraction, not both")
    test_source = pool.test
    if test_fraction is not None:
        parts, parts_test = split_parts(list(parts), test_fraction=test_fraction, seed=seed)
        test_source = pool.train
    elif parts_test is None:
        parts_test = [np.arange(len(pool.test[1]))]
    elif len(parts_test) != len(parts):
        raise ValueError(f"parts of {len(parts)} clients, but parts_test of {len(parts_test)}")
    train = _gather(pool.train, parts, "training")
    test = _gather(test_source, parts_test, "test")
    return FederatedData(pool.name, pool.kind, pool.num_classes, train, test)


def flipped_clients(num_clients: int, *, fraction: float, seed: int = 0) -> np.ndarray:
    """The clients whose labels `flip_labels` flips, in order.

    Args:
      num_clients: N.
      fraction: of the clients, rounded to a whole number of them.
      seed: of the draw.

    Raises:
      ValueError: if the fraction does not lie between 0 and 1.

    Example:
      >>> len(flipped_clients(100, fraction=0.3))
      30
    """
    check_count("num_clients", num_clients)
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction is {fraction}; it must lie between 0 and 1")
    return np.sort(
        np.random.Generator(np.random.PCG64(seed)).permutation(num_clients)[
            : round(fraction * num_clients)
        ]
    )


def flip_labels(data: FederatedData, *, fraction: float, seed: int = 0) -> FederatedData:
    """Replaces y by C - 1 - y for the `flipped_clients`, in training and in test.

    Args:
      data: the clients' data, with test examples of every client.
      fraction: of the clients.
      seed: of the choice of clients.

    Raises:
      ValueError: if the fraction does not lie between 0 and 1, or the test set is one pool.

    Example:
      >>> labels = np.arange(100, dtype=np.int32) % 10
      >>> pool = Pool("toy", "synthetic", 10, (labels[:, None], labels), (labels[:, None], labels))
      >>> data = federate(pool, np.split(np.arange(100), 4), test_fraction=0.4)
      >>> flip_labels(data, fraction=0.5).name
      'toy, labels of 2 of 4 clients flipped'

    Reference:
      Cho et al., "Maximizing global model appeal in federated learning", section 4.
    """
    num_clients = len(data.train.counts)
    if len(data.test.counts) != num_clients:
        raise ValueError("the test set is one pool; give clients their own with federate")
    clients = flipped_clients(num_clients, fraction=fraction, seed=seed)

    def flip(split: ClientData) -> ClientData:
        x, y = split.gathered().examples
        counts = np.asarray(split.counts)
        rows = np.isin(np.repeat(np.arange(num_clients), counts), clients)
        labels = np.array(y)
        labels[rows] = data.num_classes - 1 - labels[rows]
        return flat_client_data((x, labels), counts)

    name = f"{data.name}, labels of {len(clients)} of {num_clients} clients flipped"
    return dataclasses.replace(data, name=name, train=flip(data.train), test=flip(data.test))


def _gather(
    source: tuple[np.ndarray, np.ndarray], parts: Sequence[np.ndarray], split: str
) -> ClientData:
    x, y = source
    counts = [len(rows) for rows in parts]
    if 0 in counts:
        raise ValueError(f"client {counts.index(0)} has no {split} example; give every client one")
    rows = np.concatenate(parts)
    unknown = rows[(rows < 0) | (rows >= len(y))]
    if len(unknown):
        raise ValueError(f"the parts name row {unknown[0]} of {len(y)} {split} examples")
    return flat_client_data((x[rows], y[rows]), counts)
