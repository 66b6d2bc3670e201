"""Pawlik, section 5.4: the excess noise of cohorts beside what cohorts do to the loss."""

import time
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure
from pydantic import Field

from fedjax_mm.experiments.tasks import Config, Count, Positive, Seed
from fedjax_mm.papers.old import Claim, Judgement, Reproduction
from fedjax_mm.results import plots
from fedjax_mm.results.dataset import manifest
from fedjax_mm.sweeps.execute import Execution
from fedjax_mm.tasks.quadratic import Quadratic, quadratic
from fedjax_mm.theory.cohorts import excess_noise_27, excess_noise_28
from fedjax_mm.theory.constants import exact_constants


class CohortNoise(Config):
    """Settings: one round of the quadratic from a random start, by cohorts of every size."""

    num_clients: Annotated[Count, Field(ge=2)] = 24
    block_size: Count = 4
    mu: Positive = 0.05
    local_steps: Count = 5
    learning_rate: Positive = 0.1
    num_seeds: Annotated[Count, Field(ge=2)] = 20_000
    """Cohorts drawn of each size."""
    seed: Seed = 0


def run_noise(config: CohortNoise, execution: Execution | None = None) -> xr.Dataset:
    """Eqs. (27) and (28), the measured variance of the cohort's mean, and the loss it costs."""
    del execution  # it takes a second
    began = time.perf_counter()
    with jax.enable_x64(True):
        task = quadratic(config.num_clients, config.block_size, mu=config.mu)
        start_key, draw_key = jax.random.split(jax.random.key(config.seed))
        params = jax.random.normal(start_key, (task.dim,))
        updates = _updates(task, params, config)
        smoothness = float(exact_constants(task).L.value)
        keys = jax.random.split(draw_key, config.num_seeds)
        arguments = keys, task, params, updates, config.learning_rate
        program = jax.jit(_moments).lower(*arguments).compile()
        middle = time.perf_counter()
        squares, costs = map(np.asarray, program(*arguments))
    G, sizes = np.asarray(updates), np.arange(1, config.num_clients + 1)
    scale = smoothness / 2 * config.learning_rate**2
    dataset = xr.Dataset(
        {
            "equation_27": ("C", excess_noise_27(G, sizes, config.learning_rate, smoothness)),
            "equation_28": ("C", excess_noise_28(G, sizes, config.learning_rate, smoothness)),
            "measured": (("statistic", "C"), scale * squares),
            "loss": (("statistic", "C"), costs),
        },
        {"C": sizes, "statistic": ["mean", "standard_error"]},
    )
    seconds = {"compile": middle - began, "run": time.perf_counter() - middle}
    about = manifest(config.model_dump(), seed=config.seed, data="synthetic")
    return dataset.assign_attrs(manifest=about | {"wall_seconds": seconds})


def _updates(
    task: Quadratic, params: Float[Array, " dim"], config: CohortNoise
) -> Float[Array, "clients dim"]:
    """G_i, the sum of a client's gradients over its local steps."""

    def of_client(client: Array) -> Array:
        def step(local: Array, _: None) -> tuple[Array, Array]:
            gradient = jax.grad(task.loss)(local, client)
            return local - config.learning_rate * gradient, gradient

        return lax.scan(step, params, length=config.local_steps)[1].sum(0)

    return jax.vmap(of_client)(jnp.arange(config.num_clients))


def _moments(
    keys: PRNGKeyArray,
    task: Quadratic,
    params: Float[Array, " dim"],
    updates: Float[Array, "clients dim"],
    learning_rate: float,
) -> tuple[Float[Array, "2 sizes"], Float[Array, "2 sizes"]]:
    """Over cohorts of every size: means and standard errors of two numbers.

    They are the squared distance of the cohort's mean update from that of all clients, and by how
    much the step with the former leaves a larger loss than that with the latter.
    """
    mean = updates.mean(0)
    sizes = jnp.arange(1, len(updates) + 1)[:, None]

    def excess(step: Array) -> Array:
        nothing_drawn = jax.random.key(0)
        return task.metrics(nothing_drawn, params - learning_rate * step)["excess_loss"]

    def of_draw(key: PRNGKeyArray) -> tuple[Array, Array]:
        order = jax.random.permutation(key, len(updates))
        # The first C of a random order are a cohort without replacement, for every C at once.
        cohorts = jnp.cumsum((updates - mean)[order], axis=0) / sizes
        cohorts = cohorts.at[-1].set(0.0)  # all clients, without round-off
        costs = jax.vmap(excess)(mean + cohorts) - excess(mean)
        return jnp.sum(cohorts**2, axis=1), costs

    def add(sums: Array, key: PRNGKeyArray) -> tuple[Array, None]:
        values = jnp.stack(of_draw(key))
        return sums + jnp.stack([values, values**2]), None

    sums, _ = lax.scan(add, jnp.zeros((2, 2, len(updates))), keys)
    average, square = sums / len(keys)
    error = jnp.sqrt(jnp.maximum(square - average**2, 0) / len(keys))
    return jnp.stack([average[0], error[0]]), jnp.stack([average[1], error[1]])


