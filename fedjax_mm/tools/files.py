"""Atomic file writes."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

_DEEPEST = 100  # most levels of JSON, far below Python's limit of recursion


def prepare_directory(path: Path) -> None:
    """Creates a directory and checks that it is writable, before any work is done.

    Raises:
      ValueError: if the directory is not writable, with its name and the reason.
    """
    probe = path / f".probe.{os.getpid()}"
    with wanted_for_results(path):
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()


@contextmanager
def wanted_for_results(path: Path) -> Iterator[None]:
    """Converts an `OSError` about a directory to a `ValueError` with a remedy."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write to {path}: {error.strerror}; choose another directory with --out"
        ) from error


def check_regular(path: Path) -> None:
    """Raises `ValueError` for special files, such as named pipes, because reading may never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path}: not a regular file")


@contextmanager
def located(*place: Any) -> Iterator[None]:
    """Prefixes a `ValueError` about a file's content with its place: the file, and the record.

    Example:
      >>> with located("points.txt", "line 3"):
      ...     float("x")
      Traceback (most recent call last):
      ValueError: points.txt: line 3: could not convert string to float: 'x'
    """
    try:
        yield
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ValueError(": ".join(map(str, (*place, reason)))) from error


def read_regular(path: Path) -> bytes:
    """Reads a file, or raises `ValueError` if it is a special file."""
    check_regular(path)
    return path.read_bytes()


def leads_out(path: Path) -> bool:
    """Whether a path is a link to another directory, whose content may be private."""
    return not path.resolve().is_relative_to(path.parent.resolve())


def read_image(path: Path) -> bytes:
    """Reads an image, which may come from someone else.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if it is a link to another directory, is no whole image, or has too many pixels.
    """
    from PIL import Image

    content = read_regular(path)
    if leads_out(path):
        raise ValueError(f"{path} is a link to another directory; copy the file")
    too_large = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
            Image.open(BytesIO(content)).verify()  # the checksums
            Image.open(BytesIO(content)).load()  # the pixels
    except (OSError, SyntaxError, ValueError, *too_large) as error:
        words = "has too many pixels" if isinstance(error, too_large) else "is no image or damaged"
        raise ValueError(f"{path} {words}; remove it, or make it again") from error
    return content


def load_json(path: Path) -> Any:
    """Reads JSON, which may come from someone else.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if it is a special file, is not JSON, or is nested too deeply.
    """
    words = f"it is nested more than {_DEEPEST} levels deep"
    try:
        content = json.loads(read_regular(path))
    except RecursionError:
        raise ValueError(words) from None
    level = [content]
    for _ in range(_DEEPEST):
        level = [x for each in level for x in _inside(each)]
    if level:
        raise ValueError(words)
    return content


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def write_aside(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file under a temporary name and renames it, so that it is never incomplete.

    Raises:
      OSError: if the file cannot be written; the error names it.
    """
    # Use a fixed name, so that a later write replaces the leftover of a killed one.
    aside = path.with_name(f".{path.name}.part")
    try:
        # Remove the file first, because it may be a link whose target would be overwritten.
        aside.unlink(missing_ok=True)
        write(aside)
        with aside.open("rb+") as file:
            # Sync first, because the rename may reach the disk before the content, and a power
            # failure would then leave an empty file.
            os.fsync(file.fileno())
        aside.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        # Name the path, because a write error, unlike an open error, does not include it.
        reason = error.strerror or error
        named = OSError(f"cannot write {path}: {reason}; make room, or give another directory")
        named.errno = error.errno
        raise named from error
    finally:
        with suppress(OSError):  # an error in cleanup would hide the reason
            aside.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    # Sync the directory too, because it stores the rename. Skip this on Windows, which has no
    # directory descriptors and writes entries in order.
    if os.name != "nt":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def save_json(content: Mapping[str, Any], path: Path) -> None:
    """Writes indented JSON, with null for non-finite numbers."""
    text = json.dumps(plain(content), indent=2, allow_nan=False)
    write_aside(path, lambda aside: aside.write_text(text + "\n"))


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Adds a digest to the content, so that `is_sealed` can detect later edits."""
    own = {key: value for key, value in content.items() if key != "digest"}
    return {**own, "digest": hashlib.sha256(json.dumps(plain(own)).encode()).hexdigest()}


def is_sealed(content: Mapping[str, Any]) -> bool:
    """Whether the content is unchanged since it was sealed."""
    return content["digest"] == sealed(content)["digest"]


def plain(value: Any) -> Any:
    """Converts a value to JSON types, with None for non-finite numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
