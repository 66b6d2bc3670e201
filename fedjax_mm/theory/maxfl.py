"""Convergence of MaxFL: Theorem 3.1 of Cho et al., "Maximizing Global Model Appeal", appendix B.

Symbols are explained in `fedjax_mm.theory.problem`. The paper's M, m, tau, L_s and sigma_g are
called N, C, E, L and sigma. All arguments broadcast.

Lemma B.2 proves the smoothness ``L_c^2/4 + q L``. Section 3, (101), (110), nu and epsilon print
``L_c/4`` instead, which is too small for L_c > 1. This module uses ``L_c^2/4`` throughout, unless
``as_printed=True`` selects the printed formulas.
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from fedjax_mm.theory.problem import FloatArray, Problem, in_range, require


def lemma_b_1(problem: Problem) -> tuple[FloatArray, FloatArray]:
    """Dissimilarity of the clients' MaxFL objectives, beta' and kappa'.

    ``mean |grad F~_k|^2 <= beta'^2 |grad F~|^2 + kappa'^2`` with ``beta'^2 = 2 beta^2`` and
    ``kappa'^2 = kappa^2 + 4 beta^2 L_c^2``.

    Example:
      >>> problem = Problem(beta=1.0, kappa=3.0, L_c=2.0)
      >>> [constant.round(4).item() for constant in lemma_b_1(problem)]
      [1.4142, 5.0]

    Reference: Cho et al., Lemma B.1, eqs. (47) to (55).
    """
    symbols = problem.symbols("Lemma B.1", "beta kappa L_c")
    beta, kappa, L_c = np.broadcast_arrays(*symbols)
    return np.sqrt(2 * beta**2), np.sqrt(kappa**2 + 4 * beta**2 * L_c**2)


def lemma_b_2(q: ArrayLike, problem: Problem) -> FloatArray:
    """Smoothness of a client's MaxFL objective, ``L_c^2/4 + q L``.

    Args:
      q: the client's weight ``sigma (1 - sigma)`` at w.
      problem: uses L_c and L.

    Returns:
      A bound on the spectral norm of the Hessian at w.

    Raises:
      ValueError: unless 0 <= q <= 1.

    Example:
      >>> lemma_b_2([0.0, 0.25], Problem(L_c=2.0, L=4.0)).tolist()
      [1.0, 2.0]

    Reference: Cho et al., Lemma B.2, eqs. (56) to (62).
    """
    L_c, L = problem.symbols("Lemma B.2", "L_c L")
    return L_c**2 / 4 + _weights("Lemma B.2", q) * L


def optimal_epsilon(problem: Problem, *, as_printed: bool = False) -> FloatArray:
    """The epsilon of the optimal learning rate, ``N L_c^2 / (4 L)``.

    Args:
      problem: uses N, L_c and L.
      as_printed: whether to use ``N L_c / (4 L)``, which does not follow from Lemma B.2.

    Example:
      >>> optimal_epsilon(Problem(N=[10, 20], L_c=4.0, L=2.0)).tolist()
      [20.0, 40.0]
      >>> optimal_epsilon(Problem(N=[10, 20], L_c=4.0, L=2.0), as_printed=True).tolist()
      [5.0, 10.0]

    Reference: Cho et al., section 3, "Adaptive Server Learning Rate".
    """
    N, L_c, L = problem.symbols("The optimal epsilon", "N L_c L")
    return N * _quarter(L_c, as_printed) / L


def adaptive_learning_rate(
    q: ArrayLike, problem: Problem, *, as_printed: bool = False
) -> FloatArray:
    """Optimal learning rate on the MaxFL objective.

    ``1 / L~ = N eta / (sum_k q_k + eps)`` with ``eta = 1 / L`` and ``eps = N L_c^2 / (4 L)``, where
    ``L~`` is the mean over clients of the smoothness in Lemma B.2. The rate is large if the
    weights, and hence the gradients, are small.

    Args:
      q: ``[..., clients]``, the weights ``sigma (1 - sigma)`` at w.
      problem: uses L_c and L, which broadcast against the leading axes of q.
      as_printed: whether to use ``eps = N L_c / (4 L)``, which does not follow from Lemma B.2.

    Raises:
      ValueError: unless 0 <= q <= 1.

    Example:
      >>> adaptive_learning_rate([[0.25, 0.25], [0.0, 0.0]], Problem(L_c=2.0, L=4.0)).tolist()
      [0.5, 1.0]

    Reference: Cho et al., section 3, "Adaptive Server Learning Rate", and Fig. 8.
    """
    q = _weights("The adaptive learning rate", q)
    N = q.shape[-1]
    eps = optimal_epsilon(dataclasses.replace(problem, N=N), as_printed=as_printed)
    (L,) = problem.symbols("The adaptive learning rate", "L")
    return N * (1 / L) / (np.sum(q, axis=-1) + eps)


def theorem_3_1_learning_rates(
    T: ArrayLike, E: ArrayLike, C: ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Learning rates ``eta_l = 1/(sqrt(T) E)`` and ``eta_g = sqrt(E C)``.

    Args:
      T: the number of rounds, large enough for the step-size conditions of the bounds.
      E: the number of local steps.
      C: the number of clients per round; N for full participation.

    Example:
      >>> [rate.item() for rate in theorem_3_1_learning_rates(100, 5, 20)]
      [0.02, 10.0]

    Reference: Cho et al., Theorem 3.1.
    """
    # Broadcast first, so that both rates have the axes of all three; eta_g does not depend on T.
    T, E, C = np.broadcast_arrays(*in_range("Theorem 3.1", T=T, E=E, C=C))
    return 1 / (np.sqrt(T) * E), np.sqrt(E * C)


