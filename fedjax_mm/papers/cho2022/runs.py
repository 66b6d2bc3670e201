"""Cho et al., section 5: methods at the best points of the paper's grid, on the same clients.

Points are chosen on separate seeds, because the best of many points looks better than it is on
the seeds that chose it.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import numpy as np
import xarray as xr
from jax import lax

from fedjax_mm.assignments.appealing import appealing
from fedjax_mm.assignments.partitions import full_participation, mfa_rand
from fedjax_mm.base import Padded
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.methods import Byzantine
from fedjax_mm.papers.cho2022 import clients
from fedjax_mm.papers.cho2022.grid import POINT, Comparison, Point, lists_of
from fedjax_mm.papers.cho2022.mechanism import Watched
from fedjax_mm.papers.sequential import staged
from fedjax_mm.sweeps.devices import layout
from fedjax_mm.sweeps.errors import RefusedError
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Grid, Setup
from fedjax_mm.sweeps.sweep import sweep
from fedjax_mm.tasks.classification import Classification
from fedjax_mm.tasks.requirements import OwnModels, Tuning, own_models, requiring

SCORES = ("accuracy", "appeal", "unseen_accuracy", "unseen_appeal")
"""Metrics kept for all points of the grid. The first one chooses the point."""

_scored: dict[str, xr.Dataset] = {}  # cached per process, because batches of seeds share points


class Clients(NamedTuple):
    """The clients of several draws.

    Attributes:
      data: a stack of draws.
      own: the quality of the clients' own models, ``[numbers of steps, rates, draws, clients]``.
      is_flipped: ``bool[draws, clients]``.
      seconds: the duration of the warm-up.
    """

    data: FederatedData
    own: OwnModels
    is_flipped: np.ndarray
    seconds: float


def run_comparison(config: Comparison, execution: Execution | None = None) -> xr.Dataset:
    """Runs every method at its point with every seed, where the seed determines the clients.

    Returns a Dataset over ``(algorithm, byzantine, warm_up_steps, demand_rate, seed, round)``, with
    the points as coordinates of the algorithms. If points were chosen, `SCORES` of all candidates
    are included as ``selection_...`` over ``(candidate, selection_seed)``.
    """
    how = execution or Execution()
    scores = select(config, how)
    points = {name: config.candidates(name)[0] for name in config.methods}
    points |= best_points(scores, config)
    drawn = functools.cache(functools.partial(draw, config, how))  # only if a result is missing

    def judge(alone: Any, saving: Execution) -> xr.Dataset:
        return run_grid(alone, drawn(), saving)

    parts: list[xr.Dataset] = []
    for name, point in points.items():
        part = staged(f"judged-{len(parts)}", config.at(name, point), how, judge)
        parts.append(part)
    about, took = parts[0].attrs["manifest"], [each.attrs["manifest"] for each in parts]
    seconds = {
        key: sum(each["wall_seconds"][key] for each in took) for key in about["wall_seconds"]
    }
    seconds["warm_up"] = drawn().seconds if drawn.cache_info().currsize else 0.0
    seconds["selection"] = scores.attrs.get("seconds", 0.0)
    names = xr.IndexVariable("algorithm", list(points))
    alone = [part.isel(dict.fromkeys(POINT, 0)).drop_vars("algorithm") for part in parts]
    # Pass coords="all", because xarray would otherwise drop this dimension from a coordinate that
    # is equal for all methods.
    result = xr.concat(alone, names, coords="all", combine_attrs="override")
    result = result.merge(scores.drop_attrs())
    return result.assign_attrs(manifest=about | {"wall_seconds": seconds})


def select(config: Comparison, execution: Execution) -> xr.Dataset:
    """Returns the final `SCORES` of all candidates on the selection seeds, NaN if diverged.

    The result is empty if there is nothing to choose. Equal settings are computed once per process.
    """
    grid = config.selection
    if grid is None:
        return xr.Dataset()

    def scores(grid: Any, saving: Execution) -> xr.Dataset:
        drawn = draw(grid, saving)
        result = run_grid(grid, drawn, saving)
        end = result.isel(round=-1, byzantine=0, warm_up_steps=0, demand_rate=0, drop=True)
        end = end[[*SCORES]].where(end["diverged"] < 0).broadcast_like(end["accuracy"])
        flat = end.stack(candidate=POINT, create_index=False).rename(seed="selection_seed")
        flat = flat.rename({name: f"candidate_{name}" for name in (*POINT, "algorithm")})
        flat = flat.rename({name: f"selection_{name}" for name in SCORES})
        about = result.attrs["manifest"]
        seconds = sum(about["wall_seconds"].values()) + drawn.seconds
        about = about | {"wall_seconds": {"selection": seconds}}
        return flat.assign_attrs(manifest=about, seconds=seconds)

    key = grid.model_dump_json()
    if key not in _scored:
        _scored[key] = staged("selection", grid, execution, scores)
    return _scored[key]


def best_points(scores: xr.Dataset, config: Comparison) -> dict[str, Point]:
    """Returns each method's point with the highest final test accuracy, or appeal.

    Scores are averaged over seen clients and selection seeds. Ties in appeal are broken by
    accuracy, and then by order. A point at which a seed diverged is chosen only if all points
    diverged.

    Args:
      scores: the result of `select`, possibly empty.
      config: the settings.
    """
    found: dict[str, Point] = {}
    if config.selection is None:
        return found
    for name, place in best_candidates(scores, config.chosen_by).items():
        best = scores.isel(candidate=place)
        at = {key: best[f"candidate_{key}"].item() for key in POINT}
        variant = config.variants[at.pop("variant")][1]
        own = lists_of(config.selection.methods[name])
        found[name] = Point(**at, own={key: variant[key] for key in own})
    return found


def best_candidates(scores: xr.Dataset, chosen_by: str) -> dict[str, int]:
    """Returns the place of each method's best candidate; see `best_points`."""
    # Replace the NaN of a diverged seed with a value below any score.
    means = scores.mean("selection_seed", skipna=False).fillna(-1.0)
    first, second = (means[f"selection_{name}"].values for name in (chosen_by, SCORES[0]))
    names = means["candidate_algorithm"].values
    return {
        name: max(np.flatnonzero(names == name).tolist(), key=lambda i: (first[i], second[i]))
        for name in dict.fromkeys(names.tolist())
    }


