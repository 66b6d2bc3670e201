"""Settings and fixtures shared by the tests.

All tests share one cache of compiled programs, with each other, with their child processes and
with later runs: it lies in the user's cache directory, or where FEDJAX_MM_TEST_CACHE says.
Programs are compiled as quickly as XLA can, which makes them slower; what tests assert does not
depend on how well they are optimised, but where they say so by `tests.compiling.optimised`.
XLA_FLAGS of the caller come last, and win.
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
    # Without fusion emitters a program compiles 2 to 3 times faster. Later jaxlibs have nothing
    # else, and XLA ends the process where it does not know a flag.
    _QUICK = f"--xla_cpu_use_fusion_emitters=false {_QUICK}"
_GIVEN = os.environ.get("XLA_FLAGS", "")
# The folder of `fedjax_mm.sweeps.cache`, which imports JAX and so must not be imported before the
# environment is set.
_HAS_ZSTD = sys.version_info >= (3, 14) or importlib.util.find_spec("zstandard")
_FOLDER = f"jaxlib-{version('jaxlib')}-cpu-{'zstd' if _HAS_ZSTD else 'zlib'}"
# In the environment, for workers and child processes.
os.environ |= {
    "XLA_FLAGS": _GIVEN if _QUICK in _GIVEN else f"{_QUICK} {_GIVEN}".strip(),
    "XDG_CACHE_HOME": _PLACE,  # where the command line keeps its own
    "JAX_COMPILATION_CACHE_DIR": str(Path(_PLACE) / "fedjax_mm" / "xla" / _FOLDER),
    "JAX_COMPILATION_CACHE_MAX_SIZE": "-1",  # at a limit each of thousands of entries is looked at
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # before it is imported
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # nobody reads where an instruction comes from
}

import jax  # noqa: E402
import pytest  # noqa: E402

from tests.shapes import leave_others_alone  # noqa: E402

leave_others_alone()  # before anything of the package is imported

# JAX may have been imported before, and reads the environment then.
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_traceback_in_locations_limit", 0)
# Before anything is computed: the device count is fixed once JAX has started.
jax.config.update("jax_num_cpu_devices", 8)
# JAX makes a context with all dialects for every program that it lowers, and the compiled program
# keeps it: a fifth of the time, and half of the memory. One context serves all.
with contextlib.suppress(ImportError, AttributeError):  # inside JAX, where nothing is promised
    mlir = importlib.import_module("jax._src.interpreters.mlir")
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)

pytest_plugins = ["tests.times"]


@pytest.fixture
def x64():
    """Double precision inside one test."""
    with jax.enable_x64(True):
        yield
