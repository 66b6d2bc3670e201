"""Manifests and summaries: settings and versions of a result, and digests of its files."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_mm.tools.compiler import cache_directory, flags_of_results
from fedjax_mm.tools.files import is_sealed, load_json, plain, save_json, sealed

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


def show_versions() -> None:
    """Prints versions, devices and flags, for a report of a bug.

    On the command line, ``fedjax-mm --version --verbose`` prints them, too.

    Example:
      >>> show_versions()  # doctest: +ELLIPSIS
      fedjax-mm: ...
      python: ...
      system: ...
      devices: ...
    """
    about = manifest({}, seed=0, data="not stated")
    versions, device, packages = about["versions"], about["device"], ("flax", "scipy")
    rows = {"fedjax-mm": versions.pop("fedjax-mm")}
    rows["revision"] = about["git_revision"] or "not a source tree"
    rows |= versions | {name: _version_of(name) for name in packages}
    rows["system"] = f"{platform.platform()}, {device['cpu_cores']} cores"
    rows["devices"] = f"{device['count']} x {device['kind']} ({device['platform']})"
    rows["xla_flags"] = about["xla_flags"] or "none"
    rows["compilation cache"] = str(cache_directory() or "off")
    for name, text in rows.items():
        print(f"{name}: {text}")


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


def differences(saved: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yields differences as ``path was ..., is ...``."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in saved | now:
            inner = f"{path}.{key}" if path else key
            yield from differences(saved.get(key), now.get(key), inner)
    elif saved != now:
        yield f"{path} was {_short(saved)}, is {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Finished(NamedTuple):
    """A finished result.

    Attributes:
      content: the summary or manifest, empty if it cannot be read.
      damage: a description of the damage, empty for an intact file.
    """

    content: Mapping[str, Any]
    damage: str


def save_about(path: Path, content: Mapping[str, Any], files: Sequence[str]) -> None:
    """Writes the summary or manifest of a finished result, with digests of the other files.

    This file is written last, after all other files of a result.

    Args:
      path: the path of ``summary.json`` or ``manifest.json``.
      content: a summary or a manifest.
      files: the names of the other files in the same directory.
    """
    digests = {name: digest_of(path.with_name(name)) for name in files}
    save_json(sealed({**content, "files": digests}), path)


def read_about(path: Path, only: Sequence[str] | None = None) -> Finished:
    """Reads a file written by `save_about`, and describes any damage since then.

    Args:
      path: the path of a summary or manifest.
      only: the names of other files to compare with their digests; None means all.
    """
    if not path.exists():
        return Finished({}, f"{path.name} is missing")
    try:
        content = load_json(path)
        files = dict(content.get("files", {}))
        dict(content.get("manifest", content)["config"])
        [each["verdict"] for each in content.get("statements", [])]
        [path.with_name(name) for name in files]  # refuses names of other directories
    except (ValueError, TypeError, KeyError, AttributeError):
        return Finished({}, f"{path.name} is damaged")
    if "digest" not in content or not is_sealed(content):
        return Finished(content, f"{path.name} is damaged")
    for name, digest in files.items():
        if only is not None and name not in only:
            continue
        file = path.with_name(name)
        if not file.is_file():
            return Finished(content, f"{name} is missing")
        if digest_of(file) != digest:
            return Finished(content, f"{name} is damaged")
    return Finished(content, "")


def digest_of(path: Path) -> str:
    """SHA-256 digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
