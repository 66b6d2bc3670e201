"""The symbols of Bhuyan, Moharir and Joshi, and what every statement asks of each by itself.

    N      clients                          t      round, 1, 2, ...; w_1 is the start, so that the
    M      models                                  model after round t is w_{t+1}
    E      local steps                      l      frame of M rounds, l = 1 + floor((t - 1) / M)
    S      examples of a client             N_s    examples of it used in a round
    mu, L  strong convexity, smoothness     beta, gamma  of the rate, as in beta / (t + gamma)
    Gamma  F* - mean of F_k*                eta    rate of a round (alpha_l in the paper's proofs)
    G      bound of the gradients' norm over clients, local and global iterates, Assumption 3
    sigma  noise of the gradients: sqrt(mean over clients of sigma_k^2); 0 for full gradients, and
           never more than 2 sqrt(beta_1 + beta_2 G^2)
    beta_1, beta_2  of Assumption 4         V      of the sample-size condition of Theorem 2
    D      E|w_1 - w*|^2                    Delta, Delta_1  E|w - w*| in a round, at the start

All of them may be arrays, which broadcast. Statements about all models at once (a minimum or a
maximum over m in the paper) are about all entries of the arrays.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_mm.theory.hypotheses import require

Numbers = NDArray[np.float64]

AT_LEAST = {
    **dict.fromkeys(("t", "T", "N", "M", "E", "S", "beta_2", "num_frames"), 1),
    **dict.fromkeys(("Gamma", "G", "sigma", "D", "Delta", "Delta_1", "V", "N_s", "beta_1"), 0),
}
ABOVE = {**dict.fromkeys(("mu", "L", "beta", "eta", "epsilon", "constant"), 0), "gamma": -1}


def admissible(statement: str, **given: ArrayLike) -> list[Numbers]:
    """The numbers as arrays, in the order given, each in its symbol's range.

    Args:
      statement: who asks, as in "Theorem 1".
      **given: numbers by their symbols.

    Raises:
      ValueError: naming the first symbol that is out of its range.

    Example:
      >>> admissible("Lemma 2", E=5, Delta=-1.0)
      Traceback (most recent call last):
        ...
      ValueError: Lemma 2 needs Delta >= 0; given Delta = -1
    """
    numbers = {symbol: np.asarray(value, np.float64) for symbol, value in given.items()}
    for symbol, value in numbers.items():
        if symbol in AT_LEAST:
            least = AT_LEAST[symbol]
            require(statement, {f"{symbol} >= {least}": value >= least}, **{symbol: value})
        else:
            bound = ABOVE[symbol]
            require(statement, {f"{symbol} > {bound}": value > bound}, **{symbol: value})
    return list(numbers.values())
