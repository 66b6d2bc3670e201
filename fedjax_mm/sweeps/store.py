"""Results in a file that is written run by run, so that they may be larger than the memory."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import netCDF4
import numpy as np
import xarray as xr

from fedjax_mm.base import Params
from fedjax_mm.results.dataset import joined_manifest
from fedjax_mm.simulator.record import Record
from fedjax_mm.sweeps.plan import Plan
from fedjax_mm.sweeps.program import Program
from fedjax_mm.sweeps.result import (
    Result,
    coords_of,
    is_used_by,
    manifest_of,
    no_params,
    place_params,
)

_CHUNK_BYTES = 2**20  # of the file, which are compressed together
_BLOCK_BYTES = 32 * 2**20  # of records that are labelled, or copied, at a time
_RUN = "__run__"


class Store:
    """Context manager of a NetCDF file with the result of a sweep, which holds only a few runs.

    Values equal those of `Result`. Final parameters, if they are kept, are held in memory.

    Args:
      plan: the plan of the sweep.
      path: the new file.
      before: the result of the seeds before those of the sweep, which the file gets as well.

    Raises:
      ValueError: if coordinates differ from those of earlier seeds.
    """

    def __init__(self, plan: Plan, path: Path, before: xr.Dataset | None = None) -> None:
        """Creates the file with its coordinates and without values."""
        self.plan, self.before, self.params = plan, before, no_params(plan)
        empty = Result(plan, 1)
        self.run_bytes = sum(x.nbytes for x in jax.tree.leaves(empty.records))
        one, coords = empty.labelled({_RUN: [0]}), coords_of(plan.grid)
        self.dims = (*plan.grid.axes, "seed")
        if before is not None:
            coords["seed"] = np.concatenate([before.seed.values, coords["seed"]])
        shared = {str(name): x for name, x in one.coords.items() if name != _RUN}
        new = xr.Dataset(coords=coords | shared)
        if before is not None:
            earlier = before.coords.to_dataset().drop_vars("seed")
            if not earlier.equals(new.drop_vars("seed")):
                raise ValueError("the results of earlier and of new seeds differ in coordinates")
        new.to_netcdf(path, engine="netcdf4")
        self.file = netCDF4.Dataset(path, "a")
        for name, x in one.data_vars.items():
            self._create(str(name), x)

    def _create(self, name: str, like: xr.DataArray) -> None:
        """Creates a variable, given that of a single run."""
        dims = (*self.dims, *map(str, like.dims[1:]))
        for dim in dims:
            if dim not in self.file.dimensions:
                self.file.createDimension(dim, like.sizes[dim])
        variable = self.file.createVariable(
            name,
            like.dtype,
            dims,
            zlib=True,
            complevel=1,
            fill_value=np.nan if like.dtype.kind == "f" else None,
            chunksizes=_chunks([len(self.file.dimensions[dim]) for dim in dims], like.dtype),
        )
        variable.set_auto_maskandscale(False)
        variable.setncatts(like.attrs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.file.close()

    def place(
        self,
        program: Program,
        replicas: np.ndarray,
        records: Record,
        params: Sequence[Params] | None = None,
    ) -> None:
        """Writes the records of some runs of a program, as `Result.place` does."""
        step = max(1, _BLOCK_BYTES // self.run_bytes)
        for start in range(0, len(replicas), step):
            some = replicas[start : start + step]
            rows: Record = jax.tree.map(lambda x, at=start: x[:, at : at + step], records)
            block, at = Result(self.plan, len(some)), np.arange(len(some))
            block.place(program, some, rows, index=(at,))
            self._write(program, some, block.labelled({_RUN: at}))
        if params is not None and self.params is not None:
            place_params(self.params, program, replicas, params, is_used_by(program, records))

    def _write(self, program: Program, replicas: np.ndarray, block: xr.Dataset) -> None:
        *points, seeds = (each[replicas] for each in program.index)
        seeds = seeds + (0 if self.before is None else self.before.sizes["seed"])
        # Write consecutive seeds of a point together, because they are neighbours in the file.
        is_first = np.diff(seeds, prepend=-2) != 1
        for places in points:
            is_first |= np.diff(places, prepend=-1) != 0
        firsts = np.flatnonzero(is_first)
        for first, end in zip(firsts, [*firsts[1:], len(replicas)], strict=True):
            start = seeds[first]
            cells = *(places[first] for places in points), slice(start, start + end - first)
            for name, x in block.data_vars.items():
                self.file[str(name)][cells] = x.values[first:end]

    def finish(self, **about: Any) -> None:
        """Writes the earlier seeds, and the manifest with further entries."""
        made = manifest_of(self.plan.grid) | about
        if self.before is not None:
            seeds = coords_of(self.plan.grid)["seed"]
            made = joined_manifest(
                self.before, xr.Dataset(coords={"seed": seeds}, attrs={"manifest": made})
            )
            for name, x in self.before.data_vars.items():
                for cells in _blocks(x.shape, x.dtype.itemsize):
                    self.file[str(name)][cells] = x[cells].values
            self.before.close()
        self.file.setncattr("manifest", str(made))


def _chunks(shape: Sequence[int], dtype: np.dtype[Any]) -> list[int]:
    """The shape of the parts of a variable that are compressed together."""
    left, chunks = _CHUNK_BYTES // dtype.itemsize, list[int]()
    for size in reversed(shape):
        chunks.append(max(1, min(size, left)))
        left //= chunks[-1]
    return chunks[::-1]


def _blocks(shape: Sequence[int], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Yields blocks of limited size that make up an array."""
    if math.prod(shape) * itemsize <= _BLOCK_BYTES:
        yield tuple(map(slice, shape))
        return
    each = math.prod(shape[1:]) * itemsize
    step = max(1, _BLOCK_BYTES // max(1, each))
    for start in range(0, shape[0], step):
        for rest in _blocks(shape[1:], itemsize * step):
            yield slice(start, min(start + step, shape[0])), *rest
