"""Figure 8: MaxFL's adaptive learning rate against a constant one."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import lax
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.claims import fact
from fedjax_mm.experiments.fields import Config, Count, Positive, TwoOrMore
from fedjax_mm.metrics import first_round_below
from fedjax_mm.papers.cho2022 import descents
from fedjax_mm.papers.compute import compute
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import Ruling, ruling
from fedjax_mm.papers.schema import Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.values import Several
from fedjax_mm.results.labels import describe
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.tasks.mean_estimation import maxfl_objective
from fedjax_mm.tasks.minimize import local_minimum

_FAR, _NOTHING = 8.0, 1e-3  # a loss gap that counts as >> 0, and a weight that counts as 0
_AROUND = 0.5  # models closer to a minimum than this do not count as flat
_RULES = ("adaptive", "constant")
_ROUNDS, _STARTS = "median rounds from flat starts", "flat starts"
_LATE, _SLOWER = "starts that did not arrive", "starts from which adaptive is slower"


class Rate(Config):
    """Settings for Figure 8: gradient descent on MaxFL's objective from many starts."""

    gamma_hat: Several[Positive] = (0.5, 3.0)
    learning_rate: Positive = 0.5
    """eta_g eta_l, which is 1/L_s for the clients' smoothness L_s = 2."""
    epsilon: Positive = 1e-2
    num_rounds: Count = 3000
    num_starts: TwoOrMore = 81
    target: Positive = 1e-3
    """The distance to a minimum at which a descent counts as converged."""


def run_rate(config: Rate, execution: Execution | None = None) -> xr.Dataset:
    """The adaptive rate over w, and descents with this rate and with a constant one.

    The adaptive rate is ``eta N / (sum q_k + eps)`` (eq. 6 with one local step), where
    ``q_k = sigma (1 - sigma)`` at ``F_k(w) - rho_k`` (eq. 4). The constant rate is 1/L, where L is
    the objective's largest curvature.
    """

    def at(gamma_hat: Any, w: Any, starts: Any) -> dict[str, Any]:
        task = descents.pair(gamma_hat)
        objective = partial(maxfl_objective, task)
        slope = jax.grad(objective)
        curvature = jax.vmap(jax.grad(slope))(w)
        smoothness = jnp.max(jnp.abs(curvature))

        def adaptive(w: Any) -> Any:
            gaps = task.gaps(w)
            # Avoid sigma (1 - sigma), because 1 - sigma rounds to 0 for gaps of 37 or more.
            weights = jax.nn.sigmoid(gaps) * jax.nn.sigmoid(-gaps)
            return config.learning_rate * task.num_clients / (jnp.sum(weights) + config.epsilon)

        def path(rate: Any, start: Any) -> Any:
            def one_round(w: Any, _: None) -> tuple[Any, Any]:
                w = w - rate(w) * slope(w)
                return w, w

            return jnp.append(start, lax.scan(one_round, start, length=config.num_rounds)[1])

        rates = (adaptive, lambda w: 1 / smoothness)
        return {
            "objective": jax.vmap(objective)(w),
            "curvature": curvature,
            "rate": jax.vmap(adaptive)(w),
            "constant_rate": 1 / smoothness,
            "path": jnp.stack([jax.vmap(partial(path, rate))(starts) for rate in rates]),
            "minimum": jax.vmap(partial(local_minimum, objective))(starts).point,
        }

    with jax.enable_x64(True):
        w, gamma_hat = descents.across(config.gamma_hat, 801), jnp.asarray(config.gamma_hat)
        # Do not start exactly at the midpoint, because it may be a maximum.
        starts = descents.across(config.gamma_hat, config.num_starts) + 1e-3
    coords = {"gamma_hat": gamma_hat, "w": w, "start": starts, "rule": list(_RULES)}
    coords["round"] = np.arange(config.num_rounds + 1)
    dims = {"constant_rate": "gamma_hat", "minimum": "gamma_hat start"}
    dims["path"] = "gamma_hat rule start round"
    program = jax.vmap(at, (0, None, None))
    return compute(program, (gamma_hat, w, starts), coords, "gamma_hat w", dims)


