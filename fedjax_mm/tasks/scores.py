"""Losses and metrics: functions of a network's outputs and the targets.

A function of ``(outputs, targets)`` has one number per example, of which tasks take means. A
function of ``(outputs, targets, weights)`` gets all examples at once, because it is no mean over
them; rows of weight 0 are padding.

Axes:  ``batch`` examples · ``...`` positions of a sequence, or several outputs · ``classes`` C
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from fedjax_mm.checks.annotations import Count, checked
from fedjax_mm.checks.values import described


class Score(NamedTuple):
    """A loss or a metric, and its options: equal to any other of the same function and options.

    Attributes:
      function: a function of outputs and targets, and of weights if it needs all examples at once.
      options: the names and values of its other arguments.
    """

    function: Callable[..., Any]
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_mean(self) -> bool:
        """Whether the value is a mean over examples."""
        return "weights" not in inspect.signature(self.function).parameters

    def __call__(self, outputs: Any, targets: Any, **weights: Array) -> Any:
        """Calls the function with its options."""
        return self.function(outputs, targets, **weights, **dict(self.options))


def score_of(name: str, function: Any) -> Score:
    """Checks a loss or a metric, which may be a `functools.partial` with options."""
    if not callable(function):
        raise TypeError(
            f"{name} is {described(function)}; give a function of (outputs, targets), such as "
            "tasks.squared_error"
        )
    options: dict[str, Any] = {}
    if type(function) is partial and not function.args:
        function, options = function.func, function.keywords
    try:
        hash((function, *options.values()))
    except TypeError as error:
        raise TypeError(
            f"{name} has options that cannot be hashed; give numbers, strings and tuples"
        ) from error
    known = inspect.signature(function).parameters
    changed = {k: x for k, x in options.items() if k not in known or known[k].default != x}
    return Score(function, tuple(sorted(changed.items())))


def cross_entropy(
    outputs: Float[Array, "batch ... classes"], targets: Shaped[Array, "batch ..."]
) -> Float[Array, " batch"]:
    """Cross-entropy of logits, a mean over the positions of a sequence.

    Example:
      >>> cross_entropy(jnp.zeros((2, 4)), jnp.array([3, 0])).round(4)
      Array([1.3863, 1.3863], dtype=float32)
    """
    logits, chosen = _by_class(outputs, targets)
    picked = jnp.sum(jnp.where(chosen, logits, 0), axis=0)
    return _of_examples(jax.nn.logsumexp(logits, axis=0) - picked)


def squared_error(
    outputs: Float[Array, "batch ..."], targets: Shaped[Array, "batch ..."]
) -> Float[Array, " batch"]:
    """Squared error, a mean over several outputs.

    Example:
      >>> squared_error(jnp.array([[1.0], [2.0]]), jnp.array([3.0, 2.0])).tolist()
      [4.0, 0.0]
    """
    return _of_examples((_like(outputs, targets) - targets) ** 2)


def absolute_error(
    outputs: Float[Array, "batch ..."], targets: Shaped[Array, "batch ..."]
) -> Float[Array, " batch"]:
    """Absolute error, a mean over several outputs.

    Example:
      >>> absolute_error(jnp.array([[1.0], [2.0]]), jnp.array([3.0, 2.0])).tolist()
      [2.0, 0.0]
    """
    return _of_examples(jnp.abs(_like(outputs, targets) - targets))


def accuracy(
    outputs: Float[Array, "batch ... classes"], targets: Shaped[Array, "batch ..."]
) -> Float[Array, " batch"]:
    """1 if the largest output is that of the target, else 0, averaged over positions.

    The first of equal outputs counts as the largest.

    Example:
      >>> accuracy(jnp.eye(2), jnp.array([0, 0])).tolist()
      [1.0, 0.0]
    """
    _check_labels(outputs, targets)
    is_right = jnp.argmax(jnp.moveaxis(outputs, -1, 0), axis=0) == targets
    return _of_examples(is_right.astype(outputs.dtype))


@checked
def top_k_accuracy(
    outputs: Float[Array, "batch ... classes"], targets: Shaped[Array, "batch ..."], *, k: Count = 5
) -> Float[Array, " batch"]:
    """1 if the output of the target is among the k largest, else 0, averaged over positions.

    Args:
      outputs: logits or probabilities.
      targets: labels.
      k: the number of outputs. The first of equal ones count as larger.

    Example:
      >>> top_k_accuracy(jnp.array([[0.1, 0.6, 0.3], [0.1, 0.6, 0.3]]), jnp.array([2, 0]), k=2)
      Array([1., 0.], dtype=float32)
    """
    logits, chosen = _by_class(outputs, targets)
    picked = jnp.sum(jnp.where(chosen, logits, 0), axis=0)
    is_before = jnp.cumsum(chosen, axis=0) == 0
    # Not `>`, so that NaN counts as wrong.
    rank = jnp.sum(~(logits <= picked) | (is_before & (logits == picked)), axis=0)
    return _of_examples((rank < k).astype(outputs.dtype))


def class_accuracy(
    outputs: Float[Array, "batch ... classes"],
    targets: Shaped[Array, "batch ..."],
    weights: Float[Array, " batch"],
) -> Float[Array, " classes"]:
    """Accuracy (recall) on the examples of each class, or NaN without any.

    Example:
      >>> class_accuracy(jnp.eye(2), jnp.array([0, 0]), jnp.ones(2)).tolist()
      [0.5, nan]
    """
    hits, _, actual = _counts(outputs, targets, weights)
    return hits / jnp.where(actual > 0, actual, jnp.nan)


def f1(
    outputs: Float[Array, "batch ... classes"],
    targets: Shaped[Array, "batch ..."],
    weights: Float[Array, " batch"],
    *,
    average: Literal["macro", "micro"] = "macro",
) -> Float[Array, ""]:
    """F1 score, the harmonic mean of precision and recall.

    Args:
      outputs: logits or probabilities.
      targets: labels.
      weights: the examples' weights.
      average: "macro" is the mean over the classes that are predicted or targets; "micro" counts
        all classes together, which is the accuracy.

    Example:
      >>> round(float(f1(jnp.eye(2), jnp.array([0, 0]), jnp.ones(2))), 4)
      0.3333
    """
    hits, predicted, actual = _counts(outputs, targets, weights)
    both = predicted + actual
    if average == "micro":
        return 2 * jnp.sum(hits) / jnp.sum(both)
    each = 2 * hits / jnp.where(both > 0, both, 1)
    return jnp.sum(each) / jnp.sum(both > 0)


def auc(
    outputs: Float[Array, "batch *classes"],
    targets: Shaped[Array, "batch ..."],
    weights: Float[Array, " batch"],
) -> Float[Array, ""]:
    """Area under the ROC curve, exact, where equal outputs count half.

    The scores of classes are in the order of their probabilities, the softmax of the outputs, and
    the area is the mean over classes, each against the rest. A class without examples, or without
    others, is left out; without any other the area is NaN. Outputs of the targets' shape are scores
    of binary targets, one area for each column.

    Args:
      outputs: logits of classes, or scores.
      targets: labels; or 0 and 1, of the shape of the outputs.
      weights: the examples' weights.

    Example:
      >>> scores, targets = jnp.array([0.1, 0.4, 0.35, 0.8]), jnp.array([0, 0, 1, 1])
      >>> auc(scores, targets, jnp.ones(4)).item()
      0.75
    """
    if jnp.size(outputs) == jnp.size(targets):
        scores, is_positive = outputs, _like(targets, outputs) > 0
    else:
        _check_labels(outputs, targets)
        scores = _log_odds(outputs)
        is_positive = targets[:, None] == jnp.arange(outputs.shape[-1])
    columns = [x.reshape(len(weights), -1).T for x in (scores, is_positive)]
    areas = jax.vmap(_area, (0, 0, None))(columns[0], columns[1], weights)
    return jnp.nanmean(jnp.where(jnp.isnan(scores).any(), jnp.nan, areas))


def r2(
    outputs: Float[Array, "batch ..."],
    targets: Shaped[Array, "batch ..."],
    weights: Float[Array, " batch"],
) -> Float[Array, ""]:
    """Coefficient of determination, 1 - SS_res / SS_tot, averaged over several outputs.

    It is 1 for perfect outputs, 0 for those of the targets' mean, and NaN for constant targets.

    Example:
      >>> r2(jnp.array([1.0, 2.0, 4.0]), jnp.array([1.0, 2.0, 3.0]), jnp.ones(3)).item()
      0.5
    """
    outputs = _like(outputs, targets)
    share = (weights / jnp.sum(weights)).reshape(-1, *[1] * (jnp.ndim(targets) - 1))
    mean = jnp.sum(share * targets, axis=0)
    total = jnp.sum(share * (targets - mean) ** 2, axis=0)
    rest = jnp.sum(share * (targets - outputs) ** 2, axis=0)
    is_there = share > 0
    low = jnp.min(jnp.where(is_there, targets, jnp.inf), axis=0)
    high = jnp.max(jnp.where(is_there, targets, -jnp.inf), axis=0)
    return jnp.mean(1 - rest / jnp.where(high > low, total, jnp.nan))


@checked
def calibration_error(
    outputs: Float[Array, "batch ... classes"],
    targets: Shaped[Array, "batch ..."],
    weights: Float[Array, " batch"],
    *,
    bins: Count = 15,
) -> Float[Array, ""]:
    """Expected calibration error of the softmax of logits.

    Examples are binned by their confidence, the largest probability. The error is the mean over
    bins of the distance between their accuracy and their mean confidence, weighted by examples.

    Args:
      outputs: logits.
      targets: labels.
      weights: the examples' weights.
      bins: the number of bins, of equal widths.

    Example:
      >>> calibration_error(jnp.zeros((4, 2)), jnp.array([0, 0, 0, 1]), jnp.ones(4)).item()
      0.25

    Reference: Guo, Pleiss, Sun, Weinberger, "On calibration of modern neural networks" (2017).
    """
    _check_labels(outputs, targets)
    confidence = jnp.max(jax.nn.softmax(outputs), axis=-1)
    gap = (jnp.argmax(outputs, axis=-1) == targets) - confidence
    # Bins are open below and closed above.
    place = jnp.clip(jnp.ceil(confidence * bins).astype(jnp.int32) - 1, 0, bins - 1)
    share = _of_positions(weights, gap)
    share /= jnp.sum(share)
    parts = share * gap.ravel()
    sums = jnp.zeros(bins, parts.dtype).at[place.ravel()].add(parts)
    return jnp.sum(jnp.abs(sums))


def _of_examples(values: Array) -> Float[Array, " batch"]:
    return values.reshape(len(values), -1).mean(1) if values.ndim > 1 else values


def _check_labels(outputs: Array, targets: Array) -> None:
    if jnp.shape(outputs)[:-1] != jnp.shape(targets):
        raise ValueError(
            f"outputs have shape {list(jnp.shape(outputs))} and targets {list(jnp.shape(targets))}"
            "; give one label for each row of outputs, or take another metric"
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(
            f"targets are {targets.dtype}; give labels, which are integers, or take another metric"
        )


def _log_odds(outputs: Float[Array, "batch classes"]) -> Float[Array, "batch classes"]:
    """Logits against all other classes, which do not round to 1 as probabilities do."""

    def against_others(label: Array) -> Array:
        is_other = jnp.arange(outputs.shape[1]) != label
        others = jnp.where(is_other, outputs, -jnp.inf)
        return outputs[:, label] - jax.nn.logsumexp(others, axis=1)

    return lax.map(against_others, jnp.arange(outputs.shape[1])).T


def _by_class(outputs: Array, targets: Array) -> tuple[Array, Array]:
    _check_labels(outputs, targets)
    # Put examples on the last axis, because XLA vectorizes along it on CPUs.
    logits = jnp.moveaxis(outputs, -1, 0)
    classes = jnp.arange(len(logits)).reshape(-1, *[1] * jnp.ndim(targets))
    return logits, classes == targets


def _like(outputs: Array, targets: Array) -> Array:
    """Outputs in the shape of the targets, because ``[batch, 1] - [batch]`` is a matrix."""
    if jnp.size(outputs) != jnp.size(targets):
        raise ValueError(
            f"outputs have shape {list(jnp.shape(outputs))} and targets {list(jnp.shape(targets))}"
            "; give one output for each target"
        )
    return jnp.reshape(outputs, jnp.shape(targets))


def _of_positions(weights: Array, like: Array) -> Array:
    """The weights of all positions, flat, each that of its example."""
    return jnp.repeat(weights, like.size // len(weights))


def _counts(outputs: Array, targets: Array, weights: Array) -> tuple[Array, Array, Array]:
    """The weights of each class's hits, predictions and targets."""
    _check_labels(outputs, targets)
    predicted = jnp.argmax(outputs, axis=-1).ravel()
    actual, each = targets.ravel(), _of_positions(weights, targets)
    zeros = jnp.zeros(outputs.shape[-1], weights.dtype)
    hits = zeros.at[actual].add(each * (predicted == actual))
    return hits, zeros.at[predicted].add(each), zeros.at[actual].add(each)


def _area(scores: Array, is_positive: Array, weights: Array) -> Array:
    order = jnp.argsort(scores)
    scores = scores[order]
    positive = (weights * is_positive)[order]
    negative = (weights * ~is_positive)[order]
    below = jnp.concatenate([jnp.zeros(1, negative.dtype), jnp.cumsum(negative)])
    less, up_to = (below[jnp.searchsorted(scores, scores, side=side)] for side in ("left", "right"))
    pairs = jnp.sum(positive) * jnp.sum(negative)
    return jnp.sum(positive * (less + up_to) / 2) / jnp.where(pairs > 0, pairs, jnp.nan)
