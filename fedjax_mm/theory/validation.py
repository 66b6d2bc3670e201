"""Bounds against measured means: violations, slack and the rates of both."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import xarray as xr

from fedjax_mm.checks.annotations import checked
from fedjax_mm.metrics import estimate
from fedjax_mm.results.labels import label
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Grid, Setup
from fedjax_mm.sweeps.sweep import sweep
from fedjax_mm.theory.constants import SolvedTask, exact_constants, is_quadratic
from fedjax_mm.theory.problem import HypothesisError, Problem
from fedjax_mm.theory.rates import fit_rate, fitted_exponent

ROUND_OFF = 1e-6
"""Rounding error of float32 distances, relative to the bound."""

BoundFn: TypeAlias = Callable[..., Any]
"""A bound, whose parameters name what it depends on; see `validate`."""


@checked
def validate(
    bound: BoundFn,
    build: Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]],
    *,
    measure: str | Callable[[xr.Dataset], xr.DataArray] = "distance",
    constants: Callable[[Problem, xr.Dataset], Problem] | None = None,
    errors: float = 4.0,
    execution: Execution | None = None,
    **settings: Any,
) -> xr.Dataset:
    """Sweeps runs, and compares the mean over seeds of a measured quantity with a bound on it.

    Args:
      bound: called once for each point. Its parameters are any of the axes; ``round``, the recorded
        numbers of completed rounds; ``problem``, a `Problem`; and ``start``, the mean at the first
        record. Others need defaults. It returns a number, or one for each round. Its hypotheses
        are named by `require`: points outside are not judged.
      build: returns the `Setup` of a point, as in `sweep`.
      axes: names and values of the points.
      measure: a metric, or a function of the sweep's result that returns the quantity over
        ``(*axes, "seed", ...)``.
      constants: changes the problem of a point, given the problem and the point's runs, for example
        to measure G. Otherwise the problem has N, M and E; mu, L and Gamma if `exact_constants`
        has them; and the gap, if the excess loss is recorded.
      errors: the number of standard errors by which a mean must exceed the bound to violate it. At
        4, one of 30,000 normal means does by chance where the bound is tight.
      execution: as in `sweep`.
      **settings: settings of `Grid`, such as `num_rounds` and `num_seeds`, at least 3.

    Returns:
      A Dataset over the axes, and over rounds and models if they are measured: `measured`,
      `standard_error`, `bound`, `ratio` of bound and mean, `away`, the number of standard errors by
      which the mean is below the bound, `violated`, and `seeds`, how many would show a violation;
      over the axes, `outside` has the violated hypothesis or "", and with rounds `exponent` with
      `exponent_low` and `exponent_high`, and `bound_exponent`, where curves fall as
      ``round^-exponent`` in the second half. The attribute `verdict` is a sentence with the
      tightest point, whose coordinates are the attribute `tightest`.

    Raises:
      ValueError: if `bound` has a parameter that is none of these, or as in `sweep`.

    Example: a gradient step contracts distances by 1 - eta mu, if eta is at most 1/L.
      >>> from fedjax_mm import fedavg, full_participation
      >>> from fedjax_mm.tasks import quadratic
      >>> from fedjax_mm.theory.problem import require
      >>> def build(eta):
      ...     task, algorithm = quadratic(4, 2, mu=0.1), fedavg(eta, local_steps=1)
      ...     return Setup(task, algorithm, full_participation(4))
      >>> def bound(round, problem, start, eta):
      ...     require("the bound", {"eta <= 1/L": eta <= 1 / problem.L}, eta=eta, L=problem.L)
      ...     return (1 - eta * problem.mu) ** round * start
      >>> found = validate(bound, build, {"eta": [0.2, 0.4]}, num_rounds=20, num_seeds=3)
      >>> bool(found.violated.any()), found.outside.values.tolist()
      (False, ['', 'the bound needs eta <= 1/L; given eta = 0.4, L = 3.34698'])
    """
    names = _parameters(bound, axes)
    grid = Grid(build, axes, **settings)
    if grid.num_seeds < 3:
        raise ValueError(f"num_seeds is {grid.num_seeds}; a standard error takes 3 or more")
    result = sweep(grid, execution)
    samples = result[measure] if isinstance(measure, str) else measure(result)
    over = {"round": result["round"].values} if "round" in samples.dims else {}
    shape = tuple(map(len, axes.values()))
    bounds, outside = (
        np.full((*shape, *map(len, over.values())), np.nan),
        np.full(shape, "", object),
    )
    for at in np.ndindex(shape):
        place = dict(zip(axes, at, strict=True))
        point = {name: axes[name][i] for name, i in place.items()}
        runs, setup = result.isel(place), build(**point)
        given: dict[str, Any] = point | {"round": result["round"].values}
        first = samples.isel(place)
        given["start"] = float(first.isel(round=0).mean() if over else first.mean())
        if "problem" in names:
            problem = _problem(setup, runs)
            given["problem"] = problem if constants is None else constants(problem, runs)
        try:
            bounds[at] = bound(**{name: given[name] for name in names})
        except HypothesisError as error:
            outside[at] = str(error)
    proven = xr.DataArray(bounds, {name: samples[name] for name in axes} | over, (*axes, *over))
    found = against(samples, proven, errors=errors)
    found["outside"] = tuple(axes), outside.astype(str)
    if over:
        found = found.assign(_both_exponents(samples, proven))
    return _with_verdict(found.assign_attrs(result.attrs), errors)


def _parameters(bound: BoundFn, axes: Mapping[str, Any]) -> list[str]:
    names = []
    for name, parameter in inspect.signature(bound).parameters.items():
        if name in ("round", "problem", "start", *axes):
            names.append(name)
        elif parameter.default is parameter.empty:
            raise ValueError(
                f"bound has a parameter {name}; name round, problem, start or axes: "
                f"{', '.join(axes)}"
            )
    return names


def _problem(setup: Setup, runs: xr.Dataset) -> Problem:
    """The constants of a point that its setup and its runs have."""
    task: Any = setup.tasks[0] if isinstance(setup.tasks, Sequence) else setup.tasks
    assignment = setup.assignment
    known: dict[str, Any] = {"N": assignment.num_clients, "M": assignment.num_models}
    known["E"] = _local_steps(setup.algorithm)
    if isinstance(task, SolvedTask) or is_quadratic(task):
        exact = exact_constants(task)
        known |= {name: float(getattr(exact, name).value) for name in ("mu", "L", "Gamma")}
    if "excess_loss" in runs:
        known["gap"] = max(float(runs.excess_loss.isel(round=0).mean()), 0.0)
    return Problem(**{name: value for name, value in known.items() if value is not None})


def _local_steps(algorithm: Any) -> int | None:
    """E, if the method's call has it."""
    call = getattr(algorithm, "call", None)
    given = call.arguments if call else {}
    steps = given.get("local_steps") or getattr(given.get("local"), "steps", None)
    return steps if isinstance(steps, int) else None


