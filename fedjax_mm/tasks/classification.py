"""Classification of every client's examples by a flax module."""

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm.base import Batching, Params
from fedjax_mm.checks import check_count
from fedjax_mm.data.clients import ClientData
from fedjax_mm.data.federated import FederatedData

_BLOCK_BYTES = 2**20  # of features that are evaluated at once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Classification:
    """Cross-entropy of a module's logits; build it with `classification`.

    Attributes:
      train: every client's training examples, ``(features, labels)``.
      test: the same for testing, or one pool that stands for all clients.
      column: which column of the labels is learned, if they have columns.
      scale: what features are multiplied by.
      module: the network, from features ``[batch, ...]`` to logits ``[batch, classes]``.
      rngs: names of the random streams that the module wants in training, such as "dropout".
      takes_weights: whether the module is called with the examples' weights too.
      reduction: of the loss over a batch.
      block_size: examples that are evaluated at once.
    """

    train: ClientData
    test: ClientData
    column: Array | None
    scale: Array | None
    module: nn.Module = dataclasses.field(metadata={"static": True})
    rngs: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    takes_weights: bool = dataclasses.field(metadata={"static": True})
    reduction: Literal["mean", "sum"] = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_clients(self) -> int:
        """N."""
        return self.train.num_clients

    def init(self, rng_key: PRNGKeyArray) -> Params:
        """The module's initial parameters."""
        features = jax.tree.map(lambda x: x[:1], self.train.examples[0])
        return self.module.init(rng_key, self._scaled(features))["params"]

    def weight(self, client: Int[Array, ""]) -> Float[Array, ""]:
        """n_k."""
        return self.train.counts[client].astype(float)

    def num_batches(self, client: Int[Array, ""], size: int | None) -> int | Int[Array, ""]:
        """Steps of an epoch."""
        return self.train.num_batches(client, size)

    def batch(
        self, rng_key: PRNGKeyArray, client: Int[Array, ""], step: Int[Array, ""], how: Batching
    ) -> Any:
        """Rows of the client's training examples, their weights, and a key if the module wants one.

        See `ClientData.batch`.
        """
        key = jax.random.fold_in(rng_key, step) if self.rngs else None
        return *self.train.batch(rng_key, client, step, how), key

    def loss(self, params: Params, batch: Any) -> Float[Array, ""]:
        """The cross-entropy of a batch, its mean or its sum."""
        rows, weights, rng_key = batch
        rngs = {name: jax.random.fold_in(rng_key, i) for i, name in enumerate(self.rngs)}
        features, labels = self.train.take(rows)
        losses, _ = self._losses(params, features, labels, weights, rngs)
        total = jnp.sum(weights * losses)
        return total if self.reduction == "sum" else total / jnp.sum(weights)

    def client_loss(self, params: Params, client: Int[Array, ""]) -> Float[Array, ""]:
        """F_k: the mean cross-entropy of the client's training examples, without dropout."""
        return self.client_metrics(params, client, self.train)["loss"]

    def client_metrics(
        self, params: Params, client: Int[Array, ""], data: ClientData
    ) -> dict[str, Float[Array, ""]]:
        """Mean cross-entropy and accuracy over one client's examples, such as those of `test`."""
        nothing = jax.random.key(0)  # all rows: nothing is drawn
        rows, weights = data.batch(nothing, client, jnp.int32(0), Batching())
        features, labels = data.take(rows)
        losses, is_right = self._losses(params, features, labels, weights, {})
        total = jnp.sum(weights)
        return {
            "loss": jnp.sum(weights * losses) / total,
            "accuracy": jnp.sum(weights * is_right) / total,
        }

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> dict[str, Float[Array, ""]]:
        """Mean cross-entropy and accuracy over all training and over all test examples."""
        del rng_key
        train, test = self.evaluate(params, self.train), self.evaluate(params, self.test)
        return {
            "loss": train["loss"],
            "train_accuracy": train["accuracy"],
            "test_loss": test["loss"],
            "test_accuracy": test["accuracy"],
        }

    def evaluate(
        self,
        params: Params,
        data: ClientData,
        *,
        per_client: bool = False,
        num_clients: int | None = None,
    ) -> dict[str, Float[Array, "*clients"]]:
        """Mean cross-entropy and accuracy in one pass over the data, in bounded memory.

        A module that takes weights looks at a batch as a whole, as batch norm does: it sees each
        client's examples as one batch, as LEAF has it.

        Args:
          params: of one model.
          data: such as `train` or `test`.
          per_client: the means over each client's examples, ``[clients]``, instead of over all.
          num_clients: of the first so many clients alone; all of them if None.
        """
        if num_clients is not None:
            offsets, counts = data.offsets[:num_clients], data.counts[:num_clients]
            data = dataclasses.replace(data, offsets=offsets, counts=counts)
        if self.takes_weights:
            return self._evaluate_one_by_one(params, data, per_client)
        size = min(self.block_size, data.num_places)
        first, last = data.offsets[0], data.offsets[-1] + data.counts[-1]
        num_sums = data.num_clients if per_client else 1

        def add_block(block: Int[Array, ""], sums: Float[Array, "sums 2"]) -> Any:
            begin = first + block * size
            start = jnp.minimum(begin, data.num_places - size)  # the last block may overlap
            rows = start + jnp.arange(size)
            is_new = (rows >= begin) & (rows < last)
            features, labels = data.block(start, size)
            weights = is_new.astype(sums.dtype)
            losses, is_right = self._losses(params, features, labels, weights, {})
            values = jnp.where(is_new[:, None], jnp.stack([losses, is_right], axis=1), 0)
            if not per_client:
                return sums + values.sum(0)
            owner = jnp.searchsorted(data.offsets, rows, side="right") - 1
            return sums.at[owner].add(values)

        # A number of blocks that is known to the compiler can be differentiated in reverse.
        most = last - first if num_clients is not None else data.num_examples
        num_blocks = (most + size - 1) // size
        sums = lax.fori_loop(0, num_blocks, add_block, jnp.zeros((num_sums, 2)))
        counts = data.counts if per_client else jnp.sum(data.counts, keepdims=True)
        means = sums / counts[:, None]
        loss, accuracy = means.T if per_client else means[0]
        return {"loss": loss, "accuracy": accuracy}

    def _evaluate_one_by_one(
        self, params: Params, data: ClientData, per_client: bool
    ) -> dict[str, Float[Array, "*clients"]]:
        """As `evaluate`, one client after the other."""
        clients = jnp.arange(data.num_clients)
        values = lax.map(lambda client: self.client_metrics(params, client, data), clients)
        if per_client:
            return values
        shares = data.counts / jnp.sum(data.counts)
        return {name: jnp.sum(shares * value) for name, value in values.items()}

    def _losses(
        self,
        params: Params,
        features: Any,
        labels: Any,
        weights: Float[Array, " batch"],
        rngs: dict[str, PRNGKeyArray],
    ) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
        """Each example's cross-entropy, and 1 where the largest logit is right."""
        labels = labels if self.column is None else labels[:, self.column]
        more = [weights] if self.takes_weights else []
        call: Any = self.module.apply  # flax's type allows for further results
        logits = call({"params": params}, self._scaled(features), *more, rngs=rngs)
        # Classes first: they are few, and the last axis is the one that vector units work along.
        logits = logits.T
        chosen = jnp.arange(len(logits))[:, None] == labels
        picked = jnp.sum(jnp.where(chosen, logits, 0), axis=0)
        losses = jax.nn.logsumexp(logits, axis=0) - picked
        return losses, (jnp.argmax(logits, axis=0) == labels).astype(losses.dtype)

    def _scaled(self, features: Array) -> Array:
        if not jnp.issubdtype(features.dtype, jnp.floating):
            features = features.astype(float)
        return features if self.scale is None else features * self.scale