def measure(result: xr.Dataset, config: Rate) -> xr.Dataset:
    """Rates at flat and steep places of the objective, and rounds to a minimum."""
    ends = (result.minimum.min("start"), result.minimum.max("start"))
    distance = np.minimum(*(abs(result.path - end) for end in ends))
    arrived = first_round_below(distance.values, result["round"].values, config.target)
    result = result.assign(rounds=distance.isel(round=0, drop=True).copy(data=arrived))
    each = [_at_one(result.sel(gamma_hat=gamma)) for gamma in result.gamma_hat.values]
    gap = xr.DataArray(np.linspace(-_FAR, _FAR, 161), dims="gap")
    weight = np.exp(-abs(gap)) / (1 + np.exp(-abs(gap))) ** 2  # sigma (1 - sigma), an even function
    return xr.concat(each, "gamma_hat").assign(weight=weight).assign_coords(gap=gap)


def _at_one(result: xr.Dataset) -> xr.Dataset:
    w, rate, minima = result.w.values, result.rate.values, result.minimum.values
    slope = np.abs(np.gradient(result.objective.values, w))
    is_near = np.abs(w[:, None] - minima).min(axis=1) < _AROUND
    flat, steep = (slope < slope.max() / 10) & ~is_near, slope > slope.max() / 2
    is_flat_start = np.interp(result.start.values, w, flat) > 0.5
    # Count a descent that has not converged as the slowest.
    late = result.rounds.fillna(np.inf)
    return xr.Dataset(
        {
            "flat": rate[flat].mean() if flat.any() else np.nan,
            "steep": rate[steep].mean(),
            "minimum": np.interp(minima[0], w, rate),
            "1/L": result.constant_rate,
            "largest": rate.max(),
            "rounds": result.rounds,
            _STARTS: is_flat_start.sum(),
            _ROUNDS: late.sel(start=is_flat_start).median("start"),
            _SLOWER: (late.sel(rule="adaptive") > late.sel(rule="constant")).sum(),
            _LATE: result.rounds.isnull().sum("start"),
        }
    )


def judge(measured: xr.Dataset, config: Rate) -> Iterator[Ruling]:
    """Judges where the adaptive rate is high, the rounds that it saves, and Figure 2's weights."""
    rates = measured[["flat", "steep"]].to_dataarray("part").T
    text = describe(rates, form=".3g", missing="none")
    yield ruling("flat-regions", fact(_all(measured.flat, measured.steep), text))
    adaptive, constant = (measured[_ROUNDS].sel(rule=rule) for rule in _RULES)
    names = (_ROUNDS, _STARTS, _LATE, _SLOWER)
    counts = [f"{name}: {describe(measured[name], form='g', missing='none')}" for name in names]
    yield ruling("global-smoothness", fact(_all(constant, adaptive), "; ".join(counts)))
    weight, far = measured["weight"], measured["weight"].sel(gap=[-_FAR, _FAR])
    highest = weight["gap"].values[weight.values.argmax()]
    yield ruling(
        "fig2-weight",
        fact(highest == 0, f"at a gap of {highest:g}", "highest"),
        fact((far < _NOTHING).all(), f"{far.max():.1e}", f"at gaps of {-_FAR:g} and {_FAR:g}"),
    )


def _all(high: xr.DataArray, low: xr.DataArray) -> bool | None:
    """Whether all of `high` exceed all of `low`, or None if a value is unknown."""
    is_known = bool((high.notnull() & low.notnull()).all())
    return bool((high > low).all()) if is_known else None


def table(measured: xr.Dataset, config: Rate) -> Sequence[Table]:
    """The rates, and the median rounds from flat starts."""
    rates = ("flat", "steep", "minimum", "1/L")
    contents = {name: cells(measured[name], form=".4g", missing="none") for name in rates}
    contents |= columns(cells(measured[_ROUNDS], form="g", missing="none"), "rule", "rounds, {}")
    return [rows(contents, ("gamma_hat",))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: Rate) -> Figure:
    """Draws the objective and the rates over w."""
    drawn = result.rename(gamma_hat=r"$\hat\gamma_G$")
    rates = plots.lines(drawn.rate, style="-", label="")
    rates += plots.lines(drawn.constant_rate.broadcast_like(drawn.rate), style="--", label="1/L, ")
    panels = [
        descents.objectives(result),
        plots.Panel("adaptive learning rate", "model $w$", "rate", rates, scale="log"),
    ]
    return plots.draw(
        [panels],
        title=r"MaxFL's adaptive rate, two clients with empirical means $\pm\hat\gamma_G$, "
        rf"$\epsilon$ = {config.epsilon:g}",
        caption="The adaptive rate is that of eq. (6) with one local step, and L is the largest "
        "curvature in the range that is drawn.",
    )


ITEMS = (Item("maxfl-fig8", Rate(), run_rate, measure, judge, table, figure),)
"""Figure 8."""
