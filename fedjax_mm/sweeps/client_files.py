"""States of clients in files: the rows of a cohort are read before a round, and written after it.

A file has places of one row each, and a table says in which place the state of every client of
every model is. A row that a saved run may need is never overwritten: its new value takes a free
place. So the table and the checksums of the rows, which are a part of the run's checkpoint, are all
that has to be saved at once, and rows that a killed process wrote after the last checkpoint are
ignored.
"""

import errno
import os
import tempfile
import zlib
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_mm.base import Cohort
from fedjax_mm.sweeps.errors import RefusedError
from fedjax_mm.tools.files import write_aside

_HEADER = b"fedjax_mm states of clients, format 1\n".ljust(4096, b"\0")
_REMEDY = "restore the file, or delete the unfinished run to start again"


class Rows:
    """Rows of bytes in a file, each equal to an initial one until it is written.

    Args:
      file: the open file, with a header.
      path: its path for messages, or the directory of a file without a name.
      initial: for each row of `owners`, the initial row, ``uint8[owners, bytes]``.
      num_rows: the number of rows of each owner, such as a model of a replica.
    """

    def __init__(self, file: FileIO, path: Path, initial: np.ndarray, num_rows: int) -> None:
        """Starts without written rows."""
        self._file, self._path, self._initial, self._each = file, path, initial, num_rows
        owners, self.num_bytes = initial.shape
        self._place = np.full(owners * num_rows, -1, np.int64)
        self._checksum = np.zeros(owners * num_rows, np.uint32)
        self._saved = self._place.copy()
        self._end, self._free = 0, list[int]()
        self._is_saved = np.zeros(0, bool)  # places that a saved run may need

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Reads rows, ``uint8[rows, bytes]``.

        Raises:
          OSError: if the file cannot be read, or a row is not what was written.
        """
        found = self._initial[rows // self._each]
        for row, content in zip(rows, found, strict=True):
            place = self._place[row]
            if place < 0:
                continue
            self._file.seek(self._offset(place))
            length = self._file.readinto(content)
            if length != self.num_bytes or zlib.crc32(content) != self._checksum[row]:
                raise OSError(f"{self._path} is damaged at byte {self._offset(place)}; {_REMEDY}")
        return found

    def write(self, rows: np.ndarray, contents: np.ndarray) -> None:
        """Writes rows in places that no saved run needs.

        Raises:
          OSError: if the disk is full, for example.
        """
        try:
            for row, content in zip(rows, contents, strict=True):
                place = self._new_place(self._place[row])
                self._file.seek(self._offset(place))
                if self._file.write(content) != self.num_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._place[row], self._checksum[row] = place, zlib.crc32(content)
        except OSError as error:
            reason = error.strerror or error
            raise OSError(
                error.errno,
                f"cannot write the states of clients to {self._path}: {reason}; make room and "
                "continue with --resume",
            ) from error

    def _new_place(self, place: int) -> int:
        if place >= 0 and not (place < len(self._is_saved) and self._is_saved[place]):
            return place
        if self._free:
            return self._free.pop()
        self._end += 1
        return self._end - 1

    def _offset(self, place: int) -> int:
        return len(_HEADER) + int(place) * self.num_bytes

    def to_save(self) -> list[np.ndarray]:
        """Syncs the file, and gives the table and the checksums that a checkpoint must have."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return [self._place.copy(), self._checksum.copy()]

    def saved(self) -> None:
        """Notes that a checkpoint has what `to_save` gave.

        The last two checkpoints are kept, so that places that neither needs are free from now on.
        """
        self._is_saved = np.zeros(self._end, bool)
        for table in (self._place, self._saved):
            self._is_saved[table[table >= 0]] = True
        self._free = np.flatnonzero(~self._is_saved)[::-1].tolist()
        self._saved = self._place.copy()

    def restore(self, place: np.ndarray, checksum: np.ndarray) -> None:
        """Continues from the arrays in a checkpoint.

        Raises:
          RefusedError: if they are of another run.
        """
        size = (os.fstat(self._file.fileno()).st_size - len(_HEADER)) // max(1, self.num_bytes)
        shapes = (self._place.shape, self._checksum.shape)
        if (place.shape, checksum.shape) != shapes or place.max(initial=-1) >= size:
            raise RefusedError(f"{self._path} does not fit the unfinished run; {_REMEDY}")
        self._place, self._checksum = place.copy(), checksum.copy()
        # An older checkpoint may need any of the places, until the next one is saved.
        self._end, self._is_saved, self._free = size, np.ones(size, bool), []
        self._saved = self._place.copy()

    def close(self) -> None:
        """Closes the file. One without a name is deleted by this."""
        self._file.close()


class Fetched(NamedTuple):
    """States of a cohort's clients, on the host.

    Attributes:
      states: for each stack, ``[replicas, models, rows, ...]``.
      homes: ``int32[replicas, slots]``, the row of each slot's client among its model's.
      rows: for each stack, the rows in its file.
      at: for each stack, the replica, the model and the row of each of these.
    """

    states: list[Any]
    homes: np.ndarray
    rows: list[np.ndarray]
    at: list[tuple[np.ndarray, ...]]


class Shape(NamedTuple):
    """Sizes of one stack's states.

    Attributes:
      models: the indices of the models.
      num_clients: N.
      width: the number of rows that a round needs of each model.
    """

    models: tuple[int, ...]
    num_clients: int
    width: int


