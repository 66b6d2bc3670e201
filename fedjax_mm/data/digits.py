"""Handwritten digits of scikit-learn: real images without a download."""

import importlib

import numpy as np

from fedjax_mm.checks import check_fraction
from fedjax_mm.data.federated import Pool
from fedjax_mm.data.partition import generator


def digits(*, test_fraction: float = 0.2, seed: int = 0) -> Pool:
    """Loads the 1,797 digits of scikit-learn, 8 x 8 pixels, 10 classes.

    Args:
      test_fraction: of each class.
      seed: of the choice of the test images.

    Raises:
      ValueError: if `test_fraction` does not lie between 0 and 1.

    Example:
      >>> pool = digits()
      >>> pool.train[0].shape, pool.test[0].shape
      ((1438, 8, 8, 1), (359, 8, 8, 1))

    Reference:
      Alpaydin and Kaynak, "Optical recognition of handwritten digits", UCI repository, 1998.
    """
    check_fraction("test_fraction", test_fraction)
    # Importing scikit-learn takes a second: only this function does.
    source = importlib.import_module("sklearn.datasets").load_digits()
    x = np.rint(source.images * (255 / 16)).astype(np.uint8)[..., None]
    y = source.target.astype(np.int32)
    rng = generator(seed)
    in_test = np.zeros(len(y), bool)
    for label in range(10):
        rows = np.flatnonzero(y == label)
        in_test[rng.permutation(rows)[: round(test_fraction * len(rows))]] = True
    return Pool("digits", "real", 10, (x[~in_test], y[~in_test]), (x[in_test], y[in_test]))
