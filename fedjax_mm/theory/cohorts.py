"""Bounds of Pawlik, "Federated Learning with Client Batching and Heterogeneous Data" (2020).

Sections 4.3 and 4.5 treat model averaging with all clients, section 5 the cohorts. ``N`` clients,
``E`` local steps between two averages (the paper's ``I``), learning rate ``gamma``. Arguments
broadcast.
"""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_mm.theory.arrays import FloatArray, broadcast
from fedjax_mm.theory.hypotheses import require

_ROUND_OFF = 1e-12


def theorem_1(
    T: ArrayLike,
    N: ArrayLike,
    E: ArrayLike,
    *,
    gamma: ArrayLike,
    L: ArrayLike,
    G: ArrayLike,
    sigma: ArrayLike,
    gap: ArrayLike,
) -> FloatArray:
    """Bound on the mean squared gradient norm of model averaging, section 4.3.

    ``2 gap / (gamma T) + 4 gamma^2 E^2 G^2 L^2 + L gamma sigma^2 / N`` bounds the mean over the T
    iterations of ``E|grad f|^2`` at the clients' mean model.

    Args:
      T: local iterations (not rounds), at least 1.
      N: clients, all of which take part.
      E: local iterations between two averages.
      gamma: learning rate, at most 1/L.
      L: smoothness of every client's loss.
      G: bound on the root of ``E|grad F_i|^2``.
      sigma: bound on the standard deviation of a client's stochastic gradient.
      gap: ``f(x_0) - f*``.

    Returns:
      The right-hand side, in the common shape of the arguments.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> theorem_1([100, 10_000], 10, 5, gamma=0.01, L=2, G=1, sigma=1, gap=1).round(4).tolist()
      [2.042, 0.062]

    Source: Pawlik 2020, section 4.3, called Theorem 1; Yu, Yang and Zhu 2018, Theorem 1.
    """
    T, N, E, gamma, L, G, sigma, gap = broadcast(T, N, E, gamma, L, G, sigma, gap)
    _require_ranges("Theorem 1", T, N, E, L, G, sigma, gap)
    require("Theorem 1", {"0 < gamma <= 1/L": (gamma > 0) & (gamma <= 1 / L)}, gamma=gamma, L=L)
    return np.asarray(
        2 / (gamma * T) * gap + 4 * gamma**2 * E**2 * G**2 * L**2 + L / N * gamma * sigma**2
    )


def corollary_part_1(
    T: ArrayLike,
    N: ArrayLike,
    E: ArrayLike,
    *,
    L: ArrayLike,
    G: ArrayLike,
    sigma: ArrayLike,
    gap: ArrayLike,
) -> FloatArray:
    """Theorem 1 at ``gamma = sqrt(N) / (L sqrt(T))``, section 4.5, part 1.

    ``2 L gap / sqrt(N T) + 4 N E^2 G^2 / T + sigma^2 / sqrt(N T)``

    Args:
      T: local iterations, at least N.
      N: clients, all of which take part.
      E: local iterations between two averages.
      L: smoothness of every client's loss.
      G: bound on the root of ``E|grad F_i|^2``.
      sigma: bound on the standard deviation of a client's stochastic gradient.
      gap: ``f(x_0) - f*``.

    Returns:
      The right-hand side, in the common shape of the arguments.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> corollary_part_1([100, 10_000], 4, 5, L=2, G=1, sigma=1, gap=1).tolist()
      [4.25, 0.065]

    Source: Pawlik 2020, section 4.5; Yu, Yang and Zhu 2018, Corollary 1.
    """
    T, N, E, L, G, sigma, gap = broadcast(T, N, E, L, G, sigma, gap)
    _require_ranges("Corollary, part 1,", T, N, E, L, G, sigma, gap)
    require("Corollary, part 1,", {"T >= N": T >= N}, T=T, N=N)
    return np.asarray(
        2 * L / np.sqrt(N * T) * gap + 4 * N / T * E**2 * G**2 + sigma**2 / np.sqrt(N * T)
    )


