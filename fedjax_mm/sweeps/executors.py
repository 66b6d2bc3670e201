"""Computes parts of a sweep on an executor: a process pool, Slurm jobs by submitit, or Dask."""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from fedjax_mm.base import Params
from fedjax_mm.checks import check_count, described
from fedjax_mm.interrupts import noted_signals
from fedjax_mm.sweeps.checkpoint import Saved
from fedjax_mm.sweeps.errors import (
    DivergenceError,
    InterruptedRunError,
    RefusedError,
    refusing,
)
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.parts import Part, Piece, join_parts
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.sweeps.saving import data_of, identity

TRIES = 3
"""The number of times a part is submitted before the sweep fails."""

_POLL_SECONDS = 0.1


class Job(Protocol):
    """A call submitted to an executor, such as a `concurrent.futures.Future`."""

    def done(self) -> bool:
        """Returns whether the call has ended."""
        ...

    def result(self) -> Any:
        """Returns the result of the call, or raises its error."""
        ...


class Executor(Protocol):
    """Executes calls elsewhere, such as a `concurrent.futures.Executor` or submitit's executor."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Job:
        """Submits a call."""
        ...


class _Failure(NamedTuple):
    """An error that would recur on every worker, as a value that any executor can return."""

    words: str
    is_divergence: bool


def compute_parts(
    compute: Callable[[Part], Piece],
    parts: Sequence[Part],
    executor: Executor,
    report: Callable[[int], None] = lambda done: None,
    at_once: int | None = None,
) -> Generator[Piece]:
    """Computes parts on an executor, and yields their results as they finish.

    If a worker dies, its part is submitted again, at most three times including the first.

    Args:
      compute: computes one part; it is pickled for the workers with everything it references.
      parts: the parts.
      executor: distributes parts to workers, on which this package must be installed.
      report: called with the number of finished parts.
      at_once: the maximum number of parts submitted at a time; defaults to all of them.

    Raises:
      RefusedError, DivergenceError: if a part itself fails, which cancels the others.
      ChildProcessError: if a part's workers died three times, or the executor rejected it.
    """
    sent, is_double = _pickled(compute), jnp.result_type(float) == np.float64
    left, running = list(parts), list[tuple[Part, Job]]()
    tries, ended = Counter[Part](), 0
    try:
        while left or running:
            while left and (at_once is None or len(running) < at_once):
                part = left.pop(0)
                tries[part] += 1
                running.append((part, _given(executor, sent, part, is_double)))
            report(ended)
            over = [each for each in running if each[1].done()]
            running = [each for each in running if each not in over]
            problem: Exception | None = None
            for part, job in over:  # check all of them, because good results are saved
                try:
                    piece = job.result()
                except Exception as error:  # executors raise different errors for dead workers
                    left.append(part)
                    if tries[part] == TRIES:
                        words = f"part {part} was submitted {TRIES} times, but its workers died"
                        problem = ChildProcessError(f"{words}: {error}")
                    continue
                if isinstance(piece, _Failure):
                    kind = partial(DivergenceError, partial=None)
                    problem = (kind if piece.is_divergence else RefusedError)(piece.words)
                    continue
                ended += 1
                yield piece
            if problem:
                raise problem
            time.sleep(_POLL_SECONDS if running and not over else 0)
        report(ended)
    finally:
        for _, job in running:
            if cancel := getattr(job, "cancel", None):
                cancel()


def _given(executor: Executor, sent: bytes, part: Part, is_double: bool) -> Job:
    """Submits a part.

    Raises:
      ChildProcessError: if the executor rejects it.
    """
    try:
        return executor.submit(_work, sent, part, is_double)
    except Exception as error:  # raised by a pool with killed processes, or by a scheduler
        raise ChildProcessError(f"the executor rejected part {part}: {error}") from error


def _work(sent: bytes, part: Part, is_double: bool) -> Piece | _Failure:
    """Computes a part in a worker."""
    import cloudpickle

    with jax.enable_x64(is_double):
        try:
            piece: Piece = cloudpickle.loads(sent)(part)
        except OSError:  # a disk or connection error may not recur on other workers
            raise
        except Exception as error:  # any other error would recur on every worker
            # Send only the message, because an error may reference objects that cannot be pickled.
            name = "" if isinstance(error, ValueError | DivergenceError) else type(error).__name__
            words = ": ".join(filter(None, (f"part {part}", name, str(error))))
            return _Failure(words, isinstance(error, DivergenceError))
    return piece


def _pickled(compute: Callable[[Part], Piece]) -> bytes:
    """Pickles a function to bytes, which any executor can send.

    Raises:
      ImportError: if cloudpickle is not installed.
      TypeError: if the function references something that cannot be pickled.
    """
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError("executors need pip install 'fedjax-mm[cluster]'") from error
    try:
        sent: bytes = cloudpickle.dumps(compute)
    except Exception as error:  # pickling calls methods of arbitrary objects
        raise TypeError(f"the sweep cannot be sent to workers: {error}") from error
    return sent


def by_executor(
    grid: Grid, how: Execution, compute: Callable[[Part], Piece]
) -> tuple[xr.Dataset, list[Params] | None]:
    """Computes a sweep in parts on an executor and returns the result, and parameters if kept.

    With checkpoints, finished parts are saved and not recomputed.

    Args:
      grid: the runs.
      how: how to execute the sweep, with the executor and the number of parts.
      compute: computes a part in a worker.

    Raises:
      DivergenceError, ChildProcessError: as in `compute_parts`.
      InterruptedRunError: if SIGINT or SIGTERM arrived, and there are checkpoints.
      RefusedError: if a part was rejected, or the unfinished run is a different one.
    """
    of, saved = check_count("num_parts", how.num_parts), how.checkpoints
    at_once = None if how.at_once is None else check_count("at_once", how.at_once)
    parts = [Part(number, of) for number in range(1, of + 1)]
    if jax.process_count() > 1:
        raise ValueError("an executor is for one process; leave out --distributed and --process")
    if not callable(getattr(how.executor, "submit", None)):
        raise TypeError(
            f"executor is {described(how.executor)}; give an object with submit(fn, *args), such "
            "as a concurrent.futures.Executor"
        )
    done = dict[Part, Piece]()
    if saved:
        with refusing():
            about = identity(grid, how.split) | data_of(programs_of(grid)) | {"parts": of}
            if saved.claim(about) is None:
                saved.begin({})
        found = {part: saved.load(part.number, _check) for part in parts}
        done = {part: Piece.of(each.arrays, each.about) for part, each in found.items() if each}

    def report(ended: int) -> None:
        ended += len(done)
        for callback in how.callbacks:
            callback.on_parts(ended, of)
        if signals:
            raise InterruptedRunError(signals[-1], ended / of if ended else None)

    left = [part for part in parts if part not in done]
    given = compute_parts(compute, left, how.executor, report, at_once)

    def pieces() -> Iterator[Piece]:
        yield from done.values()
        for piece in given:
            if saved:
                saved.save(piece.part.number, grid.num_rounds, *piece.content)
            yield piece

    until = "stopping; parts that have ended are saved"
    with noted_signals(saved is not None, until) as signals, closing(given):
        return join_parts(grid, pieces())


def _check(saved: Saved) -> None:
    """Raises an error if the arrays of a saved part do not form a piece."""
    Piece.of(saved.arrays, saved.about)
