"""Optimised compilation, for tests that the quick compilation of `tests.conftest` does not suit."""

import contextlib
from collections.abc import Iterator

import jax

USUAL = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "false", "XLA_FLAGS": ""}
"""Environment of child processes that compute longer than they compile."""


@contextlib.contextmanager
def optimised() -> Iterator[None]:
    """Compiles with XLA's optimisations inside the block, for assertions about the last digits."""
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
