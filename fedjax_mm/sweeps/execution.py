"""Execution of a sweep: callbacks, checkpoints, devices and memory."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from fedjax_mm.sweeps.callbacks import Callback
from fedjax_mm.sweeps.checkpoint import Checkpoints


class Execution(NamedTuple):
    """Options for executing a sweep, which do not affect its results.

    Attributes:
      callbacks: called before the sweep and after each segment, such as `progress`.
      checkpoints: the store of unfinished work, opened and finally discarded by the caller.
      save_every: the seconds between saves.
      split: "replicas" or "clients", the axis to split over devices; see `layout`.
      memory: the memory limit in bytes; defaults to 60 % of the free memory.
      label: a prefix of progress labels that distinguishes several sweeps.
      executor: an object with `submit(fn, *args)`, such as a `concurrent.futures.Executor`, whose
        workers compute the parts of the sweep; callbacks then report only finished parts. None
        computes all runs in this process.
      num_parts: N, the number of parts for an executor.
      at_once: the maximum number of parts submitted at a time; defaults to all of them.
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
        """Returns the progress label for some work."""
        return ", ".join(filter(None, (self.label, what)))

    def report(self, what: str) -> None:
        """Reports work that precedes the plan to the callbacks."""
        for callback in self.callbacks:
            callback.on_preparation(self.in_words(what))