def theorem_3_1_full(
    T: ArrayLike, problem: Problem, rates: tuple[ArrayLike, ArrayLike], *, as_printed: bool = False
) -> FloatArray:
    """Bounds the MaxFL objective's mean squared gradient, with all clients.

    ``4 (N+eps) gap / (N E eta_l eta_g T) + 16 eta_l^2 E^2 L^2 kappa'^2 (N+eps) / eps
    + 4 L^2 eta_l^2 E sigma^2 (N+eps) / eps + 4 eta_g eta_l L~ sigma^2 (N+eps) / eps^2``

    with eps from `optimal_epsilon`, which the conditions below assume, beta' and kappa' from
    `lemma_b_1`, and ``L~ = L + L_c^2/4`` from Lemma B.2 for weights of at most 1, as in (101). In
    (102) the ``L_c^2`` is missing.

    Args:
      T: the number of rounds.
      problem: uses N, E, L, L_c, beta, kappa, sigma and gap, the gap of the MaxFL objective.
      rates: eta_l and eta_g; the server's rate is ``eta_g / (sum q + eps)``.
      as_printed: whether to use ``L_c/4`` for ``L_c^2/4`` in eps and ``L~``.

    Returns:
      A bound on the mean, and hence on the minimum, of ``E|grad F~(w_t)|^2`` over rounds.

    Raises:
      ValueError: unless eta_l eta_g <= 1/(4 E L) and eta_l <= min{1, 1/beta'}/(4 E L).

    Example:
      >>> losses = {"L_c": 2.0, "L": 1.0, "beta": 1.0, "kappa": 1.0, "sigma": 0.5, "gap": 0.5}
      >>> theorem_3_1_full([100, 1000], Problem(N=10, E=5, **losses), (0.01, 1.0)).round(4).tolist()
      [2.165, 1.445]

    Reference: Cho et al., Theorem 3.1, eqs. (99) and (100).
    """
    name = "Theorem 3.1"
    N, E, L, L_c, beta, sigma, gap = problem.symbols(name, "N E L L_c beta sigma gap")
    T, eta_l, eta_g = in_range(name, problem, T=T, eta_l=rates[0], eta_g=rates[1])
    beta_prime, kappa_prime = lemma_b_1(problem)
    # Keep the minimum as printed, although 1/beta' is always smaller, because beta^2 >= 1 makes
    # beta' at least sqrt(2).
    local = np.minimum(1, 1 / beta_prime) / (4 * E * L)
    hypotheses = {
        "eta_l eta_g <= 1/(4 E L)": eta_l * eta_g <= 1 / (4 * E * L),
        "eta_l <= min{1, 1/beta'}/(4 E L)": eta_l <= local,
    }
    require(name, hypotheses, eta_l=eta_l, eta_g=eta_g, E=E, L=L, beta=beta)
    eps = optimal_epsilon(problem, as_printed=as_printed)
    L_tilde = L + _quarter(L_c, as_printed)
    return (
        4 * (N + eps) * gap / (N * E * eta_l * eta_g * T)
        + 16 * eta_l**2 * E**2 * L**2 * kappa_prime**2 * (N + eps) / eps
        + 4 * L**2 * eta_l**2 * E * sigma**2 * (N + eps) / eps
        + 4 * eta_g * eta_l * L_tilde * sigma**2 * (N + eps) / eps**2
    )