def corollary_part_2(
    T: ArrayLike,
    N: ArrayLike,
    E: ArrayLike,
    *,
    L: ArrayLike,
    G: ArrayLike,
    sigma: ArrayLike,
    gap: ArrayLike,
) -> FloatArray:
    """Part 1 for ``E <= T^(1/4) / N^(3/4)``: the rate ``O(1 / sqrt(N T))``, section 4.5, part 2.

    ``(2 L gap + 4 G^2 + sigma^2) / sqrt(N T)``

    Args:
      T: local iterations, at least N.
      N: clients, all of which take part.
      E: local iterations between two averages; only the hypothesis speaks of it.
      L: smoothness of every client's loss.
      G: bound on the root of ``E|grad F_i|^2``.
      sigma: bound on the standard deviation of a client's stochastic gradient.
      gap: ``f(x_0) - f*``.

    Returns:
      The right-hand side, in the common shape of the arguments.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> corollary_part_2([1e4, 1e6], 4, [3, 11], L=2, G=1, sigma=1, gap=1).round(6).tolist()
      [0.045, 0.0045]

    Source: Pawlik 2020, section 4.5; Yu, Yang and Zhu 2018, Corollary 1.
    """
    T, N, E, L, G, sigma, gap = broadcast(T, N, E, L, G, sigma, gap)
    _require_ranges("Corollary, part 2,", T, N, E, L, G, sigma, gap)
    # In fourth powers, which are exact for integers.
    small = {"E <= T^(1/4) / N^(3/4)": E**4 * N**3 <= T}
    require("Corollary, part 2,", {"T >= N": T >= N, **small}, T=T, N=N, E=E)
    root = np.sqrt(N * T)
    return np.asarray(2 * L / root * gap + 4 / root * G**2 + sigma**2 / root)


def squared_step_25(updates: ArrayLike, C: ArrayLike, gamma: ArrayLike) -> FloatArray:
    """``E|x^(s) - x^(s-1)|^2``, the squared step of a round with cohorts, eq. (25).

    ``gamma^2 / (N-1) (1/C - 1/N) (sum_i |G_i|^2 - N |G_bar|^2) + gamma^2 |G_bar|^2``

    Args:
      updates: ``[..., clients, d]``, each client's ``G_i``, the sum of its gradients in the round;
        leading axes, such as earlier cohorts, are kept, and their mean is the outer expectation.
      C: clients in a cohort, drawn uniformly without replacement.
      gamma: learning rate.

    Returns:
      The expectation over the round's cohort.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> squared_step_25([[1.0], [3.0]], [1, 2], 0.1).round(4).tolist()
      [0.05, 0.04]

    Source: Pawlik 2020, section 5.3.
    """
    G = np.asarray(updates, np.float64)
    excess = _excess("Equation (25)", G, _spread_by_norms(G), C, gamma)
    return np.asarray(excess + np.square(gamma) * _squared_mean(G))


def squared_step_26(updates: ArrayLike, C: ArrayLike, gamma: ArrayLike) -> FloatArray:
    """``E|x^(s) - x^(s-1)|^2`` by the products of updates, eq. (26); equal to (25).

    ``gamma^2 / (N-1) (1/C - 1/N) (N (N-1) |G_bar|^2 - sum_{i != j} G_i . G_j) + gamma^2 |G_bar|^2``

    Args:
      updates: ``[..., clients, d]``, each client's ``G_i``, the sum of its gradients in the round.
      C: clients in a cohort, drawn uniformly without replacement.
      gamma: learning rate.

    Returns:
      The expectation over the round's cohort.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> squared_step_26([[1.0], [3.0]], [1, 2], 0.1).round(4).tolist()
      [0.05, 0.04]

    Source: Pawlik 2020, section 5.3.
    """
    G = np.asarray(updates, np.float64)
    excess = _excess("Equation (26)", G, _spread_by_products(G), C, gamma)
    return np.asarray(excess + np.square(gamma) * _squared_mean(G))


def excess_noise_27(updates: ArrayLike, C: ArrayLike, gamma: ArrayLike, L: ArrayLike) -> FloatArray:
    """What cohorts of C of the N clients add to the bound on a round's loss, eq. (27).

    ``L/2 gamma^2 / (N-1) (1/C - 1/N) (sum_i |G_i|^2 - N |G_bar|^2)``

    That is ``L/2 gamma^2`` times the variance of the cohort's mean update. It is zero for C = N and
    for equal updates.

    Args:
      updates: ``[..., clients, d]``, each client's ``G_i``, the sum of its gradients in the round;
        leading axes, such as earlier cohorts, are kept, and their mean is the outer expectation.
      C: clients in a cohort, drawn uniformly without replacement.
      gamma: learning rate.
      L: smoothness of the loss.

    Returns:
      The excess noise. Nearly equal updates leave a rounding error of about ``1e-16 sum |G_i|^2``.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> excess_noise_27([[1.0], [3.0]], [1, 2], 0.1, 4).round(4).tolist()
      [0.02, 0.0]

    Source: Pawlik 2020, section 5.4.
    """
    G = np.asarray(updates, np.float64)
    require("Equation (27)", {"L > 0": np.greater(L, 0)}, L=L)
    excess = _excess("Equation (27)", G, _spread_by_norms(G), C, gamma)
    return np.asarray(np.divide(L, 2) * excess)


