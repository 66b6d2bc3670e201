"""Accounting of client-level privacy over rounds and models, using dp-accounting."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NoReturn

import jax
from annotated_types import Gt, Interval
from jaxtyping import PRNGKeyArray
from scipy.optimize import brentq

from fedjax_mm.base import Assignment, Look, Sampling
from fedjax_mm.checks.annotations import Count, Fraction, check_argument, checked
from fedjax_mm.checks.instances import check_assignment

_LEAST_NOISE, _MOST_NOISE = 0.2, 1e6  # epsilon is meaningless below the least noise
_INTERVAL, _MOST_INTERVALS = 1e-4, 1e5  # of the losses in a distribution
_MOST_LOSS, _MOST_ROUNDS = 1e6, 10**6  # beyond these the accountant overflows, or takes minutes


class UncoveredError(ValueError):
    """Raised for an assignment to which none of the privacy theorems in this module applies."""


@checked
def epsilon(
    assignment: Assignment,
    *,
    noise_multiplier: Annotated[float, Gt(0)],
    num_rounds: Count,
    delta: Fraction,
    neighbors: Literal["zero", "replace"] = "zero",
) -> float:
    """Returns the client-level epsilon of a run with `private`, at a given delta.

    The models of all rounds are assumed to be published. If a client trains one model per round, it
    changes all sums together by at most C, so a round is *one* Gaussian mechanism with noise
    multiplier z, regardless of the number of models. If it trains K models per round, the noise
    multiplier is ``z / sqrt(K)``. `Assignment.sampling` states K and the sampling of clients, and
    without it nothing is known.

    Args:
      assignment: chooses clients and models; it must not depend on their data.
      noise_multiplier: z of `private`, the same for all models.
      num_rounds: T, the number of rounds.
      delta: the delta of (epsilon, delta).
      neighbors: "zero" replaces one client's contributions with zeros and keeps the assignment.
        Sampling amplifies privacy if clients participate independently, as in
        ``available(full_participation(N), bernoulli(q))``. "replace" replaces one client's data,
        which moves a sum by up to 2 C. Sampling amplifies privacy if every round draws a new
        uniform cohort, as in ``mfa_rand(N, M, cohort_size=n)``. The two kinds of epsilon are not
        comparable. Rounds are composed using privacy loss distributions, or Renyi divergences for
        uniform cohorts.

    Raises:
      UncoveredError: if the assignment reads losses, learns from reports or states no sampling.
      ValueError: if a number is out of its range, or epsilon is too large to compute.
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
    epsilon: Annotated[float, Interval(gt=0, le=10_000)],
    num_rounds: Count,
    delta: Fraction,
    neighbors: Literal["zero", "replace"] = "zero",
) -> float:
    """Returns the smallest noise multiplier that reaches an epsilon, to within 1e-4.

    Noise multipliers below 0.1, where epsilon is in the hundreds, are not tried. The arguments are
    those of `epsilon`, whose value is at most 10,000.

    Raises:
      UncoveredError, ValueError, ImportError: as for `epsilon`, or if no noise multiplier suffices.

    Example:
      >>> from fedjax_mm import mfa_rand
      >>> round(noise_for(mfa_rand(100, 2), epsilon=4.377178, num_rounds=100, delta=1e-5), 2)
      10.0
    """
    spent = _spent(assignment, num_rounds, delta, neighbors)
    # Start where all rounds together have a sensitivity of one standard deviation. Loss
    # distributions with much less noise take a lot of time and memory.
    most = max(_LEAST_NOISE, sampling_of(assignment).rate * math.sqrt(num_rounds))
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
    """Function from the noise multiplier to the epsilon of all rounds."""
    dp, sampling = _library(), sampling_of(check_assignment(assignment))
    replaces = neighbors == "replace"

    # A replacement is accounted without the independence of clients.
    rate = 1.0 if replaces else sampling.rate

    def of_rounds(accountant: Any, one: Any) -> float:
        return float(accountant.compose(dp.SelfComposedDpEvent(one, num_rounds)).get_epsilon(delta))

    @functools.cache
    def spent(noise_multiplier: float) -> float:
        z = noise_multiplier / math.sqrt(sampling.most_models)
        one, loss = dp.GaussianDpEvent(z), _loss(z / (1 + replaces), rate, num_rounds)
        if loss > _MOST_LOSS or (rate < 1 and num_rounds > _MOST_ROUNDS):
            raise ValueError(
                f"noise_multiplier is {noise_multiplier:g} for {num_rounds:,} rounds, too little "
                "or too long to compute epsilon; give more noise, which protects, or fewer rounds"
            )
        if rate < 1:
            one = dp.PoissonSampledDpEvent(rate, one)
        # Bound the work by wider intervals of larger losses. Epsilon remains an upper bound.
        interval = max(_INTERVAL, loss / _MOST_INTERVALS)
        found = of_rounds(_distributions(replaces, interval), one)
        if not replaces or sampling.cohort_size is None:
            return found
        # The Renyi accountant takes the ratio of noise to sensitivity, and a replacement moves a
        # sum by up to 2 C, hence z / 2. With little noise the bound with sampling is looser than
        # the one without, hence the minimum.
        sizes = assignment.num_clients, sampling.cohort_size
        sampled = dp.SampledWithoutReplacementDpEvent(*sizes, dp.GaussianDpEvent(z / 2))
        return min(found, of_rounds(_renyi(), sampled))

    return spent


