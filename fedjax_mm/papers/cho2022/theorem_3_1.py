"""Theorem 3.1 and Lemmas B.1 and B.2, compared with MaxFL on logistic regression."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Bool, Float, PRNGKeyArray
from matplotlib.figure import Figure
from pydantic import model_validator

from fedjax_mm import plots
from fedjax_mm.algorithms.maxfl import maxfl
from fedjax_mm.assignments.partitions import mfa_rand
from fedjax_mm.base import Batching, Index, Metrics
from fedjax_mm.claims import at_least, fact
from fedjax_mm.data.clients import ClientData, client_data
from fedjax_mm.experiments.fields import Config, Count, Positive, Seed, TwoOrMore
from fedjax_mm.local import local_sgd
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import Ruling, check, ruling, untested
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, rows
from fedjax_mm.papers.training import train
from fedjax_mm.papers.values import Several
from fedjax_mm.results.labels import describe, places
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.requirements import own_models
from fedjax_mm.theory import maxfl as theory
from fedjax_mm.theory.problem import FloatArray, Problem
from fedjax_mm.theory.validation import over

_FROZEN = 1e10  # a frozen model must violate the bound within this many rounds

Part = Literal["full", "partial"]
"""Client participation: eq. (100) assumes all clients, and eq. (125) C of them."""


class Bounded(Config):
    """Settings of MaxFL on logistic regression with the learning rates of Theorem 3.1."""

    num_clients: TwoOrMore = 10
    num_examples: Count = 40
    """The number of examples per client."""
    dim: TwoOrMore = 3
    length: Positive = 1.5
    """The norm of all feature vectors, which is L_c."""
    cohort_size: Count = 5
    participation: Several[Part] = ("full", "partial")
    local_steps: Several[Count] = (1, 5)
    batch_size: Count = 4
    num_rounds: Several[Count] = (1600, 6400)
    """The values of T, which determine the learning rates."""
    num_seeds: TwoOrMore = 50
    seed: Seed = 0

    @model_validator(mode="after")
    def _theorem_applies(self) -> Self:
        mfa_rand(self.num_clients, 1, cohort_size=self.cohort_size)
        for part in self.participation:
            for E in self.local_steps:
                bound(np.array(self.num_rounds), part, E, self)  # raises if a T is too small
        return self

    def examples(self) -> tuple[FloatArray, FloatArray]:
        """Features and labels -1 or 1, ``[clients, examples, ...]``.

        Each client draws its labels using its own direction.
        """
        random = np.random.default_rng(self.seed)
        x = random.standard_normal((self.num_clients, self.num_examples, self.dim))
        x *= self.length / np.linalg.norm(x, axis=-1, keepdims=True)
        directions = 1 + random.standard_normal((self.num_clients, self.dim, 1))
        margins = (x @ directions)[..., 0]
        return x, np.where(random.random(margins.shape) < 1 / (1 + np.exp(-margins)), 1.0, -1.0)

    def problem(self) -> Problem:
        """Constants that satisfy assumptions 3.1 to 3.3 everywhere.

        The gradient of the logistic loss on an example is shorter than the example, and the
        curvature is at most a quarter of the example's squared length. beta is 1, and kappa^2
        bounds the mean of |grad F_k|^2. The gap is at most F~(w_0) < 1.
        """
        x, _ = self.examples()
        second = np.einsum("ksi,ksj->kij", x, x) / self.num_examples
        return Problem(
            N=self.num_clients,
            C=self.cohort_size,
            L=np.linalg.eigvalsh(second).max() / 4,
            L_c=self.length,
            sigma=self.length / math.sqrt(self.batch_size),
            beta=1.0,
            kappa=self.length,
            gap=1.0,
        )


def learning_rates(T: Any, part: Part, E: int, config: Bounded) -> tuple[Any, Any]:
    """The learning rates eta_l and eta_g of Theorem 3.1."""
    size = config.num_clients if part == "full" else config.cohort_size
    return theory.theorem_3_1_learning_rates(T, E, size)


def bound(T: Any, part: Part, E: Any, config: Bounded, gap: Any = 1.0) -> FloatArray:
    """The bound of (100) or (125).

    Raises:
      ValueError: if T is too small for the learning rates.
    """
    problem = dataclasses.replace(config.problem(), E=E, gap=gap)
    prove = theory.theorem_3_1_full if part == "full" else theory.theorem_3_1_partial
    return prove(T, problem, learning_rates(T, part, E, config))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logistic:
    """Logistic regression without an intercept, on examples ``(features, labels -1 or 1)``.

    Attributes:
      data: the examples of all clients.
      requirements: ``float[clients]``, rho_k.
      L_c: the Lipschitz constant of every F_k.
      L: the smoothness constant of every F_k.
    """

    data: ClientData
    requirements: Array
    L_c: Any
    L: Any

    @property
    def num_clients(self) -> int:
        """The number of clients, N."""
        return self.data.num_clients

    def init(self, rng_key: PRNGKeyArray) -> Float[Array, " dim"]:
        """Zeros."""
        del rng_key
        features, _ = self.data.examples
        return jnp.zeros(features.shape[-1], features.dtype)

    def weight(self, client: Index) -> Float[Array, ""]:
        """The number n_k of the client's examples."""
        return self.data.counts[client].astype(float)

    def batch(self, rng_key: PRNGKeyArray, client: Index, step: Index, how: Batching) -> Any:
        """A client's examples and their weights."""
        return self.data.batch(rng_key, client, step, how)

    def loss(self, params: Float[Array, " dim"], batch: Any) -> Float[Array, ""]:
        """The mean loss of a batch."""
        taken, weights = batch
        features, labels = self.data.take(taken)
        losses = jax.nn.softplus(-labels * (features @ params))
        return jnp.sum(weights * losses) / jnp.sum(weights)

    def client_loss(self, params: Float[Array, " dim"], client: Index) -> Float[Array, ""]:
        """The loss F_k(w)."""
        nothing = jax.random.key(0)  # unused, because a batch of all examples is not random
        return self.loss(params, self.batch(nothing, client, jnp.int32(0), Batching()))

    def threshold(self, client: Index) -> Float[Array, ""]:
        """The threshold rho_k."""
        return self.requirements[client]

    def appeals(self, params: Float[Array, " dim"]) -> Bool[Array, " clients"]:
        """Whether F_k(w) < rho_k."""
        losses = jax.vmap(self.client_loss, (None, 0))(params, jnp.arange(self.num_clients))
        return losses < self.requirements

    def metrics(self, rng_key: PRNGKeyArray, params: Float[Array, " dim"]) -> Metrics:
        """F~ and the quantities bounded by Theorem 3.1 and the lemmas.

        ``squared`` is |grad F~|^2, ``clients`` is the mean of |grad F~_k|^2, and ``curvature`` is
        the largest ratio of a client's curvature to the bound of Lemma B.2. It uses the Frobenius
        norm, which is at least the spectral norm.
        """
        del rng_key

        def of_client(client: Index) -> tuple[Array, ...]:
            loss, gradient, hessian = (
                of(params, client)
                for of in (
                    self.client_loss,
                    jax.grad(self.client_loss),
                    jax.hessian(self.client_loss),
                )
            )
            s = jax.nn.sigmoid(loss - self.requirements[client])
            q = s * (1 - s)
            curved = q * (hessian + (1 - 2 * s) * jnp.outer(gradient, gradient))
            return s, q * gradient, jnp.linalg.norm(curved) / (self.L_c**2 / 4 + q * self.L)

        s, gradients, ratios = jax.vmap(of_client)(jnp.arange(self.num_clients))
        return {
            "objective": s.mean(),
            "squared": jnp.sum(gradients.mean(0) ** 2),
            "clients": jnp.sum(gradients**2, axis=1).mean(),
            "curvature": ratios.max(),
        }


