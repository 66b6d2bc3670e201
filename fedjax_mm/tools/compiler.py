"""Flags of XLA that keep numbers right on CPUs, and the on-disk cache of compiled programs."""

# This module imports JAX and NumPy late, because `fedjax_mm/__init__.py` imports it.

import functools
import os
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from fedjax_mm.tools.cache import remove_broken, risk_of

_FUSION = "--xla_cpu_experimental_ynn_fusion_type="
SAFE = f"{_FUSION}LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
"""The flag that compiles each matrix product alone. By default, jaxlib 0.10 to 0.12 also fuse
products with what surrounds them, and then read broadcast scalars as if they were whole arrays."""

# Let XLA wait 30 years, because by default it aborts the process after a device has waited 40
# seconds for another, which is normal if clients take very different numbers of local steps.
PATIENT = " ".join(
    f"--xla_cpu_collective_{name}_seconds={10**9}"
    for name in ("call_warn_stuck_timeout", "call_terminate_timeout", "timeout")
)

OFF = "off"
"""The value of FEDJAX_MM_CACHE with which no programs are kept."""

_OFF, _ON = (OFF, "0", "no", "false"), ("", "on", "1", "yes", "true")

_LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"

_LIMITS = {
    "jax_compilation_cache_max_size": 2**30,  # bytes of one folder
    # Leave out small programs, because JAX looks at all files when it adds one.
    _LEAST_SECONDS: 0.1,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}

# XLA aborts the process at a flag that it does not know. These versions know all of the above.
_KNOWN = ((0, 9), (0, 13))


def add_flags(flags: str) -> None:
    """Adds flags to XLA_FLAGS. XLA reads them once, when JAX starts its first backend."""
    given = os.environ.get("XLA_FLAGS", "")
    if flags not in given:
        os.environ["XLA_FLAGS"] = f"{flags} {given}".strip()  # the user's flags win


def flags_of_results() -> str:
    """XLA_FLAGS without `PATIENT`, which does not affect results."""
    return os.environ.get("XLA_FLAGS", "").replace(PATIENT, "").strip()


def _use_safe_fusions() -> None:
    # Leave a value that the user has given. `check_fusions` judges it.
    numbers = tuple(map(int, version("jaxlib").split(".")[:2]))
    is_given = _FUSION in os.environ.get("XLA_FLAGS", "")
    if not is_given and _KNOWN[0] <= numbers < _KNOWN[1] and not _has_started():
        add_flags(SAFE)


def _has_started() -> bool:
    if "jax" not in sys.modules:
        return False
    import jax

    name = "jax_num_cpu_devices"
    value = jax.config.values[name]
    try:
        jax.config.update(name, value + 1)  # refused once a backend exists
    except RuntimeError:
        return True
    jax.config.update(name, value)
    return False


_use_safe_fusions()


@functools.cache
def check_fusions() -> None:
    """Warns if this process compiles wrong programs for CPUs.

    It computes instead of reading XLA_FLAGS, because these may be written between the import of
    this module and the start of JAX's backend, and change nothing after that.
    """
    import jax

    keep_programs()
    if jax.default_backend() != "cpu":
        return
    least = jax.config.values[_LEAST_SECONDS]
    jax.config.update(_LEAST_SECONDS, 0.0)  # keep this small program, so that it costs 10 ms
    try:
        with jax.ensure_compile_time_eval():
            is_right = canary()
    finally:
        jax.config.update(_LEAST_SECONDS, least)
    if not is_right:
        warnings.warn(
            "XLA returns wrong numbers in this process, because it fuses matrix products: write "
            "XLA_FLAGS before importing fedjax_mm, and compute with JAX only after that, or "
            f"start Python with XLA_FLAGS={SAFE}",
            stacklevel=2,
        )


def canary() -> bool:
    """Whether XLA computes a product with a broadcast scalar correctly on this backend."""
    import jax
    import numpy as np
    from jax import lax

    # Functions of lax are traced faster than those of jax.numpy.
    def sums(rows: jax.Array, scalar: jax.Array) -> jax.Array:
        product = lax.dot(rows, lax.broadcast(scalar, (4, 2000)))
        return lax.reduce_sum(lax.square(product.reshape(6, 9, 2000)), (1,))

    # Memory after the scalar is often 0, so that with 0 a wrong program would sometimes be right.
    rows = np.ones((54, 4), np.float32)
    return bool((np.asarray(jax.jit(sums)(rows, np.float32(1))) == 144).all())


@functools.cache
def keep_programs() -> None:
    """Enables the on-disk cache of compiled programs, unless the user has chosen one of JAX's."""
    import jax

    is_on = jax.config.values["jax_enable_compilation_cache"]
    if is_on and jax.config.values["jax_compilation_cache_dir"] is None:
        use_compilation_cache()


def use_compilation_cache(directory: Path | None = None) -> Path | None:
    """Enables the on-disk cache of compiled programs, and returns its path.

    A later process with the same program, devices and versions loads it instead of compiling it.
    Each combination of jaxlib version, platform and compression has its own folder, limited to
    1 GiB or to JAX_COMPILATION_CACHE_MAX_SIZE if set. The least recently used programs are evicted
    first. Programs that compile in less than 0.1 seconds are not kept.

    Args:
      directory: the parent of these folders; defaults to `cache_directory`.

    Returns:
      The path, or None if FEDJAX_MM_CACHE is "off" or the folder cannot be used.

    Warns:
      UserWarning: if the folder is not writable, or if another user owns it or may write to it.
    """
    import jax
    from jax._src import compilation_cache  # the public module only chooses the folder

    from fedjax_mm.tools.cached_programs import Programs

    parent = directory or cache_directory()
    if parent is None:
        return None
    place = parent / f"jaxlib-{version('jaxlib')}-{jax.default_backend()}-{_compression()}"
    for name, value in _LIMITS.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    most_bytes = jax.config.values["jax_compilation_cache_max_size"]
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = risk_of(place)
        if reason is None:
            probe = place / f".probe.{os.getpid()}"
            probe.touch()
            probe.unlink()
            remove_broken(place, has_times=most_bytes != -1)
    except OSError as error:
        reason = f"{place} is not writable: {error.strerror}"
    if reason:
        warnings.warn(
            f"compiled programs are not kept, because {reason}; set FEDJAX_MM_CACHE to another "
            f"directory, or to {OFF}",
            stacklevel=2,
        )
        return None
    if jax.config.values["jax_compilation_cache_dir"] != str(place):
        compilation_cache.reset_cache()  # JAX keeps the first one
        jax.config.update("jax_compilation_cache_dir", str(place))
        compilation_cache._cache = Programs(str(place), max_size=most_bytes)
    return place


def _compression() -> str:
    """JAX's compression of cached programs, which must match to read them.

    JAX uses Zstandard if Python has it (since 3.14) or the package zstandard is installed.
    """
    for module in ("compression.zstd", "zstandard"):
        with suppress(ImportError):
            import_module(module)
            return "zstd"
    return "zlib"


def cache_directory(given: str | None = None) -> Path | None:
    """The directory of the cache of compiled programs, or None if none are kept.

    Args:
      given: a directory, such as a node's local disk, "off", or "on" for the default, which is a
        folder in the user's cache directory. Defaults to the environment variable FEDJAX_MM_CACHE.
    """
    given = os.environ.get("FEDJAX_MM_CACHE", "on") if given is None else given
    if given.lower() in _OFF:
        return None
    try:
        if given.lower() not in _ON:
            return Path(given).expanduser().absolute()
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # users of containers may have no home
        return None
    return Path(home) / "fedjax_mm" / "xla"