def theorem_3_1_partial(
    T: ArrayLike, problem: Problem, rates: tuple[ArrayLike, ArrayLike], *, as_printed: bool = False
) -> FloatArray:
    """Bounds the MaxFL objective's mean squared gradient, with C of N clients.

    ``4 gap / (T eta_l eta_g E)
    + 4 sigma^2 eta_l (eta_g nu / C + 2/3 L^2 eta_l E + L^2 eta_l E)
    + 80 L^2 eta_l^2 E^2 kappa'^2 / 3 + 48 eta_l eta_g nu (N-C) L_c^2 / (E C (N-1))``

    with ``nu = L + L_c^2/4`` and beta' and kappa' from `lemma_b_1`, for clients drawn uniformly
    without replacement. The last term with sigma is printed without its second eta_l, which is lost
    between (98) and (105). (126) does not follow from (125), because it has 80 instead of 80/3,
    contains sqrt(E), and lacks N-1.

    Two constants are unproven, but kept as printed. First, (112) subtracts ``grad F~_k`` from a sum
    of E gradients, whereas (113) subtracts ``E grad F~_k``. Without the resulting ``1/E^2``, the
    last term would be ``E^2`` times as large, and only then would it give the sqrt(E) of (126).
    Second, with eps = C the factor of ``|grad F~|^2`` in (123) is not below the ``-1/4`` of (124),
    because at the largest step sizes it is ``-1/2 + 1/4 + 1/2``.

    Args:
      T: the number of rounds.
      problem: uses N, C, E, L, L_c, beta, kappa, sigma and gap, the gap of the MaxFL objective.
      rates: eta_l and eta_g; the server's rate is ``C eta_g / (sum q + C)``.
      as_printed: whether to use ``L_c/4`` for ``L_c^2/4`` in nu, and to omit the lost eta_l.

    Returns:
      The bound on the mean of ``E|grad F~(w_t)|^2`` over rounds.

    Raises:
      ValueError: unless N >= 2, C <= N, eta_l <= 1/(4 beta' E L) and eta_l eta_g <= 1/(9 E nu).

    Example:
      >>> losses = {"L_c": 2.0, "L": 1.0, "beta": 1.0, "kappa": 1.0, "sigma": 0.5, "gap": 0.5}
      >>> problem = Problem(N=10, C=[2, 10], E=5, **losses)
      >>> theorem_3_1_partial(1000, problem, (0.01, 1.0)).round(4).tolist()
      [1.5255, 1.1762]

    Reference: Cho et al., Theorem 3.1, eq. (125).
    """
    name = "Theorem 3.1"
    N, C, E, L, L_c, beta, sigma, gap = problem.symbols(name, "N C E L L_c beta sigma gap")
    T, eta_l, eta_g = in_range(name, problem, T=T, eta_l=rates[0], eta_g=rates[1])
    beta_prime, kappa_prime = lemma_b_1(problem)
    nu = L + _quarter(L_c, as_printed)
    hypotheses = {
        "N >= 2": N >= 2,
        "C <= N": C <= N,
        "eta_l <= 1/(4 beta' E L)": eta_l <= 1 / (4 * beta_prime * E * L),
        "eta_l eta_g <= 1/(9 E nu)": eta_l * eta_g <= 1 / (9 * E * nu),
    }
    given = {"eta_l": eta_l, "eta_g": eta_g, "beta": beta, "nu": nu}
    require(name, hypotheses, N=N, C=C, E=E, L=L, **given)
    # Restore this eta_l, because (98) contains it, but (105), which follows from (98), loses it.
    second_eta_l = 1 if as_printed else eta_l
    noise = eta_g * nu / C + 2 * L**2 * eta_l * E / 3 + L**2 * second_eta_l * E
    return (
        4 * gap / (T * eta_l * eta_g * E)
        + 4 * sigma**2 * eta_l * noise
        + 80 * L**2 * eta_l**2 * E**2 * kappa_prime**2 / 3
        + 48 * eta_l * eta_g * nu * (N - C) * L_c**2 / (E * C * (N - 1))
    )


def _quarter(L_c: FloatArray, as_printed: bool) -> FloatArray:
    """The sigmoid's contribution to the smoothness, ``L_c^2/4`` in Lemma B.2."""
    return L_c / 4 if as_printed else L_c**2 / 4


def _weights(statement: str, q: ArrayLike) -> FloatArray:
    q = np.asarray(q, np.float64)
    require(statement, {"0 <= q <= 1": (q >= 0) & (q <= 1)}, q=q)
    return q
