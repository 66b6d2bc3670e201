"""What a trial with cohorts costs: Pawlik's measures of fairness, section 2.3, eqs. (1) to (8)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_mm.theory.arrays import FloatArray, broadcast
from fedjax_mm.theory.hypotheses import require


class Costs(NamedTuple):
    """The costs of a trial; trials are compared fairly in those that are equal.

    Attributes:
      g: gradients of examples in a round, eq. (1).
      g_total: in all rounds, eq. (2); it prints R u where R g is meant.
      g_client: in a round, of a client of the cohort (g'), eq. (3).
      g_client_total: in all rounds, of any client in expectation (g'_R), eq. (4).
      u: local updates of a client of the cohort in a round, eq. (5).
      u_total: in all rounds, eq. (6).
      c: contacts with the server, eq. (7).
      c_client: of any client in expectation (c'), eq. (8).
    """

    g: FloatArray
    g_total: FloatArray
    g_client: FloatArray
    g_client_total: FloatArray
    u: FloatArray
    u_total: FloatArray
    c: FloatArray
    c_client: FloatArray


def costs(
    C: ArrayLike, R: ArrayLike, B: ArrayLike, E: ArrayLike, *, N: ArrayLike, K: ArrayLike
) -> Costs:
    """The costs of R rounds by cohorts of C of K clients: gradients, updates and contacts.

    Args:
      C: clients in a cohort.
      R: rounds.
      B: examples in a batch.
      E: local epochs.
      N: examples of each client.
      K: clients.

    Returns:
      All eight, each in the common shape of the arguments.

    Raises:
      ValueError: if a number is not positive or C is above K.

    Example:
      >>> sizes = [5, 10, 30]
      >>> measured = costs(sizes, [12, 6, 2], [60, 30, 10], 1, N=600, K=100)
      >>> measured.u.tolist(), measured.u_total.tolist(), measured.c.tolist()
      ([10.0, 20.0, 60.0], [120.0, 120.0, 120.0], [60.0, 60.0, 60.0])

    Source: Pawlik 2020, section 2.3.
    """
    C, R, B, E, N, K = broadcast(C, R, B, E, N, K)
    given = {"C": C, "R": R, "B": B, "E": E, "N": N, "K": K}
    positive = {f"{name} > 0": value > 0 for name, value in given.items()}
    require("A trial", {**positive, "C <= K": C <= K}, **given)
    g, u = C * E * N, E * N / B
    return Costs(g, R * g, E * N, R * g / K, u, R * u, R * C, np.asarray(R * C / K))
