"""Looks at the on-disk cache of compiled programs, which `compiler.py` enables."""

import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_WRITTEN = re.compile(r"(.+-[0-9a-f]{64})-(cache|atime)")  # names of JAX's files
_LOCK = ".lockfile"  # of JAX, too
_REJECTED = re.compile(r"Error reading persistent compilation cache entry for '[^']*': (.*)", re.S)
_LEAST_SECONDS = 3.0  # compilation time of loaded programs before loading is judged


class Kept(NamedTuple):
    """The cached programs in one folder.

    Attributes:
      folder: the path of the folder.
      programs: the number of programs.
      num_bytes: the size of the programs.
    """

    folder: Path
    programs: int
    num_bytes: int


def kept_programs(directory: Path) -> list[Kept]:
    """Lists the programs in a cache directory, by folder."""
    found = list[Kept]()
    for folder in sorted(directory.glob("jaxlib-*")):
        sizes = dict[str, int]()
        for path in _written(folder):
            with suppress(FileNotFoundError):  # another process may remove it
                sizes[path.name] = path.stat().st_size
        if sizes:
            number = sum(name.endswith("-cache") for name in sizes)
            found.append(Kept(folder, number, sum(sizes.values())))
    return found


def clear(kept: Kept) -> None:
    """Removes compiled programs, and the folder if nothing else is in it."""
    for path in _written(kept.folder):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # not empty, or another process removed it
        if [path.name for path in kept.folder.iterdir()] == [_LOCK]:
            (kept.folder / _LOCK).unlink()
        kept.folder.rmdir()


def _written(folder: Path) -> list[Path]:
    # Skip links and all other files, because a folder of this name may be anything, for example
    # the source of jaxlib.
    if folder.is_symlink() or not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [
            Path(entry)
            for entry in entries
            if _WRITTEN.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        ]


def risk_of(folder: Path) -> str | None:
    """The reason if somebody else may have written machine code to a folder."""
    if os.name == "nt":
        return None
    about = folder.stat()
    if about.st_uid != os.getuid():
        return f"{folder} is of another user, who could run code here"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (
            f"other users may write to {folder} and could run code here; if you trust its "
            f"programs, run `chmod go-w {folder}`"
        )
    return None


def remove_broken(folder: Path, has_times: bool) -> None:
    """Removes entries that JAX would fail to read at every start.

    Args:
      folder: the folder of the programs.
      has_times: whether JAX writes the time of use after each program. A killed process, or a full
        disk, leaves a part of a program without it.
    """
    with os.scandir(folder) as entries:
        found = [(entry, _WRITTEN.fullmatch(entry.name)) for entry in entries]
    is_file = {entry.name: entry.is_file(follow_symlinks=False) for entry, _ in found}
    for entry, name in found:
        if name is None or entry.is_dir(follow_symlinks=False):
            continue
        if not is_file[entry.name] or (has_times and not is_file.get(f"{name[1]}-atime")):
            Path(entry).unlink(missing_ok=True)


def rejection(warning: str) -> str | None:
    """The reason if a JAX warning reports that a cached program cannot be loaded.

    Example:
      >>> text = "Error reading persistent compilation cache entry for 'jit_f': ValueError: damaged"
      >>> rejection(text)
      'ValueError: damaged'
    """
    found = _REJECTED.match(warning)
    return found and found[1]


class Loading:
    """Time spent loading cached programs, compared with their compilation time.

    XLA recompiles a cached program that was compiled for another processor, and some processors
    look different at every start. JAX does not report this, but loading is then as slow as
    compiling.

    Example: a program that took 4 seconds to compile and takes 3 to load.
      >>> loading = Loading()
      >>> loading.listen("/jax/compilation_cache/compile_time_saved_sec", 1.0)
      >>> loading.listen("/jax/compilation_cache/cache_retrieval_time_sec", 3.0)
      >>> loading.is_vain
      True
    """

    def __init__(self) -> None:
        """Starts with nothing loaded."""
        self.compiled = self.loaded = self._saved = 0.0

    def listen(self, event: str, duration_secs: float, **_: Any) -> None:
        """Listens to `jax.monitoring` events."""
        # JAX reports the time saved before the time spent loading.
        if event == "/jax/compilation_cache/compile_time_saved_sec":
            self._saved = duration_secs
        elif event == "/jax/compilation_cache/cache_retrieval_time_sec":
            compiled = self._saved + duration_secs
            if compiled >= 1:  # JAX rounds down to whole seconds, usually to 0
                self.compiled, self.loaded = self.compiled + compiled, self.loaded + duration_secs

    @property
    def is_vain(self) -> bool:
        """Whether loading takes most of the time that compiling would."""
        return self.compiled >= _LEAST_SECONDS and self.loaded > 0.5 * self.compiled
