"""Classification of clients' examples with a network."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm.base import Batching, Index, Metrics, Params
from fedjax_mm.base.calls import in_short
from fedjax_mm.checks.annotations import Count, Positive, checked
from fedjax_mm.checks.values import check_between
from fedjax_mm.data.clients import ClientData
from fedjax_mm.data.federated import FederatedData, check_federated
from fedjax_mm.tasks.modules import (
    STATISTICS,
    Network,
    check_module,
    check_outputs,
    follow,
    has_statistics,
    initial,
    logits_of,
    streams_of,
    takes_weights,
    trained_outputs,
)

_BLOCK_BYTES = 2**20  # bytes of features to evaluate at a time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Classification:
    """Task that minimizes the cross-entropy of a module's logits, built by `classification`.

    Attributes:
      train: every client's training examples, ``(features, labels)``.
      test: test examples, either per client or in one pool that all clients share.
      column: the label column to learn, if labels have columns.
      scale: the factor that multiplies the features.
      module: the network, from features ``[batch, ...]`` to logits ``[batch, classes]``: a flax
        module, or a pair of functions.
      rngs: names of the random streams that the module uses in training, such as "dropout".
      takes_weights: whether the module also gets the examples' weights.
      reduction: the reduction of the loss over a batch.
      block_size: the number of examples to evaluate at a time.
    """

    train: ClientData
    test: ClientData
    column: Array | None
    scale: Array | None
    module: Network = dataclasses.field(metadata={"static": True})
    rngs: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    takes_weights: bool = dataclasses.field(metadata={"static": True})
    reduction: Literal["mean", "sum"] = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})

    __repr__ = in_short

    @property
    def num_clients(self) -> int:
        """The number of clients, N."""
        return self.train.num_clients

    def init(self, rng_key: PRNGKeyArray) -> Params:
        """Initial parameters of the module."""
        features = jax.tree.map(lambda x: x[:1], self.train.examples[0])
        return initial(self.module, rng_key, self._scaled(features), self.rngs)

    def weight(self, client: Index) -> Float[Array, ""]:
        """The number of training examples, n_k."""
        return self.train.counts[client].astype(float)

    def num_batches(self, client: Index, size: int | None) -> int | Int[Array, ""]:
        """Steps per epoch."""
        return self.train.num_batches(client, size)

    def batch(self, rng_key: PRNGKeyArray, client: Index, step: Index, how: Batching) -> Any:
        """Rows of the client's training examples, their weights, and a key or None.

        See `ClientData.batch`. The key is for modules with random streams.
        """
        key = jax.random.fold_in(rng_key, step) if self.rngs else None
        return *self.train.batch(rng_key, client, step, how), key

    def examples(self, params: Params, batch: Any) -> tuple[Any, Float[Array, " batch"]]:
        """Batches of one row, and the examples' weights.

        Raises:
          ValueError: if the loss of an example depends on others, or the loss is a sum.
        """
        if self.takes_weights or has_statistics(params) or self.reduction == "sum":
            raise ValueError(
                f"the loss of module {type(self.module).__name__} is no mean of losses of single "
                "examples; use a module without batch norm, and reduction='mean'"
            )
        rows, weights, key = batch
        keys = None if key is None else jax.random.split(key, len(rows))
        return (rows[:, None], jnp.ones_like(weights)[:, None], keys), weights

    def loss(self, params: Params, batch: Any) -> Float[Array, ""]:
        """Mean or sum of the cross-entropy over a batch."""
        (logits, changed), labels, weights = self._trained(params, batch)
        losses, _ = self._compared(logits, labels)
        total = jnp.sum(weights * losses)
        loss = total if self.reduction == "sum" else total / jnp.sum(weights)
        return loss + follow(params, changed[STATISTICS]) if has_statistics(params) else loss

    def features(
        self, params: Params, batch: Any
    ) -> tuple[Float[Array, "batch features"], Float[Array, " batch"]]:
        """Representations that the module sows, and the weights of the examples.

        Raises:
          ValueError: if it sows none.
        """
        (_, changed), _, weights = self._trained(params, batch)
        sown = changed.get("intermediates", {}).get("representation")
        if sown is None:
            raise ValueError(
                f"module {type(self.module).__name__} gives no features; call "
                "self.sow('intermediates', 'representation', x) before its last layer"
            )
        shares = weights if self.reduction == "sum" else weights / jnp.sum(weights)
        return sown[0].reshape(len(weights), -1), shares

    def client_loss(self, params: Params, client: Index) -> Float[Array, ""]:
        """F_k(w), the mean cross-entropy over the client's training examples."""
        return self.client_metrics(params, client, self.train)["loss"]

    def client_metrics(self, params: Params, client: Index, data: ClientData) -> Metrics:
        """Mean cross-entropy and accuracy over one client's examples in `data`."""
        nothing = jax.random.key(0)  # unused, because a batch of all rows is not random
        rows, weights = data.batch(nothing, client, jnp.int32(0), Batching())
        features, labels = data.take(rows)
        losses, is_right = self._losses(params, features, labels, weights)
        total = jnp.sum(weights)
        return {
            "loss": jnp.sum(weights * losses) / total,
            "accuracy": jnp.sum(weights * is_right) / total,
        }

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> Metrics:
        """Mean cross-entropy and accuracy over all training and all test examples."""
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
        """Computes mean cross-entropy and accuracy in one pass over the data, in bounded memory.

        Args:
          params: one model's parameters.
          data: the examples, such as `train` or `test`.
          per_client: whether to return means over each client's examples, ``[clients]``.
          num_clients: the number of clients to evaluate, starting with the first; None means all.
        """
        if num_clients is not None:
            offsets, counts = data.offsets[:num_clients], data.counts[:num_clients]
            data = dataclasses.replace(data, offsets=offsets, counts=counts)
        if self.takes_weights and not has_statistics(params):
            return self._evaluate_one_by_one(params, data, per_client)
        size = min(self.block_size, data.num_places)
        first, last = data.offsets[0], data.offsets[-1] + data.counts[-1]
        num_sums = data.num_clients if per_client else 1

        def add_block(block: Int[Array, ""], sums: Float[Array, "sums 2"]) -> Any:
            begin = first + block * size
            # Start the last block earlier, because `dynamic_slice` clamps blocks that pass the end,
            # and skip rows already counted in an earlier block.
            start = jnp.minimum(begin, data.num_places - size)
            rows = start + jnp.arange(size)
            is_new = (rows >= begin) & (rows < last)
            features, labels = data.block(start, size)
            weights = is_new.astype(sums.dtype)
            losses, is_right = self._losses(params, features, labels, weights)
            values = jnp.where(is_new[:, None], jnp.stack([losses, is_right], axis=1), 0)
            if not per_client:
                return sums + values.sum(0)
            owner = jnp.searchsorted(data.offsets, rows, side="right") - 1
            return sums.at[owner].add(values)

        # Use a static bound for all clients, because reverse-mode differentiation needs one.
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
        # Evaluate each client's examples as one batch, as LEAF does, because a module that takes
        # weights, as for batch norm without running statistics, depends on the whole batch.
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
    ) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
        """Cross-entropy of each example, and 1 if its prediction is correct, else 0."""
        given = weights if self.takes_weights else None
        logits = logits_of(self.module, params, self._scaled(features), given, {})
        return self._compared(logits, labels)

    def _trained(self, params: Params, batch: Any) -> Any:
        """Outputs of a batch in training mode, its labels, and its weights."""
        rows, weights, rng_key = batch
        rngs = {name: jax.random.fold_in(rng_key, i) for i, name in enumerate(self.rngs)}
        features, labels = self.train.take(rows)
        given, x = weights if self.takes_weights else None, self._scaled(features)
        return trained_outputs(self.module, params, x, given, rngs), labels, weights

    def _compared(self, logits: Array, labels: Array) -> tuple[Array, Array]:
        labels = labels if self.column is None else labels[:, self.column]
        # Put examples on the last axis, because XLA vectorizes along it on CPUs.
        logits = logits.T
        chosen = jnp.arange(len(logits))[:, None] == labels
        picked = jnp.sum(jnp.where(chosen, logits, 0), axis=0)
        losses = jax.nn.logsumexp(logits, axis=0) - picked
        return losses, (jnp.argmax(logits, axis=0) == labels).astype(losses.dtype)

    def _scaled(self, features: Array) -> Array:
        if not jnp.issubdtype(features.dtype, jnp.floating):
            features = features.astype(float)
        return features if self.scale is None else features * self.scale


