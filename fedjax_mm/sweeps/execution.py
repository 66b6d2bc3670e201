"""Execution of a sweep: callbacks, checkpoints, devices and memory."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import jax

from fedjax_mm.sweeps.callbacks import Callback, check_callbacks, progress
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.screen import screen

_is_shown = threading.Lock()


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
      progress: whether a terminal or a notebook shows the progress of work over two seconds.
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
    progress: bool = True

    def in_words(self, what: str) -> str:
        """Returns the progress label for some work."""
        return ", ".join(filter(None, (self.label, what)))

    def report(self, what: str) -> None:
        """Reports work that precedes the plan to the callbacks."""
        for callback in self.callbacks:
            callback.on_preparation(self.in_words(what))


@contextmanager
def watched(how: Execution) -> Iterator[Execution]:
    """Adds a callback that shows progress, if it is wanted and there is a screen.

    Of several sweeps at a time, for example one in a callback of another, the first is shown.
    """
    shown = screen() if how.progress and jax.process_index() == 0 else None
    if shown is None or not _is_shown.acquire(blocking=False):
        yield how
        return
    try:
        check_callbacks(how.callbacks)
        with shown as report:
            yield how._replace(callbacks=[*how.callbacks, progress(report)])
    finally:
        _is_shown.release()
