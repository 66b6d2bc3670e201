"""Theorems 1 to 3, Corollary 1 and Remarks 1 and 2 of Bhuyan, Moharir and Joshi.

The paper is "Multi-Model Federated Learning with Provable Guarantees". Delta(t) is E|w_t - w*| for
any one of the models. Symbols are explained in `fedjax_mm.theory.problem`. All arguments broadcast.
"""

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_mm.checks.annotations import checked
from fedjax_mm.theory.mfa_lemmas import drift
from fedjax_mm.theory.problem import FloatArray, Problem, Rate, in_range, require


def theorem_1_rate(t: ArrayLike, rate: Rate) -> FloatArray:
    """Learning rate of Theorem 1, ``eta_t = beta / (t + gamma)``.

    Example:
      >>> theorem_1_rate([1, 2, 21], Rate(beta=30.0, gamma=99.0)).round(4).tolist()
      [0.3, 0.297, 0.25]

    Reference: Bhuyan et al., Theorem 1.
    """
    (t,) = in_range("Theorem 1", t=t)
    return rate.at(t)


def theorem_1(t: ArrayLike, problem: Problem, rate: Rate, D: ArrayLike) -> FloatArray:
    """Bound on MFA-Rand's error, which is O(1 / sqrt(t)).

    ``Delta(t) <= sqrt(nu) / sqrt(t + gamma)`` with
    ``nu = max{beta^2 (B + C) / (beta mu - 1), D (1 + gamma)}``,
    ``B = 6 L Gamma + (1/N^2) sum_k sigma_k^2 + 8 (E - 1)^2 G^2``,
    ``C = (M - 1) / (N - 1) E^2 G^2``; C is 0 for a single client.

    Args:
      t: the round, from 1.
      problem: the constants of the problem.
      rate: beta and gamma of the rate beta / (t + gamma).
      D: E|w_1 - w*|^2, the squared initial distance.

    Raises:
      ValueError: unless M <= N, mu <= L, beta > 1/mu and gamma > 4 L beta - 1.

    Example:
      >>> constants = {"N": 4, "E": 2, "mu": 1.0, "L": 12.5, "Gamma": 0.0, "G": 1.0, "sigma": 0.0}
      >>> problem, rate = Problem(M=[[1], [2]], **constants), Rate(beta=2.0, gamma=100.0)
      >>> theorem_1([1, 301], problem, rate, D=36 / 101).round(4).tolist()
      [[0.597, 0.2996], [0.608, 0.3051]]

    Reference: Bhuyan et al., Theorem 1, eqs. (11) to (16).
    """
    (t,) = in_range("Theorem 1", problem, rate, t=t)
    nu = np.maximum(*theorem_1_terms(problem, rate, D))
    _, gamma = rate.symbols()
    return np.sqrt(nu) / np.sqrt(t + gamma)


