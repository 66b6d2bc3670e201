"""Theorem 1 and Corollary 1: error bounds and measured errors on the quadratic."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import PRNGKeyArray
from matplotlib.figure import Figure
from pydantic import model_validator

from fedjax_mm import plots
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignments.partitions import mfa_rand, mfa_rr
from fedjax_mm.base import Assignment, Metrics
from fedjax_mm.claims import Evidence, at_least, fact
from fedjax_mm.experiments.fields import Count, Positive, Recorded, Seed, TwoOrMore
from fedjax_mm.experiments.point import Precision
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import Ruling, check, finding, ruling, untested
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.training import train
from fedjax_mm.papers.values import Several
from fedjax_mm.results.labels import describe, places
from fedjax_mm.schedules import inverse_time, per_frame
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.quadratic import Quadratic, Vector, largest_curvature, quadratic
from fedjax_mm.theory import mfa
from fedjax_mm.theory.constants import exact_constants
from fedjax_mm.theory.problem import Problem, Rate
from fedjax_mm.theory.rates import MFA_RAND_EXPONENT, MFA_RR_EXPONENT
from fedjax_mm.theory.validation import ROUND_OFF, against, exponents, over, tightest

FROZEN = 200_000  # a frozen model must violate a bound within this many rounds


class _Statement(NamedTuple):
    """A method and the theorem that bounds its error.

    Attributes:
      theorem: the theorem's name.
      bound: maps t, the problem, the rate and a power of |w_1 - w*| to a bound on E|w_t - w*|.
      power: the power of |w_1 - w*| in the bound.
      assignment: makes the method's assignment from N and M.
      largest_rate: the largest initial rate that the theorem allows, times L.
      time: the time unit of the rate and the bound, rounds "t" or frames "t/M".
      exponent: the exponent with which the bound decays.
      server_scale: the scale of FedAvg's server update.
      proof: a note for checks of a theorem that is proven only for another server update.
    """

    theorem: str
    bound: Callable[[Any, Problem, Rate, Any], np.ndarray]
    power: int
    assignment: Callable[[int, int], Assignment]
    largest_rate: float
    time: Literal["t", "t/M"]
    exponent: float
    server_scale: Literal["mean", "1/N"] = "mean"
    proof: str = ""

    def rate(self, smoothness: Any, mu: Any, config: "Bounds") -> tuple[Any, Any]:
        """The beta and gamma of the learning rate beta / (t + gamma)."""
        beta = config.contraction / mu
        return beta, beta * smoothness / (config.rate * self.largest_rate)


Method = Literal["MFA-Rand", "MFA-RR, 1/N", "MFA-RR, mean"]
_ELSEWHERE = " (proven for the factor 1/N only)"
_MFA_RAND = _Statement("Theorem 1", mfa.theorem_1, 2, mfa_rand, 0.25, "t", MFA_RAND_EXPONENT)
_MFA_RR = _Statement("Corollary 1", mfa.corollary_1, 1, mfa_rr, 1.0, "t/M", MFA_RR_EXPONENT, "1/N")
_METHODS: Mapping[Method, _Statement] = {
    "MFA-Rand": _MFA_RAND,
    "MFA-RR, 1/N": _MFA_RR,
    "MFA-RR, mean": _MFA_RR._replace(server_scale="mean", proof=_ELSEWHERE),
}
"""Methods with an error bound. Corollary 1 is proven for the factor 1/N of eq. (19)."""


class Bounds(Recorded):
    """Settings of the bounds on the quadratic, starting from zeros with an admissible schedule."""

    algorithms: Several[Method]
    num_clients: TwoOrMore = 24
    block_size: Count = 4
    mu: Several[Positive] = (2e-4, 0.05)
    num_models: Several[Count] = (1, 2, 4, 12)
    local_steps: Several[Count] = (1, 5)
    rate: Positive = 1.0
    """The initial rate as a fraction of the largest one that the theorem allows."""
    contraction: Positive = 2.0
    """The product beta mu, greater than 1."""
    num_rounds: Count = 2000
    num_seeds: TwoOrMore = 200
    seed: Seed = 0
    record_every: Count = 10
    precision: Precision = "float64"

    @model_validator(mode="after")
    def _theorems_apply(self) -> Self:
        for num_models in self.num_models:
            mfa_rand(self.num_clients, num_models)  # raises if there are more models than clients
        for method, mu in ((method, mu) for method in self.algorithms for mu in self.mu):
            known = self.constants(method).sel(mu=mu).assign_coords(M=1, E=1)
            _bound(1, known.assign(Gamma=0.0, G=1.0, distance=1.0))
        return self

    def constants(self, method: Method) -> xr.Dataset:
        """The constants N, L, beta and gamma of the theorem's hypotheses, for every mu."""
        # Use NumPy, because settings are validated before JAX may initialize its devices.
        mu = xr.DataArray(list(self.mu), {"mu": list(self.mu)})
        smoothness = mu + largest_curvature(self.num_clients, self.block_size)
        beta, gamma = _METHODS[method].rate(smoothness, mu, self)
        known = {"N": self.num_clients, "L": smoothness, "beta": beta, "gamma": gamma}
        return xr.Dataset(known, {"algorithm": method})


