"""Fixtures shared by the tests."""

import jax
import pytest


@pytest.fixture
def x64():
    """Double precision inside one test."""
    with jax.enable_x64(True):
        yield
