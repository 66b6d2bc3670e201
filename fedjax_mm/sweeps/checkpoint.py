"""Unfinished runs on disk: saved whole or not at all, and continued by the same program only."""

import hashlib
import json
import logging
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import filelock
import jax
import numpy as np

from fedjax_mm.files import prepare_directory, save_json
from fedjax_mm.sweeps.devices import agree

_PLACE = "unfinished"


class Saved(NamedTuple):
    """A part of a run as it was saved.

    Attributes:
      rounds: how many were done.
      arrays: the arrays that were saved.
    """

    rounds: int
    arrays: list[np.ndarray]


class Checkpoints:
    """The directory ``unfinished`` in a run's directory: a context manager that locks it.

    A run has numbered parts; the last two states of each are kept, and a damaged one is passed over
    with a warning. In a run of several processes all of them make the same calls, on a file system
    that they share.

    Args:
      directory: the run's directory; it is made if it does not exist.
      resume: whether to continue an unfinished run. Without it finding one is an error, so that no
        work is lost by accident; with it there need not be one.

    Raises:
      ValueError: on entering, if another process writes into the directory, or if there is an
        unfinished run and `resume` is false.

    Example:
      >>> import tempfile, numpy as np
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     with Checkpoints(directory) as checkpoints:
      ...         checkpoints.save(0, rounds=5, arrays=[np.arange(3)])
      ...     with Checkpoints(directory, resume=True) as checkpoints:
      ...         checkpoints.load(0).rounds
      5
    """

    def __init__(self, directory: Path | str, *, resume: bool = False) -> None:
        """The checkpoints of a run's directory."""
        self.directory, self.resume = Path(directory), resume
        self._place, self._trash = self.directory / _PLACE, self.directory / f".{_PLACE}.deleted"
        self._lock = filelock.FileLock(self.directory / f".{_PLACE}.lock")
        self._is_first, self._is_open = jax.process_index() == 0, False
        self._identity: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self if self._is_open else self.open()

    def open(self) -> Self:
        """Locks the directory, which entering does too; `with` closes it."""
        error = None
        try:
            if self._is_first:
                self._take()
        except ValueError as problem:
            error = problem
        if agree(error is not None)[0]:  # all of several processes stop alike
            raise error or ValueError(f"the first process could not open {self.directory}")
        self._is_open = True
        return self

    def _take(self) -> None:
        """Locks and prepares the directory."""
        prepare_directory(self.directory)
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise ValueError(
                f"another process is writing into {self.directory}; wait for it, or choose "
                "another directory with --out"
            ) from None
        if self.has_work and not self.resume:
            self._unlock()
            raise ValueError(
                f"{self.directory} holds an unfinished run; continue it with --resume, or "
                f"delete {self._place} to start again"
            )
        shutil.rmtree(self._trash, ignore_errors=True)
        if not self.has_work:
            self.discard()  # a run that had nothing to save
        self._place.mkdir(exist_ok=True)

    @property
    def has_work(self) -> bool:
        """Whether anything was saved, here or in a stage."""
        return any(self._place.rglob("part-*"))

    def stage(self, name: str) -> "Checkpoints":
        """The checkpoints of one of several runs that make one result, discarded with it.

        Raises:
          ValueError: if a run without stages was saved here.
        """
        if any(self._place.glob("part-*")):
            raise ValueError(
                f"the unfinished run in {self.directory} was another one, without stages; delete "
                f"{self._place} to start again"
            )
        return Checkpoints(self._place / name, resume=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_open = False
        if self._is_first:
            if not self.has_work:
                self.discard()
            self._unlock()

    def _unlock(self) -> None:
        """Leaves no file; while it is still locked, so that it is not another process's by then."""
        with suppress(OSError):  # Windows keeps files that are open
            Path(self._lock.lock_file).unlink()
        self._lock.release()

    def discard(self) -> None:
        """Deletes what was saved, the run being finished: at once, and then its bytes."""
        if self._is_first and self._place.exists():
            self._place.replace(self._trash)
            shutil.rmtree(self._trash, ignore_errors=True)

    def claim(self, identity: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Compares what is to be run with what was; the saved run's choices, or None.

        Args:
          identity: all that the results depend on, nested as it may be.

        Raises:
          ValueError: if the saved run has another identity, naming the first differences, or if
            it is unknown.
        """
        identity = _plain(identity)
        self._identity |= identity
        path = self._place / "run.json"
        if not self._is_open:
            raise ValueError("the checkpoints are not open; use them as `with Checkpoints(...)`")
        if not path.exists() and not self.has_work:
            return None
        try:
            saved = json.loads(path.read_text())
            differences = _differences(
                {name: saved["identity"].get(name) for name in identity}, identity
            )
            choices = dict(saved["choices"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} is damaged, so that the run cannot be continued; delete {self._place} to "
                "start again"
            ) from error
        if differences:
            raise ValueError(
                f"the unfinished run in {self.directory} was another one: "
                f"{'; '.join(differences[:3])}; run it as it was, or delete {self._place} to "
                "start again"
            )
        return choices

    def begin(self, choices: Mapping[str, Any]) -> None:
        """Writes down what is run, and what was free to choose and must be chosen again."""
        if self._is_first:
            save_json({"identity": self._identity, "choices": choices}, self._place / "run.json")

    def save(self, part: int, rounds: int, arrays: Sequence[Any]) -> None:
        """Saves a part; what was saved before stays until this is on disk.

        Raises:
          OSError: if it cannot be written, the disk being full for instance.
        """
        ocp = _orbax()
        arrays = [np.asarray(x) for x in arrays]
        packed = _packed(arrays)
        like = [(str(x.dtype), x.shape) for x in arrays]
        about = {"like": like, "digest": _digest(packed, like)}
        try:
            with _quiet(), self._manager(part) as manager:
                manager.save(
                    rounds,
                    args=ocp.args.Composite(
                        arrays=ocp.args.StandardSave({"packed": packed}),
                        about=ocp.args.JsonSave(about),
                    ),
                )
        except Exception as error:
            for path in self._part(part).glob("*orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)
            is_full = "No space left" in str(error)
            reason = "no space left on the disk" if is_full else _first_line(error)
            remedy = "make room and continue" if is_full else "continue"
            raise OSError(
                f"cannot save to {self._place}: {reason}; what was saved before is intact: "
                f"{remedy} with --resume"
            ) from error

    def load(self, part: int) -> Saved | None:
        """The newest undamaged state of a part, or None if there is none."""
        if not self._part(part).exists():
            return None
        ocp = _orbax()
        with _quiet(), self._manager(part) as manager:
            for rounds in sorted(manager.all_steps(), reverse=True):
                try:
                    loaded = manager.restore(
                        rounds,
                        args=ocp.args.Composite(
                            arrays=ocp.args.StandardRestore(), about=ocp.args.JsonRestore()
                        ),
                    )
                    packed, about = np.asarray(loaded["arrays"]["packed"]), loaded["about"]
                    if _digest(packed, about["like"]) == about["digest"]:
                        return Saved(rounds, list(_unpacked(packed, about["like"])))
                    reason = "its digest does not match"
                except Exception as error:  # whatever a damaged file makes its readers raise
                    reason = _first_line(error)
                warnings.warn(
                    f"the checkpoint {self._part(part) / str(rounds)} is damaged and passed over: "
                    f"{reason}",
                    stacklevel=2,
                )
                manager.delete(rounds)
        return None

    def _part(self, part: int) -> Path:
        return self._place / f"part-{part:04}"

    def _manager(self, part: int) -> Any:
        ocp = _orbax()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        return ocp.CheckpointManager(self._part(part).absolute(), options=options)


def _orbax() -> Any:
    """The library, which takes half a second to import and which short runs do not need."""
    import orbax.checkpoint

    return orbax.checkpoint


@contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs a traceback for each thread that meets a bad file; the caller says it once."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _packed(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """All bytes one after the other, and one more.

    Orbax refuses empty arrays, and when a write fails it abandons those of other arrays, which then
    print tracebacks from threads of their own.
    """
    packed = np.zeros(sum(x.nbytes for x in arrays) + 1, np.uint8)
    start = 0
    for x in arrays:
        packed[start : start + x.nbytes].view(x.dtype)[:] = x.ravel()
        start += x.nbytes
    return packed


def _unpacked(packed: np.ndarray, like: Any) -> Iterator[np.ndarray]:
    """The arrays of these types and shapes."""
    start = 0
    for dtype, shape in like:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        yield packed[start : start + size].view(dtype).reshape(shape).copy()
        start += size


def _digest(packed: np.ndarray, like: Any) -> str:
    digest = hashlib.sha256(json.dumps(like).encode())
    digest.update(packed.data)
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """As it will be after a round trip through JSON."""
    return json.loads(json.dumps(value, default=str))


def _differences(saved: Any, now: Any, path: str = "") -> list[str]:
    """What differs, as ``path was ..., is ...``."""
    if isinstance(saved, dict) and isinstance(now, dict):
        return [
            difference
            for key in [*saved, *(key for key in now if key not in saved)]
            for difference in _differences(
                saved.get(key), now.get(key), f"{path}.{key}" if path else key
            )
        ]
    return [] if saved == now else [f"{path} was {_short(saved)}, is {_short(now)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
