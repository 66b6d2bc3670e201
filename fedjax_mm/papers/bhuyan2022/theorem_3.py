"""Bhuyan, Moharir, Joshi, Theorem 3: the gain that is proven beside the one that is measured."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm.experiments.tasks import Count, Positive
from fedjax_mm.papers.bhuyan2022.bounds import Bounds, Method, run_bounds
from fedjax_mm.papers.old import Claim, Judgement, Reproduction
from fedjax_mm.results import plots
from fedjax_mm.results.metrics import first_round_below, gain
from fedjax_mm.sweeps.execute import Execution
from fedjax_mm.theory import mfa
from fedjax_mm.theory.problem import Problem, Rate


class GainBounds(Bounds):
    """Settings: Theorem 3 beside measured rounds to a distance."""

    algorithms: tuple[Method, ...] = ("MFA-Rand",)
    mu: tuple[Positive, ...] = (0.05,)
    num_models: tuple[Count, ...] = (1, 2, 3, 4, 6, 8, 12)
    local_steps: tuple[Count, ...] = (1, 2, 5)
    num_seeds: Annotated[Count, Field(ge=2)] = 50
    record_every: Count = 1
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """epsilon, in units of the distance at the start."""

    @model_validator(mode="after")
    def _is_one_sweep(self) -> Self:
        if len(self.mu) > 1 or self.algorithms != ("MFA-Rand",):
            raise ValueError("Theorem 3 is about MFA-Rand; give one mu, and no other algorithm")
        if list(self.num_models) != sorted({1, *self.num_models}):
            raise ValueError(
                f"num_models is {list(self.num_models)}; it must increase from 1, the baseline"
            )
        if 2 * max(self.num_models) > self.num_clients:
            raise ValueError(
                f"num_models is {list(self.num_models)}; Theorem 3 is about at most "
                f"{self.num_clients // 2} of {self.num_clients} clients"
            )
        return self


def run_gain(config: GainBounds, execution: Execution | None = None) -> xr.Dataset:
    """As `run_bounds`, with the gains: measured, from (127), and with the theorem's maximum."""
    dataset = run_bounds(config, execution).isel(algorithm=0, mu=0)
    dims = ("local_steps", "num_models", "round")
    error = dataset.distance.mean("seed").transpose(*dims)
    start = error.isel(round=0).mean().item()
    rounds = first_round_below(error, error["round"], config.threshold * start)
    models = np.asarray(config.num_models)
    constants = {"N": config.num_clients, "sigma": 0.0, "D": start**2}
    constants |= config.constants("MFA-Rand", config.mu[0])
    constants |= {"G": dataset.G.max().item(), "epsilon": config.threshold * start}
    steps = np.asarray(config.local_steps)[:, None]
    gains = {
        "measured": gain(models, rounds[:, :1], rounds),
        "the sum of (127)": _theorem_3(models, steps, constants, "sum"),
        "the maximum": _theorem_3(models, steps, constants, "max"),
    }
    return dataset.assign(
        gain=(("what", *dims[:2]), np.stack(list(gains.values()))),
        rounds_needed=(dims[:2], rounds),
        what=list(gains),
        condition=("local_steps", _condition(steps[:, 0], constants)),
    )


def _condition(steps: Any, constants: Mapping[str, Any]) -> np.ndarray:
    return mfa.theorem_3_condition(
        Problem(E=steps, **{name: constants[name] for name in ("N", "L", "Gamma", "G")})
    )


def _theorem_3(
    models: np.ndarray, steps: np.ndarray, constants: Mapping[str, Any], reading: Any
) -> np.ndarray:
    """Theorem 3's gain; NaN at E for which it says nothing."""
    is_meant = _condition(steps, constants)
    result = np.full((len(steps), len(models)), np.nan)
    if rows := np.flatnonzero(is_meant).tolist():
        result[rows] = _gain(models, dict(constants, E=steps[rows]), reading)
    return result


def _gain(M: Any, constants: Mapping[str, Any], reading: Any) -> np.ndarray:
    """Returns Theorem 3's gain."""
    names = ("N", "E", "mu", "L", "Gamma", "G", "sigma")
    problem = Problem(M=M, **{name: constants[name] for name in names})
    rate = Rate(constants["beta"], constants["gamma"])
    return mfa.theorem_3(problem, rate, constants["D"], constants["epsilon"], reading)


