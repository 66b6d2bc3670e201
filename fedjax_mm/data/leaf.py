"""LEAF's directories of JSON files, with a natural partition into clients."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mm.checked import Count, checked
from fedjax_mm.data.clients import client_data
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.files import check_regular

_Users = dict[str, tuple[Path, np.ndarray, np.ndarray]]


@checked
def load_leaf(
    directory: str | Path, *, name: str = "leaf", num_classes: Count | None = None
) -> FederatedData:
    """Loads the clients of a LEAF directory, in the order of the training files.

    Args:
      directory: a folder with the folders `train` and `test` of JSON files ``{users, num_samples,
        user_data: {user: {x, y}}}``. The files of a folder are joined in the order of their names;
        other entries, such as hierarchies, are ignored. x must be numbers; it is read as float32.
      name: of the dataset.
      num_classes: C; by default 1 more than the largest label, if half of the labels or more occur.

    Raises:
      FileNotFoundError: if a folder has no JSON files.
      ValueError: if a file contradicts itself or another one; the message names file, user and
        reason.

    Example:
      >>> import pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> for split in ("train", "test"):
      ...     (folder / split).mkdir()
      ...     user = {"x": [[1, 2], [3, 4]], "y": [0, 1]}
      ...     content = {"users": ["a"], "num_samples": [2], "user_data": {"a": user}}
      ...     _ = (folder / split / "data.json").write_text(json.dumps(content))
      >>> data = load_leaf(folder)
      >>> data.num_classes, data.train.examples[0].shape
      (2, (2, 2))

    Reference:
      Caldas et al., "LEAF: a benchmark for federated settings", 2018.
    """
    train, test = _split(Path(directory, "train")), _split(Path(directory, "test"))
    for one, other, place in ((train, test, "test"), (test, train, "train")):
        for user, (path, *_) in one.items():
            if user not in other:
                raise ValueError(f"{path}: user {user!r}: missing from the {place} files")
    first = next(iter(train.values()))[1].shape[1:]
    for users in (train, test):
        for user, (path, x, _) in users.items():
            if x.shape[1:] != first:
                raise _error(path, user, f"x has shape {x.shape[1:]}, the first user's {first}")
    num_classes = _classes(Path(directory), [train, test], num_classes)
    stores = [client_data([users[user][1:] for user in train]) for users in (train, test)]
    return FederatedData(name, "real", num_classes, *stores)


def _classes(directory: Path, splits: list[_Users], given: int | None) -> int:
    """Returns C."""
    labels = [np.unique(y) for users in splits for _, _, y in users.values()]
    found = np.unique(np.concatenate(labels))
    needed = 1 + int(found[-1])
    if given is None and needed > 2 * len(found):
        raise ValueError(
            f"{directory}: the largest label is {found[-1]}, but only {len(found)} labels occur; "
            f"number them 0 ... {len(found) - 1}, or give num_classes"
        )
    if given is not None and given < needed:
        raise ValueError(f"{directory}: there is a label {found[-1]}; num_classes is {given}")
    return given or needed


def check_leaf(directory: str | Path) -> None:
    """Raises `load_leaf`'s error if a folder has no JSON files, without reading any file."""
    for split in ("train", "test"):
        json_files(Path(directory, split))


def json_files(folder: Path) -> list[Path]:
    """Returns the JSON files of a folder, in the order of their names.

    Raises:
      FileNotFoundError: if the folder has none.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no .json files")
    return paths


def _split(folder: Path) -> _Users:
    users: _Users = {}
    # Refuse a user in a second file, because it would silently replace the first one's examples.
    for path in json_files(folder):
        for user, (x, y) in read_users(path).items():
            if user in users:
                raise _error(path, user, f"already in {users[user][0].name}")
            users[user] = path, *_examples(path, user, x, y)
    if not users:
        raise ValueError(f"{folder}: the files have no users")
    return users


def read_users(path: Path) -> dict[str, tuple[list[Any], list[Any]]]:
    """Returns every user's x and y in a file, equally many and at least one, unchanged.

    Raises:
      ValueError: if the file contradicts itself; the message names file, user, reason.
    """
    check_regular(path)
    try:
        content = json.loads(path.read_bytes())
        users, sizes, data = (content[key] for key in ("users", "num_samples", "user_data"))
    except (ValueError, KeyError, TypeError) as error:
        reason = f"no entry {error}" if isinstance(error, KeyError) else f"{error}"
        raise ValueError(f"{path}: not a LEAF file: {reason}") from error
    if not isinstance(users, list) or not isinstance(sizes, list) or not isinstance(data, dict):
        raise ValueError(f"{path}: not a LEAF file: users or num_samples or user_data is malformed")
    if len(users) != len(sizes):
        raise ValueError(f"{path}: {len(users)} users, but num_samples has {len(sizes)} entries")
    if sorted(map(str, users)) != sorted(data):
        user = sorted({*map(str, users)} ^ set(data)) or ["listed twice"]
        raise _error(path, user[0], "users and user_data do not agree")
    return {
        user: _lists(path, user, data[user], size)
        for user, size in zip(map(str, users), sizes, strict=True)
    }


def _lists(path: Path, user: str, entry: Any, size: Any) -> tuple[list[Any], list[Any]]:
    if not isinstance(entry, dict) or not {"x", "y"} <= set(entry):
        raise _error(path, user, "no entries x and y")
    x, y = entry["x"], entry["y"]
    if not isinstance(x, list) or not isinstance(y, list):
        raise _error(path, user, "x and y must be lists")
    if not len(x) == len(y) == size:
        raise _error(path, user, f"{len(x)} x and {len(y)} y, but num_samples says {size}")
    if not size:
        raise _error(path, user, "no examples; leave out such users")
    return x, y


def _examples(
    path: Path, user: str, inputs: list[Any], labels: list[Any]
) -> tuple[np.ndarray, np.ndarray]:
    x, y = _numbers(path, user, "x", inputs), _numbers(path, user, "y", labels)
    if y.ndim != 1:
        raise _error(path, user, f"x has {x.ndim} dimensions, y has {y.ndim}; y must have 1")
    if (y < 0).any() or (y != np.rint(y)).any():
        raise _error(path, user, "y must be class numbers 0, 1, ...")
    if y.max() > np.iinfo(np.int32).max:
        raise _error(path, user, "y is too large for a class number")
    # Let numbers beyond float32 become infinite, because the check below names the user.
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    if not np.isfinite(x).all():
        raise _error(path, user, "x is too large for single precision")
    return x, y.astype(np.int32)


def _numbers(path: Path, user: str, key: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise _error(path, user, f"{key} is ragged: rows have different lengths") from error
    if array.dtype.kind not in "iuf":
        raise _error(path, user, f"{key} is not numbers; turn text into vectors first")
    if not np.isfinite(array).all():
        raise _error(path, user, f"{key} is not finite")
    return array


def _error(path: Path, user: str, reason: str) -> ValueError:
    return ValueError(f"{path}: user {user!r}: {reason}")
