"""Theorem 3 of Bhuyan, Moharir and Joshi: what many models gain by MFA-Rand.

The symbols are explained in `fedjax_mm.theory.mfa_symbols`; all arguments broadcast.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_mm.theory.hypotheses import require
from fedjax_mm.theory.mfa import theorem_1_terms
from fedjax_mm.theory.mfa_symbols import Numbers, admissible


def rounds_to_accuracy(
    *,
    N: ArrayLike,
    M: ArrayLike,
    E: ArrayLike,
    mu: ArrayLike,
    L: ArrayLike,
    Gamma: ArrayLike,
    G: ArrayLike,
    sigma: ArrayLike,
    beta: ArrayLike,
    gamma: ArrayLike,
    D: ArrayLike,
    epsilon: ArrayLike,
    reading: Literal["sum", "max"] = "sum",
) -> Numbers:
    """T_M of Theorem 3: the round from which MFA-Rand's bound is at most epsilon.

    ``T_M = (beta^2 (B + C) / (beta mu - 1) + D (1 + gamma) - epsilon^2 gamma) / epsilon^2``,
    eq. (127), a real number, with B and C of `theorem_1`.

    Args:
      N: clients.
      M: models, 1 <= M <= N.
      E: local steps.
      mu: strong convexity.
      L: smoothness.
      Gamma: F* - mean of F_k*.
      G: bound of the gradients' norm.
      sigma: square root of the mean over clients of sigma_k^2; 0 for full gradients.
      beta: of the rate `theorem_1_rate`, > 1/mu.
      gamma: of the rate, > 4 L beta - 1.
      D: E|w_1 - w*|^2.
      epsilon: the error to reach, epsilon^2 < D.
      reading: "sum", as the proof's (125) and (127) have it, or "max", as Theorem 1's nu does:
        ``T_M = (nu - epsilon^2 gamma) / epsilon^2``.

    Returns:
      T_M, more than 1.

    Raises:
      ValueError: naming the hypothesis that does not hold, or if `reading` is unknown.

    Example:
      >>> constants = {"N": 4, "mu": 1.0, "L": 12.5, "Gamma": 0.0, "G": 1.0, "sigma": 0.0}
      >>> problem = {**constants, "beta": 2.0, "gamma": 100.0, "D": 1.0, "epsilon": 0.5}
      >>> rounds_to_accuracy(M=1, E=1, **problem).item()
      304.0
      >>> rounds_to_accuracy(M=2, E=2, **problem, reading="max").round(2).item()
      304.0

    Reference: Bhuyan, Moharir, Joshi, eqs. (124) to (127).
    """
    if reading not in ("sum", "max"):
        raise ValueError(f"reading is {reading!r}; it must be 'sum' or 'max'")
    D, epsilon, gamma = admissible("Theorem 3", D=D, epsilon=epsilon, gamma=gamma)
    noise, start = theorem_1_terms(
        N=N, M=M, E=E, mu=mu, L=L, Gamma=Gamma, G=G, sigma=sigma, beta=beta, gamma=gamma, D=D
    )
    require("Theorem 3", {"epsilon^2 < D": epsilon**2 < D}, epsilon=epsilon, D=D)
    nu = noise + start if reading == "sum" else np.maximum(noise, start)
    return (nu - epsilon**2 * gamma) / epsilon**2


def theorem_3_condition(
    *, N: ArrayLike, E: ArrayLike, L: ArrayLike, Gamma: ArrayLike, G: ArrayLike
) -> NDArray[np.bool_]:
    """Theorem 3's condition on the clients: E >= 2, or E = 1 and ``N > 1 + G^2 / (6 L Gamma)``.

    The latter is eq. (136). Theorem 3 and eq. (137) print ``N > 1 + max_m 6 L Gamma / G^2``, the
    fraction upside down: it contradicts the derivation from (135), ``6 L Gamma > G^2 / (N - 1)``.

    Args:
      N: clients.
      E: local steps.
      L: smoothness.
      Gamma: F* - mean of F_k*; never enough at 0, if E = 1.
      G: bound of the gradients' norm.

    Returns:
      Whether the condition holds.

    Raises:
      ValueError: naming the symbol that is out of its range.

    Example:
      >>> theorem_3_condition(N=[2, 3, 2], E=[1, 1, 2], L=1.0, Gamma=0.1, G=1.0).tolist()
      [False, True, True]

    Reference: Bhuyan, Moharir, Joshi, Theorem 3 and eqs. (132) to (137).
    """
    N, E, L, Gamma, G = admissible("Theorem 3", N=N, E=E, L=L, Gamma=Gamma, G=G)
    # Multiplied out, for Gamma = 0.
    enough = 6 * L * Gamma * (N - 1) > G**2
    return np.asarray((E >= 2) | ((E == 1) & enough))


def theorem_3(
    M: ArrayLike,
    *,
    N: ArrayLike,
    E: ArrayLike,
    mu: ArrayLike,
    L: ArrayLike,
    Gamma: ArrayLike,
    G: ArrayLike,
    sigma: ArrayLike,
    beta: ArrayLike,
    gamma: ArrayLike,
    D: ArrayLike,
    epsilon: ArrayLike,
    reading: Literal["sum", "max"] = "sum",
) -> Numbers:
    """Theorem 3: the gain of M models by MFA-Rand over M times FedAvg, > 1 and increasing in M.

    ``g = M T_1 / T_M``, eqs. (3) and (119), with T_M from (127), `rounds_to_accuracy`. There the
    proof replaces Theorem 1's maximum by a sum; with the maximum the gain can be below 1 and the
    theorem's claim is false, as in the example.

    Args:
      M: models, 1 <= M <= N / 2; as in the proof's derivative not only whole numbers.
      N: clients; more than 1 + G^2 / (6 L Gamma) if E = 1 (see `theorem_3_condition`).
      E: local steps.
      mu: strong convexity.
      L: smoothness.
      Gamma: F* - mean of F_k*.
      G: bound of the gradients' norm.
      sigma: square root of the mean over clients of sigma_k^2; 0 for full gradients.
      beta: of the rate `theorem_1_rate`, > 1/mu.
      gamma: of the rate, > 4 L beta - 1.
      D: E|w_1 - w*|^2.
      epsilon: the error to reach, epsilon^2 < D.
      reading: "sum" or "max", see `rounds_to_accuracy`.

    Returns:
      The gain.

    Raises:
      ValueError: naming the hypothesis that does not hold, or if `reading` is unknown.

    Example:
      >>> constants = {"N": 4, "E": 2, "mu": 1.0, "L": 12.5, "Gamma": 0.0, "G": 1.0, "sigma": 0.0}
      >>> start = {"D": 36 / 101, "epsilon": (0.999 * 36 / 101) ** 0.5}
      >>> theorem_3([1, 2], **constants, beta=2.0, gamma=100.0, **start).round(2).tolist()
      [1.0, 1.72]
      >>> theorem_3(2, **constants, beta=2.0, gamma=100.0, **start, reading="max").round(2).item()
      0.45

    Reference: Bhuyan, Moharir, Joshi, Theorem 3 and section A.4.
    """
    M, N = admissible("Theorem 3", M=M, N=N)
    require("Theorem 3", {"M <= N/2": M <= N / 2}, M=M, N=N)
    condition = theorem_3_condition(N=N, E=E, L=L, Gamma=Gamma, G=G)
    name = "E >= 2, or E = 1 and N > 1 + G^2 / (6 L Gamma)"
    require("Theorem 3", {name: condition}, E=E, N=N, L=L, Gamma=Gamma, G=G)

    def rounds(M: ArrayLike) -> Numbers:
        return rounds_to_accuracy(
            N=N,
            M=M,
            E=E,
            mu=mu,
            L=L,
            Gamma=Gamma,
            G=G,
            sigma=sigma,
            beta=beta,
            gamma=gamma,
            D=D,
            epsilon=epsilon,
            reading=reading,
        )

    return M * rounds(1) / rounds(M)