class ClientFiles:
    """The states of all clients of a batch's replicas, in one file for each stack of models.

    Args:
      directory: of the files.
      name: the start of their names, which only this run has; None for files without a name,
        which no other process can see, and which vanish with this one.
      saved: the arrays of a checkpoint, two for each stack; None starts new files.
    """

    def __init__(
        self, directory: Path, name: str | None, saved: Sequence[np.ndarray] | None
    ) -> None:
        """Opens no file yet."""
        self._directory, self._name, self._restored = directory, name, saved
        self._shapes: Sequence[Shape] = ()
        self._initial = list[Any]()
        self.rows = list[Rows]()

    @property
    def is_open(self) -> bool:
        """Whether the files are open."""
        return bool(self.rows)

    def open(self, shapes: Sequence[Shape], initial: Sequence[Any]) -> None:
        """Opens or creates the files.

        Args:
          shapes: the sizes of each stack's states.
          initial: for each stack, a pytree of the initial states ``[replicas, models, 1, ...]``.

        Raises:
          RefusedError: if a file is missing, or is not of this run.
        """
        self._shapes, self._initial = shapes, [jax.tree.map(np.array, x) for x in initial]
        saved = self._restored
        if saved is not None and len(saved) != 2 * len(shapes):
            raise RefusedError("the unfinished run has other states of clients")
        for number, (shape, first) in enumerate(zip(shapes, self._initial, strict=True)):
            path = None if self._name is None else self._path(number)
            file = _opened(path, self._directory, is_new=saved is None)
            flat = [x.reshape(-1, *x.shape[3:]) for x in jax.tree.leaves(first)]
            start = _bytes_of(flat, np.arange(len(flat[0])))
            self.rows.append(Rows(file, path or self._directory, start, shape.num_clients))
            if saved is not None:
                self.rows[-1].restore(*saved[2 * number : 2 * number + 2])

    def _path(self, stack: int | str) -> Path:
        return self._directory / f"{self._name}-{stack}.states"

    def fetch(self, cohort: Cohort) -> Fetched:
        """Reads the states of a cohort's clients, ``[replicas, slots]``.

        A client that occurs twice for a model has one row, as in memory.
        """
        clients = np.asarray(cohort.clients)
        models = np.broadcast_to(np.asarray(cohort.models), clients.shape)
        homes = np.zeros(clients.shape, np.int32)
        states, rows, at = [], [], []
        for shape, first, file in zip(self._shapes, self._initial, self.rows, strict=True):
            found = list[tuple[np.ndarray, ...]]()
            for replica, (own, of) in enumerate(zip(clients, models, strict=True)):
                for row, model in enumerate(shape.models):
                    is_mine = (own >= 0) & (of == model)
                    different, home = np.unique(own[is_mine], return_inverse=True)
                    homes[replica, is_mine] = home
                    owner = np.full(len(different), replica), np.full(len(different), row)
                    found.append((*owner, np.arange(len(different)), different))
            *place, client = map(np.concatenate, zip(*found, strict=True))
            mine = (place[0] * len(shape.models) + place[1]) * shape.num_clients + client
            states.append(_placed(first, shape.width, place, file.read(mine)))
            rows.append(mine)
            at.append(tuple(place))
        return Fetched(states, homes, rows, at)

    def put(self, fetched: Fetched, states: Sequence[Any]) -> None:
        """Writes the new states of the clients that were fetched."""
        for file, rows, at, tree in zip(self.rows, fetched.rows, fetched.at, states, strict=True):
            file.write(rows, _bytes_of(jax.tree.leaves(tree), at))

    def to_save(self) -> list[np.ndarray]:
        """Arrays that a checkpoint must have."""
        return [array for rows in self.rows for array in rows.to_save()]

    def saved(self) -> None:
        """Notes that a checkpoint has what `to_save` gave."""
        for rows in self.rows:
            rows.saved()

    def close(self) -> None:
        """Closes the files, and keeps those with a name."""
        for rows in self.rows:
            rows.close()

    def remove(self) -> None:
        """Deletes the files, whose run has ended."""
        self.close()
        if self._name is not None:
            for path in self._directory.glob(f"{self._name}-*.states"):
                if _has_header(path):
                    path.unlink(missing_ok=True)


def _opened(path: Path | None, directory: Path, is_new: bool) -> FileIO:
    """Opens or creates a file of states, without a buffer."""
    if path is None:
        file: Any = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        file.write(_HEADER)
        return file
    if not path.is_file():
        if not is_new or path.exists():
            raise RefusedError(f"{path} is missing, or not a file; {_REMEDY}")
    elif not _has_header(path):
        raise RefusedError(f"{path} is not of this run, or damaged; move it, or {_REMEDY}")
    if is_new:
        # Replace what an earlier start of the same run left, which no checkpoint needs.
        write_aside(path, lambda aside: aside.write_bytes(_HEADER))
    return FileIO(path, "r+")


def _has_header(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_HEADER)) == _HEADER


def _bytes_of(leaves: Sequence[Any], at: Any) -> np.ndarray:
    """Rows of some arrays as bytes, ``uint8[rows, bytes]``."""
    parts = [np.ascontiguousarray(np.asarray(leaf)[at]) for leaf in leaves]
    number = len(at[0]) if isinstance(at, tuple) else len(at)
    return np.concatenate([x.reshape(number, -1).view(np.uint8) for x in parts], axis=1)


def _placed(first: Any, width: int, place: Sequence[np.ndarray], rows: np.ndarray) -> Any:
    """Arrays ``[replicas, models, width, ...]`` with rows of bytes in some places."""
    leaves, structure = jax.tree.flatten(first)
    made, start = [], 0
    for leaf in leaves:
        number = leaf[0, 0, 0].nbytes
        array = np.zeros((*leaf.shape[:2], width, *leaf.shape[3:]), leaf.dtype)
        content = np.ascontiguousarray(rows[:, start : start + number]).view(leaf.dtype)
        array[tuple(place)] = content.reshape(len(rows), *leaf.shape[3:])
        made.append(array)
        start += number
    return jax.tree.unflatten(structure, made)
