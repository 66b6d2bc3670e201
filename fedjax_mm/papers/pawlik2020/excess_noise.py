"""The excess noise of cohorts, section 5.4, beside the loss that cohorts cost in one round."""

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure
from pydantic import Field

from fedjax_mm import plots
from fedjax_mm.base import Scalar
from fedjax_mm.experiments.fields import Config, Count, Positive, Seed
from fedjax_mm.papers.claims import Claim, claim
from fedjax_mm.papers.compute import compute
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.tables import Table, cells, rows
from fedjax_mm.sweeps.execute import Execution
from fedjax_mm.tasks.quadratic import Quadratic, Vector, quadratic
from fedjax_mm.theory.cohorts import excess_noise_27, excess_noise_28
from fedjax_mm.theory.constants import exact_constants

Updates: TypeAlias = Float[Array, "clients dim"]
"""G_i, the sums of the clients' gradients in the round."""


class CohortNoise(Config):
    """Settings of one round of the quadratic from a random start, by cohorts of every size."""

    num_clients: Annotated[Count, Field(ge=2)] = 24
    block_size: Count = 4
    mu: Positive = 0.05
    local_steps: Count = 5
    learning_rate: Positive = 0.1
    num_seeds: Annotated[Count, Field(ge=2)] = 20_000
    """Cohorts drawn of each size."""
    seed: Seed = 0


def run(config: CohortNoise, execution: Execution | None = None) -> xr.Dataset:
    """Returns eqs. (27) and (28), the variance of the cohort's mean, and the loss it costs."""
    with jax.enable_x64(True):
        task = quadratic(config.num_clients, config.block_size, mu=config.mu)
        start_key, draw_key = jax.random.split(jax.random.key(config.seed))
        params = jax.random.normal(start_key, (task.dim,))
        updates, gamma = _updates(task, params, config), config.learning_rate
        L = float(exact_constants(task).L.value)
        keys = jax.random.split(draw_key, config.num_seeds)
    sizes = np.arange(1, config.num_clients + 1)
    coords = {"C": sizes, "statistic": ["mean", "standard_error"]}
    arguments = keys, task, params, updates, gamma
    found = compute(_moments, arguments, coords, "statistic C", {}, seed=config.seed)
    found["measured"] = L / 2 * gamma**2 * found.measured
    found["equation_27"] = "C", excess_noise_27(updates, sizes, gamma, L)
    found["equation_28"] = "C", excess_noise_28(updates, sizes, gamma, L)
    return found


def _updates(task: Quadratic, params: Vector, config: CohortNoise) -> Updates:
    """Returns G_i, the sum of a client's gradients over its local steps."""

    def step(local: Array, _: None) -> tuple[Array, Array]:
        gradients = jax.vmap(jax.grad(task.loss))(local, jnp.arange(config.num_clients))
        return local - config.learning_rate * gradients, gradients

    start = jnp.broadcast_to(params, (config.num_clients, task.dim))
    return lax.scan(step, start, length=config.local_steps)[1].sum(0)


def _moments(
    keys: PRNGKeyArray, task: Quadratic, params: Vector, updates: Updates, learning_rate: Scalar
) -> dict[str, Float[Array, "2 sizes"]]:
    """Returns means and standard errors of two numbers, over drawn cohorts of every size.

    The first number is the squared distance of the cohort's mean update from that of all clients,
    the second one by how much the step with the former leaves a larger loss.
    """
    mean = updates.mean(0)
    sizes = jnp.arange(1, len(updates) + 1)[:, None]

    def excess(step: Array) -> Array:
        nothing_drawn = jax.random.key(0)
        return task.metrics(nothing_drawn, params - learning_rate * step)["excess_loss"]

    def add(sums: Array, key: PRNGKeyArray) -> tuple[Array, None]:
        order = jax.random.permutation(key, len(updates))
        # The first C of a random order are a cohort without replacement: one order, all sizes.
        cohorts = jnp.cumsum((updates - mean)[order], axis=0) / sizes
        cohorts = cohorts.at[-1].set(0.0)  # all clients, without round-off
        costs = jax.vmap(excess)(mean + cohorts) - excess(mean)
        values = jnp.stack([jnp.sum(cohorts**2, axis=1), costs])
        return sums + jnp.stack([values, values**2]), None

    # A vmap over the draws would hold the cohorts of all of them at once; a scan only adds.
    sums, _ = lax.scan(add, jnp.zeros((2, 2, len(updates))), keys)
    average, square = sums / len(keys)
    error = jnp.sqrt(jnp.maximum(square - average**2, 0) / len(keys))
    squares, costs = jnp.stack([average, error], axis=1)
    return {"measured": squares, "loss": costs}


