"""The excess noise of cohorts (section 5.4), and the loss due to cohorts in one round."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.base import Assignment, Cohort, Scalar
from fedjax_mm.claims import Evidence, fact, near
from fedjax_mm.experiments.fields import Config, Count, Positive, Seed, TwoOrMore
from fedjax_mm.papers.compute import compute
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import Ruling, check, ruling
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, rows
from fedjax_mm.results.labels import describe
from fedjax_mm.simulator.simulate import params_of, simulate
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.tasks.quadratic import Quadratic, Vector, quadratic
from fedjax_mm.theory import cohorts as equations
from fedjax_mm.theory.constants import exact_constants

_NEAR = 0.05  # allowed difference, relative to the equation
_ROUND_OFF = 1e-12
_SPREADS = (0.01, 1.0, 100.0)  # factors of the distances between clients' minimizers

Updates: TypeAlias = Float[Array, "clients dim"]
"""The sums G_i of each client's gradients in the round."""


class CohortNoise(Config):
    """Settings of one round on the quadratic from a random start, for cohorts of every size."""

    num_clients: TwoOrMore = 24
    block_size: Count = 4
    mu: Positive = 0.05
    local_steps: Count = 5
    learning_rate: Positive = 0.1
    num_seeds: TwoOrMore = 20_000
    """The number of cohorts drawn for each size."""
    seed: Seed = 0


def run(config: CohortNoise, execution: Execution | None = None) -> xr.Dataset:
    """Eqs. (25) to (28), and the squared steps, noise and excess loss of drawn cohorts."""
    with jax.enable_x64(True):
        task = quadratic(config.num_clients, config.block_size, mu=config.mu)
        start_key, draw_key = jax.random.split(jax.random.key(config.seed))
        params = jax.random.normal(start_key, (task.dim,))
        everybody, gamma = jnp.arange(config.num_clients), config.learning_rate
        updates = _updates(task, params, config, everybody)
        L = float(exact_constants(task).L.value)
        keys = jax.random.split(draw_key, config.num_seeds)
    sizes = np.arange(1, config.num_clients + 1)
    coords = {"C": sizes, "statistic": ["mean", "standard_error"]}
    arguments = keys, task, params, updates, gamma
    found = compute(_moments, arguments, coords, "statistic C", {}, seed=config.seed)
    found["measured"] = L / 2 * gamma**2 * found.measured
    found["step"] = gamma**2 * found.step
    found["equation_25"] = "C", equations.squared_step_25(updates, sizes, gamma)
    found["equation_26"] = "C", equations.squared_step_26(updates, sizes, gamma)
    found["equation_27"] = "C", equations.excess_noise_27(updates, sizes, gamma, L)
    found["equation_28"] = "C", equations.excess_noise_28(updates, sizes, gamma, L)
    with jax.enable_x64(True):
        order = jax.random.permutation(draw_key, config.num_clients)
        simulated = _simulated(task, params, order, config)
        equal = _updates(task, params, config, jnp.zeros_like(everybody))
        apart = _steps(equal, order, gamma) + gamma * equal.mean(0)
        found["only_cohort"] = (
            "C",
            np.abs(simulated - params - _steps(updates, order, gamma)).max(1),
        )
        found["equal_data"] = "C", np.abs(apart).max(1)
    return found


def _updates(task: Quadratic, params: Vector, config: CohortNoise, data: Array) -> Updates:
    """G_i, the sum of each client's gradients over its local steps.

    The array `data` has the number of the client whose data each client has.
    """

    def step(local: Array, _: None) -> tuple[Array, Array]:
        gradients = jax.vmap(jax.grad(task.loss))(local, data)
        return local - config.learning_rate * gradients, gradients

    start = jnp.broadcast_to(params, (config.num_clients, task.dim))
    return lax.scan(step, start, length=config.local_steps)[1].sum(0)


