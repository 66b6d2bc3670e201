"""Execution of a sweep: callbacks, checkpoints, devices and memory."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from fedjax_mm.checks.instances import check_instance
from fedjax_mm.checks.values import described
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.plan import Plan, Segment
from fedjax_mm.tools.screen import Report, screen

_is_shown = threading.Lock()


def _ignore(*given: Any) -> None:
    """Does nothing."""


class Callback(NamedTuple):
    """Functions called by a sweep, which cannot change it but can end it by raising an exception.

    With checkpoints, callbacks are called before the state is saved, and an exception discards
    unsaved work. In multi-process runs each process calls its own callbacks.

    Attributes:
      on_preparation: called with a label of the work that precedes the plan.
      on_start: called with the compiled plan before the first round.
      on_batch: called before a batch's first segment.
      on_segment: called after each segment, which takes about a second.
      on_parts: called with the numbers of finished and total parts, if an executor is used.

    Example:
      >>> from fedjax_mm import fedavg, mfa_rr, sweep
      >>> from fedjax_mm.sweeps import Execution, Grid, Setup
      >>> from fedjax_mm.tasks import quadratic
      >>> def build(learning_rate):
      ...     algorithm = fedavg(learning_rate, local_steps=5)
      ...     return Setup(quadratic(6, 4, mu=0.1), algorithm, mfa_rr(6, 2))
      >>> def report(segment):
      ...     losses = segment.records.metrics["loss"][-1]  # the last record's, [replicas, models]
      ...     print(segment.rounds, losses.shape)
      >>> watched = Execution(callbacks=[Callback(on_segment=report)])
      >>> grid = Grid(build, {"learning_rate": [0.05, 0.1]}, num_rounds=1, num_seeds=2)
      >>> result = sweep(grid, watched)  # doctest: +ELLIPSIS
      1 ...
    """

    on_preparation: Callable[[str], None] = _ignore
    on_start: Callable[[Plan], None] = _ignore
    on_batch: Callable[[Segment], None] = _ignore
    on_segment: Callable[[Segment], None] = _ignore
    on_parts: Callable[[int, int], None] = _ignore


def check_callbacks(callbacks: Any) -> None:
    """Raises `ValueError` unless `callbacks` is a list of callbacks."""
    words = "give a list, such as [Callback(on_segment=report)] or [progress(report)]"
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Sequence):
        raise ValueError(f"execution.callbacks is {described(callbacks)}; {words}")
    for callback in callbacks:
        check_instance("one of execution.callbacks", callback, Callback, words)


def progress(report: Report) -> Callback:
    """Makes a callback that reports progress, before the first round and after each segment.

    Example:
      >>> progress(print).on_preparation("compiling 3 programs")
      compiling 3 programs 0 1
    """

    def of(segment: Segment) -> None:
        report(segment.label, int(segment.work_done), int(segment.total_work))

    def of_parts(ended: int, of: int) -> None:
        report(f"{ended} of {of} parts", ended, of)

    return Callback(lambda what: report(what, 0, 1), on_batch=of, on_segment=of, on_parts=of_parts)


class Execution(NamedTuple):
    """Options for executing a sweep, which do not affect its results.

    Attributes:
      callbacks: called before the sweep and after each segment, such as `progress`.
      checkpoints: the store of unfinished work, opened and finally discarded by the caller.
      save_every: the seconds between saves.
      client_states: a directory for files with the states of clients, such as SCAFFOLD's, of which
        only those of a round's clients are then in memory.
        Results are the same. None keeps all states on the device.
      keep_state: whether to keep the final state of all runs in the directory of the checkpoints,
        or of the part, so that a longer sweep can go on from it.
      continue_from: the directory in which a shorter sweep kept its state; None goes on from the
        state in the directory of the checkpoints, if they resume.
      split: "replicas" or "clients", the axis to split over devices; see `layout`.
      memory: the memory limit in bytes; defaults to 60 % of the free memory.
      label: a prefix of progress labels that distinguishes several sweeps.
      executor: an object with `submit(fn, *args)`, such as a `concurrent.futures.Executor`, whose
        workers compute the parts of the sweep; callbacks then report only finished parts. None
        computes all runs in this process.
      num_parts: N, the number of parts for an executor.
      at_once: the maximum number of parts at a time; defaults to all of them.
      progress: whether a terminal or a notebook shows the progress of work over two seconds.
    """

    callbacks: Sequence[Callback] = ()
    checkpoints: Checkpoints | None = None
    save_every: float = 30.0
    client_states: Path | str | None = None
    keep_state: bool = False
    continue_from: Path | str | None = None
    split: Literal["replicas", "clients"] | None = None
    memory: float | None = None
    label: str = ""
    executor: Any = None
    num_parts: int = 8
    at_once: int | None = None
    progress: bool = True

    def in_words(self, what: str) -> str:
        """The progress label for some work."""
        return ", ".join(filter(None, (self.label, what)))

    @contextmanager
    def stage(self, name: str) -> Iterator["Execution"]:
        """Yields the execution of one of several sweeps, which a resumed run does not repeat."""
        saved = self.checkpoints and self.checkpoints.stage(name)
        with saved or nullcontext():
            yield self._replace(checkpoints=saved)

    def report(self, what: str) -> None:
        """Reports work that precedes the plan to the callbacks."""
        for callback in self.callbacks:
            callback.on_preparation(self.in_words(what))


@contextmanager
def watched(how: Execution) -> Iterator[Execution]:
    """Adds a callback that shows progress, if it is wanted and there is a screen.

    If several sweeps run at a time, for example one in a callback of another, the first is shown.
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
