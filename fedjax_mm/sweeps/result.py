"""Combines the records of all batches into one labelled result."""

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from fedjax_mm.base import Params
from fedjax_mm.results.dataset import first_not_finite, labelled, nobody
from fedjax_mm.results.manifest import Manifest, manifest
from fedjax_mm.simulator.record import Counts, Record, Trace
from fedjax_mm.simulator.stacks import each_params, with_params
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.plan import Compiled, Plan, Segment
from fedjax_mm.sweeps.program import Program, kept_shapes, metric_shapes

_SIZES = ("upload_size", "download_size", "mixed_size")


class Result:
    """Records of all points, ``[*axes, seeds, records, models, ...]``, filled batch by batch.

    Args:
      plan: the plan of the sweep.
      runs: the number of runs on a single axis ``run``, instead of all points and seeds.
    """

    def __init__(self, plan: Plan, runs: int | None = None) -> None:
        """Allocates the result and starts the clock."""
        self.plan, self.clock, grid = plan, time.perf_counter(), plan.grid
        self.shape = grid.shape if runs is None else (runs,)
        programs = plan.programs
        shape = (*self.shape, grid.num_records + 1, max(each.num_models for each in programs))
        # Absent models have NaN, hence floats for integer and boolean metrics too.
        metrics = {
            name: np.full((*shape, *each), np.nan, dtype)
            for name, (each, dtype) in metric_shapes(programs).items()
        }
        counts = Counts(*np.zeros((len(Counts._fields), *shape), np.int32))
        self.records = Record(metrics, counts, is_finite=np.ones(shape, bool))
        ones = (*self.shape, 1, shape[-1])
        self.sizes = {name: np.zeros(ones, np.int64) for name in _SIZES}
        self.ended = np.full(self.shape, -1, np.int32)
        self.params = no_params(plan) if runs is None else None

    def place(
        self,
        program: Program,
        replicas: np.ndarray,
        records: Record,
        params: Sequence[Params] | None = None,
        index: tuple[np.ndarray, ...] | None = None,
    ) -> None:
        """Stores the records of some runs of a program, and their final parameters if kept.

        Args:
          program: the program.
          replicas: the indices of the runs in the program.
          records: ``[records, replicas, models, ...]``.
          params: the parameters of each stack of models, ``[replicas, ...]``.
          index: their positions in the result; defaults to those in the grid.
        """
        grid = self.plan.grid
        index = tuple(each[replicas] for each in program.index) if index is None else index
        self._place_sizes(program, index)
        records, ends = cut(records, grid)
        self.ended[index] = np.where(ends < 0, -1, ends * grid.record_every)
        is_used = is_used_by(program, records)
        records = _of_those(is_used, records)
        # Write only the metrics that the program's tasks have.
        mine = self.records._replace(metrics={n: self.records.metrics[n] for n in records.metrics})
        for array, values in zip(jax.tree.leaves(mine), jax.tree.leaves(records), strict=True):
            # Padding repeats the last replica, so it only writes the same values again.
            cells = (*index, slice(len(values)), *map(slice, values.shape[2:]))
            array[cells] = np.swapaxes(values, 0, 1)
        if params is not None and self.params is not None:
            place_params(self.params, program, replicas, params, is_used)

    def _place_sizes(self, program: Program, index: tuple[np.ndarray, ...]) -> None:
        sizes = program.traced.facts.message_sizes
        cells: Any = (*index, 0, slice(program.num_models))
        for name, each in zip(_SIZES, sizes, strict=True):
            self.sizes[name][cells] = each or 0

    def labelled(self, coords: Mapping[str, Any]) -> xr.Dataset:
        """Labels the result, given the coordinates of its leading axes."""
        grid, records = self.plan.grid, self.records
        rounds: Any = np.arange(grid.num_records + 1) * grid.record_every
        metrics: Any = records.metrics
        named = [name for program in self.plan.programs for name in program.traced.facts.per_client]
        sizes: Any = self.sizes
        trace = Trace(rounds, metrics, *records.counts, **sizes, per_client=tuple(named))
        dataset = labelled(trace, coords)
        first = first_not_finite(np.moveaxis(records.is_finite, -2, 0)).astype(np.int32)
        words = {"long_name": "first recorded round that is not finite, or -1"}
        rounds = np.where(first < 0, -1, first * np.int32(grid.record_every))
        dataset["diverged"] = (*coords, "model"), rounds, words
        if grid.until is not None:
            words = {"long_name": "first recorded round that met the target, or -1"}
            dataset["ended"] = tuple(coords), self.ended, words
        return dataset

    def dataset(self, **about: Any) -> xr.Dataset:
        """Labels the result, and adds entries to its manifest."""
        dataset = self.labelled(coords_of(self.plan.grid))
        if words := nobody(dataset):
            warnings.warn(words, stacklevel=4)
        seconds = {"compile": self.plan.compile_seconds, "run": time.perf_counter() - self.clock}
        dataset.attrs["manifest"] = manifest_of(self.plan.grid) | {"wall_seconds": seconds} | about
        return dataset