def make_task(config: Bounded) -> Logistic:
    """The task, where rho_k is F_k after 100 steps of training by the client alone."""
    x, y = config.examples()
    L_c, L = config.problem().symbols("Theorem 3.1", "L_c L")
    data = client_data(list(zip(x, y, strict=True)))
    data = dataclasses.replace(
        data, examples=jax.tree.map(partial(jnp.asarray, dtype=float), data.examples)
    )
    task = Logistic(data, jnp.zeros(config.num_clients), L_c, L)
    own = own_models(config.seed, task, learning_rate=1.0, num_steps=100)
    return dataclasses.replace(task, requirements=own.threshold)


def run(config: Bounded, execution: Execution | None = None) -> xr.Dataset:
    """The bounds, and the means over rounds and the maxima of the bounded quantities."""
    problem = config.problem()
    sizes = {"full": config.num_clients, "partial": config.cohort_size}

    def build(participation: Part, local_steps: int, T: float) -> Setup:
        C = sizes[participation]
        eta_l, eta_g = map(float, theory.theorem_3_1_learning_rates(T, local_steps, C))
        # For partial participation the proof uses eps = C, which gives C eta_g / (sum q + C).
        is_full = participation == "full"
        algorithm = maxfl(
            local_sgd(eta_l, steps=local_steps, batch_size=config.batch_size),
            server_rate=eta_g if is_full else C * eta_g,
            eps=float(theory.optimal_epsilon(problem)) if is_full else float(C),
        )
        return Setup(task, algorithm, mfa_rand(config.num_clients, 1, cohort_size=C))

    with jax.enable_x64(True):
        task = make_task(config)
        axes: Any = {"participation": config.participation, "local_steps": config.local_steps}
        axes |= {"T": [float(T) for T in config.num_rounds]}
        how: Any = {"num_rounds": max(config.num_rounds), "on_divergence": "stop"}
        result = train([], build, axes, config, execution, **how)
    return _reduced(result, config)


