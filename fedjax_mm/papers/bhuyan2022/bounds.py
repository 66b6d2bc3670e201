"""Theorem 1 and Corollary 1: bounds beside measured errors on the quadratic."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignment import mfa_rand, mfa_rr
from fedjax_mm.base import Assignment
from fedjax_mm.experiments.experiment import Precision
from fedjax_mm.experiments.fields import Config, Count, Positive, Seed
from fedjax_mm.papers.claims import Claim, claim, estimate
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.tables import Table, cells, rows
from fedjax_mm.results import plots
from fedjax_mm.results.labels import describe, label, places
from fedjax_mm.schedules import Schedule, inverse_time, per_frame
from fedjax_mm.sweeps.execute import Execution, sweep
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.quadratic import Quadratic, largest_curvature, quadratic
from fedjax_mm.theory import mfa
from fedjax_mm.theory.constants import exact_constants
from fedjax_mm.theory.problem import Problem, Rate
from fedjax_mm.theory.rates import MFA_RAND_EXPONENT, MFA_RR_EXPONENT, fit_rate

_ROUND_OFF = 1e-6  # of distances in float32
_FROZEN = 200_000  # rounds within which a frozen model must violate a bound


class _Statement(NamedTuple):
    """A method, and the theorem about it.

    Attributes:
      theorem: its name.
      bound: on E|w_t - w*|, from t and the constants.
      assignment: the factory of the method's assignment, from N and M.
      server_scale: of FedAvg's server.
      is_proven: whether the theorem is about this server.
      largest_rate: the largest rate that the theorem admits at the start, times L.
      counts_frames: whether the rate and the bound depend on frames, not on rounds.
      exponent: of the bound.
    """

    theorem: str
    bound: Callable[..., np.ndarray]
    assignment: Callable[[int, int], Assignment]
    server_scale: Literal["mean", "1/N"]
    is_proven: bool
    largest_rate: float
    counts_frames: bool
    exponent: float

    def rate(self, smoothness: Any, mu: Any, config: "Bounds") -> tuple[Any, Any]:
        """Returns beta and gamma of the learning rate beta / (t + gamma)."""
        beta = config.contraction / mu
        return beta, beta * smoothness / (config.rate * self.largest_rate)

    def schedule(self, task: Quadratic, num_models: int, config: "Bounds") -> Schedule:
        """Returns the learning rate with M models."""
        schedule = inverse_time(*self.rate(task.smoothness, task.mu, config))
        return per_frame(schedule, num_models) if self.counts_frames else schedule


def _theorem_1(t: Any, *, distance: Any, beta: Any, gamma: Any, **constants: Any) -> np.ndarray:
    problem = Problem(sigma=0.0, **constants)
    return mfa.theorem_1(t, problem, Rate(beta, gamma), D=distance**2)


def _corollary_1(t: Any, *, distance: Any, beta: Any, gamma: Any, **constants: Any) -> np.ndarray:
    return mfa.corollary_1(t, Problem(**constants), Rate(beta, gamma), Delta_1=distance)


Method = Literal["MFA-Rand", "MFA-RR, 1/N", "MFA-RR, mean"]
_RR: Any = {"bound": _corollary_1, "assignment": mfa_rr, "largest_rate": 1.0}
_RR |= {"theorem": "Corollary 1", "counts_frames": True, "exponent": MFA_RR_EXPONENT}
_METHODS: Mapping[Method, _Statement] = {
    "MFA-Rand": _Statement(
        *("Theorem 1", _theorem_1, mfa_rand, "mean", True, 0.25, False, MFA_RAND_EXPONENT)
    ),
    "MFA-RR, 1/N": _Statement(server_scale="1/N", is_proven=True, **_RR),
    "MFA-RR, mean": _Statement(server_scale="mean", is_proven=False, **_RR),
}
"""Methods with a bound. Corollary 1 is proven for the factor 1/N of eq. (19)."""


class Bounds(Config):
    """Settings of bounds on the quadratic from zeros, with schedules that the theorems admit."""

    algorithms: Annotated[tuple[Method, ...], Field(min_length=1)]
    num_clients: Annotated[Count, Field(ge=2)] = 24
    block_size: Count = 4
    mu: Annotated[tuple[Positive, ...], Field(min_length=1)] = (2e-4, 0.05)
    num_models: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 2, 4, 12)
    local_steps: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 5)
    rate: Positive = 1.0
    """The rate at the start, in units of the largest that the theorem admits."""
    contraction: Positive = 2.0
    """beta mu, above 1."""
    num_rounds: Count = 2000
    num_seeds: Annotated[Count, Field(ge=2)] = 200
    seed: Seed = 0
    record_every: Count = 10
    precision: Precision = "float64"

    @model_validator(mode="after")
    def _theorems_apply(self) -> Self:
        if self.num_rounds % self.record_every:
            raise ValueError(
                f"record_every is {self.record_every}; it must divide {self.num_rounds} rounds"
            )
        for name in ("algorithms", "mu", "num_models", "local_steps"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} is {list(values)}; give each value once")
        for num_models in self.num_models:
            mfa_rand(self.num_clients, num_models)  # refuses more models than clients
        for method, mu in itertools.product(self.algorithms, self.mu):
            numbers = self.rates(method, mu) | {"N": self.num_clients, "M": 1, "E": 1}
            _METHODS[method].bound(1, Gamma=0.0, G=1.0, distance=1.0, **numbers)
        return self

    def rates(self, method: Method, mu: float) -> dict[str, float]:
        """Returns the constants of the theorem's hypotheses: mu, L, beta, gamma."""
        # Settings are checked before JAX may start its devices: this is NumPy.
        smoothness = mu + largest_curvature(self.num_clients, self.block_size)
        beta, gamma = _METHODS[method].rate(smoothness, mu, self)
        return {"mu": mu, "L": smoothness, "beta": beta, "gamma": gamma}

    def constants(self, method: Method, mu: float) -> dict[str, float]:
        """Returns the constants that do not depend on the run: mu, L, Gamma, beta, gamma."""
        with jax.enable_x64(True):
            exact = exact_constants(quadratic(self.num_clients, self.block_size, mu=mu))
        return self.rates(method, mu) | {"Gamma": float(exact.Gamma.value)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Probed(Quadratic):
    """The quadratic, which also records G: the largest gradient of all clients at the model."""

    def metrics(
        self, rng_key: PRNGKeyArray, params: Float[Array, " dim"]
    ) -> dict[str, Float[Array, ""]]:
        """Returns the quadratic's metrics, and the largest gradient."""
        # On convex losses, at rates up to 2/L, gradients shrink along local steps and along those
        # of the proof's virtual sequence: none between two recorded rounds' starts is larger.
        clients = jnp.arange(self.num_clients)
        gradients = jax.vmap(jax.grad(self.loss), (None, 0))(params, clients)
        largest = jnp.linalg.norm(gradients, axis=1).max()
        return super().metrics(rng_key, params) | {"gradient": largest}


_CASE = ("algorithm", "mu", "num_models", "local_steps")


def run_bounds(config: Bounds, execution: Execution | None = None) -> xr.Dataset:
    """Returns measured errors and the bounds, over ``(*_CASE, "round")``."""

    def build(algorithm: Method, mu: Any, num_models: int, local_steps: int) -> Setup:
        statement = _METHODS[algorithm]
        task = _Probed(**vars(quadratic(config.num_clients, config.block_size, mu=mu)))
        schedule = statement.schedule(task, num_models, config)
        training = fedavg(schedule, local_steps=local_steps, server_scale=statement.server_scale)
        return Setup(task, training, statement.assignment(config.num_clients, num_models))

    axes = {name: list(getattr(config, name)) for name in _CASE[1:]}
    with jax.enable_x64(config.precision == "float64"):
        result = sweep(
            build,
            {"algorithm": list(config.algorithms)} | axes,
            **config.model_dump(include={"num_rounds", "num_seeds", "seed", "record_every"}),
            on_divergence="stop",
            execution=execution,
        )
    words = "distance |w_t - w*|, mean over models"
    dataset = xr.Dataset(
        {
            "distance": result.distance.mean("model").assign_attrs(long_name=words),
            "largest": result.distance.mean("seed").max("model"),
            "G": result.gradient.max(("seed", "round", "model")),
        },
        attrs=result.attrs,
    ).transpose(*_CASE, ...)
    t = result["round"].values + 1  # the model after round t is w_{t+1}
    bounds = [_bound(case, config, t) for case in _cases(dataset)]
    shape = dataset.G.shape
    return dataset.assign(bound=((*_CASE, "round"), np.reshape(bounds, (*shape, -1))))


def _cases(dataset: xr.Dataset) -> list[xr.Dataset]:
    """Returns the dataset at every method, mu, M and E, in this order."""
    return [dataset.sel(at) for at, _ in places(dataset, *_CASE)]


def _symbols(case: xr.Dataset, config: Bounds) -> dict[str, float]:
    """Returns all constants of a case's bound."""
    sizes = {"N": config.num_clients, "M": case.num_models.item(), "E": case.local_steps.item()}
    known = config.constants(case.algorithm.item(), case.mu.item())
    start = case.distance.isel(round=0).mean().item()
    return sizes | known | {"G": case.G.item(), "distance": start}


def _bound(case: xr.Dataset, config: Bounds, t: Any) -> np.ndarray:
    return _METHODS[case.algorithm.item()].bound(t, **_symbols(case, config))


def _of_case(case: xr.Dataset, config: Bounds) -> dict[str, float]:
    """Returns a case's constants, its rate, and when a model frozen at its start is found out."""
    statement, symbols = _METHODS[case.algorithm.item()], _symbols(case, config)
    runs = case.distance.transpose("seed", "round").values
    frame = case.num_models.item() if statement.counts_frames else 1
    rate = fit_rate((case["round"].values + 1) / frame, runs, symbols["gamma"])
    t = np.arange(1, _FROZEN + 2)
    below = t[_bound(case, config, t) < symbols["distance"]] - 1
    return symbols | {
        "exponent": rate.exponent,
        "exponent_low": rate.interval[0],
        "exponent_high": rate.interval[1],
        "predicted_exponent": statement.exponent,
        "frozen_found_in_round": below[0] if below.size else np.nan,
    }


def measure(result: xr.Dataset, config: Bounds) -> xr.Dataset:
    """Returns constants, errors beside bounds at some of the records, and exponents."""
    cases = [_of_case(case, config) for case in _cases(result)]
    names = [name for name in cases[0] if name not in ("mu", "M", "E")]
    numbers = {
        name: (_CASE, np.reshape([case[name] for case in cases], result.G.shape)) for name in names
    }
    (mean, error), ratio = estimate(result.distance), result.bound / result.largest
    curves = {"error": mean, "standard_error": error, "bound": result.bound, "ratio": ratio}
    # The later the records, the further apart they are.
    few = np.geomspace(1, result.sizes["round"] - 1, 11).round().astype(int)
    measured = xr.Dataset(curves).isel(round=sorted({0, *few.tolist()})).assign(numbers)
    measured = measured.assign(least_ratio=ratio.min("round"), largest_ratio=ratio.max("round"))
    return measured.rename(num_models="M", local_steps="E")


def claims(measured: xr.Dataset, config: Bounds) -> Sequence[Claim]:
    """Every bound holds, errors fall as fast as it does, and it is no bound of frozen models."""
    return [claim for name in config.algorithms for claim in _of_method(name, measured)]


def _of_method(method: Method, measured: xr.Dataset) -> list[Claim]:
    statement, here = _METHODS[method], measured.sel(algorithm=method)
    proof = "" if statement.is_proven else " (proven for the factor 1/N only)"
    least, most = here.least_ratio.min(("mu", "M")), here.largest_ratio.max(("mu", "M"))
    ratios = "at least {}; at most {}".format(*(describe(x, form=".3g") for x in (least, most)))
    flat = here.stack(case=("mu", "M", "E"))
    slow = flat.isel(case=flat.exponent_high.argmin("case"))
    where = ", ".join(label(dim, slow[dim].item()) for dim in ("mu", "M", "E"))
    exponents = [slow[f"exponent{end}"].item() for end in ("", "_low", "_high")]
    time = "t/M + gamma" if statement.counts_frames else "t + gamma"
    falls = f"errors fall at least as ({time})^-{statement.exponent:g} in the later half"
    found = [
        claim(
            f"{method}: {statement.theorem}'s bound holds at every recorded round{proof}",
            here.least_ratio >= 1 - _ROUND_OFF,  # equal at the start, if M = E = 1
            f"bound / error {ratios}",
        ),
        claim(
            f"{method}: {falls}{proof}",
            slow.exponent_high >= statement.exponent,
            "the slowest, at {}: {:.2f} ({:.2f} to {:.2f})".format(where, *exponents),
        ),
    ]
    if 1 in here.E.values:
        # A check that cannot fail would say nothing: a model that never moves must be found out.
        frozen = here.frozen_found_in_round.sel(E=1, mu=here.mu.max())
        text = f"{method}: a model frozen at its start would violate {statement.theorem} within"
        text += f" {_FROZEN:,} rounds (E = 1, mu = {frozen.mu:g})"
        evidence = f"in the round {describe(frozen, form=',.0f', missing='never')}"
        found.append(claim(text, frozen <= _FROZEN, evidence))
    return found


_CONSTANTS = ("L", "Gamma", "G", "beta", "gamma", "distance")
_FEW = 6  # cases whose curves are printed too


def table(measured: xr.Dataset, config: Bounds) -> Sequence[Table]:
    """Returns errors and bounds at the end, the constants, and curves if there are few."""
    at, last = ("algorithm", "mu", "M", "E"), measured.isel(round=-1)
    least, largest = (cells(measured[f"{end}_ratio"], form=".3g") for end in ("least", "largest"))
    main = {
        "error at the end": cells(last.error, last.standard_error, form=".3g"),
        "bound": cells(last.bound, form=".3g"),
        "bound / error": least + " to " + largest,
        "exponent": cells(measured.exponent, published=measured.predicted_exponent),
    }
    first = measured.isel(M=0, E=0).assign(G=measured.G.max(("M", "E")))
    constants = {name: cells(first[name], form=".5g") for name in _CONSTANTS}
    title = "Constants: mu, L and Gamma are exact, G is the largest gradient at recorded models"
    found = [rows(main, at), rows(constants, at[:2], title)]
    curves = {
        "error": cells(measured.error, measured.standard_error, form=".4g"),
        "bound": cells(measured.bound, form=".4g"),
        "bound / error": cells(measured.ratio, form=".3g"),
        "": xr.where(measured.ratio >= 1 - _ROUND_OFF, "holds", "DOES NOT HOLD"),
    }
    if measured.G.size <= _FEW:
        for case, words in places(measured, *at):
            here = {name: text.sel(case) for name, text in curves.items()}
            found.append(rows(here, ("round",), ", ".join(words)))
    return found


def figure(result: xr.Dataset, measured: xr.Dataset, config: Bounds) -> Figure:
    """Draws measured errors and bounds over rounds, a panel for every method, mu and E."""
    curves = result[["distance", "bound"]].mean("seed").assign_coords(round=result["round"] + 1)
    curves = curves.rename(num_models="M", local_steps="E").transpose(..., "M", "round")
    panels = []
    for at, words in places(curves, "algorithm", "mu", "E"):
        here = curves.sel(at)
        drawn = plots.lines(here.distance, style="-")
        drawn += plots.lines(here.bound, style="--", label="bound, ")
        axes = (", ".join(words), "$t$ (the start is 1)", r"$E|w_t - w_*|$")
        panels.append(plots.Panel(*axes, drawn, scale="log", xscale="log"))
    width = curves.sizes["E"]
    return plots.draw(
        [panels[i : i + width] for i in range(0, len(panels), width)],
        title=f"Errors and their bounds, quadratic, N = {config.num_clients}, "
        f"{config.num_seeds} seeds",
        caption="Solid: measured, mean over seeds and models; dashed: the bound with constants mu, "
        "L, Gamma exact and G measured.",
    )


def _beside(settings: Bounds, id: str, title: str) -> Item:
    return Item(id, title, settings, run_bounds, measure, claims, table, figure)


_RAND = Bounds(algorithms=("MFA-Rand",))
_ROUND_ROBIN = Bounds(algorithms=("MFA-RR, 1/N", "MFA-RR, mean"))
_BOTH = Bounds(algorithms=tuple(_METHODS), mu=(0.05,), num_models=(12,), local_steps=(5,))

ITEMS = (
    _beside(_RAND, id="theory-mfa-rand", title="Theorem 1's bound beside MFA-Rand's error"),
    _beside(_ROUND_ROBIN, id="theory-mfa-rr", title="Corollary 1's bound beside MFA-RR's error"),
    _beside(_BOTH, id="bounds-mfa", title="bounds and errors of MFA-Rand and MFA-RR"),
)
"""Theorem 1 and Corollary 1, and what `fedjax-mm bounds mfa` shows."""
