"""Errors that sweeps raise."""

# A module of its own: the command line catches these errors without importing JAX.

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class DivergenceError(FloatingPointError):
    """A model's loss or parameters are not finite; `partial` is the dataset of what is done."""

    def __init__(self, message: str, partial: Any) -> None:
        """Keeps the result so far."""
        super().__init__(message)
        self.partial = partial


class RefusedError(ValueError):
    """Wrong input, found before anything was computed or written."""


@contextmanager
def refusing(kinds: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
    """Raises `RefusedError` for errors of these kinds, in the same words."""
    try:
        yield
    except kinds as error:
        raise RefusedError(str(error)) from error


class InterruptedRunError(Exception):
    """A signal ended a run after a segment, whose state is saved, or before the first one."""

    def __init__(self, number: int, done: float | None) -> None:
        """Names the signal and the share of the work that is done; None if nothing new is."""
        where = "before it computed anything" if done is None else f"at {done:.0%} and saved"
        name = signal.Signals(number).name
        super().__init__(f"{name}: stopped {where}; continue with --resume")
        self.number = number
