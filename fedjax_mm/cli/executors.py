"""Executors that are named on the command line, with settings of a file or of `--set`."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from fedjax_mm.experiments.executors import EXECUTORS, AnyExecutor
from fedjax_mm.experiments.fields import Config
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.sweeps.errors import refusing
from fedjax_mm.sweeps.execution import Execution

_TABLE = "executor"


class _Settings(Config):
    """A file that has a table of an executor alone."""

    executor: AnyExecutor


@contextmanager
def by(name: str | None, given: AnyExecutor | None, how: Execution) -> Iterator[Execution]:
    """Yields the execution by the executor of a name, with the settings that are given."""
    if name is None:
        yield how
        return
    with ExitStack() as stack:
        with refusing():
            _check(name)
            if given and given.name != name:
                raise ValueError(
                    f"--executor is {name!r}, but the file has executor.name = {given.name!r}"
                )
            how = stack.enter_context((given or EXECUTORS[name]()).opened(how))
        yield how


def split_off(name: str | None, overrides: Sequence[str]) -> tuple[AnyExecutor | None, list[str]]:
    """Returns the executor of a name, with its settings from overrides, and the other overrides.

    Raises:
      ValueError: if the name or a setting is unknown.
    """
    if name is None:
        return None, [*overrides]
    _check(name)
    mine = [each for each in overrides if each.startswith(f"{_TABLE}.")]
    found = validate(_Settings, {_TABLE: {"name": name}}, mine)
    return found.executor, [each for each in overrides if each not in mine]


def _check(name: str) -> None:
    if name not in EXECUTORS:
        raise ValueError(f"--executor is {name!r}; choose from {', '.join(EXECUTORS)}")
