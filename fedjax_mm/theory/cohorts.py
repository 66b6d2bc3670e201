"""Bounds of Pawlik, "Federated Learning with Client Batching and Heterogeneous Data" (2020).

Sections 4.3 and 4.5 treat model averaging with all clients, like Theorem 1 and Corollary 1 of Yu,
Yang and Zhu (2018). Section 5 treats cohorts. The learning rate is ``gamma``, and other symbols are
explained in `fedjax_mm.theory.problem`. All arguments broadcast.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from fedjax_mm.theory.problem import FloatArray, Problem, in_range, require

# Tolerance for the usual choice gamma = 1/(L E), whose product may round to more than 1.
_ROUND_OFF = 1e-12


def theorem_1(T: ArrayLike, problem: Problem, gamma: ArrayLike) -> FloatArray:
    """Bounds the mean squared gradient norm of model averaging.

    ``2 gap / (gamma T) + 4 gamma^2 E^2 G^2 L^2 + L gamma sigma^2 / N`` bounds the mean over the T
    local iterations (not rounds) of ``E|grad f|^2`` at the clients' mean model.

    Raises:
      ValueError: unless gamma <= 1/L.

    Example:
      >>> problem = Problem(N=10, E=5, L=2, G=1, sigma=1, gap=1)
      >>> theorem_1([100, 10_000], problem, gamma=0.01).round(4).tolist()
      [2.042, 0.062]

    Reference: Pawlik, Theorem 1 (section 4.3), eqs. (14) to (21).
    """
    N, E, L, G, sigma, gap = problem.symbols("Theorem 1", "N E L G sigma gap")
    T, gamma = in_range("Theorem 1", problem, T=T, gamma=gamma)
    require("Theorem 1", {"gamma <= 1/L": gamma <= 1 / L}, gamma=gamma, L=L)
    return 2 / (gamma * T) * gap + 4 * gamma**2 * E**2 * G**2 * L**2 + L / N * gamma * sigma**2


def corollary_part_1(T: ArrayLike, problem: Problem) -> FloatArray:
    """The bound of `theorem_1` at ``gamma = sqrt(N) / (L sqrt(T))``.

    ``2 L gap / sqrt(N T) + 4 N E^2 G^2 / T + sigma^2 / sqrt(N T)``

    Raises:
      ValueError: unless T >= N.

    Example:
      >>> problem = Problem(N=4, E=5, L=2, G=1, sigma=1, gap=1)
      >>> corollary_part_1([100, 10_000], problem).tolist()
      [4.25, 0.065]

    Reference: Pawlik, Corollary, part 1 (section 4.5).
    """
    name = "Corollary, part 1,"
    N, E, L, G, sigma, gap = problem.symbols(name, "N E L G sigma gap")
    (T,) = in_range(name, problem, T=T)
    require(name, {"T >= N": T >= N}, T=T, N=N)
    root = np.sqrt(N * T)
    return 2 * L / root * gap + 4 * N / T * E**2 * G**2 + sigma**2 / root


def corollary_part_2(T: ArrayLike, problem: Problem) -> FloatArray:
    """The bound of part 1 for ``E <= T^(1/4) / N^(3/4)``, which is O(1 / sqrt(N T)).

    ``(2 L gap + 4 G^2 + sigma^2) / sqrt(N T)``, broadcast to a common shape with E.

    Raises:
      ValueError: unless T >= N and E <= T^(1/4) / N^(3/4).

    Example:
      >>> problem = Problem(N=4, E=[3, 11], L=2, G=1, sigma=1, gap=1)
      >>> corollary_part_2([1e4, 1e6], problem).round(6).tolist()
      [0.045, 0.0045]

    Reference: Pawlik, Corollary, part 2 (section 4.5).
    """
    name = "Corollary, part 2,"
    N, E, L, G, sigma, gap = problem.symbols(name, "N E L G sigma gap")
    (T,) = in_range(name, problem, T=T)
    # Raise both sides to the fourth power, so that integers are compared exactly.
    small = {"E <= T^(1/4) / N^(3/4)": E**4 * N**3 <= T}
    require(name, {"T >= N": T >= N, **small}, T=T, N=N, E=E)
    root = np.sqrt(N * T)
    bound = 2 * L / root * gap + 4 / root * G**2 + sigma**2 / root
    # Broadcast with E, because E occurs only in the hypothesis and a grid over E would lose its
    # axis.
    return np.broadcast_arrays(bound, E)[0]


def squared_step_25(updates: ArrayLike, C: ArrayLike, gamma: ArrayLike) -> FloatArray:
    """Mean squared step of a round with cohorts, ``E|x^(s) - x^(s-1)|^2``.

    ``gamma^2 / (N-1) (1/C - 1/N) (sum_i |G_i|^2 - N |G_bar|^2) + gamma^2 |G_bar|^2``

    Args:
      updates: ``[..., clients, d]``, each client's ``G_i``, the sum of its gradients in the round.
        Leading axes, such as earlier cohorts, are kept; average over them for the outer
        expectation.
      C: the number of clients in a cohort, drawn uniformly without replacement.
      gamma: the learning rate.

    Raises:
      ValueError: unless N >= 2 and 1 <= C <= N.

    Example:
      >>> squared_step_25([[1.0], [3.0]], [1, 2], 0.1).round(4).tolist()
      [0.05, 0.04]

    Reference: Pawlik, eq. (25) (section 5.3).
    """
    excess = _excess("Equation (25)", _spread_by_norms, updates, C, gamma)
    return excess + np.square(gamma) * _squared_mean(np.asarray(updates, np.float64))


def squared_step_26(updates: ArrayLike, C: ArrayLike, gamma: ArrayLike) -> FloatArray:
    """Computes `squared_step_25` from products of updates.

    ``gamma^2 / (N-1) (1/C - 1/N) (N (N-1) |G_bar|^2 - sum_{i != j} G_i . G_j) + gamma^2 |G_bar|^2``

    Args:
      updates: as for `squared_step_25`.
      C: as for `squared_step_25`.
      gamma: the learning rate.

    Raises:
      ValueError: as in `squared_step_25`.

    Example:
      >>> squared_step_26([[1.0], [3.0]], [1, 2], 0.1).round(4).tolist()
      [0.05, 0.04]

    Reference: Pawlik, eq. (26) (section 5.3).
    """
    excess = _excess("Equation (26)", _spread_by_products, updates, C, gamma)
    return excess + np.square(gamma) * _squared_mean(np.asarray(updates, np.float64))


def excess_noise_27(updates: ArrayLike, C: ArrayLike, gamma: ArrayLike, L: ArrayLike) -> FloatArray:
    """Excess noise in a round's loss bound from sampling C of N clients.

    ``L/2 gamma^2 / (N-1) (1/C - 1/N) (sum_i |G_i|^2 - N |G_bar|^2)``

    That is ``L/2 gamma^2`` times the variance of the cohort's mean update. It is zero for C = N and
    for equal updates. For nearly equal updates the rounding error is about ``1e-16 sum |G_i|^2``.

    Args:
      updates: as for `squared_step_25`.
      C: as for `squared_step_25`.
      gamma: the learning rate.
      L: the smoothness of the loss.

    Raises:
      ValueError: as in `squared_step_25`.

    Example:
      >>> excess_noise_27([[1.0], [3.0]], [1, 2], 0.1, 4).round(4).tolist()
      [0.02, 0.0]

    Reference: Pawlik, eq. (27) (section 5.4).
    """
    (L,) = in_range("Equation (27)", L=L)
    return L / 2 * _excess("Equation (27)", _spread_by_norms, updates, C, gamma)


def excess_noise_28(updates: ArrayLike, C: ArrayLike, gamma: ArrayLike, L: ArrayLike) -> FloatArray:
    """Computes `excess_noise_27` from products of updates.

    ``L/2 gamma^2 / (N-1) (1/C - 1/N) (N (N-1) |G_bar|^2 - sum_{i != j} G_i . G_j)``

    The paper concludes that parallel updates suffice for zero noise, but the updates must be equal.
    Updates 1 and 3 of the example are parallel, but their noise with C = 1 is not zero.

    Args:
      updates: as for `squared_step_25`.
      C: as for `squared_step_25`.
      gamma: the learning rate.
      L: the smoothness of the loss.

    Raises:
      ValueError: as in `squared_step_25`.

    Example:
      >>> excess_noise_28([[1.0], [3.0]], [1, 2], 0.1, 4).round(4).tolist()
      [0.02, 0.0]

    Reference: Pawlik, eq. (28) (section 5.4).
    """
    (L,) = in_range("Equation (28)", L=L)
    return L / 2 * _excess("Equation (28)", _spread_by_products, updates, C, gamma)


def cohort_bound(R: ArrayLike, problem: Problem, gamma: ArrayLike) -> FloatArray:
    """Bounds the mean squared gradient norm of training with cohorts.

    This bound is not in the paper.

    ``2 gap / (gamma E R) + gamma^2 L^2 G^2 (E-1)(2E-1) / 6
    + gamma L E Z^2 N/(N-1) (1/C - 1/N)`` bounds the mean over the R rounds of ``E|grad f|^2`` at
    the global model before each round, for clients that take E full gradients each.

    It completes the proof that section 5 of the paper leaves open, using the descent lemma for a
    round's step, the bound ``gamma t G`` on how far t local steps move a model, and eq. (27) with
    ``sum_i |G_i|^2 - N |G_bar|^2 <= N E^2 Z^2``.

    Raises:
      ValueError: unless C <= N and gamma <= 1/(L E).

    Example:
      >>> problem = Problem(N=10, C=[1, 5, 10], E=5, L=2, G=1, Z=1, gap=1)
      >>> cohort_bound(100, problem, gamma=0.1).round(4).tolist()
      [1.28, 0.3911, 0.28]

    Reference: Pawlik, sections 5.3 and 5.4, completed from eq. (27).
    """
    name = "The bound for cohorts"
    N, C, E, L, G, Z, gap = problem.symbols(name, "N C E L G Z gap", real="C")
    R, gamma = in_range(name, problem, R=R, gamma=gamma)
    hypotheses = {"C <= N": C <= N, "gamma <= 1/(L E)": gamma * L * E <= 1 + _ROUND_OFF}
    require(name, hypotheses, C=C, N=N, gamma=gamma, L=L, E=E)
    drift = gamma**2 * L**2 * G**2 * (E - 1) * (2 * E - 1) / 6
    # Take the maximum, because with a single client the noise is 0 rather than 0/0.
    noise = gamma * L * E * Z**2 * N / np.maximum(N - 1, 1) * (1 / C - 1 / N)
    return 2 * gap / (gamma * E * R) + drift + noise


def optimal_cohort_size(cost: ArrayLike, problem: Problem, gamma: ArrayLike) -> FloatArray:
    """Cohort size that minimizes `cohort_bound` at constant cost R C.

    This result is not in the paper. With ``a = 2 gap / (gamma E cost)`` and ``b = gamma L E Z^2``
    the bound is ``a C + b N/(N-1) (1/C - 1/N)`` plus terms that do not depend on C. Its minimizer
    is ``C* = sqrt(b N / (a (N-1)))``, because larger cohorts leave fewer rounds, and smaller ones
    are noisier.

    Args:
      cost: the total number of local trainings, R C.
      problem: uses N, E, L, Z and gap.
      gamma: the learning rate.

    Returns:
      C*, clipped to [1, N] but not rounded.

    Raises:
      ValueError: unless gap > 0.

    Example:
      >>> problem = Problem(N=50, E=5, L=2, Z=1, gap=1)
      >>> optimal_cohort_size([1e3, 1e4], problem, gamma=0.01).round(2).tolist()
      [1.6, 5.05]

    Reference: Pawlik, sections 5.3 and 5.4, completed from eq. (27).
    """
    name = "The optimal cohort size"
    N, E, L, Z, gap = problem.symbols(name, "N E L Z gap")
    cost, gamma = in_range(name, problem, cost=cost, gamma=gamma)
    require(name, {"gap > 0": gap > 0}, gap=gap)
    a, b = 2 * gap / (gamma * E * cost), gamma * L * E * Z**2
    return np.clip(np.sqrt(b * N / (a * np.maximum(N - 1, 1))), 1, N)


def _excess(
    statement: str,
    spread: Callable[[FloatArray], FloatArray],
    updates: ArrayLike,
    C: ArrayLike,
    gamma: ArrayLike,
) -> FloatArray:
    G = np.asarray(updates, np.float64)
    N = G.shape[-2]
    C, gamma = in_range(statement, C=C, gamma=gamma)
    require(statement, {"N >= 2": N >= 2, "C <= N": C <= N}, N=N, C=C)
    return gamma**2 * (1 / (N - 1)) * (1 / C - 1 / N) * spread(G)


def _squared_mean(G: FloatArray) -> FloatArray:
    return np.sum(np.mean(G, axis=-2) ** 2, axis=-1)


def _spread_by_norms(G: FloatArray) -> FloatArray:
    """``sum_i |G_i|^2 - N |G_bar|^2``."""
    return np.sum(G**2, axis=(-2, -1)) - G.shape[-2] * _squared_mean(G)


def _spread_by_products(G: FloatArray) -> FloatArray:
    """``N (N-1) |G_bar|^2 - sum_{i != j} G_i . G_j``."""
    N = G.shape[-2]
    others = np.sum(G, axis=-2, keepdims=True) - G
    return N * (N - 1) * _squared_mean(G) - np.sum(G * others, axis=(-2, -1))
