"""Compares bounds on local training with runs, and computes the gain of an outer momentum.

The theorems that newer papers are about have their own bounds here, whose constants and proofs are
in `fedjax_mm.theory.local_steps`.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr
from jaxtyping import Array
from matplotlib.figure import Figure
from pydantic import Field

from fedjax_mm import plots
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignments.partitions import mfa_rand
from fedjax_mm.base import Algorithm, ClientContext
from fedjax_mm.experiments.fields import Count, Positive, Recorded, Seed, TwoOrMore
from fedjax_mm.local import averaging, local_sgd
from fedjax_mm.local.gradients import LocalStep, StepGradient, loss_and_gradient
from fedjax_mm.local.training import LocalUpdate
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import check, finding
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, rows
from fedjax_mm.papers.training import described
from fedjax_mm.papers.values import Several, Trend
from fedjax_mm.results.labels import label
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.least_squares import LeastSquares, least_squares
from fedjax_mm.theory import local_steps, require, validate
from fedjax_mm.theory.constants import heterogeneity
from fedjax_mm.theory.problem import Problem

_THEOREMS = ("equal losses", "unlike losses", "outer optimizer")
_KINDS = ("heavy ball", "Nesterov")
_INNER = 0.1  # the clients' rate below an outer optimizer
_LOOSE = 10  # a bound above this multiple of the error is loose


class TheoryLater(Recorded):
    """Ridge regression with clients of equal or unlike curvatures, rates and cohorts."""

    num_clients: Count = 8
    dim: TwoOrMore = 6
    mu: Positive = 0.05
    """The smallest curvature. The largest is 1."""
    sigma: Positive = 1.0
    """The standard deviation of the gradients' noise, on equal losses."""
    rates: Trend[Positive] = (0.01, 0.03, 0.1, 0.3, 1.0)
    """Local rates, where L is 1."""
    local_steps: Several[Count] = (1, 4, 16)
    cohorts: Several[Count] = (2, 8)
    outer: Several[Positive] = (0.7, 1.0, 2.0)
    momenta: Several[float] = (0.0, 0.5, 0.9)
    outer_steps: Count = 10
    """E of the clients below an outer optimizer, at the rate 0.1."""
    num_rounds: Count = 60
    record_every: Count = 1
    num_seeds: Annotated[Count, Field(ge=3)] = 100
    seed: Seed = 0


class _Case(NamedTuple):
    """A bound and its runs, over some axes."""

    task: LeastSquares
    axes: Mapping[str, Sequence[Any]]
    build: Callable[..., tuple[Algorithm, int]]
    bound: Callable[..., Any]
    power: int = 2


def _task(config: TheoryLater, *, curvatures: bool, targets: bool) -> LeastSquares:
    """A task with curvatures from mu to 1, whose clients may have unlike ones, or targets."""
    draws, d = np.random.default_rng(config.seed), config.dim

    def features() -> np.ndarray:
        sizes = np.append([config.mu, 1.0], draws.uniform(config.mu, 1, d - 2))
        turned: np.ndarray = np.linalg.qr(draws.normal(size=(d, d)))[0]
        return np.sqrt(d * sizes)[:, None] * turned

    shared, center = features(), draws.normal(size=d)
    each = [features() if curvatures else shared for _ in range(config.num_clients)]
    values = [x @ (center + targets * draws.normal(size=d)) for x in each]
    return least_squares(each, values, ridge=1e-9)


def _noisy(rate: Any, steps: int, sigma: float) -> Algorithm:
    """FedAvg whose gradients have noise of variance sigma^2."""

    def train(context: ClientContext) -> LocalUpdate:
        @StepGradient
        def gradient_fn(step: LocalStep, params: Array, *batches: Any) -> tuple[Array, Array]:
            loss, gradient = loss_and_gradient(context.task)(params, *batches)
            noise = jax.random.normal(step.rng_key, params.shape, params.dtype)
            return loss, gradient + sigma / params.size**0.5 * noise

        return local_sgd(rate, steps=steps).train(context, gradient_fn=gradient_fn)

    return averaging(train, num_gradients=steps)


