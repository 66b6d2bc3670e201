"""Figure 5(a): the GM-Appeal of every objective's solution to two clients, with both bounds."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field

from fedjax_mm import plots
from fedjax_mm.experiments.fields import Distinct, NonNegative
from fedjax_mm.papers.cho2022 import descents
from fedjax_mm.papers.claims import Claim, claim, estimate
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.tables import Table, cells, columns, rows
from fedjax_mm.results.labels import number
from fedjax_mm.sweeps.execute import Execution
from fedjax_mm.theory.mean_estimation import lemma_a_1, theorem_a_1

_SQUARE = "gamma_G^2"
_SIGMAS = 4  # standard errors that a random frequency may be off

# From about 150 on, exp(-4 gamma_G^2), the other client's pull, is less than the least number.
Heterogeneity = Annotated[NonNegative, Field(le=100)]


class TwoClients(descents.Draws):
    """Settings of Figure 5(a): theta_1 = 0, theta_2 = 2 gamma_G."""

    gamma_g_squared: Annotated[tuple[Heterogeneity, ...], Field(min_length=2), Distinct] = tuple(
        range(21)
    )


def run_two(config: TwoClients, execution: Execution | None = None) -> xr.Dataset:
    """Returns the solutions of every objective in every draw, over gamma_G^2."""
    points = [(0.0, 2 * math.sqrt(square)) for square in config.gamma_g_squared]
    result = descents.solve_draws(points, "gamma_g_squared", config)
    return result.assign_coords(gamma_g_squared=list(config.gamma_g_squared))


def exact_appeal(gamma_G: Any, gamma: float) -> np.ndarray:
    """Returns FedAvg's expected appeal, ``P(|w - theta_1| < |hat theta_1 - theta_1|)``.

    With ``a = hat theta_1 - theta_1`` and ``b = hat theta_2 - theta_1`` client 1 is satisfied if
    |a + b| < 2 |a|, that is if b lies between -3 a and a. Client 2 is alike.
    """
    # Gauss and Legendre's rule in a, up to 12 standard deviations; b's part is known.
    nodes, weights = np.polynomial.legendre.leggauss(200)
    a = 6 * (nodes + 1)
    density = 6 * weights * np.exp(-(a**2) / 2) / math.sqrt(2 * math.pi)
    mean = 2 * np.asarray(gamma_G, np.float64)[..., None] / gamma
    cdf = np.vectorize(lambda x: math.erfc(-x / math.sqrt(2)) / 2)
    between = cdf(a - mean) - cdf(-3 * a - mean) + cdf(3 * a - mean) - cdf(-a - mean)
    return np.asarray(between @ density)


def measure(result: xr.Dataset, config: TwoClients) -> xr.Dataset:
    """Returns appeals with bounds, FedAvg's deviation from the exact one, and distances to w*."""
    result = result.rename(gamma_g_squared=_SQUARE)
    gamma_G = np.sqrt(result[_SQUARE].values)
    mean, error = estimate(result.satisfied.mean("client"), over="draw")
    exact = xr.DataArray(exact_appeal(gamma_G, config.gamma), dims=_SQUARE)
    # A client's being satisfied is a Bernoulli variable of known variance.
    frequency = result.satisfied.sel(objective="FedAvg").mean("draw")
    spread = np.sqrt(exact * (1 - exact) / result.sizes["draw"])
    apart = abs(result.solution - result.empirical_mean.mean("client"))
    return xr.Dataset(
        {
            "appeal": mean,
            "standard_error": error,
            "exact": exact,
            # The lemma speaks of gamma_G > 0 only.
            "Lemma A.1": (_SQUARE, np.where(gamma_G > 0, lemma_a_1(gamma_G, config.gamma), np.inf)),
            "Theorem A.1": float(theorem_a_1(config.gamma)),
            "deviation": (abs(frequency - exact) / spread).fillna(0.0),
            "distance": apart.max((_SQUARE, "draw")),
            **descents.convergence(result),
        }
    )