def over(bound: Callable[..., Any], symbols: Mapping[str, Any], *, each: bool = False) -> Any:
    """Evaluates a bound over the dimensions of labelled symbols.

    Args:
      bound: a function of some of the symbols, and of `problem`, a `Problem` with the others.
      symbols: numbers or DataArrays by name, which broadcast.
      each: whether the function takes one number of each symbol rather than arrays.

    Example:
      >>> from fedjax_mm.theory import Rate, mfa
      >>> symbols = {"M": xr.DataArray([1, 4], dims="M"), "E": 2, "mu": 1.0, "L": 2.0, "G": 4.0}
      >>> def bound(problem, t):
      ...     return mfa.corollary_1(t, problem, Rate(2.0, 4.0), Delta_1=5.0)
      >>> over(bound, symbols | {"t": 25}).round(4).values.tolist()
      [2.2069, 12.0976]
    """
    own = inspect.signature(bound).parameters

    def values(*numbers: Any) -> Any:
        given = dict(zip(symbols, numbers, strict=True))
        problem = Problem(**{name: given.pop(name) for name in symbols if name not in own})
        return bound(problem=problem, **given)

    return xr.apply_ufunc(values, *symbols.values(), vectorize=each)


def against(
    samples: xr.DataArray,
    bound: xr.DataArray,
    *,
    worst: xr.DataArray | None = None,
    errors: float = 4.0,
) -> xr.Dataset:
    """Compares the means of samples over seeds with a bound on their expectation.

    Args:
      samples: ``(..., "seed")``.
      bound: over some or all of the other dimensions; NaN where nothing is proven.
      worst: the means whose ratio is taken, such as those of the worst model; None takes the means
        of the samples.
      errors: the number of standard errors of a violation.

    Returns:
      `measured`, `standard_error`, `bound`, `ratio`, `away`, `violated` and `seeds` of `validate`.

    Example:
      >>> samples = xr.DataArray([[0.9, 1.1, 1.0], [1.9, 2.1, 2.0]], dims=("eta", "seed"))
      >>> found = against(samples, xr.DataArray([1.2, 1.5], dims="eta"))
      >>> found.away.values.round(2).tolist(), found.violated.values.tolist()
      ([3.46, -8.66], [False, True])
    """
    mean, error = estimate(samples)
    # Equal seeds have no standard error, so that rounding would decide.
    slack = bound - mean + ROUND_OFF * abs(bound)
    away = slack / error.clip(min=1e-300)
    violated = away < -errors
    needed = xr.apply_ufunc(np.ceil, samples.sizes["seed"] * (errors / away) ** 2)
    seeds = needed.clip(min=3).where(violated)
    return xr.Dataset(
        {
            "measured": mean,
            "standard_error": error,
            "bound": bound,
            "ratio": bound / (mean if worst is None else worst),
            "away": away,
            "violated": violated,
            "seeds": seeds,
        }
    )