def _cases(config: TheoryLater) -> dict[str, _Case]:
    N = config.num_clients
    equal, unlike, shifted = (
        _task(config, curvatures=curvatures, targets=targets)
        for curvatures, targets in ((False, False), (True, True), (False, True))
    )

    def noisy(eta: Any, E: int) -> tuple[Algorithm, int]:
        return _noisy(eta, E, config.sigma), N

    def with_noise(round: Any, problem: Problem, start: Any, eta: Any, E: int) -> Any:
        problem = dataclasses.replace(problem, C=N, E=E)
        return local_steps.equal_losses(round * E, problem, eta, start)

    def sampled(eta: Any, E: int, C: int) -> tuple[Algorithm, int]:
        return fedavg(eta, local_steps=E), C

    def with_drift(round: Any, problem: Problem, start: Any, eta: Any, C: int) -> Any:
        problem = dataclasses.replace(problem, C=C)
        return local_steps.unlike_losses(round, problem, eta, start)

    def served(outer: Any, beta: Any, kind: str) -> tuple[Algorithm, int]:
        server = optax.sgd(outer, momentum=beta, nesterov=kind == _KINDS[1])
        return fedavg(_INNER, local_steps=config.outer_steps, server_optimizer=server), N

    def with_server(round: Any, start: Any, outer: Any, beta: Any, kind: str) -> Any:
        factor, rate = _outer(config, shifted, round, outer, beta, kind)
        require("The outer optimizer", {"rate < 1": rate < 1}, rate=rate)
        return factor * start

    local: dict[str, Sequence[Any]] = {"eta": config.rates, "E": config.local_steps}
    cohorts, servers = {"C": config.cohorts}, _servers(config)
    return {
        "equal losses": _Case(equal, local, noisy, with_noise),
        "unlike losses": _Case(unlike, local | cohorts, sampled, with_drift),
        "outer optimizer": _Case(shifted, servers, served, with_server, power=1),
    }


def _servers(config: TheoryLater) -> dict[str, Sequence[Any]]:
    return {"outer": config.outer, "beta": config.momenta, "kind": _KINDS}


def _outer(
    config: TheoryLater, task: LeastSquares, round: Any, outer: float, beta: float, kind: str
) -> tuple[np.ndarray, float]:
    server: Any = {"outer": outer, "momentum": beta, "nesterov": kind == _KINDS[1]}
    hessians = np.asarray(task.hessian)[None]
    return local_steps.outer_optimizer(round, hessians, _INNER, config.outer_steps, **server)


def run(config: TheoryLater, execution: Execution | None = None) -> xr.Dataset:
    """Validates the bounds, over all points and rounds."""
    parts, how = [], execution or Execution()
    given: Any = config.model_dump(include={"num_rounds", "record_every", "num_seeds", "seed"})
    with jax.enable_x64(True):
        for name, case in _cases(config).items():
            with how.stage(name.replace(" ", "-")) as saving:
                parts.append(_validated(name, case, config, saving, given))
    verdicts = xr.DataArray([part.verdict for part in parts], {"theorem": [*_THEOREMS]})
    joined = xr.concat(parts, "point", combine_attrs="drop").assign(verdict=verdicts)
    return described(joined, parts)


def _validated(
    name: str, case: _Case, config: TheoryLater, saving: Execution, given: Any
) -> xr.Dataset:
    """Compares one bound with its runs, with all points in a row."""
    unlike = heterogeneity(case.task)
    about: Any = {"sigma": config.sigma, "zeta": float(unlike.zeta.value)}
    about["delta"] = float(unlike.delta.value)
    start = jnp.full(config.dim, 3 / config.dim**0.5)

    def build(**point: Any) -> Setup:
        algorithm, cohort = case.build(**point)
        cohorts = mfa_rand(config.num_clients, 1, cohort_size=cohort)
        return Setup(case.task, algorithm, cohorts, params=start)

    found = validate(
        *(case.bound, build, case.axes),
        measure=lambda runs: runs.distance.isel(model=0, drop=True) ** case.power,
        constants=lambda problem, runs: dataclasses.replace(problem, **about),
        execution=saving,
        data="synthetic",
        **given,
    )
    flat = found.stack(point=[*case.axes])
    each = [zip(case.axes, at, strict=True) for at in flat.point.values]
    words = [", ".join(itertools.starmap(label, pairs)) for pairs in each]
    place = {"bound_of": ("point", [name] * len(words)), "setting": ("point", words)}
    return flat.drop_vars(["point", *case.axes]).assign_coords(place)