def draw(config: Comparison, execution: Execution) -> Clients:
    """Draws the clients of every seed and trains their own models."""
    who: dict[str, Any] = {"flipped": config.flipped, "seeds": config.data_seeds}
    source = config.dataset, config.directory, config.population
    try:
        data = clients.draw_clients(*source, partition=config.partition, flips=config.flips, **who)
    except ValueError as error:
        # Reject the settings, because the files have too few examples for the number of clients.
        raise RefusedError(str(error)) from error
    # Record the training time of own models, because the later sweep's manifest omits it.
    clock = time.perf_counter()
    own = warm_up(config, data, execution)
    flags = clients.flipped_flags(config.population, **who)
    return Clients(data, own, flags, time.perf_counter() - clock)


def run_grid(config: Comparison, drawn: Clients, execution: Execution | None = None) -> xr.Dataset:
    """Runs every variant at every point with every seed: ``(*config.axes, seed, round)``."""
    largest = largest_batches(config.batch_sizes)
    data = drawn.data
    grid = Grid(
        _builder(config, drawn),
        config.axes,
        num_rounds=config.num_rounds,
        **config.replicas,
        # Order the axes so that replicas of equal length run at the same time.
        together=["batch_size", "local_steps"],
        cost=lambda local_steps, batch_size, **_: local_steps * largest[batch_size],
        record_every=math.gcd(config.record_every, config.num_rounds),
        data=data.kind,
    )
    result = sweep(grid, execution)
    result.attrs["manifest"] |= {
        "config": config.model_dump(mode="json"),
        "datasets": [data.name],
        "population": config.population._asdict(),
    }
    names = [config.variants[label][0] for label in result["variant"].values]
    return result.isel(model=0, drop=True).assign_coords(algorithm=("variant", names))


def largest_batches(sizes: Sequence[int]) -> dict[int, int]:
    """Maps batch sizes to numbers of array rows, at most two of them, with the least padding.

    Example:
      >>> largest_batches([32, 64, 128])
      {32: 64, 64: 64, 128: 128}
    """
    ordered = sorted(set(sizes))
    cuts = [(ordered[:i], ordered[i:]) for i in range(len(ordered))]
    parts = min(cuts, key=lambda cut: sum(len(part) * max(part) for part in cut if part))
    return {size: max(part) for part in parts for size in part}


