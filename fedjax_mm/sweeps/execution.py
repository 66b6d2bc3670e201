"""Execution of a sweep: callbacks, checkpoints, devices and memory."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from fedjax_mm.sweeps.callbacks import Callback
from fedjax_mm.sweeps.checkpoint import Checkpoints


class Execution(NamedTuple):
    """Options for carrying out a sweep, on which its results do not depend.

    Attributes:
      callbacks: called before the sweep and after each segment, such as `progress`.
      checkpoints: the store of unfinished work, which the caller opens, and discards at the end.
      save_every: seconds between two saves.
      split: "replicas" or "clients", the axis that is split over devices; see `layout`.
      memory: bytes that may be used; by default 60 % of the free memory.
      label: comes before the labels of work in progress, for one of several sweeps.
      executor: has `submit(fn, *args)`, such as a `concurrent.futures.Executor`, and computes the
        parts of the sweep in its workers; None computes all runs here. Callbacks then hear of
        parts alone.
      num_parts: N, of an executor.
      at_once: the most parts that an executor gets at the same time; by default all.
    """

    callbacks: Sequence[Callback] = ()
    checkpoints: Checkpoints | None = None
    save_every: float = 30.0
    split: Literal["replicas", "clients"] | None = None
    memory: float | None = None
    label: str = ""
    executor: Any = None
    num_parts: int = 8
    at_once: int | None = None

    def in_words(self, what: str) -> str:
        """Returns the label of some work in progress."""
        return ", ".join(filter(None, (self.label, what)))

    def report(self, what: str) -> None:
        """Reports work that comes before the plan to the callbacks."""
        for callback in self.callbacks:
            callback.on_preparation(self.in_words(what))