def _bound(t: Any, symbols: xr.Dataset) -> Any:
    """Evaluates a method's bound on E|w_t - w*|, over the dimensions of t and of the symbols."""
    statement = _METHODS[symbols.algorithm.item()]

    def bound(t: Any, problem: Problem, beta: Any, gamma: Any, distance: Any) -> np.ndarray:
        return statement.bound(t, problem, Rate(beta, gamma), distance**statement.power)

    names = ("beta", "gamma", "distance", "N", "M", "E", "mu", "L", "Gamma", "G")
    return over(bound, {"t": t, "sigma": 0.0} | {name: symbols[name] for name in names})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Probed(Quadratic):
    """The quadratic, which also records G, the largest norm of a client's gradient at the model."""

    def metrics(self, rng_key: PRNGKeyArray, params: Vector) -> Metrics:
        """Adds the largest gradient norm to the quadratic's metrics."""
        # On convex losses with rates up to 2/L, gradients shrink along local steps and along the
        # proof's virtual sequence, so the maximum is attained where a recorded round starts.
        clients = jnp.arange(self.num_clients)
        gradients = jax.vmap(jax.grad(self.loss), (None, 0))(params, clients)
        largest = jnp.linalg.norm(gradients, axis=1).max()
        return super().metrics(rng_key, params) | {"gradient": largest}


_CASE = ("algorithm", "mu", "num_models", "local_steps")
NAMES = {"num_models": "M", "local_steps": "E"}
_MU = r"$\mu$"


def run_bounds(config: Bounds, execution: Execution | None = None) -> xr.Dataset:
    """Measured errors and the bounds, over ``(*_CASE, "round")``."""

    def build(algorithm: Method, mu: Any, num_models: int, local_steps: int) -> Setup:
        statement = _METHODS[algorithm]
        task = _Probed(**vars(quadratic(config.num_clients, config.block_size, mu=mu)))
        schedule = inverse_time(*statement.rate(task.smoothness, task.mu, config))
        schedule = per_frame(schedule, num_models) if statement.time == "t/M" else schedule
        training = fedavg(schedule, local_steps=local_steps, server_scale=statement.server_scale)
        return Setup(task, training, statement.assignment(config.num_clients, num_models))

    axes = {"algorithm": config.algorithms} | {name: getattr(config, name) for name in _CASE[1:]}
    with jax.enable_x64(config.precision == "float64"):
        result = train([], build, axes, config, execution, on_divergence="stop")
    largest = {"G": result.gradient.max(("seed", "round", "model"))}
    dataset = distances(result).assign(largest).transpose(*_CASE, ...)
    t = dataset["round"] + 1  # round t produces w_{t+1}
    bounds = [_bound(t, each).transpose(..., "round") for each in symbols(dataset, config)]
    return dataset.assign(bound=((*_CASE, "round"), np.stack(bounds)))


