"""Checkpoints of unfinished runs, written atomically, from which the same program can resume."""

import dataclasses
import errno
import hashlib
import json
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

import filelock
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mm.base.calls import in_short
from fedjax_mm.checks.values import check_alike
from fedjax_mm.results.finished import RESULT
from fedjax_mm.results.manifest import differences, manifest
from fedjax_mm.simulator.record import Record
from fedjax_mm.simulator.stacks import with_params
from fedjax_mm.sweeps.devices import agree
from fedjax_mm.sweeps.errors import InterruptedRunError, RefusedError
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.plan import Compiled, Plan, Segment
from fedjax_mm.sweeps.program import Program, Replica
from fedjax_mm.tools.compiler import flags_of_results
from fedjax_mm.tools.files import (
    is_sealed,
    load_json,
    prepare_directory,
    save_json,
    sealed,
    write_aside,
)

_PLACE, _STATE = "unfinished", "state"
_WORDS = 80
_FORMAT = 3  # of the files of arrays


class Saved(NamedTuple):
    """A part of a run, as saved in a file.

    Attributes:
      rounds: the number of finished rounds.
      arrays: the records, followed by the state of an unfinished part or by kept parameters.
      about: further entries of the file's header, as plain values.
    """

    rounds: int
    arrays: list[np.ndarray]
    about: Mapping[str, Any] = MappingProxyType({})

    def __repr__(self) -> str:
        return in_short(self)


class Stored:
    """The saved parts of a run, with its identity and the choices that a later run must repeat.

    Args:
      place: their directory.
    """

    def __init__(self, place: Path) -> None:
        """Names the directory, which may not exist."""
        self._place = place

    def _record(self) -> Mapping[str, Any]:
        """The identity and the choices.

        Raises:
          ValueError: if they cannot be read.
        """
        path = self._place / "run.json"
        try:
            saved: Mapping[str, Any] = load_json(path)
            if not is_sealed(saved):
                raise ValueError("its digest does not match")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} is damaged, or was edited, so that the run cannot be continued; delete "
                f"{self._place} to start again"
            ) from error
        return saved

    def load(self, part: int, check: Callable[[Saved], None] = lambda saved: None) -> Saved | None:
        """Reads the newest undamaged state of a part, or None.

        Args:
          part: the number of the part.
          check: raises `ValueError` for a state that does not fit, which then counts as damaged.

        Raises:
          OSError: if a file cannot be read. It is kept, because it may be intact.
        """
        problem, path = None, self._part(part)
        found, damaged = None, list[Path]()
        try:
            for path in self._saved(part):
                if found := _read(path, check):
                    break
                damaged.append(path)
        except OSError as error:
            problem = error
        if agree(problem is not None)[0]:
            raise OSError(
                f"cannot read {path}: {problem or 'another process cannot'}; the saved run is "
                "kept: make the file readable and continue with --resume"
            ) from problem
        # Delete damaged files only now, because other processes may have been reading them.
        for path in damaged if jax.process_index() == 0 else ():
            path.unlink(missing_ok=True)
        return found

    def _part(self, number: int) -> Path:
        return self._place / f"part-{number:04}"

    def _saved(self, part: int) -> list[Path]:
        """The files of a part's states, newest first."""
        paths = [path for path in self._part(part).glob("*.npz") if path.stem.isdecimal()]
        return sorted(paths, key=lambda path: int(path.stem), reverse=True)