def judge_gain(dataset: xr.Dataset, config: GainBounds) -> Judgement:
    """Whether gains exceed 1 and increase, proven and measured."""
    gains = {str(what): dataset.gain.sel(what=what).values for what in dataset.what.values}
    steps, meant = dataset.local_steps.values, dataset.condition.values
    more = [i for i, m in enumerate(config.num_models) if m > 1]
    proven, measured = gains["the sum of (127)"], gains["measured"]
    counterexample: dict[str, Any] = {
        "N": 4,
        "E": 2,
        "mu": 1.0,
        "L": 12.5,
        "Gamma": 0.0,
        "G": 1.0,
        "sigma": 0.0,
    }
    counterexample |= {"beta": 2.0, "gamma": 100.0, "D": 36 / 101}
    counterexample["epsilon"] = math.sqrt(0.999 * counterexample["D"])
    by_sum, by_max = (_gain(2, counterexample, reading).item() for reading in ("sum", "max"))

    def text(values: np.ndarray) -> str:
        return "; ".join(
            f"E = {e}: {', '.join(f'{g:.2f}' for g in row)}"
            for e, row in zip(steps, values, strict=True)
        )

    excluded = ", ".join(f"E = {e}" for e in steps[~meant])
    claims = (
        Claim(
            "Theorem 3, with the sum of its proof: the gain is above 1 and increases with M <= N/2"
            + (f" ({excluded} fails its condition (136))" if excluded else ""),
            bool(np.all(np.diff(proven[meant]) > 0) and np.all(proven[meant][:, more] > 1)),
            text(proven[meant]) if meant.all() else text(proven),
        ),
        Claim(
            "with Theorem 1's maximum in place of the sum the claim is false (counterexample)",
            by_max < 1 < by_sum,
            f"N = 4, M = 2: gain {by_max:.2f} with the maximum, {by_sum:.2f} with the sum",
        ),
        Claim(
            "the measured gain is above 1 and increases with M",
            bool(np.all(np.diff(measured) > 0) and np.all(measured[:, more] > 1)),
            text(measured),
        ),
    )
    header = ("E", "gain", *(f"M = {m}" for m in config.num_models))
    rows = [
        (str(e), what, *(f"{g:.3f}" for g in values[i]))
        for i, e in enumerate(steps)
        for what, values in gains.items()
    ]
    return Judgement(
        gains | {"local_steps": steps, "counterexample": {"sum": by_sum, "max": by_max}},
        claims,
        (header, *rows),
    )


def plot_gain(dataset: xr.Dataset, config: GainBounds, judgement: Judgement) -> Figure:
    """Gains against M, one panel per E."""
    gains = dataset.gain.rename(num_models="M").transpose("local_steps", "what", "M")
    titled = gains.assign_coords(local_steps=[f"E = {e}" for e in gains.local_steps.values])
    return plots.lines_with_errors(
        titled,
        titled * np.nan,
        x="M",
        series="what",
        panel="local_steps",
        series_label="{}",
        xlabel="number of models $M$",
        ylabel="gain $g = M\\,T_1 / T_M$",
        title=f"Theorem 3 and measured gains of MFA-Rand, quadratic, N = {config.num_clients}, "
        rf"$\mu$ = {config.mu[0]:g}",
        caption=f"Measured: rounds until the mean error is {config.threshold:g} of that at the "
        "start. "
        + " ".join(
            f"{'Holds' if claim.holds else 'DOES NOT HOLD'}: {claim.claim}."
            for claim in judgement.claims
        ),
        diagonal="g = M",
    )


REPRODUCTIONS = (
    Reproduction(
        id="theory-gain",
        paper={
            "statement": "Theorem 3: the gain is above 1 and increases with M for M <= N/2",
            "open": ["the proof uses a sum where Theorem 1 has a maximum; both are drawn"],
        },
        config=GainBounds(),
        run=run_gain,
        judge=judge_gain,
        plot=plot_gain,
    ),
)
"""Theorem 3."""
