"""scikit-learn's handwritten digits: real images that need no download."""

import importlib
import importlib.util
from pathlib import Path

import numpy as np

from fedjax_mm.checked import Fraction, checked
from fedjax_mm.data.federated import Pool
from fedjax_mm.data.partition import generator


@checked
def digits(*, test_fraction: Fraction = 0.2, seed: int = 0) -> Pool:
    """Loads scikit-learn's 1,797 digits: 8 x 8 pixels, 10 classes.

    Args:
      test_fraction: the fraction of each class for testing.
      seed: the seed for choosing test images.

    Raises:
      ValueError: if `test_fraction` is not between 0 and 1.

    Example:
      >>> pool = digits()
      >>> pool.train[0].shape, pool.test[0].shape
      ((1438, 8, 8, 1), (359, 8, 8, 1))

    Reference:
      Alpaydin and Kaynak, "Optical recognition of handwritten digits", UCI repository, 1998.
    """
    table = _table()
    x = np.rint(table[:, :-1].reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    y = table[:, -1].astype(np.int32)
    rng = generator(seed)
    in_test = np.zeros(len(y), bool)
    for label in range(10):
        rows = np.flatnonzero(y == label)
        in_test[rng.permutation(rows)[: round(test_fraction * len(rows))]] = True
    return Pool("digits", "real", 10, (x[~in_test], y[~in_test]), (x[in_test], y[in_test]))


def _table() -> np.ndarray:
    """Returns the pixels, 0 to 16, and the label of every digit."""
    # Do not import scikit-learn, because that takes a second, as long as a small sweep.
    package = importlib.util.find_spec("sklearn")
    if package is not None and package.origin is not None:
        file = Path(package.origin).parent / "datasets/data/digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    source = importlib.import_module("sklearn.datasets").load_digits()
    return np.column_stack((source.data, source.target))
