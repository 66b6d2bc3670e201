"""Lemmas 1 to 4 of Bhuyan, Moharir and Joshi, and the recursion (32) that combines them.

They bound MFA-RR over frame l with the learning rate eta = alpha_l, for the server scale 1/N of
eq. (19).
Symbols are explained in `fedjax_mm.theory.problem`. All arguments broadcast.
"""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_mm.theory.problem import FloatArray, Problem, Rate, in_range, require


def lemma_1(N_s: ArrayLike, problem: Problem) -> FloatArray:
    """Bounds the variance of a gradient over N_s of a client's S examples.

    ``var(grad F_k) <= 4 ((S - N_s) / S)^2 (beta_1 + beta_2 G^2)`` for examples drawn without
    replacement. At N_s = 0 it is the sigma_k^2 of Theorem 1, a bound for samples of any size.

    Raises:
      ValueError: unless N_s <= S.

    Example:
      >>> lemma_1([0, 50, 100], Problem(S=100, G=2.0, beta_1=1.0, beta_2=1.0)).tolist()
      [20.0, 5.0, 0.0]

    Reference: Bhuyan et al., Lemma 1, eq. (63).
    """
    G, beta_1, beta_2 = problem.symbols("Lemma 1", "G beta_1 beta_2")
    return 4 * _unused_share("Lemma 1", N_s, problem) ** 2 * (beta_1 + beta_2 * G**2)


def lemma_2(Delta: ArrayLike, problem: Problem, eta: ArrayLike) -> FloatArray:
    """Bounds the distance to the optimum after E steps of centralized descent.

    ``|u_{E+1} - w*| <= (1 - eta mu)^E |w_1^l - w*|``, where Delta is the distance at the start of
    the frame.

    Raises:
      ValueError: unless mu <= L and eta <= 1/L.

    Example:
      >>> lemma_2(8.0, Problem(E=[1, 2, 3], mu=1.0, L=2.0), eta=0.5).tolist()
      [4.0, 2.0, 1.0]

    Reference: Bhuyan et al., Lemma 2, eq. (84).
    """
    E, mu = problem.symbols("Lemma 2", "E mu")
    Delta, eta = in_range("Lemma 2", problem, Delta=Delta, eta=eta)
    _require_small_steps("Lemma 2", problem, eta)
    return (1 - eta * mu) ** E * Delta


def lemma_3(eta: ArrayLike, problem: Problem) -> FloatArray:
    """Bounds the distance between a frame's local and centralized gradients.

    ``E|e^l| <= eta L G (E^2 (M - 1) / (2 M) + E (E - 1))`` with e^l of eq. (24).

    Example:
      >>> lemma_3(0.1, Problem(M=[1, 2, 4], E=2, L=1.0, G=10.0)).tolist()
      [2.0, 3.0, 3.5]

    Reference: Bhuyan et al., Lemma 3, eq. (112).
    """
    (eta,) = in_range("Lemma 3", problem, eta=eta)
    return eta * drift(problem)


def lemma_4(N_s: ArrayLike, problem: Problem) -> FloatArray:
    """Bounds the noise that samples of N_s examples add to a frame's gradients.

    ``E|d^l| <= 2 E ((S - N_s) / S) sqrt(beta_1 + beta_2 G^2)`` with d^l of eq. (27). The
    sample-size condition of Theorem 2 is that this is at most eta V. For a given schedule N_s(t),
    the smallest V is the maximum of ``lemma_4(...) / eta_t``.

    Raises:
      ValueError: unless N_s <= S.

    Example:
      >>> lemma_4([50, 100], Problem(S=100, E=3, G=2.0, beta_1=0.0, beta_2=1.0)).tolist()
      [6.0, 0.0]

    Reference: Bhuyan et al., Lemma 4, eq. (118).
    """
    E, G, beta_1, beta_2 = problem.symbols("Lemma 4", "E G beta_1 beta_2")
    return 2 * E * _unused_share("Lemma 4", N_s, problem) * np.sqrt(beta_1 + beta_2 * G**2)