def no_params(plan: Plan) -> list[Params] | None:
    """Allocates the parameters of all points, filled with NaN, or 0 if not floats, if wanted."""

    def empty(model: jax.ShapeDtypeStruct) -> np.ndarray:
        nothing = np.nan if jnp.issubdtype(model.dtype, jnp.inexact) else 0
        return np.full((*plan.grid.shape, *model.shape), nothing, model.dtype)

    return None if plan.grid.keep is None else jax.tree.map(empty, kept_shapes(plan.programs))


def place_params(
    kept: list[Params],
    program: Program,
    replicas: np.ndarray,
    params: Sequence[Params],
    is_used: np.ndarray,
) -> None:
    """Stores the final parameters of a batch's models that are in use."""
    each = each_params(with_params(program.traced.replica.models, params), 1)
    # `zip` stops after the program's models, so unused models stay empty.
    for model, (all_of_it, given) in enumerate(zip(kept, each, strict=False)):
        mine = is_used[:, model]
        there = tuple(places[replicas][mine] for places in program.index)
        for array, values in zip(jax.tree.leaves(all_of_it), jax.tree.leaves(given), strict=True):
            array[there] = np.asarray(values)[mine]


def coords_of(grid: Grid) -> dict[str, Any]:
    """The coordinates of the axes and of the seeds."""
    return {**grid.labels, "seed": grid.first_seed + np.arange(grid.num_seeds)}


def manifest_of(grid: Grid) -> Manifest:
    """The manifest of a result, without the times."""
    config = {"axes": grid.labels} if grid.config is None else grid.config
    return manifest(config, seed=grid.seed, data=grid.data)


def no_records(compiled: Compiled) -> Record:
    """Allocates the records of a batch, ``[1 + records, replicas, models]``, filled with zeros."""
    program = compiled.program
    shape = (1 + program.grid.num_records, compiled.batch_size)
    return jax.tree.map(lambda x: np.zeros(shape + x.shape, x.dtype), program.traced.record)


def is_used_by(program: Program, records: Record) -> np.ndarray:
    """Whether each replica uses each model, ``bool[replicas, models]``."""
    if isinstance(records.is_used, tuple):
        return np.ones((records.is_finite.shape[1], program.num_models), bool)
    return np.asarray(records.is_used[0])


def _of_those(is_used: np.ndarray, records: Record) -> Record:
    """Sets the metrics of unused models to NaN, and their counts to 0."""
    if is_used.all():
        return records._replace(is_used=())
    metrics = {
        name: np.where(is_used.reshape(*is_used.shape, *[1] * (x.ndim - 3)), x, np.nan)
        for name, x in records.metrics.items()
    }
    counts = jax.tree.map(lambda x: np.where(is_used, x, 0), records.counts)
    return Record(metrics, counts, is_finite=records.is_finite | ~is_used)


def cut(records: Record, grid: Grid) -> tuple[Record, np.ndarray]:
    """Blanks each replica's records after its end, and returns them and the ends, -1 if none."""
    if grid.until is None:
        return records, np.full(records.is_finite.shape[1], -1)
    totals = {name: x.cumsum(0) for name, x in records.counts._asdict().items()}
    ends = grid.until.first_record(records.metrics | totals)
    # Discard later records, because a finished replica keeps running until its batch has finished.
    is_over = (np.arange(len(records.is_finite))[:, None] > ends) & (ends >= 0)
    metrics = {
        name: np.where(np.expand_dims(is_over, tuple(range(2, x.ndim))), np.nan, x)
        for name, x in records.metrics.items()
    }
    is_over = is_over[..., None]
    counts = jax.tree.map(lambda x: np.where(is_over, 0, x), records.counts)
    return records._replace(
        metrics=metrics, counts=counts, is_finite=records.is_finite | is_over
    ), ends


def divergence(segment: Segment) -> str | None:
    """A message about the first model of a batch that diverged, or None."""
    program, grid = segment.program, segment.plan.grid
    up_to_ends, _ = cut(segment.records, grid)
    record = first_not_finite(up_to_ends.is_finite)
    if np.all(record < 0):
        return None
    first = np.where(record < 0, np.iinfo(record.dtype).max, record)
    row, model = np.unravel_index(np.argmin(first), first.shape)
    number = segment.replicas[row]
    places = dict(zip(grid.axes, (each[number] for each in program.index), strict=False))
    at = {
        name: grid.labels[name][places[name]]
        for name in grid.axes
        if type(grid.labels[name][0]) is float
    }
    point = "".join(f", {n}={x if isinstance(x, str) else format(x, 'g')}" for n, x in at.items())
    return (
        f"{program.label}{point} diverged: the loss or a parameter of model {model + 1}, "
        f"seed {grid.first_seed + program.index[-1][number]}, is not finite in round "
        f"{record[row, model] * grid.record_every}; lower the learning rate"
    )
