"""The cache of compiled programs on disk, which later processes read instead of compiling."""

import os
import re
import shutil
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

_BYTES = 2**30  # of one version and platform
_REJECTED = re.compile(r"Error reading persistent compilation cache entry for '[^']*': (.*)", re.S)
_LEAST_SECONDS = 3.0  # of compilation that loading should have saved, to judge it


def use_compilation_cache(directory: Path | None = None) -> Path:
    """Keeps compiled programs on disk, and returns the place.

    A later process with the same program, devices and versions reads them instead of compiling.
    Each version of jaxlib and each platform has a place of its own, of at most 1 GiB, or of JAX's
    setting JAX_COMPILATION_CACHE_MAX_SIZE; the programs that were not used for longest go first.

    Args:
      directory: where places are; by default `cache_directory`.
    """
    version = f"jaxlib-{metadata.version('jaxlib')}-{jax.default_backend()}"
    place = (directory or cache_directory()) / version
    jax.config.update("jax_compilation_cache_dir", str(place))
    if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
        jax.config.update("jax_compilation_cache_max_size", _BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return place


def cache_directory() -> Path:
    """Returns where compiled programs are kept.

    It is the environment's FEDJAX_MM_CACHE, which may be on a node's own disk, or in the user's
    cache directory.
    """
    if given := os.environ.get("FEDJAX_MM_CACHE"):
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "fedjax_mm" / "xla"


class Kept(NamedTuple):
    """The compiled programs of one version and platform.

    Attributes:
      folder: their place.
      programs: their number.
      num_bytes: their size.
    """

    folder: Path
    programs: int
    num_bytes: int


def kept_programs(directory: Path) -> list[Kept]:
    """Returns the compiled programs in a cache directory, by version and platform."""
    found = list[Kept]()
    for folder in sorted(directory.glob("jaxlib-*")):
        sizes = dict[str, int]()
        for path in folder.iterdir():
            with suppress(FileNotFoundError):  # another process has removed it
                sizes[path.name] = path.stat().st_size
        number = sum(name.endswith("-cache") for name in sizes)
        found.append(Kept(folder, number, sum(sizes.values())))
    return found


def clear(kept: Kept) -> None:
    """Removes compiled programs."""
    shutil.rmtree(kept.folder)


def rejection(warning: str) -> str | None:
    """Returns the reason, if a warning of JAX says that a kept program cannot be loaded.

    Example:
      >>> text = "Error reading persistent compilation cache entry for 'jit_f': ValueError: damaged"
      >>> rejection(text)
      'ValueError: damaged'
    """
    found = _REJECTED.match(warning)
    return found and found[1]


class Loading:
    """Seconds of loading kept programs, and of their compilation before.

    XLA loads a program for another processor by compiling it again, and some processors count as
    another one at every start. JAX does not report it, but loading is then as slow as compiling.

    Example: one program that took 4 seconds to compile, and takes 3 to load.
      >>> loading = Loading()
      >>> loading.listen("/jax/compilation_cache/compile_time_saved_sec", 1.0)
      >>> loading.listen("/jax/compilation_cache/cache_retrieval_time_sec", 3.0)
      >>> loading.is_vain
      True
    """

    def __init__(self) -> None:
        """Nothing was loaded yet."""
        self.compiled = self.loaded = self._saved = 0.0

    def listen(self, event: str, duration_secs: float, **_: Any) -> None:
        """Hears of an event, as a listener of `jax.monitoring`."""
        # JAX reports the saved seconds first, and then the seconds of loading.
        if event == "/jax/compilation_cache/compile_time_saved_sec":
            self._saved = duration_secs
        elif event == "/jax/compilation_cache/cache_retrieval_time_sec":
            compiled = self._saved + duration_secs
            if compiled >= 1:  # because JAX keeps whole seconds, most of which are 0
                self.compiled, self.loaded = self.compiled + compiled, self.loaded + duration_secs

    @property
    def is_vain(self) -> bool:
        """Whether loading takes most of the time of compiling."""
        return self.compiled >= _LEAST_SECONDS and self.loaded > 0.5 * self.compiled
