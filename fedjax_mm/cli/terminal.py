"""Terminal output: text, tables and progress."""

import textwrap
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedjax_mm.tools.screen import NO_FORECAST, Report, bar, in_words, time_left

_LOG_SECONDS = 30.0


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
    """Prints text without interpreting markup, with lines wrapped at words in a terminal."""
    if on.is_terminal and isinstance(text, str):
        how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}  # paths
        text = "\n".join(textwrap.fill(line, on.width, **how) for line in text.split("\n"))
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
def shown_progress() -> Iterator[Report]:
    """Shows a progress bar with the current work, the elapsed time and the remaining time.

    Output that is not a terminal, such as a cluster's log, gets an occasional line instead.
    """
    if not notes.is_terminal:
        with reminded(log_lines()) as report:
            yield report
        return
    with bar(notes) as report:
        yield report


def log_lines() -> Report:
    """Makes a function that prints progress at most twice a minute."""
    left, last = time_left(), time.monotonic()

    def report(label: str, done: int, total: int) -> None:
        nonlocal last
        forecast = left(done, total)
        if time.monotonic() - last >= _LOG_SECONDS:
            last = time.monotonic()
            say(f"{done / total:.0%} {label} {forecast}", notes)

    return report


@contextmanager
def reminded(report: Report) -> Iterator[Report]:
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
                say(f"{doing} for {in_words(seconds)}; {NO_FORECAST}", notes)

    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()
    try:
        yield told
    finally:
        is_over.set()
        reminder.join()