def distances(result: xr.Dataset) -> xr.Dataset:
    """The distance to w*, as a mean over the models, and the largest one of a model."""
    words = "distance |w_t - w*|, mean over models"
    found = {
        "distance": result.distance.mean("model").assign_attrs(long_name=words),
        "largest": result.distance.mean("seed").max("model"),
    }
    return xr.Dataset(found, attrs=result.attrs)


def symbols(dataset: xr.Dataset, config: Bounds) -> list[xr.Dataset]:
    """The constants of each method's bound, over mu, M and E."""
    dataset = dataset.rename(NAMES).drop_attrs()
    with jax.enable_x64(True):
        tasks = [quadratic(config.num_clients, config.block_size, mu=mu) for mu in config.mu]
        Gamma = "mu", [float(exact_constants(task).Gamma.value) for task in tasks]
    start = dataset.distance.isel(round=0, drop=True).mean("seed")
    found = dataset[["G"]].assign(distance=start, Gamma=Gamma)
    return [config.constants(name).assign(found.sel(algorithm=name)) for name in config.algorithms]


def _of_method(symbols: xr.Dataset, runs: xr.DataArray) -> xr.Dataset:
    """A method's constants, exponents, and rounds at which frozen models break bounds."""
    statement = _METHODS[symbols.algorithm.item()]
    frame = symbols.M if statement.time == "t/M" else 1
    t = xr.DataArray(np.arange(1, FROZEN + 2), dims="t")
    numbers = {
        **exponents(runs, (runs["round"] + 1) / frame, symbols.gamma),
        "predicted_exponent": statement.exponent,
        "first_bound": _bound(1, symbols),
        "frozen_found_in_round": (t - 1).where(_bound(t, symbols) < symbols.distance).min("t"),
    }
    return symbols.assign(numbers).broadcast_like(symbols.G)


def measure(result: xr.Dataset, config: Bounds) -> xr.Dataset:
    """The constants, the errors and bounds at some of the records, and the exponents."""
    each, result = symbols(result, config), result.rename(NAMES)
    numbers = [_of_method(known, result.distance.sel(algorithm=known.algorithm)) for known in each]
    return against_bound(result).assign(xr.concat(numbers, "algorithm", data_vars="all"))


def against_bound(result: xr.Dataset) -> xr.Dataset:
    """Errors and bounds at some of the records, and their ratios over all records."""
    found = against(result.distance, result.bound, worst=result.largest).rename(measured="error")
    ratio = found.ratio
    # Space the records more widely as training progresses.
    few = np.geomspace(1, result.sizes["round"] - 1, 11).round().astype(int)
    return (
        found[["error", "standard_error", "bound", "ratio"]]
        .isel(round=sorted({0, *few.tolist()}))
        .assign(
            least_ratio=ratio.min("round", skipna=False),
            largest_ratio=ratio.max("round", skipna=False),
            room=tightest(1 - result.distance / result.bound, "round"),
        )
    )


def rounds_to_bound(share: float, measured: xr.Dataset, exponent: float, frame: Any) -> Any:
    """The round t at which a bound falls to a fraction of the initial distance.

    Args:
      share: the fraction of the initial distance.
      measured: contains gamma, the initial distance, and first_bound, the bound at t = 1.
      exponent: the bound is proportional to ``(t / frame + gamma)^-exponent``.
      frame: the number of rounds per unit of the bound's time.
    """
    fall = (measured.first_bound / (share * measured.distance)) ** (1 / exponent)
    return frame * (fall * (1 / frame + measured.gamma) - measured.gamma)


def needs_more_rounds(measured: xr.Dataset, exponent: float, frame: Any) -> Ruling:
    """Rules on "increasing M increases T(epsilon)", for epsilon at half the initial distance."""
    key, rounds = "more-models-more-rounds", rounds_to_bound(0.5, measured, exponent, frame)
    if rounds.sizes["M"] < 2:
        return untested(key, "the run has only one number of models")
    order = rounds.transpose(..., "M")
    grows = (order.diff("M") >= -ROUND_OFF * order.isel(M=slice(1, None))).all().item()
    few, many = order.isel(M=[0]), order.isel(M=[-1])
    evidence = "rounds until the bound is half of the first distance: "
    evidence += "; ".join(
        f"M = {each.M.item()}: {each.min():,.0f} to {each.max():,.0f}" for each in (few, many)
    )
    return ruling(key, fact(grows, evidence))


