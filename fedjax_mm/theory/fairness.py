"""Pawlik's fairness measures, the costs of a trial with cohorts (section 2.3, eqs. 1 to 8)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_mm.theory.problem import FloatArray, Problem, in_range, require


class Costs(NamedTuple):
    """Costs of a trial.

    Two trials are compared fairly with respect to the costs that they share.

    Attributes:
      g: example gradients per round, eq. (1).
      g_total: example gradients in all rounds, eq. (2), which misprints R g as R u.
      g_client: example gradients per round and cohort client (g'), eq. (3).
      g_client_total: expected example gradients per client in all rounds (g'_R), eq. (4).
      u: local updates per round and cohort client, eq. (5).
      u_total: local updates in all rounds, eq. (6).
      c: contacts with the server, eq. (7).
      c_client: expected contacts per client (c'), eq. (8).
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
    """Counts the gradients, updates and contacts of R rounds with cohorts of C of N clients.

    Args:
      R: the number of rounds.
      problem: uses N (the paper's K), C and S (the paper's N).
      B: the batch size.
      epochs: the local epochs per round (the paper's E).

    Returns:
      All eight costs, each with the broadcast shape of the arguments.

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
