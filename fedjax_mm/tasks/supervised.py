"""Supervised learning: a network, a loss of its outputs and of clients' targets, and metrics."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedjax_mm.base import Batching, Index, Metrics, Params
from fedjax_mm.base.calls import in_short
from fedjax_mm.base.programs import Memory, split
from fedjax_mm.checks.annotations import Count, Positive, checked
from fedjax_mm.checks.values import check_between, described
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
    name_of,
    outputs_of,
    streams_of,
    takes_weights,
    trained_outputs,
)
from fedjax_mm.tasks.scores import Score, score_of

_BATCH = 1009  # examples of a batch in checks, unlikely to equal another dimension
_BLOCK_BYTES = 2**20  # bytes of features to evaluate at a time

_checked = Memory(64)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Supervised:
    """Task that minimizes a loss of a network's outputs and the targets, built by `supervised`.

    Attributes:
      train: every client's training examples, ``(features, targets)``.
      test: test examples, either per client or in one pool that all clients share.
      column: the column of the targets to learn; None means all of them.
      scale: the factor that multiplies the features.
      module: the network, from features ``[batch, ...]`` to outputs: a flax module, or a pair of
        functions.
      example_loss: the loss of each example.
      scores: the metrics by name.
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
    example_loss: Score = dataclasses.field(metadata={"static": True})
    scores: tuple[tuple[str, Score], ...] = dataclasses.field(metadata={"static": True})
    rngs: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    takes_weights: bool = dataclasses.field(metadata={"static": True})
    reduction: Literal["mean", "sum"] = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})

    __repr__ = in_short

    @property
    def num_clients(self) -> int:
        """The number of clients, N."""
        return self.train.num_clients

    @property
    def divides(self) -> bool:
        """Whether devices may divide the examples, see `View.divides`."""
        return not self.takes_weights

    @property
    def has_labels(self) -> bool:
        """Whether the targets are labels, one integer for each example."""
        targets = self.train.examples[1]
        axes = 1 + (self.column is not None)
        is_array = hasattr(targets, "dtype") and jnp.ndim(targets) == axes
        return is_array and bool(jnp.issubdtype(targets.dtype, jnp.integer))

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
        """Mean or sum of the examples' losses over a batch."""
        (outputs, changed), targets, weights = self._trained(params, batch)
        total = jnp.sum(weights * self.example_loss(outputs, targets))
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
        """F_k(w), the mean loss over the client's training examples."""
        return self.client_metrics(params, client, self.train)["loss"]

    def client_metrics(self, params: Params, client: Index, data: ClientData) -> Metrics:
        """Mean loss, and metrics that are means, over one client's examples in `data`."""
        return self._of_client(params, client, data)[0]

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> Metrics:
        """Loss and metrics over all training and all test examples."""
        del rng_key
        train, test = self.evaluate(params, self.train), self.evaluate(params, self.test)
        made = {"loss": train.pop("loss")} | {f"train_{name}": x for name, x in train.items()}
        return made | {f"test_{name}": x for name, x in test.items()}

    def evaluate(
        self,
        params: Params,
        data: ClientData,
        *,
        per_client: bool = False,
        num_clients: int | None = None,
    ) -> Metrics:
        """Computes the mean loss and the metrics in one pass over the data, in bounded memory.

        Metrics that are no means need the outputs of all examples at once.

        Args:
          params: one model's parameters.
          data: the examples, such as `train` or `test`.
          per_client: whether to return means over each client's examples, ``[clients]``, without
            metrics that are no means.
          num_clients: the number of clients to evaluate, starting with the first; None means all.
        """
        if num_clients is not None:
            offsets, counts = data.offsets[:num_clients], data.counts[:num_clients]
            data = dataclasses.replace(data, offsets=offsets, counts=counts)
        whole = {} if per_client else {n: x for n, x in self.scores if not x.is_mean}
        if self.takes_weights and not has_statistics(params):
            return self._evaluate_one_by_one(params, data, per_client, whole)
        size = min(self.block_size, data.num_places)
        first, last = data.ends
        zero = jnp.zeros(data.num_clients if per_client else ())
        names = ["loss", *(name for name, score in self.scores if score.is_mean)]

        def compared(start: Int[Array, ""], weights: Float[Array, " size"]) -> Any:
            return self._compared(params, data.block(start, size), weights)

        def add_block(block: Int[Array, ""], carry: Any) -> Any:
            sums, kept = carry
            begin = first + block * size
            # Start the last block earlier, because `dynamic_slice` clamps blocks that pass the end,
            # and skip rows already counted in an earlier block.
            start = jnp.minimum(begin, data.start + data.num_places - size)
            rows = start + jnp.arange(size)
            is_new = (rows >= begin) & (rows < last)
            outputs, targets = compared(start, is_new.astype(zero.dtype))
            each = self._means(outputs, targets)
            values = {name: jnp.where(is_new, value, 0) for name, value in each.items()}
            if whole:
                places = jnp.where(is_new, rows - first, room)
                kept = jax.tree.map(
                    lambda x, new: x.at[places].set(new, mode="drop"), kept, (outputs, targets)
                )
            if not per_client:
                return jax.tree.map(lambda x, new: x + jnp.sum(new), sums, values), kept
            owner = jnp.searchsorted(data.offsets, rows, side="right") - 1
            return jax.tree.map(partial(_add_at, owner), sums, values), kept

        # Use a static bound for all clients, because reverse-mode differentiation needs one.
        is_part = num_clients is not None or data.axis is not None
        most = last - first if is_part else data.num_examples
        num_blocks = (most + size - 1) // size
        kept = jax.eval_shape(compared, first, jnp.zeros(size)) if whole else ()
        room = min(data.num_examples, data.num_places)
        kept = jax.tree.map(lambda x: jnp.zeros((room, *x.shape[1:]), x.dtype), kept)
        # Keep sums apart, so that XLA leaves out metrics that nobody reads.
        start = dict.fromkeys(names, zero), kept
        sums, kept = lax.fori_loop(0, num_blocks, add_block, start)
        sums = data.total(sums)
        counts = data.counts if per_client else jnp.sum(data.counts)
        made = {name: sums[name] / counts for name in names}
        kept, weights = data.joined((kept, (jnp.arange(room) < last - first).astype(float)))
        return made | {name: score(*kept, weights=weights) for name, score in whole.items()}

    def _evaluate_one_by_one(
        self, params: Params, data: ClientData, per_client: bool, whole: Mapping[str, Score]
    ) -> Metrics:
        # Evaluate each client's examples as one batch, as LEAF does, because a module that takes
        # weights, as for batch norm without running statistics, depends on the whole batch.
        def of_client(client: Index) -> tuple[Metrics, Any]:
            means, *rows = self._of_client(params, client, data)
            return means, rows if whole else ()

        values, rows = lax.map(of_client, jnp.arange(data.num_clients))
        if per_client:
            return values
        shares = data.counts / jnp.sum(data.counts)
        made = {name: jnp.sum(shares * value) for name, value in values.items()}
        kept = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
        return made | {n: score(*kept[:2], weights=kept[2]) for n, score in whole.items()}

    def _of_client(
        self, params: Params, client: Index, data: ClientData
    ) -> tuple[Metrics, Any, Any, Float[Array, " batch"]]:
        """Means over one client's examples, and their outputs, targets and weights."""
        nothing = jax.random.key(0)  # unused, because a batch of all rows is not random
        rows, weights = data.batch(nothing, client, jnp.int32(0), Batching())
        outputs, targets = self._compared(params, data.take(rows), weights)
        total, each = jnp.sum(weights), self._means(outputs, targets)
        means = {name: jnp.sum(weights * value) / total for name, value in each.items()}
        return means, outputs, targets, weights

    def _means(self, outputs: Any, targets: Any) -> dict[str, Float[Array, " batch"]]:
        """The loss of each example, and its value of each metric that is a mean."""
        losses = self.example_loss(outputs, targets)
        of_examples = {name: score for name, score in self.scores if score.is_mean}
        return {"loss": losses} | {
            name: score(outputs, targets).astype(losses.dtype)
            for name, score in of_examples.items()
        }

    def _compared(
        self, params: Params, examples: tuple[Any, Any], weights: Float[Array, " batch"]
    ) -> tuple[Any, Any]:
        """Outputs in evaluation mode, and targets."""
        features, targets = examples
        given = weights if self.takes_weights else None
        outputs = outputs_of(self.module, params, self._scaled(features), given, {})
        return outputs, self._targets(targets)

    def _trained(self, params: Params, batch: Any) -> Any:
        """Outputs of a batch in training mode, its targets, and its weights."""
        rows, weights, rng_key = batch
        rngs = {name: jax.random.fold_in(rng_key, i) for i, name in enumerate(self.rngs)}
        features, targets = self.train.take(rows)
        given, x = weights if self.takes_weights else None, self._scaled(features)
        outputs = trained_outputs(self.module, params, x, given, rngs)
        return outputs, self._targets(targets), weights

    def _targets(self, targets: Any) -> Any:
        return targets if self.column is None else targets[:, self.column]

    def _scaled(self, features: Array) -> Array:
        if not jnp.issubdtype(features.dtype, jnp.floating):
            features = features.astype(float)
        return features if self.scale is None else features * self.scale