def judge(measured: xr.Dataset, config: Bounds) -> Iterator[Ruling | Check]:
    """Checks that bounds hold, and frozen models break bounds.

    The function rules on no statement, because each theorem has its own item.
    """
    for name in config.algorithms:
        yield _check_bound(name, measured)
        yield from _check_frozen(name, measured)


def judge_theorem(
    key: str, method: Method, measured: xr.Dataset, config: Bounds
) -> Iterator[Ruling | Check]:
    """Rules on whether the method's bound holds, and yields the remaining checks of `judge`."""
    if method in config.algorithms:
        least = measured.least_ratio.sel(algorithm=method).min()
        about = _range(method, measured)
        yield ruling(key, _holds(method, measured), about=about, looseness=least)
    else:
        yield untested(key, f"{method} was not run")
    for name in config.algorithms:
        if name != method:
            yield _check_bound(name, measured)
        yield from _check_frozen(name, measured)


def judge_theorem_1(measured: xr.Dataset, config: Bounds) -> Iterator[Ruling | Check]:
    """Rules on Theorem 1 and on its claims about M."""
    yield from judge_theorem("theorem-1", "MFA-Rand", measured, config)
    if "MFA-Rand" in config.algorithms:
        here = measured.sel(algorithm="MFA-Rand", drop=True)
        yield needs_more_rounds(here, MFA_RAND_EXPONENT, 1)
    else:
        yield untested("more-models-more-rounds", "MFA-Rand was not run")


def _check_bound(method: Method, measured: xr.Dataset) -> Check:
    bound = f"{method}: {_METHODS[method].theorem}'s bound holds at every recorded round"
    tests = _holds(method, measured)
    # A bound that is proven for another server may fail without a defect.
    judged = finding if _METHODS[method].proof else check
    return judged(bound + _METHODS[method].proof, tests, _range(method, measured))


def _holds(method: Method, measured: xr.Dataset) -> list[Evidence]:
    """Tests that 1 - error / bound is nonnegative where a violation is most likely."""
    room = measured.room.sel(algorithm=method, drop=True)
    return at_least(room, -ROUND_OFF, form=".3g")


def _range(method: Method, measured: xr.Dataset) -> str:
    here = measured.sel(algorithm=method)
    least, most = here.least_ratio.min(("mu", "M")), here.largest_ratio.max(("mu", "M"))
    ratios = f"at least {describe(least, form='.3g')}; at most {describe(most, form='.3g')}"
    return f"1 - error / bound at the tightest round; bound / error {ratios}"


def _check_frozen(method: Method, measured: xr.Dataset) -> Iterator[Check]:
    theorem, here = _METHODS[method].theorem, measured.sel(algorithm=method)
    if 1 in here.E.values:
        # Check that a model that never moves fails, because otherwise the check is vacuous.
        frozen = here.frozen_found_in_round.sel(E=1, mu=here.mu.max())
        evidence = f"in the round {describe(frozen, form=',.0f', missing='never')}"
        text = f"{method}: a model frozen at its start would violate {theorem} within"
        text += f" {FROZEN:,} rounds (E = 1, mu = {frozen.mu:g})"
        yield check(text, frozen <= FROZEN, evidence)


_CONSTANTS = ("L", "Gamma", "G", "beta", "gamma", "distance")
_FEW = 6  # print the curves of at most this many cases


def _slopes(measured: xr.Dataset) -> Table:
    """The exponents of the errors, about which an upper bound says nothing."""
    low, high = (cells(measured[f"exponent_{end}"]) for end in ("low", "high"))
    text = cells(measured.exponent) + " (" + low + " to " + high + ")"
    title = "Exponents q of the errors in the later half, (t + gamma)^-q or (t/M + gamma)^-q"
    contents = columns(text, "M") | {"of the bound": cells(measured.predicted_exponent, form="g")}
    if "M" in contents["of the bound"].dims:
        contents["of the bound"] = contents["of the bound"].isel(M=0, drop=True)
    return rows(contents, ("algorithm", "mu", "E"), title)


