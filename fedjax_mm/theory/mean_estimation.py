"""Mean estimation with two clients: appendix A of Cho et al., "Maximizing Global Model Appeal".

Client k has the true mean ``theta_k`` and the empirical mean ``theta_hat_k ~ N(theta_k, gamma^2)``.
``gamma_G = |theta_2 - theta_1| / 2``, ``gamma_hat_G = |theta_hat_2 - theta_hat_1| / 2``. A client
is satisfied by w if ``|w - theta_k| < |theta_hat_k - theta_k|``; GM-Appeal is the satisfied
fraction. The sigmoid objective is ``v(w) = mean over k of sigma((w - theta_hat_k)^2)``, eq. (29).
Arguments broadcast.
"""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_mm.theory.problem import FloatArray, in_range, require


def lemma_a_1(gamma_G: ArrayLike, gamma: ArrayLike) -> FloatArray:
    """Upper bound on the expected GM-Appeal of the mean of the empirical means.

    ``2 exp(-gamma_G^2 / (5 gamma^2))``, which is informative only if below 1.

    Example:
      >>> lemma_a_1([0.0, 2.0, 4.0], 1.0).round(4).tolist()
      [2.0, 0.8987, 0.0815]

    Reference: Cho et al., Lemma A.1, eqs. (10) to (21).
    """
    gamma_G, gamma = in_range("Lemma A.1", gamma_G=gamma_G, gamma=gamma)
    return 2 * np.exp(-(gamma_G**2) / (5 * gamma**2))


def lemma_a_2(theta_hat_1: ArrayLike, theta_hat_2: ArrayLike) -> FloatArray:
    """The unique minimizer under a convex surrogate of the 0-1 loss.

    ``w* = (theta_hat_1 + theta_hat_2) / 2``, which is FedAvg's solution, for every surrogate h that
    is convex, twice differentiable and strictly increasing on [0, inf).

    Example:
      >>> lemma_a_2(0.5, [1.5, 4.5]).tolist()
      [1.0, 2.5]

    Reference: Cho et al., Lemma A.2, eqs. (22) to (28).
    """
    return np.asarray(np.add(theta_hat_1, theta_hat_2, dtype=np.float64) / 2)


def midpoint_curvature(gamma_hat_G: ArrayLike) -> FloatArray:
    """Second derivative of the sigmoid objective midway between the empirical means.

    ``2 q(x) (2 (1 - 2 sigma(x)) x + 1)`` with ``x = gamma_hat_G^2``, ``q = sigma (1 - sigma)``, and
    a factor 2 for the two clients of (32). The midpoint is a minimum if the result is
    positive, and a maximum if it is negative. The sign changes at gamma_hat_G = 1.0216, which (35)
    rounds to 1.022.

    Example:
      >>> midpoint_curvature([1.0, 1.02, 1.0217, 2.0]).round(5).tolist()
      [0.02979, 0.00219, -0.00017, -0.23711]

    Reference: Cho et al., eq. (34).
    """
    (gamma_hat_G,) = in_range("Equation (34)", gamma_hat_G=gamma_hat_G)
    x = gamma_hat_G**2
    sigma = 1 / (1 + np.exp(-x))
    # Write 1 - sigma as exp(-x) sigma, because the difference cancels for large x.
    q = np.exp(-x) * sigma**2
    return 2 * q * (2 * (1 - 2 * sigma) * x + 1)


def lemma_a_3(gamma_hat_G: ArrayLike) -> FloatArray:
    """Second derivative at the midpoint, a local maximum for ``gamma_hat_G > 2``.

    The proof needs only ``gamma_hat_G >= 1.022``; `midpoint_curvature` has no hypothesis.

    Raises:
      ValueError: unless gamma_hat_G > 2.

    Example:
      >>> lemma_a_3([2.5, 3.0]).round(4).tolist()
      [-0.044, -0.0042]

    Reference: Cho et al., Lemma A.3, eqs. (32) to (35).
    """
    require("Lemma A.3", {"gamma_hat_G > 2": np.greater(gamma_hat_G, 2)}, gamma_hat_G=gamma_hat_G)
    return midpoint_curvature(gamma_hat_G)


def lemma_a_4(theta_hat_1: ArrayLike, theta_hat_2: ArrayLike) -> FloatArray:
    """Intervals that contain the local minima of the sigmoid objective.

    They are ``(low, low + 2]`` and ``[high - 2, high)``, where low and high are the lower and the
    higher empirical mean. If the means are far apart, a minimum may be closer to one of them than
    double precision resolves, but the side on which it lies decides whether that client is
    satisfied. Solve for the distance from the mean instead.

    Returns:
      ``[..., 2, 2]``: the two intervals, and the ends of each. The ends at the empirical means are
      not minima.

    Raises:
      ValueError: unless gamma_hat_G > 0, that is, if the empirical means are equal.

    Example:
      >>> lemma_a_4(6.0, 0.0).tolist()
      [[0.0, 2.0], [4.0, 6.0]]

    Reference: Cho et al., Lemma A.4, eq. (36).
    """
    low = np.minimum(theta_hat_1, theta_hat_2, dtype=np.float64)
    high = np.maximum(theta_hat_1, theta_hat_2, dtype=np.float64)
    # Compare the means rather than gamma_hat_G > 0, because half of the smallest subnormal is 0.
    require("Lemma A.4", {"gamma_hat_G > 0": high > low}, gamma_hat_G=(high - low) / 2)
    ends = np.stack([low, low + 2, high - 2, high], axis=-1)
    return ends.reshape(*low.shape, 2, 2)


def theorem_a_1(gamma: ArrayLike) -> FloatArray:
    """Lower bound on the expected GM-Appeal of a local minimum of MaxFL.

    ``exp(-1 / gamma^2) / 16``, regardless of how far apart the true means are.

    Example:
      >>> theorem_a_1([0.5, 1.0]).round(5).tolist()
      [0.00114, 0.02299]

    Reference: Cho et al., Theorem A.1, eqs. (37) to (46).
    """
    (gamma,) = in_range("Theorem A.1", gamma=gamma)
    return np.exp(-1 / gamma**2) / 16
