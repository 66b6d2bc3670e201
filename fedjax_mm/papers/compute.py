"""Results computed by one compiled program, for items that do not train."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import xarray as xr

from fedjax_mm.results.manifest import manifest


def compute(
    program: Callable[..., Mapping[str, Any]],
    arguments: Sequence[Any],
    coords: Mapping[str, Any],
    over: str,
    dims: Mapping[str, str],
    *,
    seed: int = 0,
) -> xr.Dataset:
    """Runs a compiled program in double precision and labels its results, adding a manifest.

    Args:
      program: maps the arguments to arrays by name.
      arguments: arrays, or pytrees of arrays.
      coords: the coordinates of the dimensions.
      over: the default dimensions of an array, separated by spaces.
      dims: the dimensions of arrays that differ from the default, by name.
      seed: the seed of all draws, recorded in the manifest.
    """
    with jax.enable_x64(True):
        start = time.perf_counter()
        compiled = jax.jit(program).lower(*arguments).compile()
        ready = time.perf_counter()
        values = jax.device_get(compiled(*arguments))
    seconds = {"compile": ready - start, "run": time.perf_counter() - ready}
    about = manifest({}, seed=seed, data="synthetic") | {"wall_seconds": seconds}
    variables = {name: (dims.get(name, over).split(), value) for name, value in values.items()}
    return xr.Dataset(variables, coords, {"manifest": about})