def _steps(updates: Updates, order: Array, learning_rate: float) -> Float[Array, "sizes dim"]:
    """The server's steps for the first C clients in order, for every C."""
    sizes = jnp.arange(1, len(updates) + 1)[:, None]
    return -learning_rate * jnp.cumsum(updates[order], axis=0) / sizes


def _simulated(
    task: Quadratic, params: Vector, order: Array, config: CohortNoise
) -> Float[Array, "sizes dim"]:
    """FedAvg's model after a round in which only the first C clients train."""
    algorithm = fedavg(config.learning_rate, local_steps=config.local_steps)
    places = jnp.arange(config.num_clients)

    def model(C: Scalar) -> Vector:
        cohort = Cohort.of_rows(jnp.where(places < C, order, -1)[None])
        first = Assignment(
            len(order), 1, lambda key, look: (), lambda key, t, state, look: (cohort, state)
        )
        return params_of(simulate(0, task, algorithm, first, 1, params=params)[0])[0]

    return jax.jit(jax.vmap(model))(places + 1)


def _moments(
    keys: PRNGKeyArray, task: Quadratic, params: Vector, updates: Updates, learning_rate: Scalar
) -> dict[str, Float[Array, "2 sizes"]]:
    """Means and standard errors of three quantities, over drawn cohorts of every size.

    They are the squared distance between the mean updates of the cohort and of all clients, the
    excess loss after the cohort's step, and the squared norm of the cohort's mean update.
    """
    mean = updates.mean(0)
    sizes = jnp.arange(1, len(updates) + 1)[:, None]

    def excess(step: Array) -> Array:
        nothing_drawn = jax.random.key(0)
        return task.metrics(nothing_drawn, params - learning_rate * step)["excess_loss"]

    def add(sums: Array, key: PRNGKeyArray) -> tuple[Array, None]:
        order = jax.random.permutation(key, len(updates))
        # Use one order for all sizes, because its first C clients are a draw without replacement.
        cohorts = jnp.cumsum((updates - mean)[order], axis=0) / sizes
        cohorts = cohorts.at[-1].set(0.0)  # exactly 0 for all clients
        costs = jax.vmap(excess)(mean + cohorts) - excess(mean)
        squares = (jnp.sum(x**2, axis=1) for x in (cohorts, mean + cohorts))
        excess_square, square = squares
        values = jnp.stack([excess_square, costs, square])
        return sums + jnp.stack([values, values**2]), None

    # Use a scan, because a vmap over the draws would hold all cohorts in memory at once.
    sums, _ = lax.scan(add, jnp.zeros((2, 3, len(updates))), keys)
    average, square = sums / len(keys)
    error = jnp.sqrt(jnp.maximum(square - average**2, 0) / len(keys))
    squares, costs, steps = jnp.stack([average, error], axis=1)
    return {"measured": squares, "loss": costs, "step": steps}


def measure(result: xr.Dataset, config: CohortNoise) -> xr.Dataset:
    """Adds eq. (27) at C = 1 for selected updates of N clients."""
    N, line = config.num_clients, np.ones(3)
    rng = np.random.default_rng(config.seed)
    scattered = rng.normal(size=(N, 5))
    towards = [scattered + pull * np.eye(5)[0] for pull in (0, 1, 4)]
    alike = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in towards]
    # Use gradients of squared losses on the data 0 and 2, or 1 and 1, which have equal means.
    data = np.where(np.arange(N)[:, None] % 2, [[0.0, 2.0]], [[1.0, 1.0]])
    cases = {
        "equal": np.ones((N, 1)) * line,
        "parallel": np.arange(1.0, N + 1)[:, None] * line,
        "unequal data of equal means": (3.0 - data).mean(1, keepdims=True) * line,
        "scattered": alike[0],
        "rather similar": alike[1],
        "similar": alike[2],
        "similar, doubled": 2 * alike[2],
        "similar, half of them turned round": alike[2] * np.where(np.arange(N) % 2, 1, -1)[:, None],
    }
    noise = [
        equations.excess_noise_27(each, 1, config.learning_rate, 1.0) for each in cases.values()
    ]
    chosen = xr.DataArray(noise, {"updates": list(cases)})
    centres = rng.normal(size=(N, 5))
    centres -= centres.mean(0)  # the stationary point of the mean loss
    models = {"at the stationary point": 0 * np.eye(5)[0], "at a distance of 1": np.eye(5)[0]}
    cosines = [[_cosine(x - spread * centres) for spread in _SPREADS] for x in models.values()]
    similar = xr.DataArray(cosines, {"model": list(models), "spread": list(_SPREADS)})
    return result.drop_attrs().assign(chosen=chosen, similar=similar)


