"""Handwritten digits: real images included in the package."""

from pathlib import Path

import numpy as np

from fedjax_mm.checks.annotations import Fraction, checked
from fedjax_mm.data.federated import Pool
from fedjax_mm.data.partition import generator


@checked
def digits(*, test_fraction: Fraction = 0.2, seed: int = 0) -> Pool:
    """Loads 1,797 handwritten digits: 8 x 8 pixels, 10 classes.

    They are the test set of Alpaydin and Kaynak, as in scikit-learn's `load_digits`. Their license
    is in the file `NOTICE`.

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
    with np.load(Path(__file__).with_name("digits.npz")) as arrays:
        images, y = arrays["images"], arrays["labels"].astype(np.int32)
    x = np.rint(images[..., None] * (255 / 16)).astype(np.uint8)  # pixels are 0 to 16
    rng = generator(seed)
    in_test = np.zeros(len(y), bool)
    for label in range(10):
        rows = np.flatnonzero(y == label)
        in_test[rng.permutation(rows)[: round(test_fraction * len(rows))]] = True
    return Pool("digits", "real", 10, (x[~in_test], y[~in_test]), (x[in_test], y[in_test]))
