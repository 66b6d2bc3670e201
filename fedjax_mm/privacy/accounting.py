"""Accounting for the privacy of clients over rounds and models, by the library dp-accounting."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

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
        every assignment. Cohorts of a fixed size have no amplification here.

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
    event = _event_of(assignment, num_rounds, sampling_rate)
    return float(_accountant().compose(event(float(noise_multiplier))).get_epsilon(delta))


@checked
def noise_for(
    assignment: Assignment,
    *,
    epsilon: Positive,
    num_rounds: Count,
    delta: Fraction,
    sampling_rate: float = 1.0,
) -> float:
    """Returns the least noise multiplier with which clients have an epsilon, but at least 0.1.

    The arguments are those of `epsilon`.

    Raises:
      UncoveredError, ValueError, ImportError: as `epsilon`.

    Example:
      >>> from fedjax_mm import mfa_rand
      >>> round(noise_for(mfa_rand(100, 2), epsilon=4.377178, num_rounds=100, delta=1e-5), 2)
      10.0
    """
    event, dp = _event_of(assignment, num_rounds, sampling_rate), _library()

    def is_enough(noise_multiplier: float) -> bool:
        spent = _accountant().compose(event(noise_multiplier)).get_epsilon(delta)
        return bool(spent <= epsilon)

    # Begin where the rounds together have a sensitivity of one deviation, because distributions of
    # far less noise take much time and memory.
    most = max(_LEAST_NOISE, sampling_rate * math.sqrt(num_rounds))
    while not is_enough(most):
        most *= 2
    least = most / 2
    while least > _LEAST_NOISE and is_enough(least):
        least, most = least / 2, least
    if least <= _LEAST_NOISE and is_enough(least):
        return least
    bracket = dp.ExplicitBracketInterval(least, most)
    return float(dp.calibrate_dp_mechanism(_accountant, event, float(epsilon), delta, bracket))


def _event_of(
    assignment: Assignment, num_rounds: int, sampling_rate: float
) -> Callable[[float], Any]:
    """Returns the mechanism of all rounds, as a function of the noise multiplier."""
    if not 0 < sampling_rate <= 1:
        raise ValueError(f"sampling_rate is {sampling_rate:g}; it must be positive and at most 1")
    dp, most = _library(), _most_models(check_assignment(assignment))

    def event(noise_multiplier: float) -> Any:
        one = dp.GaussianDpEvent(noise_multiplier / math.sqrt(most))
        if sampling_rate < 1:
            one = dp.PoissonSampledDpEvent(sampling_rate, one)
        return dp.SelfComposedDpEvent(one, num_rounds)

    return event


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


def _accountant() -> Any:
    _library()
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant()


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise ImportError("privacy needs pip install 'fedjax-mm[privacy]'") from error
    return dp_accounting
