"""Accounting for the privacy of clients over rounds and models, by the library dp-accounting."""

import math
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import jax
from jaxtyping import PRNGKeyArray
from scipy.optimize import brentq

from fedjax_mm.base import Assignment, Look, Sampling
from fedjax_mm.checked import Count, Fraction, Positive, checked
from fedjax_mm.parts import check_assignment

_LEAST_NOISE, _MOST_NOISE = 0.2, 1e6  # with less, epsilon means nothing


class UncoveredError(ValueError):
    """Error of runs whose privacy no theorem here covers."""


@checked
def epsilon(
    assignment: Assignment,
    *,
    noise_multiplier: Positive,
    num_rounds: Count,
    delta: Fraction,
    neighbors: Literal["zero", "replace"] = "zero",
) -> float:
    """Returns the epsilon that clients have after some rounds of `private`, at a delta.

    All models of all rounds are published. One client that trains one model a round changes all
    sums together by at most C, so that a round is *one* Gaussian mechanism of the noise multiplier
    z, regardless of the number of models. A client that trains K models a round counts as one of
    ``z / sqrt(K)``. K and the sampling of clients are those of `Assignment.sampling`; without it, K
    is the number of models, and every round counts in full.

    Args:
      assignment: the choice of clients and models, which must not depend on their data.
      noise_multiplier: z of `private`, equal for all models.
      num_rounds: T.
      delta: of (epsilon, delta).
      neighbors: "zero": the contributions of one client are replaced by zeros, and the assignment
        stays as it is. Sampling amplifies if clients take part independently, as in
        ``available(full_participation(N), bernoulli(q))``. "replace": the data of one client are
        replaced, which moves a sum by 2 C. Sampling amplifies if a uniform set of clients is drawn
        anew in every round, as in ``mfa_rand(N, M, cohort_size=n)``. Epsilons of the two kinds
        cannot be compared. Rounds are composed by
        privacy loss distributions, and those with such sets by Renyi divergences.

    Raises:
      UncoveredError: if the assignment looks at losses, or learns from reports.
      ValueError: if a number is out of its range.
      ImportError: if dp-accounting is not installed.

    Example:
      >>> from fedjax_mm import mfa_rand
      >>> round(epsilon(
      ...     mfa_rand(100, 2), noise_multiplier=10.0, num_rounds=100, delta=1e-5), 3)
      4.377

    Reference: McMahan et al. (2018); Meiser, Mohammadi, "Tight on Budget? Tight Bounds for r-Fold
    Approximate Differential Privacy" (2018).
    """
    return _spent(assignment, num_rounds, delta, neighbors)(float(noise_multiplier))


@checked
def noise_for(
    assignment: Assignment,
    *,
    epsilon: Positive,
    num_rounds: Count,
    delta: Fraction,
    neighbors: Literal["zero", "replace"] = "zero",
) -> float:
    """Returns the least noise multiplier with which clients have an epsilon, to 1e-4.

    Epsilons of hundreds have noise of 0.1, below which nothing is tried.
    The arguments are those of `epsilon`.

    Raises:
      UncoveredError, ValueError, ImportError: as `epsilon`; also if no noise reaches it.

    Example:
      >>> from fedjax_mm import mfa_rand
      >>> round(noise_for(mfa_rand(100, 2), epsilon=4.377178, num_rounds=100, delta=1e-5), 2)
      10.0
    """
    spent = _spent(assignment, num_rounds, delta, neighbors)
    # Begin where the rounds together have a sensitivity of one deviation, because distributions of
    # far less noise take much time and memory.
    rate = assignment.sampling.rate if assignment.sampling else 1.0
    most = max(_LEAST_NOISE, rate * math.sqrt(num_rounds))
    while spent(most) > epsilon:
        most *= 2
        if most > _MOST_NOISE:
            raise ValueError(f"no noise gives epsilon = {epsilon:g} at delta = {delta:g}")
    least = most / 2
    while least > _LEAST_NOISE and spent(least) <= epsilon:
        least, most = least / 2, least
    if spent(least) <= epsilon:
        return least
    found = brentq(lambda z: spent(z) - epsilon, least, most, xtol=1e-4)
    return float(found) if spent(found) <= epsilon else float(found) + 1e-4


def _spent(
    assignment: Assignment, num_rounds: int, delta: float, neighbors: str
) -> Callable[[float], float]:
    """Returns the epsilon of all rounds as a function of the noise multiplier."""
    dp, sampling = _library(), _sampling_of(check_assignment(assignment))
    replaces = neighbors == "replace"

    def of_rounds(accountant: Any, one: Any) -> float:
        return float(accountant.compose(dp.SelfComposedDpEvent(one, num_rounds)).get_epsilon(delta))

    def spent(noise_multiplier: float) -> float:
        z = noise_multiplier / math.sqrt(sampling.most_models)
        one = dp.GaussianDpEvent(z)
        if not replaces and sampling.rate < 1:
            one = dp.PoissonSampledDpEvent(sampling.rate, one)
        found = of_rounds(_distributions(replaces), one)
        if not replaces or sampling.cohort_size is None:
            return found
        # Renyi accounting takes noise over sensitivity, and a replacement moves a sum by 2 C. It is
        # so loose that with little noise the epsilon without sampling is smaller.
        sizes = assignment.num_clients, sampling.cohort_size
        sampled = dp.SampledWithoutReplacementDpEvent(*sizes, dp.GaussianDpEvent(z / 2))
        return min(found, of_rounds(_renyi(), sampled))

    return spent


def _sampling_of(assignment: Assignment) -> Sampling:
    """Returns the law of participation of an assignment without data.

    Raises:
      UncoveredError: if the assignment asks for data.
    """
    if assignment.observe is not None:
        _refuse("learns from the clients' reports")

    def asked() -> NoReturn:
        _refuse("looks at the clients' losses or updates")

    def one_round(rng_key: PRNGKeyArray) -> Any:
        look = Look(*[lambda *_: asked()] * len(Look._fields))
        return assignment.assign(rng_key, 1, assignment.init(rng_key), look)

    jax.eval_shape(one_round, jax.random.key(0))
    return assignment.sampling or Sampling(assignment.num_models)


def _refuse(what: str) -> NoReturn:
    raise UncoveredError(
        f"epsilon is infinite: the assignment {what}, which is not accounted for; take one that "
        "depends on no data, such as mfa_rand or mfa_rr"
    )


def _distributions(replaces: bool) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import PLDAccountant

    one, other = NeighboringRelation.REPLACE_ONE, NeighboringRelation.ADD_OR_REMOVE_ONE
    return PLDAccountant(neighboring_relation=one if replaces else other)


def _renyi() -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    return RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise ImportError("privacy needs pip install 'fedjax-mm[privacy]'") from error
    return dp_accounting
