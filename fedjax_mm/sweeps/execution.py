"""Execution of a sweep: how it is carried out, as opposed to what is computed."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.plan import Plan

Progress = Callable[[str, int, int], None]
"""Receives the label of the batch in progress, the finished work and the total work."""


class Execution(NamedTuple):
    """How a sweep is carried out, as opposed to what is computed: results do not depend on it.

    Attributes:
      progress: called with what is being done, and the local trainings done and to do.
      checkpoints: where to save unfinished work; the caller opens it, and discards it at the end.
      save_every: seconds between two saves.
      split: "replicas" or "clients", the devices' axis; see `layout`.
      memory: bytes that may be used; by default 60 % of what is free.
      announce: called with the plan before the first run.
    """

    progress: Progress | None = None
    checkpoints: Checkpoints | None = None
    save_every: float = 30.0
    split: Literal["replicas", "clients"] | None = None
    memory: float | None = None
    announce: Callable[[Plan], None] | None = None
