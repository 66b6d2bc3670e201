"""Terminal output: text, tables and progress."""

import datetime
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_Report = Callable[[str, int, int], None]
"""Receives the label of the work in progress, the finished work and the total work."""

_LOG_SECONDS = 30.0
_NO_FORECAST = "forecast after a round"


def printable(text: str) -> str:
    r"""Escapes control characters, with which text from others could change the terminal.

    Example:
      >>> printable(chr(27) + "[31m") == r"\x1b[31m"
      True
    """
    return "".join(x if x.isprintable() or x == "\n" else repr(x)[1:-1] for x in text)


class _Console(Console):
    """A console that prints all text, including the cells of tables, by `printable`."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text), **how)


# Disable markup and emoji, because labels, paths and messages may contain "[/x]" or ":x:".
console = _Console(markup=False, emoji=False)
notes = _Console(stderr=True, markup=False, emoji=False)


def say(text: str | Text, on: Console = console, style: str | None = None) -> None:
    """Prints text without interpreting markup or wrapping lines."""
    on.print(text, style=style, highlight=False, soft_wrap=True)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Prints our warnings as single lines, without their location in the code."""
    # Change only the format, because code that records warnings replaces `showwarning`.
    format_warning = warnings.formatwarning

    def line(message: Warning | str, category: type[Warning], *args: Any, **options: Any) -> str:
        if category is UserWarning:
            return f"fedjax-mm: {message}\n"
        return format_warning(message, category, *args, **options)

    warnings.formatwarning = line
    try:
        yield
    finally:
        warnings.formatwarning = format_warning


def show_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], on: Console = console, **how: Any
) -> None:
    """Prints a table, passing rich's options in `how`."""
    rows = [*rows]
    # In a narrow terminal wrap headers before cells, because rich would wrap the longest text.
    columns = list(zip(header, *rows, strict=True))
    least = [max(map(len, (*name.split(), *cells)), default=0) for name, *cells in columns]
    is_tight = sum(max(map(len, column)) + 3 for column in columns) >= on.width
    is_enough = sum(width + 3 for width in least) < on.width
    table = Table(**how)
    for name, width in zip(header, least, strict=True):
        table.add_column(name, max_width=width if is_tight and is_enough else None)
    for row in rows:
        table.add_row(*row)
    on.print(table)


@contextmanager
def shown_progress() -> Iterator[_Report]:
    """Shows a progress bar with the current work, the elapsed time and the remaining time.

    Output that is not a terminal, such as a cluster's log, gets an occasional line instead.
    """
    if not notes.is_terminal:
        with reminded(log_lines()) as report:
            yield report
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    description = TextColumn("{task.description}", markup=False)
    columns = (
        *(SpinnerColumn(), description, BarColumn(), TextColumn("{task.percentage:>3.0f} %")),
        *(TimeElapsedColumn(), TextColumn("{task.fields[left]}")),
    )
    with Progress(*columns, console=notes, transient=True) as bars:
        bar, left = bars.add_task("starting", total=None, left=""), time_left()

        def report(label: str, done: int, total: int) -> None:
            forecast = left(done, total) or _NO_FORECAST
            bars.update(bar, description=label, completed=done, total=total, left=forecast)

        yield report


def log_lines() -> _Report:
    """Returns a function that prints progress at most twice a minute."""
    left, last = time_left(), time.monotonic()

    def report(label: str, done: int, total: int) -> None:
        nonlocal last
        forecast = left(done, total)
        if time.monotonic() - last >= _LOG_SECONDS:
            last = time.monotonic()
            say(f"{done / total:.0%} {label} {forecast}", notes)

    return report


@contextmanager
def reminded(report: _Report) -> Iterator[_Report]:
    """Prints an occasional reminder of the current work while no progress is reported.

    A round with many local steps may take hours without a report.
    """
    is_over, last, doing = threading.Event(), time.monotonic(), "starting"

    def told(label: str, done: int, total: int) -> None:
        nonlocal last, doing
        last, doing = time.monotonic(), f"{done / total:.0%} {label}"
        report(label, done, total)

    def remind() -> None:
        while not is_over.wait(_LOG_SECONDS):
            if (seconds := time.monotonic() - last) >= _LOG_SECONDS:
                say(f"{doing} for {_in_words(seconds)}; {_NO_FORECAST}", notes)

    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()
    try:
        yield told
    finally:
        is_over.set()
        reminder.join()


def time_left() -> Callable[[int, int], str]:
    """Returns a function that estimates the remaining time from the speed so far."""
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
        return f"{_in_words(seconds)} left"

    return left


def _in_words(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))
