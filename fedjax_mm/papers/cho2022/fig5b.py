"""Figure 5(b): MaxFL's objective for two clients, and its local minima."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field

from fedjax_mm import plots
from fedjax_mm.claims import Evidence, fact
from fedjax_mm.experiments.fields import Config, Count, Positive, TwoOrMore
from fedjax_mm.papers.cho2022 import descents
from fedjax_mm.papers.compute import compute
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import Ruling, check, ruling
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.values import Some
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.tasks.mean_estimation import maxfl_objective

_NEAR = 1e-6  # minima closer than this count as one
_PRINTED = 1.022  # beyond this the midpoint is a maximum, eq. (35)


class Landscape(Config):
    """Settings of Figure 5(b), where the empirical means are -gamma_hat and gamma_hat."""

    gamma_hat: Some[Positive] = (0.5, 1.0, 1.5, 3.0)
    """The values of gamma_hat whose objectives are drawn."""
    largest: Positive = 4.0
    num_points: TwoOrMore = 200
    """The number of gamma_hat, up to the largest, at which minima are searched for."""
    num_starts: Annotated[Count, Field(ge=3)] = 41
    """The number of searches, which start between the clients' own models."""


def run_landscape(config: Landscape, execution: Execution | None = None) -> xr.Dataset:
    """The objective over w for some gamma_hat, and its minima for many."""

    def program(gamma_hat: Any, w: Any, fine: Any, starts: Any) -> dict[str, Any]:
        def curve(gamma_hat: Any) -> Any:
            return jax.vmap(partial(maxfl_objective, descents.pair(gamma_hat)))(w)

        def minima(gamma_hat: Any) -> Any:
            descend = partial(descents.descend, maxfl_objective, descents.pair(gamma_hat))
            return jax.vmap(descend)(gamma_hat * starts)

        found = jax.vmap(minima)(fine)
        some = {name: found[name] for name in ("displacement", "nearest", "converged")}
        return some | {"minimum": found["solution"], "objective": jax.vmap(curve)(gamma_hat)}

    with jax.enable_x64(True):
        fine = jnp.linspace(0, config.largest, config.num_points + 1)[1:]
        # Shift the starting points off the midpoint by less than the distance to a nearby minimum,
        # except where one is about to appear there.
        starts = jnp.linspace(-1, 1, config.num_starts) + 1e-5
        w, gamma_hat = descents.across(config.gamma_hat, 401), jnp.asarray(config.gamma_hat)
    coords = {"gamma_hat": gamma_hat, "w": w, "searched_gamma_hat": fine, "start": starts}
    dims = {"objective": "gamma_hat w"}
    over = "searched_gamma_hat start"
    return compute(program, tuple(coords.values()), coords, over, dims)


def critical_gamma_hat() -> float:
    """The gamma_hat at which the midpoint turns from a minimum into a maximum.

    It solves ``x tanh(x/2) = 1/2`` for ``x = gamma_hat^2``, because the curvature there is
    ``2 q (1 - 2 x tanh(x/2))``, where q is the weight of both clients.

    Example:
      >>> round(critical_gamma_hat(), 4)
      1.0216
    """
    low, high = 0.0, 2.0
    for _ in range(60):
        x = (low + high) / 2
        low, high = (x, high) if x * math.tanh(x / 2) < 1 / 2 else (low, x)
    return math.sqrt(low)


def measure(result: xr.Dataset, config: Landscape) -> xr.Dataset:
    """The distinct minima in increasing order, padded with NaN, and their displacements."""
    points = np.sort(result.minimum.transpose("searched_gamma_hat", "start").values)
    is_new = np.diff(points, prepend=-np.inf) > _NEAR
    number = is_new.sum(axis=1)
    # Sort again to move NaN to the end.
    minima = np.sort(np.where(is_new, points, np.nan))[:, : number.max()]
    inwards = result.displacement * (3 - 2 * result.nearest)  # client 1 is on the left
    return xr.Dataset(
        {
            "critical_gamma_hat": critical_gamma_hat(),
            "minima": (("gamma_hat", "minimum"), minima),
            "number": ("gamma_hat", number),
            "middle": ("gamma_hat", middle_difference(result.searched_gamma_hat.values)),
            "nearest": inwards.min(),
            "farthest": inwards.max(),
            **descents.convergence(result),
        },
        {"gamma_hat": result.searched_gamma_hat.values, "minimum": 1 + np.arange(number.max())},
    )


