"""Bhuyan, Moharir, Joshi, section 4: the theorems beside measured errors on the quadratic."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
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
from fedjax_mm.experiments.tasks import Config, Count, Positive, Seed
from fedjax_mm.papers.old import Claim, Judgement, Reproduction
from fedjax_mm.results import plots
from fedjax_mm.results.metrics import standard_error
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
      bound: on E|w_t - w*|, from t and its constants.
      assignment: who trains what.
      server_scale: of FedAvg's server.
      is_proven: whether the theorem is about this server.
      largest_rate: that the theorem admits at the start, times L.
      counts_frames: whether its rate and its bound do.
      exponent: of its bound.
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
        """Beta and gamma of its learning rate beta / (t + gamma)."""
        beta = config.contraction / mu
        return beta, beta * smoothness / (config.rate * self.largest_rate)

    def schedule(self, task: Quadratic, num_models: int, config: "Bounds") -> Schedule:
        """Its learning rate."""
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
"""What is compared with a bound. Corollary 1 is proven for the factor 1/N of eq. (19)."""


class Bounds(Config):
    """Settings: the quadratic from zeros, with schedules that satisfy the theorems."""

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
            mfa_rand(self.num_clients, num_models)
        for method, mu in itertools.product(self.algorithms, self.mu):
            numbers = self.rates(method, mu) | {"N": self.num_clients, "M": 1, "E": 1}
            _METHODS[method].bound(1, Gamma=0.0, G=1.0, distance=1.0, **numbers)
        return self

    def rates(self, method: Method, mu: float) -> dict[str, float]:
        """The constants of the theorem's hypotheses: mu, L, beta, gamma. This starts no device."""
        smoothness = mu + largest_curvature(self.num_clients, self.block_size)
        beta, gamma = _METHODS[method].rate(smoothness, mu, self)
        return {"mu": mu, "L": smoothness, "beta": beta, "gamma": gamma}

    def constants(self, method: Method, mu: float) -> dict[str, float]:
        """Those that do not depend on the run: mu, L, Gamma, beta, gamma."""
        with jax.enable_x64(True):
            exact = exact_constants(quadratic(self.num_clients, self.block_size, mu=mu))
        return self.rates(method, mu) | {"Gamma": float(exact.Gamma.value)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Probed(Quadratic):
    """The quadratic, which also records G: the largest gradient of all clients at the model.

    On convex losses, at rates up to 2/L, gradients shrink along local steps and along those of the
    proof's virtual sequence: no gradient between two recorded rounds' starts is larger.
    """

    def metrics(
        self, rng_key: PRNGKeyArray, params: Float[Array, " dim"]
    ) -> dict[str, Float[Array, ""]]:
        """The quadratic's, and the largest gradient."""
        clients = jnp.arange(self.num_clients)
        gradients = jax.vmap(jax.grad(self.loss), (None, 0))(params, clients)
        largest = jnp.linalg.norm(gradients, axis=1).max()
        return super().metrics(rng_key, params) | {"gradient": largest}


def _probed(num_clients: int, block_size: int, mu: Any) -> _Probed:
    return _Probed(**vars(quadratic(num_clients, block_size, mu=mu)))


def run_bounds(config: Bounds, execution: Execution | None = None) -> xr.Dataset:
    """Measured errors and the bounds, over ``(algorithm, mu, num_models, local_steps, round)``."""

    def build(algorithm: Method, mu: Any, num_models: int, local_steps: int) -> Setup:
        statement = _METHODS[algorithm]
        task = _Probed(**vars(quadratic(config.num_clients, config.block_size, mu=mu)))
        schedule = statement.schedule(task, num_models, config)
        training = fedavg(schedule, local_steps=local_steps, server_scale=statement.server_scale)
        return Setup(task, training, statement.assignment(config.num_clients, num_models))

    axes = {name: list(getattr(config, name)) for name in ("mu", "num_models", "local_steps")}
    with jax.enable_x64(config.precision == "float64"):
        result = sweep(
            build,
            {"algorithm": list(config.algorithms)} | axes,
            num_rounds=config.num_rounds,
            num_seeds=config.num_seeds,
            seed=config.seed,
            record_every=config.record_every,
            on_divergence="stop",
            execution=execution,
        )
    dataset = xr.Dataset(
        {
            "distance": result.distance.mean("model").assign_attrs(
                long_name="distance |w_t - w*|, mean over models"
            ),
            "largest": result.distance.mean("seed").max("model"),
            "G": result.gradient.max(("seed", "round", "model")),
        },
        attrs={"manifest": result.attrs["manifest"] | {"config": config.model_dump()}},
    )
    bounds = [_bound_of(case, config) for case in _cases(dataset)]
    shape = [dataset.sizes[name] for name in (*_CASE, "round")]
    dims = (*_CASE, "round")
    return dataset.assign(bound=(dims, np.reshape(bounds, shape))).transpose(*_CASE, ...)


_CASE = ("algorithm", "mu", "num_models", "local_steps")


def _cases(dataset: xr.Dataset) -> Iterator[xr.Dataset]:
    """The dataset at every method, mu, M and E, in this order."""
    for values in itertools.product(*(dataset[name].values for name in _CASE)):
        yield dataset.sel(dict(zip(_CASE, values, strict=True)))


def _symbols(case: xr.Dataset, config: Bounds) -> dict[str, float]:
    """All constants of a case's bound."""
    method: Method = case.algorithm.item()
    known = config.constants(method, case.mu.item())
    sizes = {"N": config.num_clients, "M": case.num_models.item(), "E": case.local_steps.item()}
    start = {"distance": case.distance.isel(round=0).mean().item()}
    return sizes | known | {"G": case.G.item()} | start


def _bound_of(case: xr.Dataset, config: Bounds, t: Any = None) -> np.ndarray:
    """The bound at all records, or at t; the model after round t is w_{t+1}."""
    bound = _METHODS[case.algorithm.item()].bound
    return bound(case["round"].values + 1 if t is None else t, **_symbols(case, config))


def judge_bounds(dataset: xr.Dataset, config: Bounds) -> Judgement:
    """Whether every bound holds at every record, how loose it is, and the measured exponents."""
    cases = list(_cases(dataset))
    measured = [_measure(case, config) for case in cases]
    claims = []
    for method in config.algorithms:
        statement = _METHODS[method]
        mine = [numbers for numbers in measured if numbers["algorithm"] == method]
        claims += [_holds_claim(method, statement, mine), _exponent_claim(method, statement, mine)]
        if frozen := [n for n in mine if n["E"] == 1 and n["mu"] == max(config.mu)]:
            claims.append(_frozen_claim(method, statement, frozen))
    header = ("algorithm", "mu", "M", "E", "error at the end", "bound", "bound / error", "exponent")
    rows = [
        (
            *(f"{numbers[name]}" for name in header[:4]),
            f"{numbers['error']:.3g} ± {numbers['standard_error']:.1g}",
            f"{numbers['bound']:.3g}",
            f"{numbers['least_ratio']:.3g} to {numbers['largest_ratio']:.3g}",
            f"{numbers['exponent']:.2f} ({numbers['predicted_exponent']:g})",
        )
        for numbers in measured
    ]
    title = "Constants: mu, L and Gamma are exact, G is the largest gradient at recorded models"
    more = [(title, (_CONSTANTS, *_constants_of(measured)))]
    if len(cases) <= _FEW:
        more += [(_title(case), _curve(case)) for case in cases]
    return Judgement({"cases": measured}, tuple(claims), (header, *rows), tuple(more))


_CONSTANTS = ("algorithm", "mu", "L", "Gamma", "G", "beta", "gamma", "distance")
_FEW = 6  # cases whose curves are printed too


def _constants_of(cases: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row for each method and mu."""
    rows: dict[tuple[str, float], dict[str, Any]] = {}
    for case in cases:
        row = rows.setdefault((case["algorithm"], case["mu"]), dict(case))
        row["G"] = max(row["G"], case["G"])
    return [tuple(_short(row[name]) for name in _CONSTANTS) for row in rows.values()]


def _measure(case: xr.Dataset, config: Bounds) -> dict[str, Any]:
    """The numbers of one case."""
    method: Method = case.algorithm.item()
    statement, symbols = _METHODS[method], _symbols(case, config)
    runs = case.distance.transpose("seed", "round").values
    ratio = case.bound.values / case.largest.values
    frame = case.num_models.item() if statement.counts_frames else 1
    rate = fit_rate((case["round"].values + 1) / frame, runs, symbols["gamma"])
    start = symbols["distance"]
    below = _bound_of(case, config, np.arange(1, _FROZEN + 2)) < start
    return symbols | {
        "algorithm": method,
        "error": runs[:, -1].mean(),
        "standard_error": standard_error(runs[:, -1]),
        "bound": case.bound.values[-1],
        "least_ratio": ratio.min(),
        "largest_ratio": ratio.max(),
        "exponent": rate.exponent,
        "exponent_interval": rate.interval,
        "predicted_exponent": statement.exponent,
        "frozen_found_in_round": int(np.argmax(below)) if below.any() else math.nan,
    }


def _holds_claim(method: Method, statement: _Statement, cases: list[dict[str, Any]]) -> Claim:
    """The largest mean error of a model lies below the bound, everywhere."""
    ratios = {e: [n for n in cases if n["E"] == e] for e in dict.fromkeys(n["E"] for n in cases)}
    evidence = "; ".join(
        f"E = {e}: bound / error {min(n['least_ratio'] for n in some):.3g} to "
        f"{max(n['largest_ratio'] for n in some):.3g}"
        for e, some in ratios.items()
    )
    claim = f"{method}: {statement.theorem}'s bound holds at every recorded round"
    holds = all(n["least_ratio"] >= 1 - _ROUND_OFF for n in cases)  # equal at the start, M = E = 1
    return Claim(claim + _proof(statement), holds, evidence)


def _proof(statement: _Statement) -> str:
    return "" if statement.is_proven else " (proven for the factor 1/N only)"


def _exponent_claim(method: Method, statement: _Statement, cases: list[dict[str, Any]]) -> Claim:
    slowest = min(cases, key=lambda n: n["exponent_interval"][1])
    low, high = slowest["exponent_interval"]
    evidence = (
        f"the slowest, at mu = {slowest['mu']:g}, M = {slowest['M']}, E = {slowest['E']}: "
        f"{slowest['exponent']:.2f} ({low:.2f} to {high:.2f})"
    )
    time = "t/M + gamma" if statement.counts_frames else "t + gamma"
    claim = f"{method}: errors fall at least as ({time})^-{statement.exponent:g} in the later half"
    return Claim(claim + _proof(statement), high >= statement.exponent, evidence)


def _frozen_claim(method: Method, statement: _Statement, cases: list[dict[str, Any]]) -> Claim:
    """A check that cannot fail would say nothing: a model that never moves must be found out."""
    evidence = ", ".join(f"M = {n['M']}: round {n['frozen_found_in_round']:,}" for n in cases)
    return Claim(
        f"{method}: a model frozen at its start would violate {statement.theorem} within "
        f"{_FROZEN:,} rounds (E = 1, mu = {cases[0]['mu']:g})",
        all(n["frozen_found_in_round"] <= _FROZEN for n in cases),
        evidence,
    )


def _short(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.5g}"


def _title(case: xr.Dataset) -> str:
    """A case in words."""
    mu, models, steps = (case[name].item() for name in _CASE[1:])
    return f"{case.algorithm.item()}, mu = {mu:g}, M = {models}, E = {steps}"


def _curve(case: xr.Dataset) -> tuple[tuple[str, ...], ...]:
    """Error and bound side by side at some of the records, the later the further apart."""
    last = case.sizes["round"] - 1
    records = sorted({0, *np.geomspace(1, last, 11).round().astype(int).tolist()})
    runs = case.distance.transpose("seed", "round").values
    rows = [
        (
            f"{case['round'].values[r]}",
            f"{runs[:, r].mean():.4g} ± {standard_error(runs[:, r]):.1g}",
            f"{case.bound.values[r]:.4g}",
            f"{case.bound.values[r] / case.largest.values[r]:.3g}",
            "holds"
            if case.bound.values[r] / case.largest.values[r] >= 1 - _ROUND_OFF
            else "DOES NOT HOLD",
        )
        for r in records
    ]
    return (("round", "error", "bound", "bound / error", ""), *rows)


def plot_bounds(dataset: xr.Dataset, config: Bounds, judgement: Judgement) -> Figure:
    """Measured errors and bounds over rounds, a panel for every method, mu and E."""
    dims = ("algorithm", "mu", "local_steps", "num_models", "round")
    return plots.curves_and_bounds(
        dataset.distance.mean("seed").transpose(*dims),
        dataset.bound.transpose(*dims),
        panel_label="{}, $\\mu$ = {:g}, E = {}",
        series_label="M = {}",
        ylabel=r"$E|w_t - w_*|$",
        title=f"Errors and their bounds, quadratic, N = {config.num_clients}, "
        f"{config.num_seeds} seeds",
        caption="Solid: measured, mean over seeds and models; dashed: the bound with constants mu, "
        "L, Gamma exact and G measured. "
        + " ".join(
            f"{'Holds' if claim.holds else 'DOES NOT HOLD'}: {claim.claim}; {claim.evidence}."
            for claim in judgement.claims
            if "bound" in claim.claim
        ),
    )


def _beside(name: str, statement: str, config: Bounds) -> Reproduction:
    """Bounds beside measured errors."""
    return Reproduction(
        id=name,
        paper={
            "statement": statement,
            "open": [
                "the paper draws no bounds; its theorems are evaluated here with exact mu, L and "
                "Gamma, the measured G, and schedules at the largest rate that they admit",
            ],
        },
        config=config,
        run=run_bounds,
        judge=judge_bounds,
        plot=plot_bounds,
    )


_THEOREM_1 = "Theorem 1: E|w_t - w*| <= sqrt(nu) / sqrt(t + gamma)"
_COROLLARY_1 = (
    "Corollary 1: E|w_t - w*| <= phi' / (t/M + gamma), proven for the factor 1/N of eq. (19)"
)

REPRODUCTIONS = (
    _beside(
        "theory-mfa-rand",
        _THEOREM_1,
        Bounds(algorithms=("MFA-Rand",)),
    ),
    _beside(
        "theory-mfa-rr",
        _COROLLARY_1,
        Bounds(algorithms=("MFA-RR, 1/N", "MFA-RR, mean")),
    ),
    _beside(
        "bounds-mfa",
        f"{_THEOREM_1}; {_COROLLARY_1}",
        Bounds(algorithms=tuple(_METHODS), mu=(0.05,), num_models=(12,), local_steps=(5,)),
    ),
)
"""Theorem 1 and Corollary 1, and what `fedjax-mm bounds mfa` shows."""