def _builder(config: Comparison, drawn: Clients) -> Callable[..., Setup]:
    """Returns a function that builds the simulation of a point and a seed."""
    population, largest = config.population, largest_batches(config.batch_sizes)
    num_clients, cohort_size = population.num_clients, population.cohort_size
    if config.appealing_from is None:
        assignment = mfa_rand(num_clients, 1, cohort_size=cohort_size)
    else:
        # Make all clients candidates, because `appealing` samples from the clients that stay.
        everybody, first = full_participation(num_clients), config.appealing_from
        assignment = appealing(everybody, cohort_size=cohort_size, from_round=first)

    @functools.cache
    def drawn_for(draw: int) -> tuple[Classification, Any]:
        mine = drawn.data.select(draw)
        task = clients.classifier(mine, dropout_rate=config.dropout_rate)
        return task, jax.jit(functools.partial(_start, config))(task, draw)

    def build(seed: int, **point: Any) -> Setup:
        draw, rate, rows = seed - config.first_seed, point["learning_rate"], point["batch_size"]
        task: Any
        task, start = drawn_for(draw)
        # Pad batches only if there are several sizes, because a single size needs no padding.
        size = largest[rows]
        if list(largest.values()).count(size) == 1:
            rows = None
        local = {
            "learning_rate": rate,
            "local_steps": point["local_steps"],
            "batch_size": size if rows is None else Padded(size, rows),
        }
        algorithm = config.algorithm(point["variant"], local)
        tuning = None
        if config.tuning_steps:
            tuning = Tuning(rate, config.tuning_steps, size, rows)
        demand_of = config.requirement
        place = (
            demand_of.num_steps.index(point["warm_up_steps"]),
            demand_of.learning_rates.index(point["demand_rate"]),
            draw,
        )
        mine = jax.tree.map(itemgetter(place), drawn.own)
        demand: dict[str, Any] = {"tuning": tuning, "participation": config.stays_by}
        task = requiring(task, mine, num_unseen=population.num_unseen, **demand)
        if any(config.byzantine):
            harm: dict[str, Any] = {"loss_factor": config.loss_factor, "noise": config.noise}
            attack = Byzantine(fraction=point["byzantine"], stays=config.attackers_stay, **harm)
            task = attack.on_tasks(num_clients)(task)
            algorithm = attack.wrap(algorithm, num_clients)
        task = Watched(task, task.num_clients, drawn.is_flipped[draw])
        return Setup(task, algorithm, assignment, start)

    return build


def warm_up(config: Comparison, data: FederatedData, execution: Execution | None) -> OwnModels:
    """Returns every client's own model, ``[numbers of steps, rates, draws, clients]``.

    The models start from the same parameters as all methods and do not depend on the method.
    """
    demand, num_draws = config.requirement, config.num_seeds
    kinds = (demand.num_steps, demand.learning_rates, range(num_draws))
    mesh = [each.ravel() for each in np.meshgrid(*kinds, indexing="ij")]
    number = len(mesh[0])
    if execution:
        execution.report(f"warm-up of {number} x {data.num_clients} clients")
    where = layout(number)
    # Repeat the first replicas on the last device, so that all devices have the same number.
    numbers = [np.resize(each, where.padded(number)) for each in mesh]
    types = (np.int32, np.float32, np.int32)
    each = where.put(tuple(x.astype(t) for x, t in zip(numbers, types, strict=True)), 0)

    def of_device(numbers: Any, data: FederatedData) -> OwnModels:
        def of_replica(numbers: Any) -> OwnModels:
            steps, rate, draw = numbers
            task = clients.classifier(data.select(draw), dropout_rate=config.dropout_rate)
            how = {"num_steps": steps, "learning_rate": rate, "batch_size": demand.batch_size}
            return own_models(_key(config, draw), task, _start(config, task, draw), **how)

        # Train sequentially, because `own_models` already trains many clients in parallel.
        return lax.map(of_replica, numbers)

    found = where.fetch(jax.jit(where.over(of_device, (0, None)))(each, where.put(data, None)))
    shape = (*map(len, kinds), -1)
    own: OwnModels = jax.tree.map(lambda x: np.asarray(x)[:number].reshape(shape), found)
    return own


def _key(config: Comparison, draw: Any) -> Any:
    return jax.random.fold_in(jax.random.key(config.seed), config.first_seed + draw)


def _start(config: Comparison, task: Classification, draw: Any) -> Any:
    """Returns the initial parameters shared by all methods and the clients' own models."""
    return task.init(jax.random.fold_in(_key(config, draw), 1))
