"""Every client's examples in one flat store, and minibatches drawn from it on the device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from fedjax_mm.base import Batching
from fedjax_mm.shuffles import drawn, fold_words, hash_words, shuffled


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClientData:
    """Examples of all clients, one client after the other; build it with `client_data`.

    Attributes:
      examples: a pytree of arrays with a leading axis over all examples.
      offsets: ``int32[clients]``, where each client's examples begin; a stack has a leading axis.
      counts: the same, n_k >= 1.
      min_count: a lower bound of all n_k.
      max_count: S, an upper bound of all n_k.
      num_examples: an upper bound of the sum of all n_k.
      order: ``int32[places]``, the row in `examples` of the example at each place, clients' places
        lying one client after the other; a stack has a leading axis. None if the examples do so
        themselves.
    """

    examples: Any
    offsets: Array
    counts: Array
    min_count: int = dataclasses.field(metadata={"static": True})
    max_count: int = dataclasses.field(metadata={"static": True})
    num_examples: int = dataclasses.field(metadata={"static": True})
    order: Array | None = None

    @property
    def num_clients(self) -> int:
        """N."""
        return self.counts.shape[-1]

    def select(self, index: Any) -> "ClientData":
        """One of those that `stack_client_data` put together; `index` may be traced."""
        order = None if self.order is None else self.order[index]
        return dataclasses.replace(
            self, offsets=self.offsets[index], counts=self.counts[index], order=order
        )

    @property
    def num_places(self) -> int:
        """The length of what offsets point into: the examples, or their order."""
        return (
            len(jax.tree.leaves(self.examples)[0]) if self.order is None else self.order.shape[-1]
        )

    def gathered(self) -> "ClientData":
        """The same with examples that lie one client after the other, copied if need be."""
        if self.order is None:
            return self
        if self.order.ndim != 1:
            raise ValueError(f"there are {len(self.order)} ways to deal; take one by select")
        return dataclasses.replace(
            self, examples=self.take(jnp.arange(len(self.order))), order=None
        )

    def num_batches(self, client: Int[Array, ""], size: int | None) -> int | Int[Array, ""]:
        """How many batches make an epoch, ``ceil(n_k / B)``; a plain int if of all clients alike.

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
        """The rows of one local step, for `take`, and their weights: 1, or 0 where they only fill.

        `Batching` tells which; rows that fill a batch are some of the client's own.
        """
        rows, is_there = self._rows(hash_words(rng_key), self.counts[client], step, how)
        return self.offsets[client] + rows, is_there.astype(float)

    def take(self, rows: Int[Array, " batch"]) -> Any:
        """The examples of some rows."""
        rows = rows if self.order is None else self.order[rows]
        return jax.tree.map(lambda x: x[rows], self.examples)

    def block(self, start: Int[Array, ""], size: int) -> Any:
        """The examples of `size` rows from `start` on."""
        if self.order is not None:
            return self.take(start + jnp.arange(size))
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), self.examples)

    def _rows(
        self, words: UInt32[Array, "2"], count: Int[Array, ""], step: Int[Array, ""], how: Batching
    ) -> tuple[Int[Array, " batch"], Bool[Array, " batch"]]:
        """Numbers of the client's examples, and which of them count."""
        places = jnp.arange(how.size or self.max_count, dtype=jnp.int32)
        if how.limit is not None:
            rows = shuffled(fold_words(words, step), places, count)
            return rows, places < jnp.clip(how.limit, 1, count)
        if how.size is None:
            return jnp.minimum(places, count - 1), places < count
        if how.order == "iid":
            return drawn(words, step * how.size + places, count), places >= 0
        per_epoch = (count + how.size - 1) // how.size
        places += step % per_epoch * how.size
        return shuffled(fold_words(words, step // per_epoch), places, count), places < count


def client_data(examples_per_client: Sequence[Any]) -> ClientData:
    """The flat store of one pytree of examples per client.

    Args:
      examples_per_client: for each client a pytree of arrays with a leading axis of its n_k
        examples.

    Raises:
      ValueError: if there is no client, or a client has no examples or unequal numbers of them.

    Example:
      >>> import numpy as np
      >>> data = client_data([{"x": np.ones((2, 3))}, {"x": np.zeros((1, 3))}])
      >>> data.examples["x"].shape, data.offsets.tolist(), data.counts.tolist()
      ((3, 3), [0, 2], [2, 1])
    """
    if not examples_per_client:
        raise ValueError("there are no clients; give at least one")
    counts: list[int] = []
    for client, examples in enumerate(examples_per_client):
        lengths = {len(leaf) for leaf in jax.tree.leaves(examples)}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                f"client {client} has {sorted(lengths)} examples in its arrays; "
                "give every array the same positive number"
            )
        counts += lengths
    flat = jax.tree.map(lambda *leaves: np.concatenate(leaves), *examples_per_client)
    return flat_client_data(flat, counts)


def flat_client_data(examples: Any, counts: Any) -> ClientData:
    """The store of examples that already lie one client after the other.

    Args:
      examples: a pytree of arrays with a leading axis over all examples.
      counts: ``[clients]``, n_k >= 1.

    Raises:
      ValueError: if there is no client, a client has no examples, or the counts do not add up.

    Example:
      >>> import numpy as np
      >>> flat_client_data(np.arange(3), [2, 1]).offsets.tolist()
      [0, 2]
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or not len(counts) or counts.min() < 1:
        raise ValueError(f"counts is {counts}; give every one of at least one client 1 or more")
    for leaf in jax.tree.leaves(examples):
        if len(leaf) != counts.sum():
            raise ValueError(f"counts add up to {counts.sum()}, but there are {len(leaf)} examples")
    offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return ClientData(
        jax.tree.map(jnp.asarray, examples),
        jnp.asarray(offsets, jnp.int32),
        jnp.asarray(counts, jnp.int32),
        int(counts.min()),
        int(counts.max()),
        int(counts.sum()),
    )


def stack_client_data(stores: Sequence[ClientData]) -> ClientData:
    """The same clients with several data each, in one flat store; take them by `select`.

    What is selected shares the store, so that models or replicas with data of their own need it
    only once, and nothing is padded to the largest.

    Args:
      stores: of equally many clients and with examples of the same form.

    Raises:
      ValueError: if numbers of clients differ.

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
    """Examples that are dealt to the same clients in several ways; take one way by `select`.

    The examples are not copied, and clients may share them.

    Args:
      examples: a pytree of arrays with a leading axis over all examples.
      deals: of each way, for each client the rows of its examples, 1 or more.

    Raises:
      ValueError: if numbers of clients differ, a client has no example, or a row does not exist.

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
        raise ValueError("a client has no example; give every one of at least one client 1 or more")
    lengths = {len(leaf) for leaf in jax.tree.leaves(examples)}
    if len(lengths) != 1:
        raise ValueError(f"examples have the lengths {sorted(lengths)}; give arrays of one length")
    order = np.zeros((len(counts), counts.sum(1).max()), np.int64)
    for places, parts in zip(order, deals, strict=True):
        rows = np.concatenate([np.asarray(each) for each in parts])
        places[: len(rows)] = rows
    (number,) = lengths
    if order.min() < 0 or order.max() >= number:
        raise ValueError(f"rows are {order.min()} to {order.max()}, of {number} examples")
    return ClientData(
        jax.tree.map(jnp.asarray, examples),
        jnp.asarray(counts.cumsum(1) - counts, jnp.int32),
        jnp.asarray(counts, jnp.int32),
        int(counts.min()),
        int(counts.max()),
        int(counts.sum(1).max()),
        jnp.asarray(order, jnp.int32),
    )
