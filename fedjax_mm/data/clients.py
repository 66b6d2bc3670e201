"""Every client's examples in one flat store, and minibatches drawn from it on the device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClientData:
    """Examples of all clients, one client after the other; build it with `client_data`.

    Attributes:
      examples: a pytree of arrays with a leading axis over all examples.
      offsets: ``int32[clients]``, where each client's examples begin.
      counts: ``int32[clients]``, n_k >= 1.
      max_count: S, the largest n_k.
    """

    examples: Any
    offsets: Array
    counts: Array
    max_count: int = dataclasses.field(metadata={"static": True})

    def batch(
        self, rng_key: PRNGKeyArray, client: Int[Array, ""], step: Int[Array, ""], size: int | None
    ) -> tuple[Any, Float[Array, " batch"]]:
        """The examples of one local step, and their weights, which sum to 1.

        `size` independent uniform draws from the client's examples; or all of them if None, where
        rows past the client's last example have weight 0.
        """
        count = self.counts[client]
        if size is None:
            rows = jnp.arange(self.max_count, dtype=jnp.int32)
            weights = jnp.where(rows < count, 1 / count.astype(float), 0.0)
            rows = jnp.minimum(rows, count - 1)
        else:
            step_key = jax.random.fold_in(rng_key, step)
            rows = jax.random.randint(step_key, (size,), 0, count, jnp.int32)
            weights = jnp.full(size, 1 / size)
        return jax.tree.map(lambda x: x[self.offsets[client] + rows], self.examples), weights


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
        int(counts.max()),
    )
