"""Feature shift: clients whose features are noisy or rotated, each to its own degree."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from annotated_types import Ge

from fedjax_mm.checks.annotations import checked
from fedjax_mm.data.clients import ClientData, flat_client_data
from fedjax_mm.data.federated import FederatedData, check_federated
from fedjax_mm.data.partition import generator


@checked
def noisy_features(
    data: FederatedData, *, std: Annotated[float, Ge(0)], seed: int = 0
) -> FederatedData:
    """Adds Gaussian noise to the features, with a standard deviation that grows with the client.

    Client k = 1, ..., N has the standard deviation ``std * k / N``. Features of bytes become floats
    with noise in units of bytes, so ``std=25.5`` is a tenth of their range.

    Args:
      data: the clients' data, in which every client has test examples.
      std: the standard deviation of the last client.
      seed: the seed of the noise.

    Raises:
      ValueError: if `std` is negative, or the test set is a single pool.

    Example:
      >>> from fedjax_mm.data import synthetic
      >>> noisy_features(synthetic(30, dim=4), std=0.5).name
      'synthetic(1, 1), features with noise of up to 0.5'

    Reference: Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study" (2022),
    section 3.2.
    """
    rng = generator(seed)
    levels = float(std) * np.arange(1, data.num_clients + 1) / data.num_clients

    def noise(x: np.ndarray, client: int) -> np.ndarray:
        return (x + levels[client] * rng.normal(size=x.shape)).astype(np.float32)

    return _changed(data, noise, f"features with noise of up to {std:g}")


@checked
def rotated(data: FederatedData, turns: Sequence[int] | None = None) -> FederatedData:
    """Rotates the images of each client by quarter turns.

    Args:
      data: the clients' data, in which every client has test examples. Images are square, with
        channels last.
      turns: the number of quarter turns of each client; by default 0, 1, 2, 3, 0, ...

    Raises:
      ValueError: if features are not square images, there is not one number of turns for each
        client, or the test set is a single pool.

    Example:
      >>> from fedjax_mm.data import digits, federate, partition
      >>> pool = digits()
      >>> data = federate(pool, partition.iid(pool.train[1], 8), test_fraction=0.2)
      >>> rotated(data).name
      'digits, images turned'

    Reference: Ghosh et al., "An Efficient Framework for Clustered Federated Learning" (2020),
    rotated MNIST.
    """
    num_clients = data.num_clients
    each = np.arange(num_clients) % 4 if turns is None else np.asarray(turns)
    if each.shape != (num_clients,) or each.dtype.kind not in "iu":
        raise ValueError(
            f"turns is {turns}; give one whole number for each of {num_clients} clients"
        )

    def turn(x: np.ndarray, client: int) -> np.ndarray:
        if x.ndim != 4 or x.shape[1] != x.shape[2]:
            raise ValueError(
                f"an example has shape {x.shape[1:]}; give square images with channels last"
            )
        return np.rot90(x, each[client], axes=(1, 2))

    return _changed(data, turn, "images turned")


def _changed(
    data: FederatedData, change: Callable[[np.ndarray, int], np.ndarray], words: str
) -> FederatedData:
    check_federated(data)
    if len(data.test.counts) != data.num_clients:
        raise ValueError("the test set is one pool; call federate with test_fraction")

    def of(split: ClientData) -> ClientData:
        x, y = split.gathered().examples
        counts = np.asarray(split.counts)
        parts = np.split(np.asarray(x), np.cumsum(counts)[:-1])
        features = np.concatenate([change(part, client) for client, part in enumerate(parts)])
        return flat_client_data((features, y), counts)

    name = f"{data.name}, {words}"
    return dataclasses.replace(data, name=name, train=of(data.train), test=of(data.test))
