"""Flags of XLA that keep numbers right on CPUs."""

# This module imports JAX and NumPy late, because `fedjax_mm/__init__.py` imports it.

import functools
import os
import sys
import warnings
from importlib.metadata import version

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

# XLA aborts the process at a flag that it does not know. These versions know all of the above.
_KNOWN = ((0, 9), (0, 13))


def add_flags(flags: str) -> None:
    """Adds flags to XLA_FLAGS. XLA reads them once, when JAX starts its first backend."""
    given = os.environ.get("XLA_FLAGS", "")
    if flags not in given:
        os.environ["XLA_FLAGS"] = f"{flags} {given}".strip()  # the user's flags win


def flags_of_results() -> str:
    """Returns XLA_FLAGS without `PATIENT`, which does not affect results."""
    return os.environ.get("XLA_FLAGS", "").replace(PATIENT, "").strip()


def use_safe_fusions() -> bool:
    """Sets `SAFE`, unless the user's XLA_FLAGS have it or JAX has started.

    Returns:
      Whether numbers are known to be right. If not, `check_fusions` decides.
    """
    if _FUSION in os.environ.get("XLA_FLAGS", ""):
        return SAFE in os.environ["XLA_FLAGS"]
    numbers = tuple(map(int, version("jaxlib").split(".")[:2]))
    if _has_started() or not _KNOWN[0] <= numbers < _KNOWN[1]:
        return False
    add_flags(SAFE)
    return True


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


_IS_SAFE = use_safe_fusions()


@functools.cache
def check_fusions() -> None:
    """Warns if this process compiles wrong programs. Does nothing where `SAFE` was set in time."""
    import jax

    if _IS_SAFE or jax.default_backend() != "cpu":
        return
    with jax.ensure_compile_time_eval():
        is_right = canary()
    if not is_right:
        warnings.warn(
            f"XLA returns wrong numbers in this process, because it fuses matrix products: import "
            f"fedjax_mm before the first computation of JAX, or start Python with XLA_FLAGS={SAFE}",
            stacklevel=2,
        )


def canary() -> bool:
    """Returns whether XLA computes a product with a broadcast scalar correctly on this backend."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def sums(rows: jax.Array, scalar: jax.Array) -> jax.Array:
        errors = (rows @ jnp.broadcast_to(scalar, (4, 2000))).reshape(6, 9, 2000) - 1
        return (errors**2).sum(1)

    rows = np.ones((54, 4), np.float32)
    return bool((np.asarray(jax.jit(sums)(rows, np.float32(0))) == 9).all())
