"""CIFAR-10 and CIFAR-100 from their published binary files."""

from pathlib import Path
from typing import Literal

import numpy as np

from fedjax_mm.checks.annotations import checked
from fedjax_mm.data.federated import Pool
from fedjax_mm.tools.files import check_regular

CIFARName = Literal["cifar-10", "cifar-100"]
CIFARLabels = Literal["fine", "coarse"]

_FOLDERS = {
    "cifar-10": "cifar-10-batches-bin",
    "cifar-100": "cifar-100-binary",
}  # inside the archives
_FILES = {
    "cifar-10": ([f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin"),
    "cifar-100": (["train.bin"], "test.bin"),
}
# The label bytes at the start of a record, with their numbers of classes.
_CLASSES = {"cifar-10": {"fine": 10}, "cifar-100": {"coarse": 20, "fine": 100}}
_SHAPE = (3, 32, 32)  # image shape in a file, with red, green and blue channels


@checked
def load_cifar(
    directory: str | Path, *, dataset: CIFARName = "cifar-10", labels: CIFARLabels = "fine"
) -> Pool:
    """Loads CIFAR-10 or CIFAR-100 from their "binary version" files.

    Images are ``uint8[examples, 32, 32, 3]``, converted from the files' channels-first layout.

    Args:
      directory: the directory with the files ``data_batch_1.bin`` ... ``data_batch_5.bin`` and
        ``test_batch.bin``, or ``train.bin`` and ``test.bin``, or the parent of the archive's
        directory ``cifar-10-batches-bin`` or ``cifar-100-binary``.
      dataset: the dataset.
      labels: for CIFAR-100, the 100 fine or the 20 coarse classes.

    Raises:
      FileNotFoundError: if a file is missing; the message names it.
      ValueError: if the dataset is unknown, coarse labels are requested for CIFAR-10, or a file is
        empty or truncated, or has a label out of range; the message names the file and the record,
        counted from 0.

    Example:
      >>> import pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> for part in ("train", "test"):
      ...     _ = (folder / f"{part}.bin").write_bytes(bytes([19, 99, *[7] * 3072]))
      >>> pool = load_cifar(folder, dataset="cifar-100", labels="coarse")
      >>> pool.name, pool.num_classes, pool.train[0].shape, pool.train[1]
      ('cifar-100, coarse', 20, (1, 32, 32, 3), array([19], dtype=int32))

    Reference:
      Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
    """
    paths, test_path = _find(Path(directory), dataset, labels)
    title = dataset if labels == "fine" else f"{dataset}, {labels}"
    parts = [_read(path, dataset, labels) for path in paths]
    train = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    return Pool(title, "real", _CLASSES[dataset][labels], train, _read(test_path, dataset, labels))


@checked
def check_cifar(
    directory: str | Path, *, dataset: CIFARName = "cifar-10", labels: CIFARLabels = "fine"
) -> None:
    """Raises `load_cifar`'s errors for invalid names and missing files, without reading any file.

    Example:
      >>> check_cifar("nowhere")
      Traceback (most recent call last):
      FileNotFoundError: no data_batch_1.bin in nowhere or nowhere/cifar-10-batches-bin
    """
    _find(Path(directory), dataset, labels)


def _find(directory: Path, dataset: CIFARName, labels: CIFARLabels) -> tuple[list[Path], Path]:
    """Paths of the training files and the test file."""
    if labels not in _CLASSES[dataset]:
        raise ValueError(
            f"labels is {labels!r}, but {dataset} has one kind of labels; leave it out"
        )
    places = [directory, directory / _FOLDERS[dataset]]

    def find(file: str) -> Path:
        for place in places:
            if (place / file).is_file():
                return place / file
        words = f"no {file} in {' or '.join(map(str, places))}"
        for other, (files, _) in _FILES.items():
            if other != dataset and any(
                (place / files[0]).is_file() for place in (*places, directory / _FOLDERS[other])
            ):
                words += f"; there is {files[0]}, of {other}: ask for {other!r}"
        raise FileNotFoundError(words)

    train, test = _FILES[dataset]
    return list(map(find, train)), find(test)


def _read(path: Path, dataset: CIFARName, labels: CIFARLabels) -> tuple[np.ndarray, np.ndarray]:
    check_regular(path)
    classes = _CLASSES[dataset]
    size = len(classes) + np.prod(_SHAPE)
    content = np.fromfile(path, np.uint8)
    number, rest = divmod(len(content), size)
    if rest or not number:
        raise ValueError(
            f"{path}: record {number} is cut off: a record has {size} bytes, there are {rest}"
        )
    records = content.reshape(number, size)
    for column, (kind, num_classes) in enumerate(classes.items()):
        wrong = np.flatnonzero(records[:, column] >= num_classes)
        if len(wrong):
            raise ValueError(
                f"{path}: record {wrong[0]} has the {kind} label {records[wrong[0], column]}, "
                f"outside 0 ... {num_classes - 1}; give the files of {dataset}"
            )
    x = records[:, len(classes) :].reshape(number, *_SHAPE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(x), records[:, list(classes).index(labels)].astype(np.int32)