def theorem_1_terms(problem: Problem, rate: Rate, D: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """The noise term and the initial term of `theorem_1`, the larger of which is nu.

    They are ``beta^2 (B + C) / (beta mu - 1)`` and ``D (1 + gamma)``.

    Raises:
      ValueError: as in `theorem_1`.

    Example:
      >>> problem = Problem(N=4, M=1, E=2, mu=1.0, L=1.0, Gamma=0.5, G=1.0, sigma=2.0)
      >>> noise, start = theorem_1_terms(problem, Rate(beta=2.0, gamma=9.0), D=3.0)
      >>> noise.item(), start.item()
      (48.0, 30.0)

    Reference: Bhuyan et al., Theorem 1, eqs. (12) to (14).
    """
    return _terms(problem, rate, D)


def _terms(
    problem: Problem, rate: Rate, D: ArrayLike, real: str = ""
) -> tuple[FloatArray, FloatArray]:
    name, symbols = "Theorem 1", "N M E mu L Gamma G sigma"
    N, M, E, mu, L, Gamma, G, sigma = problem.symbols(name, symbols, real=real)
    beta, gamma = Rate.of(rate, name).symbols()
    (D,) = in_range(name, problem, rate, D=D)
    hypotheses = {
        "M <= N": M <= N,
        "mu <= L": mu <= L,
        "beta > 1/mu": beta * mu > 1,
        "gamma > 4 L beta - 1": gamma > 4 * L * beta - 1,
    }
    require(name, hypotheses, N=N, M=M, mu=mu, L=L, beta=beta, gamma=gamma)
    # sigma^2 is the mean over clients, so (1/N^2) sum_k sigma_k^2 = sigma^2 / N.
    B = 6 * L * Gamma + sigma**2 / N + 8 * (E - 1) ** 2 * G**2
    # For N = 1, C is 0, because M <= N = 1 and nothing is sampled.
    C = (M - 1) / np.where(N > 1, N - 1, 1) * E**2 * G**2
    return beta**2 * (B + C) / (beta * mu - 1), D * (1 + gamma)


def theorem_2_rate(t: ArrayLike, problem: Problem, rate: Rate) -> FloatArray:
    """Learning rate of Theorem 2, ``beta / (1 + floor((t - 1) / M) + gamma)``.

    Example:
      >>> theorem_2_rate([1, 2, 3, 4, 5], Problem(M=2), Rate(beta=6.0, gamma=1.0)).tolist()
      [3.0, 3.0, 2.0, 2.0, 1.5]

    Reference: Bhuyan et al., Theorem 2.
    """
    (M,) = problem.symbols("Theorem 2", "M")
    (t,) = in_range("Theorem 2", problem, rate, t=t)
    # The paper prints floor(t / M), which would change the rate in a frame's last round. Use its
    # proof's rate alpha_l of frame l instead.
    return rate.at(1 + np.floor((t - 1) / M))


def theorem_2(
    t: ArrayLike, problem: Problem, rate: Rate, V: ArrayLike, Delta_1: ArrayLike
) -> FloatArray:
    """Bound on MFA-RR's error, which is O(1 / t) if samples grow to all examples.

    ``Delta(t) <= phi / (t / M + gamma)`` with
    ``phi = beta E G (M - 1) / M + max{beta^2 (Y + Z + V) / (beta mu - 1), (1 + gamma) Delta(1)}``,
    ``Y = L G E^2 (M - 1) / (2 M)``, ``Z = L G E (E - 1)``. The bound is proven for the server
    scale 1/N of eq. (19), with `theorem_2_rate`. In one version of the paper the theorem misprints
    "MFA-Rand".

    The sample-size condition is a hypothesis on V, which is 0 for full gradients.
    `least_sample_size` gives N_s(t) for a given V, and the maximum of ``lemma_4(...) / eta_t`` the
    smallest V for a given N_s(t).

    Args:
      t: the round, from 1.
      problem: the constants of the problem.
      rate: beta and gamma of the rate.
      V: the remaining variance with growing samples.
      Delta_1: E|w_1 - w*|, the initial distance, not squared.

    Raises:
      ValueError: unless mu <= L, beta > 1/mu and gamma > beta L - 1.

    Example:
      >>> problem = Problem(M=[[1], [4]], E=2, mu=1.0, L=2.0, G=4.0)
      >>> rate = Rate(beta=2.0, gamma=4.0)
      >>> theorem_2([1, 25], problem, rate, V=1.0, Delta_1=5.0).round(4).tolist()
      [[13.6, 2.3448], [30.1176, 12.4878]]

    Reference: Bhuyan et al., Theorem 2, eqs. (43) and (52).
    """
    name = "Theorem 2"
    M, E, mu, L, G = problem.symbols(name, "M E mu L G")
    beta, gamma = Rate.of(rate, name).symbols()
    t, V, Delta_1 = in_range(name, problem, rate, t=t, V=V, Delta_1=Delta_1)
    hypotheses = {
        "mu <= L": mu <= L,
        "beta > 1/mu": beta * mu > 1,
        "gamma > beta L - 1": gamma > beta * L - 1,
    }
    require(name, hypotheses, mu=mu, L=L, beta=beta, gamma=gamma)
    noise = beta**2 * (drift(problem) + V) / (beta * mu - 1)
    phi = beta * E * G * (M - 1) / M + np.maximum(noise, (1 + gamma) * Delta_1)
    return phi / (t / M + gamma)


def corollary_1(t: ArrayLike, problem: Problem, rate: Rate, Delta_1: ArrayLike) -> FloatArray:
    """The bound of `theorem_2` for full gradients, where V = 0.

    Args:
      t: the round, from 1.
      problem: the constants of the problem.
      rate: beta and gamma of the rate.
      Delta_1: E|w_1 - w*|, the initial distance, not squared.

    Raises:
      ValueError: as in `theorem_2`.

    Example:
      >>> problem = Problem(M=1, E=2, mu=1.0, L=2.0, G=4.0)
      >>> corollary_1(25, problem, Rate(beta=2.0, gamma=4.0), Delta_1=5.0).round(4).item()
      2.2069

    Reference: Bhuyan et al., Corollary 1.
    """
    return theorem_2(t, problem, rate, V=0.0, Delta_1=Delta_1)


def least_sample_size(eta: ArrayLike, problem: Problem, V: ArrayLike) -> NDArray[np.int64]:
    """Smallest N_s(t) allowed by the sample-size condition of Theorem 2.

    ``(S - N_s(t)) / S <= eta_t V / (2 E sqrt(beta_1 + beta_2 G^2))``, and at least one example.

    Args:
      eta: the learning rate of the round, such as `theorem_2_rate`.
      problem: S is the largest client's number of examples, to cover all clients.
      V: the constant of the condition; 0 requires all examples.

    Raises:
      ValueError: unless S is a whole number and beta_1 + beta_2 G^2 > 0.

    Example:
      >>> eta = theorem_2_rate([1, 100, 10_000], Problem(M=1), Rate(beta=2.0, gamma=3.0))
      >>> problem = Problem(S=100, E=1, G=1.0, beta_1=0.0, beta_2=1.0)
      >>> least_sample_size(eta, problem, V=3.0).tolist()
      [25, 98, 100]

    Reference: Bhuyan et al., Theorem 2, eq. (31).
    """
    name = "The sample-size condition"
    S, E, G, beta_1, beta_2 = problem.symbols(name, "S E G beta_1 beta_2")
    eta, V = in_range(name, problem, eta=eta, V=V)
    noise = beta_1 + beta_2 * G**2
    hypotheses = {"beta_1 + beta_2 G^2 > 0": noise > 0}
    require(name, hypotheses, S=S, G=G, beta_1=beta_1, beta_2=beta_2)
    share = np.minimum(eta * V / (2 * E * np.sqrt(noise)), 1)
    # Compare the neighbors too, because the product S * share is rounded (49 * (1 / 49) < 1).
    unused = np.floor(S * share)
    unused = np.where((unused + 1) / S <= share, unused + 1, unused)
    unused = np.where(unused / S > share, unused - 1, unused)
    return np.maximum(S - unused, 1).astype(np.int64)


@checked
def rounds_to_accuracy(
    problem: Problem,
    rate: Rate,
    D: ArrayLike,
    epsilon: ArrayLike,
    reading: Literal["sum", "max"] = "sum",
) -> FloatArray:
    """T_M of Theorem 3: the round after which MFA-Rand's bound is at most epsilon.

    ``T_M = (beta^2 (B + C) / (beta mu - 1) + D (1 + gamma) - epsilon^2 gamma) / epsilon^2``, a
    real number above 1, with B and C of `theorem_1`.

    Args:
      problem: as in `theorem_1`.
      rate: as in `theorem_1`.
      D: E|w_1 - w*|^2.
      epsilon: the error to reach.
      reading: "sum", as in eqs. (125) and (127), or "max", as in nu of Theorem 1:
        ``T_M = (nu - epsilon^2 gamma) / epsilon^2``.

    Raises:
      ValueError: as in `theorem_1`, unless epsilon^2 < D, or if `reading` is unknown.

    Example:
      >>> constants = {"N": 4, "mu": 1.0, "L": 12.5, "Gamma": 0.0, "G": 1.0, "sigma": 0.0}
      >>> given = {"rate": Rate(beta=2.0, gamma=100.0), "D": 1.0, "epsilon": 0.5}
      >>> rounds_to_accuracy(Problem(M=1, E=1, **constants), **given).item()
      304.0
      >>> rounds_to_accuracy(Problem(M=2, E=2, **constants), **given, reading="max").item()
      304.0

    Reference: Bhuyan et al., Theorem 3, eqs. (124) to (127).
    """
    noise, start = _terms(problem, rate, D, real="M")
    D, epsilon = in_range("Theorem 3", problem, rate, D=D, epsilon=epsilon)
    require("Theorem 3", {"epsilon^2 < D": epsilon**2 < D}, epsilon=epsilon, D=D)
    # T_M solves sqrt(nu) / sqrt(T_M + gamma) = epsilon.
    nu = noise + start if reading == "sum" else np.maximum(noise, start)
    _, gamma = rate.symbols()
    return (nu - epsilon**2 * gamma) / epsilon**2


def theorem_3_condition(problem: Problem) -> NDArray[np.bool_]:
    """Whether E >= 2, or E = 1 and ``N > 1 + G^2 / (6 L Gamma)``.

    The latter is eq. (136). Theorem 3 and eq. (137) print ``N > 1 + max_m 6 L Gamma / G^2`` with
    the fraction inverted, which contradicts the derivation from (135),
    ``6 L Gamma > G^2 / (N - 1)``.

    Example:
      >>> problem = Problem(N=[2, 3, 2], E=[1, 1, 2], L=1.0, Gamma=0.1, G=1.0)
      >>> theorem_3_condition(problem).tolist()
      [False, True, True]

    Reference: Bhuyan et al., Theorem 3, eqs. (132) to (137).
    """
    N, E, L, Gamma, G = problem.symbols("Theorem 3", "N E L Gamma G")
    # Multiply out, because Gamma may be 0, for which no N is large enough.
    enough = 6 * L * Gamma * (N - 1) > G**2
    return np.asarray((E >= 2) | ((E == 1) & enough))


def theorem_3(
    problem: Problem,
    rate: Rate,
    D: ArrayLike,
    epsilon: ArrayLike,
    reading: Literal["sum", "max"] = "sum",
) -> FloatArray:
    """Gain of MFA-Rand with M models over M runs of FedAvg, > 1 and increasing in M.

    ``g = M T_1 / T_M`` with T_M of `rounds_to_accuracy`. M need not be whole, because the proof
    differentiates with respect to M.
    The proof replaces Theorem 1's maximum with a sum. With the maximum the gain can be below 1, and
    the theorem's claim is false, as in the example.

    Args:
      problem: as in `theorem_1`.
      rate: as in `theorem_1`.
      D: E|w_1 - w*|^2.
      epsilon: the error to reach.
      reading: "sum" or "max", see `rounds_to_accuracy`.

    Raises:
      ValueError: unless M <= N/2 and `theorem_3_condition` holds, or as in `rounds_to_accuracy`.

    Example:
      >>> constants = {"N": 4, "E": 2, "mu": 1.0, "L": 12.5, "Gamma": 0.0, "G": 1.0, "sigma": 0.0}
      >>> start = {"D": 36 / 101, "epsilon": (0.999 * 36 / 101) ** 0.5}
      >>> problem, rate = Problem(M=[1, 2], **constants), Rate(beta=2.0, gamma=100.0)
      >>> theorem_3(problem, rate, **start).round(2).tolist()
      [1.0, 1.72]
      >>> theorem_3(problem, rate, **start, reading="max").round(2).tolist()
      [1.0, 0.45]

    Reference: Bhuyan et al., Theorem 3, eqs. (3) and (119) to (127).
    """
    N, M, E, L, Gamma, G = problem.symbols("Theorem 3", "N M E L Gamma G", real="M")
    hypotheses = {
        "M <= N/2": M <= N / 2,
        "E >= 2, or E = 1 and N > 1 + G^2 / (6 L Gamma)": theorem_3_condition(problem),
    }
    require("Theorem 3", hypotheses, N=N, M=M, E=E, L=L, Gamma=Gamma, G=G)
    # FedAvg is MFA-Rand with one model, so M sequential trainings take M T_1 rounds.
    alone = dataclasses.replace(problem, M=1)
    T_1, T_M = (
        rounds_to_accuracy(models, rate, D, epsilon, reading) for models in (alone, problem)
    )
    return M * T_1 / T_M


def remark_1(M: ArrayLike) -> FloatArray:
    """Probability ``(1 - 1/M)^M`` that MFA-Rand skips a pair for M rounds.

    Under MFA-RR every client trains every model exactly once in a frame of M rounds. Under
    MFA-Rand, this is the probability that a given client does not train a given model in M
    consecutive rounds. It increases to 1/e.

    Example:
      >>> remark_1([1, 2, 3]).round(4).tolist()
      [0.0, 0.25, 0.2963]

    Reference: Bhuyan et al., Remark 1.
    """
    (M,) = in_range("Remark 1", M=M)
    return (1 - 1 / M) ** M


def remark_2(T: ArrayLike, mu: ArrayLike, constant: ArrayLike) -> FloatArray:
    """Bound on FedCluster's mean error, which is O(T^(-1/4)).

    The hypothesis ``(1/T) sum_j E|grad F(w_{jM})|^2 <= c / sqrt(T)`` implies
    ``(1/T) sum_j E|w_{jM} - w*| <= sqrt(c) / (mu T^(1/4))``, by ``mu |w - w*| <= |grad F(w)|`` and
    Cauchy-Schwarz. The paper leaves c in the O-notation.

    Args:
      T: the number of learning rounds.
      mu: the strong convexity constant.
      constant: c of FedCluster's bound on gradients.

    Example:
      >>> remark_2([1, 16, 256], mu=0.5, constant=4.0).tolist()
      [4.0, 2.0, 1.0]

    Reference: Bhuyan et al., Remark 2; Chen et al. (2020), FedCluster.
    """
    T, mu, constant = in_range("Remark 2", T=T, mu=mu, constant=constant)
    return np.sqrt(constant) / (mu * T**0.25)
