"""Mean estimation in appendix A: local minima over many draws, for Figures 5, 6 and 8."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import lax

from fedjax_mm import plots
from fedjax_mm.experiments.fields import Config, Positive, Seed, TwoOrMore
from fedjax_mm.papers.compute import compute
from fedjax_mm.papers.rulings import check
from fedjax_mm.papers.schema import Check
from fedjax_mm.tasks.mean_estimation import OBJECTIVES, MeanEstimation, draw_means, mean_estimation
from fedjax_mm.tasks.minimize import local_minimum

_BEYOND = 2.0  # distance by which a range of models extends beyond the clients' own models


class Draws(Config):
    """Settings of figures over draws of the empirical means with standard deviation gamma."""

    gamma: Positive = 1.0
    num_seeds: TwoOrMore = 10_000
    seed: Seed = 0


def descend(objective: Callable[..., Any], task: MeanEstimation, start: Any) -> dict[str, Any]:
    """The local minimum that gradient descent reaches from the start.

    ``solution`` is the model w, ``nearest`` is the client whose own model is nearest,
    ``displacement`` is w minus that model, accurate relative to its own magnitude, ``satisfied``
    is whether f_k(w) < rho_k for each client, and ``gradient`` is the objective's gradient.
    """
    rough = local_minimum(partial(objective, task), start)
    nearest = jnp.argmin(jnp.abs(task.empirical_means - rough.point))
    # Search again relative to the nearest client's own model. If clients are far apart, a minimum
    # lies very close to that model, e^-80 away for gamma_G^2 = 20. The side on which it lies
    # decides whether that client is satisfied, so it must not be rounded to the model itself, where
    # no client would be satisfied.
    origin = task.empirical_means[nearest]
    moved = task.relative_to(origin)
    found = local_minimum(partial(objective, moved), rough.point - origin, scale=0.0)
    return {
        "solution": origin + found.point,
        "nearest": nearest.astype(jnp.int32) + 1,
        "displacement": found.point,
        "satisfied": moved.satisfied(found.point),
        "gradient": found.gradient,
        "converged": rough.converged & found.converged,
    }


def descend_all(task: MeanEstimation, start: Any) -> dict[str, Any]:
    """The minima of all objectives, with a leading axis ``[objectives]``."""
    each = [descend(objective, task, start) for objective in OBJECTIVES.values()]
    minima: dict[str, Any] = jax.tree.map(lambda *values: jnp.stack(values), *each)
    return minima | {"empirical_mean": task.empirical_means}


def pair(gamma_hat: Any) -> MeanEstimation:
    """A task of two clients whose own models are -gamma_hat and gamma_hat."""
    means = gamma_hat * jnp.array([-1.0, 1.0])
    return mean_estimation(means, means)


def across(gamma_hat: Sequence[float], num: int) -> jax.Array:
    """Evenly spaced models between and beyond the own models of the clients in `pair`."""
    reach = max(gamma_hat) + _BEYOND
    return jnp.linspace(-reach, reach, num)


def solve_draws(points: Sequence[Sequence[float]], dim: str, config: Draws) -> xr.Dataset:
    """The local minimum of every objective, in every draw, for several true means.

    A draw depends only on the seed, the number of the draw, and the number of the point.

    Args:
      points: the clients' true means.
      dim: the name of the points' dimension.
      config: the number and the spread of draws.

    Returns:
      A Dataset over ``(dim, draw, objective, client)`` with a manifest, which contains the values
      of `descend` and ``empirical_mean``.
    """

    def program(points: Any, gamma: Any, rng_key: Any) -> dict[str, Any]:
        def at(numbered: Any) -> dict[str, Any]:
            number, true_means = numbered

            def solve(draw: Any) -> dict[str, Any]:
                key = jax.random.fold_in(jax.random.fold_in(rng_key, number), draw)
                draw_key, start_key = (jax.random.fold_in(key, i) for i in range(2))
                task = mean_estimation(true_means, draw_means(draw_key, true_means, gamma))
                return descend_all(task, task.init(start_key))

            return jax.vmap(solve)(jnp.arange(config.num_seeds))

        # Use lax.map instead of vmap, because vmap would hold all points in memory at once.
        return lax.map(at, (jnp.arange(len(points)), points))

    with jax.enable_x64(True):
        key = jax.random.key(config.seed)
        arguments = (jnp.asarray(points, float), jnp.asarray(config.gamma), key)
    coords = {"objective": list(OBJECTIVES), "client": np.arange(1, len(points[0]) + 1)}
    over = f"{dim} draw objective"
    dims = {"satisfied": f"{over} client", "empirical_mean": f"{dim} draw client"}
    return compute(program, arguments, coords, over, dims, seed=config.seed)


def convergence(result: xr.Dataset) -> dict[str, Any]:
    """The number of descents that found a minimum, and the largest final gradient."""
    found = {"descents": result.converged.size, "converged": result.converged.sum()}
    return found | ({"gradient": abs(result.gradient).max()} if "gradient" in result else {})


def all_converged(text: str, measured: xr.Dataset) -> Check:
    """Checks that every descent found a minimum."""
    evidence = f"{measured.converged:,d} of {measured.descents:,d} descents converged"
    if "gradient" in measured:
        evidence += f", largest gradient at the end {measured.gradient:.1e}"
    return check(text, measured.converged == measured.descents, evidence)


def objectives(result: xr.Dataset) -> plots.Panel:
    """Draws MaxFL's objective over w, for every gamma_hat."""
    curves = plots.lines(result.objective.rename(gamma_hat=r"$\hat\gamma_G$"), style="-")
    return plots.Panel("MaxFL's objective", "model $w$", "objective", curves)
