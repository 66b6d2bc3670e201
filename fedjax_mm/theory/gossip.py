"""Rates of gossip: how fast models that mix agree."""

import numpy as np
from numpy.typing import ArrayLike


def spectral_gap(W: ArrayLike) -> float:
    """``1 - |lambda_2|``, where lambda_2 is the second largest eigenvalue of W by modulus.

    Without training, the consensus error of a symmetric W falls by ``|lambda_2|^2`` in a round in
    the end.

    Args:
      W: a mixing matrix, whose rows sum to 1; `topologies.mixing_matrix` gives that of a network.

    Raises:
      ValueError: if W is not square, or its rows do not sum to 1.

    Example:
      >>> from fedjax_mm.topologies import mixing_matrix, ring
      >>> round(spectral_gap(mixing_matrix(ring(), 8)), 6)
      0.195262

    Reference: Xiao, Boyd, "Fast Linear Iterations for Distributed Averaging" (2004).
    """
    matrix = np.asarray(W, np.float64)
    if matrix.ndim != 2 or len(matrix) != matrix.shape[1]:
        raise ValueError(f"W has the shape {matrix.shape}; give a square matrix")
    if not np.allclose(matrix.sum(1), 1, atol=1e-5):
        raise ValueError(f"rows of W sum to {matrix.sum(1).tolist()}; they must sum to 1")
    is_symmetric = np.allclose(matrix, matrix.T, atol=1e-12)
    values = np.linalg.eigvalsh(matrix) if is_symmetric else np.linalg.eigvals(matrix)
    moduli = np.sort(np.abs(values))
    return float(1 - moduli[-2]) if len(moduli) > 1 else 1.0
