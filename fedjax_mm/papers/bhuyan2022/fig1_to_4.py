"""Figures 1 to 4: mean and spread of the gap of MFA-Rand and MFA-RR on the quadratic."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Self

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import model_validator

from fedjax_mm.claims import more, within
from fedjax_mm.experiments.fields import Count
from fedjax_mm.experiments.optimizers import InverseTime
from fedjax_mm.experiments.run import run
from fedjax_mm.metrics import estimate, log_gap
from fedjax_mm.papers.bhuyan2022.quadratic import BothOnQuadratic, rate_text
from fedjax_mm.papers.figures import mean_and_runs
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import Ruling, ruling
from fedjax_mm.papers.schema import Table
from fedjax_mm.papers.tables import cells, rows
from fedjax_mm.sweeps.execution import Execution

_ALGORITHMS = ("MFA-Rand", "MFA-RR")
_SIMILAR = 0.02  # allowed difference of gap(t) in log10, which is 5 % of F(w) - F(w*)
_FACTOR = 3.0  # least ratio of standard deviations that "differ considerably"


class Comparison(BothOnQuadratic):
    """Settings of Figures 1 to 4."""

    num_models: Count
    local_steps: Count = 5

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.at(self.num_models, self.local_steps)
        return self


def run_comparison(config: Comparison, execution: Execution | None = None) -> xr.Dataset:
    """The curves of both algorithms, including ``gap = log10(F(w_t) - F*)``."""
    result = run(config.at(config.num_models, config.local_steps), execution)
    gap = result.excess_loss.copy(data=log_gap(result.excess_loss))
    return result.assign(gap=gap.assign_attrs(long_name="gap(t) = log10(F(w_t) - F*)"))


def measure(result: xr.Dataset, config: Comparison) -> xr.Dataset:
    """Means and spreads over seeds and models in the last fifth of the rounds."""
    last = result.gap.isel(round=slice(-max(1, math.ceil(0.2 * config.num_rounds)), None))
    means = last.mean(("round", "model"))
    mean, error = estimate(means)
    rand, rr = (means.sel(algorithm=name, drop=True) for name in _ALGORITHMS)
    return xr.Dataset(
        {
            "mean gap": mean,
            "standard error": error,
            "spread over seeds": _spread(last),
            "gap at the end": result.gap.isel(round=-1).mean(("seed", "model")),
            "RR minus Rand": rr - rand,
            "log10 of the ratio of spreads": jackknife(last, _log_ratio),
        }
    ).drop_vars("round")


def _spread(gap: xr.DataArray) -> xr.DataArray:
    return gap.std("seed", ddof=1).mean(("round", "model"))


def _log_ratio(gap: xr.DataArray) -> float:
    """The logarithm to base 10 of MFA-Rand's spread over MFA-RR's, or NaN if both are 0."""
    rand, rr = _spread(gap).sel(algorithm=list(_ALGORITHMS)).values
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.log10(rand / rr))


def jackknife(samples: xr.DataArray, statistic: Callable[[xr.DataArray], float]) -> xr.DataArray:
    """Jackknife pseudo-values, whose mean and standard error estimate a statistic.

    The i-th of n pseudo-values is n theta - (n - 1) theta_i, where theta_i is the statistic without
    seed i. With 2 seeds they are NaN, because a single seed has no spread.

    Reference:
      Efron and Tibshirani, "An introduction to the bootstrap", 1993, eq. (11.2) and section 11.5.
    """
    size = samples.sizes["seed"]
    others = [samples.drop_isel(seed=i) for i in range(size)] if size > 2 else []
    without = np.array([statistic(each) for each in others] or [np.nan] * size)
    whole = statistic(samples)
    with np.errstate(invalid="ignore"):  # inf - inf occurs if all of MFA-RR's runs are equal
        return xr.DataArray(size * whole - (size - 1) * without, {"seed": samples.seed})


def judge(keys: Sequence[str], measured: xr.Dataset, config: Comparison) -> Iterable[Ruling]:
    """Judges whether the spreads differ for few models, and whether the means also do for many."""
    ahead = measured["RR minus Rand"]
    ratios = measured["log10 of the ratio of spreads"]
    spreads = measured["spread over seeds"].sel(algorithm=list(_ALGORITHMS)).values
    means = "mean gap(t) of MFA-RR minus MFA-Rand"
    spread = "log10 of the ratio of standard deviations, {:.4f} and {:.4f}".format(*spreads)
    tests = {
        "similar-means": (within(ahead, margin=_SIMILAR, form=".4f"), means),
        "better-mean": (more(-ahead, form=".4f"), "mean gap(t) of MFA-Rand minus MFA-RR"),
        "no-order-of-magnitude": (within(ahead, margin=1.0, form=".4f"), means),
        "randomness": (more(ratios, by=math.log10(_FACTOR)), spread),
        "variance": (more(ratios, by=math.log10(_FACTOR)), spread),
    }
    for key in keys:
        found, about = tests[key]
        yield ruling(key, found, about=about)


def table(measured: xr.Dataset, config: Comparison) -> Sequence[Table]:
    """One row per algorithm."""
    numbers = measured.drop_dims("seed").data_vars.items()
    columns = {str(name): cells(x, form=".4f") for name, x in numbers}
    return [rows(columns, ("algorithm",))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: Comparison) -> Figure:
    """Draws the paper's two panels for model 1."""
    return mean_and_runs(
        result.gap.sel(model=1),
        title=f"Quadratic, N = {config.task.num_clients}, M = {config.num_models}, "
        f"E = {config.local_steps}, {rate_text(config.learning_rate)}",
        ylabel="$F(w_t) - F(w_*)$",
        caption=f"Model 1 in {config.num_seeds} runs of each algorithm.",
    )


def _item(id: str, settings: Comparison, keys: Sequence[str]) -> Item:
    rule = partial(judge, keys)
    return Item(id, settings, run_comparison, measure, rule, table, figure)


_PER_ROUND = InverseTime(beta=30, gamma=100)
_PER_FRAME = InverseTime(beta=30, gamma=99, per="frame")
_FIG1, _FIG2 = (Comparison(num_models=2, learning_rate=rate) for rate in (0.1, _PER_ROUND))
_FIG3, _FIG4 = (Comparison(num_models=12, learning_rate=rate) for rate in (0.1, _PER_FRAME))

_FEW, _MANY = ("similar-means", "randomness"), ("better-mean", "variance")
_LAST = (*_MANY, "no-order-of-magnitude")

ITEMS = (
    _item("mfa-fig1", _FIG1, _FEW),
    _item("mfa-fig2", _FIG2, _FEW),
    _item("mfa-fig3", _FIG3, _MANY),
    _item("mfa-fig4", _FIG4, _LAST),
)
"""Figures 1 to 4."""