@checked
def classification(
    data: FederatedData,
    module: Network | tuple[Callable[..., Any], Callable[..., Any]],
    *,
    reduction: Literal["mean", "sum"] = "mean",
    column: Any = None,
    rngs: Sequence[str] = (),
    scale: Positive | None = None,
    block_size: Count | None = None,
    check: bool = True,
) -> Classification:
    """Makes the task of training a network on clients' examples.

    Args:
      data: examples ``(features [examples, ...], labels [examples])``.
      module: a network from features ``[batch, ...]`` to logits ``[batch, classes]``: a flax
        module, or functions ``(init, apply)``, where ``init(rng_key, x)`` returns a pytree of float
        arrays and ``apply(params, x)`` logits. If the module or `apply` has an argument `weights`,
        it also gets the examples' weights, so that it can ignore padding rows of weight 0. An
        argument `rng_key` of `apply` is a key in training and None in evaluation. Points of a sweep
        are computed together if they have the same functions, so define them outside `build`.
        Running statistics of ``nn.BatchNorm(momentum=0.0)`` are part of the parameters; local steps
        move them towards those of their batches, by SGD at the local learning rate. Derivatives of
        a whole run do not pass through a batch's statistics to the running ones.
      reduction: how a local step reduces the loss over its batch: "mean", or "sum" as in LEAF,
        which makes steps larger by a factor of B.
      column: the column of labels ``[examples, columns]`` to learn; it may be traced.
      rngs: names of random streams that a flax module uses in training, such as ("dropout",).
      scale: the factor that multiplies the features; 1 / 255 maps bytes to [0, 1].
      block_size: the number of examples to evaluate at a time; defaults to 1 MiB of them.
      check: False skips the checks of labels and of the module's outputs.

    Raises:
      TypeError: if `data` or `module` has the wrong type, such as a class instead of an instance,
        or functions have other arguments.
      ValueError: if arguments do not fit together, labels are not 0 ... C - 1, the module does not
        have one output per class, parameters are not arrays of floats, or `rngs` are not the
        streams that the module uses.

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

      The same network as two functions:

      >>> def init(rng_key, x):
      ...     return {"kernel": jnp.zeros((x.shape[-1], 2)), "bias": jnp.zeros(2)}
      >>> def apply(params, x):
      ...     return x @ params["kernel"] + params["bias"]
      >>> task = classification(data, (init, apply))
      >>> round(float(task.evaluate(task.init(jax.random.key(0)), task.train)["loss"]), 4)
      0.6931
    """
    network = check_module(module)
    if check:
        check_federated(data)
    features, labels = data.train.examples
    if (labels.ndim == 2) != (column is not None):
        raise ValueError(
            f"labels have shape {labels.shape} and column is {column}; give a column if and only "
            "if labels have columns"
        )
    if block_size is None:
        example_bytes = max(1, math.prod(features.shape[1:]) * 4)
        block_size = max(1, _BLOCK_BYTES // example_bytes)
    if column is not None and not isinstance(column, jax.core.Tracer):
        check_between("column", column, 0, labels.shape[1] - 1)
    column = None if column is None else jnp.asarray(column, jnp.int32)
    if scale is not None:
        scale = jnp.asarray(scale, float)
    streams, has_weights = streams_of(network, rngs), takes_weights(network)
    if check:
        check_outputs(network, features, data.num_classes, streams, has_weights)
    static = network, streams, has_weights, reduction, block_size
    return Classification(data.train, data.test, column, scale, *static)
