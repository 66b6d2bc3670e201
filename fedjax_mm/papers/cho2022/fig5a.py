"""Figure 5(a): GM-Appeal of every objective's solution for two clients, with both bounds."""

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field

from fedjax_mm import plots
from fedjax_mm.claims import fact, mean_above
from fedjax_mm.experiments.fields import Distinct, NonNegative
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.cho2022 import descents
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import Ruling, check, ruling
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.theory.mean_estimation import lemma_a_1, theorem_a_1

_SQUARE = "gamma_G^2"
_SIGMAS = 4  # allowed deviation of a frequency, in standard errors
_ALIKE = 1e-6  # solutions closer than this count as equal
_STEADY = 0.2  # relative change below which a slope counts as constant
_ROWS = 6  # rows of the table

# Beyond 150, the other client's pull exp(-4 gamma_G^2) underflows.
Heterogeneity = Annotated[NonNegative, Field(le=100)]


class TwoClients(descents.Draws):
    """Settings of Figure 5(a), where theta_1 = 0 and theta_2 = 2 gamma_G."""

    gamma_g_squared: Annotated[tuple[Heterogeneity, ...], Field(min_length=2), Distinct] = tuple(
        range(21)
    )


def run_two(config: TwoClients, execution: Execution | None = None) -> xr.Dataset:
    """The solutions of every objective in every draw, over gamma_G^2."""
    points = [(0.0, 2 * math.sqrt(square)) for square in config.gamma_g_squared]
    result = descents.solve_draws(points, "gamma_g_squared", config)
    return result.assign_coords(gamma_g_squared=list(config.gamma_g_squared))


def exact_appeal(gamma_G: Any, gamma: float) -> np.ndarray:
    """FedAvg's expected appeal, ``P(|w - theta_1| < |hat theta_1 - theta_1|)``.

    With ``a = hat theta_1 - theta_1`` and ``b = hat theta_2 - theta_1``, client 1 is satisfied if
    |a + b| < 2 |a|, that is, if b lies between -3 a and a. The same holds for client 2.
    """
    # Use Gauss-Legendre quadrature over a, up to 12 standard deviations, and a closed form over b.
    nodes, weights = np.polynomial.legendre.leggauss(200)
    a = 6 * (nodes + 1)
    density = 6 * weights * np.exp(-(a**2) / 2) / math.sqrt(2 * math.pi)
    mean = 2 * np.asarray(gamma_G, np.float64)[..., None] / gamma
    cdf = np.vectorize(lambda x: math.erfc(-x / math.sqrt(2)) / 2)
    between = cdf(a - mean) - cdf(-3 * a - mean) + cdf(3 * a - mean) - cdf(-a - mean)
    return np.asarray(between @ density)


def measure(result: xr.Dataset, config: TwoClients) -> xr.Dataset:
    """Appeals and bounds, FedAvg's deviation from the exact appeal, and distances to w*."""
    result = result.rename(gamma_g_squared=_SQUARE)
    gamma_G = np.sqrt(result[_SQUARE].values)
    mean, error = estimate(result.satisfied.mean("client"), over="draw")
    exact = xr.DataArray(exact_appeal(gamma_G, config.gamma), dims=_SQUARE)
    # Whether a client is satisfied is a Bernoulli variable with known variance.
    frequency = result.satisfied.sel(objective="FedAvg").mean("draw")
    spread = np.sqrt(exact * (1 - exact) / result.sizes["draw"])
    apart = abs(result.solution - result.empirical_mean.mean("client"))
    return xr.Dataset(
        {
            "appeal": mean,
            "standard_error": error,
            "exact": exact,
            # Skip gamma_G = 0, because the lemma assumes gamma_G > 0.
            "Lemma A.1": (_SQUARE, np.where(gamma_G > 0, lemma_a_1(gamma_G, config.gamma), np.inf)),
            "Theorem A.1": float(theorem_a_1(config.gamma)),
            "deviation": (abs(frequency - exact) / spread).fillna(0.0),
            "distance": apart.max((_SQUARE, "draw")),
            **descents.convergence(result),
        }
    )


