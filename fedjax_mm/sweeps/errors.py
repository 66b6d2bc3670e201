"""What a sweep raises; the command line tells it apart without importing what computes."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr


class DivergenceError(FloatingPointError):
    """A model's loss or parameters stopped being finite; `partial` is the result until then."""

    def __init__(self, message: str, partial: xr.Dataset) -> None:
        """The message and the result."""
        super().__init__(message)
        self.partial = partial


class RefusedError(ValueError):
    """A sweep that cannot be carried out as asked; nothing was computed."""


class InterruptedRunError(Exception):
    """A signal ended a run after a segment; its state is saved."""

    def __init__(self, number: int, done: float) -> None:
        """The signal, and the part of the work that is done."""
        name = signal.Signals(number).name
        super().__init__(f"{name}: stopped at {done:.0%} and saved; continue with --resume")
        self.number = number
