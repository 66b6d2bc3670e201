"""Classification of clients' examples with a network."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from fedjax_mm.checks.annotations import Count, Positive, checked
from fedjax_mm.data.federated import FederatedData, check_federated
from fedjax_mm.tasks.modules import Network, check_module
from fedjax_mm.tasks.scores import accuracy, cross_entropy
from fedjax_mm.tasks.supervised import Supervised, check_task, supervised


@checked
def classification(
    data: FederatedData,
    module: Network | tuple[Callable[..., Any], Callable[..., Any]],
    *,
    metrics: Mapping[str, Callable[..., Any]] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    column: Any = None,
    rngs: Sequence[str] = (),
    scale: Positive | None = None,
    block_size: Count | None = None,
    check: bool = True,
) -> Supervised:
    """Makes the task of training a network on clients' labelled examples.

    It is `supervised` with the cross-entropy as loss and the accuracy as metric.

    Args:
      data: examples ``(features [examples, ...], labels [examples])``.
      module: a network from features ``[batch, ...]`` to logits ``[batch, classes]``, as in
        `supervised`.
      metrics: other metrics by name, such as ``{"f1": f1}``.
      reduction: how a local step reduces the loss over its batch: "mean", or "sum" as in LEAF,
        which makes steps larger by a factor of B.
      column: the column of labels ``[examples, columns]`` to learn; it may be traced.
      rngs: names of random streams that a flax module uses in training, such as ("dropout",).
      scale: the factor that multiplies the features; 1 / 255 maps bytes to [0, 1].
      block_size: the number of examples to evaluate at a time; defaults to 1 MiB of them.
      check: False skips the checks of labels and of the module's outputs.

    Raises:
      TypeError: as in `supervised`.
      ValueError: if arguments do not fit together, labels are not 0 ... C - 1, the module does not
        have one output per class, or as in `supervised`.

    Example:
      >>> import flax.linen as nn, jax, numpy as np
      >>> import jax.numpy as jnp
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
    labels = data.train.examples[1]
    if not data.num_classes:
        raise ValueError(
            "the data have num_classes 0, so their targets are no labels; take supervised(data, "
            "module, loss=...)"
        )
    if (labels.ndim == 2) != (column is not None):
        raise ValueError(
            f"labels have shape {labels.shape} and column is {column}; give a column if and only "
            "if labels have columns"
        )
    task = supervised(
        data,
        network,
        loss=cross_entropy,
        metrics={"accuracy": accuracy, **(metrics or {})},
        reduction=reduction,
        column=column,
        rngs=rngs,
        scale=scale,
        block_size=block_size,
        check=False,
    )
    if check:
        check_task(task, data.num_classes)
    return task
