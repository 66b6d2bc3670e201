"""Ctrl-C and SIGTERM: nothing is left behind, nobody sees a traceback, wherever they came."""

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
    """Lets Ctrl-C end the process at once, as long as it writes nothing.

    While modules are imported, or the interpreter ends, an exception may come out as anything.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else they are ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def tidy_interrupts() -> Iterator[None]:
    """Ends the block with `KeyboardInterrupt` at Ctrl-C, so that it tidies up; twice ends at once.

    So does SIGTERM, of which the process dies behind the block. The libraries below make other
    errors of the exception, or swallow it in a callback: then it comes again.
    """
    came, usual = list[signal.Signals](), sys.unraisablehook
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ends = (signal.SIG_DFL, signal.default_int_handler)  # else it is ignored, or another's
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
        # A library may have cleared the exception: it is raised again.
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
    """Notes SIGINT and SIGTERM instead of dying of them; the second one has its usual effect.

    Args:
      is_noting: whether to; else nothing is changed.
      until: when the block looks at the list that it gets, for the user.
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
