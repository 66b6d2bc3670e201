"""Settings and fixtures of the fast tests, for the full ones."""

from tests.conftest import x64  # noqa: F401

pytest_plugins = ["tests.times"]
