"""LEAF's JSON directories, which have a natural partition into clients."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from annotated_types import MinLen
from pydantic import BaseModel, ValidationError

from fedjax_mm.checks.annotations import Count, checked
from fedjax_mm.data.arrays import check_finite, check_labels, plain_array
from fedjax_mm.data.clients import client_data
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.tools.files import check_regular, located

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
    read, known = _FORMS[dataset]
    train, test = _split(Path(directory, "train"), read), _split(Path(directory, "test"), read)
    if alone := sorted(train.keys() ^ test.keys()):
        folder = Path(directory, "test" if alone[0] in train else "train")
        raise ValueError(f"{folder}: user {alone[0]!r} is missing")
    first = next(iter(train.values()))[1].shape[1:]
    for users in (train, test):
        for user, (path, x, _) in users.items():
            if x.shape[1:] != first:
                raise ValueError(
                    f"{path}: user {user!r}: x has shape {x.shape[1:]}, the first user's {first}"
                )
    num_classes = _classes(Path(directory), [train, test], num_classes or known)
    stores = [client_data([users[user][1:] for user in train]) for users in (train, test)]
    return FederatedData(name or dataset or "leaf", "real", num_classes, *stores)


def _classes(directory: Path, splits: list[_Users], given: int | None) -> int:
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
    """JSON files in a directory, sorted by name.

    Raises:
      FileNotFoundError: if the directory contains no JSON file.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no .json files")
    return paths


def _split(folder: Path, read: Callable[..., _Examples]) -> _Users:
    users: _Users = {}
    # Reject a user in two files, because the later entry would silently replace the earlier one.
    for path in json_files(folder):
        for user, (x, y) in read_users(path).items():
            with located(path, f"user {user!r}"):
                if user in users:
                    raise ValueError(f"already in {users[user][0].name}")
                users[user] = path, *read(x, y)
    if not users:
        raise ValueError(f"{folder}: the files have no users")
    return users


class _User(BaseModel):
    x: Annotated[list[Any], MinLen(1)]
    y: list[Any]


class _File(BaseModel):
    users: list[str]
    num_samples: list[int]
    user_data: dict[str, _User]


def read_users(path: Path) -> dict[str, tuple[list[Any], list[Any]]]:
    """Every user's x and y in a file, unchanged and with equal positive lengths.

    Raises:
      ValueError: if the file is inconsistent; the message names file, user and reason.
    """
    check_regular(path)
    try:
        # Parse with `json`, because pydantic refuses half a surrogate pair, which tweets may have.
        file = _File.model_validate(json.loads(path.read_bytes()), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise ValueError(f"{path}: not a LEAF file: {where}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a LEAF file: {error}") from error
    if sorted(file.users) != sorted(file.user_data) or len(file.users) != len(file.num_samples):
        raise ValueError(f"{path}: users, num_samples and user_data do not have the same users")
    for user, size in zip(file.users, file.num_samples, strict=True):
        lengths = [len(file.user_data[user].x), len(file.user_data[user].y), size]
        if len({*lengths}) > 1:
            raise ValueError(
                f"{path}: user {user!r}: the lengths of x and y, and num_samples, are {lengths}"
            )
    return {user: (file.user_data[user].x, file.user_data[user].y) for user in file.users}


def _examples(inputs: list[Any], labels: list[Any]) -> _Examples:
    x, y = plain_array("x", inputs), plain_array("y", labels)
    if y.ndim != 1 or "b" in (x.dtype.kind, y.dtype.kind):
        raise ValueError("there must be numbers x, and one number y for each")
    check_labels("y", y)
    # Let numbers beyond float32 become infinite, so that the check names them.
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    check_finite("x", x)
    return x, y.astype(np.int32)


def _images(inputs: list[Any], labels: list[Any]) -> _Examples:
    x, y = _examples(inputs, labels)
    if x.shape[1:] != (_SIDE**2,):
        raise ValueError(f"x has shape {x.shape[1:]}; images of FEMNIST have {_SIDE**2}")
    # Convert pixels back to bytes, which LEAF divides by 255, to use a quarter of the memory.
    pixels = np.rint(x * 255)
    if x.min() < 0 or x.max() > 1 or np.abs(x * 255 - pixels).max() > 1e-3:
        raise ValueError("x must be bytes divided by 255, as LEAF's scripts write them")
    return pixels.astype(np.uint8).reshape(-1, _SIDE, _SIDE, 1), y


def _texts(inputs: list[Any], labels: list[Any]) -> _Examples:
    x, y = _characters("x", inputs, _LENGTH), _characters("y", labels, 1)
    return x, y[:, 0].astype(np.int32)


def _characters(name: str, texts: list[Any], length: int) -> np.ndarray:
    """Vocabulary indices of the texts' characters, ``uint8[texts, length]``."""
    for i, text in enumerate(texts):
        if not isinstance(text, str) or len(text) != length:
            raise ValueError(f"{name}[{i}] must be a text of {length} characters")
    everything = "".join(texts)
    codes = np.frombuffer(everything.encode("utf-32-le", "surrogatepass"), np.uint32)
    # Map codes beyond ASCII to a control character, which is not in the vocabulary.
    numbers = _NUMBERS[np.where(codes < len(_NUMBERS), codes, 0)]
    if len(unknown := np.flatnonzero(numbers == _UNKNOWN)):
        place, character = unknown[0] // length, everything[unknown[0]]
        raise ValueError(f"{name}[{place}] has {character!r}, not in LEAF's vocabulary")
    return numbers.reshape(len(texts), length)


# For each dataset, the function that converts x and y, and its number of classes if known.
_FORMS: dict[str | None, tuple[Callable[[list[Any], list[Any]], _Examples], int | None]] = {
    None: (_examples, None),
    "femnist": (_images, 62),
    "shakespeare": (_texts, len(CHARACTERS)),
}
