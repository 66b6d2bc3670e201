"""Section 4: bounds on model averaging, compared with measured runs of Algorithm 1."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm import plots
from fedjax_mm.base import Scalar
from fedjax_mm.claims import Evidence, at_most, fact, less, more
from fedjax_mm.experiments.fields import Config, Count, NonNegative, Positive, Seed, TwoOrMore
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.compute import compute
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import Ruling, ruling, untested
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, rows
from fedjax_mm.papers.values import Increasing
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.theory.cohorts import corollary_part_1, corollary_part_2, theorem_1
from fedjax_mm.theory.validation import over

Models: TypeAlias = Float[Array, "*runs clients dim"]

_FALLS = 0.3  # largest ratio of means at T and T / 16, 1 / sqrt(16) with a small margin
_ROUND_OFF = 1e-12
_L = 3.0  # smoothness of `Wells`
_START = 3.0
_TARGET = 0.1  # squared gradient at which a run counts as converged
_GRID = np.linspace(-6.0, 6.0, 240_001)  # of a coordinate
_LESS = 0.5  # largest ratio of messages that counts as a significant reduction


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Wells:
    """``f_i(x) = |x - c_i|^2 / 2 + sum_j cos(2 x_j) / 2``, with noisy gradients.

    The losses are not convex. Curvatures along each coordinate range from -1 to 3, so L is 3.

    Attributes:
      centres: c_i, ``[clients, dim]``.
      sigma: the root mean squared norm of the noise.
    """

    centres: Array
    sigma: Scalar

    def gradients(self, models: Models) -> Models:
        """Every client's gradient at its own model."""
        return models - self.centres - jnp.sin(2 * models)

    def noise(self, rng_key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        """Gaussian gradient noise."""
        return self.sigma / np.sqrt(shape[-1]) * jax.random.normal(rng_key, shape)

    def gap(self, start: float = _START) -> float:
        """``f(x^0) - f*``, minimizing each independent coordinate on a fine grid."""
        centres = np.asarray(self.centres).mean(0)[:, None]

        def of(x: np.ndarray) -> np.ndarray:
            return ((x - centres) ** 2 + np.cos(2 * x)) / 2

        return float((of(np.full((1, 1), start))[:, 0] - of(_GRID).min(1)).sum())


class Averaging(Config):
    """Settings of Algorithm 1 on nonconvex losses with noisy gradients."""

    num_clients: TwoOrMore = 4
    dim: Count = 5
    noise: Annotated[Increasing[NonNegative], Field(min_length=2)] = (0.5, 2.0)
    """The values of sigma."""
    rates: Annotated[Increasing[Positive], Field(min_length=1)] = (0.05, 0.3, 1.0)
    """The values of gamma L in the theorem, at most 1."""
    intervals: Annotated[Increasing[Count], Field(min_length=1)] = (1, 2, 5)
    """I, the number of iterations between averaging steps."""
    num_iterations: Count = 1000
    """The largest T for which the theorem's bound is compared with measured means."""
    horizons: Annotated[Increasing[Count], Field(min_length=2)] = (256, 4096, 65_536)
    """The values of T in the corollary, which determine its learning rates. Each is 16 times the
    previous one."""
    starts: Annotated[Increasing[Positive], Field(min_length=2)] = (3.0, 6.0, 12.0, 24.0)
    """The coordinates of the starting points of runs to a target, at the lowest noise and rate."""
    num_seeds: TwoOrMore = 40
    seed: Seed = 0

    @model_validator(mode="after")
    def _theorems_apply(self) -> Self:
        if self.rates[-1] > 1:
            raise ValueError(f"rates has {self.rates[-1]}; the theorem has gamma L <= 1")
        if any(later != 16 * T for T, later in zip(self.horizons, self.horizons[1:], strict=False)):
            raise ValueError(f"horizons is {list(self.horizons)}; each is 16 times the one before")
        if self.allowed(self.horizons[0]) < 1:
            raise ValueError(
                f"horizons begins with {self.horizons[0]}; part 2 of the corollary needs "
                f"N^3 = {self.num_clients**3} or more"
            )
        return self

    def allowed(self, T: int) -> int:
        """The largest interval that part 2 of the corollary allows, or 0."""
        fit = [each for each in self.intervals if each**4 * self.num_clients**3 <= T]
        return max(fit, default=0)

    def wells(self, sigma: Any) -> Wells:
        """The losses, with a different centre for each client."""
        centres = np.random.default_rng(self.seed).normal(size=(self.num_clients, self.dim))
        return Wells(jnp.asarray(centres), sigma)


def algorithm_1(
    rng_key: PRNGKeyArray,
    task: Wells,
    rate: Scalar,
    interval: Scalar,
    how: tuple[int, int],
    start: Scalar | float = _START,
) -> dict[str, Array]:
    """Runs Algorithm 1 as printed, eqs. (10) and (11).

    The argument `how` holds the number of runs and the number of iterations T.

    Returns:
      `squares`, the mean over runs of ``|grad f(x_bar^(t-1))|^2``, and `drift`, the mean squared
      distance of the farthest client from the mean, both by iteration; `own` ``[runs]``, each run's
      mean of the squares; `G2`, the largest second moment of a gradient; `broken`, the largest
      violation of eq. (13); and `gradient`, the squares by iteration and run.
    """
    num_runs, num_iterations = how
    models = jnp.broadcast_to(start, (num_runs, *task.centres.shape))

    def step(carry: tuple[Models, Array], t: Array) -> tuple[tuple[Models, Array], Any]:
        models, sums = carry
        mean, exact = models.mean(1), task.gradients(models)
        at_mean = task.gradients(jnp.broadcast_to(mean[:, None], models.shape)).mean(1)
        squares = jnp.sum(at_mean**2, axis=-1)
        gradients = exact + task.noise(jax.random.fold_in(rng_key, t), models.shape)
        new = jnp.where(t % interval == 0, mean[:, None], models) - rate * gradients
        after = new.mean(1)
        found = {
            "squares": squares.mean(),
            "drift": jnp.sum((new - after[:, None]) ** 2, axis=-1).mean(0).max(),
            "G2": jnp.sum(exact**2, axis=-1).max() + task.sigma**2,
            "broken": jnp.abs(after - (mean - rate * gradients.mean(1))).max(),
            "gradient": squares,
        }
        return (new, sums + squares), found

    carry = models, jnp.zeros(num_runs)
    (_, sums), found = lax.scan(step, carry, jnp.arange(1, num_iterations + 1))
    most = {name: found[name].max() for name in ("G2", "broken")}
    return found | most | {"own": sums / num_iterations}


def run(config: Averaging, execution: Execution | None = None) -> xr.Dataset:
    """Squared gradients in runs for the theorem, and for the corollary at its rates."""
    N = config.num_clients

    def program(
        key: PRNGKeyArray, sigmas: Array, rates: Array, intervals: Array, starts: Array
    ) -> dict[str, Array]:
        def of(sigma: Scalar, interval: Scalar, rate: Scalar, T: int) -> dict[str, Array]:
            task = config.wells(sigma)
            return algorithm_1(key, task, rate / _L, interval, (config.num_seeds, T))

        def grid(rate: Any, T: int) -> dict[str, Array]:
            inner = jax.vmap(lambda sigma, interval: of(sigma, interval, rate, T), (None, 0))
            return jax.vmap(inner, (0, None))(sigmas, intervals)

        found = jax.vmap(lambda rate: grid(rate, config.num_iterations))(rates)
        corollary = [grid(np.sqrt(N / T), T) for T in config.horizons]
        for each in corollary:
            each["drift"] = each["drift"].max(-1)
        names = ("own", "G2", "drift", "broken")
        at = {f"{name} at T": jnp.stack([each[name] for each in corollary]) for name in names}

        def path(start: Scalar, interval: Scalar) -> dict[str, Array]:
            task, how = config.wells(sigmas[0]), (config.num_seeds, config.num_iterations)
            return algorithm_1(key, task, rates[0] / _L, interval, how, start)

        paths = jax.vmap(jax.vmap(path, (None, 0)), (0, None))(starts, intervals)
        at["gradient"] = paths["gradient"]
        return {name: found[name] for name in ("squares", "drift", "G2", "broken")} | at

    coords = {
        "rate": list(config.rates),
        "sigma": list(config.noise),
        "I": list(config.intervals),
        "t": np.arange(1, config.num_iterations + 1),
        "T": list(config.horizons),
        "start": list(config.starts),
    }
    dims = dict.fromkeys(("G2", "broken"), "rate sigma I")
    dims |= {f"{name} at T": "T sigma I" for name in ("G2", "drift", "broken")}
    dims |= {"own at T": "T sigma I seed", "gradient": "start I t seed"}
    arguments = (
        jax.random.key(config.seed),
        *map(np.array, (config.noise, config.rates, config.intervals, config.starts)),
    )
    return compute(program, arguments, coords, "rate sigma I t", dims, seed=config.seed)


def measure(result: xr.Dataset, config: Averaging) -> xr.Dataset:
    """Measured means and their bounds, at every T for the theorem."""
    gap = config.wells(0.0).gap()

    constants = {"N": config.num_clients, "L": _L, "gap": gap}

    def bound(of: Any, *arguments: xr.DataArray, **rate: xr.DataArray) -> xr.DataArray:
        sigma, interval, G2, T = arguments
        at = {"sigma": sigma, "E": interval, "G": np.sqrt(G2), "T": T}
        found: xr.DataArray = over(of, at | constants | rate)
        return found

    result, rate = result.drop_attrs(), result["rate"] / _L
    sigma, interval, T = result.sigma, result.I, result["T"]
    some = sigma, interval, result.G2
    at = sigma, interval, result["G2 at T"]
    allowed = interval**4 * config.num_clients**3 <= T
    mean, error = estimate(result["own at T"])
    found = {
        "mean": result.squares.cumsum("t") / result.t,
        "bound": bound(theorem_1, *some, result.t, gamma=rate),
        "drift": result.drift.max("t"),
        "drift bound": 4 * rate**2 * interval**2 * result.G2,
        "own at T": result["own at T"],
        "mean at T": mean,
        "error at T": error,
        "part 1": bound(corollary_part_1, *at, T),
        "part 2": bound(corollary_part_2, *(each.where(allowed, 1) for each in at), T),
        "drift at T": result["drift at T"],
        "drift bound at T": 4 * config.num_clients / (_L**2 * T) * interval**2 * at[2],
        "broken": xr.concat([result.broken.max(), result["broken at T"].max()], "which").max(),
        "f(x^0) - f*": ("start", [config.wells(0.0).gap(start) for start in config.starts]),
        "until": result.t.where(result.gradient <= _TARGET).min("t"),
    }
    found["part 2"] = found["part 2"].where(allowed)
    return xr.Dataset(found)


def judge(measured: xr.Dataset, config: Averaging) -> Iterator[Ruling | Check]:
    """Rules on whether every bound holds, and whether means fall as in the corollary."""
    mean = measured["mean at T"]
    for key, means, bound in (
        ("theorem", measured["mean"], measured.bound),
        ("corollary-1", mean, measured["part 1"]),
        ("corollary-2", mean, measured["part 2"]),
    ):
        yield ruling(key, _holds(means, bound), looseness=_ratio(means, bound).min())
    pairs = [("drift", "drift bound"), ("drift at T", "drift bound at T")]
    tests = [_holds(measured[name], measured[most], name) for name, most in pairs]
    least = min(_ratio(measured[name], measured[most]).min().item() for name, most in pairs)
    yield ruling("lemma-1", *tests, looseness=least)
    broken = measured.broken.item()
    yield ruling("mean-model", fact(broken < _ROUND_OFF, f"missed by at most {broken:.1e}"))
    own = [
        measured["own at T"].sel(T=T, I=config.allowed(T)).drop_vars("I") for T in config.horizons
    ]
    ratios = [after / before.mean("seed").drop_vars("T") for before, after in pairwise(own)]
    yield ruling("order", at_most(xr.concat(ratios, "T"), _FALLS, form=".3f"))
    more_noise, less_noise = (own[-1].isel(sigma=at, drop=True) for at in (-1, 0))
    yield ruling("noise-slows", more((more_noise - less_noise).drop_vars("T"), form=".3g"))
    yield from _to_a_target(measured)


def _to_a_target(measured: xr.Dataset) -> Iterator[Ruling]:
    until = measured.until.isel(I=0, drop=True)
    steps = ", ".join(f"{x:.0f}" for x in until.mean("seed", skipna=False).values)
    about = f"iterations from each start: {steps}"
    yield ruling("distance-slows", more(until.diff("start"), form=".1f"), about=about)
    if measured.I[0] > 1 or measured.sizes["I"] == 1:
        yield untested("less-communication", "intervals are not 1 and others")
        return
    messages = (measured.until / measured.I).isel(start=0, drop=True)
    ratio = messages.isel(I=-1, drop=True) / messages.isel(I=0, drop=True)
    yield ruling("less-communication", less(ratio, by=_LESS, form=".3f"))


def _ratio(measured: xr.DataArray, bound: xr.DataArray) -> xr.DataArray:
    return (bound / measured).where(bound.notnull())


def _holds(measured: xr.DataArray, bound: xr.DataArray, name: str = "") -> list[Evidence]:
    """Returns, as a fact, whether all measured means are below their bounds, ignoring NaN."""
    ratio = _ratio(measured, bound)
    holds = (ratio >= 1) | bound.isnull()
    text = f"bound / measured {ratio.min().item():.3g} to {ratio.max().item():.3g}"
    return fact(bool(holds.all()), f"{text}, {int(ratio.notnull().sum()):,} numbers", name)


def table(measured: xr.Dataset, config: Averaging) -> Sequence[Table]:
    """The corollary's means and bounds by T, and the theorem's at the last T."""
    ends = measured.isel(t=-1)
    corollary = {
        "measured": cells(measured["mean at T"], measured["error at T"], form=".3g"),
        "part 1": cells(measured["part 1"], form=".3g"),
        "part 2": cells(measured["part 2"], form=".3g", missing="I is too large"),
        "Lemma 1": cells(measured["drift at T"], form=".3g"),
        "its bound": cells(measured["drift bound at T"], form=".3g"),
    }
    theorem = {
        "measured": cells(ends["mean"], form=".3g"),
        "bound": cells(ends.bound, form=".3g"),
        "Lemma 1": cells(ends.drift, form=".3g"),
        "its bound": cells(ends["drift bound"], form=".3g"),
    }
    target = {
        "f(x^0) - f*": cells(
            measured["f(x^0) - f*"].broadcast_like(measured.until[..., 0]), form=".3g"
        ),
        "iterations": cells(*estimate(measured.until), form=".1f"),
    }
    title = f"The theorem at T = {config.num_iterations}, by gamma L"
    words = f"Iterations until the squared gradient is {_TARGET}, by the coordinates of x^0"
    return [
        rows(corollary, ("T", "sigma", "I")),
        rows(theorem, ("rate", "sigma", "I"), title),
        rows(target, ("start", "I"), words),
    ]


def figure(result: xr.Dataset, measured: xr.Dataset, config: Averaging) -> Figure:
    """Plots measured means and bounds against T at the lowest noise, with one panel per rate."""
    panels = []
    for rate in measured["rate"].values:
        here = measured.sel(rate=rate).isel(sigma=0)
        drawn = plots.lines(here["mean"].transpose("I", "t"), style="-")
        drawn += plots.lines(here.bound.transpose("I", "t"), style="--", label="bound, ")
        title, ylabel = rf"$\gamma L$ = {rate:g}", "mean squared gradient"
        panels.append(plots.Panel(title, "$T$", ylabel, drawn, scale="log", xscale="log"))
    title = f"Algorithm 1 with {config.num_clients} clients, losses that are not convex"
    caption = f"Solid: measured, mean of {config.num_seeds} runs; dashed: the bound of section 4.3."
    return plots.draw([panels], title=title, caption=caption)


ITEMS = (Item("theory-cohorts", Averaging(), run, measure, judge, table, figure),)
"""The theorem, the corollary and Lemma 1."""
