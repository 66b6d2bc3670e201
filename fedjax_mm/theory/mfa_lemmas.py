"""Lemmas 1 to 4 of Bhuyan, Moharir and Joshi, and the recursion over frames that they add up to.

They bound MFA-RR over frame l with the rate eta = alpha_l, for the server scale 1/N of eq. (19).
The symbols are explained in `fedjax_mm.theory.mfa_symbols`; all arguments broadcast.
"""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_mm.theory.hypotheses import require
from fedjax_mm.theory.mfa_symbols import Numbers, admissible


def lemma_1(
    *, S: ArrayLike, N_s: ArrayLike, G: ArrayLike, beta_1: ArrayLike, beta_2: ArrayLike
) -> Numbers:
    """Lemma 1: the variance of a gradient on N_s of a client's S examples without replacement.

    ``var(grad F_k) <= 4 ((S - N_s) / S)^2 (beta_1 + beta_2 G^2)``, eq. (63). At N_s = 0 it is the
    sigma_k^2 of Theorem 1, a bound for samples of any size.

    Args:
      S: examples of the client.
      N_s: examples in the sample, 0 <= N_s <= S.
      G: bound of the gradients' norm.
      beta_1: of Assumption 4.
      beta_2: of Assumption 4.

    Returns:
      The right-hand side.

    Raises:
      ValueError: naming the hypothesis that does not hold.

    Example:
      >>> lemma_1(S=100, N_s=[0, 50, 100], G=2.0, beta_1=1.0, beta_2=1.0).tolist()
      [20.0, 5.0, 0.0]

    Reference: Bhuyan, Moharir, Joshi, Lemma 1.
    """
    S, N_s, G, beta_1, beta_2 = admissible(
        "Lemma 1", S=S, N_s=N_s, G=G, beta_1=beta_1, beta_2=beta_2
    )
    require("Lemma 1", {"N_s <= S": N_s <= S}, N_s=N_s, S=S)
    return 4 * ((S - N_s) / S) ** 2 * (beta_1 + beta_2 * G**2)


def lemma_2(
    Delta: ArrayLike, *, eta: ArrayLike, E: ArrayLike, mu: ArrayLike, L: ArrayLike
) -> Numbers:
    """Lemma 2: E steps of centralized gradient descent contract the distance to the optimum.

    ``|u_{E+1} - w*| <= (1 - eta mu)^E |w_1^l - w*|``, eq. (84), for eta <= 1/L.

    Args:
      Delta: the distance at the frame's start, |w_1^l - w*|.
      eta: rate of the frame, alpha_l.
      E: steps.
      mu: strong convexity.
      L: smoothness, of the hypothesis only.

    Returns:
      The right-hand side.

    Raises:
      ValueError: naming the hypothesis that does not hold.

    Example:
      >>> lemma_2(8.0, eta=0.5, E=[1, 2, 3], mu=1.0, L=2.0).tolist()
      [4.0, 2.0, 1.0]

    Reference: Bhuyan, Moharir, Joshi, Lemma 2.
    """
    Delta, eta, E, mu, L = admissible("Lemma 2", Delta=Delta, eta=eta, E=E, mu=mu, L=L)
    require("Lemma 2", {"mu <= L": mu <= L}, mu=mu, L=L)
    require("Lemma 2", {"eta <= 1/L": eta <= 1 / L}, eta=eta, L=L)
    return (1 - eta * mu) ** E * Delta


def lemma_3(*, eta: ArrayLike, M: ArrayLike, E: ArrayLike, L: ArrayLike, G: ArrayLike) -> Numbers:
    """Lemma 3: how far a frame's local gradients are from those of centralized descent.

    ``E|e^l| <= eta L G (E^2 (M - 1) / (2 M) + E (E - 1))``, eq. (112), with e^l of eq. (24).

    Args:
      eta: rate of the frame, alpha_l.
      M: models, and rounds of a frame.
      E: local steps.
      L: smoothness.
      G: bound of the gradients' norm.

    Returns:
      The right-hand side.

    Raises:
      ValueError: naming the hypothesis that does not hold.

    Example:
      >>> lemma_3(eta=0.1, M=[1, 2, 4], E=2, L=1.0, G=10.0).tolist()
      [2.0, 3.0, 3.5]

    Reference: Bhuyan, Moharir, Joshi, Lemma 3.
    """
    (eta,) = admissible("Lemma 3", eta=eta)
    return eta * drift("Lemma 3", M=M, E=E, L=L, G=G)


def lemma_4(
    *,
    S: ArrayLike,
    N_s: ArrayLike,
    E: ArrayLike,
    G: ArrayLike,
    beta_1: ArrayLike,
    beta_2: ArrayLike,
) -> Numbers:
    """Lemma 4: what sampling adds to a frame's local gradients.

    ``E|d^l| <= 2 E ((S - N_s) / S) sqrt(beta_1 + beta_2 G^2)``, eq. (118), with d^l of eq. (27).
    The sample-size condition of Theorem 2 says that this is at most eta V: for a given schedule
    N_s(t) the smallest V is the largest ``lemma_4(...) / eta_t``.

    Args:
      S: examples of a client.
      N_s: examples of it used by a local step, 0 <= N_s <= S.
      E: local steps.
      G: bound of the gradients' norm.
      beta_1: of Assumption 4.
      beta_2: of Assumption 4.

    Returns:
      The right-hand side.

    Raises:
      ValueError: naming the hypothesis that does not hold.

    Example:
      >>> lemma_4(S=100, N_s=[50, 100], E=3, G=2.0, beta_1=0.0, beta_2=1.0).tolist()
      [6.0, 0.0]

    Reference: Bhuyan, Moharir, Joshi, Lemma 4.
    """
    S, N_s, E, G, beta_1, beta_2 = admissible(
        "Lemma 4", S=S, N_s=N_s, E=E, G=G, beta_1=beta_1, beta_2=beta_2
    )
    require("Lemma 4", {"N_s <= S": N_s <= S}, N_s=N_s, S=S)
    return 2 * E * ((S - N_s) / S) * np.sqrt(beta_1 + beta_2 * G**2)