class KeptState(Stored):
    """The final state of a finished run, from which a longer run goes on.

    Args:
      directory: the run's directory.
    """

    def __init__(self, directory: Path | str) -> None:
        """Names the directory, which may have no state."""
        super().__init__(Path(directory) / _STATE)

    @property
    def exists(self) -> bool:
        """Whether the state was kept."""
        return (self._place / "run.json").exists()

    @property
    def num_rounds(self) -> int:
        """The number of rounds after which the run ended."""
        rounds: int = self._record()["choices"]["num_rounds"]
        return rounds

    def claim(self, identity: Mapping[str, Any], num_rounds: int) -> Mapping[str, Any]:
        """Choices of a run, after a check that it is the finished one with no fewer rounds.

        Args:
          identity: everything else that the results depend on.
          num_rounds: the number of rounds.

        Raises:
          ValueError: if the run is shorter or a different one, or no state was kept.
        """
        if not self.exists:
            raise ValueError(f"{self._place.parent} has no state; {KEEP_STATE}")
        record = self._record()
        if num_rounds < (have := record["choices"]["num_rounds"]):
            raise ValueError(
                f"num_rounds is {num_rounds:,}, but the state in {self._place} is of {have:,} "
                "rounds; select the first rounds of that result, or give more rounds"
            )
        now = as_long(_plain(identity), have)
        before = {name: record["identity"].get(name) for name in now}
        if changes := list(differences(before, now)):
            words = "; ".join(changes[:3])
            if any(name.startswith(_OF_PROGRAMS) for name in changes):
                words += " (a schedule over num_rounds makes a longer run another one)"
            raise ValueError(
                f"the state in {self._place} is of a different run: {words}; run it as it was, or "
                "without the state"
            )
        choices: Mapping[str, Any] = record["choices"]
        return choices


KEEP_STATE = (
    "parameters alone are no state: to lengthen a run later, keep its state by --keep-state, or in "
    "Python by Execution(keep_state=True)"
)
"""How to keep a state, for messages."""

_OF_PROGRAMS = ("program ", "data of ", "data ")


def as_long(identity: Mapping[str, Any], num_rounds: int) -> dict[str, Any]:
    """The identity of a run with another number of rounds and the same other settings."""
    changed = dict(identity)
    if "num_rounds" in changed:
        changed["num_rounds"] = num_rounds
    if "num_rounds" in (changed.get("config") or {}):
        changed["config"] = {**changed["config"], "num_rounds": num_rounds}
    return changed