def drift(problem: Problem) -> FloatArray:
    """``Y + Z = L G E^2 (M - 1) / (2 M) + L G E (E - 1)`` of Theorem 2 and Lemma 3.

    Example:
      >>> drift(Problem(M=[1, 2], E=2, L=1.0, G=1.0)).tolist()
      [2.0, 3.0]

    Reference: Bhuyan et al., Theorem 2, below eq. (32).
    """
    M, E, L, G = problem.symbols("Lemma 3", "M E L G")
    # Y arises because the groups of a frame train sequentially, on models that other groups have
    # changed, and Z because local steps deviate from the centralized path.
    Y = L * G * E**2 * (M - 1) / (2 * M)
    Z = L * G * E * (E - 1)
    return Y + Z


def recursion(Delta: ArrayLike, problem: Problem, eta: ArrayLike, V: ArrayLike) -> FloatArray:
    """Bounds the error after a frame, by Lemmas 2 to 4 and the sample-size condition.

    ``E|w_1^{l+1} - w*| <= (1 - eta mu) E|w_1^l - w*| + eta^2 (Y + Z + V)``, where Delta is the mean
    distance at the start of the frame, and V is 0 for full gradients.

    Raises:
      ValueError: unless mu <= L and eta <= 1/L.

    Example:
      >>> recursion(8.0, Problem(M=[1, 2], E=2, mu=1.0, L=1.0, G=1.0), eta=0.5, V=1.0).tolist()
      [4.75, 5.0]

    Reference: Bhuyan et al., eq. (32).
    """
    name = "The recursion (32)"
    (mu,) = problem.symbols(name, "mu")
    Delta, eta, V = in_range(name, problem, Delta=Delta, eta=eta, V=V)
    _require_small_steps(name, problem, eta)
    return (1 - eta * mu) * Delta + eta**2 * (drift(problem) + V)


def iterated_recursion(
    num_frames: int, problem: Problem, rate: Rate, V: ArrayLike, Delta_1: ArrayLike
) -> FloatArray:
    """Bounds the error at the start of every frame more tightly than Theorem 2.

    They are iterates of the recursion (32) with alpha_l = beta / (l + gamma), from Delta_1 on.

    Returns:
      ``[..., num_frames]``: bounds on E|w_1^l - w*|, the first of which is Delta_1.

    Raises:
      ValueError: unless mu <= L and beta / (1 + gamma) <= 1/L.

    Example:
      >>> problem = Problem(M=2, E=1, mu=1.0, L=1.0, G=4.0)
      >>> rate = Rate(beta=2.0, gamma=1.0)
      >>> iterated_recursion(3, problem, rate, V=0.0, Delta_1=5.0).round(4).tolist()
      [5.0, 1.0, 0.7778]

    Reference: Bhuyan et al., eq. (32).
    """
    name = "The recursion (32)"
    _, V, Delta_1 = in_range(name, problem, num_frames=num_frames, V=V, Delta_1=Delta_1)
    symbols = (*problem.symbols(name, "M E mu L G"), *rate.symbols(), V, Delta_1)
    # Broadcast the initial bound to the shape of the following frames.
    errors = [np.broadcast_to(Delta_1, np.broadcast(*symbols).shape)]
    for frame in range(1, num_frames):
        errors.append(recursion(errors[-1], problem, rate.at(frame), V))
    return np.stack(errors, axis=-1)


def _unused_share(statement: str, N_s: ArrayLike, problem: Problem) -> FloatArray:
    (S,) = problem.symbols(statement, "S")
    (N_s,) = in_range(statement, problem, N_s=N_s)
    require(statement, {"N_s <= S": N_s <= S}, N_s=N_s, S=S)
    return (S - N_s) / S


def _require_small_steps(statement: str, problem: Problem, eta: FloatArray) -> None:
    mu, L = problem.symbols(statement, "mu L")
    hypotheses = {"mu <= L": mu <= L, "eta <= 1/L": eta <= 1 / L}
    require(statement, hypotheses, mu=mu, L=L, eta=eta)
