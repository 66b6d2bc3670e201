"""Bounds on local training with explicit constants, each proven in its docstring.

They cover what newer theory is about: stochastic gradients and local steps on equal losses, drift
and sampled cohorts on unlike ones, and the outer optimizer of DiLoCo. Theorems of other authors are
not among them.
"""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_mm.theory.problem import FloatArray, Problem, in_range, require


def equal_losses(T: ArrayLike, problem: Problem, eta: ArrayLike, D: ArrayLike) -> FloatArray:
    """Upper bound on E|w - w*|^2 after T local steps of C clients with equal losses.

    ``q^T D + (1 - q^T) / (1 - q) eta^2 sigma^2 (1/C + eta L (1 + 2 eta L) (1 - 1/C) (E - 1))`` with
    ``q = 1 - eta mu``. All clients take E steps with independent gradient noise of variance sigma^2
    at most, and w is the mean of their models, between rounds too.

    Proof. Let x_k be the clients' models, x their mean and V the mean of |x_k - x|^2. Strong
    convexity at x_k, smoothness between x_k and x, and |mean of grad F(x_k)|^2 <= 2 L^2 V + 4 L
    (F(x) - F*) give E|x+ - w*|^2 <= q |x - w*|^2 - 2 eta (1 - 2 eta L) (F(x) - F*) + eta L (1 + 2
    eta L) V + eta^2 sigma^2 / C. A gradient step does not expand distances, so that E|x_j - x_k|^2
    grows by 2 eta^2 sigma^2 a step at most from 0 in a round: V <= (1 - 1/C) (E - 1) eta^2 sigma^2.

    Args:
      T: numbers of local steps; 0 is the start.
      problem: with C, E, mu, L, sigma, zeta and delta.
      eta: the local rate.
      D: E|w - w*|^2 at the start.

    Raises:
      ValueError: unless losses are equal (zeta = delta = 0) and eta <= 1 / (2 L).

    Example:
      >>> problem = Problem(C=4, E=5, mu=0.5, L=1.0, sigma=1.0, zeta=0.0, delta=0.0)
      >>> equal_losses([0, 5, 500], problem, eta=0.1, D=1.0).round(4).tolist()
      [1.0, 0.8014, 0.122]
    """
    name = "The bound on equal losses"
    C, E, mu, L, sigma, zeta, delta = problem.symbols(name, "C E mu L sigma zeta delta")
    eta, D = in_range(name, problem, eta=eta, D=D)
    unlike = {"zeta = 0": zeta < 1e-9, "delta = 0": delta < 1e-9}
    needs = {"eta <= 1/(2 L)": eta <= 1 / (2 * L), **unlike}
    require(name, needs, eta=eta, L=L, zeta=zeta, delta=delta)
    left = (1 - eta * mu) ** np.asarray(T, np.float64)
    spread = eta * L * (1 + 2 * eta * L) * (1 - 1 / C) * (E - 1)
    return left * D + (1 - left) * eta * sigma**2 / mu * (1 / C + spread)


