"""Availability laws: random presence of clients, drawn before the cohort of a round is chosen."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from types import NoneType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.base import Round, Scalar
from fedjax_mm.base.calls import Part
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.checks.annotations import Count, Positive, part
from fedjax_mm.checks.instances import check_instance
from fedjax_mm.checks.values import check_numbers, described

Probability = Scalar | Float[Array, " clients"] | tuple[float, ...]
"""One number for all clients, or one per client; it may be traced."""


@dataclasses.dataclass(frozen=True, repr=False)
class Law(Part):
    """A random process of client availability.

    Attributes:
      init: makes the state before round 1 from a key and the number of clients.
      step: returns each client's presence in a round, ``bool[clients]``, and the new state, given a
        key, the round, the state and the number of clients.
      share: the long-run fraction of rounds in which a client is present; one number, or one per
        client.
      num_clients: N, if the law has one parameter per client.
      is_independent: whether presence is independent across clients and rounds.
    """

    init: Callable[[PRNGKeyArray, int], Any]
    step: Callable[[PRNGKeyArray, Round, Any, int], tuple[Bool[Array, " clients"], Any]]
    share: Probability
    num_clients: int | None = None
    is_independent: bool = False


@part
def bernoulli(probability: Probability) -> Law:
    """Each client is present with a given probability, independently of other clients and rounds.

    Args:
      probability: p; one number, or one per client.

    Raises:
      TypeError: if `probability` is not a number.
      ValueError: if a probability is not between 0 and 1.

    Example:
      >>> law = bernoulli(0.25)
      >>> present, _ = law.step(jax.random.key(0), 1, (), 1000)
      >>> present.shape, bool(200 < present.sum() < 300)
      ((1000,), True)
    """
    probability, number = check_probability("probability", probability)

    def step(
        rng_key: PRNGKeyArray, round: Round, state: tuple[()], num_clients: int
    ) -> tuple[Bool[Array, " clients"], tuple[()]]:
        del round
        return _draw(rng_key, probability, num_clients), state

    return Law(_no_state, step, probability, number, is_independent=True)


@part
def markov(comes: Probability, leaves: Probability) -> Law:
    """Each client alternates between present and absent, as a two-state Markov chain.

    The chain starts in its stationary distribution, so that the expected number of present clients
    is the same in all rounds. On average a client stays present for ``1 / leaves`` rounds and
    absent for ``1 / comes`` rounds.

    Args:
      comes: the probability that an absent client is present in the next round.
      leaves: the probability that a present client is absent in the next round.

    Raises:
      TypeError: if either is not a number.
      ValueError: if either is not between 0 and 1, or both are 0.

    Example:
      >>> law = markov(comes=0.2, leaves=0.1)
      >>> round(float(law.share), 3)
      0.667
    """
    (comes, first), (leaves, other) = (
        check_probability("comes", comes),
        check_probability("leaves", leaves),
    )
    sizes = {number for number in (first, other) if number is not None}
    if len(sizes) > 1:
        raise ValueError(
            f"comes and leaves are for {' and '.join(map(str, sorted(sizes)))} clients; give "
            "both the same number"
        )
    total = jnp.asarray(comes, float) + jnp.asarray(leaves, float)
    if not isinstance(total, jax.core.Tracer) and not np.all(np.asarray(total) > 0):
        raise ValueError(
            "comes and leaves are both 0, so no client ever changes; use "
            "bernoulli(probability), or make one of them positive"
        )
    share = jnp.asarray(comes, float) / total

    def init(rng_key: PRNGKeyArray, num_clients: int) -> Bool[Array, " clients"]:
        return _draw(rng_key, share, num_clients)

    def step(
        rng_key: PRNGKeyArray, round: Round, state: Bool[Array, " clients"], num_clients: int
    ) -> tuple[Bool[Array, " clients"], Bool[Array, " clients"]]:
        # The initial state is already stationary. Use it in round 1.
        chances: tuple[Any, Any] = (leaves, comes)
        changes = _draw(rng_key, jnp.where(state, *chances), num_clients)
        new = jnp.where(jnp.asarray(round) > 1, state ^ changes, state)
        return new, new

    return Law(init, step, share, next(iter(sizes), None))


@part
def cyclic(num_groups: Count) -> Law:
    """Cyclic participation: in round t only the clients of group ``(t - 1) mod G`` are present.

    Groups have nearly equal sizes. They and their order are drawn once per run, from its seed.

    Args:
      num_groups: G, at most the number of clients.

    Raises:
      ValueError: if `num_groups` is not positive, or, in a run, exceeds the number of clients.

    Example:
      >>> law = cyclic(3)
      >>> state = law.init(jax.random.key(0), 9)
      >>> rounds = [law.step(jax.random.key(0), t, state, 9)[0] for t in (1, 2, 3)]
      >>> sum(present.astype(int) for present in rounds).tolist()
      [1, 1, 1, 1, 1, 1, 1, 1, 1]

    Reference: Cho, Sharma, Joshi, Xu, Kale, Zhang, "On the Convergence of Federated Averaging with
    Cyclic Client Participation" (2023).
    """

    def init(rng_key: PRNGKeyArray, num_clients: int) -> Int[Array, " clients"]:
        if num_groups > num_clients:
            raise ValueError(f"num_groups is {num_groups}; there are {num_clients} clients only")
        group_key, order_key = jax.random.split(rng_key)
        # Shuffle the groups too. The first ones are larger if their sizes differ.
        order = permutation(order_key, num_groups)
        return order[permutation(group_key, num_clients) % num_groups]

    def step(
        rng_key: PRNGKeyArray, round: Round, state: Int[Array, " clients"], num_clients: int
    ) -> tuple[Bool[Array, " clients"], Int[Array, " clients"]]:
        del rng_key, num_clients
        return state == (jnp.asarray(round) - 1) % num_groups, state

    return Law(init, step, 1 / num_groups)


@part
def timetable(
    intervals: Sequence[Sequence[tuple[float, float]]], *, period: Positive | None = None
) -> Law:
    """Replays a trace of the availability of real devices.

    Args:
      intervals: for each client, the half-open intervals ``[start, end)`` in which it is present,
        in rounds, sorted and disjoint. Round 1 lasts from 0 to 1. A client is present in a round if
        it is present at the beginning of the round.
      period: the length after which the trace repeats. If not given, the trace does not repeat, and
        no client is present after the last interval. Shares of presence, which `unbiased` needs,
        count the rounds of a period, and are known only if it is a whole number.

    Raises:
      ValueError: if intervals are unsorted, overlapping or empty, or extend beyond the period.

    Example:
      >>> law = timetable([[(0, 2)], [(1, 3)]], period=4)
      >>> [law.step(jax.random.key(0), t, (), 2)[0].tolist() for t in (1, 2, 3, 4)]
      [[True, False], [True, True], [False, True], [False, False]]
    """
    remedy = "give the pairs (start, end) of each client, as in [[(0, 2)], [(1, 3)]]"
    check_instance("intervals", intervals, Collection, remedy)
    for k, each in enumerate(intervals):
        check_instance(f"intervals[{k}]", each, Collection, remedy)
    most = max(map(len, intervals), default=0)
    starts, ends = np.full((2, len(intervals), max(most, 1)), np.inf)
    for k, each in enumerate(intervals):
        _check_intervals(k, each, period)
        for i, (start, end) in enumerate(each):
            starts[k, i], ends[k, i] = start, end
    share = jnp.asarray(_share_of_rounds(starts, ends, period))
    table = jnp.asarray(starts, jnp.float32), jnp.asarray(ends, jnp.float32)

    def step(
        rng_key: PRNGKeyArray, round: Round, state: tuple[()], num_clients: int
    ) -> tuple[Bool[Array, " clients"], tuple[()]]:
        del rng_key, num_clients
        now = jnp.asarray(round, jnp.float32) - 1
        now = now if period is None else now % jnp.asarray(period, jnp.float32)
        first, last = table
        return jnp.any((first <= now) & (now < last), axis=1), state

    return Law(_no_state, step, share, len(intervals))


def share_of_examples(weights: Any, exponent: float = 1.0) -> Float[Array, " clients"]:
    """Availability that grows with dataset size, ``n_k^b / max_j n_j^b``.

    Args:
      weights: n_k of each client, ``float[clients]``, such as a row of `Look.weights`.
      exponent: b. If negative, clients with few examples are present more often; 0 makes all
        probabilities 1.

    Raises:
      ValueError: if a weight is not positive.

    Example:
      >>> share_of_examples([1.0, 2.0, 4.0]).tolist()
      [0.25, 0.5, 1.0]
      >>> share_of_examples([1.0, 2.0, 4.0], -1.0).tolist()
      [1.0, 0.5, 0.25]
    """
    check_numbers("weights", weights, lambda x: x > 0, "be positive", ndim=1)
    powers = jnp.asarray(weights, float) ** exponent
    return powers / powers.max()


def check_probability(name: str, value: Any) -> tuple[Any, int | None]:
    """Checks a probability, and returns it with its length, which is None for a scalar."""
    if not isinstance(value, jax.Array) and np.asarray(value).dtype.kind not in "iuf":
        raise TypeError(f"{name} is {described(value)}; give a number, or one for each client")
    ndim = min(np.ndim(value), 1)
    check_numbers(name, value, lambda p: (p >= 0) & (p <= 1), "lie between 0 and 1", ndim=ndim)
    value = jnp.asarray(value, float) if ndim else value
    return value, np.shape(value)[0] if ndim else None


def _no_state(rng_key: PRNGKeyArray, num_clients: int) -> tuple[()]:
    del rng_key, num_clients
    return ()


def _draw(rng_key: PRNGKeyArray, p: Any, num_clients: int) -> Bool[Array, " clients"]:
    # In float32, the draws of a seed are the same with and without x64.
    return jax.random.uniform(rng_key, (num_clients,), jnp.float32) < p


def _share_of_rounds(starts: np.ndarray, ends: np.ndarray, period: Any) -> np.ndarray:
    """Fraction of rounds in which each client is present, or NaN if it varies between periods."""
    if period is None or isinstance(period, jax.core.Tracer) or period != int(period):
        return np.full(len(starts), np.nan)
    now = np.arange(int(period))[:, None, None]
    return np.mean(((starts <= now) & (now < ends)).any(2), axis=0)


def _check_intervals(k: int, intervals: Any, period: Any) -> None:
    is_known = not isinstance(period, jax.core.Tracer | NoneType)
    last, limit = 0.0, period if is_known else np.inf
    for interval in intervals:
        if np.shape(interval) != (2,):
            raise ValueError(f"intervals[{k}] has {described(interval)}; give pairs (start, end)")
        start, end = interval
        if not last <= start < end:
            raise ValueError(
                f"intervals[{k}] has ({start:g}, {end:g}) after {last:g}; give pairs of a start "
                "and a later end, sorted and without overlaps, from 0 on"
            )
        last = end
    if last > limit:
        raise ValueError(f"intervals[{k}] ends at {last:g}, after the period of {limit:g}")
