"""IDX files, the format of MNIST, Fashion-MNIST and EMNIST."""

import gzip
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Literal

import numpy as np
import psutil

from fedjax_mm.checks.annotations import checked
from fedjax_mm.checks.values import check_choice
from fedjax_mm.data.federated import Pool
from fedjax_mm.tools.files import check_regular, located

Name = Literal["mnist", "fashion-mnist", "emnist"]

_DTYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
# EMNIST's splits and their numbers of classes.
_EMNIST = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}


def read_idx(path: str | Path) -> np.ndarray:
    """Reads the array in an IDX file, with or without gzip compression.

    Args:
      path: a file with two zero bytes, a type, the number of dimensions, their sizes and the
        values, in big-endian order.

    Raises:
      ValueError: if the file is not IDX, is shorter or longer than its header declares, or does not
        fit in memory. The message names the record, counted from 0 along the first dimension.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "labels")
      >>> path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
      11
      >>> read_idx(path)
      array([7, 2, 1], dtype=uint8)

    Reference:
      LeCun, Cortes and Burges, "The MNIST database of handwritten digits", file formats.
    """
    path = Path(path)
    with located(path), _opened(path) as file:
        dtype, shape = _header(file)
        number, needed = shape[0], math.prod(shape) * dtype.itemsize
        # Require twice the memory, because swapping bytes and transposing images make a copy.
        if 2 * needed > (room := psutil.virtual_memory().available):
            raise ValueError(f"the header declares {needed:,} bytes, but {room:,} are free")
        # Read no more than the header declares, because a small compressed file may expand
        # indefinitely.
        raw = np.empty(needed, np.uint8)
        size = file.readinto(raw.data)
        if size < needed:
            raise ValueError(
                f"record {size * number // needed} of {number} is cut off: the header declares "
                f"{needed} bytes of values, but there are {size}"
            )
        if file.read(1):
            raise ValueError(f"bytes follow the last of {number} records")
        return raw.view(dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


@checked
def load_idx(directory: str | Path, *, dataset: Name = "mnist", split: str = "byclass") -> Pool:
    """Loads MNIST, Fashion-MNIST or EMNIST from their official files.

    EMNIST's files contain transposed images and number letters from 1. The loaded images are
    upright, and letters are numbered from 0.

    Args:
      directory: the directory with the files, compressed or not, or the parent of a directory
        called like it.
      dataset: the dataset.
      split: for EMNIST, byclass (62 classes), bymerge, balanced, letters, digits or mnist.

    Raises:
      FileNotFoundError: if a file is missing; the message names it.
      ValueError: if the dataset or the split is unknown, a file is damaged, or files do not match.

    Example:
      >>> import pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> for part in ("train", "t10k"):
      ...     images = folder / f"{part}-images-idx3-ubyte"
      ...     _ = images.write_bytes(bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1, 9, 9]))
      ...     labels = folder / f"{part}-labels-idx1-ubyte"
      ...     _ = labels.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 1, 7]))
      >>> pool = load_idx(folder)
      >>> pool.train[0].shape, pool.train[1]
      ((1, 2, 1, 1), array([7], dtype=int32))
    """
    paths, title, num_classes = _files(Path(directory), dataset, split)
    train, test = (_images_and_labels(*pair, title, num_classes) for pair in paths)
    return Pool(title, "real", num_classes, train, test)


@checked
def check_idx(directory: str | Path, *, dataset: Name = "mnist", split: str = "byclass") -> None:
    """Raises `load_idx`'s errors for invalid names and missing files, without reading any file.

    Example:
      >>> try:
      ...     check_idx("nowhere")
      ... except FileNotFoundError as error:
      ...     print(str(error).partition(" (")[0])
      no train-images-idx3-ubyte
    """
    _files(Path(directory), dataset, split)


def _files(directory: Path, dataset: Name, split: str) -> tuple[list[tuple[Path, Path]], str, int]:
    """Paths of the training and test images and labels, the title, and C."""
    files, title, num_classes = ("train", "t10k"), str(dataset), 10
    if dataset == "emnist":
        check_choice("split", split, *_EMNIST)
        files, title = (f"emnist-{split}-train", f"emnist-{split}-test"), f"emnist, {split}"
        num_classes = _EMNIST[split]
    places = [directory, directory / dataset]
    images = [_find(places, f"{file}-images-idx3-ubyte") for file in files]
    labels = [_find(places, f"{file}-labels-idx1-ubyte") for file in files]
    return list(zip(images, labels, strict=True)), title, num_classes


def _images_and_labels(
    images_path: Path, labels_path: Path, title: str, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    images, labels = read_idx(images_path), read_idx(labels_path)
    for path, array, ndim in ((images_path, images, 3), (labels_path, labels, 1)):
        if array.ndim != ndim or array.dtype != np.uint8:
            raise ValueError(
                f"{path}: {array.ndim} dimensions of {array.dtype}; there must be {ndim} of uint8"
            )
    if not images.size:
        raise ValueError(f"{images_path}: {len(images)} images of {images.shape[1:]} pixels")
    if len(images) != len(labels):
        raise ValueError(
            f"{images_path}: {len(images)} images, but {len(labels)} labels in {labels_path.name}"
        )
    first = int(title == "emnist, letters")
    wrong = np.flatnonzero((labels < first) | (labels >= first + num_classes))
    if len(wrong):
        raise ValueError(
            f"{labels_path}: record {wrong[0]} is label {labels[wrong[0]]}, "
            f"outside {first} ... {first + num_classes - 1}"
        )
    if title.startswith("emnist"):
        images = images.swapaxes(1, 2)
    return np.ascontiguousarray(images)[..., None], labels.astype(np.int32) - first


def _find(places: list[Path], file: str) -> Path:
    for place in places:
        for path in (place / file, place / f"{file}.gz"):
            if path.is_file():
                return path
    raise FileNotFoundError(f"no {file} (or {file}.gz) in {' or '.join(map(str, places))}")


@contextmanager
def _opened(path: Path) -> Iterator[BufferedIOBase]:
    """Opens a file, compressed or not, and converts errors of damaged files to `ValueError`."""
    check_regular(path)
    with path.open("rb") as plain:
        is_compressed = plain.read(2) == b"\x1f\x8b"
        plain.seek(0)
        try:
            yield gzip.GzipFile(fileobj=plain) if is_compressed else plain
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"the file is damaged: {error}") from error


def _header(file: BufferedIOBase) -> tuple[np.dtype, tuple[int, ...]]:
    """Dtype and shape of the values that follow."""
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _DTYPES or head[3] == 0:
        raise ValueError(f"not an IDX file: it begins with {head.hex(' ') or 'nothing'}")
    with located("header"):
        sizes = np.frombuffer(file.read(4 * head[3]), ">u4", head[3])
    return np.dtype(_DTYPES[head[2]]), tuple(sizes.tolist())
