"""Functions that evaluate recorded curves.

Those of NumPy arrays have recorded rounds along the last axis.
"""

from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float

from fedjax_mm.checks.values import target_of

__all__ = [
    "Estimate",
    "compare",
    "completion",
    "estimate",
    "first_round_below",
    "gain",
    "log_gap",
    "standard_error",
    "time_to_target",
]


class Estimate(NamedTuple):
    """Means over seeds and their standard errors, over the remaining dimensions."""

    mean: xr.DataArray
    error: xr.DataArray


def log_gap(excess_loss: Any) -> Float[np.ndarray, "*batch records"]:
    """Returns ``gap(t) = log10(F(w_t) - F*)``, eq. (10) of Bhuyan et al.

    The gap is -inf at the optimum.

    Example:
      >>> log_gap([0.1, 0.001]).tolist()
      [-1.0, -3.0]
    """
    with np.errstate(divide="ignore"):
        return np.log10(np.asarray(excess_loss, np.float64))


def first_round_below(errors: Any, rounds: Any, threshold: Any) -> Float[np.ndarray, "*batch"]:
    """Returns the first recorded round with an error of at most `threshold`, or NaN.

    Args:
      errors: ``[..., records]``.
      rounds: ``[records]``, the recorded rounds.
      threshold: a number, or an array over the leading axes.

    Example:
      >>> first_round_below([[3.0, 2.0, 1.0], [3.0, 3.0, 3.0]], [0, 10, 20], 2.0).tolist()
      [10.0, nan]
    """
    below = np.asarray(errors) <= np.asarray(threshold)[..., None]
    first = np.asarray(rounds, np.float64)[np.argmax(below, axis=-1)]
    return np.where(below.any(axis=-1), first, np.nan)


def gain(num_models: Any, rounds_single: Any, rounds_multi: Any) -> Float[np.ndarray, "*batch"]:
    """Returns the gain of multi-model training, ``g = M T_1 / T_M``, eq. (3) of Bhuyan et al.

    If a target was not reached, the gain is NaN, and rounds are not clipped to the budget.

    Example:
      >>> gain(9, 50, 117).round(3).item()
      3.846
    """
    return np.asarray(
        np.asarray(num_models) * np.asarray(rounds_single, np.float64) / np.asarray(rounds_multi)
    )


def standard_error(samples: Any, axis: int = 0) -> Float[np.ndarray, "*batch"]:
    """Returns the standard error of the mean over `axis`, or NaN for a single sample.

    Example:
      >>> standard_error([1.0, 3.0]).item()
      1.0
    """
    samples = np.asarray(samples, np.float64)
    size = samples.shape[axis]
    if size < 2:
        return np.full(np.delete(samples.shape, axis), np.nan)
    return np.asarray(np.std(samples, axis=axis, ddof=1) / np.sqrt(size))


def estimate(samples: xr.DataArray, over: str = "seed") -> Estimate:
    """Returns the mean over a dimension and its standard error.

    The error is NaN for one or two samples, because that of two says nothing about their spread.

    Example:
      >>> import xarray as xr
      >>> mean, error = estimate(xr.DataArray([1.0, 3.0, 5.0], dims="seed"))
      >>> mean.item(), error.item().__round__(3)
      (3.0, 1.155)
    """
    samples = samples.astype(float)
    mean = samples.mean(over, skipna=False)
    error = standard_error(samples.values, axis=samples.get_axis_num(over))
    error = error if samples.sizes[over] > 2 else np.full_like(error, np.nan)
    return Estimate(mean, mean.copy(data=error))


def compare(
    result: xr.Dataset, axis: str, metric: str = "loss", *, baseline: Any = None
) -> xr.Dataset:
    """Returns how much each value of an axis differs from a baseline, paired by seed.

    Runs of the same seed share their initial models and draws, so that their differences vary less
    than the runs. They are taken at the last record, of means over models.

    Args:
      result: a result over ``(..., seed, round, model)``.
      axis: the name of the axis, such as "algorithm".
      metric: the name of the metric.
      baseline: the value of the axis with which the others are compared; the first by default.

    Returns:
      ``difference`` and ``standard_error`` over the axis without its baseline, and other axes. The
      error is NaN for fewer than three seeds.

    Raises:
      ValueError: if the result has no such axis, metric or baseline.

    Example:
      >>> import xarray as xr
      >>> loss = np.reshape([[3.0, 4.0, 5.0], [1.0, 2.5, 3.0]], (2, 3, 1, 1))
      >>> dims = ("algorithm", "seed", "round", "model")
      >>> result = xr.Dataset({"loss": (dims, loss)}, {"algorithm": ["FedAvg", "FedProx"]})
      >>> found = compare(result, "algorithm")
      >>> found.difference.values.round(2), found.standard_error.values.round(2)
      (array([-1.83]), array([0.17]))
    """
    if metric not in result.data_vars:
        raise ValueError(f"the result has no {metric!r}, but {', '.join(map(str, result))}")
    if axis not in result[metric].dims or axis in ("seed", "round", "model"):
        axes = [str(dim) for dim in result[metric].dims if dim not in ("seed", "round", "model")]
        raise ValueError(f"the result has no axis {axis!r}, but {', '.join(axes) or 'none'}")
    values = result[axis].values.tolist()
    baseline = values[0] if baseline is None else baseline
    if baseline not in values:
        raise ValueError(f"baseline is {baseline!r}, and {axis} has {', '.join(map(str, values))}")
    end = result[metric].isel(round=-1).mean("model")
    place = values.index(baseline)
    apart = end.drop_isel({axis: place}) - end.isel({axis: place}, drop=True)
    mean, error = estimate(apart)
    return xr.Dataset({"difference": mean, "standard_error": error})


