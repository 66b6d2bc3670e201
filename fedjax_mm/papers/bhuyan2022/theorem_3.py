"""Theorem 3: the proven and the measured gain."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, Self

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm import plots
from fedjax_mm.claims import Evidence, fact
from fedjax_mm.experiments.fields import Count, Positive, TwoOrMore
from fedjax_mm.metrics import gain
from fedjax_mm.papers.bhuyan2022.bounds import Bounds, Method, run_bounds, symbols
from fedjax_mm.papers.bhuyan2022.gains import Models, gain_panels, rounds_to
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import Ruling, finding, ruling
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.values import Several
from fedjax_mm.results.labels import describe
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.theory import mfa
from fedjax_mm.theory.problem import Problem, Rate

_READINGS: Mapping[str, Literal["sum", "max"]] = {"the sum of (127)": "sum", "the maximum": "max"}


class GainBounds(Bounds):
    """Settings of Theorem 3, and of the measured rounds to a given distance."""

    algorithms: tuple[Method, ...] = ("MFA-Rand",)
    mu: tuple[Positive, ...] = (0.05,)
    num_models: Models = (1, 2, 3, 4, 6, 8, 12)
    local_steps: Several[Count] = (1, 2, 5)
    num_seeds: TwoOrMore = 50
    record_every: Count = 1
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """epsilon, in units of the initial distance."""

    @model_validator(mode="after")
    def _is_one_sweep(self) -> Self:
        if len(self.mu) > 1 or self.algorithms != ("MFA-Rand",):
            raise ValueError("Theorem 3 is about MFA-Rand; give one mu, and no other algorithm")
        if 2 * max(self.num_models) > self.num_clients:
            raise ValueError(
                f"num_models is {list(self.num_models)}; Theorem 3 is about at most "
                f"{self.num_clients // 2} of {self.num_clients} clients"
            )
        return self


def run_gain(config: GainBounds, execution: Execution | None = None) -> xr.Dataset:
    """Adds measured gains and two readings of Theorem 3 to the result of `run_bounds`.

    One reading uses the sum of (127), and the other one a maximum.
    """
    every = run_bounds(config, execution)
    known, dataset = symbols(every, config)[0].squeeze("mu"), every.isel(algorithm=0, mu=0)
    error = dataset.distance.mean("seed").transpose("local_steps", "num_models", "round")
    start = error.isel(round=0).mean().item()
    epsilon = config.threshold * start
    rounds = rounds_to(epsilon, error)
    # sigma is 0 for full gradients of all clients. D is one number because all models start at 0.
    numbers = {name: known[name].item() for name in ("N", "mu", "L", "Gamma")}
    numbers |= {"sigma": 0.0, "G": dataset.G.max().item()}
    steps = rounds.local_steps.values[:, None]
    is_meant = mfa.theorem_3_condition(Problem(E=steps, **numbers))[:, 0]
    problem = Problem(E=steps[is_meant], M=rounds.num_models.values, **numbers)
    rate = Rate(known.beta.item(), known.gamma.item())
    gains = {"measured": gain(rounds.num_models, rounds[:, :1], rounds)}
    for what, reading in _READINGS.items():
        gains[what] = np.full(rounds.shape, np.nan)
        gains[what][is_meant] = mfa.theorem_3(problem, rate, start**2, epsilon, reading)
    return dataset.assign(
        gain=(("what", *rounds.dims), np.stack(list(gains.values()))),
        rounds_needed=rounds,
        what=list(gains),
        condition=("local_steps", is_meant),
    )


# In Theorem 1's maximum, the initial term dominates for one model and the noise for two.
_EXAMPLE = Problem(N=4, M=2, E=2, mu=1.0, L=12.5, Gamma=0.0, G=1.0, sigma=0.0)
_SHARE = 0.999  # epsilon^2, in units of D
_RATE, _D = Rate(beta=2.0, gamma=100.0), 36 / 101

# Gamma = 0 satisfies the printed condition N > 1 + 6 L Gamma / G^2 if N > 1, but never (136).
_ONE_STEP = Problem(N=4, M=[1, 2], E=1, mu=1.0, L=12.5, Gamma=0.0, G=1.0, sigma=0.0)


def measure(result: xr.Dataset, config: GainBounds) -> xr.Dataset:
    """The proven and measured gains, and those of the counterexample with two models."""
    epsilon, readings = math.sqrt(_SHARE * _D), list(_READINGS.values())
    examples = [mfa.theorem_3(_EXAMPLE, _RATE, _D, epsilon, each).item() for each in readings]
    gains = result.gain.transpose("local_steps", "what", "num_models")
    measured = xr.Dataset({"gain": gains, "condition": result.condition})
    measured["counterexample"] = xr.DataArray(examples, {"reading": readings})
    alone, both = mfa.rounds_to_accuracy(_ONE_STEP, _RATE, _D, epsilon)
    measured["one_step_gain"] = 2 * alone / both
    return measured.rename(num_models="M", local_steps="E")


def judge(measured: xr.Dataset, config: GainBounds) -> Iterator[Ruling | Check]:
    """Rules on Theorem 3, using the sum in its proof, and on its printed condition."""
    proven = measured.gain.sel(what="the sum of (127)", E=measured.condition, drop=True)
    excluded = ", ".join(f"E = {steps}" for steps in measured.E[~measured.condition].values)
    about = f"{excluded} fails the condition (136)" if excluded else ""
    several = proven.sel(M=proven.M > 1)
    # Give no verdict on an empty grid, because `all` of an empty array is True.
    above = (several > 1).all("M").where(several.sizes["M"] > 0)
    yield ruling("theorem-3", *_each(above, proven), about=about)
    rises = proven.sortby("M").diff("M") > 0
    is_one = abs(proven.sel(M=proven.M == 1) - 1).max("M") < 1e-9
    increases = (rises.all("M") & is_one).where(rises.sizes["M"] > 0)
    found = measured.gain.sel(what="measured", drop=True).sortby("M")
    # Gains that increase with M exceed 1 for several models, because the gain of one model is 1.
    is_known = found.notnull().all() & (found.sizes["M"] > 1)
    grows = (found.diff("M") > 0).all().where(is_known)
    yield ruling(
        "theorem-3-increasing",
        *_each(increases, proven, "proven, "),
        fact(grows, describe(found), "measured"),
        about=about,
    )
    evidence = (
        "N = 4, E = 1, Gamma = sigma = 0, which is within the printed condition and not within "
    )
    evidence += (
        f"its derivation (136): at D = {_D:.3f} and epsilon^2 = {_SHARE:g} D, the gain of 2 "
    )
    evidence += f"models is {measured.one_step_gain:.2f}"
    yield ruling("theorem-3-one-step", fact(bool(measured.one_step_gain > 1), evidence))
    by_sum, by_max = measured.counterexample.values
    false = "with Theorem 1's maximum instead of the sum, Theorem 3 is false (counterexample)"
    example = f"N = 4, M = 2: gain {by_max:.2f} with the maximum, {by_sum:.2f} with the sum"
    yield finding(false, by_max < 1 < by_sum, example)


def _each(holds: xr.DataArray, gains: xr.DataArray, which: str = "") -> list[list[Evidence]]:
    """The evidence for each E."""
    return [
        fact(holds.sel(E=E).item(), describe(gains.sel(E=E, drop=True)), f"{which}E = {E}")
        for E in gains.E.values
    ]


def table(measured: xr.Dataset, config: GainBounds) -> Sequence[Table]:
    """A table of all gains."""
    gains = cells(measured.gain, form=".3f", missing="none").rename(what="gain")
    return [rows(columns(gains, "M"), ("E", "gain"))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: GainBounds) -> Figure:
    """Draws gains against M, with one panel per E."""
    return plots.draw(
        [gain_panels(measured.gain)],
        title=f"Theorem 3 and measured gains of MFA-Rand, quadratic, N = {config.num_clients}, "
        rf"$\mu$ = {config.mu[0]:g}",
        caption=f"Measured: rounds until the mean error over {config.num_seeds} seeds is "
        f"{config.threshold:g} of that at the start.",
    )


ITEMS = (Item("theory-gain", GainBounds(), run_gain, measure, judge, table, figure),)
"""Theorem 3."""
