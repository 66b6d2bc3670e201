"""Executors named on the command line, with settings from a file or from `--set`."""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from fedjax_mm.experiments.executors import EXECUTORS, AnyExecutor
from fedjax_mm.experiments.fields import Config
from fedjax_mm.experiments.overrides import settings_of, validate
from fedjax_mm.sweeps.errors import refusing
from fedjax_mm.sweeps.execution import Execution

_TABLE = "executor"


class _Settings(Config):
    """A file with only an executor table."""

    executor: AnyExecutor


@contextmanager
def by(executor: AnyExecutor | None, how: Execution) -> Iterator[Execution]:
    """Yields the execution, with the executor attached if one is given."""
    if executor is None:
        yield how
        return
    with ExitStack() as stack:
        with refusing():
            how = stack.enter_context(executor.opened(how))
        yield how


def split_off(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits `--set` into executor settings and other settings."""
    mine = [each for each in overrides if re.match(rf"\s*{_TABLE}\s*[.=]", each)]
    return mine, [each for each in overrides if each not in mine]


def executor_of(
    name: str | None, given: AnyExecutor | None, overrides: Sequence[str]
) -> AnyExecutor | None:
    """Returns the executor that computes the parts, or None if none is named.

    Args:
      name: the name from the command line.
      given: the executor table of a file, if any.
      overrides: settings that override the table.

    Raises:
      ValueError: if the name or a setting is unknown, or the table is for another executor.
    """
    if name is not None and name not in EXECUTORS:
        raise ValueError(f"--executor is {name!r}; choose from {', '.join(EXECUTORS)}")
    if name is None and overrides and given is None:
        raise ValueError(f"--set {overrides[0]} needs an executor; give --executor NAME")
    table = {"name": name} if given is None else settings_of(given)
    if given is None and name is None:
        return None
    found = validate(_Settings, {_TABLE: table}, overrides).executor
    if name is not None and found.name != name:
        raise ValueError(f"--executor is {name!r}, but the file has executor.name = {found.name!r}")
    return None if name is None else found
