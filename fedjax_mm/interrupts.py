"""Ctrl-C and SIGTERM: a program ends without leftovers and without a traceback, at any point."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def die_of_interrupts() -> None:
    """Lets Ctrl-C kill the process at once, for the time in which it writes nothing.

    While modules are imported, or the interpreter shuts down, a `KeyboardInterrupt` may surface as
    any other error.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else Ctrl-C is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def tidy_interrupts() -> Iterator[None]:
    """Ends the block with `KeyboardInterrupt` at Ctrl-C, so that it tidies up.

    A second Ctrl-C kills the process at once. SIGTERM is treated alike, and kills the process after
    the block. Libraries may turn the exception into another error, or swallow it in a callback; it
    is then raised again.
    """
    came, usual = list[signal.Signals](), sys.unraisablehook
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ends = (signal.SIG_DFL, signal.default_int_handler)  # else ignored, or handled by the program
    mine = [number for number, handler in before.items() if handler in ends]
    if threading.current_thread() is not threading.main_thread() or not mine:
        yield
        return

    def handle(handler: Any) -> None:
        for number in mine:
            signal.signal(number, handler)

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(signal.Signals(number))
        if _is_in("report", frame):  # where the exception would be lost once more
            _thread.start_new_thread(again, ())
            return
        handle(signal.SIG_DFL)
        raise KeyboardInterrupt

    def again() -> None:
        time.sleep(0.01)  # the callback's end is near
        if hasattr(signal, "pthread_kill"):  # which wakes the thread if it waits
            signal.pthread_kill(threading.main_thread().ident or 0, came[-1])
        else:
            _thread.interrupt_main(came[-1])

    def report(lost: Any) -> None:
        if not came:
            usual(lost)
        elif issubclass(lost.exc_type, KeyboardInterrupt):
            handle(interrupt)
            _thread.start_new_thread(again, ())

    sys.unraisablehook = report
    handle(interrupt)
    try:
        yield
    except BaseException as error:
        if came:
            raise KeyboardInterrupt from error
        raise
    else:
        # Raise the exception again, because a library may have cleared it.
        if came:
            raise KeyboardInterrupt
    finally:
        for number in mine:
            signal.signal(number, before[number])
        sys.unraisablehook = usual
        if signal.SIGTERM in came:
            signal.raise_signal(signal.SIGTERM)


@contextmanager
def noted_signals(is_noting: bool, until: str) -> Iterator[list[int]]:
    """Collects the first SIGINT or SIGTERM in a list instead of dying of it.

    The second one has its usual effect.

    Args:
      is_noting: whether to collect signals; else nothing is changed.
      until: text for the user on when the block looks at the list.
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
        restore()
        print(f"\n{until}; once more stops at once", file=sys.stderr)

    for number in usual:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        restore()


def _is_in(name: str, frame: FrameType | None) -> bool:
    """Returns whether a function of this file is being called in a frame."""
    while frame and (frame.f_code.co_name, frame.f_code.co_filename) != (name, __file__):
        frame = frame.f_back
    return frame is not None
