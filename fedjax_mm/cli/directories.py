"""Checks a result directory before a command, and saves checkpoints in it during the command."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from fedjax_mm.cli.terminal import notes, say, shown_progress
from fedjax_mm.experiments.fields import Config
from fedjax_mm.results.finished import find_finished
from fedjax_mm.results.manifest import manifest
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.cluster import Part, part_of
from fedjax_mm.sweeps.errors import DivergenceError, RefusedError, refusing
from fedjax_mm.sweeps.execution import Execution, progress
from fedjax_mm.tools.files import plain, prepare_directory, wanted_for_results
from fedjax_mm.tools.interrupts import tidy_interrupts

Existing = Literal["keep", "resume", "overwrite"]
"""How to treat earlier work in a directory. A finished result of another run is kept unless it may
be overwritten, and an unfinished run is kept unless it may be resumed."""


def existing(resume: bool, overwrite: bool) -> Existing:
    """Decides from the options how to treat earlier work in a directory."""
    with refusing():
        if resume and overwrite:
            raise ValueError(
                "--resume keeps a finished result and --overwrite gives it up; give one of them"
            )
    return "resume" if resume else "overwrite" if overwrite else "keep"


def execution(memory: float | None, split: Any, save_every: float = 30.0) -> Execution:
    """Makes the execution of a run from the options, with memory in GiB."""
    with refusing():
        if memory is not None and not memory > 0:
            raise ValueError(f"--memory is {memory:g}; it must be positive")
        if not save_every >= 0:
            raise ValueError(f"--save-every is {save_every:g}; it must not be negative")
    limit = None if memory is None else memory * 2**30
    return Execution(save_every=save_every, split=split, memory=limit, progress=False)


def part(text: str | None) -> Part | None:
    """Parses the part given by an option, if any."""
    with refusing():
        return None if text is None else part_of(text)


def finished(
    path: Path,
    config: Config,
    before: Existing,
    *,
    seeds_too: bool = True,
    files: Sequence[str] = (),
) -> Mapping[str, Any] | None:
    """Finds this run's finished result, or None if nothing is to be kept.

    Args:
      path: the path of a result's summary or manifest.
      config: all settings of the run.
      before: how to treat earlier work.
      seeds_too: whether a result with a different number of seeds counts as another result.
      files: the files that the result must have in addition to its Dataset.
    """
    # Unfinished work next to a finished result was either started with `--overwrite` or adds
    # seeds to the result.
    with refusing(), wanted_for_results(path.parent):  # the name may be too long
        if before == "overwrite" or Checkpoints(path.parent).has_work:
            return None
        now = plain(manifest(config.model_dump(mode="json"), seed=0, data=""))
        free = () if seeds_too or before != "resume" else ("num_seeds",)
        found = find_finished(path, now, free)
    if found is None or before != "resume":
        return None
    missing = [f"{name} is missing" for name in files if name not in found.content.get("files", ())]
    if found.damage or missing:
        about = found.content.get("manifest", found.content)
        have = about.get("config", {}).get("num_seeds", 0)
        if have > (wanted := now["config"].get("num_seeds", have)):
            raise RefusedError(
                f"{path.parent}: {found.damage or missing[0]}, and it has {have} seeds instead of "
                f"{wanted}; give --set num_seeds={have} to make all of them again, or --overwrite"
            )
        say(f"{path.parent}: {found.damage or missing[0]}; made again", notes)
        return None
    return found.content


def leave_alone(directory: Path) -> None:
    """Reports that there is nothing left to do."""
    say(f"{directory} is complete; nothing to resume")


@contextmanager
def made(directories: Sequence[Path]) -> Iterator[None]:
    """Creates writable directories, and removes new ones that are still empty on exit."""
    parents = {parent for directory in directories for parent in (directory, *directory.parents)}
    with refusing(), wanted_for_results(directories[0]):
        new = sorted((path for path in parents if not path.exists()), reverse=True)
    with tidy_interrupts():
        try:
            with refusing():
                for directory in directories:
                    prepare_directory(directory)
            yield
        finally:
            for path in new:
                with suppress(OSError):  # not empty, or never created
                    path.rmdir()


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Locks a directory for this process, after checking that it holds no unfinished run."""
    with made([directory]):
        with refusing():
            lock = Checkpoints(directory, resume=False).open()
        with lock:
            yield


@contextmanager
def saving(directory: Path, before: Existing, how: Execution) -> Iterator[Execution]:
    """Adds a progress bar, and checkpoints that are deleted once the result is written."""
    with made([directory]):
        try:
            with _checkpointed(directory, before, how) as saving:
                yield saving
        except KeyboardInterrupt as error:
            kept, nothing = (
                "--resume continues what was saved",
                "there is nothing for --resume to continue",
            )
            rest = kept if Checkpoints(directory).has_work else nothing
            say("; ".join(["interrupted", *map(str, error.args), rest]), notes)
            raise


@contextmanager
def _checkpointed(directory: Path, before: Existing, how: Execution) -> Iterator[Execution]:
    with refusing():
        checkpoints = Checkpoints(directory, resume=before == "resume").open()
    with checkpoints:
        with shown_progress() as report:
            try:
                yield how._replace(callbacks=[progress(report)], checkpoints=checkpoints)
            except DivergenceError:  # do not resume, because the run would diverge again
                checkpoints.discard()
                raise
        checkpoints.discard()
