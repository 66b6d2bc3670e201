"""Runs experiments and sweeps described by a file."""

import dataclasses
import json
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, overload

import jax
import xarray as xr

from fedjax_mm.base import Params
from fedjax_mm.checks.instances import check_instance
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.overrides import load
from fedjax_mm.sweeps.cluster import (
    Part,
    Piece,
    all_programs,
    by_executor,
    compute_part,
    join_parts,
    runs_of,
)
from fedjax_mm.sweeps.errors import refusing
from fedjax_mm.sweeps.execution import Execution, watched
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.plan import Plan, make_outline
from fedjax_mm.sweeps.sweep import sweep


@overload
def run(
    experiment: Experiment | str | Path,
    execution: Execution | None = None,
    on_divergence: Literal["mark", "stop"] | None = None,
    keep: None = None,
) -> xr.Dataset: ...


@overload
def run(
    experiment: Experiment | str | Path,
    execution: Execution | None = None,
    on_divergence: Literal["mark", "stop"] | None = None,
    *,
    keep: Literal["params"],
) -> tuple[xr.Dataset, list[Params]]: ...


def run(
    experiment: Experiment | str | Path,
    execution: Execution | None = None,
    on_divergence: Literal["mark", "stop"] | None = None,
    keep: Literal["params"] | None = None,
) -> xr.Dataset | tuple[xr.Dataset, list[Params]]:
    """Runs all algorithms, seeds and points of an experiment.

    Args:
      experiment: the experiment, or the path of its TOML file.
      execution: how to run, report, save and resume.
      on_divergence: as in `sweep`; defaults to "mark" if there are several points, else "stop".
      keep: "params" also returns the final parameters, a list with one pytree of arrays
        ``[algorithms, *axes, seeds, ...]`` per model, as in `sweep`.

    Returns:
      A Dataset over ``(algorithm, *axes, seed, round, model)``, as described in `sweep`.

    Raises:
      DivergenceError: if a model's loss or parameters become non-finite and `on_divergence` is
        "stop". The message names the algorithm, the seed, the model and the round.
      ValueError, InterruptedRunError, OSError: as in `sweep`, or if the data are missing.

    Example:
      >>> experiment = Experiment.model_validate({
      ...     "task": {"name": "quadratic"}, "num_models": 2, "num_rounds": 10, "num_seeds": 3,
      ...     "algorithms": {"MFA-RR": {
      ...         "assignment": {"name": "mfa_rr"}, "learning_rate": 0.1, "local_steps": 5}},
      ... })
      >>> dict(run(experiment).sizes)
      {'algorithm': 1, 'seed': 3, 'round': 11, 'model': 2}
      >>> result, params = run(experiment, keep="params")
      >>> params[1].shape  # the second model's: algorithms, seeds, w
      (1, 3, 97)
    """
    how = execution or Execution()
    if isinstance(experiment, str | Path):
        experiment = load(Path(experiment), Experiment)
    check_instance("experiment", experiment, Experiment, "give one, or the path of a TOML file")
    with jax.enable_x64(experiment.precision == "float64"):
        with refusing():
            grid = grid_of(experiment, how.memory)
        end = on_divergence or ("mark" if experiment.axes else "stop")
        if how.executor is None:
            return sweep(grid, how, on_divergence=end, keep=keep)
        # Send only the settings, because data may be large, and each worker can load its own copy.
        there = how._replace(callbacks=(), checkpoints=None, executor=None)
        settings = json.dumps(_given(experiment)), experiment.first_seed
        compute = partial(_part_of_settings, *settings, there, on_divergence=end, keep=keep)
        grid = dataclasses.replace(grid, keep=keep)
        with watched(how) as how:
            dataset, params = by_executor(grid, how, compute)
        return dataset if params is None else (dataset, params)


def _given(experiment: Experiment) -> dict[str, Any]:
    """Returns the explicitly given settings, from which the experiment can be rebuilt."""
    # Omit defaults, because other axis values may select tables without these settings.
    return experiment.model_dump(mode="json", exclude_unset=True)


def _part_of_settings(
    settings: str, first_seed: int, execution: Execution, part: Part, **how: Any
) -> Piece:
    """Computes a part in a worker, given an experiment's settings as JSON."""
    experiment, grid = _grid_of_settings(settings, first_seed, execution.memory)
    with jax.enable_x64(experiment.precision == "float64"):
        return _part_of_grid(experiment, grid, part, execution, **how)


# Cache one grid, because a worker gets many parts of one experiment, and loading data and
# validating axes may take longer than a part.
@lru_cache(1)
def _grid_of_settings(
    settings: str, first_seed: int, memory: float | None
) -> tuple[Experiment, Grid]:
    experiment = Experiment.model_validate(json.loads(settings))
    experiment = experiment.with_seeds(first_seed, experiment.num_seeds)
    with jax.enable_x64(experiment.precision == "float64"), refusing():
        return experiment, grid_of(experiment, memory)


def run_part(
    experiment: Experiment,
    part: Part,
    execution: Execution | None = None,
    on_divergence: Literal["mark", "stop"] | None = None,
    keep: Literal["params"] | None = None,
) -> Piece:
    """Computes a part of an experiment's runs with `compute_part`.

    Args:
      experiment: the experiment.
      part: the part to compute. Other processes or machines may compute the others.
      execution: how to run, report, save and resume.
      on_divergence: as in `run`.
      keep: "params" also keeps the final parameters.

    Raises:
      DivergenceError, ValueError, InterruptedRunError, OSError: as in `run`.
    """
    how = execution or Execution()
    with jax.enable_x64(experiment.precision == "float64"):
        with refusing():
            grid = grid_of(experiment, how.memory)
        return _part_of_grid(experiment, grid, part, how, on_divergence, keep)


def _part_of_grid(
    experiment: Experiment,
    grid: Grid,
    part: Part,
    execution: Execution,
    on_divergence: Literal["mark", "stop"] | None,
    keep: Literal["params"] | None,
) -> Piece:
    grid = dataclasses.replace(grid, keep=keep)
    end = on_divergence or ("mark" if experiment.axes else "stop")
    piece = compute_part(grid, part, execution, on_divergence=end)
    return piece._replace(about={**piece.about, "settings": _given(experiment)})


def join(
    experiment: Experiment, pieces: Iterable[Piece], keep: Literal["params"] | None = None
) -> tuple[xr.Dataset, list[Params] | None]:
    """Joins the results of all parts of an experiment with `join_parts`.

    Raises:
      ValueError, OSError: as in `join_parts`, or if the data are missing.
    """
    with jax.enable_x64(experiment.precision == "float64"):
        return join_parts(dataclasses.replace(grid_of(experiment), keep=keep), pieces)


def outline(
    experiment: Experiment, execution: Execution | None = None, part: Part | None = None
) -> Plan:
    """Returns the plan of `run` by tracing alone: programs, batches and local trainings.

    Args:
      experiment: the experiment.
      execution: how the experiment would be run.
      part: the part that would be computed; defaults to all parts.

    Raises:
      ValueError, OSError: as in `run`, except that a batch that does not fit in memory is found
        only by compiling.
    """
    how = execution or Execution()
    with jax.enable_x64(experiment.precision == "float64"):
        with refusing():
            grid = grid_of(experiment, how.memory)
            programs = None
            if part is not None:
                programs = [program for _, program in runs_of(all_programs(grid, how.memory), part)]
                if not programs:
                    raise ValueError(f"part {part} has no runs; take fewer parts")
        return make_outline(grid, split=how.split, limit=how.memory, programs=programs)
