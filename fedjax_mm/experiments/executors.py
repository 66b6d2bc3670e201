"""Executors that compute the parts of an experiment, as configured in its file."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field

from fedjax_mm.experiments.fields import Config, Count
from fedjax_mm.experiments.overrides import settings_of, validate
from fedjax_mm.sweeps.errors import refusing
from fedjax_mm.sweeps.execution import Execution

_TABLE = "executor"
_REMEDY = "pip install 'fedjax-mm[cluster]'"


class _Executor(Config):
    """Settings shared by all executors.

    Attributes:
      num_parts: N, the number of parts into which the runs are divided.
    """

    num_parts: Count = 8

    @contextmanager
    def opened(self, how: Execution) -> Iterator[Execution]:
        """Yields the execution of a sweep by the executor, which is closed on exit.

        Raises:
          ValueError: if the executor's library is not installed, or the settings are invalid.
        """
        with self._executor() as executor:
            yield how._replace(executor=executor, num_parts=self.num_parts)

    def _executor(self) -> Any:
        """The executor, as a context manager."""
        raise NotImplementedError


class Submitit(_Executor):
    """Slurm jobs, or processes on this machine, run by submitit.

    Attributes:
      cluster: "slurm", or "local" for processes on this machine.
      folder: the directory of submitit's files.
      at_once: the maximum number of parts at a time; defaults to submitit's 256, or 2 on this
        machine.
      parameters: passed to submitit's `update_parameters`, such as `timeout_min` or
        `slurm_partition`.
    """

    name: Literal["submitit"]
    cluster: Literal["slurm", "local"] = "slurm"
    folder: str = "jobs"
    at_once: Count | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)

    @contextmanager
    def opened(self, how: Execution) -> Iterator[Execution]:
        """Yields the execution of a sweep by submitted jobs."""
        most = self.at_once or (2 if self.cluster == "local" else None)
        with super().opened(how._replace(at_once=most)) as how:
            yield how

    @contextmanager
    def _executor(self) -> Iterator[Any]:
        try:
            import submitit
        except ImportError as error:
            raise ValueError(f"executor submitit is not installed; {_REMEDY}") from error
        try:
            executor = submitit.AutoExecutor(self.folder, cluster=self.cluster)
        except RuntimeError as error:  # srun is not installed
            raise ValueError(
                f"executor submitit: {error}; start it where Slurm is, or try it on this machine "
                "with executor.cluster = 'local'"
            ) from error
        try:
            executor.update_parameters(**self.parameters)
        except (NameError, TypeError) as error:  # unknown parameter names
            raise ValueError(f"executor.parameters: {error}") from error
        yield executor


class Dask(_Executor):
    """Workers of a Dask scheduler, or of a local cluster of processes.

    Attributes:
      address: the scheduler's address, such as "tcp://first:8786"; if omitted, workers start
        locally.
      workers: the number of workers started on this machine, with one thread each.
    """

    name: Literal["dask"]
    address: str | None = None
    workers: Count = 2

    @contextmanager
    def _executor(self) -> Iterator[Any]:
        try:
            import distributed
        except ImportError as error:
            raise ValueError(f"executor dask is not installed; {_REMEDY}") from error
        if self.address is None:
            here = {"n_workers": self.workers, "threads_per_worker": 1, "dashboard_address": None}
            quiet = {"silence_logs": logging.CRITICAL}  # workers end with their cluster
            with (
                distributed.LocalCluster(**here, **quiet) as cluster,
                distributed.Client(cluster) as client,
            ):
                yield client
            return
        try:
            client = distributed.Client(self.address)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"executor.address: no scheduler at {self.address}: {error}"
            ) from error
        with client:
            yield client


AnyExecutor = Annotated[Submitit | Dask, Field(discriminator="name")]
"""The table of any executor."""

EXECUTORS = {"submitit": Submitit, "dask": Dask}
"""The executors' tables, by `name`."""


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
    """The executor that computes the parts, or None if none is named.

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