def table(measured: xr.Dataset, config: Bounds) -> Sequence[Table]:
    """The final errors and bounds, the constants, and, for few cases, the curves."""
    at, last = ("algorithm", "mu", "M", "E"), measured.isel(round=-1)
    main = {
        "error at the end": cells(last.error, last.standard_error, form=".3g"),
        "bound": cells(last.bound, form=".3g"),
        "bound / error": ratios(measured),
        "exponent": cells(measured.exponent, published=measured.predicted_exponent),
    }
    first = measured.isel(M=0, E=0).assign(G=measured.G.max(("M", "E")))
    constants = {name: cells(first[name], form=".5g") for name in _CONSTANTS}
    title = "Constants: mu, L and Gamma are exact, G is the largest gradient at recorded models"
    found = [_slopes(measured), rows(main, at), rows(constants, at[:2], title)]
    curves = {
        "error": cells(measured.error, measured.standard_error, form=".4g"),
        "bound": cells(measured.bound, form=".4g"),
        "bound / error": cells(measured.ratio, form=".3g"),
        "": xr.where(measured.ratio >= 1 - ROUND_OFF, "holds", "DOES NOT HOLD"),
    }
    for case, words in places(measured, *at) if measured.G.size <= _FEW else ():
        here = {name: text.sel(case) for name, text in curves.items()}
        found.append(rows(here, ("round",), ", ".join(words)))
    return found


def ratios(measured: xr.Dataset, missing: str = "not reached") -> xr.DataArray:
    """Formats the least and the largest ratio of bounds and errors."""
    each = (measured[f"{end}_ratio"] for end in ("least", "largest"))
    least, largest = (cells(ratio, form=".3g", missing=missing) for ratio in each)
    return least + " to " + largest


def figure(result: xr.Dataset, measured: xr.Dataset, config: Bounds) -> Figure:
    """Draws how many times as large as the largest error the bound is, with one line per M."""
    return plots.draw(
        [ratio_panels(measured.ratio.rename(mu=_MU), "M", "algorithm", _MU, "E")],
        title=f"Errors and their bounds, quadratic, N = {config.num_clients}, "
        f"{config.num_seeds} seeds",
        caption="The bound divided by the largest error of a model, averaged over seeds; above 1 "
        "the bound holds. In the bound mu, L and Gamma are exact, and G is measured. The start is "
        "round 1.",
    )


def ratio_panels(ratio: xr.DataArray, line: str, *over: str) -> list[plots.Panel]:
    """A panel for each combination of the last dimensions, with the start as round 1."""
    ratio, panels = ratio.assign_coords(round=ratio["round"] + 1), []
    for at, words in places(ratio, *over):
        drawn = plots.lines(ratio.sel(at).transpose(line, "round"))
        # Draw ratios, because curves of a bound and its error lie too far apart.
        labels = ", ".join(words), "round $t$", "bound / measured error"
        panels.append(plots.Panel(*labels, drawn, scale="log", xscale="log"))
    return panels


def _item(id: str, settings: Bounds, rule: Callable[..., Iterator[Ruling | Check]] = judge) -> Item:
    return Item(id, settings, run_bounds, measure, rule, table, figure)


_corollary_1 = partial(judge_theorem, "corollary-1", "MFA-RR, 1/N")

_RAND = Bounds(algorithms=("MFA-Rand",))
_RR = Bounds(algorithms=("MFA-RR, 1/N", "MFA-RR, mean"))
_BOTH = Bounds(algorithms=tuple(_METHODS), mu=(0.05,), num_models=(12,), local_steps=(5,))

ITEMS = (
    _item("theory-mfa-rand", _RAND, judge_theorem_1),
    _item("theory-mfa-rr", _RR, _corollary_1),
    _item("bounds-mfa", _BOTH),
)
"""Theorem 1, Corollary 1, and the item shown by `fedjax-mm bounds mfa`."""
