"""Best cohort size at constant cost (an open question in section 5), compared with C*."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.base import Assignment, Batching, Cohort, Index, Look, Params, Round, Scalar
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.claims import fact
from fedjax_mm.experiments.fields import Config, Count, Positive, Seed, TwoOrMore
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.figures import heat_map
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import Ruling, check, finding, ruling, untested
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, rows
from fedjax_mm.papers.training import train
from fedjax_mm.papers.values import Trend
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.theory.cohorts import cohort_bound, optimal_cohort_size
from fedjax_mm.theory.problem import Problem


class OptimalCohort(Config):
    """Settings of federated quadratics of increasing heterogeneity, with cohorts of every size.

    All sizes have the same number of contacts with the server, c = R C. Heterogeneity is the root
    mean squared distance of the clients' minimizers from their mean, and all runs start at distance
    1 from that mean.
    """

    num_clients: TwoOrMore = 24
    dim: Count = 6
    curvature: Positive = 10.0
    """The ratio of the largest to the smallest curvature of each client."""
    local_steps: Count = 5
    rate: Annotated[float, Field(gt=0, le=1)] = 0.25
    """The product gamma L E, at most 1."""
    contacts: Count = 240
    heterogeneity: Trend[Positive] = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
    num_seeds: TwoOrMore = 100
    """The number of runs for each size and heterogeneity."""
    seed: Seed = 0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.contacts % self.num_clients:
            wrong = f"contacts is {self.contacts}; give a multiple of num_clients = "
            raise ValueError(f"{wrong}{self.num_clients}, so that rounds of all clients are whole")
        return self

    @property
    def cohort_sizes(self) -> list[int]:
        """All C for which the number of rounds c / C is an integer."""
        return [C for C in range(1, self.num_clients + 1) if self.contacts % C == 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bowls:
    """``f_i(x) = (x - b_i)^T H_i (x - b_i) / 2``, with the constants of the cohort bound.

    Attributes:
      H: ``[clients, d, d]``.
      b: ``[clients, d]``.
      learning_rate: gamma.
      num_clients: N.
      local_steps: E.
    """

    H: Array
    b: Array
    learning_rate: Array
    num_clients: int = dataclasses.field(metadata={"static": True})
    local_steps: int = dataclasses.field(metadata={"static": True})

    def init(self, rng_key: PRNGKeyArray) -> Params:
        """A start at distance 1 from the mean of the minimizers."""
        del rng_key
        return jnp.full(self.b.shape[1], self.b.shape[1] ** -0.5)

    def weight(self, client: Index) -> Float[Array, ""]:
        """1, because all clients have equal weights."""
        del client
        return jnp.ones(())

    def batch(self, rng_key: PRNGKeyArray, client: Index, step: Index, how: Batching) -> Index:
        """The client itself, because gradients are full."""
        del rng_key, step, how
        return client

    def loss(self, params: Params, batch: Index) -> Float[Array, ""]:
        """The loss f_i."""
        away = params - self.b[batch]
        return away @ self.H[batch] @ away / 2

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> dict[str, Float[Array, ""]]:
        """``|grad f|^2``, and the largest ``|grad f_i|^2`` and Z^2 of the next round."""
        del rng_key

        def gradients(points: Array) -> Array:
            return jnp.einsum("nij,nj->ni", self.H, points - self.b)

        def step(points: Array, _: None) -> tuple[Array, Array]:
            found = gradients(points)
            return points - self.learning_rate * found, found

        start = jnp.broadcast_to(params, self.b.shape)
        _, along = lax.scan(step, start, length=self.local_steps)
        means = along.mean(0)  # G_i / E
        return {
            "squared_gradient": jnp.sum(gradients(start).mean(0) ** 2),
            "largest_gradient": jnp.max(jnp.sum(along**2, -1)),
            "deviation": jnp.mean(jnp.sum((means - means.mean(0)) ** 2, -1)),
        }


def bowls(config: OptimalCohort) -> tuple[np.ndarray, np.ndarray]:
    """H ``[clients, d, d]`` with curvatures up to 1, and minimizers ``[clients, d]``."""
    rng, d = np.random.default_rng(config.seed), config.dim
    turns = np.linalg.qr(rng.normal(size=(config.num_clients, d, d)))[0]
    curvatures = np.geomspace(1 / config.curvature, 1, d) if d > 1 else np.ones(1)
    H = np.einsum("nij,j,nkj->nik", turns, curvatures, turns)
    b = rng.normal(size=(config.num_clients, d))
    b -= b.mean(0)
    return H, b / np.sqrt(np.mean(np.sum(b**2, -1)))


def cohort_of(num_clients: int, size: Scalar) -> Assignment:
    """An assignment of uniform cohorts to one model, with a size that may be traced."""

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        del round, look
        order = permutation(rng_key, num_clients)
        return Cohort.of_rows(jnp.where(jnp.arange(num_clients) < size, order, -1)[None]), state

    return Assignment(num_clients, 1, lambda rng_key, look: (), assign)


def run(config: OptimalCohort, execution: Execution | None = None) -> xr.Dataset:
    """Mean squared gradients by size and heterogeneity, their bound, and C*."""
    (H, b), N, E = bowls(config), config.num_clients, config.local_steps
    sizes, scales = config.cohort_sizes, list(config.heterogeneity)
    L = np.linalg.eigvalsh(H).max()
    gamma = config.rate / (L * E)

    curved, centers = jnp.asarray(H, jnp.float32), jnp.asarray(b, jnp.float32)

    def build(heterogeneity: float, C: int) -> Setup:
        task = Bowls(curved, heterogeneity * centers, jnp.asarray(gamma), N, E)
        return Setup(task, fedavg(gamma, local_steps=E, weighted=False), cohort_of(N, C))

    axes: Any = {"heterogeneity": scales, "C": sizes}
    length = config.contacts
    result = train([], build, axes, config, execution, together=["C"], num_rounds=length)
    runs = result.isel(model=0)
    rounds = config.contacts // runs.C
    # Truncate the runs of larger cohorts to R rounds, because all runs of a program have the number
    # of rounds that cohorts of a single client need.
    before = runs.where(runs["round"] < rounds)
    mean, error = estimate(before.squared_gradient.mean("round"))
    # The proof needs G along the path, but only the mean of Z^2 over the rounds.
    G = np.sqrt(before.largest_gradient.max(("round", "seed")).astype(float)).values
    Z = np.sqrt(before.deviation.mean(("round", "seed")).astype(float)).values
    gap = np.array([[_gap(H, scale * b)] for scale in scales])
    problem = Problem(N=N, C=sizes, E=E, L=L, G=G, Z=Z, gap=gap)
    bound = mean.copy(data=cohort_bound(rounds.values, problem, gamma))
    # Take Z from the last C, which is N and includes all clients.
    best = optimal_cohort_size(config.contacts, problem, gamma)[:, -1]
    # A cohort's mean update, as in eq. (27), has the variance Z^2 N / (N - 1) (1 / C - 1 / N).
    variance = Z**2 * N / (N - 1) * (1 / np.array(sizes) - 1 / N)
    found = {"measured": mean, "standard_error": error, "bound": bound}
    found |= {"squared_bound_of_gradients": mean.copy(data=G**2)}
    found |= {"variance_of_updates": mean.copy(data=variance)}
    return xr.Dataset(found | {"optimal_size": ("heterogeneity", best)}, attrs=result.attrs)


def _gap(H: np.ndarray, b: np.ndarray) -> float:
    """``f(x_0) - f*``."""
    start, whole = np.full(b.shape[1], b.shape[1] ** -0.5), H.mean(0)
    away = start - np.linalg.solve(whole, np.einsum("nij,nj->i", H, b) / len(b))
    return float(away @ whole @ away / 2)


def measure(result: xr.Dataset, config: OptimalCohort) -> xr.Dataset:
    """Adds a comparison of C* with the best measured C, by heterogeneity."""
    squares, least = result.measured, result.measured.min("C")
    # Find the size whose ratio to C* is closest to 1, because C* is not an integer.
    nearest = abs(np.log(result.C) - np.log(result.optimal_size)).argmin("C")
    found = {
        "best C": result.C[squares.argmin("C")].drop_vars("C"),
        "C*": result.optimal_size,
        "C* costs": squares.isel(C=nearest).drop_vars("C") / least,
        "best": least,
        "all clients": squares.isel(C=-1, drop=True),
        "one client": squares.isel(C=0, drop=True),
    }
    return result.drop_vars("optimal_size").drop_attrs().assign(found)


def judge(measured: xr.Dataset, config: OptimalCohort) -> Iterator[Ruling | Check]:
    """Checks that the bound holds and that C* is near the best size."""
    some = measured.isel(C=slice(-1))  # all clients have no variance
    size, spread = (
        some[name].max("C") / some[name].min("C")
        for name in ("squared_bound_of_gradients", "variance_of_updates")
    )
    text = f"from C = 1 to {some.C[-1].item()} G^2 changes by a factor of {size.min():.3g} to "
    text += f"{size.max():.3g}, and the variance by {spread.min():.3g} to {spread.max():.3g}"
    tests = [fact(bool((size > 1).any()), text, "G^2 changes")]
    tests += [fact(bool((spread > size).all()), text, "the variance changes more")]
    if some.sizes["C"] > 1:
        yield ruling("variance-the-most", *tests)
    else:
        yield untested("variance-the-most", "there are not two sizes of cohorts below N")
    ratio, cost, best = measured.measured / measured.bound, measured["C* costs"], measured["best C"]
    least = measured.measured - 4 * measured.standard_error
    text = "the bound for cohorts holds for every size and heterogeneity (4 standard errors)"
    found = f"{ratio.min():.2g} to {ratio.max():.2g}, median {ratio.median():.2g}"
    yield check(text, least <= measured.bound, f"measured / bound {found}")
    text = "at constant cost the best cohort is larger where clients differ more (p < 0.05)"
    yield _grow_together(text, measured.heterogeneity, best)
    yield _grow_together("C* grows with the best cohort (p < 0.05)", measured["C*"], best)
    text = "cohorts of C* leave at most twice the squared gradient of the best cohorts"
    evidence = f"{cost.max():.2f} times at most, {cost.median():.2f} in the median"
    yield finding(text, cost <= 2, evidence)


def _grow_together(text: str, a: xr.DataArray, b: xr.DataArray) -> Check:
    """Whether the rank correlation is positive (p < 0.05)."""
    from scipy.stats import spearmanr

    if np.ptp(a.values) == 0 or np.ptp(b.values) == 0:
        return finding(text, False, "one of the two is the same everywhere")
    rho, p = spearmanr(a.values, b.values)
    return finding(text, rho > 0 and p < 0.05, f"rank correlation {rho:.2f}, p = {p:.1g}")


def table(measured: xr.Dataset, config: OptimalCohort) -> Sequence[Table]:
    """One row per heterogeneity."""
    columns = measured.drop_dims("C").data_vars.items()
    contents = {str(name): cells(values, form=".3g") for name, values in columns}
    return [rows(contents, ("heterogeneity",))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: OptimalCohort) -> Figure:
    """Draws the squared gradient of each size relative to the best size's, by heterogeneity."""
    sizes = {"measured best": "best C", "$C^*$, which minimizes the bound": "C*"}
    return heat_map(
        (measured.measured / measured.best).transpose("C", "heterogeneity"),
        {label: measured[name].values for label, name in sizes.items()},
        xlabel="heterogeneity of the clients",
        ylabel="clients in a cohort $C$",
        label="mean squared gradient, relative to the best $C$",
        title=f"Cohorts out of {config.num_clients} clients at {config.contacts} contacts",
        caption=f"Federated quadratics, {config.local_steps} local steps, {config.num_seeds} runs "
        "of each size and heterogeneity.",
    )


ITEMS = (Item("cb-optimal-cohort", OptimalCohort(), run, measure, judge, table, figure),)
"""The map of cohort sizes."""
