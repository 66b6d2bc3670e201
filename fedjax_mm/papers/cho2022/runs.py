"""Cho et al., section 5: methods at the best points of the paper's grid, on the same clients.

Points are chosen on separate seeds, because the best of many points looks better than it is on
the seeds that chose it.
"""

import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, PRNGKeyArray

from fedjax_mm.assignments.appealing import appealing
from fedjax_mm.assignments.partitions import full_participation, mfa_rand
from fedjax_mm.base import Padded, Params
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.methods import Byzantine
from fedjax_mm.papers.cho2022 import clients
from fedjax_mm.papers.cho2022.grid import POINT, Comparison, Point, lists_of
from fedjax_mm.papers.cho2022.mechanism import Watched
from fedjax_mm.papers.selection import best_point, searched
from fedjax_mm.papers.training import described, stages, train
from fedjax_mm.sweeps.errors import RefusedError
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.requirements import OwnModels, Tuning, own_models, requiring
from fedjax_mm.tasks.supervised import Supervised

SCORES = ("accuracy", "appeal", "unseen_accuracy", "unseen_appeal")
"""Metrics kept for all points of the grid. The first one chooses the point."""


class Clients(NamedTuple):
    """The clients of one draw.

    Attributes:
      task: the task, without thresholds.
      start: the initial parameters of all methods and of the clients' own models.
      own: the quality of the clients' own models, by number of steps and learning rate.
      is_flipped: ``bool[clients]``.
    """

    task: Supervised
    start: Params
    own: Mapping[tuple[int, float], OwnModels]
    is_flipped: Array


class Drawn(NamedTuple):
    """The clients of several draws.

    Attributes:
      data: a stack of draws.
      clients: the clients of each draw.
      seconds: the duration of the warm-up.
    """

    data: FederatedData
    clients: Sequence[Clients]
    seconds: float


def run_comparison(config: Comparison, execution: Execution | None = None) -> xr.Dataset:
    """Runs every method at its point with every seed, where the seed determines the clients.

    Returns a Dataset over ``(algorithm, byzantine, warm_up_steps, demand_rate, seed, round)``, with
    the points as coordinates of the algorithms. If points were chosen, `SCORES` of all candidates
    are included as ``selection_...`` over ``(candidate, selection_seed)``.
    """
    how = execution or Execution()
    scores = select(config, how)
    points = best_points(scores, config)
    alone = config.judging(points)
    anybody = next(iter(alone.values()))  # all have the same clients
    drawn = functools.cache(functools.partial(draw, anybody, how))  # only if a result is missing

    def judge(alone: Any, saving: Execution) -> xr.Dataset:
        return run_grid(alone, drawn(), saving)

    parts = stages("judged", alone, how, judge)
    seconds = {
        "warm_up": drawn().seconds if drawn.cache_info().currsize else 0.0,
        "selection": scores.attrs.get("seconds", 0.0),
    }
    first = dict.fromkeys(POINT, 0)
    at_best = [part.isel(first).drop_vars("algorithm") for part in parts.values()]
    # Pass coords="all", because xarray would otherwise drop this dimension from a coordinate that
    # is equal for all methods.
    names = xr.IndexVariable("algorithm", list(points))
    result = xr.concat(at_best, names, coords="all", combine_attrs="override")
    result = described(result.merge(scores.drop_attrs()), list(parts.values()))
    about = result.attrs["manifest"]
    return result.assign_attrs(manifest=about | {"wall_seconds": about["wall_seconds"] | seconds})


def select(config: Comparison, execution: Execution) -> xr.Dataset:
    """The final `SCORES` of all candidates on the selection seeds, NaN if diverged.

    The result is empty if there is nothing to choose.
    """

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

    grid = config.selecting
    return searched(grid, execution, scores) if grid.methods else xr.Dataset()


def best_points(scores: xr.Dataset, config: Comparison) -> dict[str, Point]:
    """Each method's point, given or with the highest final test accuracy, or appeal.

    Scores are averaged over seen clients and selection seeds. Ties in appeal are broken by
    accuracy, and then by order. A point at which a seed diverged is chosen only if all points
    diverged.

    Args:
      scores: the result of `select`, possibly empty.
      config: the settings.
    """
    best = best_candidates(scores, config.chosen_by)
    found = {}
    for name, own in config.methods.items():
        if (point := config.only(name)) is None:
            here = best.sel(algorithm=name)
            at = {key: here[f"candidate_{key}"].item() for key in POINT}
            variant = config.variants[at.pop("variant")][1]
            point = Point(**at, own={key: variant[key] for key in lists_of(own)})
        found[name] = point
    return found