def excess_noise_28(updates: ArrayLike, C: ArrayLike, gamma: ArrayLike, L: ArrayLike) -> FloatArray:
    """The excess noise by the products of updates, eq. (28); equal to (27).

    ``L/2 gamma^2 / (N-1) (1/C - 1/N) (N (N-1) |G_bar|^2 - sum_{i != j} G_i . G_j)``

    The paper reads from it that parallel updates suffice for zero. They do not: they have to be
    equal. Updates 1 and 3 are parallel, and their noise is that of the example.

    Args:
      updates: ``[..., clients, d]``, each client's ``G_i``, the sum of its gradients in the round.
      C: clients in a cohort, drawn uniformly without replacement.
      gamma: learning rate.
      L: smoothness of the loss.

    Returns:
      The excess noise. Nearly equal updates leave a rounding error of about ``1e-16 sum |G_i|^2``.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> excess_noise_28([[1.0], [3.0]], [1, 2], 0.1, 4).round(4).tolist()
      [0.02, 0.0]

    Source: Pawlik 2020, section 5.4.
    """
    G = np.asarray(updates, np.float64)
    require("Equation (28)", {"L > 0": np.greater(L, 0)}, L=L)
    excess = _excess("Equation (28)", G, _spread_by_products(G), C, gamma)
    return np.asarray(np.divide(L, 2) * excess)


def cohort_bound(
    S: ArrayLike,
    N: ArrayLike,
    C: ArrayLike,
    E: ArrayLike,
    *,
    gamma: ArrayLike,
    L: ArrayLike,
    G: ArrayLike,
    Z: ArrayLike,
    gap: ArrayLike,
) -> FloatArray:
    """Bound on the mean squared gradient norm of training by cohorts; ours, not the paper's.

    ``2 gap / (gamma E S) + gamma^2 L^2 G^2 (E-1)(2E-1) / 6
    + gamma L E Z^2 N/(N-1) (1/C - 1/N)`` bounds the mean over the S rounds of ``E|grad f|^2`` at
    the global model before each round, for clients that take E full gradients each.

    It completes the proof that section 5 of the paper leaves open: the descent lemma for a round's
    step, a local model that is at most ``gamma t G`` away after t steps, and eq. (27) with
    ``sum_i |G_i|^2 - N |G_bar|^2 <= N E^2 Z^2``.

    Args:
      S: rounds, at least 1.
      N: clients.
      C: clients in a cohort, drawn uniformly without replacement.
      E: local steps of a client in a round (the paper's T).
      gamma: learning rate, at most 1/(L E).
      L: smoothness of every client's loss.
      G: bound on ``|grad f_i|`` along the way.
      Z: bound on the root of the clients' mean squared deviation of ``G_i / E`` from ``G_bar / E``
        in a round; G is one.
      gap: ``f(x^(0)) - f*``.

    Returns:
      The right-hand side, in the common shape of the arguments.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> cohort_bound(100, 10, [1, 5, 10], 5, gamma=0.1, L=2, G=1, Z=1, gap=1).round(4).tolist()
      [1.28, 0.3911, 0.28]
    """
    S, N, C, E, gamma, L, G, Z, gap = broadcast(S, N, C, E, gamma, L, G, Z, gap)
    _require_cohorts("The bound for cohorts", {"S": S, "N": N, "E": E}, L=L, Z=Z, gap=gap)
    require("The bound for cohorts", {"1 <= C <= N": (C >= 1) & (C <= N)}, C=C, N=N)
    small = {"0 < gamma <= 1/(L E)": (gamma > 0) & (gamma * L * E <= 1 + _ROUND_OFF)}
    require("The bound for cohorts", {"G >= 0": G >= 0, **small}, G=G, gamma=gamma, L=L, E=E)
    drift = gamma**2 * L**2 * G**2 * (E - 1) * (2 * E - 1) / 6
    noise = gamma * L * E * Z**2 * N / np.maximum(N - 1, 1) * (1 / C - 1 / N)
    return np.asarray(2 * gap / (gamma * E * S) + drift + noise)


