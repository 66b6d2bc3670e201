"""Runs experiments and sweeps described by a file."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import jax
import xarray as xr

from fedjax_mm.base import Params
from fedjax_mm.checks.instances import check_instance
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.overrides import load
from fedjax_mm.experiments.own import allowing_code
from fedjax_mm.sweeps.cluster import by_executor
from fedjax_mm.sweeps.errors import refusing
from fedjax_mm.sweeps.execution import Execution, watched
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.sweep import sweep


@overload
def run(
    experiment: Experiment | str | Path,
    execution: Execution | None = None,
    on_divergence: Literal["mark", "stop"] | None = None,
    keep: None = None,
    *,
    allow_code: bool = False,
) -> xr.Dataset: ...


@overload
def run(
    experiment: Experiment | str | Path,
    execution: Execution | None = None,
    on_divergence: Literal["mark", "stop"] | None = None,
    *,
    keep: Literal["params"],
    allow_code: bool = False,
) -> tuple[xr.Dataset, list[Params]]: ...


def run(
    experiment: Experiment | str | Path,
    execution: Execution | None = None,
    on_divergence: Literal["mark", "stop"] | None = None,
    keep: Literal["params"] | None = None,
    *,
    allow_code: bool = False,
) -> xr.Dataset | tuple[xr.Dataset, list[Params]]:
    """Runs all algorithms, seeds and points of an experiment.

    Args:
      experiment: the experiment, or the path of its TOML file.
      execution: how to run, report, save and resume.
      on_divergence: as in `sweep`; defaults to "mark" if there are several points, else "stop".
      keep: "params" also returns the final parameters, a list with one pytree of arrays
        ``[algorithms, *axes, seeds, ...]`` per model, as in `sweep`.
      allow_code: whether the file may name functions of any module, as in
        ``name = "my_package.tasks:make"``, which are imported and called.

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
        experiment = load(Path(experiment), Experiment, allow_code=allow_code)
    check_instance("experiment", experiment, Experiment, "give one, or the path of a TOML file")
    with gridded(experiment, how.memory, keep) as grid:
        end = on_divergence or experiment.on_divergence
        if how.executor is None:
            return sweep(grid, how, on_divergence=end, keep=keep)
        # Send only the settings, because data may be large, and each worker can load its own copy.
        settings = json.dumps(given(experiment)), experiment.first_seed, experiment.allows_code
        make = partial(_grid_of_settings, *settings, how.memory, keep)
        with watched(how) as how:
            dataset, params = by_executor(grid, how, end, make)
        return dataset if params is None else (dataset, params)


@contextmanager
def gridded(
    experiment: Experiment,
    memory: float | None = None,
    keep: Literal["params"] | None = None,
) -> Iterator[Grid]:
    """Yields the grid of an experiment, in whose precision JAX computes until the exit.

    Raises:
      RefusedError: if data or initial parameters are missing or do not fit.
    """
    with jax.enable_x64(experiment.precision == "float64"):
        with refusing():
            grid = dataclasses.replace(grid_of(experiment, memory), keep=keep)
        yield grid


def given(experiment: Experiment) -> dict[str, Any]:
    """The explicitly given settings, from which the experiment can be rebuilt."""
    # Omit defaults, because other axis values may select tables without these settings.
    return experiment.model_dump(mode="json", exclude_unset=True)


def _grid_of_settings(
    settings: str,
    first_seed: int,
    allow_code: bool,
    memory: float | None,
    keep: Literal["params"] | None,
) -> Grid:
    with allowing_code(allow_code):
        experiment = Experiment.model_validate(json.loads(settings))
    experiment = experiment.with_seeds(first_seed, experiment.num_seeds)
    return dataclasses.replace(grid_of(experiment, memory), keep=keep)