def judge_noise(dataset: xr.Dataset, config: CohortNoise) -> Judgement:
    """Whether the two forms agree, with each other and with what was measured."""
    first, second = dataset.equation_27.values, dataset.equation_28.values
    measured, error = dataset.measured.values
    costs, cost_error = dataset.loss.values
    some = slice(None, -1)  # C < N
    apart = np.abs(first - second).max() / first.max()
    sigmas = np.abs(measured - first)[some] / error[some]
    share = costs[some] / first[some]
    slack = (costs - 4 * cost_error - first)[some].max()
    equal = np.ones((config.num_clients, 3))
    parallel = np.arange(1.0, config.num_clients + 1)[:, None] * equal
    of_equal, of_parallel = (
        excess_noise_27(updates, 1, config.learning_rate, 1.0).item()
        for updates in (equal, parallel)
    )
    claims = (
        Claim("eqs. (27) and (28) are equal", apart < 1e-12, f"largest difference {apart:.1e}"),
        Claim(
            "the excess noise is 0 where a cohort is all clients, and for equal updates",
            first[-1] == 0 and abs(of_equal) < 1e-12,
            f"at C = N {first[-1]:.1e}, equal updates {of_equal:.1e}",
        ),
        Claim(
            "it is L/2 gamma^2 times the variance of the cohort's mean (4 standard errors)",
            bool(sigmas.max() < 4),
            f"{config.num_seeds:,} cohorts of each size, off by {sigmas.max():.1f} at most",
        ),
        Claim(
            "the loss that cohorts cost in one round is not above it (4 standard errors)",
            bool(slack <= 0),
            f"cost / excess noise {share.min():.3f} to {share.max():.3f}",
        ),
        Claim(
            "the excess noise is 0 for parallel updates",
            abs(of_parallel) < 1e-12,
            f"updates (1, 2, ..., N) v have {of_parallel:.3g} at C = 1: they must be equal",
        ),
    )
    rows = [
        (
            str(size),
            f"{first[i]:.6g}",
            f"{second[i]:.6g}",
            f"{measured[i]:.6g} ± {error[i]:.1g}",
            f"{costs[i]:.4g} ± {cost_error[i]:.1g}",
        )
        for i, size in enumerate(dataset.C.values)
        if size in {*np.geomspace(1, config.num_clients, 8).round().astype(int)}
    ]
    header = ("C", "eq. (27)", "eq. (28)", "measured", "loss that it costs")
    numbers = {name: dataset[name].values for name in ("equation_27", "equation_28")}
    numbers |= {"measured": measured, "standard_error": error, "loss": costs}
    return Judgement(numbers | {"C": dataset.C.values}, claims, (header, *rows))


def plot_noise(dataset: xr.Dataset, config: CohortNoise, judgement: Judgement) -> Figure:
    """The excess noise against the cohort size."""
    series = {
        "equation (27)": dataset.equation_27.values,
        "measured": dataset.measured.values[0],
        "loss that cohorts cost": dataset.loss.values[0],
    }
    nothing = np.zeros(dataset.sizes["C"])
    errors = [nothing, dataset.measured.values[1], dataset.loss.values[1]]
    coords = {"panel": ["one round"], "what": list(series), "C": dataset.C.values}
    values, bars = (
        xr.DataArray([list(some)], coords, ("panel", "what", "C")).isel(C=slice(-1))
        for some in (series.values(), errors)
    )
    return plots.lines_with_errors(
        values,
        bars,
        x="C",
        series="what",
        panel="panel",
        series_label="{}",
        xlabel="clients in a cohort $C$",
        ylabel="excess noise",
        title=f"Cohorts of {config.num_clients} clients, quadratic, E = {config.local_steps}",
        caption=" ".join(
            f"{'Holds' if claim.holds else 'DOES NOT HOLD'}: {claim.claim}."
            for claim in judgement.claims
        ),
        scales=("linear", "log"),
    )


REPRODUCTIONS = (
    Reproduction(
        id="theory-cohort-noise",
        paper={
            "statement": "eqs. (27) and (28): L/2 gamma^2 / (N-1) (1/C - 1/N) E[sum |G_i|^2 - N "
            "|G_bar|^2]; the text says that it is 0 when all gradients are parallel",
            "open": ["the paper draws no curve; one round of the quadratic is measured here"],
        },
        config=CohortNoise(),
        run=run_noise,
        judge=judge_noise,
        plot=plot_noise,
    ),
)
"""What section 5.4 proves."""
