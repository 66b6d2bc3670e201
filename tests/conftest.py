"""Settings and fixtures shared by the tests."""

import os
from pathlib import Path

_HOME = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
# Workers and child processes find it set, and share the compiled programs.
_PLACE = os.environ.setdefault("FEDJAX_MM_TEST_CACHE", str(Path(_HOME) / "fedjax_mm_tests"))
os.environ |= {
    "XDG_CACHE_HOME": _PLACE,  # where the command line keeps its own
    "JAX_COMPILATION_CACHE_DIR": str(Path(_PLACE) / "fedjax_mm" / "xla"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

import jax  # noqa: E402
import pytest  # noqa: E402

for _name in (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
):
    # JAX may have been imported before.
    _value = os.environ[_name.upper()]
    jax.config.update(_name, _value if _name.endswith("dir") else int(_value))

# Before anything is computed: the device count is fixed once JAX has started.
jax.config.update("jax_num_cpu_devices", 8)

pytest_plugins = ["tests.times"]


@pytest.fixture
def x64():
    """Double precision inside one test."""
    with jax.enable_x64(True):
        yield