def time_to_target(
    result: xr.Dataset,
    metric: str,
    *,
    at_least: Any = None,
    at_most: Any = None,
    clock: str = "round",
) -> xr.DataArray:
    """Returns when each model first met a target, or NaN if it never did.

    NaN meets no target. Models meet it at records, so times have the resolution of `record_every`.
    A model that arrives later, see `arriving`, meets it at its arrival or later.

    Args:
      result: a result over ``(..., round, model)``.
      metric: the name of the metric.
      at_least: the target; a number, or a DataArray such as one over models.
      at_most: the same for metrics such as the loss. Give one of the two.
      clock: "round" counts completed rounds, and "time" is the simulated time of a clock.

    Raises:
      ValueError: unless there is one target, or if the result has no such metric or clock.

    Example:
      >>> import xarray as xr
      >>> curve = xr.Dataset({"accuracy": (("round", "model"), [[0.1, 0.1], [0.8, 0.3]])})
      >>> time_to_target(curve.assign_coords(round=[0, 10]), "accuracy", at_least=0.5).values
      array([10., nan])
    """
    meets = target_of(at_least, at_most)
    for name in (metric, clock):
        if name not in result.variables:
            raise ValueError(f"the result has no {name!r}, but {', '.join(map(str, result))}")
    met = meets(result[metric])
    if "arrived_at" in result:
        met &= result["arrived_at"].notnull()
    return result[clock].where(met).min("round")


def completion(
    result: xr.Dataset,
    metric: str,
    *,
    at_least: Any = None,
    at_most: Any = None,
    clock: str = "round",
) -> xr.Dataset:
    """Returns the models' job completion times.

    With the arrival a and the finish c of a model, the completion time is ``c - a``. A finish is
    the first record that meets the target, see `time_to_target`, and an arrival is 0 without
    `arriving`.

    Args:
      result: a result over ``(..., round, model)``, of any assignment.
      metric: the name of the metric.
      at_least: the target, as in `time_to_target`.
      at_most: the same for metrics such as the loss.
      clock: "round" or "time". In simulated time, a model arrives at the last record before its
        first round.

    Returns:
      ``finished_at`` and ``completion_time`` over ``(..., model)``, NaN for unfinished models;
      ``mean_completion_time`` over finished models; ``finished_share``; and ``makespan``, the last
      finish minus the first arrival, NaN unless all models finished.

    Raises:
      ValueError: as in `time_to_target`.

    Example:
      >>> import xarray as xr
      >>> curve = xr.Dataset({"accuracy": (("round", "model"), [[0.1, 0.1], [0.8, 0.3]])})
      >>> found = completion(curve.assign_coords(round=[0, 10]), "accuracy", at_least=0.5)
      >>> found.mean_completion_time.item(), found.finished_share.item(), found.makespan.item()
      (10.0, 0.5, nan)

    Reference: Liu et al., "Venn" (2025), for the mean over finished jobs. Their makespan is the
    largest completion time.
    """
    finished = time_to_target(result, metric, at_least=at_least, at_most=at_most, clock=clock)
    arrived = xr.zeros_like(finished)
    if "arrived_at" in result:
        arrived = result["arrived_at"].max("round")
        if clock != "round":
            is_before = result["round"] <= arrived
            arrived = result[clock].where(is_before).max("round").where(arrived.notnull())
    times, is_all = finished - arrived, finished.notnull().all("model")
    return xr.Dataset(
        {
            "finished_at": finished,
            "completion_time": times,
            "mean_completion_time": times.mean("model"),
            "finished_share": finished.notnull().mean("model"),
            "makespan": (finished.max("model") - arrived.min("model")).where(is_all),
        }
    )
