"""Computes a grid locally or on an executor, and labels its result."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import xarray as xr

from fedjax_mm.base import Params
from fedjax_mm.checks.annotations import checked
from fedjax_mm.sweeps.cluster import Part, by_executor, part_of
from fedjax_mm.sweeps.execute import carry_out, plan_for
from fedjax_mm.sweeps.execution import Execution, watched
from fedjax_mm.sweeps.grid import Grid, Settings, Setup
from fedjax_mm.sweeps.part_files import join_files, parts_in, sweep_part


@overload
def sweep(
    what: Grid | Setup | Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]] | Execution | None = None,
    *,
    execution: Execution | None = None,
    on_divergence: Literal["mark", "stop"] = "mark",
    keep: None = None,
    continue_from: Path | str | None = None,
    part: None = None,
    out: None = None,
    **settings: Unpack[Settings],
) -> xr.Dataset: ...


@overload
def sweep(
    what: Grid | Setup | Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]] | Execution | None = None,
    *,
    execution: Execution | None = None,
    on_divergence: Literal["mark", "stop"] = "mark",
    keep: Literal["params"],
    continue_from: Path | str | None = None,
    part: None = None,
    out: None = None,
    **settings: Unpack[Settings],
) -> tuple[xr.Dataset, list[Params]]: ...


@overload
def sweep(
    what: Grid | Setup | Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]] | Execution | None = None,
    *,
    execution: Execution | None = None,
    on_divergence: Literal["mark", "stop"] = "mark",
    keep: Literal["params"] | None = None,
    continue_from: None = None,
    part: Part | str,
    out: Path | str,
    **settings: Unpack[Settings],
) -> Path: ...


@checked
def sweep(
    what: Grid | Setup | Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]] | Execution | None = None,
    *,
    execution: Execution | None = None,
    on_divergence: Literal["mark", "stop"] = "mark",
    keep: Literal["params"] | None = None,
    continue_from: Path | str | None = None,
    part: Part | str | None = None,
    out: Path | str | None = None,
    **settings: Unpack[Settings],
) -> xr.Dataset | tuple[xr.Dataset, list[Params]] | Path:
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
      continue_from: the directory in which a shorter sweep with otherwise the same arguments kept
        its state by ``Execution(keep_state=True)``. Only the further rounds are computed, and the
        result is bit for bit that of the whole sweep.
      part: the part to compute into a file in `out`, for `merge`: "K/N", `Part`, or "slurm" for
        the task of a Slurm job array. Its unfinished work is saved there too, and continued; so is
        a shorter part whose state was kept.
      out: the directory of the parts.

    Other arguments, such as `num_rounds` and `num_seeds`, are settings of `Grid`.

    Returns:
      A Dataset over ``(*axes, "seed", "round", "model")`` with the variables of `to_dataset`, and
      ``diverged``, the first recorded round in which a model was not finite, or -1. With a target
      it also has ``ended``, the first recorded round that met the target, or -1. If the number of
      models varies, unused models have NaN metrics and zero counts, so that sums over models are
      correct. The attribute ``manifest`` holds versions, devices, seed, axes, and the wall time of
      compiling and running. With `part`, only the path of its file.

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
    grid, how = grid_from(what, axes, keep, settings), execution or Execution()
    if continue_from is not None:
        how = how._replace(continue_from=continue_from)
    if (part is None) != (out is None):
        raise TypeError("give both part and out, as in sweep(..., part='1/4', out='results/mine')")
    if part is not None and (how.executor or how.checkpoints or how.continue_from):
        raise TypeError(
            "part computes one part here, and saves and continues its work in `out`; give "
            "no executor and no checkpoints, nor continue_from"
        )
    with watched(how) as how:
        if part is not None and out is not None:
            chosen = part_of(part) if isinstance(part, str) else part
            return sweep_part(grid, chosen, Path(out), how, on_divergence)
        if how.executor is None:
            dataset, params = carry_out(plan_for(grid, how), how, on_divergence=on_divergence)
        else:
            dataset, params = by_executor(grid, how, on_divergence)
    return dataset if params is None else (dataset, params)


def merge(
    out: Path | str,
    what: Grid | Setup | Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]] | None = None,
    *,
    keep: Literal["params"] | None = None,
    to: Path | str | None = None,
    **settings: Unpack[Settings],
) -> xr.Dataset | tuple[xr.Dataset, list[Params]]:
    """Joins the parts in a directory into the result that `sweep` would have returned.

    Args:
      out: the directory that was given to `sweep` with each part.
      what: the runs, as given to `sweep`; so are `axes`, `keep` and `settings`.
      axes: names and values, unless there is a `Grid`.
      keep: "params" if the parts have parameters.
      to: a file such as ``result.nc``, into which parts are written one by one, so that the result
        need not fit in memory. It is returned as `open_result` opens it, and large ones lazily.

    Other arguments are settings of `Grid`.

    Raises:
      ValueError: if a part is missing or damaged, or belongs to another run or number of parts.

    Example:
      >>> from fedjax_mm import fedavg, mfa_rr, sweep
      >>> from fedjax_mm.sweeps import Setup
      >>> from fedjax_mm.tasks import quadratic
      >>> from tempfile import TemporaryDirectory
      >>> def build(learning_rate):
      ...     algorithm = fedavg(learning_rate, local_steps=5)
      ...     return Setup(quadratic(6, 4, mu=0.1), algorithm, mfa_rr(6, 2))
      >>> grid = Grid(build, {"learning_rate": [0.05, 0.1]}, num_rounds=3, num_seeds=2)
      >>> with TemporaryDirectory() as out:
      ...     files = [sweep(grid, part=part, out=out).name for part in ("1/2", "2/2")]
      ...     dict(merge(out, grid).sizes)
      {'learning_rate': 2, 'seed': 2, 'round': 4, 'model': 2}
    """
    grid = grid_from(what, axes, keep, settings)
    paths = parts_in(Path(out), grid.first_seed)
    dataset, params = join_files(grid, paths, None if to is None else Path(to))
    return dataset if params is None else (dataset, params)


def grid_from(
    what: Grid | Setup | Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]] | None,
    keep: Literal["params"] | None,
    settings: Settings,
) -> Grid:
    """The grid of `what`, with axes and settings if it is none yet."""
    if isinstance(what, Grid) and (axes is not None or settings):
        given = ", ".join(["axes"] * (axes is not None) + [*settings])
        raise TypeError(f"{given} cannot change a Grid; give its build and axes to sweep, instead")
    if not isinstance(what, Grid):
        if "num_rounds" not in settings:
            raise TypeError(
                "num_rounds is missing; give it, as in sweep(build, axes, num_rounds=20)"
            )
        what = Grid(what, {} if axes is None else axes, **settings)
    return what if keep in (None, what.keep) else dataclasses.replace(what, keep=keep)