def claims(measured: xr.Dataset, config: TwoClients) -> Sequence[Claim]:
    """FedAvg and MaxFL meet their bounds; convex surrogates have FedAvg's solution."""
    fedavg, maxfl = (measured.sel(objective=name) for name in ("FedAvg", "MaxFL"))
    bound, floor, most = measured["Lemma A.1"], measured["Theorem A.1"], measured.deviation.max()
    speaks, ratio = bound < 1, (fedavg.appeal / bound).where(bound < 1)
    least = maxfl.isel({_SQUARE: maxfl.appeal.values.argmin()})
    appeal = number(least.appeal.item(), least.standard_error.item(), ".4f")
    below = "FedAvg's appeal is below Lemma A.1's curve wherever that is below 1"
    ratios = f"; appeal / bound is {ratio.min():.3f} to {ratio.max():.3f} there"
    points = f"it is below 1 at {speaks.sum():d} gamma_G" + ratios * bool(speaks.any())
    often = f"FedAvg satisfies a client as often as is exact, within {_SIGMAS} standard errors"
    above = "MaxFL's appeal is above Theorem A.1's constant at every gamma_G"
    at_least = f"least appeal {appeal} at gamma_G^2 = {least[_SQUARE]:g}, against {floor:.4f}"
    apart = measured.distance.sel(objective=["MaxFL (ReLU)", "MaxFL (log loss)"])
    return (
        claim(below, ~speaks | (fedavg.appeal < bound), points),
        claim(often, most <= _SIGMAS, f"largest deviation {most:.2f} standard errors"),
        claim(above, maxfl.appeal > floor, at_least),
        *(
            claim(f"{x.objective:s} has FedAvg's solution", x <= 1e-6, f"largest distance {x:.1e}")
            for x in apart
        ),
        descents.all_converged("A local minimum is found in every draw", measured),
    )


def table(measured: xr.Dataset, config: TwoClients) -> Sequence[Table]:
    """Returns appeals and bounds, with a row for each gamma_G^2."""
    appeal = cells(measured.appeal, measured.standard_error, form=".4f")
    bounds = ("exact", "Lemma A.1", "Theorem A.1")
    contents = columns(appeal.sel(objective=["FedAvg", "MaxFL"]), "objective")
    contents |= {name: cells(measured[name], form=".4f") for name in bounds}
    return [rows(contents, (_SQUARE,))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: TwoClients) -> Figure:
    """Draws GM-Appeal against gamma_G^2, on a linear and on a logarithmic axis."""
    squares = measured[_SQUARE].values
    fine = np.linspace(max(squares.max() * 1e-3, 1e-9), squares.max(), 200)
    exact, upper = (fn(np.sqrt(fine), config.gamma) for fn in (exact_appeal, lemma_a_1))
    lower = np.full(2, measured["Theorem A.1"])
    appeal, error = (measured[name].T for name in ("appeal", "standard_error"))
    # FedAvg, which two others cover, MaxFL, and those two.
    styles = zip(plots.lines(appeal, error), ("o", "s-", "+", "x"), strict=True)
    lines = [
        *(line._replace(style=style) for line, style in styles),
        plots.Line("FedAvg, exact", fine, exact),
        plots.Line("Lemma A.1: FedAvg is below", fine, upper, style="--"),
        plots.Line("Theorem A.1: MaxFL is above", squares[[0, -1]], lower, style=":"),
    ]
    texts = (r"heterogeneity $\gamma_G^2$", "GM-Appeal")
    linear = plots.Panel("all draws", *texts, lines, limits=(0, 1))
    logarithmic = linear._replace(title="the same, logarithmic", limits=(1e-3, 1.5), scale="log")
    return plots.draw(
        [[linear, logarithmic]],
        title=rf"Mean estimation, two clients, $\gamma$ = {config.gamma:g}",
        caption=f"Means over {config.num_seeds:,} draws with standard errors.",
        share=False,
    )


ITEMS = (
    Item(
        id="maxfl-fig5a",
        title="GM-Appeal of two clients, with both bounds",
        settings=TwoClients(),
        run=run_two,
        measure=measure,
        claims=claims,
        table=table,
        figure=figure,
    ),
)
"""Figure 5(a)."""
