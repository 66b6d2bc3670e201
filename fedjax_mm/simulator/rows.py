"""Rows of clients: reads those of the clients that train, and writes their new values.

An array has one row for each client. Without a client axis, all N rows are in one place. With a
client axis of D devices, every device holds the rows of its own clients: device i has the clients
from i * B to (i + 1) * B - 1, where B = ceil(N / D) is the size of a block. Rows past N are padding
and are never read. Only rows of clients that train travel between devices.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from fedjax_mm.base import chunks
from fedjax_mm.data.clients import ClientData, over_stores, stores_in

Index: TypeAlias = tuple[Int[Array, " chunk"], ...]
"""The rows of a chunk: indices along the first axes, the last of which are those of clients."""


def read_rows(tree: Any, index: Index, client_axis: str | None, asked: Index | None = None) -> Any:
    """Reads a chunk's rows of arrays ``[(models,) clients, ...]``.

    With a client axis, every device asks for the rows of its own chunk, and gets them from the
    devices that have them. All devices must call it with chunks of equal size.

    Args:
      tree: the arrays, or this device's blocks of them.
      index: the rows. All must be in range.
      client_axis: the mesh axis over which rows are divided; None if they are not.
      asked: the rows of all devices' chunks, as by `gathered`, if they are known.
    """
    if client_axis is None or not jax.tree.leaves(tree):
        return jax.tree.map(lambda x: x[index], tree)
    asked = gathered(index, client_axis) if asked is None else asked
    *models, client = (x.reshape(-1, len(index[-1])) for x in asked)  # [devices, chunk] each
    size = jax.tree.leaves(tree)[0].shape[len(models)]
    exchange = partial(lax.all_to_all, axis_name=client_axis, split_axis=0, concat_axis=0)
    sent = _together(exchange, 2, jax.tree.map(lambda x: x[(*models, client % size)], tree))
    # Select by the owner instead of summing over devices, because the sum of -0.0 and 0.0 is 0.0,
    # and bits of floats have no derivative.
    return jax.tree.map(lambda x: x[index[-1] // size, jnp.arange(len(index[-1]))], sent)


def write_rows(
    tree: Any, index: Index, new: Any, client_axis: str | None, asked: Index | None = None
) -> Any:
    """Writes a chunk's rows into arrays ``[(models,) clients, ...]``.

    With a client axis, the rows of all devices' chunks go to the devices that have these clients.

    Args:
      tree: the arrays, or this device's blocks of them.
      index: the rows. Clients from N on are dropped.
      new: the rows' new values ``[chunk, ...]``.
      client_axis: the mesh axis over which rows are divided; None if they are not.
      asked: as in `read_rows`.
    """
    if client_axis is None or not jax.tree.leaves(tree):
        return chunks.put_rows(tree, index, new)
    *models, client = gathered(index, client_axis) if asked is None else asked
    new = gathered(new, client_axis)

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


def gathered(tree: Any, client_axis: str | None) -> Any:
    """Joins arrays ``[rows, ...]`` of all devices along their first axis."""
    if client_axis is None:
        return tree
    return _together(partial(lax.all_gather, axis_name=client_axis, tiled=True), 1, tree)


def _together(collective: Callable[[Array], Array], num_axes: int, tree: Any) -> Any:
    """Applies a collective once for each data type, to arrays with `num_axes` equal first axes."""
    # Send all in one array, because small rows take about the time of larger ones.
    leaves, structure = jax.tree.flatten(tree)
    for kind in {x.dtype: None for x in leaves}:
        same = [i for i, x in enumerate(leaves) if x.dtype == kind]
        flat = [leaves[i].reshape(*leaves[i].shape[:num_axes], -1) for i in same]
        made = collective(jnp.concatenate(flat, axis=-1))
        last = np.cumsum([x.shape[-1] for x in flat])
        for i, part in zip(same, jnp.split(made, last[:-1], axis=-1), strict=True):
            leaves[i] = part.reshape(*made.shape[:-1], *leaves[i].shape[num_axes:])
    return jax.tree.unflatten(structure, leaves)


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
