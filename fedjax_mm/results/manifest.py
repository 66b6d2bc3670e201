"""The manifest of a result: versions, device, seed, settings and revision."""

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from fedjax_mm.tools.compiler import flags_of_results
from fedjax_mm.tools.files import plain

_SHOWN = 200  # characters of a manifest


class Manifest(Mapping[str, Any], str):
    """Provenance of a result, as a mapping that is also its own JSON text.

    NetCDF attributes can hold text but not mappings, so a Dataset can keep a manifest as an
    attribute when written by `to_netcdf`.
    """

    def __new__(cls, content: Mapping[str, Any] | str) -> "Manifest":
        """Makes a manifest from a mapping or from JSON text."""
        return str.__new__(cls, content if type(content) is str else json.dumps(plain(content)))

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(str(self))
        return content

    def __getitem__(self, key: Any) -> Any:
        return self._content()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content())

    def __len__(self) -> int:
        return str.__len__(self)  # the length of the text, for `json.loads`

    def __or__(self, more: Mapping[str, Any]) -> "Manifest":
        return Manifest(self._content() | dict(more))

    def __str__(self) -> str:
        return str.__str__(self)

    def __repr__(self) -> str:
        """The beginning of the text."""
        return f"Manifest({str.__getitem__(self, slice(_SHOWN))}...)"

    __hash__ = str.__hash__


def manifest(config: Mapping[str, Any], *, seed: int, data: str) -> Manifest:
    """Provenance of a result: versions, device, seed, generator, flags and revision.

    Args:
      config: the settings of the run.
      seed: the seed of all draws.
      data: "real", "synthetic", "surrogate" or "not stated".
    """
    device = jax.devices()[0]
    packages = ("fedjax-mm", "jax", "jaxlib", "optax", "numpy", "xarray")
    content = {
        "versions": {"python": platform.python_version()}
        | {name: _version_of(name) for name in packages},
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "cpu_cores": cpu_cores(),
        },
        "seed": seed,
        "prng": jax.config.values["jax_default_prng_impl"],
        "xla_flags": flags_of_results(),
        "git_revision": _git_revision(),
        "data": data,
        "config": dict(config),
    }
    return Manifest(content)


def _version_of(package: str) -> str:
    """Installed version, or a placeholder in a bare source tree."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def cpu_cores() -> int:
    """Number of cores that this process may use, which a cluster job may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _git_revision() -> str | None:
    # Return None for an installed package, which is not in a source tree.
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
