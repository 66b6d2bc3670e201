"""Ctrl-C and SIGTERM: programs exit cleanly, without a traceback, at any point."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

_TOGETHER = 0.1  # signals within this many seconds count as one


def die_of_interrupts() -> None:
    """Lets Ctrl-C kill the process immediately, for phases in which nothing is written.

    During imports and interpreter shutdown, a `KeyboardInterrupt` may surface as any other error.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise Ctrl-C is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def tidy_interrupts() -> Iterator[None]:
    """Ends the block with `KeyboardInterrupt` on Ctrl-C or SIGTERM, so that it can clean up.

    A second signal kills the process immediately. SIGTERM also kills the process after the block.
    If a library has converted or swallowed the exception, it is raised at the end of the block.
    """
    came = list[int]()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Replace only these handlers, because any other one means that the signal is ignored, or that
    # the program handles it.
    ends = (signal.SIG_DFL, signal.default_int_handler)
    mine = [number for number, handler in before.items() if handler in ends]
    if threading.current_thread() is not threading.main_thread() or not mine:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        del frame
        came.append(number)
        _ignore_copies(mine)
        for each in mine:
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt

    for number in mine:
        signal.signal(number, interrupt)
    try:
        yield
    except BaseException as error:
        if came:
            raise KeyboardInterrupt from error
        raise
    else:
        if came:
            raise KeyboardInterrupt
    finally:
        for number in mine:
            signal.signal(number, before[number])
        if signal.SIGTERM in came:
            signal.raise_signal(signal.SIGTERM)


def _ignore_copies(numbers: Iterable[int]) -> None:
    """Ignores signals for a moment, because `timeout` signals a process and then its group."""
    for number in numbers:
        # Install an empty handler rather than SIG_IGN, because child processes inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
    time.sleep(_TOGETHER)


def _tell(text: str) -> None:
    """Writes to stderr from a signal handler, which may have interrupted another write there."""
    try:
        os.write(sys.stderr.fileno(), text.encode())
    except OSError:  # stderr is no file
        sys.stderr.write(text)


@contextmanager
def noted_signals(is_noting: bool, until: str) -> Iterator[list[int]]:
    """Records the first SIGINT or SIGTERM in a list rather than terminating.

    A second signal has its usual effect.

    Args:
      is_noting: whether to record signals; otherwise nothing changes.
      until: text that describes when the block checks the list.
    """
    noted: list[int] = []
    if not is_noting or threading.current_thread() is not threading.main_thread():
        yield noted
        return
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        noted.append(number)
        _ignore_copies(usual)
        restore()
        _tell(f"\n{until}; once more stops at once\n")

    for number in usual:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        restore()