class Checkpoints(Stored):
    """Context manager that locks the directory ``unfinished`` in a run's directory.

    A run has numbered parts. The last two states of each are kept, and a damaged one is skipped
    with a warning. The final state of a finished run, if it is kept, is in the directory ``state``,
    from which a longer run goes on if `resume` is true. In a multi-process run all processes make
    the same calls, on a shared file system.

    Args:
      directory: the run's directory, which is created if it does not exist.
      resume: whether to continue an unfinished run, if one exists. If false, an unfinished run is
        an error, so that no work is lost by accident.

    Raises:
      ValueError: on entering, if another process is writing to the directory, or if it holds an
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
        """Creates the checkpoints of a run's directory."""
        self.directory, self.resume = Path(directory), resume
        super().__init__(self.directory / _PLACE)
        self._trash = self.directory / f".{_PLACE}.deleted"
        self._lock = filelock.FileLock(self.directory / f".{_PLACE}.lock")
        self._is_first, self._is_open = jax.process_index() == 0, False
        self._identity: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self if self._is_open else self.open()

    def open(self) -> Self:
        """Locks the directory, as on entering, until a `with` block closes it."""
        error = None
        try:
            if self._is_first:
                self._take()
        except ValueError as problem:
            error = problem
        if agree(error is not None)[0]:  # all processes must stop
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
        try:
            self._prepare()
        except BaseException:
            self._unlock()
            raise

    def _prepare(self) -> None:
        """Creates an empty directory for a new run, or keeps the directory of a run to resume."""
        if self.has_work and not self.resume:
            raise ValueError(
                f"{self.directory} holds an unfinished run; continue it with --resume, or "
                f"delete {self._place} to start again"
            )
        shutil.rmtree(self._trash, ignore_errors=True)
        if not self.has_work:
            self.discard()  # left behind by a run that saved nothing
        self._place.mkdir(exist_ok=True)

    @property
    def has_work(self) -> bool:
        """Whether this directory or a stage has saved work."""
        names = ("part-*", RESULT)
        return any(path for name in names for path in self._place.rglob(name))

    def stage(self, name: str) -> "Checkpoints":
        """Checkpoints of one stage, which is one of several runs behind one result.

        They are discarded together with these checkpoints.

        Raises:
          ValueError: if a run without stages was saved here.
        """
        if any(self._place.glob("part-*")):
            raise ValueError(
                f"the unfinished run in {self.directory} is a different one, without stages; "
                f"delete {self._place} to start again"
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
        """Removes the lock and its file."""
        # Remove the file first, because after the release it might belong to another process.
        with suppress(OSError):  # Windows does not delete open files
            Path(self._lock.lock_file).unlink()
        self._lock.release()

    def discard(self) -> None:
        """Deletes the saved parts of a finished run."""
        # Rename before deleting, because only a rename is atomic, so that a process killed in
        # between leaves only trash behind.
        if self._is_first and self._place.exists():
            self._place.replace(self._trash)
            shutil.rmtree(self._trash, ignore_errors=True)

    @property
    def digest(self) -> str:
        """A digest of the run's identity and of its directory, which no other run has."""
        content = json.dumps([str(self._place.resolve()), self._identity], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def claim(self, identity: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Checks that a run matches the saved one, and returns the saved run's choices, or None.

        Args:
          identity: everything that the results depend on, possibly nested.

        Raises:
          ValueError: if the saved run's identity differs, naming the first differences, or is
            unreadable.
        """
        identity = _plain({"format of files": _FORMAT, **identity})
        self._identity |= identity
        path = self._place / "run.json"
        if not self._is_open:
            raise ValueError("the checkpoints are not open; use them as `with Checkpoints(...)`")
        if not path.exists() and not self.has_work:
            return None
        saved = self._record()
        before = {name: saved["identity"].get(name) for name in identity}
        changes = list(differences(before, identity))
        if changes:
            raise ValueError(
                f"the unfinished run in {self.directory} is a different one: "
                f"{'; '.join(changes[:3])}; run it as it was, or delete {self._place} to "
                "start again"
            )
        choices: dict[str, Any] = saved["choices"]
        return choices

    def begin(self, choices: Mapping[str, Any]) -> None:
        """Records the run's identity, and the choices that a resumed run must repeat."""
        if self._is_first:
            content = {"identity": self._identity, "choices": choices}
            save_json(sealed(content), self._place / "run.json")

    def save(
        self,
        part: int,
        rounds: int,
        arrays: Sequence[Any],
        about: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Saves a part, keeping its earlier states until the new one is on disk.

        Raises:
          OSError: if the state cannot be written, for example because the disk is full.
        """
        problem: Exception | None = None
        try:
            if self._is_first:
                self._part(part).mkdir(exist_ok=True)
                for stale in self._part(part).glob(".*.part"):  # a killed save left these behind
                    stale.unlink(missing_ok=True)
                path = self._part(part) / f"{rounds}.npz"
                state = Saved(rounds, list(map(np.asarray, arrays)), about)
                write_saved(state, path, _label(path))
                for old in self._saved(part)[2:]:
                    old.unlink()
        except Exception as error:
            problem = error
        if agree(problem is not None)[0]:  # otherwise other processes would wait for the first
            is_full = isinstance(problem, OSError) and problem.errno == errno.ENOSPC
            reason = "no space left on the disk" if is_full else str(problem)
            remedy = "make room and continue" if is_full else "continue"
            raise OSError(
                f"cannot save to {self._place}: {reason}; earlier states are intact: "
                f"{remedy} with --resume"
            ) from problem

    @property
    def kept(self) -> KeptState | None:
        """The state in this directory from which the run goes on, if there is one."""
        kept = KeptState(self.directory)
        if not (self.resume and kept.exists):
            return None
        # Unfinished work next to a state may be of another run, which replaces its result.
        begun = self.has_work and (self._place / "run.json").exists()
        return kept if not begun or self._record()["choices"].get("continues") else None

    def keep(self, kept: Stored | None, parts: int, num_rounds: int) -> None:
        """Turns the saved parts of a finished run into its kept state.

        Args:
          kept: the state from which the run went on, which may have some of the parts.
          parts: the number of parts.
          num_rounds: the number of rounds.
        """
        agree(0)  # other processes may still be reading
        if not self._is_first or not self.has_work:
            return
        for part in range(parts):
            path = self._part(part) / f"{num_rounds}.npz"
            if not path.exists() and kept:
                path.parent.mkdir(exist_ok=True)
                write_aside(path, partial(shutil.copyfile, kept._part(part) / path.name))
            for old in self._saved(part)[1:]:
                old.unlink()
        self.drop_state()
        self._place.replace(self.directory / _STATE)

    def drop_state(self) -> None:
        """Deletes the kept state of an earlier run."""
        state = self.directory / _STATE
        if self._is_first and state.exists():
            shutil.rmtree(self._trash, ignore_errors=True)
            state.replace(self._trash)
            shutil.rmtree(self._trash, ignore_errors=True)


def write_saved(saved: Saved, path: Path, label: str) -> None:
    """Writes a file atomically, with a digest of its content and label.

    Raises:
      OSError: if it cannot be written.
    """
    types = [str(x.dtype) for x in saved.arrays]
    header = {"rounds": saved.rounds, "about": dict(saved.about), "types": types}
    header["digest"] = _digest(label, header, saved.arrays)

    def write(aside: Path) -> None:
        with aside.open("wb") as file:
            np.savez(file, np.frombuffer(json.dumps(header).encode(), np.uint8), *saved.arrays)

    write_aside(path, write)


def _read(path: Path, check: Callable[[Saved], None]) -> Saved | None:
    """Reads a saved state, or None with a warning if the content is damaged."""
    # Read the file first, so that disk errors are not mistaken for the content errors below.
    content = path.read_bytes()
    try:
        state = saved_in(content, _label(path))
        check(state)
    except Exception as error:  # damaged content can raise any exception
        # Shorten the message, because NumPy may quote everything it has read.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:_WORDS]
        words = f"the checkpoint {path} is damaged and was skipped: {reason}"
        warnings.warn(words, stacklevel=3)
        return None
    return state


def saved_in(content: bytes, label: str) -> Saved:
    """Parses the content of a file written by `write_saved`.

    Raises:
      Exception: of any type, if the content is damaged or the label differs.
    """
    with np.load(BytesIO(content)) as saved:
        first, *arrays = saved.values()
    header = json.loads(first.tobytes())
    digest = header.pop("digest")
    # Restore dtypes, because NumPy's format has no bfloat16 and returns raw bytes instead.
    typed = [x.view(name) for x, name in zip(arrays, header["types"], strict=True)]
    if digest != _digest(label, header, typed):
        raise ValueError("its digest does not match")
    return Saved(header["rounds"], typed, header["about"])


def _label(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _digest(label: str, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> str:
    """A digest of arrays, their header and their file's label."""
    # Include dtypes and order, because a zip file's checksums do not cover array names, so one
    # flipped bit could swap two arrays.
    found = hashlib.sha256(json.dumps([label, header]).encode())
    for x in arrays:
        found.update(f"{x.dtype} {x.shape}".encode())
        # Hash the array itself, because a copy of its bytes would double the memory.
        found.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _plain(value: Any) -> Any:
    """The value after a round trip through JSON."""
    return json.loads(json.dumps(value, default=str))


_UNSAVED_BYTES = 128 * 2**20  # maximum size of finished batches that wait to be saved


def identity(
    grid: Grid,
    split: str | None,
    programs: Sequence[Program] | None = None,
    client_states: Path | str | None = None,
) -> dict[str, Any]:
    """Everything except code that determines the exact bits of a sweep's result.

    A run whose clients are split may be resumed on other devices, which add in another order.

    Args:
      grid: the runs.
      split: the requested axis to split over devices.
      programs: the runs of a part; defaults to all runs.
      client_states: the directory of the clients' states; whether there is one counts, because a
        run cannot change between files and memory.
    """
    # Include versions, devices, threads and XLA flags, because each may change the last bit of a
    # sum.
    about = manifest({}, seed=grid.seed, data="")
    device = about["device"]
    kind = {name: device[name] for name in ("platform", "kind")}
    where: dict[str, Any] = {"device": kind}
    if split != "clients":  # otherwise states are saved as on one device
        where["--devices"] = device["count"]
        # XLA's CPU client has one thread per core, or per device if there are more devices.
        where["threads"] = device["platform"] == "cpu" and max(device["cpu_cores"], device["count"])
    runs = hashlib.sha256()
    for program in programs or ():
        runs.update(f"{program.label} {[places.tolist() for places in program.index]}".encode())
    names = ("num_rounds", "num_seeds", "seed", "record_every", "client_map")
    described = {name: getattr(grid, name) for name in names} | {
        "axes": grid.labels,
        "until": grid.until and dataclasses.asdict(grid.until),
    }
    return {
        **({"config": grid.config} if grid.config else described),
        "first_seed": grid.first_seed,
        "split": split,
        "client_states": None if client_states is None else "in files",
        "precision": str(jnp.result_type(float)),
        **{name: about[name] for name in ("versions", "prng")},
        **where,
        "XLA_FLAGS": flags_of_results(),
        "keep": grid.keep,
        "share": None if programs is None else runs.hexdigest(),
    }


def data_of(programs: Sequence[Program]) -> dict[str, str]:
    """A digest of the numbers and arrays of all runs."""
    digests = "".join(program.digest for program in programs)
    return {"data": hashlib.sha256(digests.encode()).hexdigest()}


def claim_program(
    checkpoints: Checkpoints | None,
    kept: KeptState | None,
    program: Program,
    code: Callable[[int], str],
) -> None:
    """Checks that a program and its data are the same as in the unfinished or the finished run.

    Args:
      checkpoints: the unfinished run, if it is saved.
      kept: the finished run, if it is continued.
      program: the program.
      code: the digest of its text for a number of rounds.
    """
    label, rounds = program.label, program.grid.num_rounds
    data = {f"data of {label}": program.digest}
    if checkpoints:
        checkpoints.claim({f"program {label}": code(rounds)} | data)
    if kept:
        kept.claim({f"program {label}": code(kept.num_rounds)} | data, rounds)


class Saving:
    """Saves the work of a plan, and ends the sweep after a segment when a signal arrives.

    Batches are numbered as in `Plan.batches`. Finished batches are saved together with the current
    one, every `save_every` seconds. `seconds` has the time that each batch took, in all processes.
    """

    def __init__(
        self,
        plan: Plan,
        checkpoints: Checkpoints | None,
        kept: KeptState | None,
        save_every: float,
        signals: list[int],
        *,
        keep_state: bool,
    ) -> None:
        """Starts with nothing saved."""
        self.plan, self.checkpoints, self.kept = plan, checkpoints, kept
        self.save_every, self.signals, self.keep_state = save_every, signals, keep_state
        self.finished: dict[int, list[np.ndarray]] = {}
        self.seconds: dict[int, float] = {}
        self.last_save = time.perf_counter()

    def load(
        self, batch: int, records: Record
    ) -> tuple[int, Replica | None, list[np.ndarray] | None]:
        """Loads a batch's finished rounds and states, and fills in its records.

        The last is the arrays of `ClientFiles`, or None if nothing was saved.

        Raises:
          RefusedError: if the state is wanted, but an unfinished run began without keeping it.
        """
        rows, (compiled, _) = jax.tree.leaves(records), self.plan.batches[batch]
        check, saved = partial(self._check_records, rows), None
        for stored in (self.checkpoints, self.kept):
            saved = saved or (stored.load(batch, check) if stored else None)
        self.seconds[batch] = saved.about.get("seconds", 0.0) if saved else 0.0
        if not saved:
            return 0, None, None
        for row, array in zip(rows, saved.arrays, strict=False):  # the state follows
            row[: len(array)] = array
        rest = saved.arrays[len(rows) :]
        if saved.rounds < self.plan.grid.num_rounds or saved.about.get("has_state"):
            number = len(jax.tree.leaves(compiled.program.traced.replica))
            states = rest[number:] if compiled.program.in_files else None
            return saved.rounds, _unfinished(compiled, rest[:number]), states
        if self.keep_state:
            raise RefusedError(
                "the unfinished run began without keeping its state; continue it without "
                "--keep-state (in Python keep_state), or delete it to start again"
            )
        return saved.rounds, _finished(compiled, rest) if self.plan.grid.keep else None, None

    def _check_records(self, rows: list[np.ndarray], saved: Saved) -> None:
        """Raises `ValueError` if a saved batch does not begin with the records up to its round."""
        grid = self.plan.grid
        wanted = [x[: 1 + saved.rounds // grid.record_every].shape for x in rows]
        # The records are followed by the state of an unfinished batch, or by the parameters or the
        # state of a finished one if they are kept.
        has_state = saved.rounds < grid.num_rounds or saved.about.get("has_state")
        is_all = not has_state and grid.keep is None
        given = saved.arrays if is_all else saved.arrays[: len(rows)]
        if saved.rounds > grid.num_rounds or wanted != [x.shape for x in given]:
            raise ValueError("its records are not those of the batch")

    def save(self, segment: Segment) -> None:
        """Saves finished work if it is due, or everything if a signal ends the sweep.

        Raises:
          InterruptedRunError: if a signal arrived.
        """
        is_due = time.perf_counter() - self.last_save >= self.save_every
        number = self.signals[-1] if self.signals else 0
        # Agree first, because saving is collective but a signal may reach only one process.
        due, stop = agree(is_due, number)
        grid, files = self.plan.grid, segment.files
        rows = jax.tree.leaves(segment.records)
        is_last = segment.rounds == grid.num_rounds
        self.seconds[segment.batch] += segment.seconds
        # Keep finished batches for the next save, because short ones finish many times a second.
        if is_last:
            rest = self._state(segment) if self.keep_state else jax.tree.leaves(segment.params)
            self.finished[segment.batch] = [*rows, *rest]
        is_much = sum(x.nbytes for rows in self.finished.values() for x in rows) > _UNSAVED_BYTES
        if due or stop or is_much or (is_last and files):
            self._save_finished()
            if not is_last and self.checkpoints:
                state = self._state(segment) + (files.to_save() if files else [])
                about = {"seconds": self.seconds[segment.batch]}
                self.checkpoints.save(segment.batch, segment.rounds, [*rows, *state], about)
            if files and is_last:
                files.remove()
            elif files:
                files.saved()
            self.last_save = time.perf_counter()
        if stop:
            raise InterruptedRunError(int(stop), segment.work_done / segment.total_work)

    def _state(self, segment: Segment) -> list[np.ndarray]:
        return jax.tree.leaves(segment.program.fetch(self.plan.where, segment.replica))

    def _save_finished(self) -> None:
        about: dict[str, Any] = {"has_state": True} if self.keep_state else {}
        for each, arrays in self.finished.items():
            if self.checkpoints:
                about |= {"seconds": self.seconds[each]}
                self.checkpoints.save(each, self.plan.grid.num_rounds, arrays, about)
        self.finished.clear()

    def end(self) -> None:
        """Keeps the state of all batches if it is wanted, or drops that of an earlier run."""
        if not self.checkpoints:
            return
        if not self.keep_state:
            self.checkpoints.drop_state()
            return
        self._save_finished()
        self.checkpoints.keep(self.kept, len(self.plan.batches), self.plan.grid.num_rounds)


def _unfinished(compiled: Compiled, arrays: list[np.ndarray]) -> Replica:
    """Restores the state of a batch from its saved arrays."""
    wanted = jax.eval_shape(lambda: compiled.program.no_replica(compiled.batch_size))
    try:
        replica: Replica = jax.tree.unflatten(jax.tree.structure(wanted), arrays)
        check_alike("states have other shapes", replica, wanted, shapes=True)
    except ValueError as error:
        raise RefusedError(f"the saved state is from another run: {error}") from error
    return replica


def _finished(compiled: Compiled, params: list[np.ndarray]) -> Replica:
    """Restores a finished batch from its parameters, because its state is not saved."""
    replica = compiled.program.no_replica(compiled.batch_size)
    structure = jax.tree.structure([state.params for state in replica.models])
    kept = with_params(replica.models, jax.tree.unflatten(structure, params))
    return replica._replace(models=kept)
