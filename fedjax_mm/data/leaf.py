"""LEAF's JSON directories, which have a natural partition into clients."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from fedjax_mm.checks.annotations import Count, checked
from fedjax_mm.data.clients import client_data
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.tools.files import check_regular

LeafName = Literal["femnist", "shakespeare"]

_Examples: TypeAlias = tuple[np.ndarray, np.ndarray]
_Users = dict[str, tuple[Path, np.ndarray, np.ndarray]]

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's vocabulary for Shakespeare, in which a character's position is its number."""

_LENGTH = 80  # characters in a Shakespeare text
_SIDE = 28  # pixels of a FEMNIST image
_UNKNOWN = 255
_NUMBERS = np.full(128, _UNKNOWN, np.uint8)  # maps ASCII characters to their numbers
_NUMBERS[[ord(each) for each in CHARACTERS]] = np.arange(len(CHARACTERS))


@checked
def load_leaf(
    directory: str | Path,
    *,
    dataset: LeafName | None = None,
    name: str | None = None,
    num_classes: Count | None = None,
) -> FederatedData:
    """Loads the clients of a LEAF directory, in the order of the training files.

    Args:
      directory: a directory whose subdirectories `train` and `test` hold JSON files ``{users,
        num_samples, user_data: {user: {x, y}}}``. Files are joined in the order of their names, and
        other entries, such as hierarchies, are ignored. x must be numeric and is read as float32.
      dataset: a dataset that needs conversion. "femnist" converts x, 784 pixels between 0 and 1, to
        images ``uint8[examples, 28, 28, 1]`` of 62 classes: digits, uppercase and lowercase
        letters. "shakespeare" converts x, texts of 80 characters, and y, the next character, to
        indices into LEAF's vocabulary of 80 characters, ``uint8[examples, 80]`` and
        ``int32[examples]``.
      name: the name of the dataset; defaults to `dataset`, or "leaf".
      num_classes: C; defaults to the number of classes of `dataset`, or else to 1 more than the
        largest label if at least half of the labels occur.

    Raises:
      FileNotFoundError: if a directory has no JSON files.
      ValueError: if files are inconsistent; the message names file, user and reason.

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
    read = _FORMS[dataset].read
    train, test = _split(Path(directory, "train"), read), _split(Path(directory, "test"), read)
    for one, other, place in ((train, test, "test"), (test, train, "train")):
        for user, (path, *_) in one.items():
            if user not in other:
                raise ValueError(f"{path}: user {user!r}: missing from the {place} files")
    first = next(iter(train.values()))[1].shape[1:]
    for users in (train, test):
        for user, (path, x, _) in users.items():
            if x.shape[1:] != first:
                raise _error(path, user, f"x has shape {x.shape[1:]}, the first user's {first}")
    known = num_classes or _FORMS[dataset].num_classes
    num_classes = _classes(Path(directory), [train, test], known)
    stores = [client_data([users[user][1:] for user in train]) for users in (train, test)]
    return FederatedData(name or dataset or "leaf", "real", num_classes, *stores)


def _classes(directory: Path, splits: list[_Users], given: int | None) -> int:
    """Returns the given or inferred C."""
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
    """Raises `load_leaf`'s error if a directory has no JSON files, without reading any file."""
    for split in ("train", "test"):
        json_files(Path(directory, split))


def json_files(folder: Path) -> list[Path]:
    """Returns the JSON files in a directory, sorted by name.

    Raises:
      FileNotFoundError: if the directory contains no JSON file.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no .json files")
    return paths


def _split(folder: Path, read: Callable[..., _Examples]) -> _Users:
    users: _Users = {}
    # Reject a user who occurs in two files, because the second would silently replace the first.
    for path in json_files(folder):
        for user, (x, y) in read_users(path).items():
            if user in users:
                raise _error(path, user, f"already in {users[user][0].name}")
            users[user] = path, *read(path, user, x, y)
    if not users:
        raise ValueError(f"{folder}: the files have no users")
    return users


def read_users(path: Path) -> dict[str, tuple[list[Any], list[Any]]]:
    """Returns every user's x and y in a file, unchanged and with equal positive lengths.

    Raises:
      ValueError: if the file is inconsistent; the message names file, user and reason.
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


def _examples(path: Path, user: str, inputs: list[Any], labels: list[Any]) -> _Examples:
    x, y = _numbers(path, user, "x", inputs), _numbers(path, user, "y", labels)
    if y.ndim != 1:
        raise _error(path, user, f"x has {x.ndim} dimensions, y has {y.ndim}; y must have 1")
    if (y < 0).any() or (y != np.rint(y)).any():
        raise _error(path, user, "y must be class numbers 0, 1, ...")
    if y.max() > np.iinfo(np.int32).max:
        raise _error(path, user, "y is too large for a class number")
    # Let numbers beyond float32 become infinite, so that the check below names the user.
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


def _images(path: Path, user: str, inputs: list[Any], labels: list[Any]) -> _Examples:
    x, y = _examples(path, user, inputs, labels)
    if x.shape[1:] != (_SIDE**2,):
        raise _error(path, user, f"x has shape {x.shape[1:]}; images of FEMNIST have {_SIDE**2}")
    # Convert pixels back to bytes, which LEAF divides by 255, to use a quarter of the memory.
    pixels = np.rint(x * 255)
    if x.min() < 0 or x.max() > 1 or np.abs(x * 255 - pixels).max() > 1e-3:
        raise _error(path, user, "x must be bytes divided by 255, as LEAF's scripts write them")
    return pixels.astype(np.uint8).reshape(-1, _SIDE, _SIDE, 1), y


def _texts(path: Path, user: str, inputs: list[Any], labels: list[Any]) -> _Examples:
    x, y = (
        _characters(path, user, name, values, length)
        for name, values, length in (("x", inputs, _LENGTH), ("y", labels, 1))
    )
    return x, y[:, 0].astype(np.int32)


def _characters(path: Path, user: str, name: str, texts: list[Any], length: int) -> np.ndarray:
    """Returns the vocabulary indices of the texts' characters, ``uint8[texts, length]``."""
    for i, text in enumerate(texts):
        if not isinstance(text, str) or len(text) != length:
            given = f"{len(text)} characters" if isinstance(text, str) else "no text"
            raise _error(path, user, f"{name}[{i}] is {given}; it must be a text of {length}")
    everything = "".join(texts)
    codes = np.frombuffer(everything.encode("utf-32-le", "surrogatepass"), np.uint32)
    # Map codes beyond ASCII to a control character, which is not in the vocabulary.
    numbers = _NUMBERS[np.where(codes < len(_NUMBERS), codes, 0)]
    unknown = np.flatnonzero(numbers == _UNKNOWN)
    if len(unknown):
        place, character = unknown[0] // length, everything[unknown[0]]
        raise _error(path, user, f"{name}[{place}] has {character!r}, not in LEAF's vocabulary")
    return numbers.reshape(len(texts), length)


class _Form(NamedTuple):
    """A function that converts a dataset's x and y, and its number of classes if known."""

    read: Callable[[Path, str, list[Any], list[Any]], _Examples]
    num_classes: int | None


_FORMS: dict[str | None, _Form] = {
    None: _Form(_examples, None),
    "femnist": _Form(_images, 62),
    "shakespeare": _Form(_texts, len(CHARACTERS)),
}


def _error(path: Path, user: str, reason: str) -> ValueError:
    return ValueError(f"{path}: user {user!r}: {reason}")
