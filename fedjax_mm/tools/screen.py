"""Progress on a screen: a bar in a terminal, and a line in a notebook."""

import datetime
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

# This module does not import JAX, because the command line imports it first.

Report = Callable[[str, int, int], None]
"""A function of the label of the work in progress, the finished work and the total work."""

NO_FORECAST = "forecast after a round"

_SHORT = 2.0  # seconds of work for which nothing is shown
_UPDATE_SECONDS = 1.0  # between changes of a notebook's line


def screen() -> AbstractContextManager[Report] | None:
    """Makes a context that shows progress, or None if nobody would see it."""
    ipython = sys.modules.get("IPython")
    if ipython and hasattr(ipython.get_ipython(), "kernel"):
        return line(_SHORT)
    if not sys.stderr.isatty():
        return None
    from rich.console import Console

    return bar(Console(stderr=True, markup=False, emoji=False), _SHORT)


@contextmanager
def bar(console: Any, after: float = 0.0) -> Iterator[Report]:
    """Shows the current work, the elapsed time and the remaining time in a terminal.

    Args:
      console: the terminal, a `rich.console.Console`.
      after: the seconds of work before anything is shown.
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    description = TextColumn("{task.description}", markup=False)
    columns = (
        *(SpinnerColumn(), description, BarColumn(), TextColumn("{task.percentage:>3.0f} %")),
        *(TimeElapsedColumn(), TextColumn("{task.fields[left]}")),
    )
    # A cell that runs a command gives it a terminal, and keeps every frame.
    per_second = 1 if "JPY_PARENT_PID" in os.environ else 10
    bars = Progress(*columns, console=console, transient=True, refresh_per_second=per_second)
    number, left = bars.add_task("starting", total=None, left=""), time_left()

    def report(label: str, done: int, total: int) -> None:
        forecast = left(done, total) or NO_FORECAST
        bars.update(number, description=label, completed=done, total=total, left=forecast)

    start = threading.Timer(after, bars.start)
    start.daemon = True
    start.start()
    try:
        yield report
    finally:
        start.cancel()
        start.join()
        bars.stop()


@contextmanager
def line(after: float) -> Iterator[Report]:
    """Shows the current work and the remaining time in a notebook, in one line that disappears."""
    display = importlib.import_module("IPython.display").display  # loaded by every notebook
    left, last = time_left(), time.monotonic() + after - _UPDATE_SECONDS
    shown: Any = None

    def report(label: str, done: int, total: int) -> None:
        nonlocal last, shown
        text = f"{done / total:.0%} {label}, {left(done, total) or NO_FORECAST}"
        if time.monotonic() - last < _UPDATE_SECONDS:
            return
        last = time.monotonic()
        shown = shown or display(display_id=True)
        shown.update({"text/plain": text}, raw=True)

    try:
        yield report
    finally:
        if shown is not None:
            shown.update({"text/plain": ""}, raw=True)


def time_left() -> Callable[[int, int], str]:
    """Makes a function that estimates the remaining time from the speed so far."""
    start: tuple[float, int, int] | None = None

    def left(done: int, total: int) -> str:
        nonlocal start
        now = time.monotonic()
        # Restart the clock if `done` has not increased, because the first reports after compilation
        # may include the work of an earlier session, and a new total starts from 0.
        if start is None or total != start[2] or done <= start[1]:
            start = now, done, total
            return ""
        seconds = (now - start[0]) * (total - done) / (done - start[1])
        return f"{in_words(seconds)} left"

    return left


def in_words(seconds: float) -> str:
    """Formats a duration as hours, minutes and seconds."""
    return str(datetime.timedelta(seconds=round(seconds)))