@checked
def supervised(
    data: FederatedData,
    module: Network | tuple[Callable[..., Any], Callable[..., Any]],
    *,
    loss: Callable[..., Any],
    metrics: Mapping[str, Callable[..., Any]] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    column: Any = None,
    rngs: Sequence[str] = (),
    scale: Positive | None = None,
    block_size: Count | None = None,
    check: bool = True,
) -> Supervised:
    """Makes the task of training a network with any loss: regression, sequences, several outputs.

    The records are ``loss``, over training examples, ``test_loss``, and ``train_NAME`` and
    ``test_NAME`` for every metric.

    Args:
      data: examples ``(features [examples, ...], targets [examples, ...])``. Targets may have any
        type and shape, and may be several arrays, such as a dict.
      module: a network from features ``[batch, ...]`` to outputs: a flax module, or functions
        ``(init, apply)``, where ``init(rng_key, x)`` returns a pytree of float arrays and
        ``apply(params, x)`` the outputs, which may be several arrays. If the module or `apply` has
        an argument `weights`, it also gets the examples' weights, so that it can ignore padding
        rows of weight 0. An argument `rng_key` of `apply` is a key in training and None in
        evaluation. Points of a sweep are computed together if they have the same functions, so
        define them outside `build`. Running statistics of ``nn.BatchNorm(momentum=0.0)`` are part
        of the parameters; local steps move them towards those of their batches, by SGD at the local
        learning rate. Derivatives of a whole run do not pass through a batch's statistics to the
        running ones.
      loss: a function of ``(outputs, targets)`` that returns the loss of each example, ``[batch]``,
        such as `squared_error`; not their mean, so that padding rows get weight 0. A
        `functools.partial` of it with options by name equals others with the same options.
      metrics: functions by name, such as ``{"r2": r2}``: of ``(outputs, targets)``, with one number
        per example, of which the mean is recorded; or of ``(outputs, targets, weights)``, which get
        all examples at once, for metrics that are no means.
      reduction: how a local step reduces the loss over its batch: "mean", or "sum" as in LEAF,
        which makes steps larger by a factor of B.
      column: the column of targets ``[examples, columns]`` to learn; it may be traced. None means
        all columns.
      rngs: names of random streams that a flax module uses in training, such as ("dropout",).
      scale: the factor that multiplies the features; 1 / 255 maps bytes to [0, 1]. Features of
        integers become floats, which a network of tokens turns back.
      block_size: the number of examples to evaluate at a time; defaults to 1 MiB of them.
      check: False skips the checks of the data, and of the module's outputs, loss and metrics.

    Raises:
      TypeError: if `data`, `module`, `loss` or a metric has the wrong type, such as a class instead
        of an instance, or functions have other arguments.
      ValueError: if arguments do not fit together, the loss or a metric does not have one number
        per example, parameters are not arrays of floats, or `rngs` are not the streams that the
        module uses.

    Example:
      >>> import numpy as np
      >>> from fedjax_mm import fedavg, full_participation, simulate
      >>> from fedjax_mm.data import federate, partition
      >>> from fedjax_mm.tasks import r2, squared_error, supervised
      >>> x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
      >>> y = x @ np.array([1.0, -2.0, 0.5])
      >>> def init(rng_key, x):
      ...     return jnp.zeros(x.shape[-1])
      >>> def apply(params, x):
      ...     return x @ params
      >>> data = federate((x, y), clients=partition.iid(y, 4), num_classes=0)  # no classes
      >>> task = supervised(data, (init, apply), loss=squared_error, metrics={"r2": r2})
      >>> _, trace = simulate(0, task, fedavg(0.1, local_steps=5), full_participation(4), 10)
      >>> sorted(trace.metrics), bool(trace.metrics["test_r2"][-1, 0] > 0.99)
      (['loss', 'test_loss', 'test_r2', 'train_r2'], True)
    """
    network = check_module(module)
    if check:
        check_federated(data)
    features, targets = data.train.examples
    if block_size is None:
        example_bytes = max(1, math.prod(features.shape[1:]) * 4)
        block_size = max(1, _BLOCK_BYTES // example_bytes)
    if column is not None and not isinstance(column, jax.core.Tracer):
        check_between("column", column, 0, targets.shape[1] - 1)
    column = None if column is None else jnp.asarray(column, jnp.int32)
    if scale is not None:
        scale = jnp.asarray(scale, float)
    streams, has_weights = streams_of(network, rngs), takes_weights(network)
    scores = {name: score_of(f"metrics[{name!r}]", x) for name, x in (metrics or {}).items()}
    if "loss" in scores:
        raise ValueError("metrics has 'loss', which is recorded anyway; give it another name")
    static = score_of("loss", loss), tuple(scores.items()), streams, has_weights
    task = Supervised(data.train, data.test, column, scale, network, *static, reduction, block_size)
    if check:
        check_task(task)
    return task


def check_task(task: Supervised, num_classes: int | None = None) -> None:
    """Traces a task's module, loss and metrics, and raises an error unless they fit together.

    Tasks that differ only in data, as those of a sweep's seeds, are traced once, unless they call
    functions that are not declared to be pure.

    Args:
      task: the task.
      num_classes: C, if there must be one output for each class.
    """
    parts = task.module, task.example_loss, task.scores, task.rngs, task.takes_weights
    found, (leaves, structure) = split((), parts), jax.tree.flatten(task.train.examples)
    rows = tuple((x.shape[1:], x.dtype) for x in leaves)
    key = *found.structure, structure, rows, task.column is None, task.scale is None, num_classes
    if found.undeclared or not _checked.get(key):
        _trace_task(task, num_classes)
        _checked.put(key, True)


def _trace_task(task: Supervised, num_classes: int | None) -> None:
    features, targets = task.train.examples
    size = _BATCH + (num_classes or 0)
    outputs = check_outputs(task.module, features, size, task.rngs, task.takes_weights)
    if num_classes is not None:
        _check_logits(task, outputs, size, num_classes)
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), targets)
    given = outputs, jax.eval_shape(task._targets, rows)
    _check_score("loss", task.example_loss, given, {}, size)
    weights = {"weights": jax.ShapeDtypeStruct((size,), jnp.result_type(float))}
    for name, score in task.scores:
        more = {} if score.is_mean else weights
        _check_score(f"metrics[{name!r}]", score, given, more, size)


