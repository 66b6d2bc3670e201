"""Problem and Rate: the symbols of all theorems, and checks of ranges and hypotheses.

The papers use different symbols for the same quantity, but this package uses only one. A statement
uses the problem's symbols that occur in its formula, and ignores the others except for their
shapes. If a hypothesis does not hold or a symbol is missing, the statement raises a `ValueError`
that names it.

Symbols that are separate arguments:

    t  round, from 1; w_1 is the start, so that w_{t+1} is the model after round t
    T  iterations or rounds in total        l  frame of M rounds, l = 1 + floor((t - 1) / M)
    D  E|w_1 - w*|^2                        Delta, Delta_1  E|w - w*| in a round, at the start
    V  of the sample-size condition (31)    N_s  examples of a client used in a round
    R  rounds (Pawlik has S)                epsilon  error to reach
    eta  rate of a round (alpha_l in proofs of Bhuyan et al.); eta_l, eta_g  local, global rate
    gamma  outside of Rate: learning rate of Pawlik, standard deviation in appendix A of Cho et al.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray: TypeAlias = NDArray[np.float64]
"""An array of numbers."""

# Ranges of symbols. Rate checks its own two symbols, because its gamma may be negative, and its
# beta is not the dissimilarity, which is at least 1.
_AT_LEAST = {
    **dict.fromkeys(("N", "M", "E", "C", "S", "beta", "beta_2"), 1),
    **dict.fromkeys(
        ("Gamma", "G", "Z", "sigma", "gap", "beta_1", "kappa", "zeta", "delta", "H"), 0
    ),
    **dict.fromkeys(("t", "T", "R", "cost", "num_frames"), 1),
    **dict.fromkeys(("D", "Delta", "Delta_1", "V", "N_s", "gamma_G", "gamma_hat_G"), 0),
}
_ABOVE = {
    **dict.fromkeys(("mu", "L", "L_c"), 0),
    **dict.fromkeys(("eta", "eta_l", "eta_g", "gamma", "epsilon", "constant", "B", "epochs"), 0),
}
_COUNTS = ("N", "M", "E", "C", "S")  # must be whole numbers
# Other names for the symbols, used in papers or by users.
_ALSO = {"tau": "E", "I": "E", "m": "C", "n_k": "S", "L_s": "L", "sigma_g": "sigma"}


class HypothesisError(ValueError):
    """A hypothesis of a statement that does not hold."""


def require(statement: str, hypotheses: Mapping[str, ArrayLike], **given: ArrayLike) -> None:
    """Raises a `HypothesisError` that names the first hypothesis that does not hold everywhere.

    Args:
      statement: the name of the statement, as in "Theorem 1".
      hypotheses: whether each hypothesis holds, by its printed form.
      **given: numbers by symbol. The message lists those in the failed hypothesis.

    Example:
      >>> require("Theorem 1", {"mu <= L": 0.2 <= 0.1}, mu=0.2, L=0.1)
      Traceback (most recent call last):
        ...
      fedjax_mm.theory.problem.HypothesisError: Theorem 1 needs mu <= L; given mu = 0.2, L = 0.1
    """
    for name, holds in hypotheses.items():
        # Comparisons with NaN are false, so NaN fails like a number out of range.
        if not np.all(holds):
            mentioned = [word for word in dict.fromkeys(re.findall(r"\w+", name)) if word in given]
            numbers = ", ".join(f"{word} = {_in_short(given[word])}" for word in mentioned)
            raise HypothesisError(f"{statement} needs {name}; given {numbers}")


def _in_short(value: ArrayLike) -> str:
    numbers = np.asarray(value)
    if numbers.ndim == 0:
        return f"{numbers:.6g}"
    return f"{numbers.min():.6g} to {numbers.max():.6g}"


def in_range(statement: str, /, *known: "Problem | Rate", **given: ArrayLike) -> list[FloatArray]:
    """Checks the ranges of numbers, and returns them as arrays in the given order.

    They must broadcast with each other and with the symbols of a given problem and rate.

    Example:
      >>> in_range("Lemma 2", E=5, Delta=-1.0)
      Traceback (most recent call last):
        ...
      fedjax_mm.theory.problem.HypothesisError: Lemma 2 needs Delta >= 0; given Delta = -1
    """
    numbers = {symbol: np.asarray(value, np.float64) for symbol, value in given.items()}
    for symbol, value in numbers.items():
        if symbol in _AT_LEAST:
            hypothesis = {f"{symbol} >= {_AT_LEAST[symbol]}": value >= _AT_LEAST[symbol]}
        else:
            hypothesis = {f"{symbol} > {_ABOVE[symbol]}": value > _ABOVE[symbol]}
        require(statement, hypothesis, **{symbol: value})
    shapes: dict[str, ArrayLike] = {**numbers}
    for part in known:
        if isinstance(part, Problem):
            shapes |= part.given()
        elif isinstance(part, Rate):  # `Rate.of` rejects anything else
            shapes |= {"beta of the rate": part.beta, "gamma of the rate": part.gamma}
    _check_shapes(statement, shapes)
    return list(numbers.values())


def _check_shapes(statement: str, numbers: Mapping[str, ArrayLike]) -> None:
    shapes = {symbol: np.shape(value) for symbol, value in numbers.items() if np.ndim(value)}
    try:
        np.broadcast_shapes(*shapes.values())
    except ValueError:
        listed = ", ".join(f"{symbol} of shape {shape}" for symbol, shape in shapes.items())
        raise ValueError(
            f"{statement} needs arrays that broadcast; given {listed}; for all combinations give "
            "each an axis of its own: several M with rounds t are a column, M=[[1], [2], [5]]"
        ) from None


class _KnownSymbols:
    """A dataclass that suggests the closest field for an unknown one."""

    def __new__(cls, **given: ArrayLike) -> Self:
        known = [field.name for field in dataclasses.fields(cast("Any", cls))]
        for name in given.keys() - set(known):
            raise TypeError(f"{cls.__name__} has no symbol {name}; {_hint(name, known)}")
        return super().__new__(cls)


def _hint(name: str, known: Sequence[str]) -> str:
    if name in _ABOVE or name in _AT_LEAST:
        return "it is an argument of statements, or of Rate"
    lower = {symbol.lower(): symbol for symbol in known}
    close = difflib.get_close_matches(name.lower(), lower, 1, 0.8)
    like = _ALSO.get(name) or next(map(lower.get, close), None)
    return f"did you mean {like}?" if like else f"give any of {', '.join(known)}"


# Do not generate __eq__, because it would raise for arrays, which have no truth value.
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Problem(_KnownSymbols):
    """Constants of a federated problem and its training.

    Give the constants that a statement needs. All may be arrays, which broadcast. A statement about
    all models at once (a minimum or maximum over m in the paper) applies to all entries of the
    arrays.

    Attributes:
      N: the number of clients (M in Cho et al.).
      M: the number of models, and of rounds in a frame.
      E: the number of local steps per client and round (tau in Cho et al., I and T in Pawlik).
      C: the cohort size, the number of clients per round (m in Cho et al.).
      S: the number of examples of a client.
      mu: the strong convexity constant of every client's loss.
      L: the smoothness constant of every client's loss (L_s in Cho et al.).
      L_c: the Lipschitz constant of every client's loss.
      Gamma: F* - mean of F_k*, the heterogeneity.
      G: a bound on gradient norms over clients, local and global iterates.
      Z: a bound on the root mean square over clients of |G_i - G_bar| / E, where G_i is the sum of
        a client's gradients in a round and G_bar the mean over clients; G is such a bound.
      sigma: a bound on the standard deviation of stochastic gradients (sigma_g in Cho et al.), 0
        for full gradients. For Bhuyan et al. it is sqrt(mean over clients of sigma_k^2), at most 2
        sqrt(beta_1 + beta_2 G^2).
      beta_1: |grad f_ky|^2 <= beta_1 + beta_2 |grad F_k|^2 for every example, Assumption 4.
      beta_2: see beta_1.
      beta: mean |grad F_k|^2 <= beta^2 |grad F|^2 + kappa^2, the dissimilarity of Cho et al.
      kappa: see beta.
      gap: the initial objective minus its infimum.
      zeta, delta, H: see `fedjax_mm.theory.constants.Heterogeneity`.

    Raises:
      TypeError: for an unknown symbol, suggesting the closest one.
      ValueError: if a symbol is out of range or arrays do not broadcast.

    Example:
      >>> Problem(N=24, E=[1, 5], mu=0.0)
      Traceback (most recent call last):
        ...
      fedjax_mm.theory.problem.HypothesisError: Problem needs mu > 0; given mu = 0
    """

    N: ArrayLike | None = None
    M: ArrayLike | None = None
    E: ArrayLike | None = None
    C: ArrayLike | None = None
    S: ArrayLike | None = None
    mu: ArrayLike | None = None
    L: ArrayLike | None = None
    L_c: ArrayLike | None = None
    Gamma: ArrayLike | None = None
    G: ArrayLike | None = None
    Z: ArrayLike | None = None
    sigma: ArrayLike | None = None
    beta_1: ArrayLike | None = None
    beta_2: ArrayLike | None = None
    beta: ArrayLike | None = None
    kappa: ArrayLike | None = None
    gap: ArrayLike | None = None
    zeta: ArrayLike | None = None
    delta: ArrayLike | None = None
    H: ArrayLike | None = None

    def __post_init__(self) -> None:
        """Checks the ranges."""
        in_range("Problem", **self.given())

    def given(self) -> dict[str, ArrayLike]:
        """The given numbers by symbol."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def symbols(self, statement: str, names: str, *, real: str = "") -> list[FloatArray]:
        """Symbols with the given space-separated names, in order.

        Counts must be integers, except the one named by `real`, which a statement interpolates.

        Example:
          >>> Problem(N=24, E=5).symbols("Theorem 1", "N E G")
          Traceback (most recent call last):
            ...
          ValueError: Theorem 1 needs G; give Problem(..., G=...)
        """
        values = [getattr(self, name) for name in names.split()]
        for name, value in zip(names.split(), values, strict=True):
            if value is None:
                raise ValueError(f"{statement} needs {name}; give Problem(..., {name}=...)")
        numbers = [np.asarray(value, np.float64) for value in values]
        for name, number in zip(names.split(), numbers, strict=True):
            if name in _COUNTS and name != real:
                is_whole = np.floor(number) == number
                require(statement, {f"{name} = 1, 2, ...": is_whole}, **{name: number})
        return numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Rate:
    """Learning rate of Theorems 1 and 2 of Bhuyan et al., ``beta / (time + gamma)``.

    Attributes:
      beta: the numerator, above 0.
      gamma: the offset, above -1.

    Raises:
      ValueError: if a symbol is out of range.

    Example:
      >>> Rate(beta=30.0, gamma=99.0).at(np.array([1, 21])).tolist()
      [0.3, 0.25]
    """

    beta: ArrayLike
    gamma: ArrayLike

    def __post_init__(self) -> None:
        """Checks the ranges."""
        beta, gamma = self.symbols()
        _check_shapes("Rate", {"beta": beta, "gamma": gamma})
        require("Rate", {"beta > 0": beta > 0, "gamma > -1": gamma > -1}, beta=beta, gamma=gamma)

    def symbols(self) -> tuple[FloatArray, FloatArray]:
        """Beta and gamma."""
        return np.asarray(self.beta, np.float64), np.asarray(self.gamma, np.float64)

    @classmethod
    def of(cls, given: Any, statement: str) -> "Rate":
        """Checks the type of the given rate, and returns it.

        Raises:
          TypeError: if it is not a `Rate` but, for example, a number.
        """
        if not isinstance(given, cls):
            remedy = "give Rate(beta=..., gamma=...), which decays as the theorem requires"
            raise TypeError(f"{statement} needs a Rate, not {given!r}; {remedy}")
        return given

    def at(self, time: ArrayLike) -> FloatArray:
        """The rate at a time, which is a round or a frame."""
        beta, gamma = self.symbols()
        return beta / (np.asarray(time, np.float64) + gamma)
