"""Fixtures shared by the tests."""

import jax
import pytest

# Before anything is computed: the device count is fixed once JAX has started.
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def x64():
    """Double precision inside one test."""
    with jax.enable_x64(True):
        yield