def measure(result: xr.Dataset, config: TheoryLater) -> xr.Dataset:
    """Errors and bounds in the last round, the least ratio after round 0, and rates of servers."""
    names = ["measured", "standard_error", "bound"]
    found = dict(result[names].isel(round=-1, drop=True))
    ratio = result.ratio.isel(round=slice(1, None))
    found |= dict(result[["exponent", "exponent_low", "exponent_high", "bound_exponent"]])
    found |= {"least_ratio": ratio.min("round"), "last_ratio": ratio.isel(round=-1, drop=True)}
    found |= {"violated": result.violated.any("round"), "outside": result.outside}
    servers = {name: list(values) for name, values in _servers(config).items()}
    with jax.enable_x64(True):
        task = _task(config, curvatures=False, targets=True)
    rates = [_outer(config, task, 0, *point)[1] for point in itertools.product(*servers.values())]
    shape = tuple(map(len, servers.values()))
    found["rate"] = xr.DataArray(np.reshape(rates, shape), servers, [*servers])
    return xr.Dataset(found | {"verdict": result.verdict})


def judge(measured: xr.Dataset, config: TheoryLater) -> Iterator[Check]:
    """Checks that every bound holds, and finds how loose it is and what momentum gains."""
    for name in measured.theorem.values:
        here = measured.sel(point=measured.bound_of == name)
        proven = here.sel(point=here.outside == "")
        holds = bool(~proven.violated.any()) if proven.sizes["point"] else None
        text = f"{name}: the bound holds at all points where its hypotheses hold"
        yield check(text, holds, measured.verdict.sel(theorem=name).item())
        ratios = proven.last_ratio
        evidence = f"last ratios {ratios.min():.3g} to {ratios.max():.3g}"
        yield finding(
            f"{name}: the bound is at most {_LOOSE} times the error",
            (ratios <= _LOOSE).all(),
            evidence,
        )
    without = measured["rate"].sel(beta=min(config.momenta)).min()
    best = measured["rate"].stack(server=["outer", "beta", "kind"])
    best = best.isel(server=int(best.argmin("server")))
    at = ", ".join(label(name, best[name].item()) for name in ("outer", "beta", "kind"))
    evidence = f"rate {best:.4f} at {at}; {without:.4f} without"
    yield finding(
        "momentum of the server has the smallest rate on a quadratic", best < without, evidence
    )


def table(measured: xr.Dataset, config: TheoryLater) -> Sequence[Table]:
    """One table per bound, with one row per point, and the rates of servers."""
    found = []
    for name in measured.theorem.values:
        here = measured.sel(point=measured.bound_of == name).swap_dims(point="setting")
        contents = {
            "last error": cells(here.measured, here.standard_error, form=".3g"),
            "bound": cells(here.bound, form=".3g", missing="outside"),
            "least ratio": cells(here.least_ratio, form=".3g", missing="outside"),
            "exponent": cells(here.exponent, form=".2f", missing=""),
            "of the bound": cells(here.bound_exponent, form=".2f", missing=""),
        }
        found.append(rows(contents, ("setting",), name))
    return found


def figure(result: xr.Dataset, measured: xr.Dataset, config: TheoryLater) -> Figure:
    """Draws errors and bounds over rounds at a few points of each bound."""
    panels = []
    for name in measured.theorem.values:
        here = result.sel(point=(result.bound_of == name) & (result.outside == ""))
        places = np.unique(np.linspace(0, here.sizes["point"] - 1, 4).astype(int))
        # Name the axes in the title alone, because legends have little room.
        words = here.setting.isel(point=places)
        short = [re.sub(r"\w+ = ", "", text) for text in words.values]
        few = here.isel(point=places).assign_coords(setting=("point", short))
        few = few.swap_dims(point="setting")
        axes = ", ".join(re.findall(r"(\w+) =", words.values[0]))
        drawn = plots.lines(few.measured.transpose("setting", "round"), style="-")
        drawn += [
            line._replace(label="", style="--", color=number)
            for number, line in enumerate(plots.lines(few.bound.transpose("setting", "round")))
        ]
        error = "|w - w*|" if name == "outer optimizer" else "E|w - w*|$^2$"
        panels.append(plots.Panel(f"{name}: {axes}", "round", error, drawn, scale="log"))
    caption = f"Means of {config.num_seeds} seeds (lines) and bounds (dashed)."
    return plots.draw([panels], title="Bounds on local training", caption=caption)


ITEMS = (Item("theory-later", TheoryLater(), run, measure, judge, table, figure),)
"""Bounds of our own on local training."""