def _check_logits(task: Supervised, logits: Any, size: int, num_classes: int) -> None:
    name = name_of(task.module)
    if not hasattr(logits, "shape"):
        raise ValueError(f"module {name} returns {described(logits)}; return logits alone")
    if logits.shape != (size, num_classes):
        raise ValueError(
            f"module {name} returns logits of shape {_shapes(logits, size)}; give one output for "
            f"each class, [batch, {num_classes}]"
        )


def _check_score(
    name: str, score: Score, given: tuple[Any, Any], weights: Mapping[str, Any], size: int
) -> None:
    shapes = " and targets ".join(_shapes(each, size) for each in given)
    try:
        value = jax.eval_shape(lambda x, y, more: score(x, y, **more), *given, weights)
    except Exception as error:  # a user's function can raise any exception
        (line, *_) = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{name} does not take outputs {shapes}: {line}") from error
    if weights and hasattr(value, "shape"):
        return
    if getattr(value, "shape", None) == (size,):
        if name == "loss" and not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"loss returns {value.dtype}; give floats, which have gradients")
        return
    found = "one number" if getattr(value, "shape", None) == () else _shapes(value, size)
    remedy = "leave out the mean, so that padding rows get weight 0"
    if name != "loss":
        remedy = "or take all examples at once, by an argument weights"
    raise ValueError(
        f"{name} returns {found} for outputs {shapes}; give one number for each example, [batch]: "
        f"{remedy}"
    )


def _add_at(places: Array, sums: Array, values: Array) -> Array:
    # Make the places depend on the values. `jax.vmap` over models would otherwise add rows with a
    # number for each model, and XLA's CPU compiler adds single numbers ten times as fast.
    return sums.at[jnp.where(values == values, places, places)].add(values)


def _shapes(tree: Any, size: int) -> str:
    """The shapes of arrays as text."""

    def words(x: Any) -> str:
        return f"[{', '.join('batch' if n == size else str(n) for n in x.shape)}]"

    return words(tree) if hasattr(tree, "shape") else str(jax.tree.map(words, tree))
