"""Computes a grid locally or on an executor, and labels its result."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import xarray as xr

from fedjax_mm.base import Params
from fedjax_mm.checks.annotations import checked
from fedjax_mm.sweeps.cluster import by_executor
from fedjax_mm.sweeps.execute import carry_out, plan_for
from fedjax_mm.sweeps.execution import Execution, watched
from fedjax_mm.sweeps.grid import Grid, Setup


@overload
def sweep(
    what: Grid | Setup | Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]] | Execution | None = None,
    *,
    execution: Execution | None = None,
    on_divergence: Literal["mark", "stop"] = "mark",
    keep: None = None,
    **settings: Any,
) -> xr.Dataset: ...


@overload
def sweep(
    what: Grid | Setup | Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]] | Execution | None = None,
    *,
    execution: Execution | None = None,
    on_divergence: Literal["mark", "stop"] = "mark",
    keep: Literal["params"],
    **settings: Any,
) -> tuple[xr.Dataset, list[Params]]: ...


@checked
def sweep(
    what: Grid | Setup | Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]] | Execution | None = None,
    *,
    execution: Execution | None = None,
    on_divergence: Literal["mark", "stop"] = "mark",
    keep: Literal["params"] | None = None,
    **settings: Any,
) -> xr.Dataset | tuple[xr.Dataset, list[Params]]:
    """Simulates every point of a grid with every seed, in one compiled program per structure.

    Replicas of a program run on all devices, in batches that fit in memory. The last batch is
    padded, so that nothing is compiled twice.

    Args:
      what: the runs, as a `Grid`; or only its `build`, with axes and further settings of `Grid`.
      axes: names and values, unless there is a `Grid`; see there. After a `Grid`, the execution.
      execution: the devices, memory, callbacks and checkpoints of the sweep, or an executor that
        computes its parts elsewhere. A terminal or a notebook shows progress after two seconds,
        unless the execution has ``progress=False``.
      on_divergence: "mark" a run whose loss or parameters become non-finite and continue with the
        others, or "stop" the sweep.
      keep: "params" also returns the final parameters, as a list with one pytree of arrays
        ``[*axes, seeds, ...]`` per model, in the order of the tasks. With a target, they are the
        parameters at the record that met it. Parameters of unused models are NaN, or 0 if they are
        not floats.
      **settings: settings of `Grid`, such as `num_rounds` and `num_seeds`.

    Returns:
      A Dataset over ``(*axes, "seed", "round", "model")`` with the variables of `to_dataset`, and
      ``diverged``, the first recorded round in which a model was not finite, or -1. With a target
      it also has ``ended``, the first recorded round that met the target, or -1. If the number of
      models varies, unused models have NaN metrics and zero counts, so that sums over models are
      correct. The attribute ``manifest`` holds versions, devices, seed, axes, and the wall time of
      compiling and running.

    Raises:
      ValueError: if the grid is invalid, does not fit in memory, or differs from the unfinished
        run.
      DivergenceError: if a model diverged and `on_divergence` is "stop".
      InterruptedRunError: on SIGINT or SIGTERM, with checkpoints or while a multi-process run
        compiles.
      OSError: if a checkpoint cannot be written.
      ChildProcessError: if the workers of an executor died; see `compute_parts`.

    Example:
      >>> from fedjax_mm import fedavg, mfa_rand, mfa_rr, sweep
      >>> from fedjax_mm.sweeps import Setup
      >>> from fedjax_mm.tasks import quadratic
      >>> def build(assignment, num_models, learning_rate):
      ...     algorithm = fedavg(learning_rate, local_steps=5)
      ...     return Setup(quadratic(24, 4, mu=2e-4), algorithm, assignment(24, num_models))
      >>> axes = {
      ...     "assignment": [mfa_rand, mfa_rr], "num_models": [2], "learning_rate": [0.05, 0.1]}
      >>> result = sweep(build, axes, num_rounds=20, num_seeds=3)
      >>> result.sel(assignment="mfa_rr", learning_rate=0.1).isel(round=-1).excess_loss.dims
      ('num_models', 'seed', 'model')
      >>> result, params = sweep(build, axes, num_rounds=20, num_seeds=3, keep="params")
      >>> params[0].shape  # assignments, numbers of models, rates, seeds, w
      (2, 1, 2, 3, 97)
      >>> one = Setup(quadratic(24, 4, mu=2e-4), fedavg(0.1, local_steps=5), mfa_rr(24, 2))
      >>> axes = {"algorithm.local_steps": [1, 5], "assignment.cohort_size": [12, 24]}
      >>> dict(sweep(one, axes, num_rounds=20).sizes)
      {'local_steps': 2, 'cohort_size': 2, 'seed': 1, 'round': 21, 'model': 2}
    """
    if isinstance(axes, Execution):
        axes, execution = None, axes
    if isinstance(what, Grid) and (axes is not None or settings):
        given = ", ".join(["axes"] * (axes is not None) + [*settings])
        raise TypeError(f"{given} cannot change a Grid; give its build and axes to sweep, instead")
    if not isinstance(what, Grid):
        if "num_rounds" not in settings:
            raise TypeError(
                "num_rounds is missing; give it, as in sweep(build, axes, num_rounds=20)"
            )
        what = Grid(what, {} if axes is None else axes, **settings)
    grid, how = what, execution or Execution()
    if keep is not None and keep != grid.keep:
        grid = dataclasses.replace(grid, keep=keep)
    with watched(how) as how:
        if how.executor is None:
            dataset, params = carry_out(plan_for(grid, how), how, on_divergence=on_divergence)
        else:
            dataset, params = by_executor(grid, how, on_divergence)
    return dataset if params is None else (dataset, params)
