"""Convergence of MaxFL: Theorem 3.1 of Cho et al., "Maximizing Global Model Appeal", appendix B.

``N`` clients (the paper's M), ``m`` of them in a round, ``tau`` local steps, ``T`` rounds. The
losses are L_c-Lipschitz and L_s-smooth; stochastic gradients have variance at most ``sigma_g^2``;
the mean of ``|grad F_k|^2`` is at most ``beta^2 |grad F|^2 + kappa^2``. ``gap`` is the MaxFL
objective at the start above its infimum. Arguments broadcast.

Lemma B.2 proves the smoothness ``L_c^2/4 + q L_s``. Section 3, (101), (110), nu and epsilon print
``L_c/4`` instead, which is too small for L_c > 1. Here it is ``L_c^2/4`` throughout;
``as_printed=True`` takes the formulas as they are printed.
"""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_mm.theory.arrays import FloatArray, broadcast
from fedjax_mm.theory.hypotheses import require


def lemma_b_1(beta: ArrayLike, kappa: ArrayLike, L_c: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Dissimilarity of the clients' MaxFL objectives, Lemma B.1, eq. (47).

    ``mean |grad F~_k|^2 <= beta'^2 |grad F~|^2 + kappa'^2`` with ``beta'^2 = 2 beta^2`` and
    ``kappa'^2 = kappa^2 + 4 beta^2 L_c^2``.

    Args:
      beta: dissimilarity of the losses, ``beta^2 >= 1``.
      kappa: dissimilarity of the losses.
      L_c: Lipschitz constant of the losses.

    Returns:
      ``(beta', kappa')``, not squared.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> [constant.round(4).item() for constant in lemma_b_1(1.0, 3.0, 2.0)]
      [1.4142, 5.0]

    Source: Cho et al., Lemma B.1, eqs. (47) to (55).
    """
    beta, kappa, L_c = broadcast(beta, kappa, L_c)
    signs = {"beta^2 >= 1": beta >= 1, "kappa >= 0": kappa >= 0, "L_c > 0": L_c > 0}
    require("Lemma B.1", signs, beta=beta, kappa=kappa, L_c=L_c)
    return np.sqrt(2 * beta**2), np.sqrt(kappa**2 + 4 * beta**2 * L_c**2)


def lemma_b_2(q: ArrayLike, L_c: ArrayLike, L_s: ArrayLike) -> FloatArray:
    """Smoothness of a client's MaxFL objective, Lemma B.2, eq. (62): ``L_c^2/4 + q L_s``.

    Args:
      q: the client's weight ``sigma (1 - sigma)`` at w.
      L_c: Lipschitz constant of the losses.
      L_s: smoothness of the losses.

    Returns:
      A bound on the spectral norm of the Hessian at w.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> lemma_b_2([0.0, 0.25], 2.0, 4.0).tolist()
      [1.0, 2.0]

    Source: Cho et al., Lemma B.2, eqs. (56) to (62).
    """
    q, L_c, L_s = broadcast(q, L_c, L_s)
    _require_smooth("Lemma B.2", q, L_c, L_s)
    return np.asarray(L_c**2 / 4 + q * L_s)


def optimal_epsilon(
    N: ArrayLike, L_c: ArrayLike, L_s: ArrayLike, *, as_printed: bool = False
) -> FloatArray:
    """The epsilon of the optimal learning rate, section 3: ``N L_c^2 / (4 L_s)``.

    Args:
      N: clients.
      L_c: Lipschitz constant of the losses.
      L_s: smoothness of the losses.
      as_printed: ``N L_c / (4 L_s)``, which Lemma B.2 does not give.

    Returns:
      What is added to the sum of the weights.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> optimal_epsilon([10, 20], 4.0, 2.0).tolist()
      [20.0, 40.0]
      >>> optimal_epsilon([10, 20], 4.0, 2.0, as_printed=True).tolist()
      [5.0, 10.0]

    Source: Cho et al., section 3, "Adaptive Server Learning Rate".
    """
    N, L_c, L_s = broadcast(N, L_c, L_s)
    signs = {"N >= 1": N >= 1, "L_c > 0": L_c > 0, "L_s > 0": L_s > 0}
    require("The optimal epsilon", signs, N=N, L_c=L_c, L_s=L_s)
    return np.asarray(N * _quarter(L_c, as_printed) / L_s)


def adaptive_learning_rate(
    q: ArrayLike, L_c: ArrayLike, L_s: ArrayLike, *, as_printed: bool = False
) -> FloatArray:
    """The optimal learning rate on the MaxFL objective, section 3.

    ``1 / L~_s = N eta / (sum_k q_k + eps)`` with ``eta = 1 / L_s`` and ``eps = N L_c^2 / (4 L_s)``;
    ``L~_s`` is the mean over the clients of Lemma B.2.

    Args:
      q: ``[..., clients]``, the weights ``sigma (1 - sigma)`` at w.
      L_c: Lipschitz constant of the losses; broadcasts against the leading axes of q.
      L_s: smoothness of the losses; broadcasts against the leading axes of q.
      as_printed: with ``eps = N L_c / (4 L_s)``, which Lemma B.2 does not give.

    Returns:
      The learning rate: large where the weights, and with them the gradients, are small.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> adaptive_learning_rate([[0.25, 0.25], [0.0, 0.0]], 2.0, 4.0).tolist()
      [0.5, 1.0]

    Source: Cho et al., section 3, "Adaptive Server Learning Rate"; Fig. 8 shows it.
    """
    q = np.asarray(q, np.float64)
    N = q.shape[-1]
    sum_q, L_c, L_s = broadcast(np.sum(q, axis=-1), L_c, L_s)
    _require_smooth("The adaptive learning rate", q, L_c, L_s)
    eps = optimal_epsilon(N, L_c, L_s, as_printed=as_printed)
    return np.asarray(N * (1 / L_s) / (sum_q + eps))


def theorem_3_1_learning_rates(
    T: ArrayLike, tau: ArrayLike, m: ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """The learning rates of Theorem 3.1: ``eta_l = 1/(sqrt(T) tau)``, ``eta_g = sqrt(tau m)``.

    Args:
      T: rounds, large enough for the step-size conditions of the bounds.
      tau: local steps.
      m: clients in a round; all N for full participation.

    Returns:
      ``(eta_l, eta_g)``.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> [rate.item() for rate in theorem_3_1_learning_rates(100, 5, 20)]
      [0.02, 10.0]

    Source: Cho et al., Theorem 3.1.
    """
    T, tau, m = broadcast(T, tau, m)
    least = {"T >= 1": T >= 1, "tau >= 1": tau >= 1, "m >= 1": m >= 1}
    require("Theorem 3.1", least, T=T, tau=tau, m=m)
    return np.asarray(1 / (np.sqrt(T) * tau)), np.sqrt(tau * m)


def theorem_3_1_full(
    T: ArrayLike,
    tau: ArrayLike,
    N: ArrayLike,
    *,
    eta_l: ArrayLike,
    eta_g: ArrayLike,
    L_c: ArrayLike,
    L_s: ArrayLike,
    beta: ArrayLike,
    kappa: ArrayLike,
    sigma_g: ArrayLike,
    gap: ArrayLike,
    as_printed: bool = False,
) -> FloatArray:
    """Bound on the MaxFL objective's mean squared gradient, all clients; eqs. (99) and (100).

    ``4 (N+eps) gap / (N tau eta_l eta_g T) + 16 eta_l^2 tau^2 L_s^2 kappa'^2 (N+eps) / eps
    + 4 L_s^2 eta_l^2 tau sigma_g^2 (N+eps) / eps + 4 eta_g eta_l L~_s sigma_g^2 (N+eps) / eps^2``

    with eps of `optimal_epsilon`, which the step sizes below are for, and
    ``L~_s = L_s + L_c^2/4``, Lemma B.2 for weights of at most 1, as (101) has it.

    Args:
      T: rounds.
      tau: local steps.
      N: clients, all of which take part.
      eta_l: local learning rate, at most ``min{1, 1/beta'} / (4 tau L_s)``.
      eta_g: global learning rate; ``eta_l eta_g <= 1 / (4 tau L_s)``. The server's is
        ``eta_g / (sum q + eps)``.
      L_c: Lipschitz constant of the losses.
      L_s: smoothness of the losses.
      beta: dissimilarity of the losses, ``beta^2 >= 1``; beta' and kappa' are those of Lemma B.1.
      kappa: dissimilarity of the losses.
      sigma_g: bound on the standard deviation of a stochastic gradient.
      gap: the MaxFL objective at the start above its infimum.
      as_printed: ``L_c/4`` for ``L_c^2/4`` in eps and ``L~_s``.

    Returns:
      A bound on the mean, and so on the least, of ``E|grad F~(w_t)|^2`` over the rounds.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> rates = dict(eta_l=0.01, eta_g=1.0)
      >>> losses = dict(L_c=2.0, L_s=1.0, beta=1.0, kappa=1.0, sigma_g=0.5, gap=0.5)
      >>> theorem_3_1_full([100, 1000], 5, 10, **rates, **losses).round(4).tolist()
      [2.165, 1.445]

    Source: Cho et al., Theorem 3.1 and appendix B.2. (102) loses the ``L_c^2`` of (101).
    """
    T, tau, N, eta_l, eta_g = broadcast(T, tau, N, eta_l, eta_g)
    L_c, L_s, beta, kappa, sigma_g, gap = broadcast(L_c, L_s, beta, kappa, sigma_g, gap)
    _require_ranges(T, tau, N, eta_l, eta_g, L_c, L_s, sigma_g, gap)
    beta_prime, kappa_prime = lemma_b_1(beta, kappa, L_c)
    product = {"eta_l eta_g <= 1/(4 tau L_s)": eta_l * eta_g <= 1 / (4 * tau * L_s)}
    local = eta_l <= np.minimum(1, 1 / beta_prime) / (4 * tau * L_s)
    steps = {**product, "eta_l <= min{1, 1/beta'}/(4 tau L_s)": local}
    require("Theorem 3.1", steps, eta_l=eta_l, eta_g=eta_g, tau=tau, L_s=L_s, beta=beta)
    eps = optimal_epsilon(N, L_c, L_s, as_printed=as_printed)
    L_tilde = L_s + _quarter(L_c, as_printed)
    return np.asarray(
        4 * (N + eps) * gap / (N * tau * eta_l * eta_g * T)
        + 16 * eta_l**2 * tau**2 * L_s**2 * kappa_prime**2 * (N + eps) / eps
        + 4 * L_s**2 * eta_l**2 * tau * sigma_g**2 * (N + eps) / eps
        + 4 * eta_g * eta_l * L_tilde * sigma_g**2 * (N + eps) / eps**2
    )


def theorem_3_1_partial(
    T: ArrayLike,
    tau: ArrayLike,
    m: ArrayLike,
    N: ArrayLike,
    *,
    eta_l: ArrayLike,
    eta_g: ArrayLike,
    L_c: ArrayLike,
    L_s: ArrayLike,
    beta: ArrayLike,
    kappa: ArrayLike,
    sigma_g: ArrayLike,
    gap: ArrayLike,
    as_printed: bool = False,
) -> FloatArray:
    """Bound on the MaxFL objective's mean squared gradient, m of N clients a round; eq. (125).

    ``4 gap / (T eta_l eta_g tau)
    + 4 sigma_g^2 eta_l (eta_g nu / m + 2/3 L_s^2 eta_l tau + L_s^2 eta_l tau)
    + 80 L_s^2 eta_l^2 tau^2 kappa'^2 / 3 + 48 eta_l eta_g nu (N-m) L_c^2 / (tau m (N-1))``

    with ``nu = L_s + L_c^2/4``, for the server's learning rate ``m eta_g / (sum q + m)``. The last
    term with sigma_g is printed without its second eta_l, which (105) lost against (98).

    Two constants are not proven, and stand here as printed. (112) subtracts ``grad F~_k`` from a
    sum of tau gradients where (113) subtracts ``tau grad F~_k``: without that ``1/tau^2`` the last
    term is ``tau^2`` times as large, and only then does it give the sqrt(tau) of (126). And with
    eps = m the factor of ``|grad F~|^2`` in (123) is not below the ``-1/4`` of (124): at the
    largest step sizes it is ``-1/2 + 1/4 + 1/2``.

    Args:
      T: rounds.
      tau: local steps.
      m: clients in a round, drawn uniformly without replacement.
      N: clients, at least 2.
      eta_l: local learning rate, at most ``1 / (4 beta' tau L_s)``.
      eta_g: global learning rate; ``eta_l eta_g <= 1 / (9 tau nu)``.
      L_c: Lipschitz constant of the losses.
      L_s: smoothness of the losses.
      beta: dissimilarity of the losses, ``beta^2 >= 1``; beta' and kappa' are those of Lemma B.1.
      kappa: dissimilarity of the losses.
      sigma_g: bound on the standard deviation of a stochastic gradient.
      gap: the MaxFL objective at the start above its infimum.
      as_printed: ``L_c/4`` for ``L_c^2/4`` in nu, and the lost eta_l.

    Returns:
      The bound on the mean of ``E|grad F~(w_t)|^2`` over the rounds.

    Raises:
      ValueError: outside the hypotheses, of which it names the first that fails.

    Example:
      >>> rates = dict(eta_l=0.01, eta_g=1.0)
      >>> losses = dict(L_c=2.0, L_s=1.0, beta=1.0, kappa=1.0, sigma_g=0.5, gap=0.5)
      >>> theorem_3_1_partial(1000, 5, [2, 10], 10, **rates, **losses).round(4).tolist()
      [1.5255, 1.1762]

    Source: Cho et al., Theorem 3.1 and appendix B.3. (126) does not follow from (125): it has 80
    for 80/3, sqrt(tau), and no N-1.
    """
    T, tau, m, N, eta_l, eta_g = broadcast(T, tau, m, N, eta_l, eta_g)
    L_c, L_s, beta, kappa, sigma_g, gap = broadcast(L_c, L_s, beta, kappa, sigma_g, gap)
    _require_ranges(T, tau, N, eta_l, eta_g, L_c, L_s, sigma_g, gap)
    require("Theorem 3.1", {"N >= 2": N >= 2, "1 <= m <= N": (m >= 1) & (m <= N)}, m=m, N=N)
    beta_prime, kappa_prime = lemma_b_1(beta, kappa, L_c)
    nu = L_s + _quarter(L_c, as_printed)
    local = {"eta_l <= 1/(4 beta' tau L_s)": eta_l <= 1 / (4 * beta_prime * tau * L_s)}
    steps = {**local, "eta_l eta_g <= 1/(9 tau nu)": eta_l * eta_g <= 1 / (9 * tau * nu)}
    require("Theorem 3.1", steps, eta_l=eta_l, eta_g=eta_g, tau=tau, L_s=L_s, beta=beta, nu=nu)
    second_eta_l = 1 if as_printed else eta_l
    return np.asarray(
        4 * gap / (T * eta_l * eta_g * tau)
        + 4
        * sigma_g**2
        * eta_l
        * (eta_g * nu / m + 2 * L_s**2 * eta_l * tau / 3 + L_s**2 * second_eta_l * tau)
        + 80 * L_s**2 * eta_l**2 * tau**2 * kappa_prime**2 / 3
        + 48 * eta_l * eta_g * nu * (N - m) * L_c**2 / (tau * m * (N - 1))
    )


def _quarter(L_c: FloatArray, as_printed: bool) -> FloatArray:
    """The part of the smoothness that the sigmoid adds: ``L_c^2/4`` by Lemma B.2."""
    return L_c / 4 if as_printed else L_c**2 / 4


def _require_smooth(statement: str, q: FloatArray, L_c: FloatArray, L_s: FloatArray) -> None:
    weights = {"0 <= q <= 1": (q >= 0) & (q <= 1)}
    require(statement, {**weights, "L_c > 0": L_c > 0, "L_s > 0": L_s > 0}, q=q, L_c=L_c, L_s=L_s)


def _require_ranges(
    T: FloatArray,
    tau: FloatArray,
    N: FloatArray,
    eta_l: FloatArray,
    eta_g: FloatArray,
    L_c: FloatArray,
    L_s: FloatArray,
    sigma_g: FloatArray,
    gap: FloatArray,
) -> None:
    least = {"T >= 1": T >= 1, "tau >= 1": tau >= 1, "N >= 1": N >= 1}
    require("Theorem 3.1", least, T=T, tau=tau, N=N)
    rates = {"eta_l > 0": eta_l > 0, "eta_g > 0": eta_g > 0}
    require("Theorem 3.1", rates, eta_l=eta_l, eta_g=eta_g)
    losses = {"L_c > 0": L_c > 0, "L_s > 0": L_s > 0, "sigma_g >= 0": sigma_g >= 0}
    bounds = {**losses, "gap >= 0": gap >= 0}
    require("Theorem 3.1", bounds, L_c=L_c, L_s=L_s, sigma_g=sigma_g, gap=gap)
