"""Execution of a sweep: reports, checkpoints, devices and memory."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.plan import Plan

Progress = Callable[[str, int, int], None]
"""Receives the label of the batch in progress, the finished work and the total work."""


class Execution(NamedTuple):
    """Options for carrying out a sweep, on which its results do not depend.

    Attributes:
      progress: called with the label of the work in progress, and the local trainings done and to
        do.
      checkpoints: the store of unfinished work, which the caller opens, and discards at the end.
      save_every: seconds between two saves.
      split: "replicas" or "clients", the axis that is split over devices; see `layout`.
      memory: bytes that may be used; by default 60 % of the free memory.
      announce: called with the plan before the first run.
    """

    progress: Progress | None = None
    checkpoints: Checkpoints | None = None
    save_every: float = 30.0
    split: Literal["replicas", "clients"] | None = None
    memory: float | None = None
    announce: Callable[[Plan], None] | None = None