def best_candidates(scores: xr.Dataset, chosen_by: str) -> xr.Dataset:
    """The scores and the point of each method's best candidate, see `best_points`."""
    if not scores:
        return scores
    names = scores["candidate_algorithm"].values
    methods = list(dict.fromkeys(names.tolist()))
    best = []
    for name in methods:
        mine = scores.isel(candidate=names == name)
        first, second = (
            mine[f"selection_{score}"].rename(selection_seed="seed")
            for score in (chosen_by, SCORES[0])
        )
        best.append(mine.isel(best_point(first, ["candidate"], second)))
    index = xr.IndexVariable("algorithm", methods)
    return xr.concat(best, index, data_vars="all", coords="all")


def draw(config: Comparison, execution: Execution) -> Drawn:
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
    number = config.num_seeds * len(config.demands)
    execution.report(f"warm-up of {number} x {data.num_clients} clients")
    flags, each = jnp.asarray(clients.flipped_flags(config.population, **who)), list[Clients]()
    for place, is_flipped in enumerate(flags):
        mine = data.select(place)
        task = clients.classifier(mine, dropout_rate=config.dropout_rate)
        key = jax.random.fold_in(jax.random.key(config.seed), config.first_seed + place)
        start = _start(key, task)
        each.append(Clients(task, start, warm_up(config, key, task, start), is_flipped))
    return Drawn(data, each, time.perf_counter() - clock)


@jax.jit
def _start(rng_key: PRNGKeyArray, task: Supervised) -> Params:
    return task.init(jax.random.fold_in(rng_key, 1))


_own_models = jax.jit(own_models, static_argnames="batch_size")


def warm_up(
    config: Comparison, rng_key: PRNGKeyArray, task: Supervised, start: Params
) -> dict[tuple[int, float], OwnModels]:
    """The quality of the clients' own models, by number of steps and learning rate."""
    size = config.requirement.batch_size
    # Pass arrays, so that all numbers of steps share a compiled program.
    return {
        (steps, rate): jax.device_get(
            _own_models(
                rng_key,
                task,
                start,
                num_steps=np.int32(steps),
                learning_rate=np.float32(rate),
                batch_size=size,
            )
        )
        for steps, rate in config.demands
    }


def run_grid(config: Comparison, drawn: Drawn, execution: Execution | None = None) -> xr.Dataset:
    """Runs every variant at every point with every seed: ``(*config.axes, seed, round)``."""
    largest = largest_batches(config.batch_sizes)
    result = train(
        [drawn.data],
        functools.partial(_setup, config, drawn.clients),
        config.axes,
        config,
        execution,
        num_rounds=config.num_rounds,
        # Order the axes so that replicas of equal length run at the same time.
        together=["batch_size", "local_steps"],
        cost=lambda local_steps, batch_size, **_: local_steps * largest[batch_size],
        record_every=math.gcd(config.record_every, config.num_rounds),
    )
    result.attrs["manifest"] |= {"population": config.population._asdict()}
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


def _setup(
    config: Comparison,
    drawn: Sequence[Clients],
    *,
    variant: str,
    byzantine: float,
    warm_up_steps: int,
    demand_rate: float | Literal["training"],
    learning_rate: float,
    local_steps: int,
    batch_size: int,
    seed: int,
) -> Setup:
    """Sets up a variant at a point, on the clients of a seed."""
    mine, who = drawn[seed - config.first_seed], config.population
    largest = largest_batches(config.batch_sizes)
    # Pad batches only if there are several sizes, because a single size needs no padding.
    size = largest[batch_size]
    rows = batch_size if list(largest.values()).count(size) > 1 else None
    local = {
        "learning_rate": learning_rate,
        "local_steps": local_steps,
        "batch_size": size if rows is None else Padded(size, rows),
    }
    algorithm = config.algorithm(variant, local)
    tuning = None
    if config.tuning_steps:
        tuning = Tuning(learning_rate, config.tuning_steps, size, rows)
    demand: dict[str, Any] = {"tuning": tuning, "participation": config.stays_by}
    rate = learning_rate if demand_rate == "training" else demand_rate
    own = mine.own[warm_up_steps, rate]
    task: Any = requiring(mine.task, own, num_unseen=who.num_unseen, **demand)
    if any(config.byzantine):
        harm: dict[str, Any] = {"loss_factor": config.loss_factor, "noise": config.noise}
        attack = Byzantine(fraction=byzantine, stays=config.attackers_stay, **harm)
        task = attack.on_tasks(who.num_clients)(task)
        algorithm = attack.wrap(algorithm, who.num_clients)
    task = Watched(task, task.num_clients, mine.is_flipped)
    assignment = mfa_rand(who.num_clients, 1, cohort_size=who.cohort_size)
    if config.appealing_from is not None:
        # Make all clients candidates, because `appealing` samples from the clients that stay.
        everybody, first = full_participation(who.num_clients), config.appealing_from
        assignment = appealing(everybody, cohort_size=who.cohort_size, from_round=first)
    return Setup(task, algorithm, assignment, mine.start)
