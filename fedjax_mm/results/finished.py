"""Finished results on disk, with checks that they are intact and from the requested run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xarray as xr

from fedjax_mm.results.dataset import load_dataset
from fedjax_mm.results.manifest import Finished, differences, read_about
from fedjax_mm.tools.files import check_regular

RESULT = "result.nc"
"""The name of the file that holds a result's Dataset."""

_ABOUT = ("summary.json", "manifest.json")


def open_result(directory: Path | str) -> xr.Dataset:
    """Loads the result in a directory, with its manifest as a mapping in `attrs`.

    A result larger than 1 GiB is not loaded but opened, and each selection from it is read.

    Args:
      directory: the directory of a ``result.nc``, or any NetCDF file.

    Raises:
      OSError: if the result does not exist.
      ValueError: if it cannot be read, or differs from the digest in the summary or manifest in its
        directory.

    Example:
      >>> import pathlib, tempfile
      >>> from fedjax_mm import fedavg, mfa_rr, open_result, sweep
      >>> from fedjax_mm.sweeps import Grid, Setup
      >>> from fedjax_mm.tasks import quadratic
      >>> def build(learning_rate):
      ...     algorithm = fedavg(learning_rate, local_steps=5)
      ...     return Setup(quadratic(24, 4, mu=2e-4), algorithm, mfa_rr(24, 2))
      >>> result = sweep(Grid(build, {"learning_rate": [0.05, 0.1]}, num_rounds=20))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     _ = result.to_netcdf(pathlib.Path(directory, "result.nc"))
      ...     opened = open_result(directory)
      >>> opened.attrs["manifest"]["data"]
      'not stated'
    """
    path, remedy = Path(directory), "give a directory that run, sweep or reproduce wrote"
    if not path.is_file() and (path.is_dir() or not path.suffix):
        path /= RESULT
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; {remedy}, or its result.nc")
    for name in _ABOUT if path.name == RESULT else ():
        content, damage = read_about(path.with_name(name), (RESULT,))
        # A manifest without a digest is the user's own.
        is_own = not path.with_name(name).exists() or (content and "digest" not in content)
        if damage and not is_own:
            raise ValueError(
                f"{path.parent}: {damage}; make the result again with --resume, or open it "
                "unchecked with xarray.open_dataset"
            )
    try:
        check_regular(path)
        return load_dataset(path)
    except Exception as error:  # damaged content can raise any exception
        raise ValueError(f"{path}: this is not a result; {remedy}, or its result.nc") from error


def find_finished(path: Path, now: Mapping[str, Any], free: Sequence[str] = ()) -> Finished | None:
    """Finds the finished result in a directory, or returns None.

    Args:
      path: the path of the file written by `save_about`.
      now: the manifest of the requested run.
      free: settings that may differ.

    Raises:
      ValueError: if the result is from another run, naming the first differences.
    """
    content, damage = read_about(path)
    about = content.get("manifest", content) or _manifest_of(path.with_name(RESULT))
    if not about:  # nothing would be lost
        return Finished({}, damage) if path.exists() else None
    found = differences(_identity(about, free), _identity(now, free))
    if text := "; ".join(list(found)[:3]):
        raise ValueError(
            f"{path.parent} holds the finished result of another run: {text}; choose another "
            "directory with --out, or replace it with --overwrite"
        )
    return Finished(content, damage or "stopped" * ("stopped" in about))


def _identity(about: Mapping[str, Any], free: Sequence[str]) -> dict[str, Any]:
    """Manifest entries that identify a run, without settings that may differ."""
    config = {key: value for key, value in about.get("config", {}).items() if key not in free}
    return {"config": config, **{name: about.get(name) for name in ("versions", "git_revision")}}


def _manifest_of(path: Path) -> Mapping[str, Any]:
    """The manifest in a result's Dataset, or {} if it cannot be read."""
    try:
        about = load_dataset(path).attrs["manifest"]
    except (OSError, ValueError, RuntimeError, KeyError):
        return {}
    return about if isinstance(about, Mapping) else {}
