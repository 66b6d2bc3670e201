"""On-disk cache of compiled programs, which later processes load instead of compiling."""

import os
import re
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

_BYTES = 2**30  # limit for one folder
_WRITTEN = "-cache", "-atime", ".lockfile"  # ends of the names of JAX's files
_REJECTED = re.compile(r"Error reading persistent compilation cache entry for '[^']*': (.*)", re.S)
_LEAST_SECONDS = 3.0  # compilation time of loaded programs before loading is judged


def use_compilation_cache(directory: Path | None = None) -> Path:
    """Enables the on-disk cache of compiled programs, and returns its path.

    A later process with the same program, devices and versions loads it instead of compiling it.
    Each combination of jaxlib version, platform and compression has its own folder, limited to
    1 GiB or to JAX_COMPILATION_CACHE_MAX_SIZE if set. The least recently used programs are evicted
    first.

    Args:
      directory: the parent of these folders; defaults to `cache_directory`.
    """
    version = f"jaxlib-{metadata.version('jaxlib')}-{jax.default_backend()}-{_compression()}"
    place = (directory or cache_directory()) / version
    jax.config.update("jax_compilation_cache_dir", str(place))
    if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
        jax.config.update("jax_compilation_cache_max_size", _BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return place


def _compression() -> str:
    """Returns JAX's compression of cached programs, which must match to read them.

    JAX uses Zstandard if Python has it (since 3.14) or the package zstandard is installed.
    """
    for module in ("compression.zstd", "zstandard"):
        with suppress(ImportError):
            import_module(module)
            return "zstd"
    return "zlib"


def cache_directory() -> Path:
    """Returns the directory of the cache of compiled programs.

    The environment variable FEDJAX_MM_CACHE overrides the default, a folder in the user's cache
    directory, for example with a node's local disk.
    """
    if given := os.environ.get("FEDJAX_MM_CACHE"):
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "fedjax_mm" / "xla"


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
    with suppress(OSError):  # not empty
        kept.folder.rmdir()


def _written(folder: Path) -> list[Path]:
    # Skip links and all other files, because a folder of this name may be anything, for example
    # the source of jaxlib.
    if folder.is_symlink() or not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.name.endswith(_WRITTEN) and path.is_file()]


def rejection(warning: str) -> str | None:
    """Returns the reason if a JAX warning reports that a cached program cannot be loaded.

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