def tightest(room: xr.DataArray, along: str) -> xr.DataArray:
    """The samples at the point where the mean is the fewest standard errors above 0.

    A bound that holds at this point holds everywhere, and a bound that is violated anywhere is
    violated here.

    Args:
      room: the bound minus the measured value over ``(..., along, "seed")``, relative to the
        bound, so that `ROUND_OFF` is its margin.
      along: the dimension to search, such as "round".

    Example:
      >>> room = xr.DataArray([[5, 7, 6], [1, 9, 5]], {"round": [0, 1]}, ("round", "seed"))
      >>> tightest(room, "round").values.tolist()
      [1, 9, 5]
    """
    mean, error = estimate(room)
    least = (mean + ROUND_OFF) / error.clip(min=1e-300)
    at = least.fillna(np.inf).argmin(along)  # points without a value are never the tightest
    return room.isel({along: at}).drop_vars(along)


def exponents(runs: xr.DataArray, time: xr.DataArray, gamma: Any = 0.0) -> dict[str, xr.DataArray]:
    """The exponent q and its interval, where errors fall as (time + gamma)^-q."""

    def fit(runs: np.ndarray, time: np.ndarray, gamma: float) -> tuple[float, ...]:
        rate = fit_rate(time, runs, gamma)
        return rate.exponent, *rate.interval

    how: Any = {"input_core_dims": [["seed", "round"], ["round"], []], "keep_attrs": False}
    how |= {"output_core_dims": [()] * 3, "vectorize": True}
    found = xr.apply_ufunc(fit, runs, time, gamma, **how)
    return dict(zip(("exponent", "exponent_low", "exponent_high"), found, strict=True))


def _both_exponents(samples: xr.DataArray, bound: xr.DataArray) -> dict[str, xr.DataArray]:
    """Exponents in the number of rounds, over the second half, of the mean over models."""
    others = [dim for dim in samples.dims if dim not in (*bound.dims, "seed")]
    curves, late = samples.mean(others), bound["round"][bound.sizes["round"] // 2 :]
    if len(late) < 2 or late[0] <= 0 or not bool((curves.sel(round=late).mean("seed") > 0).all()):
        return {}
    fitted = exponents(curves.sel(round=late), late.astype(float).rename(None))
    how: Any = {"input_core_dims": [["round"]] * 2, "vectorize": True}
    proven = xr.apply_ufunc(fitted_exponent, late.astype(float), bound.sel(round=late), **how)
    return fitted | {"bound_exponent": proven}


def _with_verdict(found: xr.Dataset, errors: float) -> xr.Dataset:
    """Adds the tightest point and a sentence."""
    judged, violated = int(found.away.notnull().sum()), int(found.violated.sum())
    if judged == 0:
        words = f"nothing is judged: {found.outside.values.flat[0] or 'the bound is NaN'}"
        return found.assign_attrs(verdict=words, tightest={})
    at = {name: int(i) for name, i in found.away.fillna(np.inf).argmin(...).items()}
    point = found.isel(at)
    place = {name: point[name].item() if name in point.coords else at[name] for name in at}
    where = ", ".join(label(name, value) for name, value in place.items())
    ratio = f"bound / measured {point.ratio.item():.4g}"
    if violated:
        words = (
            f"violated at {violated:,} of {judged:,} numbers, most clearly at {where}: {ratio}, "
        )
        words += f"{-point.away.item():.3g} standard errors above the bound; "
        words += f"{int(found.seeds.min())} seeds show it at {errors:g} standard errors"
    else:
        words = f"not violated at {judged:,} numbers; tightest at {where}: {ratio}"
    if outside := int((found.outside != "").sum()):
        words += f"; {outside} of {found.outside.size} points are outside of the hypotheses"
    return found.assign_attrs(verdict=words, tightest=place)
