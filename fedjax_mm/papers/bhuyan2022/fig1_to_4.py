"""Figures 1 to 4: the gap of MFA-Rand and MFA-RR on the quadratic, its mean and its spread."""

import math
from collections.abc import Sequence
from typing import Self

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import model_validator

from fedjax_mm.experiments.fields import Count
from fedjax_mm.experiments.optimizers import InverseTime
from fedjax_mm.experiments.run import run
from fedjax_mm.metrics import log_gap
from fedjax_mm.papers.bhuyan2022.quadratic import BothOnQuadratic, rate_text
from fedjax_mm.papers.claims import Claim, claim, estimate, exceeds
from fedjax_mm.papers.figures import mean_and_runs
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.tables import Table, cells, rows
from fedjax_mm.sweeps.execute import Execution


class Comparison(BothOnQuadratic):
    """Settings of Figures 1 to 4."""

    num_models: Count
    local_steps: Count = 5

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.at(self.num_models, self.local_steps)
        return self


def run_comparison(config: Comparison, execution: Execution | None = None) -> xr.Dataset:
    """Returns both algorithms' curves, with ``gap = log10(F(w_t) - F*)``."""
    result = run(config.at(config.num_models, config.local_steps), execution)
    gap = result.excess_loss.copy(data=log_gap(result.excess_loss))
    return result.assign(gap=gap.assign_attrs(long_name="gap(t) = log10(F(w_t) - F*)"))


def measure(result: xr.Dataset, config: Comparison) -> xr.Dataset:
    """Returns means and spreads over seeds in the last fifth of the rounds, over all models."""
    last = result.gap.isel(round=slice(-max(1, math.ceil(0.2 * config.num_rounds)), None))
    means = last.mean(("round", "model"))
    mean, error = estimate(means)
    rand, rr = (means.sel(algorithm=name, drop=True) for name in ("MFA-Rand", "MFA-RR"))
    return xr.Dataset(
        {
            "mean gap": mean,
            "standard error": error,
            "spread over seeds": last.std("seed", ddof=1).mean(("round", "model")),
            "gap at the end": result.gap.isel(round=-1).mean(("seed", "model")),
            "RR minus Rand": rr - rand,
        }
    ).drop_vars("round")


def claims(measured: xr.Dataset, config: Comparison) -> Sequence[Claim]:
    """Few models differ in their spread, many in the mean too."""
    ahead, error = (x.item() for x in estimate(measured["RR minus Rand"]))
    spreads = measured["spread over seeds"].sel(algorithm=["MFA-Rand", "MFA-RR"]).values.tolist()
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN if neither spreads: no claim holds
        ratio = float(np.divide(*spreads))
    means = f"mean gap of RR minus Rand {ahead:+.4f} (standard error {error:.4f})"
    text = "spread Rand {:.4f}, RR {:.4f}, ratio {:.1f}".format(*spreads, ratio)
    similar = "MFA-Rand and MFA-RR have similar means (closer than one run's spread)"
    better = "MFA-RR is better in the mean"
    less = claim("MFA-RR's runs spread less than MFA-Rand's", ratio > 1, text)
    far_less = claim(
        "MFA-RR's runs spread far less than MFA-Rand's (over 3 times)", ratio > 3, text
    )
    if config.num_models <= 4:
        return claim(similar, abs(ahead) < spreads[0], means), less
    return exceeds(better, -measured["RR minus Rand"], evidence=means), far_less


def table(measured: xr.Dataset, config: Comparison) -> Sequence[Table]:
    """Returns a row for each algorithm."""
    numbers = measured.drop_dims("seed").data_vars.items()
    columns = {str(name): cells(x, form=".4f") for name, x in numbers}
    return [rows(columns, ("algorithm",))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: Comparison) -> Figure:
    """Draws the paper's two panels, of model 1."""
    return mean_and_runs(
        result.gap.sel(model=1),
        title=f"Quadratic, N = {config.task.num_clients}, M = {config.num_models}, "
        f"E = {config.local_steps}, {rate_text(config.learning_rate)}",
        ylabel=r"gap$(t) = \log_{10}(F(w_t) - F(w_*))$",
        caption=f"Model 1 in {config.num_seeds} runs of each algorithm.",
    )


def _item(settings: Comparison, id: str, title: str) -> Item:
    return Item(id, title, settings, run_comparison, measure, claims, table, figure)


_PER_ROUND = InverseTime(beta=30, gamma=100)
_PER_FRAME = InverseTime(beta=30, gamma=99, per="frame")
_FIG1, _FIG2 = (Comparison(num_models=2, learning_rate=rate) for rate in (0.1, _PER_ROUND))
_FIG3, _FIG4 = (Comparison(num_models=12, learning_rate=rate) for rate in (0.1, _PER_FRAME))

ITEMS = (
    _item(_FIG1, id="mfa-fig1", title="MFA-Rand against MFA-RR, quadratic, M = 2, constant rate"),
    _item(_FIG2, id="mfa-fig2", title="MFA-Rand against MFA-RR, quadratic, M = 2, decaying rate"),
    _item(_FIG3, id="mfa-fig3", title="MFA-Rand against MFA-RR, quadratic, M = 12, constant rate"),
    _item(_FIG4, id="mfa-fig4", title="MFA-Rand against MFA-RR, quadratic, M = 12, decaying rate"),
)
"""Figures 1 to 4."""
