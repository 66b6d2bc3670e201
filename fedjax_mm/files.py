"""Files that are written whole or not at all."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np


def prepare_directory(path: Path) -> None:
    """Makes the directory; fails now if results could not be written there later.

    Raises:
      ValueError: naming the directory and the reason.
    """
    probe = path / f".probe.{os.getpid()}"
    with wanted_for_results(path):
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()


@contextmanager
def wanted_for_results(path: Path) -> Iterator[None]:
    """Raises `ValueError` with the remedy for what is wrong with a directory."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write to {path}: {error.strerror}; choose another directory with --out"
        ) from error


def check_regular(path: Path) -> None:
    """Raises `ValueError` for what is there but no file: reading a named pipe would never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path}: not a regular file")


def write_aside(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file under a temporary name and renames it: the file is whole or does not exist.

    Raises:
      OSError: naming the file, if it cannot be written.
    """
    aside = path.with_name(f".{path.name}.part")  # the same name always: a killed write is replaced
    try:
        # What has that name may be a link: writing through it would change another file.
        aside.unlink(missing_ok=True)
        write(aside)
        with aside.open("rb+") as file:
            # A rename may reach the disk before what was written: a power cut would leave nothing.
            os.fsync(file.fileno())
        aside.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        # An error of writing, unlike one of opening, knows no path.
        reason = error.strerror or error
        named = OSError(f"cannot write {path}: {reason}; make room, or give another directory")
        named.errno = error.errno
        raise named from error
    finally:
        with suppress(OSError):  # it would hide the reason
            aside.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    # A rename is an entry of the directory, which has to reach the disk too. Windows has no
    # descriptors of directories, and writes their entries in order.
    if os.name != "nt":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def save_json(content: Mapping[str, Any], path: Path) -> None:
    """Writes indented JSON; numbers that are not finite become null."""
    text = json.dumps(plain(content), indent=2, allow_nan=False)
    write_aside(path, lambda aside: aside.write_text(text + "\n"))


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content with a digest of it: what was edited would be believed."""
    own = {key: value for key, value in content.items() if key != "digest"}
    return {**own, "digest": hashlib.sha256(json.dumps(plain(own)).encode()).hexdigest()}


def is_sealed(content: Mapping[str, Any]) -> bool:
    """Returns whether the content is as it was when it was sealed."""
    return content["digest"] == sealed(content)["digest"]


def plain(value: Any) -> Any:
    """Returns a value in JSON's types; numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
