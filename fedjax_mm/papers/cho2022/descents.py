"""What the figures of mean estimation in Cho et al. have in common: draws, solved and timed."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import lax
from pydantic import Field

from fedjax_mm.experiments.tasks import Config, Count, Positive, Seed
from fedjax_mm.theory.minimize import local_minimum
from fedjax_mm.papers.old import Claim
from fedjax_mm.results.dataset import manifest
from fedjax_mm.results.metrics import standard_error
from fedjax_mm.tasks.mean_estimation import (
    OBJECTIVES,
    MeanEstimation,
    Objective,
    draw_means,
    mean_estimation,
)
from fedjax_mm.theory.minimize import local_minimum


class Draws(Config):
    """What the figures over draws of the empirical means have in common."""

    gamma: Positive = 1.0
    """The standard deviation of the empirical means."""
    num_seeds: Annotated[Count, Field(ge=2)] = 10_000
    """Draws of the empirical means."""
    seed: Seed = 0


class Descent(NamedTuple):
    """Where a descent of an objective ended.

    Attributes:
      point: the model w.
      nearest: the client whose own model is nearest.
      displacement: w minus that model, to the last digits of its own size.
      satisfied: ``bool[clients]``, whether f_k(w) < rho_k.
      gradient: of the objective.
      converged: whether that is a local minimum.
    """

    point: Any
    nearest: Any
    displacement: Any
    satisfied: Any
    gradient: Any
    converged: Any


def descend(objective: Objective, task: MeanEstimation, start: Any) -> Descent:
    """The local minimum downhill from the start.

    For distant clients it is next to a client's own model, e^-80 beside it for gamma_G^2 = 20. Were
    it rounded to that model the client would count as unsatisfied, whereas it is satisfied if the
    minimum lies on the side of its true mean: hence the second search, relative to that model.
    """
    rough = local_minimum(partial(objective, task), start)
    nearest = jnp.argmin(jnp.abs(task.empirical_means - rough.point))
    origin = task.empirical_means[nearest]
    moved = task.relative_to(origin)
    found = local_minimum(partial(objective, moved), rough.point - origin, scale=0.0)
    return Descent(
        origin + found.point,
        nearest,
        found.point,
        moved.satisfied(found.point),
        found.gradient,
        rough.converged & found.converged,
    )


def descend_all(task: MeanEstimation, start: Any) -> Descent:
    """Where every objective's descent ends; ``[objectives]`` in front."""
    each = [descend(objective, task, start) for objective in OBJECTIVES.values()]
    ends: Descent = jax.tree.map(lambda *values: jnp.stack(values), *each)
    return ends


def solve_draws(points: Sequence[Sequence[float]], dim: str, config: Draws) -> xr.Dataset:
    """The local minimum of every objective, in every draw, at several true means.

    One compiled program: the draws of a point are vmapped, the points follow one another. A draw
    depends on the seed, its number and the point's only.

    Args:
      points: true means of the clients.
      dim: the name of the points' dimension.
      config: how many draws, and their spread.

    Returns:
      A Dataset over ``(dim, draw, objective, client)`` with a manifest: the fields of `Descent`,
      the point as ``solution``, and ``empirical_mean``.
    """

    def solve(true_means: Any, gamma: Any, rng_key: Any) -> dict[str, Any]:
        draw_key, start_key = (jax.random.fold_in(rng_key, i) for i in range(2))
        task = mean_estimation(true_means, draw_means(draw_key, true_means, gamma))
        values = descend_all(task, task.init(start_key))._asdict()
        return {"solution": values.pop("point"), "empirical_mean": task.empirical_means} | values

    def program(points: Any, gamma: Any, rng_key: Any) -> dict[str, Any]:
        def at(numbered: Any) -> dict[str, Any]:
            number, true_means = numbered
            keys = fold_in_all(jax.random.fold_in(rng_key, number), jnp.arange(config.num_seeds))
            return jax.vmap(solve, (None, None, 0))(true_means, gamma, keys)

        return lax.map(at, (jnp.arange(len(points)), points))

    fold_in_all = jax.vmap(jax.random.fold_in, (None, 0))
    with jax.enable_x64(True):
        key = jax.random.key(config.seed)
        values, seconds = timed(program, jnp.asarray(points, float), jnp.asarray(config.gamma), key)
    dims: dict[str, tuple[str, ...]] = dict.fromkeys(values, (dim, "draw", "objective"))
    dims |= {"satisfied": (dim, "draw", "objective", "client")}
    dims |= {"empirical_mean": (dim, "draw", "client")}
    values["nearest"] = values["nearest"].astype(np.int32) + 1
    coords = {"objective": list(OBJECTIVES), "client": np.arange(1, len(points[0]) + 1)}
    dataset = xr.Dataset({name: (dims[name], each) for name, each in values.items()}, coords)
    dataset.attrs["manifest"] = about(config, seconds, seed=config.seed)
    return dataset


def timed(program: Callable[..., Any], *arguments: Any) -> tuple[Any, dict[str, float]]:
    """What a program returns, on the host; and the seconds of its compilation and of its run."""
    start = time.perf_counter()
    compiled = jax.jit(program).lower(*arguments).compile()
    ready = time.perf_counter()
    values = jax.device_get(compiled(*arguments))
    return values, {"compile": ready - start, "run": time.perf_counter() - ready}


def about(config: Config, seconds: dict[str, float], *, seed: int = 0) -> dict[str, Any]:
    """The manifest."""
    origin = manifest(config.model_dump(mode="json"), seed=seed, data="synthetic")
    return origin | {"wall_seconds": seconds}


def mean_and_error(values: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray]:
    """The mean over draws and its standard error."""
    values = values.astype(float)
    mean = values.mean("draw")
    return mean, mean.copy(data=standard_error(values.values, axis=values.dims.index("draw")))


def convergence(dataset: xr.Dataset) -> tuple[dict[str, Any], Claim]:
    """How many descents found a minimum, and how well: reported, and to be seen if they do not."""
    converged = dataset.converged.values
    steepest = float(np.abs(dataset.gradient.values).max())
    numbers = {"descents": converged.size, "converged": converged.sum(), "gradient": steepest}
    text = (
        f"{converged.sum():,} of {converged.size:,} descents converged, largest gradient at the "
        f"end {steepest:.1e}"
    )
    return numbers, Claim("A local minimum is found in every draw", bool(converged.all()), text)
