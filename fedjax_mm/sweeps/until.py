"""Early stopping: targets that end a run before its last round."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedjax_mm.checks.annotations import Count, CountOrZero, NonNegative, checked, refusing_unknown
from fedjax_mm.checks.values import check_numbers

_LARGEST = 2**31 - 1  # counts are int32


class Watch(NamedTuple):
    """State of a target with patience.

    Attributes:
      best: each model's last value that counted as an improvement; infinite at first.
      waited: the number of records since then, per model; negative during the warm-up.
    """

    best: Float[Array | np.ndarray, "*models"]
    waited: Int[Array | np.ndarray, "*models"]


@refusing_unknown
@dataclasses.dataclass(frozen=True)
class Until:
    """Early stopping target: a bound on a metric, or a plateau.

    A run ends with the first record in which all of its models meet the target. A model meets a
    bound if its value is on the required side. It is on a plateau if its best value has not
    improved by more than `min_delta` for `patience` records, and leaves the plateau if the value
    improves later. NaN does not count as an improvement, not even in the first record, which
    `warmup` can leave out.

    Attributes:
      metric: a recorded metric, or a cumulative count: client_updates, gradients or idle_rounds.
        Counts support only `at_least`, because they never decrease.
      at_least: the smallest value that meets the target; give this, `at_most` or `patience`.
      at_most: the largest value that meets the target.
      patience: the number of records without improvement.
      mode: "min" if smaller values are better, as for a loss, or "max"; only with `patience`.
      min_delta: the largest change that does not count as an improvement; only with `patience`.
      warmup: the number of initial records to ignore, including the start; only with `patience`.

    Raises:
      TypeError: if a bound is not a number.
      ValueError: if there is not exactly one target with its own settings, or a number is out of
        range.

    Example:
      >>> target = Until("test_accuracy", at_least=0.9)
      >>> target.first_record({"test_accuracy": np.array([[0.5], [0.9], [0.8]])}).item()
      1
      >>> plateau = Until("loss", patience=2, mode="min", min_delta=0.1)
      >>> plateau.first_record({"loss": np.array([[1.0], [0.5], [0.45], [0.42]])}).item()
      3
    """

    metric: str
    at_least: float | None = None
    at_most: float | None = None
    patience: int | None = None
    mode: Literal["min", "max"] | None = None
    min_delta: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        """Raises an error unless there is exactly one target, without settings of another."""
        bounds = {"at_least": self.at_least, "at_most": self.at_most, "patience": self.patience}
        if sum(each is not None for each in bounds.values()) != 1:
            *first, last = (f"{name} = {each}" for name, each in bounds.items())
            raise ValueError(f"until has {', '.join(first)} and {last}; give one")
        if self.patience is not None:
            if self.mode is None:
                raise ValueError(
                    'until has patience, but no mode; give "min" if smaller values are better, as '
                    'of a loss, or "max"'
                )
            _check_plateau(self.patience, self.mode, self.min_delta, self.warmup)
            return
        for name in ("at_least", "at_most"):
            if (bound := bounds[name]) is not None:
                check_numbers(f"until.{name}", bound, np.isfinite, "be finite")
        for name, default in (("mode", None), ("min_delta", 0.0), ("warmup", 0)):
            if (given := getattr(self, name)) != default:
                raise ValueError(
                    f"until has {name} = {given}, which is for a plateau; give patience, or leave "
                    "it out"
                )

    def check_metric(self, metrics: Mapping[str, Any], counts: Iterable[str]) -> None:
        """Raises `ValueError` if the metric is neither recorded nor a count with `at_least`."""
        shape = metrics[self.metric].shape[1:] if self.metric in metrics else ()
        if shape:
            raise ValueError(
                f"until.metric is {self.metric!r}, an array {list(shape)} for each model; give a "
                "metric that is a number"
            )
        if self.metric in counts:
            if self.at_least is None:
                given = "patience" if self.at_most is None else "at_most"
                raise ValueError(f"until has {given} for {self.metric}, which grows; give at_least")
            if self.at_least > _LARGEST:
                raise ValueError(f"until.at_least is {self.at_least:g}; counts go up to {_LARGEST}")
        recorded = {*metrics, *counts}
        if self.metric not in recorded:
            raise ValueError(
                f"until.metric is {self.metric!r}; the recorded metrics are "
                f"{', '.join(sorted(recorded))}"
            )

    def start(self, metrics: Any) -> Watch | tuple[()]:
        """The state before the first record, given a record's metrics or their shapes."""
        if self.patience is None:
            return ()
        values = metrics[self.metric]
        worst = math.inf if self.mode == "min" else -math.inf
        best = np.full(values.shape, worst, _at_least_float32(values.dtype))
        return Watch(best, np.full(values.shape, -self.warmup, np.int32))

    def after(
        self, watch: Watch | tuple[()], metrics: Any
    ) -> tuple[Watch | tuple[()], Bool[Array, "*batch"]]:
        """The state after a record ``[..., models]``, and whether all models meet the target.

        NumPy arrays stay NumPy arrays, because nothing should be compiled on the host.
        """
        values = metrics[self.metric]
        xp = values.__array_namespace__()
        if not isinstance(watch, Watch):
            return (), xp.all(self._is_inside(values), axis=-1)
        values = values.astype(watch.best.dtype)
        is_watched = watch.waited >= 0
        if self.mode == "min":
            is_better = is_watched & (values < watch.best - self.min_delta)
        else:
            is_better = is_watched & (values > watch.best + self.min_delta)
        best = xp.where(is_better, values, watch.best)
        waited = xp.where(is_better, 0, watch.waited + 1)
        return Watch(best, waited), xp.all(waited >= self.patience, axis=-1)

    def _is_inside(self, values: Any) -> Any:
        least = self.at_least
        if least is None:
            return values <= self.at_most
        if jnp.issubdtype(values.dtype, jnp.integer):
            # Compare as integers, because floats would round large counts differently on device and
            # host.
            least = math.ceil(least)
        return values >= least

    def first_record(self, metrics: Any) -> Int[np.ndarray, "*batch"]:
        """The first record that meets the target in ``[records, ..., models]``, or -1."""
        values = metrics[self.metric]
        watch, is_met = self.start({self.metric: values[0]}), np.zeros(values.shape[:-1], bool)
        for record, each in enumerate(values):
            watch, is_met[record] = self.after(watch, {self.metric: each})
        return np.where(is_met.any(0), is_met.argmax(0), -1)


@checked
def _check_plateau(
    patience: Count, mode: Literal["min", "max"], min_delta: NonNegative, warmup: CountOrZero
) -> None:
    """Raises an error if a setting of a plateau is out of range."""


def _at_least_float32(dtype: Any) -> Any:
    """The dtype in which a metric's values are compared."""
    # Widen 16-bit dtypes, because XLA may compute with extra precision that the host does not have.
    return jnp.promote_types(dtype, np.float32)
