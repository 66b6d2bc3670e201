"""Functions that evaluate recorded curves.

Those of NumPy arrays have recorded rounds along the last axis.
"""

from typing import Annotated, Any, NamedTuple, TypeAlias

import jax
import numpy as np
import xarray as xr
from annotated_types import Interval
from jaxtyping import Float

from fedjax_mm.base import Scalar
from fedjax_mm.checks.annotations import NonNegative, checked
from fedjax_mm.checks.values import check_numbers, target_of

__all__ = [
    "Estimate",
    "Fairness",
    "client_fairness",
    "completion",
    "estimate",
    "fairness",
    "final",
    "first_round_below",
    "gain",
    "log_gap",
    "standard_error",
    "time_to_target",
]

PERSONAL = ("personal_accuracy", "personal_loss")
"""The metrics of the models that clients use: their own, or the global one without them."""

ClientShare: TypeAlias = Annotated[Scalar, Interval(gt=0, le=1)]
"""A share q of the clients, which may be traced."""


class _Pair(NamedTuple):
    mean: xr.DataArray
    error: xr.DataArray


class Estimate(_Pair):
    """Means over seeds and their standard errors, over the remaining dimensions.

    It is a pair, and prints as a table. Where samples were missing, such as runs that never met a
    target, the table has the share that was not.

    Attributes:
      share: the share of samples that were not NaN; None for an estimate made by hand.
      is_bound: whether missing samples were replaced, so that the mean is a lower bound there.
    """

    share: xr.DataArray | None = None
    is_bound: bool = False

    def _cells(self) -> Any:
        """The text of every estimate, as a string or as a Series or DataFrame of pandas."""
        share = xr.ones_like(self.mean) if self.share is None else self.share
        texts = []
        for mean, error, met in zip(
            *(x.values.ravel() for x in (self.mean, self.error, share)), strict=True
        ):
            around = f" ± {error:.2g}" if np.isfinite(error) else ""
            text = f"{'>= ' if self.is_bound and met < 1 else ''}{mean:.4g}{around}"
            texts.append(text if met == 1 else f"{text} ({met:.0%} of samples)")
        cells = self.mean.copy(data=np.array(texts, object).reshape(self.mean.shape))
        if cells.ndim > 2:
            return cells.to_series().unstack()
        return cells.to_pandas() if cells.ndim else cells.item()

    def __repr__(self) -> str:
        return str(self._cells())

    def _repr_html_(self) -> str:
        cells = self._cells()
        cells = cells if isinstance(cells, str) or self.mean.ndim > 1 else cells.to_frame("")
        return cells if isinstance(cells, str) else str(cells.to_html(escape=True))


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


@checked
def estimate(
    samples: xr.DataArray, over: str = "seed", *, censored_at: NonNegative | None = None
) -> Estimate:
    """The mean over a dimension and its standard error, which print as a table.

    The error is NaN for one or two samples, because that of two says nothing about their spread.
    Both are NaN if a sample is, because a mean over the others could be misleading: the mean time
    over runs that met a target is small if only the fastest met it.

    Args:
      samples: the values, over `over` and other dimensions.
      over: the dimension of the samples.
      censored_at: the time at which runs ended, for times as of `time_to_target`. Runs that never
        met the target count as this time, so that the mean is a lower bound. The table says so and
        shows the share of runs that met the target.

    Example:
      >>> import xarray as xr
      >>> found = estimate(xr.DataArray([1.0, 3.0, 5.0], dims="seed"))
      >>> found
      3 ± 1.2
      >>> mean, error = found
      >>> rounds = xr.DataArray([10.0, 14.0, np.nan, np.nan], dims="seed")
      >>> estimate(rounds), estimate(rounds, censored_at=20)
      (nan (50% of samples), >= 16 ± 2.4 (50% of samples))
    """
    samples = samples.astype(float)
    share = samples.notnull().mean(over)
    if censored_at is not None:
        samples = samples.fillna(censored_at)
    mean = samples.mean(over, skipna=False)
    error = standard_error(samples.values, axis=samples.get_axis_num(over))
    error = error if samples.sizes[over] > 2 else np.full_like(error, np.nan)
    found = Estimate(mean, mean.copy(data=error))
    found.share, found.is_bound = share, censored_at is not None
    return found


