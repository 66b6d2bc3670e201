"""Flat storage of all clients' examples, and minibatches drawn from it on the device."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from fedjax_mm.base import Batching
from fedjax_mm.base.calls import in_short
from fedjax_mm.base.shuffles import drawn, fold_words, hash_words, shuffled
from fedjax_mm.checks.values import described
from fedjax_mm.data.arrays import array_of, leaves_of, plain_array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClientData:
    """Examples of all clients in one array, sorted by client, as built by `client_data`.

    Attributes:
      examples: a pytree of arrays with a leading axis over all examples. It may contain examples
        that belong to no client, so use `counts`, `offsets` and `order` to find clients' examples.
      offsets: ``int32[clients]``, each client's first place; a stack has a leading axis.
      counts: ``int32[clients]``, n_k >= 1; a stack has a leading axis.
      min_count: a lower bound on n_k.
      max_count: S, an upper bound on n_k.
      num_examples: an upper bound on the sum of all n_k.
      order: ``int32[places]``, the row in `examples` for each place, sorted by client; a stack has
        a leading axis. None if the examples themselves are sorted by client.
      axis: the mesh axis over whose devices the places are divided equally; None if all are here.
    """

    examples: Any
    offsets: Array
    counts: Array
    min_count: int = dataclasses.field(metadata={"static": True})
    max_count: int = dataclasses.field(metadata={"static": True})
    num_examples: int = dataclasses.field(metadata={"static": True})
    order: Array | None = None
    axis: str | None = dataclasses.field(default=None, metadata={"static": True})

    __repr__ = in_short

    @property
    def num_clients(self) -> int:
        """The number of clients, N."""
        return self.counts.shape[-1]

    def select(self, index: Any) -> "ClientData":
        """Takes one store from a stack made by `stack_client_data`, where `index` may be traced."""
        order = None if self.order is None else self.order[index]
        return dataclasses.replace(
            self, offsets=self.offsets[index], counts=self.counts[index], order=order
        )

    @property
    def is_divisible(self) -> bool:
        """Whether the examples can be divided over devices, unless they are already."""
        is_one = self.order is None and self.counts.ndim == 1
        return type(self) is ClientData and is_one and self.num_clients > 1

    @property
    def num_places(self) -> int:
        """The length of `order`, or of the examples if `order` is None."""
        if self.order is not None:
            return self.order.shape[-1]
        return len(jax.tree.leaves(self.examples)[0])

    @property
    def start(self) -> int | Int[Array, ""]:
        """The first place that is here."""
        return 0 if self.axis is None else self.num_places * lax.axis_index(self.axis)

    @property
    def ends(self) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """The first place of the clients' examples that are here, and the one after the last."""
        if self.axis is None:
            return self.offsets[0], self.offsets[-1] + self.counts[-1]
        start, stop = self.start, self.start + self.num_places
        is_here = (self.offsets >= start) & (self.offsets < stop)
        first = jnp.min(self.offsets, where=is_here, initial=stop)
        return first, jnp.max(self.offsets + self.counts, where=is_here, initial=start)

    def total(self, sums: Any) -> Any:
        """Adds up sums over the examples that are here."""
        return sums if self.axis is None else lax.psum(sums, self.axis)

    def joined(self, rows: Any) -> Any:
        """Joins arrays with a leading axis over the examples that are here."""
        return rows if self.axis is None else lax.all_gather(rows, self.axis, tiled=True)

    def rows_of(self, client: Int[Array, ""]) -> Int[Array, " most"]:
        """The places of a client's examples, of which the last one is repeated as padding."""
        places = jnp.arange(self.max_count, dtype=jnp.int32)
        return self.offsets[client] + jnp.minimum(places, self.counts[client] - 1)

    def with_examples(self, examples: Any) -> "ClientData":
        """A store with the examples of one client, in the order of `rows_of`."""
        offsets = jnp.zeros_like(self.offsets)
        return dataclasses.replace(self, examples=examples, offsets=offsets, axis=None)

    def gathered(self) -> "ClientData":
        """Sorts the examples by client, copying them if necessary."""
        if self.order is None:
            return self
        if self.order.ndim != 1:
            raise ValueError(f"this is a stack of {len(self.order)} stores; choose one with select")
        examples = self.take(jnp.arange(len(self.order)))
        return dataclasses.replace(self, examples=examples, order=None)

    def num_batches(self, client: Int[Array, ""], size: int | None) -> int | Int[Array, ""]:
        """Batches per epoch, ``ceil(n_k / B)``, as an int if equal for all clients.

        Example:
          >>> client_data([np.ones(20), np.ones(11)]).num_batches(jnp.int32(1), 10)
          2
        """
        if size is None:
            return 1
        least, most = (-(-count // size) for count in (self.min_count, self.max_count))
        return most if least == most else (self.counts[client] + size - 1) // size

    def batch(
        self, rng_key: PRNGKeyArray, client: Int[Array, ""], step: Int[Array, ""], how: Batching
    ) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
        """Draws the rows of one local step, for `take`, and their weights, 1 or 0.

        Rows with weight 0 are padding, which consists of examples of the same client.
        """
        rows, is_there = self._rows(hash_words(rng_key), self.counts[client], step, how)
        return self.offsets[client] + rows, is_there.astype(float)

    def take(self, rows: Int[Array, " batch"]) -> Any:
        """Reads the examples in the given rows."""
        rows = rows if self.order is None else self.order[rows]
        rows = rows if self.axis is None else rows - self.start

        def taken(x: Array) -> Array:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return x[rows]
            # Multiply by a 1 that is opaque to XLA, because on CPUs XLA copies rows one number at a
            # time but vectorizes a product.
            one = (rows >= 0).astype(x.dtype)
            return x[rows] * one.reshape(-1, *[1] * (x.ndim - 1))

        return jax.tree.map(taken, self.examples)

    def block(self, start: Int[Array, ""], size: int) -> Any:
        """Reads the examples of `size` consecutive rows starting at `start`."""
        if self.order is not None:
            return self.take(start + jnp.arange(size))
        start = start if self.axis is None else start - self.start
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), self.examples)

    def _rows(
        self, words: UInt32[Array, "2"], count: Int[Array, ""], step: Int[Array, ""], how: Batching
    ) -> tuple[Int[Array, " batch"], Bool[Array, " batch"]]:
        # Return indices of the client's examples, starting at 0, and whether they are part of the
        # batch rather than padding. An index is a function of (key, step, place), so no permutation
        # is stored.
        places = jnp.arange(how.size or self.max_count, dtype=jnp.int32)
        if how.size is None and how.limit is not None:
            rows = shuffled(fold_words(words, step), places, count)
            return rows, places < jnp.clip(how.limit, 1, count)
        if how.size is None:
            return jnp.minimum(places, count - 1), places < count
        if how.order == "iid":
            size = how.size if how.limit is None else how.limit
            return drawn(words, step * size + places, count), places < size
        per_epoch = (count + how.size - 1) // how.size
        places += step % per_epoch * how.size
        return shuffled(fold_words(words, step // per_epoch), places, count), places < count


def over_stores(function: Callable[[ClientData], ClientData], tree: Any) -> Any:
    """Maps a function over the stores in a tree, such as a task."""

    def change(x: Any) -> Any:
        return function(x) if _is_store(x) else x

    return jax.tree.map(change, tree, is_leaf=_is_store)


def stores_in(tree: Any) -> list[ClientData]:
    """The stores in a tree, such as a task."""
    return list(filter(_is_store, jax.tree.leaves(tree, is_leaf=_is_store)))


def _is_store(x: Any) -> bool:
    return isinstance(x, ClientData)


def client_data(examples_per_client: Sequence[Any], *, check: bool = True) -> ClientData:
    """Builds a flat store of clients' examples.

    Args:
      examples_per_client: for each client, a pytree of arrays with a leading axis of n_k examples.
        Lists, data frames and their columns count as arrays.
      check: False skips the check that all numbers are finite.

    Raises:
      ValueError: if no client is given, a client has no examples or arrays of different lengths,
        clients' arrays have different shapes or types, or an entry is not finite.

    Example:
      >>> import numpy as np
      >>> data = client_data([{"x": np.ones((2, 3))}, {"x": np.zeros((1, 3))}])
      >>> data.examples["x"].shape, data.offsets.tolist(), data.counts.tolist()
      ((3, 3), [0, 2], [2, 1])
    """
    if not isinstance(examples_per_client, list | tuple):
        given = described(examples_per_client)
        raise TypeError(f"examples_per_client is {given}; give a list with one entry per client")
    if not len(examples_per_client):
        raise ValueError("examples_per_client is empty; give at least one client")
    counts: list[int] = []
    clients: list[list[np.ndarray]] = []
    _, structure = leaves_of(examples_per_client[0])
    for client, examples in enumerate(examples_per_client):
        leaves, own = leaves_of(examples)
        arrays = [
            x if type(x) is np.ndarray else plain_array(f"client {client}", x) for x in leaves
        ]
        lengths = {len(x) if x.ndim else 0 for x in arrays}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                f"client {client} has {sorted(lengths)} examples in its arrays; "
                "give every array the same positive number"
            )
        if own != structure:
            raise ValueError(
                f"client {client} has examples {own}, but client 0 has {structure}; give all "
                "clients the same arrays"
            )
        counts += lengths
        clients.append(arrays)
    flat = [_joined(each) for each in zip(*clients, strict=True)]
    return flat_client_data(jax.tree.unflatten(structure, flat), counts, check=check)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates clients' arrays, or raises `ValueError` if examples differ in shape."""
    first = arrays[0].shape[1:]
    for client, x in enumerate(arrays):
        if x.shape[1:] != first:
            raise ValueError(
                f"an example of client {client} has shape {x.shape[1:]}, but one of client 0 "
                f"{first}; make them equal"
            )
    return np.concatenate(arrays)


def flat_client_data(examples: Any, counts: Any, *, check: bool = True) -> ClientData:
    """Builds a flat store of examples that are already sorted by client.

    Args:
      examples: a pytree of arrays with a leading axis over all examples. Lists, data frames and
        their columns count as arrays.
      counts: ``[clients]``, n_k >= 1.
      check: False skips the check that all numbers are finite.

    Raises:
      ValueError: if no client is given, a client has no examples, the counts do not add up to the
        number of examples, or entries are not finite numbers.

    Example:
      >>> import numpy as np
      >>> flat_client_data(np.arange(3), [2, 1]).offsets.tolist()
      [0, 2]
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or not len(counts) or counts.dtype.kind not in "iu" or counts.min() < 1:
        raise ValueError(f"counts is {counts}; give at least one client, and each 1 or more")
    counts = counts.astype(np.int64)  # sums of narrow types could wrap around
    leaves, structure = leaves_of(examples)
    arrays = [array_of("an array of examples", leaf, check=check) for leaf in leaves]
    for array in arrays:
        length = len(array) if array.ndim else 0
        if length != counts.sum():
            raise ValueError(f"counts add up to {counts.sum()}, but there are {length} examples")
    return _store(jax.tree.unflatten(structure, arrays), counts)


def stack_client_data(stores: Sequence[ClientData]) -> ClientData:
    """Stacks several stores of the same clients, for `select` to choose from.

    Models or replicas with different data can then share one store without padding.

    Args:
      stores: stores with the same number of clients and the same shapes of examples.

    Raises:
      ValueError: if the numbers of clients differ.

    Example:
      >>> import numpy as np
      >>> both = stack_client_data([client_data([np.ones(2)]), client_data([np.zeros(3)])])
      >>> both.select(1).offsets.tolist(), both.select(0).examples is both.examples
      ([2], True)
    """
    sizes = {store.num_clients for store in stores}
    if len(sizes) != 1:
        raise ValueError(f"the stores have {sorted(sizes)} clients; give equally many")
    stores = [store.gathered() for store in stores]
    examples = jax.tree.map(lambda *x: jnp.concatenate(x), *(store.examples for store in stores))
    starts = np.cumsum([0, *(store.num_examples for store in stores[:-1])])
    offsets = [store.offsets + int(start) for store, start in zip(stores, starts, strict=True)]
    return ClientData(
        examples,
        jnp.stack(offsets),
        jnp.stack([store.counts for store in stores]),
        min(store.min_count for store in stores),
        max(store.max_count for store in stores),
        max(store.num_examples for store in stores),
    )


def shared_client_data(examples: Any, deals: Sequence[Sequence[np.ndarray]]) -> ClientData:
    """Stacks several partitions of one dataset without copying, for `select` to choose from.

    Clients may share examples.

    Args:
      examples: a pytree of arrays with a leading axis over all examples.
      deals: for each partition and each client, the rows of its examples, 1 or more.

    Raises:
      ValueError: if the numbers of clients differ, a client has no examples, or a row does not
        exist.

    Example:
      >>> import numpy as np
      >>> both = shared_client_data(np.arange(4) ** 2, [[[0, 1], [2]], [[3], [3, 2, 1]]])
      >>> both.select(1).take(jnp.arange(4)).tolist(), both.select(0).counts.tolist()
      ([9, 9, 4, 1], [2, 1])
    """
    sizes = {len(parts) for parts in deals}
    if len(sizes) != 1:
        raise ValueError(f"the ways have {sorted(sizes)} clients; give equally many")
    counts = np.array([[len(rows) for rows in parts] for parts in deals])
    if not counts.size or counts.min() < 1:
        raise ValueError("a client has no example; give at least one client, and each 1 or more")
    leaves, structure = leaves_of(examples)
    examples = jax.tree.unflatten(structure, [array_of("an array of examples", x) for x in leaves])
    lengths = {len(leaf) for leaf in jax.tree.leaves(examples)}
    if len(lengths) != 1:
        raise ValueError(f"examples have the lengths {sorted(lengths)}; give arrays of one length")
    # Pad shorter partitions with row 0, which is never read, because no client's slice of `order`
    # reaches the padding.
    order = np.zeros((len(counts), counts.sum(1).max()), np.int64)
    for places, parts in zip(order, deals, strict=True):
        rows = np.concatenate([np.asarray(each) for each in parts])
        places[: len(rows)] = rows
    (number,) = lengths
    if order.min() < 0 or order.max() >= number:
        raise ValueError(f"rows are {order.min()} to {order.max()}, of {number} examples")
    return _store(examples, counts, jax.device_put(order.astype(np.int32)))


def _store(
    examples: Any, counts: Int[np.ndarray, "*ways clients"], order: Array | None = None
) -> ClientData:
    offsets = (counts.cumsum(-1) - counts).astype(np.int32)
    bounds = int(counts.min()), int(counts.max()), int(counts.sum(-1).max())
    # Do not use `jnp.asarray`, because it would compile a program for every shape.
    examples, offsets, sizes = jax.device_put((examples, offsets, counts.astype(np.int32)))
    return ClientData(examples, offsets, sizes, *bounds, order)
