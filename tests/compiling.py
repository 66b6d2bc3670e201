"""How programs of the tests are compiled, where the usual way of `tests.conftest` does not do."""

import contextlib
from collections.abc import Iterator

import jax

USUAL = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "false", "XLA_FLAGS": ""}
"""The environment of child processes that compute longer than they compile."""


@contextlib.contextmanager
def optimised() -> Iterator[None]:
    """Programs compiled inside are optimised as users' are: for what asserts their last digits."""
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
