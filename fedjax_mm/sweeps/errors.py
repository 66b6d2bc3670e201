"""Errors raised by sweeps."""

# A separate module lets the command line catch these errors without importing JAX.

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class DivergenceError(FloatingPointError):
    """A model's loss or parameters are not finite.

    The attribute `partial` is the Dataset of the result so far, or None for a part of a sweep.
    """

    def __init__(self, message: str, partial: Any = None) -> None:
        """Stores the result so far."""
        super().__init__(message)
        self.partial = partial


class RefusedError(ValueError):
    """Raised for invalid input, before anything is computed or written."""


@contextmanager
def refusing(kinds: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
    """Converts errors of these types to `RefusedError`, with the same message.

    Example:
      >>> with refusing():
      ...     int("3 seeds")
      Traceback (most recent call last):
      fedjax_mm.sweeps.errors.RefusedError: invalid literal for int() with base 10: '3 seeds'
    """
    try:
        yield
    except kinds as error:
        raise RefusedError(str(error)) from error


class InterruptedRunError(Exception):
    """Raised after a signal ended a run, whose completed segments are saved."""

    def __init__(self, number: int, done: float | None) -> None:
        """Stores the signal and the fraction of work done, or None if nothing new was computed."""
        where = "before it computed anything" if done is None else f"at {done:.0%} and saved"
        name = signal.Signals(number).name
        super().__init__(
            f"{name}: stopped {where}; continue with --resume, "
            "or in Python by the same call with Checkpoints(directory, resume=True)"
        )
        self.number = number
