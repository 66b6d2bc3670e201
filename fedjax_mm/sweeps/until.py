"""Targets that end a run before its last round."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

_LARGEST = 2**31 - 1  # counts are int32


class Until(NamedTuple):
    """Target for a metric.

    A run ends with the first record in which all its models meet the target.

    Attributes:
      metric: a recorded metric, or a count since the start: client_updates, gradients, idle_rounds.
        A count takes no `at_most`, because it only grows.
      at_least: the smallest value that meets the target; give this or `at_most`.
      at_most: the largest value that meets the target.

    Example:
      >>> target = Until("test_accuracy", at_least=0.9)
      >>> target.first_record({"test_accuracy": np.array([[0.5], [0.9], [0.8]])}).item()
      1
    """

    metric: str
    at_least: float | None = None
    at_most: float | None = None

    def check(self) -> None:
        """Raises `ValueError` unless there is one bound."""
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(
                f"until has at_least = {self.at_least} and at_most = {self.at_most}; give one"
            )

    def check_metric(self, metrics: Mapping[str, Any], counts: Iterable[str]) -> None:
        """Raises `ValueError` unless the metric is recorded, or a count with `at_least`."""
        shape = metrics[self.metric].shape[1:] if self.metric in metrics else ()
        if shape:
            raise ValueError(
                f"until.metric is {self.metric!r}, an array {list(shape)} for each model; give a "
                "metric that is a number"
            )
        if self.metric in counts:
            if self.at_least is None:
                raise ValueError(f"until has at_most for {self.metric}, which grows; give at_least")
            if self.at_least > _LARGEST:
                raise ValueError(f"until.at_least is {self.at_least:g}; counts go up to {_LARGEST}")
        recorded = {*metrics, *counts}
        if self.metric not in recorded:
            raise ValueError(
                f"until.metric is {self.metric!r}; the recorded metrics are "
                f"{', '.join(sorted(recorded))}"
            )

    def is_met(self, metrics: Any) -> Bool[Array, "*batch"]:
        """Returns whether all models meet the target, from a record's metrics ``[..., models]``."""
        values, least = metrics[self.metric], self.at_least
        if least is not None and jnp.issubdtype(values.dtype, jnp.integer):
            # Compare integers, because as floats large counts would be rounded, differently on
            # device and host.
            least = math.ceil(least)
        is_met = values <= self.at_most if least is None else values >= least
        return jnp.all(is_met, axis=-1)

    def first_record(self, metrics: Any) -> Int[np.ndarray, "*batch"]:
        """Returns the first record that meets the target in ``[records, ..., models]``, or -1."""
        is_met = np.asarray(self.is_met(metrics))
        return np.where(is_met.any(0), is_met.argmax(0), -1)