def measure(result: xr.Dataset, config: CohortNoise) -> xr.Dataset:
    """Returns the same numbers, and eq. (27) for equal updates and for parallel ones."""
    lengths = np.stack([np.ones(config.num_clients), np.arange(1.0, config.num_clients + 1)])
    noise = excess_noise_27(lengths[..., None] * np.ones(3), 1, config.learning_rate, 1.0)
    return result.drop_attrs().assign(equal_and_parallel=("updates", noise))


def claims(measured: xr.Dataset, config: CohortNoise) -> Iterator[Claim]:
    """The two forms agree, with each other and with the measured cohorts; one remark is wrong."""
    first, second = measured.equation_27, measured.equation_28
    apart = (abs(first - second).max() / first.max()).item()
    yield claim("eqs. (27) and (28) are equal", apart < 1e-12, f"largest difference {apart:.1e}")
    everybody, (equal, parallel) = first.values[-1], measured.equal_and_parallel.values
    text = "the excess noise is 0 where a cohort is all clients, and for equal updates"
    evidence = f"at C = N {everybody:.1e}, equal updates {equal:.1e}"
    yield claim(text, everybody == 0 and abs(equal) < 1e-12, evidence)
    some = measured.isel(C=slice(-1))  # C < N
    (variance, error), (cost, cost_error), noise = some.measured, some.loss, some.equation_27
    sigmas, share = abs(variance - noise) / error, cost / noise
    text = "it is L/2 gamma^2 times the variance of the cohort's mean (4 standard errors)"
    evidence = f"{config.num_seeds:,} cohorts of each size, off by {sigmas.max():.1f} at most"
    yield claim(text, sigmas < 4, evidence)
    text = "the loss that cohorts cost in one round is not above it (4 standard errors)"
    evidence = f"cost / excess noise {share.min():.3f} to {share.max():.3f}"
    yield claim(text, cost - 4 * cost_error <= noise, evidence)
    text = "the excess noise is 0 for parallel updates"
    evidence = f"updates (1, 2, ..., N) v have {parallel:.3g} at C = 1: they must be equal"
    yield claim(text, abs(parallel) < 1e-12, evidence)


def table(measured: xr.Dataset, config: CohortNoise) -> Sequence[Table]:
    """Returns a row for each of at most eight sizes."""
    sizes = np.unique(np.geomspace(1, config.num_clients, 8).round().astype(int))
    some = measured.sel(C=sizes)
    contents = {
        "eq. (27)": cells(some.equation_27, form=".6g"),
        "eq. (28)": cells(some.equation_28, form=".6g"),
        "measured": cells(some.measured[0], some.measured[1], form=".4g"),
        "loss that it costs": cells(some.loss[0], some.loss[1], form=".4g"),
    }
    return [rows(contents, ("C",))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: CohortNoise) -> Figure:
    """Draws the excess noise against the cohort size."""
    some = measured.isel(C=slice(-1))  # for C = N all is 0, which has no logarithm
    lines = [
        *plots.lines(some.equation_27, label="equation (27)"),
        *plots.lines(*some.measured, label="measured"),
        *plots.lines(*some.loss, label="loss that cohorts cost"),
    ]
    xlabel, ylabel = "clients in a cohort $C$", "excess noise"
    panel = plots.Panel("one round", xlabel, ylabel, lines, scale="log")
    title = f"Cohorts of {config.num_clients} clients, quadratic, E = {config.local_steps}"
    caption = f"Means and standard errors of {config.num_seeds:,} cohorts of each size."
    return plots.draw([[panel]], title=title, caption=caption)


_page = CohortNoise(), run, measure, claims, table, figure

ITEMS = (
    Item("theory-cohort-noise", "The excess noise of cohorts beside measured cohorts", *_page),
)
"""Equations (27) and (28)."""