def classification(
    data: FederatedData,
    module: nn.Module,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    column: Any = None,
    rngs: Sequence[str] = (),
    scale: Any = None,
    block_size: int | None = None,
) -> Classification:
    """A module trained on every client's examples.

    Args:
      data: whose examples are ``(features [examples, ...], labels [examples])``.
      module: called with features it returns logits; with the examples' weights too if it has an
        argument `weights`, so that it can leave out the rows of weight 0 that fill a batch.
      reduction: of the loss over a local step's batch: "mean", or "sum" as LEAF has it, whose steps
        are as many times larger.
      column: where labels are ``[examples, columns]``, the one to learn; it may be traced.
      rngs: names of random streams that the module wants in training, such as ("dropout",).
      scale: multiplies the features; 1 / 255 makes numbers between 0 and 1 of bytes.
      block_size: examples that are evaluated at once; by default as many as make up a mebibyte.

    Raises:
      ValueError: if the arguments do not fit together.

    Example:
      >>> import flax.linen as nn, jax, numpy as np
      >>> from fedjax_mm.data.clients import client_data
      >>> from fedjax_mm.tasks.networks import LogisticRegression
      >>> clients = client_data([(np.eye(2), np.arange(2)), (np.eye(2)[:1], np.zeros(1, int))])
      >>> data = FederatedData("two", "synthetic", 2, clients, clients)
      >>> task = classification(data, LogisticRegression(2))
      >>> params = task.init(jax.random.key(0))
      >>> sorted(task.metrics(jax.random.key(0), params))
      ['loss', 'test_accuracy', 'test_loss', 'train_accuracy']
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
    check_count("block_size", block_size)
    features, labels = data.train.examples
    if (labels.ndim == 2) != (column is not None):
        raise ValueError(
            f"labels have shape {labels.shape} and column is {column}; give a column if and only "
            "if labels have columns"
        )
    if block_size is None:
        example_bytes = max(1, math.prod(features.shape[1:]) * 4)
        block_size = max(1, _BLOCK_BYTES // example_bytes)
    return Classification(
        data.train,
        data.test,
        None if column is None else jnp.asarray(column, jnp.int32),
        None if scale is None else jnp.asarray(scale, float),
        module,
        tuple(rngs),
        "weights" in inspect.signature(module.__call__).parameters,
        reduction,
        block_size,
    )