def drift(statement: str, *, M: ArrayLike, E: ArrayLike, L: ArrayLike, G: ArrayLike) -> Numbers:
    """``Y + Z = L G E^2 (M - 1) / (2 M) + L G E (E - 1)`` of Theorem 2, and of Lemma 3.

    Args:
      statement: who asks, for the message.
      M: models, and rounds of a frame.
      E: local steps.
      L: smoothness.
      G: bound of the gradients' norm.

    Returns:
      Y + Z.

    Raises:
      ValueError: naming the hypothesis that does not hold.

    Example:
      >>> drift("Theorem 2", M=[1, 2], E=2, L=1.0, G=1.0).tolist()
      [2.0, 3.0]

    Reference: Bhuyan, Moharir, Joshi, below eq. (32).
    """
    M, E, L, G = admissible(statement, M=M, E=E, L=L, G=G)
    Y = L * G * E**2 * (M - 1) / (2 * M)
    Z = L * G * E * (E - 1)
    return Y + Z


def recursion(
    Delta: ArrayLike,
    *,
    eta: ArrayLike,
    M: ArrayLike,
    E: ArrayLike,
    mu: ArrayLike,
    L: ArrayLike,
    G: ArrayLike,
    V: ArrayLike,
) -> Numbers:
    """The recursion (32) over one frame: Lemmas 2 to 4 and the sample-size condition together.

    ``E|w_1^{l+1} - w*| <= (1 - eta mu) E|w_1^l - w*| + eta^2 (Y + Z + V)``, for eta <= 1/L.

    Args:
      Delta: the mean distance at the frame's start, E|w_1^l - w*|.
      eta: rate of the frame, alpha_l.
      M: models, and rounds of a frame.
      E: local steps.
      mu: strong convexity.
      L: smoothness.
      G: bound of the gradients' norm.
      V: of the sample-size condition (31); 0 for full gradients.

    Returns:
      The right-hand side.

    Raises:
      ValueError: naming the hypothesis that does not hold.

    Example:
      >>> recursion(8.0, eta=0.5, M=[1, 2], E=2, mu=1.0, L=1.0, G=1.0, V=1.0).tolist()
      [4.75, 5.0]

    Reference: Bhuyan, Moharir, Joshi, eq. (32).
    """
    statement = "The recursion (32)"
    Delta, eta, mu, L, V = admissible(statement, Delta=Delta, eta=eta, mu=mu, L=L, V=V)
    require(statement, {"mu <= L": mu <= L}, mu=mu, L=L)
    require(statement, {"eta <= 1/L": eta <= 1 / L}, eta=eta, L=L)
    return (1 - eta * mu) * Delta + eta**2 * (drift(statement, M=M, E=E, L=L, G=G) + V)


def iterated_recursion(
    num_frames: int,
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
    """The recursion (32) iterated from the start, with Theorem 2's rates beta / (l + gamma).

    It bounds the error at the start of every frame, more tightly than Theorem 2 does.

    Args:
      num_frames: the frames, l = 1, ..., num_frames.
      M: models, and rounds of a frame.
      E: local steps.
      mu: strong convexity.
      L: smoothness.
      G: bound of the gradients' norm.
      V: of the sample-size condition (31); 0 for full gradients.
      beta: of the rate.
      gamma: of the rate; beta / (1 + gamma) <= 1/L.
      Delta_1: E|w_1 - w*|.

    Returns:
      ``[..., num_frames]``: bounds of E|w_1^l - w*|; the first is Delta_1.

    Raises:
      ValueError: naming the hypothesis that does not hold.

    Example:
      >>> constants = {"M": 2, "E": 1, "mu": 1.0, "L": 1.0, "G": 4.0, "V": 0.0}
      >>> iterated_recursion(3, **constants, beta=2.0, gamma=1.0, Delta_1=5.0).round(4).tolist()
      [5.0, 1.0, 0.7778]

    Reference: Bhuyan, Moharir, Joshi, eq. (32) with alpha_l = beta / (l + gamma).
    """
    admissible("The recursion (32)", num_frames=num_frames)
    beta, gamma, error = admissible("The recursion (32)", beta=beta, gamma=gamma, Delta_1=Delta_1)
    errors = [np.broadcast_to(error, np.broadcast(M, E, mu, L, G, V, beta, gamma, error).shape)]
    for frame in range(1, num_frames):
        eta = beta / (frame + gamma)
        errors.append(recursion(errors[-1], eta=eta, M=M, E=E, mu=mu, L=L, G=G, V=V))
    return np.stack(errors, axis=-1)