def unlike_losses(R: ArrayLike, problem: Problem, eta: ArrayLike, D: ArrayLike) -> FloatArray:
    """Upper bound on E|w - w*|^2 after R rounds in which C of N unlike clients train.

    Full gradients, equal weights, and a cohort uniform without replacement. From ``u = D``, each
    round gives ``u <- (r sqrt(u) + b)^2 + f min((r sqrt(u) + m zeta)^2, 2 m^2 (L^2 u + zeta^2))``.
    Here ``r = (1 - eta mu)^E`` contracts, ``m = (1 - r) / mu`` is the sum of the rates that is left
    of eta E, ``b = zeta min(m, L (eta E - m) / mu)`` is the clients' drift, which is 0 for E = 1,
    and ``f = (N - C) / (C (N - 1))`` is due to sampling.

    Proof. Let u_k(w) be client k's model after E steps from w, and T(w) the mean over all clients.
    Steps contract distances and gradients by q = 1 - eta mu, so |T(w) - T(w*)| <= r |w - w*|, and
    |u_k(w) - w| <= m |grad F_k(w)|. From w*, client k is at most (1 - q^s) / mu |grad F_k(w*)| away
    after s steps, and the mean of grad F_k(w*) is 0, so |T(w*) - w*| <= eta L zeta sum_s (1 - q^s)
    / mu = L zeta (eta E - m) / mu, and also <= m zeta. The variance of a cohort's mean is f times
    the mean of |u_k(w) - T(w)|^2, which is at most the mean of |u_k(w) - w*|^2, and of |u_k(w) -
    w|^2, where the mean of |grad F_k(w)|^2 is at most 2 L^2 |w - w*|^2 + 2 zeta^2. Take
    expectations, by Jensen's inequality.

    Args:
      R: numbers of rounds; 0 is the start.
      problem: with N, C, E, mu, L and zeta.
      eta: the local rate.
      D: E|w - w*|^2 at the start.

    Raises:
      ValueError: unless C <= N and eta <= 2 / (mu + L).

    Example:
      >>> problem = Problem(N=8, C=4, E=5, mu=0.5, L=1.0, zeta=1.0)
      >>> unlike_losses([0, 1, 100], problem, eta=0.01, D=1.0).round(4).tolist()
      [1.0, 0.9545, 0.0309]
    """
    name = "The bound on unlike losses"
    N, C, E, mu, L, zeta = problem.symbols(name, "N C E mu L zeta")
    eta, D = in_range(name, problem, eta=eta, D=D)
    needs = {"C <= N": C <= N, "eta <= 2/(mu + L)": eta <= 2 / (mu + L)}
    require(name, needs, C=C, N=N, eta=eta, mu=mu, L=L)
    r, f = (1 - eta * mu) ** E, (N - C) / (C * np.maximum(N - 1, 1))
    m = (1 - r) / mu
    drift = zeta * np.minimum(m, L * (eta * E - m) / mu)
    rounds, bounds = np.asarray(R, int), [D]
    for _ in range(rounds.max(initial=0)):
        u = bounds[-1]
        spread = np.minimum((r * u**0.5 + m * zeta) ** 2, 2 * m**2 * (L**2 * u + zeta**2))
        bounds.append((r * u**0.5 + drift) ** 2 + f * spread)
    return np.stack(bounds)[rounds]


def outer_optimizer(
    R: ArrayLike,
    hessians: ArrayLike,
    eta: float,
    E: int,
    *,
    outer: float,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> tuple[FloatArray, float]:
    """Largest |w - w_inf| / |w_1 - w_inf| after R rounds on quadratics, and the rate at the end.

    As in DiLoCo, all clients take E steps of gradient descent, and SGD with momentum at the server
    gets minus the mean update, which is ``(I - P) (w - w_inf)`` with ``P = mean_k (I - eta A_k)^E``
    and P's fixed point w_inf. Along an eigenvector of P with ``lambda = 1 - p``, the error e and
    the momentum m follow ``m <- momentum m + lambda e`` and ``e <- e - outer m``, or ``e <- e -
    outer (lambda e + momentum m)`` by Nesterov. The first result is the largest entry ``(e, e)`` of
    the R-th power of these 2 x 2 matrices, which some w_1 attains, and the second their largest
    spectral radius: errors vanish if it is below 1, like its R-th power.

    If all A_k are equal, w_inf is w*.

    Args:
      R: numbers of rounds; 0 is the start.
      hessians: ``A_k``, ``[clients, dim, dim]``.
      eta: the local rate.
      E: the number of local steps.
      outer: the server's rate.
      momentum: the server's momentum.
      nesterov: whether the momentum is Nesterov's.

    Example: the smallest error falls four times as fast with momentum.
      >>> A = np.diag([0.1, 1.0])[None]
      >>> [round(outer_optimizer(0, A, 0.1, 5, outer=1.0, momentum=m)[1], 3) for m in (0.0, 0.6)]
      [0.951, 0.813]
    """
    A = np.asarray(hessians, np.float64)
    P = np.mean([np.linalg.matrix_power(np.eye(A.shape[-1]) - eta * each, E) for each in A], 0)
    size = 1 - np.linalg.eigvalsh((P + P.T) / 2)
    one, beta = np.ones_like(size), momentum * np.ones_like(size)
    seen = np.array([size, beta])  # the gradient and momentum in m+
    step = np.array([size + beta * size, beta**2]) if nesterov else seen
    matrices = np.array([np.array([one, 0 * one]) - outer * step, seen]).transpose(2, 0, 1)
    rounds, power, left = np.asarray(R, int), np.array([np.eye(2)] * len(size)), [1.0]
    for _ in range(rounds.max(initial=0)):
        power = matrices @ power
        left.append(float(np.abs(power[:, 0, 0]).max()))
    return np.array(left)[rounds], float(np.abs(np.linalg.eigvals(matrices)).max())
