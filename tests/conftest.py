"""Settings and fixtures shared by the tests.

Tests, their child processes and later runs share one cache of compiled programs, in the user's
cache directory or in FEDJAX_MM_TEST_CACHE. XLA compiles as quickly as it can, so programs run
slower. Assertions do not depend on optimisations, except inside `tests.compiling.optimised`. The
caller's XLA_FLAGS come last and take precedence.
"""

import contextlib
import functools
import importlib.util
import os
import sys
from importlib.metadata import version
from pathlib import Path

_HOME = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
_PLACE = os.environ.setdefault("FEDJAX_MM_TEST_CACHE", str(Path(_HOME) / "fedjax_mm_tests"))
_QUICK = "--xla_cpu_parallel_codegen_split_count=1"
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    # Programs compile 2 to 3 times faster without fusion emitters. Later jaxlibs have nothing but
    # fusion emitters, and XLA aborts on an unknown flag.
    _QUICK = f"--xla_cpu_use_fusion_emitters=false {_QUICK}"
_GIVEN = os.environ.get("XLA_FLAGS", "")
# The directory name that `fedjax_mm.tools.compiler` uses. It sets flags of XLA when it is imported,
# which must not precede the environment.
_HAS_ZSTD = sys.version_info >= (3, 14) or importlib.util.find_spec("zstandard")
_FOLDER = f"jaxlib-{version('jaxlib')}-cpu-{'zstd' if _HAS_ZSTD else 'zlib'}"
# Workers and child processes inherit the environment.
os.environ |= {
    "XLA_FLAGS": _GIVEN if _QUICK in _GIVEN else f"{_QUICK} {_GIVEN}".strip(),
    "XDG_CACHE_HOME": _PLACE,  # for the cache of the command line
    "JAX_COMPILATION_CACHE_DIR": str(Path(_PLACE) / "fedjax_mm" / "xla" / _FOLDER),
    "JAX_COMPILATION_CACHE_MAX_SIZE": "-1",  # a limit makes JAX inspect every entry
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # must precede the import
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # source locations are not needed
}

import jax  # noqa: E402
import pytest  # noqa: E402

from tests.shapes import skip_functions_without_arrays  # noqa: E402

skip_functions_without_arrays()  # must precede imports of the package

# If JAX was imported earlier, it has already read the environment.
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_traceback_in_locations_limit", 0)
# The device count is fixed once JAX has started its backend.
jax.config.update("jax_num_cpu_devices", 8)
# JAX makes an MLIR context with all dialects for every lowered program, and the compiled program
# keeps it alive. A shared context saves a fifth of the time and half of the memory.
with contextlib.suppress(ImportError, AttributeError):  # a private API of JAX
    mlir = importlib.import_module("jax._src.interpreters.mlir")
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)

pytest_plugins = ["tests.times"]


@pytest.fixture
def x64():
    """Enables double precision during one test."""
    with jax.enable_x64(True):
        yield