def _reduced(result: xr.Dataset, config: Bounded) -> xr.Dataset:
    """Reduces each run to its first T rounds, because all runs have the largest T."""
    beta, kappa = theory.lemma_b_1(config.problem())
    result = result.isel(model=0, drop=True).rename(local_steps="E")
    inside = result["round"] < result["T"]
    squared = result.squared.where(inside)
    gap = result.objective.isel(round=0, T=0, drop=True).mean("seed")
    spaced = np.geomspace(1, max(config.num_rounds), 60).round().astype(int)
    few = np.union1d(spaced, config.num_rounds)
    average = squared.mean("seed").cumsum("round", skipna=False) / (result["round"] + 1)

    def proven(T: float, part: Part, problem: Problem) -> FloatArray:
        return bound(T, part, problem.E, config, problem.gap)

    at = {"T": result["T"], "part": result.participation, "E": result.E, "gap": gap}
    found = {
        "mean_squared": squared.mean("round"),
        "least_squared": squared.mean("seed").min("round"),
        "dissimilarity": (result.clients / (beta**2 * result.squared + kappa**2))
        .where(inside)
        .max("round"),
        "curvature": result.curvature.where(inside).max("round"),
        "bound": over(proven, at, each=True),
        "gap": gap,
        "average": average.isel(round=few - 1).rename(round="t").assign_coords(t=few),
    }
    return xr.Dataset(found, attrs=result.attrs).transpose("participation", "E", "T", ...)


def _frozen(result: xr.Dataset, config: Bounded) -> xr.DataArray:
    """The T beyond which bounds are below |grad F~(w_0)|^2, or NaN."""
    T = np.geomspace(min(config.num_rounds), _FROZEN, 1000).round()

    def first(part: Part, E: int, gap: float, start: float) -> float:
        found = T[bound(T, part, E, config, gap) < start]
        return float(found[0]) if found.size else math.nan

    start = result.average.isel(T=0, t=0, drop=True)
    arguments = result.participation, result.E, result.gap, start
    found: xr.DataArray = xr.apply_ufunc(first, *arguments, vectorize=True)
    return found


def measure(result: xr.Dataset, config: Bounded) -> xr.Dataset:
    """The means and their bounds, the exponents in T, and the counterexample."""
    mean, error = estimate(result.mean_squared)
    measured = result.drop_attrs().drop_vars("average")
    fall = -np.log(
        result.mean_squared.isel(T=-1, drop=True) / result.mean_squared.isel(T=0, drop=True)
    )
    times = result["T"].values
    exponent = fall / np.log(times[-1] / times[0]) if len(times) > 1 else fall * np.nan
    slope, curvature, printed = counterexample()
    return measured.assign(
        mean=mean,
        error=error,
        room=1 - result.mean_squared / result.bound,
        exponent=exponent,
        frozen=_frozen(result, config),
        steep_slope=slope,
        steep_curvature=curvature,
        steep_printed=printed,
    )


def counterexample(L_c: float = 10.0, L: float = 1e-3) -> tuple[float, float, float]:
    """L_c, the objective's curvature, and the printed bound, for a linear loss.

    ``F(w) = L_c w`` with rho = 0 is L_c-continuous, and L-smooth for every L. The sigmoid has its
    largest curvature, 1 / (6 sqrt(3)), at ``sigma = (1 + 1/sqrt(3)) / 2``.
    """
    s = (1 + 1 / math.sqrt(3)) / 2
    q = s * (1 - s)
    return L_c, L_c**2 * q * abs(1 - 2 * s), L_c / 4 + q * L