def judge(measured: xr.Dataset, config: TwoClients) -> Iterator[Ruling | Check]:
    """Judges both bounds, their statements on large heterogeneity, and the convex surrogates."""
    exact, bound = measured["exact"], measured["Lemma A.1"]
    ratio, speaks = (exact / bound).where(bound < 1), bound < 1
    text = f"below 1 at {speaks.sum():d} gamma_G"
    text += f", where appeal / bound is {ratio.min():.3f} to {ratio.max():.3f}" * bool(speaks.any())
    yield ruling("lemma-a-1", fact((exact <= bound).all(), text))
    maxfl, draws = measured.sel(objective="MaxFL"), config.num_seeds
    least = maxfl.isel({_SQUARE: [maxfl.appeal.values.argmin()]})
    floor = measured["Theorem A.1"].item()
    theorem = mean_above(least.appeal, least.standard_error, floor, draws, ".4f")
    yield ruling(
        "theorem-a-1", theorem, about=f"smallest mean GM-Appeal, compared with {floor:.4f}"
    )
    yield ruling("fedavg-decays", fact(*_decay(exact)), theorem)
    farthest = maxfl.isel({_SQUARE: [maxfl[_SQUARE].values.argmax()]})
    number = 2 * farthest.appeal, 2 * farthest.standard_error
    yield ruling(
        "at-least-one",
        mean_above(*number, 1.0, draws),
        about="expected number of satisfied clients out of two, where the text has at least one",
    )
    for key, name in (("relu", "MaxFL (ReLU)"), ("lemma-a-2", "MaxFL (log loss)")):
        apart = measured.distance.sel(objective=name)
        yield ruling(key, fact(apart <= _ALIKE, f"largest distance {apart:.1e}"))
    most = measured.deviation.max()
    often = f"FedAvg's appeal is within {_SIGMAS} standard errors of the exact value"
    yield check(often, most <= _SIGMAS, f"largest deviation {most:.2f} standard errors")
    yield descents.all_converged("A local minimum is found in every draw", measured)


def _decay(exact: xr.DataArray) -> tuple[bool | None, str]:
    """Whether an appeal decays exponentially, and the slopes of its logarithm."""
    exact = exact.sortby(_SQUARE)
    slopes = np.diff(np.log(exact.values)) / np.diff(exact[_SQUARE].values)
    late = slopes[len(slopes) // 2 :]
    text = f"slope of its logarithm {late.min():.3f} to {late.max():.3f} in the upper half"
    if len(late) < 2:
        return None, text
    return bool((slopes < 0).all() and np.ptp(late) <= _STEADY * abs(late).max()), text


def table(measured: xr.Dataset, config: TwoClients) -> Sequence[Table]:
    """Appeals and bounds at evenly spaced values of gamma_G^2."""
    some = np.unique(np.linspace(0, measured.sizes[_SQUARE] - 1, _ROWS).round().astype(int))
    measured = measured.isel({_SQUARE: some})
    appeal = cells(measured.appeal, measured.standard_error, form=".4f")
    bounds = ("exact", "Lemma A.1", "Theorem A.1")
    contents = columns(appeal.sel(objective=["FedAvg", "MaxFL"]), "objective")
    contents |= {name: cells(measured[name], form=".4f") for name in bounds}
    return [rows(contents, (_SQUARE,))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: TwoClients) -> Figure:
    """Draws GM-Appeal against gamma_G^2, on a linear and a logarithmic axis."""
    squares = measured[_SQUARE].values
    fine = np.linspace(max(squares.max() * 1e-3, 1e-9), squares.max(), 200)
    exact, upper = (fn(np.sqrt(fine), config.gamma) for fn in (exact_appeal, lemma_a_1))
    lower = np.full(2, measured["Theorem A.1"])
    appeal, error = (measured[name].T for name in ("appeal", "standard_error"))
    # Style FedAvg, MaxFL, and the two surrogates, whose marks lie on top of FedAvg's.
    styles = zip(plots.lines(appeal, error), ("o", "s-", "+", "x"), strict=True)
    lines = [
        *(line._replace(style=style) for line, style in styles),
        plots.Line("FedAvg, exact", fine, exact),
        # Skip bounds above 1, because they hold trivially.
        plots.Line(
            "Lemma A.1: FedAvg is below", fine, np.where(upper <= 1, upper, np.nan), style="--"
        ),
        plots.Line("Theorem A.1: MaxFL is above", squares[[0, -1]], lower, style=":"),
    ]
    texts = (r"heterogeneity $\gamma_G^2$", "GM-Appeal")
    linear = plots.Panel("all draws", *texts, lines, limits=(-0.05, 1.05))
    logarithmic = linear._replace(title="the same, logarithmic", limits=(1e-3, 1.5), scale="log")
    return plots.draw(
        [[linear, logarithmic]],
        title=rf"Mean estimation, two clients, $\gamma$ = {config.gamma:g}",
        caption=f"Means over {config.num_seeds:,} draws with standard errors.",
        share=False,
    )


ITEMS = (Item("maxfl-fig5a", TwoClients(), run_two, measure, judge, table, figure),)
"""Figure 5(a)."""
