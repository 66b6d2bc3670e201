"""Theorems 1 and 2 of Bhuyan, Moharir and Joshi, with their rates, Corollary 1, Remarks 1 and 2.

"Multi-Model Federated Learning with Provable Guarantees". Delta(t) = E|w_t - w*| of one of the
models. The symbols are explained in `fedjax_mm.theory.mfa_symbols`; all arguments broadcast.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_mm.theory.hypotheses import require
from fedjax_mm.theory.mfa_lemmas import drift
from fedjax_mm.theory.mfa_symbols import Numbers, admissible


def theorem_1_rate(t: ArrayLike, *, beta: ArrayLike, gamma: ArrayLike) -> Numbers:
    """The learning rate of Theorem 1, ``eta_t = beta / (t + gamma)``.

    Args:
      t: rounds, from 1.
      beta: numerator.
      gamma: offset.

    Returns:
      eta_t.

    Raises:
      ValueError: naming the symbol that is out of its range.

    Example:
      >>> theorem_1_rate([1, 2, 21], beta=30.0, gamma=99.0).round(4).tolist()
      [0.3, 0.297, 0.25]

    Reference: Bhuyan, Moharir, Joshi, Theorem 1.
    """
    t, beta, gamma = admissible("Theorem 1", t=t, beta=beta, gamma=gamma)
    return beta / (t + gamma)


def theorem_1(
    t: ArrayLike,
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
) -> Numbers:
    """Theorem 1: MFA-Rand's error is at most of the order 1 / sqrt(t).

    ``Delta(t) <= sqrt(nu) / sqrt(t + gamma)`` with
    ``nu = max{beta^2 (B + C) / (beta mu - 1), D (1 + gamma)}``,
    ``B = 6 L Gamma + (1/N^2) sum_k sigma_k^2 + 8 (E - 1)^2 G^2``,
    ``C = (M - 1) / (N - 1) E^2 G^2``, eqs. (11) to (16); C is 0 for a single client.

    Args:
      t: rounds, from 1; w_1 is the start, so that the model after round t has t + 1.
      N: clients.
      M: models, 1 <= M <= N.
      E: local steps.
      mu: strong convexity.
      L: smoothness.
      Gamma: F* - mean of F_k*.
      G: bound of the gradients' norm.
      sigma: square root of the mean over clients of sigma_k^2; as printed it is the bound
        2 sqrt(beta_1 + beta_2 G^2) for samples of any size, and 0 for full gradients.
      beta: of the rate `theorem_1_rate`, > 1/mu.
      gamma: of the rate, > 4 L beta - 1.
      D: E|w_1 - w*|^2.

    Returns:
      The bound of Delta(t).

    Raises:
      ValueError: naming the hypothesis that does not hold.

    Example:
      >>> constants = {"N": 4, "mu": 1.0, "L": 12.5, "Gamma": 0.0, "G": 1.0, "sigma": 0.0}
      >>> rate = {"beta": 2.0, "gamma": 100.0}
      >>> theorem_1([1, 301], M=[[1], [2]], E=2, **constants, **rate, D=36 / 101).round(4).tolist()
      [[0.597, 0.2996], [0.608, 0.3051]]

    Reference: Bhuyan, Moharir, Joshi, Theorem 1.
    """
    t, gamma = admissible("Theorem 1", t=t, gamma=gamma)
    noise, start = theorem_1_terms(
        N=N, M=M, E=E, mu=mu, L=L, Gamma=Gamma, G=G, sigma=sigma, beta=beta, gamma=gamma, D=D
    )
    nu = np.maximum(noise, start)
    return np.sqrt(nu) / np.sqrt(t + gamma)


def theorem_1_terms(
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
) -> tuple[Numbers, Numbers]:
    """The two terms of Theorem 1's nu: ``beta^2 (B + C) / (beta mu - 1)`` and ``D (1 + gamma)``.

    Args:
      N: clients.
      M: models, 1 <= M <= N.
      E: local steps.
      mu: strong convexity.
      L: smoothness.
      Gamma: F* - mean of F_k*.
      G: bound of the gradients' norm.
      sigma: square root of the mean over clients of sigma_k^2.
      beta: of the rate, > 1/mu.
      gamma: of the rate, > 4 L beta - 1.
      D: E|w_1 - w*|^2.

    Returns:
      The noise's term and the start's; nu is the larger one.

    Raises:
      ValueError: naming the hypothesis that does not hold.

    Example:
      >>> constants = {"mu": 1.0, "L": 1.0, "Gamma": 0.5, "G": 1.0, "sigma": 2.0}
      >>> noise, start = theorem_1_terms(N=4, M=1, E=2, **constants, beta=2.0, gamma=9.0, D=3.0)
      >>> noise.item(), start.item()
      (48.0, 30.0)

    Reference: Bhuyan, Moharir, Joshi, eqs. (12) to (14).
    """
    N, M, E, mu, L = admissible("Theorem 1", N=N, M=M, E=E, mu=mu, L=L)
    Gamma, G, sigma, D = admissible("Theorem 1", Gamma=Gamma, G=G, sigma=sigma, D=D)
    beta, gamma = admissible("Theorem 1", beta=beta, gamma=gamma)
    require("Theorem 1", {"M <= N": M <= N}, M=M, N=N)
    require("Theorem 1", {"mu <= L": mu <= L}, mu=mu, L=L)
    require("Theorem 1", {"beta > 1/mu": beta * mu > 1}, beta=beta, mu=mu)
    slow = gamma > 4 * L * beta - 1
    require("Theorem 1", {"gamma > 4 L beta - 1": slow}, gamma=gamma, L=L, beta=beta)
    B = 6 * L * Gamma + sigma**2 / N + 8 * (E - 1) ** 2 * G**2
    # M <= N: a single client trains a single model, and nothing is sampled.
    C = (M - 1) / np.where(N > 1, N - 1, 1) * E**2 * G**2
    return beta**2 * (B + C) / (beta * mu - 1), D * (1 + gamma)


def theorem_2_rate(t: ArrayLike, *, M: ArrayLike, beta: ArrayLike, gamma: ArrayLike) -> Numbers:
    """The learning rate of Theorem 2, ``eta_t = beta / (1 + floor((t - 1) / M) + gamma)``.

    It is alpha_l of the frame l = 1 + floor((t - 1) / M). The paper prints floor(t / M), which
    would change the rate in a frame's last round; its proof uses alpha_l.

    Args:
      t: rounds, from 1.
      M: models, and rounds of a frame.
      beta: numerator.
      gamma: offset.

    Returns:
      eta_t.

    Raises:
      ValueError: naming the symbol that is out of its range.

    Example:
      >>> theorem_2_rate([1, 2, 3, 4, 5], M=2, beta=6.0, gamma=1.0).tolist()
      [3.0, 3.0, 2.0, 2.0, 1.5]

    Reference: Bhuyan, Moharir, Joshi, Theorem 2.
    """
    t, M, beta, gamma = admissible("Theorem 2", t=t, M=M, beta=beta, gamma=gamma)
    return beta / (1 + np.floor((t - 1) / M) + gamma)


def theorem_2(
    t: ArrayLike,
    *,
    M: ArrayLike,
    E: ArrayLike,
    mu: ArrayLike,
    L: ArrayLike,
    G: ArrayLike,
    V: ArrayLike,
    beta: ArrayLike,
    gamma: ArrayLike,
    Delta_1: ArrayLike,
) -> Numbers:
    """Theorem 2: MFA-RR's error is at most of the order 1 / t if samples grow to all examples.

    ``Delta(t) <= phi / (t / M + gamma)`` with
    ``phi = beta E G (M - 1) / M + max{beta^2 (Y + Z + V) / (beta mu - 1), (1 + gamma) Delta(1)}``,
    ``Y = L G E^2 (M - 1) / (2 M)``, ``Z = L G E (E - 1)``, eqs. (43) and (52). It is proven for
    the server scale 1/N of eq. (19). One copy of the paper misprints "MFA-Rand" in it.

    The sample-size condition is a hypothesis on V: `least_sample_size` gives the N_s(t) of a V,
    and the largest ``lemma_4(...) / eta_t`` the least V of a given N_s(t).

    Args:
      t: rounds, from 1; w_1 is the start, so that the model after round t has t + 1.
      M: models, and rounds of a frame.
      E: local steps.
      mu: strong convexity.
      L: smoothness.
      G: bound of the gradients' norm.
      V: of the sample-size condition; 0 for full gradients.
      beta: of the rate `theorem_2_rate`, > 1/mu.
      gamma: of the rate, > beta L - 1.
      Delta_1: Delta(1) = E|w_1 - w*|.

    Returns:
      The bound of Delta(t).

    Raises:
      ValueError: naming the hypothesis that does not hold.

    Example:
      >>> constants = {"E": 2, "mu": 1.0, "L": 2.0, "G": 4.0, "V": 1.0}
      >>> rate = {"beta": 2.0, "gamma": 4.0}
      >>> theorem_2([1, 25], M=[[1], [4]], **constants, **rate, Delta_1=5.0).round(4).tolist()
      [[13.6, 2.3448], [30.1176, 12.4878]]

    Reference: Bhuyan, Moharir, Joshi, Theorem 2.
    """
    t, M, E, mu, L = admissible("Theorem 2", t=t, M=M, E=E, mu=mu, L=L)
    G, V, beta, gamma = admissible("Theorem 2", G=G, V=V, beta=beta, gamma=gamma)
    (Delta_1,) = admissible("Theorem 2", Delta_1=Delta_1)
    require("Theorem 2", {"mu <= L": mu <= L}, mu=mu, L=L)
    require("Theorem 2", {"beta > 1/mu": beta * mu > 1}, beta=beta, mu=mu)
    slow = gamma > beta * L - 1
    require("Theorem 2", {"gamma > beta L - 1": slow}, gamma=gamma, beta=beta, L=L)
    noise = beta**2 * (drift("Theorem 2", M=M, E=E, L=L, G=G) + V) / (beta * mu - 1)
    phi = beta * E * G * (M - 1) / M + np.maximum(noise, (1 + gamma) * Delta_1)
    return phi / (t / M + gamma)


def corollary_1(
    t: ArrayLike,
    *,
    M: ArrayLike,
    E: ArrayLike,
    mu: ArrayLike,
    L: ArrayLike,
    G: ArrayLike,
    beta: ArrayLike,
    gamma: ArrayLike,
    Delta_1: ArrayLike,
) -> Numbers:
    """Corollary 1: Theorem 2 for full gradients, where V = 0.

    ``Delta(t) <= phi' / (t / M + gamma)`` with
    ``phi' = beta E G (M - 1) / M + max{beta^2 (Y + Z) / (beta mu - 1), (1 + gamma) Delta(1)}``.

    Args:
      t: rounds, from 1; w_1 is the start, so that the model after round t has t + 1.
      M: models, and rounds of a frame.
      E: local steps.
      mu: strong convexity.
      L: smoothness.
      G: bound of the gradients' norm.
      beta: of the rate `theorem_2_rate`, > 1/mu.
      gamma: of the rate, > beta L - 1.
      Delta_1: Delta(1) = E|w_1 - w*|.

    Returns:
      The bound of Delta(t).

    Raises:
      ValueError: naming the hypothesis that does not hold.

    Example:
      >>> constants = {"mu": 1.0, "L": 2.0, "G": 4.0}
      >>> corollary_1(25, M=1, E=2, **constants, beta=2.0, gamma=4.0, Delta_1=5.0).round(4).item()
      2.2069

    Reference: Bhuyan, Moharir, Joshi, Corollary 1.
    """
    return theorem_2(t, M=M, E=E, mu=mu, L=L, G=G, V=0.0, beta=beta, gamma=gamma, Delta_1=Delta_1)


def least_sample_size(
    eta: ArrayLike,
    *,
    S: ArrayLike,
    E: ArrayLike,
    G: ArrayLike,
    V: ArrayLike,
    beta_1: ArrayLike,
    beta_2: ArrayLike,
) -> NDArray[np.int64]:
    """The least N_s(t) that the sample-size condition of Theorem 2 admits, and at least one.

    ``(S - N_s(t)) / S <= eta_t V / (2 E sqrt(beta_1 + beta_2 G^2))``, eq. (31).

    Args:
      eta: rate of the round, as from `theorem_2_rate`.
      S: examples of a client, a whole number; for all clients at once the largest one's.
      E: local steps.
      G: bound of the gradients' norm.
      V: constant of the condition; 0 asks for all examples.
      beta_1: of Assumption 4.
      beta_2: of Assumption 4.

    Returns:
      N_s(t), whole numbers from 1 to S.

    Raises:
      ValueError: naming the hypothesis that does not hold.

    Example:
      >>> eta = theorem_2_rate([1, 100, 10_000], M=1, beta=2.0, gamma=3.0)
      >>> least_sample_size(eta, S=100, E=1, G=1.0, V=3.0, beta_1=0.0, beta_2=1.0).tolist()
      [25, 98, 100]

    Reference: Bhuyan, Moharir, Joshi, Theorem 2 and eq. (31).
    """
    statement = "The sample-size condition"
    eta, S, E, G = admissible(statement, eta=eta, S=S, E=E, G=G)
    V, beta_1, beta_2 = admissible(statement, V=V, beta_1=beta_1, beta_2=beta_2)
    require(statement, {"S = 1, 2, ...": np.floor(S) == S}, S=S)
    noise = beta_1 + beta_2 * G**2
    require(statement, {"beta_1 + beta_2 G^2 > 0": noise > 0}, beta_1=beta_1, beta_2=beta_2, G=G)
    share = np.minimum(eta * V / (2 * E * np.sqrt(noise)), 1)
    # S * share is rounded: 49 * (1 / 49) < 1.
    unused = np.floor(S * share)
    unused = np.where((unused + 1) / S <= share, unused + 1, unused)
    unused = np.where(unused / S > share, unused - 1, unused)
    return np.maximum(S - unused, 1).astype(np.int64)


def remark_1(M: ArrayLike) -> Numbers:
    """Remark 1: the probability ``(1 - 1/M)^M`` that MFA-Rand leaves a pair out of M rounds.

    Under MFA-RR every client trains every model exactly once in a frame of M rounds; under
    MFA-Rand a given client does not train a given model in M consecutive rounds with this
    probability, which increases to 1/e.

    Args:
      M: models.

    Returns:
      The probability.

    Raises:
      ValueError: if M < 1.

    Example:
      >>> remark_1([1, 2, 3]).round(4).tolist()
      [0.0, 0.25, 0.2963]

    Reference: Bhuyan, Moharir, Joshi, Remark 1.
    """
    (M,) = admissible("Remark 1", M=M)
    return (1 - 1 / M) ** M


def remark_2(T: ArrayLike, *, mu: ArrayLike, constant: ArrayLike) -> Numbers:
    """Remark 2: FedCluster's mean error under strong convexity is of the order T^(-1/4).

    From ``(1/T) sum_j E|grad F(w_{jM})|^2 <= c / sqrt(T)`` follows
    ``(1/T) sum_j E|w_{jM} - w*| <= sqrt(c) / (mu T^(1/4))``, by ``mu |w - w*| <= |grad F(w)|`` and
    Cauchy-Schwarz. The paper leaves c in the O-notation.

    Args:
      T: learning rounds.
      mu: strong convexity.
      constant: c, of FedCluster's bound for the gradients.

    Returns:
      The bound of the mean error.

    Raises:
      ValueError: naming the symbol that is out of its range.

    Example:
      >>> remark_2([1, 16, 256], mu=0.5, constant=4.0).tolist()
      [4.0, 2.0, 1.0]

    Reference: Bhuyan, Moharir, Joshi, Remark 2; Chen et al. (2020), FedCluster.
    """
    T, mu, constant = admissible("Remark 2", T=T, mu=mu, constant=constant)
    return np.sqrt(constant) / (mu * T**0.25)
