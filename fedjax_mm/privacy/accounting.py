"""Accounting for the privacy of clients over rounds and models, by the library dp-accounting."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from scipy.optimize import brentq

from fedjax_mm.base import Assignment, Cohort, Look
from fedjax_mm.checked import Count, Fraction, Positive, checked
from fedjax_mm.parts import check_assignment

_TRIES = 4  # rounds in which the models of each client are counted
_LEAST_NOISE = 0.2  # with less, epsilon means nothing


class UncoveredError(ValueError):
    """Error of runs whose privacy no theorem here covers."""


@checked
def epsilon(
    assignment: Assignment,
    *,
    noise_multiplier: Positive,
    num_rounds: Count,
    delta: Fraction,
    sampling_rate: float = 1.0,
    cohort_size: Count | None = None,
) -> float:
    """Returns the epsilon that clients have after some rounds of `private`, at a delta.

    Neighbouring pools differ in one client, which is added or removed, and all models of all rounds
    are published. One client that trains one model a round changes all sums together by at most C,
    so that a round is *one* Gaussian mechanism of the noise multiplier z, regardless of the number
    of models. A client that trains K models a round counts as one of ``z / sqrt(K)``. Rounds are
    composed by the privacy loss distribution.

    Args:
      assignment: the choice of clients and models, which must not depend on their data.
      noise_multiplier: z of `private`, equal for all models.
      num_rounds: T.
      delta: of (epsilon, delta).
      sampling_rate: q, if each client takes part in each round independently with this probability,
        as in ``available(strategy, bernoulli(q))`` around a strategy of all clients. 1 is right for
        every assignment.
      cohort_size: n, if in each round a uniform set of n clients takes part, drawn anew, as in
        ``mfa_rand(N, M, cohort_size=n)``. Neighbouring pools then differ in the data of one
        client, which moves a sum by 2 C, and rounds are composed by Renyi divergences, which are
        looser; the result may exceed that without `cohort_size`.

    Raises:
      UncoveredError: if the assignment looks at losses, learns from reports, or gives clients
        factors.
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
    spent = _spent(assignment, num_rounds, delta, sampling_rate, cohort_size)
    return spent(float(noise_multiplier))


@checked
def noise_for(
    assignment: Assignment,
    *,
    epsilon: Positive,
    num_rounds: Count,
    delta: Fraction,
    sampling_rate: float = 1.0,
    cohort_size: Count | None = None,
) -> float:
    """Returns the least noise multiplier with which clients have an epsilon, to 1e-4.

    Epsilons of hundreds have noise of 0.1, below which nothing is tried.

    The arguments are those of `epsilon`.

    Raises:
      UncoveredError, ValueError, ImportError: as `epsilon`.

    Example:
      >>> from fedjax_mm import mfa_rand
      >>> round(noise_for(mfa_rand(100, 2), epsilon=4.377178, num_rounds=100, delta=1e-5), 2)
      10.0
    """
    spent = _spent(assignment, num_rounds, delta, sampling_rate, cohort_size)
    # Begin where the rounds together have a sensitivity of one deviation, because distributions of
    # far less noise take much time and memory.
    most = max(_LEAST_NOISE, sampling_rate * math.sqrt(num_rounds))
    while spent(most) > epsilon:
        most *= 2
    least = most / 2
    while least > _LEAST_NOISE and spent(least) <= epsilon:
        least, most = least / 2, least
    if spent(least) <= epsilon:
        return least
    found = brentq(lambda z: spent(z) - epsilon, least, most, xtol=1e-4)
    return float(found) if spent(found) <= epsilon else float(found) + 1e-4


def _spent(
    assignment: Assignment,
    num_rounds: int,
    delta: float,
    sampling_rate: float,
    cohort_size: int | None,
) -> Callable[[float], float]:
    """Returns the epsilon of all rounds as a function of the noise multiplier."""
    num_clients = check_assignment(assignment).num_clients
    if not 0 < sampling_rate <= 1:
        raise ValueError(f"sampling_rate is {sampling_rate:g}; it must be positive and at most 1")
    if cohort_size is not None and (sampling_rate < 1 or cohort_size > num_clients):
        raise ValueError(
            f"cohort_size is {cohort_size}; give at most num_clients = {num_clients}, and no "
            "sampling_rate"
        )
    dp, most = _library(), _most_models(assignment)

    def spent(noise_multiplier: float) -> float:
        z = noise_multiplier / math.sqrt(most)
        if cohort_size is not None:
            # Renyi accounting takes noise over sensitivity, and a replacement moves a sum by 2 C.
            one = dp.SampledWithoutReplacementDpEvent(
                num_clients, cohort_size, dp.GaussianDpEvent(z / 2)
            )
            accountant = _renyi()
        else:
            one, accountant = dp.GaussianDpEvent(z), _distributions()
            if sampling_rate < 1:
                one = dp.PoissonSampledDpEvent(sampling_rate, one)
        event = dp.SelfComposedDpEvent(one, num_rounds)
        return float(accountant.compose(event).get_epsilon(delta))

    return spent


def _most_models(assignment: Assignment) -> int:
    """Returns the most models that a client trains in a round, of an assignment without data.

    Raises:
      UncoveredError: if the assignment asks for data.
    """
    if assignment.observe is not None:
        _refuse("learns from the clients' reports")

    def asked() -> NoReturn:
        _refuse("looks at the clients' losses or updates")

    look = Look(*[lambda *_: asked()] * len(Look._fields))
    most, state = 1, assignment.init(jax.random.key(0))
    for t in range(1, 1 + _TRIES):
        cohort, state = assignment.assign(jax.random.key(t), t, state, look)
        if cohort.scale is not None:
            _refuse("gives clients factors")
        most = max(most, _repeats(cohort))
    return most


def _repeats(cohort: Cohort) -> int:
    clients = jnp.asarray(cohort.clients)[jnp.asarray(cohort.participates())].tolist()
    return max(Counter(clients).values(), default=1)


def _refuse(what: str) -> NoReturn:
    raise UncoveredError(
        f"epsilon is infinite: the assignment {what}, which is not accounted for; take one that "
        "depends on no data, such as mfa_rand or mfa_rr"
    )


def _distributions() -> Any:
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant()


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
