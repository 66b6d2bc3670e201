"""Distributes datasets among clients, splits rows into training and test, and flips labels."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from fedjax_mm.checks.annotations import Count, CountOrZero, Fraction, Share, checked
from fedjax_mm.checks.values import described
from fedjax_mm.data.clients import ClientData, flat_client_data
from fedjax_mm.data.federated import FederatedData, Pool, check_federated
from fedjax_mm.data.partition import Parts, generator
from fedjax_mm.data.pools import pool_of

Examples: TypeAlias = tuple[Any, Any]
"""Arrays ``(X [examples, ...], y [examples])``."""


def check_min_examples(name: str, value: int) -> None:
    """Raises `ValueError` if a client could not have both a training and a test example."""
    if value < 2:
        raise ValueError(f"{name} is {value}; a training and a test set need 2 examples")


@checked
def split_parts(parts: Parts, *, test_fraction: Fraction, seed: int = 0) -> tuple[Parts, Parts]:
    """Shuffles each client's rows and splits them into training and test rows.

    Args:
      parts: each client's rows, 2 or more.
      test_fraction: the fraction of each client's rows for testing, rounded so that each side gets
        at least one row.
      seed: the seed of the shuffles.

    Raises:
      ValueError: if the fraction is not between 0 and 1, or a client has fewer than 2 rows.

    Example:
      >>> train, test = split_parts([np.arange(10), np.arange(10, 12)], test_fraction=0.4)
      >>> [len(rows) for rows in train], [len(rows) for rows in test]
      ([6, 1], [4, 1])
    """
    rng = generator(seed)
    train, test = [], []
    for client, rows in enumerate(parts):
        if len(rows) < 2:
            raise ValueError(
                f"client {client} has {len(rows)} examples; a training and a test set need 2: deal "
                "them again (dirichlet has min_examples), or give test examples"
            )
        num_test = min(max(round(test_fraction * len(rows)), 1), len(rows) - 1)
        shuffled = rng.permutation(rows)
        test.append(shuffled[:num_test])
        train.append(shuffled[num_test:])
    return train, test


@checked
def federate(
    data: Pool | Examples | tuple[Examples, Examples],
    clients: Sequence[Any],
    clients_test: Sequence[Any] | None = None,
    *,
    test_fraction: Fraction | None = None,
    num_classes: CountOrZero | None = None,
    seed: int = 0,
    check: bool = True,
) -> FederatedData:
    """Distributes a dataset among clients.

    Args:
      data: arrays ``(X, y)`` or ``((X, y), (X_test, y_test))``, which may be lists or data frames;
        a `Pool`; or a scikit-learn `Bunch`.
      clients: each client's rows in the training set, for example from `fedjax_mm.data.partition`.
      clients_test: each client's rows in the test set; by default all clients share the whole test
        set.
      test_fraction: the fraction of each client's rows that `split_parts` moves to a test set,
        instead of using the test examples in `data`. Cannot be combined with `clients_test`.
        Defaults to 0.2 for arrays without test examples.
      num_classes: C, for arrays; defaults to 1 more than the largest label. 0 if y are not labels,
        but targets of any type and shape, or several arrays of them.
      seed: the seed of the split by `test_fraction`.
      check: False skips the check that all features are finite.

    Raises:
      ValueError: if arrays or labels do not fit together or are not finite, a client has no
        examples, a row does not exist, a row occurs twice in a split, `clients` and `clients_test`
        differ in length, or both `clients_test` and `test_fraction` are given.

    Example:
      >>> import fedjax_mm
      >>> from fedjax_mm.data import partition
      >>> rng = np.random.default_rng(0)
      >>> X, y = rng.normal(size=(3000, 8, 8, 1)), rng.integers(5, size=3000)
      >>> fedjax_mm.data.federate((X, y), clients=partition.dirichlet(y, 50, 0.3))
      50 clients, 2400 + 600 examples of (8, 8, 1), 5 classes
    """
    if clients_test is not None and test_fraction is not None:
        raise ValueError("give clients_test or test_fraction, not both")
    pool, has_tests = pool_of(data, num_classes, check=check)
    if not has_tests:
        if clients_test is not None:
            raise ValueError("clients_test needs test examples; give ((X, y), (X_test, y_test))")
        test_fraction = 0.2 if test_fraction is None else test_fraction
    clients = _rows_of("clients", clients, len(pool.train[0]), "training")
    test_source = pool.test
    if test_fraction is not None:
        _check_apart(clients, len(pool.train[0]))
        clients, clients_test = split_parts(clients, test_fraction=test_fraction, seed=seed)
        test_source = pool.train
    elif clients_test is None:
        clients_test = [np.arange(len(pool.test[0]))]
    else:
        clients_test = _rows_of("clients_test", clients_test, len(pool.test[0]), "test")
        if len(clients_test) != len(clients):
            raise ValueError(
                f"rows of {len(clients)} clients, but test rows of {len(clients_test)}"
            )
    train, test = _gather(pool.train, clients), _gather(test_source, clients_test)
    return FederatedData(pool.name, pool.kind, pool.num_classes, train, test)


def pooled(data: FederatedData) -> FederatedData:
    """Gives the examples of all clients to a single client, for training without federation.

    With `full_participation(1)`, FedAvg is then SGD on all data.

    Example:
      >>> from fedjax_mm.data import synthetic
      >>> pooled(synthetic(30, dim=4)).num_clients
      1
    """
    check_federated(data)

    def of(split: ClientData) -> ClientData:
        return flat_client_data(split.gathered().examples, [int(np.sum(split.counts))])

    name = f"{data.name}, pooled"
    return dataclasses.replace(data, name=name, train=of(data.train), test=of(data.test))


@checked
def flipped_clients(num_clients: Count, *, fraction: Share, seed: int = 0) -> np.ndarray:
    """Sorted indices of the clients whose labels `flip_labels` flips.

    Args:
      num_clients: N, the number of clients.
      fraction: the fraction of clients, rounded to a whole number of clients.
      seed: the seed of the draw.

    Raises:
      ValueError: if the fraction is not between 0 and 1.

    Example:
      >>> len(flipped_clients(100, fraction=0.3))
      30
    """
    return np.sort(generator(seed).permutation(num_clients)[: round(fraction * num_clients)])


@checked
def flip_labels(
    data: FederatedData, *, fraction: Share, test: bool = True, seed: int = 0
) -> FederatedData:
    """Replaces the labels y of some clients with C - 1 - y, in both training and test sets.

    Args:
      data: the clients' data, in which every client has test examples.
      fraction: the fraction of clients.
      test: False leaves the test labels unchanged.
      seed: the seed with which `flipped_clients` chooses clients.

    Raises:
      ValueError: if the fraction is not between 0 and 1, or `test` is true but the test set is a
        single pool.

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
    if not data.num_classes:
        raise ValueError("the data have no classes, so no labels to flip; give labelled data")
    if test and len(data.test.counts) != num_clients:
        raise ValueError("the test set is one pool; give clients their own by test_fraction")
    clients = flipped_clients(num_clients, fraction=fraction, seed=seed)

    def flip(split: ClientData) -> ClientData:
        # Change a copy of the labels, because several partitions may share the store.
        x, y = split.gathered().examples
        counts = np.asarray(split.counts)
        rows = np.isin(np.repeat(np.arange(num_clients), counts), clients)
        labels = np.array(y)
        labels[rows] = data.num_classes - 1 - labels[rows]
        return flat_client_data((x, labels), counts)

    which = "" if test else "training "
    name = f"{data.name}, {which}labels of {len(clients)} of {num_clients} clients flipped"
    tests = flip(data.test) if test else data.test
    return dataclasses.replace(data, name=name, train=flip(data.train), test=tests)