def _cosine(gradients: np.ndarray) -> float:
    """The mean cosine between the gradients of two different clients."""
    unit, size = gradients / np.linalg.norm(gradients, axis=1, keepdims=True), len(gradients)
    return float((np.sum(unit.sum(0) ** 2) - size) / (size * (size - 1)))


def judge(measured: xr.Dataset, config: CohortNoise) -> Iterator[Ruling | Check]:
    """Rules on the equations, using measured cohorts, and on the conclusions drawn from them."""
    some, noise = measured.isel(C=slice(-1)), measured.equation_27  # C < N
    yield ruling("squared-step", _follows(some.step, some.equation_25, config))
    yield ruling("excess-noise", _follows(some.measured, some.equation_27, config))
    pairs = [("25", "26"), ("27", "28")]
    found = [_equal(*(measured[f"equation_{name}"] for name in pair)) for pair in pairs]
    yield ruling("two-forms", *found)
    yield ruling("inclusion", _inclusion(6))
    everybody = noise.values[-1]
    yield ruling("all-clients", fact(everybody == 0, f"{everybody:.1e} at C = N"))
    falls = some.measured.sel(statistic="mean").diff("C")
    evidence = f"from {some.measured[0, 0]:.3g} at C = 1 to {some.measured[0, -1]:.3g} at C = N - 1"
    yield ruling("smaller-cohorts", fact(bool((falls < 0).all()), evidence))
    yield from _chosen(measured.chosen)
    only, equal = (float(measured[name].max()) for name in ("only_cohort", "equal_data"))
    text = f"models differ by at most {only:.1e} for every C"
    yield ruling("all-clients-train", fact(only < _ROUND_OFF, text))
    text = f"models of all C differ by at most {equal:.1e}"
    yield ruling("identical-data", fact(equal < _ROUND_OFF, text))
    similar = measured.similar.isel(model=0)
    text = f"mean cosines for spreads of {', '.join(f'{x:g}' for x in similar.spread.values)}: "
    falls = float(-similar.diff("spread").max()) > _ROUND_OFF
    yield ruling("indicator", fact(falls, text + describe(measured.similar, form=".4f")))
    cost, cost_error = some.loss
    share = cost / some.equation_27
    text = "the loss due to cohorts in one round is at most the excess noise (4 standard errors)"
    evidence = f"cost / excess noise {share.min():.3f} to {share.max():.3f}"
    yield check(text, cost - 4 * cost_error <= some.equation_27, evidence)


def _follows(measured: xr.DataArray, equation: xr.DataArray, config: CohortNoise) -> list[Evidence]:
    """Tests whether measured means are within 5 % of an equation, at the worst size."""
    mean, error = (measured.sel(statistic=name, drop=True) for name in measured.statistic.values)
    apart = mean / equation - 1
    beyond = (abs(apart) - _NEAR) * equation / error
    worst = {"C": int(np.argmax(beyond.values))}
    text = f"{config.num_seeds:,} cohorts of each size, off by at most {abs(apart).max():.2%}"
    text += f"; {100 * apart[worst].item():+.2f} ± {(error / equation)[worst].item():.2%}"
    text += f" at C = {apart.C[worst].item()}"
    return [
        near(text, apart[worst].item(), _NEAR, (error / equation)[worst].item(), tests=len(apart))
    ]