def spent_on(z: float, number: int, steps: Mapping[int, int], delta: float) -> float:
    """Epsilon of steps that sum clipped gradients of a client's examples, of which one is replaced.

    Args:
      z: the deviation of the noise in a sum, divided by the norm of clipping.
      number: the number of examples.
      steps: the number of steps by the number of examples that they draw without replacement.
      delta: the delta of (epsilon, delta).
    """
    dp, total = _library(), sum(steps.values())
    loss = _loss(z / 2, 1.0, total)
    if loss > _MOST_LOSS:
        raise ValueError(
            f"noise_multiplier is {z:g} for {total:,} steps, too little to compute epsilon; give "
            "more noise, or fewer steps"
        )
    interval = max(_INTERVAL, loss / _MOST_INTERVALS)
    all_examples = _distributions(True, interval)
    all_examples.compose(dp.SelfComposedDpEvent(dp.GaussianDpEvent(z), total))
    found = float(all_examples.get_epsilon(delta))
    if set(steps) == {number}:
        return found
    # As above, the Renyi accountant takes the ratio of noise to the sensitivity 2 C.
    sampled = _renyi()
    for size, count in steps.items():
        one = dp.SampledWithoutReplacementDpEvent(number, size, dp.GaussianDpEvent(z / 2))
        sampled.compose(dp.SelfComposedDpEvent(one, count))
    return min(found, float(sampled.get_epsilon(delta)))


def sampling_of(assignment: Assignment) -> Sampling:
    """Sampling law that an assignment states.

    Raises:
      UncoveredError: if the assignment depends on data, or states nothing.
    """
    if assignment.mix is not None:
        _refuse("mixes models")
    if assignment.observe is not None:
        _refuse("learns from the clients' reports")

    def asked() -> NoReturn:
        _refuse("looks at the clients' losses or updates")

    def one_round(rng_key: PRNGKeyArray) -> Any:
        look = Look(**{name: lambda *_: asked() for name in Look._fields if name != "active"})
        return assignment.assign(rng_key, 1, assignment.init(rng_key, look), look)

    jax.eval_shape(one_round, jax.random.key(0))
    sampling = assignment.sampling
    if sampling is None:
        _refuse(
            "states no sampling, which _replace drops",
            ", or state it: assignment.sampled(Sampling(K))",
        )
    check_argument("sampling.most_models", sampling.most_models, Count)
    check_argument("sampling.rate", sampling.rate, Annotated[float, Interval(gt=0, le=1)])
    return sampling


def _refuse(what: str, remedy: str = "") -> NoReturn:
    raise UncoveredError(
        f"epsilon is infinite: the assignment {what}, which is not accounted for; use one that "
        f"does not depend on data, such as mfa_rand or mfa_rr{remedy}"
    )


def _loss(z: float, rate: float, num_rounds: int) -> float:
    """Approximately the largest privacy loss that matters, with six standard deviations."""
    if rate == 1:
        return num_rounds / (2 * z**2) + 6 * math.sqrt(num_rounds) / z
    # The mean loss of a round is at most q / (2 z^2), and at most the chi-square divergence.
    mean = rate * min(1 / (2 * z**2), rate * math.expm1(min(z**-2, 700)))
    return max(1 / (2 * z**2) + 6 / z, num_rounds * mean)


def _distributions(replaces: bool, interval: float) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import PLDAccountant

    one, other = NeighboringRelation.REPLACE_ONE, NeighboringRelation.ADD_OR_REMOVE_ONE
    return PLDAccountant(one if replaces else other, interval)


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