def _rows_of(name: str, parts: Any, num_examples: int, split: str) -> Parts:
    """Converts each client's rows to arrays, or raises an error if they do not fit the examples."""
    if not isinstance(parts, Sequence | np.ndarray) or isinstance(parts, str):
        raise TypeError(
            f"{name} is {described(parts)}; give each client's rows, such as "
            "partition.iid(y, num_clients)"
        )
    rows = [np.asarray(each) for each in parts]
    for client, mine in enumerate(rows):
        if mine.ndim == 1 and not len(mine):
            raise ValueError(f"client {client} has no {split} example; give every client one")
        if mine.ndim != 1 or mine.dtype.kind not in "iu":
            raise ValueError(
                f"{name}[{client}] is an array of shape {mine.shape} and type {mine.dtype}; give "
                "row numbers, as np.flatnonzero makes them of bools"
            )
    if not rows:
        raise ValueError(f"{name} is empty; give the rows of at least one client")
    # Reject negative rows, because NumPy would count them from the end.
    every = np.concatenate(rows)
    unknown = every[(every < 0) | (every >= num_examples)]
    if len(unknown):
        raise ValueError(
            f"the parts have row {unknown[0]}, but there are {num_examples} {split} examples"
        )
    return rows


def _check_apart(parts: Parts, num_examples: int) -> None:
    """Raises `ValueError` if a row occurs twice, because it could end up in both sets."""
    counts = np.bincount(np.concatenate(parts), minlength=num_examples)
    if counts.max() > 1:
        raise ValueError(
            f"the parts have row {np.argmax(counts)} {counts.max()} times, so that it might be "
            "trained on and tested; give parts that do not overlap, or test examples"
        )


def _gather(source: tuple[np.ndarray, Any], parts: Parts) -> ClientData:
    rows, counts = np.concatenate(parts), [len(mine) for mine in parts]
    taken = jax.tree.map(lambda x: np.asarray(x)[rows], source)
    return flat_client_data(taken, counts, check=False)  # the whole source has been checked