def final(result: xr.Dataset, metric: str | None = None) -> xr.DataArray:
    """The mean of a metric over models at the last record, for each run.

    A run is NaN if one of its models diverged, because a mean over the others would hide it, or if
    its algorithm does not have the metric. Models that a run of a sweep does not use are left out.

    Args:
      result: a result over ``(..., round, model)``.
      metric: the name of the metric; defaults to that of the clients' models if a method has
        personal ones, ``personal_accuracy`` or ``personal_loss``, or else to the loss.

    Raises:
      ValueError: if the result has no such metric.

    Example:
      >>> import xarray as xr
      >>> loss = np.reshape([[3.0, 4.0, 5.0], [1.0, 2.5, 3.0]], (2, 3, 1, 1))
      >>> dims = ("algorithm", "seed", "round", "model")
      >>> result = xr.Dataset({"loss": (dims, loss)}, {"algorithm": ["FedAvg", "FedProx"]})
      >>> end = final(result)
      >>> mean, error = estimate(end - end.sel(algorithm="FedAvg"))  # paired by seed
      >>> mean.values.round(2), error.values.round(2)
      (array([ 0.  , -1.83]), array([0.  , 0.17]))
    """
    if metric is None:
        metric = next((name for name in PERSONAL if name in result), "loss")
    if metric not in result.data_vars:
        raise ValueError(f"the result has no {metric!r}, but {', '.join(map(str, result))}")
    end = result[metric].isel(round=-1, drop=True).astype(float)
    if "diverged" not in result:
        return end.mean("model", skipna=False)
    return end.mean("model").where((result["diverged"] < 0).all("model"))


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
    Means of xarray leave NaN out, and with them the slowest runs. `estimate` with ``censored_at``
    counts them, and shows the mean and the share of runs that met the target.
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
        met &= result["round"] >= result["arrived_at"].max("round")  # false without an arrival
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


class Fairness(NamedTuple):
    """How a metric is distributed over clients, computed by `fairness`.

    Attributes:
      mean: the mean.
      worst: the mean over the worst share of clients.
      best: the mean over the best share of clients.
      variance: the mean squared deviation from the mean.
      jain: Jain's index ``(sum x)^2 / (n sum x^2)``, between 1/n and 1. It is the square of the
        cosine between x and a vector of ones.
      entropy: ``-sum p ln p`` of ``p = x / sum x``, in nats, at most ln n.
      evenness: the entropy divided by ln n, at most 1.
    """

    mean: Any
    worst: Any
    best: Any
    variance: Any
    jain: Any
    entropy: Any
    evenness: Any


