"""Labelled results: Datasets from traces, manifests, and NetCDF files."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xarray as xr

from fedjax_mm.files import plain, write_aside
from fedjax_mm.record import Counts, Trace

_LONG_NAMES = {
    "loss": "global loss F(w)",
    "excess_loss": "excess loss F(w) - F*",
    "distance": "distance to the minimizer |w - w*|",
    "appeal": "GM-Appeal, the fraction of satisfied clients",
    "client_updates": "local trainings so far",
    "gradients": "gradients computed so far",
    "idle_rounds": "rounds so far in which nobody trained the model",
    "parameters_up": "parameters sent to the server so far",
    "parameters_down": "parameters sent to clients so far",
}


def to_dataset(trace: Trace, dims: Sequence[str] = ()) -> xr.Dataset:
    """Returns a trace with named dimensions; counts are cumulative 64-bit integers.

    Args:
      trace: from `simulate`, with extra leading axes if it was vmapped.
      dims: the names of those leading axes, outermost first.

    Returns:
      A Dataset over ``(*dims, "round", "model")`` with the task's metrics and ``client_updates``,
      ``gradients``, ``idle_rounds``, ``parameters_up``, ``parameters_down``. Models count from 1,
      as in the papers.

    Raises:
      OverflowError: if there were more than 2^31 gradients between two records.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedavg, mfa_rand, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> task, algorithm = quadratic(4, 2, mu=0.1), fedavg(0.1, local_steps=3)
      >>> _, trace = simulate(jax.random.key(0), task, algorithm, mfa_rand(4, 2), 5)
      >>> result = to_dataset(trace)
      >>> dict(result.sizes), result.gradients.sel(round=5, model=1).item()
      ({'round': 6, 'model': 2}, 30)
    """
    check_counts(trace)
    axes = (*dims, "round", "model")
    # Counts between records are int32 on the device; their sums may need 64 bits.
    counts = {
        name: np.cumsum(np.asarray(getattr(trace, name), np.int64), axis=-2)
        for name in Counts._fields
    }
    updates = counts["client_updates"]
    metrics = {name: np.asarray(values) for name, values in trace.metrics.items()}
    sizes = {
        "parameters_up": updates * np.asarray(trace.upload_size, np.int64),
        "parameters_down": updates * np.asarray(trace.download_size, np.int64),
    }
    rounds = np.asarray(trace.round).reshape(-1, trace.round.shape[-1])[0]
    coords = {"round": rounds, "model": np.arange(1, updates.shape[-1] + 1)}
    dataset = xr.Dataset(
        {name: (axes, x) for name, x in (metrics | counts | sizes).items()}, coords
    )
    for name in dataset.data_vars:
        dataset[name].attrs["long_name"] = _LONG_NAMES.get(str(name), str(name))
    return dataset


def check_counts(counts: Any) -> None:
    """Raises `OverflowError` if a counter was too small for what happened between two records."""
    for name in Counts._fields:
        if np.any(np.asarray(getattr(counts, name)) < 0):
            raise OverflowError(
                f"{name} between two records do not fit 32 bits; record more often (record_every)"
            )


def manifest(config: Mapping[str, Any], *, seed: int, data: str) -> dict[str, Any]:
    """Returns the origin of a result: versions, device, seed, random generator, revision.

    Args:
      config: the settings that were run.
      seed: the seed of all draws.
      data: "real", "synthetic" or "surrogate".
    """
    device = jax.devices()[0]
    packages = ("fedjax-mm", "jax", "jaxlib", "optax", "numpy", "xarray")
    return {
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in packages},
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "cpu_cores": cpu_cores(),
        },
        "seed": seed,
        "prng": str(jax.random.key_impl(jax.random.key(seed))),
        "git_revision": _git_revision(),
        "data": data,
        "config": dict(config),
    }


def cpu_cores() -> int:
    """Returns the number of cores that this process may use, which a cluster's job may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _git_revision() -> str | None:
    # None for an installed package, which is not in a source tree.
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def save_dataset(dataset: xr.Dataset, path: Path | str) -> None:
    """Writes a NetCDF file, whole or not at all; mappings in `attrs` are written as JSON.

    Args:
      dataset: from `run`, `sweep` or `to_dataset`.
      path: the file's path; its directory must exist.

    Raises:
      OSError: if it cannot be written, for instance because the disk is full.

    Example:
      >>> import pathlib, tempfile
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     path = pathlib.Path(directory, "result.nc")
      ...     save_dataset(xr.Dataset({"loss": ("round", [1.0, 0.5])}), path)
      ...     xr.open_dataset(path).loss.values.tolist()
      [1.0, 0.5]
    """
    attrs = {
        name: json.dumps(plain(value)) if isinstance(value, Mapping) else value
        for name, value in dataset.attrs.items()
    }
    flat = dataset.drop_attrs(deep=False).assign_attrs(attrs)
    encoding = {name: {"zlib": True, "complevel": 1} for name in flat.data_vars}
    path = Path(path)
    try:
        write_aside(path, lambda aside: flat.to_netcdf(aside, engine="netcdf4", encoding=encoding))
    except (OSError, RuntimeError) as error:
        raise OSError(f"cannot write {path}: {error}; is there room on the disk?") from error


def load_dataset(path: Path | str) -> xr.Dataset:
    """Returns what `save_dataset` has written, the manifest as a mapping.

    Raises:
      OSError: if the file cannot be read.
    """
    with xr.open_dataset(path, engine="netcdf4") as file:
        dataset = file.load().drop_encoding()
    return dataset.assign_attrs(manifest=json.loads(dataset.attrs["manifest"]))
