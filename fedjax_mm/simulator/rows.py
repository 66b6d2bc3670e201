"""Rows of clients: reads those of the clients that train, and writes their new values.

An array has one row for each client. Without a client axis, all N rows are in one place. With a
client axis of D devices, every device holds the rows of its own clients: device i has the clients
from i * B to (i + 1) * B - 1, where B = ceil(N / D) is the size of a block. Rows past N are padding
and are never read. Only rows of clients that train travel between devices.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from fedjax_mm.base import chunks
from fedjax_mm.data.clients import ClientData, over_stores, stores_in

Index: TypeAlias = tuple[Int[Array, " chunk"], ...]
"""The rows of a chunk: indices along the first axes, the last of which are those of clients."""


def read_rows(tree: Any, index: Index, client_axis: str | None) -> Any:
    """Reads a chunk's rows of arrays ``[(models,) clients, ...]``.

    With a client axis, every device asks for the rows of its own chunk, and gets them from the
    devices that have them. All devices must call it with chunks of equal size.

    Args:
      tree: the arrays, or this device's blocks of them.
      index: the rows. All must be in range.
      client_axis: the mesh axis over which rows are divided; None if they are not.
    """
    if client_axis is None or not jax.tree.leaves(tree):
        return jax.tree.map(lambda x: x[index], tree)
    asked = lax.all_gather(index, client_axis)  # [devices, chunk] each

    def read(x: Array) -> Array:
        *models, client = asked
        size = x.shape[len(models)]
        # Select by the owner instead of summing over devices, because the sum of -0.0 and 0.0 is
        # 0.0, and bits of floats have no derivative.
        sent = lax.all_to_all(x[(*models, client % size)], client_axis, 0, 0)
        return sent[index[-1] // size, jnp.arange(len(index[-1]))]

    return jax.tree.map(read, tree)


def write_rows(tree: Any, index: Index, new: Any, client_axis: str | None) -> Any:
    """Writes a chunk's rows into arrays ``[(models,) clients, ...]``.

    With a client axis, the rows of all devices' chunks go to the devices that have these clients.

    Args:
      tree: the arrays, or this device's blocks of them.
      index: the rows. Clients from N on are dropped.
      new: the rows' new values ``[chunk, ...]``.
      client_axis: the mesh axis over which rows are divided; None if they are not.
    """
    if client_axis is None or not jax.tree.leaves(tree):
        return chunks.put_rows(tree, index, new)
    (*models, client), new = lax.all_gather((index, new), client_axis, tiled=True)

    def write(x: Array, new: Array) -> Array:
        size = x.shape[len(models)]
        place = client - size * lax.axis_index(client_axis)
        # A negative index would count from the end, so replace it with one that is out of range.
        place = jnp.where(place >= 0, place, size)
        return x.at[(*models, place)].set(new, mode="drop")

    return jax.tree.map(write, tree, new)


def read_examples(task: Any, clients: Int[Array, " chunk"]) -> list[Any]:
    """Reads the examples of a chunk's clients, ``[chunk, most, ...]``, of divided stores."""

    def read(store: ClientData) -> Any:
        places = jax.vmap(store.rows_of)(clients)
        rows = read_rows(store.examples, (places.reshape(-1),), store.axis)
        return jax.tree.map(lambda x: x.reshape(*places.shape, *x.shape[1:]), rows)

    return [read(store) for store in stores_in(task) if store.axis is not None]


def with_examples(task: Any, examples: Sequence[Any]) -> Any:
    """The task of one client, with its examples of each store that is divided."""
    each = iter(examples)
    return over_stores(lambda x: x if x.axis is None else x.with_examples(next(each)), task)


def own_rows(tree: Any, num_clients: int, client_axis: str | None, axis: int = 0) -> Any:
    """This device's block of arrays with all clients along an axis.

    Padding repeats the last client.
    """
    if client_axis is None:
        return tree
    index = *[slice(None)] * axis, own_clients(num_clients, client_axis)
    return jax.tree.map(lambda x: x[index], tree)


def own_clients(num_clients: int, client_axis: str | None) -> Int[Array, " block"]:
    """The clients of this device's block, with the last client as padding."""
    clients = jnp.arange(num_own(num_clients, client_axis), dtype=jnp.int32)
    if client_axis is None:
        return clients
    first = len(clients) * lax.axis_index(client_axis)
    return jnp.minimum(first + clients, num_clients - 1)


def all_rows(tree: Any, num_clients: int, client_axis: str | None, axis: int = 0) -> Any:
    """Arrays with all clients along an axis, on every device, from the devices' blocks."""
    if client_axis is None:
        return tree
    whole = lax.all_gather(tree, client_axis, axis=axis, tiled=True)
    return jax.tree.map(lambda x: lax.slice_in_dim(x, 0, num_clients, axis=axis), whole)


def num_own(num_clients: int, client_axis: str | None) -> int:
    """The number of rows of one device: B, or N without a client axis."""
    return num_clients if client_axis is None else -(-num_clients // lax.axis_size(client_axis))