@checked
def fairness(
    values: Any, *, share: ClientShare = 0.1, weights: Any = None, larger_is_better: bool = True
) -> Fairness:
    """Returns how a metric is distributed over clients.

    The worst share q of n clients are the ``ceil(q n)`` clients with the smallest values, or with
    the largest ones of a loss. With weights, a client of weight n_k counts as n_k clients with
    equal values. The worst share is then exactly q of the total weight, and includes a part of one
    client. Clients with NaN are left out.

    Args:
      values: x, ``[..., clients]``, a NumPy or JAX array. Jain's index and the entropy need
        nonnegative values; the entropy is NaN otherwise, and both are if all values are 0.
      share: q, above 0 and at most 1.
      weights: n_k, positive numbers ``[clients]``, such as numbers of examples; None counts every
        client once.
      larger_is_better: False for a loss.

    Returns:
      Arrays ``[...]`` of the values' type, NaN without clients.

    Raises:
      ValueError: if `share` is not above 0 and at most 1, or `weights` are not one positive number
        per client.

    Example:
      >>> found = fairness(np.array([0.2, 0.4, 0.6, 0.8]), share=0.25)
      >>> found.worst.item(), found.best.item(), found.jain.round(4).item()
      (0.2, 0.8, 0.8333)
      >>> fairness(np.array([0.2, 0.6]), weights=np.array([1, 3])).mean.round(2).item()
      0.5

    Reference: Li et al., "Fair Resource Allocation in Federated Learning" (2020), for the
    variance, the worst 10 % and the best 10 %; Jain, Chiu, Hawe (1984) for the index.
    """
    is_array = hasattr(values, "__array_namespace__")
    x = values if is_array else np.asarray(values, np.float64)
    xp: Any = x.__array_namespace__()  # NumPy's or JAX's
    if x.dtype.kind in "iub":
        x = xp.asarray(x, dtype=float)
    n = x.shape[-1]
    if weights is not None and np.shape(weights) != (n,):
        raise ValueError(
            f"weights has shape {np.shape(weights)}; give one number for each of {n} clients"
        )
    if weights is not None and not isinstance(weights, jax.core.Tracer):
        check_numbers("weights", weights, lambda w: w > 0, "be positive", ndim=1)
    is_there = ~xp.isnan(x)
    w = xp.ones(n, dtype=x.dtype) if weights is None else xp.asarray(weights, dtype=x.dtype)
    w = xp.where(is_there, w, 0)
    x = xp.where(is_there, x, 0)
    total = xp.sum(w, axis=-1)
    total = xp.where(total > 0, total, xp.nan)
    # Subtract a little, because 0.1 * 30 exceeds 3 in floating point.
    wanted = share * total if weights is not None else xp.ceil(share * total - 1e-4)

    def mean(y: Any) -> Any:
        return xp.sum(w * y, axis=-1) / total

    def first(sign: int) -> Any:
        order = xp.argsort(xp.where(is_there, sign * x, xp.inf), axis=-1)
        weight = xp.take_along_axis(w, order, axis=-1)
        before = xp.cumsum(weight, axis=-1) - weight
        taken = xp.clip(wanted[..., None] - before, 0, weight)
        return xp.sum(taken * xp.take_along_axis(x, order, axis=-1), axis=-1) / wanted

    center = mean(x)
    squares = mean(x**2)
    held = x / xp.where(center == 0, xp.nan, center * total)[..., None]
    terms = xp.where(held > 0, held * xp.log(xp.where(held > 0, held, 1)), 0 * held)
    entropy = -xp.sum(w * xp.where(is_there & (x < 0), xp.nan, terms), axis=-1)
    sign = 1 if larger_is_better else -1
    return Fairness(
        center,
        first(sign),
        first(-sign),
        mean((x - center[..., None]) ** 2),
        center**2 / xp.where(squares == 0, xp.nan, squares),
        entropy,
        entropy / xp.log(xp.where(total == 1, xp.nan, total)),
    )


def client_fairness(
    result: xr.Dataset,
    metric: str,
    *,
    share: float = 0.1,
    weights: Any = None,
    larger_is_better: bool = True,
) -> xr.Dataset:
    """Returns how a recorded metric is distributed over clients, see `fairness`.

    Args:
      result: a result over ``(..., round, model, client)``.
      metric: the name of a metric with one number per client. `with_clients` records some.
      share: q, above 0 and at most 1.
      weights: n_k, one positive number per client; None counts every client once.
      larger_is_better: False for a loss.

    Returns:
      The fields of `Fairness` over ``(..., round, model)``.

    Raises:
      ValueError: if the result has no such metric over clients, or as in `fairness`.

    Example:
      >>> import xarray as xr
      >>> rows = ("round", "model", "client"), [[[0.2, 0.4, 0.6, 0.8]]]
      >>> found = client_fairness(xr.Dataset({"accuracy": rows}), "accuracy", share=0.25)
      >>> found.worst.item(), found.worst.dims
      (0.2, ('round', 'model'))
    """
    over_clients = [str(name) for name, x in result.data_vars.items() if "client" in x.dims]
    if metric not in over_clients:
        raise ValueError(
            f"metric is {metric!r}, and the metrics with a number for each client are "
            f"{', '.join(over_clients) or 'none'}; record some by tasks.with_clients"
        )
    values = result[metric].transpose(..., "client")
    how: Any = {"share": share, "weights": weights, "larger_is_better": larger_is_better}
    found = fairness(values.values.astype(np.float64), **how)
    one = values.isel(client=0, drop=True)
    return xr.Dataset({name: one.copy(data=x) for name, x in found._asdict().items()})