def judge(measured: xr.Dataset, config: Bounded) -> Iterator[Ruling | Check]:
    """Rules on Theorem 3.1 with its constants, and on the lemmas."""
    for key, part in (("theorem-3-1", "full"), ("partial", "partial")):
        if part not in config.participation:
            yield untested(key, f"{part} participation was not run")
            continue
        here = measured.sel(participation=part, drop=True)
        ratio = here.bound / here["mean"]
        about = f"1 - mean / bound; bound / mean {ratio.min():.3g} to {ratio.max():.3g}"
        if part == "partial":
            about += "; the printed bound is larger than the corrected one, so that it holds too"
        tests = at_least(here.room, 0.0, form=".4f")
        yield ruling(key, tests, about=about, looseness=ratio.min())
    if len(config.num_rounds) > 1:
        about = "q - 1/2, where the measured means fall as T^-q"
        yield ruling(
            "stationary-point", at_least(measured.exponent - 0.5, -0.05, form=".4f"), about=about
        )
    else:
        yield untested("stationary-point", "the run has only one T")
    for key, name in (("lemma-b-1", "dissimilarity"), ("lemma-b-2", "curvature")):
        largest = measured[name].max().item()
        evidence = f"number / bound at most {largest:.3g} in any round"
        yield ruling(key, fact(largest <= 1, evidence), looseness=1 / largest)
    numbers = f"F(w) = {measured.steep_slope:g} w: curvature {measured.steep_curvature:.2f}, "
    numbers += f"printed constant {measured.steep_printed:.2f}"
    holds = bool(measured.steep_curvature <= measured.steep_printed)
    yield ruling("smoothness-as-printed", fact(holds, numbers))
    text = "Lemma B.2's own constant, L_c^2 / 4, bounds the curvature of that loss"
    bound_2 = measured.steep_slope**2 / 4
    yield check(text, measured.steep_curvature <= bound_2, f"{bound_2:.1f}")
    # Report the T that a test would need, because bounds are loose and runs are far shorter.
    frozen = measured.frozen
    text = f"a model frozen at its start would violate the bounds at a T below {_FROZEN:.0e}"
    yield check(
        text, frozen <= _FROZEN, f"from T = {describe(frozen, form=',.0f', missing='never')}"
    )


def table(measured: xr.Dataset, config: Bounded) -> Sequence[Table]:
    """The means with their bounds, and the constants."""
    contents = {
        "mean |grad F~|^2": cells(measured["mean"], measured.error, form=".3g"),
        "least": cells(measured.least_squared, form=".3g"),
        "bound": cells(measured.bound, form=".3g"),
        "bound / mean": cells(measured.bound / measured["mean"], form=".3g"),
        "gap": cells(measured.gap, form=".3g"),
    }
    names = ("N", "C", "L", "L_c", "sigma", "beta", "kappa")
    values = config.problem().symbols("Theorem 3.1", " ".join(names))
    constants = {
        name: cells(xr.DataArray(value), form=".4g")
        for name, value in zip(names, values, strict=True)
    }
    title = (
        "Constants, bounds for all models; the gap is F~(w_0), which is at least F~(w_0) - inf F~"
    )
    return [rows(contents, ("participation", "E", "T")), rows(constants, (), title)]


def figure(result: xr.Dataset, measured: xr.Dataset, config: Bounded) -> Figure:
    """Draws the bound for each T divided by the running mean, with one panel per E."""
    panels = []
    for at, words in places(result, "participation", "E"):
        here = result.sel(at)
        ratio = here.bound.where(here.t <= here["T"]) / here.average
        labels = ", ".join(words), "rounds $t$", "bound / measured mean"
        drawn = plots.lines(ratio.transpose("T", "t"), style="-")
        panels.append(plots.Panel(*labels, drawn, scale="log", xscale="log"))
    return plots.draw(
        [panels],
        title=f"Theorem 3.1 and MaxFL on logistic regression, N = {config.num_clients}, "
        f"{config.num_seeds} seeds",
        caption="The bound on the mean squared gradient over T rounds, divided by its mean so far, "
        "with full or partial participation and the learning rates for T; above 1 the bound holds.",
    )


ITEMS = (Item("theory-maxfl", Bounded(), run, measure, judge, table, figure),)
"""Theorem 3.1."""