def _equal(first: xr.DataArray, second: xr.DataArray) -> list[Evidence]:
    """Rules, as a fact, on whether two forms are equal up to rounding."""
    apart = (abs(first - second).max() / abs(first).max()).item()
    numbers = " and ".join(str(each.name).replace("equation_", "") for each in (first, second))
    return fact(apart < _ROUND_OFF, f"largest difference {apart:.1e}", f"eqs. {numbers}")


def _inclusion(num_clients: int) -> list[Evidence]:
    """Counts how often one client, and a pair of clients, occur in all possible cohorts."""
    apart = 0.0
    for size in range(1, num_clients + 1):
        cohorts = np.array(list(combinations(range(num_clients), size)))
        first, second = ((cohorts == client).any(1) for client in (0, 1))
        both = size * (size - 1) / (num_clients * (num_clients - 1))
        apart = max(
            apart, abs(first.mean() - size / num_clients), abs((first & second).mean() - both)
        )
    text = f"in all cohorts of {num_clients} clients, largest difference {apart:.1e}"
    return fact(apart < _ROUND_OFF, text)


def _chosen(noise: xr.DataArray) -> Iterator[Ruling]:
    """Rules on the remarks about equal, parallel and similar updates."""
    values = dict(zip(noise.updates.values.tolist(), noise.values.tolist(), strict=True))
    equal, other = values["equal"], values["unequal data of equal means"]
    parallel = values["parallel"]
    yield ruling("equal-updates", fact(abs(equal) < _ROUND_OFF, f"{equal:.1e}"))
    text = (
        f"{other:.1e} where half of the clients have data 0 and 2, half 1 and 1, of a squared loss"
    )
    yield ruling("only-equal-data", fact(abs(other) >= _ROUND_OFF, text))
    text = f"updates v, 2 v, ..., N v have {parallel:.3g} at C = 1: they must be equal"
    yield ruling("parallel-updates", fact(abs(parallel) < _ROUND_OFF, text))
    order = [values[name] for name in ("scattered", "rather similar", "similar")]
    text = f"of updates of norm 1 drawn the more alike, {', '.join(f'{x:.3g}' for x in order)}"
    yield ruling("similar-directions", fact(order == sorted(order, reverse=True), text))


def table(measured: xr.Dataset, config: CohortNoise) -> Sequence[Table]:
    """One row for each of at most eight sizes."""
    sizes = np.unique(np.geomspace(1, config.num_clients, 8).round().astype(int))
    some = measured.sel(C=sizes)
    contents = {
        "eq. (27)": cells(some.equation_27, form=".6g"),
        "eq. (28)": cells(some.equation_28, form=".6g"),
        "measured": cells(some.measured[0], some.measured[1], form=".4g"),
        "eq. (25)": cells(some.equation_25, form=".6g"),
        "squared step": cells(some.step[0], some.step[1], form=".4g"),
        "loss that it costs": cells(some.loss[0], some.loss[1], form=".4g"),
    }
    return [rows(contents, ("C",))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: CohortNoise) -> Figure:
    """Draws the excess noise against the cohort size."""
    some = measured.isel(C=slice(-1))  # for C = N all values are 0, which has no logarithm
    lines = [
        *plots.lines(*some.measured, label="measured noise"),
        *plots.lines(*some.loss, label="measured loss due to cohorts"),
        *plots.lines(some.equation_27, label="noise by equation (27)", style="--", color=6),
    ]
    xlabel, ylabel = "clients in a cohort $C$", "excess noise, excess loss"
    panel = plots.Panel("one round", xlabel, ylabel, lines, scale="log")
    title = f"Cohorts out of {config.num_clients} clients, quadratic, E = {config.local_steps}"
    caption = f"Means and standard errors of {config.num_seeds:,} cohorts of each size."
    return plots.draw([[panel]], title=title, caption=caption)


ITEMS = (Item("theory-cohort-noise", CohortNoise(), run, measure, judge, table, figure),)
"""Equations (25) to (28)."""
