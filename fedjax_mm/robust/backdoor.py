"""Backdoors: attackers train on images with a patch, which they give a label of their choice."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from fedjax_mm.base import Metrics, Params, Scalar, Task
from fedjax_mm.base.calls import in_short
from fedjax_mm.checks.annotations import Count, CountOrZero, Mixture, checked
from fedjax_mm.checks.instances import check_task
from fedjax_mm.checks.values import check_flags, check_numbers
from fedjax_mm.data.arrays import is_known
from fedjax_mm.data.clients import ClientData
from fedjax_mm.tasks.scores import Score, accuracy
from fedjax_mm.tasks.supervised import Supervised
from fedjax_mm.tasks.view import View
from fedjax_mm.tasks.with_clients import examples_of
from fedjax_mm.tasks.with_metrics import WithMetrics, with_metrics

_MULTIPLIER = 2654435769  # 2^32 divided by the golden ratio


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Stamped(ClientData):
    """Images and labels, of which attackers' have a patch and the target, as they are read.

    Attributes:
      attacks: ``bool[clients]``.
      target: the label of stamped images; labels below 0 stay.
      value: the value of the patch.
      share: the share of an attacker's examples that are stamped.
      size: the number of rows and of columns of the patch, in the lower right corner.
    """

    attacks: Array
    target: Array
    value: Array
    share: Array
    size: int = dataclasses.field(metadata={"static": True})

    __repr__ = in_short

    def take(self, rows: Int[Array, " batch"]) -> Any:
        """Examples in the given rows."""
        return self._stamped(super().take(rows), rows)

    def block(self, start: Int[Array, ""], size: int) -> Any:
        """Examples of `size` consecutive rows starting at `start`."""
        # With an order, this calls `take`. A second stamp changes nothing.
        return self._stamped(super().block(start, size), start + jnp.arange(size))

    def _stamped(self, examples: Any, rows: Int[Array, " batch"]) -> Any:
        x, y = examples
        owner = jnp.searchsorted(self.offsets, rows, side="right") - 1
        # Multiples of the golden ratio modulo 1 spread evenly and share no period with the order of
        # the labels. Compare 24 bits, which float32 represents exactly.
        places = (rows - self.offsets[owner]).astype(jnp.uint32) * jnp.uint32(_MULTIPLIER) >> 8
        chosen = self.attacks[owner] & (places.astype(float) < self.share * 2**24)
        _, height, width, *_ = x.shape
        last = (jnp.arange(side) >= side - self.size for side in (height, width))
        patch = _with_axes(jnp.outer(*last), x.ndim - 1) & _with_axes(chosen, x.ndim)
        pixels = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(float)
        pixels = jnp.where(patch, self.value.astype(pixels.dtype), pixels)
        is_relabelled = _with_axes(chosen, y.ndim) & (y >= 0)
        return pixels, jnp.where(is_relabelled, self.target.astype(y.dtype), y)


@checked
def backdoored(
    task: Task,
    clients: Any,
    *,
    target: CountOrZero,
    size: Count = 3,
    value: Scalar = 1.0,
    share: Mixture = 0.5,
) -> WithMetrics:
    """Wraps a task so that attackers train on stamped images labelled with a target.

    A share of an attacker's training images gets a square patch in the lower right corner and the
    label `target`. The metric ``attack_success`` is the share of test images of the other classes
    that the model assigns to the target if they have the patch, or NaN without them. It costs
    one more pass over the test images at every record. Other test metrics are those of clean
    images, and training losses those of the data that clients train on. Images are stamped when
    they are read, so nothing is copied.

    Attackers send their updates. With `scaling` they send multiples of these, as in
    ``attacking(algorithm, clients, scaling(10.0))``, so that their model replaces the mean.

    Args:
      task: a task of images, from `classification`, or a wrapper of one; apply `attacked` and
        `with_clients` afterwards.
      clients: ``bool[clients]``, True for attackers; it may be traced.
      target: the label that attackers want.
      size: the number of rows and of columns of the patch.
      value: the value of the patch for the network, after the task's scale: 1.0 is white if images
        are scaled to [0, 1].
      share: the share of an attacker's examples that are stamped: example j = 0, 1, ... is one if
        the golden ratio times j, modulo 1, is below it, so they spread evenly.

    Raises:
      TypeError: if `task` is no task.
      ValueError: if the task has no images or a backdoor already, `target` is no label, `value` is
        not finite, the patch is larger than an image, or `clients` are not ``bool[clients]``.

    Example:
      >>> import numpy as np
      >>> from fedjax_mm import fedavg, full_participation, local_sgd, simulate
      >>> from fedjax_mm.data import digits, federate, partition
      >>> from fedjax_mm.robust import backdoored
      >>> from fedjax_mm.tasks import MLP, classification
      >>> pool = digits()
      >>> data = federate(pool, partition.iid(pool.train[1], 10))
      >>> clean = classification(data, MLP(10), scale=1 / 255)
      >>> task = backdoored(clean, np.arange(10) < 3, target=0, size=2)
      >>> algorithm = fedavg(local_sgd(0.1, epochs=1, batch_size=10))
      >>> _, trace = simulate(0, task, algorithm, full_participation(10), 10)
      >>> success, accuracy = (trace.metrics[x][-1, 0] for x in ("attack_success", "test_accuracy"))
      >>> bool(success > 0.5), bool(accuracy > 0.8)
      (True, True)

    Reference: Gu, Dolan-Gavitt, Garg, "BadNets" (2017), the patch; Bagdasaryan, Veit, Hua, Estrin,
    Shmatikov, "How To Backdoor Federated Learning" (2020).
    """
    inside: Any = examples_of(check_task(task))
    attacks = check_flags("clients", clients, task.num_clients)
    _check_images(task, inside, size)
    _check_target(inside, target)
    check_numbers("value", value, np.isfinite, "be finite")
    everybody = jnp.zeros(inside.num_clients, bool).at[: task.num_clients].set(attacks)
    numbers: dict[str, Any] = {
        "attacks": everybody,
        "target": jnp.asarray(target, jnp.int32),
        "value": jnp.asarray(value, float) / (1 if inside.scale is None else inside.scale),
        "share": jnp.asarray(share, float),
    }
    stamped = _with_train(task, lambda data: Stamped(**vars(data), **numbers, size=size))
    return with_metrics(stamped, _attack_success)


def _with_axes(x: Array, ndim: int) -> Array:
    return x.reshape(*x.shape, *[1] * (ndim - x.ndim))


def _with_train(task: Any, change: Callable[[ClientData], ClientData]) -> Any:
    """Changes the training data of the task inside all views."""
    if isinstance(task, View):
        return dataclasses.replace(task, task=_with_train(task.task, change))
    return dataclasses.replace(task, train=change(task.train))


def _attack_success(task: Task, params: Params) -> Metrics:
    inside: Any = examples_of(task)
    stamped, test = inside.train, inside.test
    images, labels = test.examples[0], test.examples[1].astype(jnp.int32)  # which -1 needs
    labels = jnp.where(labels == stamped.target, -1, labels)  # which no prediction equals
    how = {name: getattr(stamped, name) for name in ("target", "value", "size")}
    how |= {"attacks": jnp.ones(test.num_clients, bool), "share": jnp.ones_like(stamped.share)}
    others = Stamped(**vars(dataclasses.replace(test, examples=(images, labels))), **how)
    labels = labels if inside.column is None else labels[:, inside.column]
    labels = labels if test.order is None else labels[test.order]
    places = jnp.arange(test.num_places)
    is_there = (places >= test.offsets[0]) & (places < test.offsets[-1] + test.counts[-1])
    share = jnp.sum(is_there & (labels >= 0)) / jnp.sum(test.counts)
    predicts = dataclasses.replace(inside, scores=(("accuracy", Score(accuracy)),))
    return {"attack_success": predicts.evaluate(params, others)["accuracy"] / share}


def _check_images(task: Task, inside: Any, size: int) -> None:
    remedy = "give a task of images [height, width, channels], such as classification(digits, ...)"
    if not (isinstance(inside, Supervised) and inside.has_labels):
        raise ValueError(f"{type(task).__name__} has no labelled images; {remedy}")
    if isinstance(inside.train, Stamped):
        raise ValueError("the task has a backdoor already; give all attackers at once")
    shape = inside.train.examples[0].shape[1:]
    if len(shape) < 2:
        raise ValueError(f"examples have the shape {list(shape)}, which has no corner; {remedy}")
    if size > min(shape[:2]):
        raise ValueError(
            f"size is {size}, but images have {shape[0]} x {shape[1]} pixels; give at most "
            f"{min(shape[:2])}"
        )


def _check_target(inside: Any, target: int) -> None:
    labels = [data.examples[1] for data in (inside.train, inside.test)]
    if all(map(is_known, labels)):
        most = max(int(np.max(each)) for each in labels)
        if target > most:
            raise ValueError(f"target is {target}, but labels are 0 to {most}; give one of them")
