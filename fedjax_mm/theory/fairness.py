"""Costs of a trial with cohorts: Pawlik's measures of fairness, section 2.3, eqs. (1) to (8)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_mm.theory.problem import FloatArray, Problem, in_range, require


class Costs(NamedTuple):
    """Costs of a trial.

    A comparison of trials is fair with respect to the costs that are equal.

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


def costs(R: ArrayLike, problem: Problem, B: ArrayLike, epochs: ArrayLike) -> Costs:
    """Returns the gradients, updates and contacts of R rounds by cohorts of C of N clients.

    Args:
      R: rounds.
      problem: N (the paper's K), C and S (the paper's N) of it.
      B: examples in a batch.
      epochs: local epochs in a round (the paper's E).

    Returns:
      All eight, each in the common shape of the arguments.

    Raises:
      ValueError: unless C <= N.

    Example:
      >>> problem = Problem(N=100, C=[5, 10, 30], S=600)
      >>> measured = costs([12, 6, 2], problem, B=[60, 30, 10], epochs=1)
      >>> measured.u.tolist(), measured.u_total.tolist(), measured.c.tolist()
      ([10.0, 20.0, 60.0], [120.0, 120.0, 120.0], [60.0, 60.0, 60.0])

    Reference: Pawlik, eqs. (1) to (8) (section 2.3).
    """
    N, C, S = problem.symbols("A trial", "N C S")
    R, B, epochs = in_range("A trial", problem, R=R, B=B, epochs=epochs)
    require("A trial", {"C <= N": C <= N}, C=C, N=N)
    g, u = C * epochs * S, epochs * S / B
    each = (g, R * g, epochs * S, R * g / N, u, R * u, R * C, R * C / N)
    return Costs(*np.broadcast_arrays(*each))