def judge(measured: xr.Dataset, config: Landscape) -> Iterator[Ruling | Check]:
    """Judges the number and positions of minima, and when the midpoint is not a minimum."""
    gamma, minima, critical = measured.gamma_hat, measured.minima, measured.critical_gamma_hat
    single = (measured.number == 1) & (abs(minima.isel(minimum=0)) < _NEAR)
    yield ruling("collaboration", _at(gamma**2 < 1, single))
    is_outer = (abs(abs(minima) - gamma) < abs(minima)) | minima.isnull()
    parted = (measured.number == 2) & is_outer.all("minimum")
    yield ruling("separation", _at(gamma**2 > 2, parted))
    turns = f"the middle turns into a maximum at {critical:.4f}"
    for key, where in {"lemma-a-3": gamma > 2, "equation-35": gamma >= _PRINTED}.items():
        yield ruling(key, _at(where, measured["middle"] < 0), about=turns)
    nearest, farthest = measured.nearest.item(), measured.farthest.item()
    distances = f"distances inwards from {nearest:.1e} to {farthest:.4f}"
    yield ruling("lemma-a-4", fact(0 < nearest <= farthest <= 2, distances))
    beyond = measured["middle"].where(gamma != critical, drop=True)
    is_right = (beyond < 0) == (beyond.gamma_hat > critical)
    yield check("The middle is a maximum beyond the critical gamma_hat only", is_right, turns)
    yield descents.all_converged("A local minimum is found from every start", measured)


def _at(where: xr.DataArray, holds: xr.DataArray) -> list[Evidence]:
    """Returns, as a fact, whether a condition holds at all selected gamma_hat, if there are any."""
    number, of = int((holds & where).sum()), int(where.sum())
    return fact(number == of if of else None, f"at {number} of {of} gamma_hat")


def middle_difference(gamma_hat: np.ndarray) -> np.ndarray:
    """The sign of the objective's second derivative at the midpoint, by finite differences.

    Differences are relative to 1 minus the objective, which is tiny if clients are far apart.
    """
    step = 1e-3
    # Compute log(1 - sigma), because sigma itself would round to 1.
    middle, *neighbours = (-np.logaddexp(0, (gamma_hat + x) ** 2) for x in (0, -step, step))
    return np.sign(1 - np.mean([np.exp(each - middle) for each in neighbours], axis=0))


def table(measured: xr.Dataset, config: Landscape) -> Sequence[Table]:
    """The minima at nine values of gamma_hat, or at all values if there are fewer."""
    nine = np.unique(np.linspace(0, config.num_points - 1, 9).astype(int))
    some = measured.isel(gamma_hat=nine)
    where = columns(cells(some.minima, form="+.4f", missing=""), "minimum")
    return [rows({"minima": some.number, **where}, ("gamma_hat",))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: Landscape) -> Figure:
    """Draws the objective over w, and the minima over gamma_hat."""
    gammas, minima = measured.gamma_hat.values, measured.minima
    every = np.repeat(gammas, minima.sizes["minimum"])
    own = plots.Line("a client's own model", gammas, gammas, style="--", color=6)
    found = plots.Line("local minima", every, minima.values.ravel(), style=".")
    below = plots.Panel(
        "its local minima",
        r"half the distance of the empirical means, $\hat\gamma_G$",
        "model $w$",
        [found, own, own._replace(label="", y=-gammas)],
        {"the middle turns into a maximum": measured.critical_gamma_hat.item()},
        limits=(-1.1 * config.largest, 1.1 * config.largest),
    )
    return plots.draw(
        [[descents.objectives(result), below]],
        title=r"Mean estimation, two clients with empirical means $\pm\hat\gamma_G$",
        caption=f"Minima found from {config.num_starts} starts between the clients' own models.",
    )


ITEMS = (Item("maxfl-fig5b", Landscape(), run_landscape, measure, judge, table, figure),)
"""Figure 5(b)."""