def optimal_cohort_size(
    cost: ArrayLike,
    N: ArrayLike,
    E: ArrayLike,
    *,
    gamma: ArrayLike,
    L: ArrayLike,
    Z: ArrayLike,
    gap: ArrayLike,
) -> FloatArray:
    """The cohort size that minimizes `cohort_bound` at constant cost S C; ours, not the paper's.

    With ``a = 2 gap / (gamma E cost)`` and ``b = gamma L E Z^2`` the bound is, but for what does
    not depend on C, ``a C + b N/(N-1) (1/C - 1/N)``, which ``C* = sqrt(b N / (a (N-1)))``
    minimizes: larger cohorts leave fewer rounds, smaller ones are noisier.

    Args:
      cost: local trainings in all rounds, S C.
      N: clients, at least 1.
      E: local steps of a client in a round.
      gamma: learning rate.
      L: smoothness of every client's loss.
      Z: as for `cohort_bound`.
      gap: ``f(x^(0)) - f*``.

    Returns:
      C*, clipped to lie between 1 and N; not rounded.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> optimal_cohort_size([1e3, 1e4], 50, 5, gamma=0.01, L=2, Z=1, gap=1).round(2).tolist()
      [1.6, 5.05]
    """
    cost, N, E, gamma, L, Z, gap = broadcast(cost, N, E, gamma, L, Z, gap)
    statement, counts = "The optimal cohort size", {"cost": cost, "N": N, "E": E}
    _require_cohorts(statement, counts, L=L, Z=Z, gap=gap)
    positive = {"gamma > 0": gamma > 0, "gap > 0": gap > 0}
    require(statement, positive, gamma=gamma, gap=gap)
    a, b = 2 * gap / (gamma * E * cost), gamma * L * E * Z**2
    return np.asarray(np.clip(np.sqrt(b * N / (a * np.maximum(N - 1, 1))), 1, N))


def _require_cohorts(statement: str, counts: dict[str, FloatArray], **bounds: FloatArray) -> None:
    require(statement, {f"{name} >= 1": value >= 1 for name, value in counts.items()}, **counts)
    require(statement, {f"{name} >= 0": value >= 0 for name, value in bounds.items()}, **bounds)


def _require_ranges(
    statement: str,
    T: FloatArray,
    N: FloatArray,
    E: FloatArray,
    L: FloatArray,
    G: FloatArray,
    sigma: FloatArray,
    gap: FloatArray,
) -> None:
    at_least_one = {"T >= 1": T >= 1, "N >= 1": N >= 1, "E >= 1": E >= 1}
    bounds = {"L > 0": L > 0, "G >= 0": G >= 0, "sigma >= 0": sigma >= 0, "gap >= 0": gap >= 0}
    require(statement, at_least_one, T=T, N=N, E=E)
    require(statement, bounds, L=L, G=G, sigma=sigma, gap=gap)


def _excess(
    statement: str, G: FloatArray, spread: FloatArray, C: ArrayLike, gamma: ArrayLike
) -> FloatArray:
    """``gamma^2 / (N-1) (1/C - 1/N) spread``."""
    N = G.shape[-2]
    spread, C, gamma = broadcast(spread, C, gamma)
    sizes = {"N >= 2": N >= 2, "1 <= C <= N": (C >= 1) & (C <= N)}
    require(statement, {**sizes, "gamma > 0": gamma > 0}, N=N, C=C, gamma=gamma)
    return np.asarray(gamma**2 * (1 / (N - 1)) * (1 / C - 1 / N) * spread)


def _squared_mean(G: FloatArray) -> FloatArray:
    """``|G_bar|^2``."""
    return np.sum(np.mean(G, axis=-2) ** 2, axis=-1)


def _spread_by_norms(G: FloatArray) -> FloatArray:
    """``sum_i |G_i|^2 - N |G_bar|^2``."""
    return np.sum(G**2, axis=(-2, -1)) - G.shape[-2] * _squared_mean(G)


def _spread_by_products(G: FloatArray) -> FloatArray:
    """``N (N-1) |G_bar|^2 - sum_{i != j} G_i . G_j``."""
    N = G.shape[-2]
    others = np.sum(G, axis=-2, keepdims=True) - G
    return N * (N - 1) * _squared_mean(G) - np.sum(G * others, axis=(-2, -1))
