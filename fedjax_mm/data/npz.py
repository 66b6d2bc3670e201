"""Arrays of examples from an ``.npz`` file."""

from pathlib import Path

import numpy as np
import psutil

from fedjax_mm.checks.annotations import CountOrZero, checked
from fedjax_mm.data.federated import Pool
from fedjax_mm.data.pools import pool_of
from fedjax_mm.tools.files import check_regular, located

_NAMES = ("x_train", "y_train", "x_test", "y_test")


@checked
def load_npz(file: str | Path, *, num_classes: CountOrZero | None = None) -> Pool:
    """Loads the arrays x_train, y_train, x_test and y_test from an ``.npz`` file.

    `numpy.savez` and `numpy.savez_compressed` write such files. Pickled objects are not loaded. The
    pool is named after the file. uint8 arrays ``[examples, height, width]`` become one-channel
    images.

    Args:
      file: the path of the file.
      num_classes: C; if None, every class from 0 to the largest label must have an example; 0 if y
        are targets of any type and shape.

    Raises:
      FileNotFoundError: if the file does not exist.
      ValueError: if the file is damaged, lacks an array or does not fit in memory, or if the arrays
        do not fit together, as in `federate`.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "stars.npz")
      >>> x, y = np.zeros((6, 8, 8), np.uint8), np.arange(6) % 3
      >>> np.savez(path, x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
      >>> pool = load_npz(path)
      >>> pool.name, pool.num_classes, pool.train[0].shape, pool.test[1]
      ('stars', 3, (6, 8, 8, 1), array([0, 1], dtype=int32))
    """
    check_npz(file)
    path = Path(file)
    x, y, x_test, y_test = _arrays(path)
    with located(path):
        pool, _ = pool_of(((_images(x), y), (_images(x_test), y_test)), num_classes)
    return pool._replace(name=path.stem)


def check_npz(file: str | Path) -> None:
    """Raises `load_npz`'s error if the file is missing, without reading it.

    Example:
      >>> check_npz("nowhere.npz")
      Traceback (most recent call last):
      FileNotFoundError: no nowhere.npz in .; numpy.savez writes such files
    """
    path = Path(file)
    check_regular(path)
    if not path.is_file():
        raise FileNotFoundError(f"no {path.name} in {path.parent}; numpy.savez writes such files")


def _arrays(path: Path) -> list[np.ndarray]:
    try:
        # Open the file here, because NumPy would not close it if it is damaged.
        with path.open("rb") as opened, np.load(opened) as file:
            sizes = {each.filename: each.file_size for each in file.zip.infolist()}
            missing = [name for name in _NAMES if name not in file.files]
            needed = sum(sizes.get(f"{name}.npy", 0) for name in _NAMES)
            room = psutil.virtual_memory().available
            arrays = [] if missing or needed > room else [file[name] for name in _NAMES]
        if not all(isinstance(x, np.ndarray) for x in arrays):  # otherwise one is raw bytes
            raise ValueError("an array is not in NumPy's format")
    except Exception as error:  # damaged content can raise any exception
        reason = " ".join(str(error).split())[:80] or type(error).__name__
        raise ValueError(f"{path}: not a file of arrays: {reason}") from error
    if missing:
        there = ", ".join(map(str, file.files[:5])) or "nothing"
        raise ValueError(
            f"{path}: no array {missing[0]}; give {', '.join(_NAMES)}, there is {there}"
        )
    if needed > room:
        raise ValueError(f"{path}: the arrays have {needed:,} bytes, but {room:,} are free")
    return arrays


def _images(x: np.ndarray) -> np.ndarray:
    return x[..., None] if x.dtype == np.uint8 and x.ndim == 3 else x
