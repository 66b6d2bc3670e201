"""Finished results on disk, with checks that they are intact and from the requested run."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_mm.files import is_sealed, save_json, sealed
from fedjax_mm.results.dataset import open_result

RESULT = "result.nc"
"""The name of the file that holds a result's Dataset."""


class Finished(NamedTuple):
    """A finished result.

    Attributes:
      content: the summary or manifest, empty if it cannot be read.
      damage: a description of the damage, empty if there is none.
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


def find_finished(path: Path, now: Mapping[str, Any], free: Sequence[str] = ()) -> Finished | None:
    """Returns the finished result in a directory, or None.

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
    """Returns the manifest entries that identify a run, without settings that may differ."""
    config = {key: value for key, value in about.get("config", {}).items() if key not in free}
    return {"config": config, **{name: about.get(name) for name in ("versions", "git_revision")}}


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


def read_about(path: Path) -> Finished:
    """Reads a file written by `save_about`, and describes any damage since then."""
    if not path.exists():
        return Finished({}, f"{path.name} is missing")
    try:
        content = json.loads(path.read_text())
        files = dict(content["files"])
        dict(content.get("manifest", content)["config"])
        [each["verdict"] for each in content.get("statements", [])]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Finished({}, f"{path.name} is damaged")
    if "digest" not in content or not is_sealed(content):
        return Finished(content, f"{path.name} is damaged")
    for name, digest in files.items():
        file = path.with_name(name)
        if not file.is_file():
            return Finished(content, f"{name} is missing")
        if digest_of(file) != digest:
            return Finished(content, f"{name} is damaged")
    return Finished(content, "")


def _manifest_of(path: Path) -> Mapping[str, Any]:
    """Returns the manifest in a result's Dataset, or {} if it cannot be read."""
    try:
        about = open_result(path).attrs["manifest"]
    except (OSError, ValueError, RuntimeError, KeyError):
        return {}
    return about if isinstance(about, Mapping) else {}


def digest_of(path: Path) -> str:
    """Returns the SHA-256 digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
