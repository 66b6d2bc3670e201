"""Rules of robust aggregation: functions of the updates of all participants.

A rule gets one row of each array per slot of the cohort. Rows without a participant are padding:
their numbers are 0, and no rule may depend on how many there are. The number n of participants may
be traced. Ties go to the lower slot.

Axes:  ``slots`` of a model's cohort · ``d`` numbers of an update, as one vector
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
from annotated_types import Interval
from jax import lax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedjax_mm.base import Steps, Task
from fedjax_mm.base.calls import Part
from fedjax_mm.base.sums import root as root_of
from fedjax_mm.checks.annotations import Count, Positive, TracedCount, part
from fedjax_mm.checks.instances import check_instance, check_task
from fedjax_mm.tools.selection import argsort_rows, kth_largest, sort_rows

Attackers = Annotated[Steps, Interval(ge=0, lt=2**31)]
"""The number of attackers that a rule tolerates, which may be traced."""

HalfShare = Annotated[float | Float[Array, ""], Interval(ge=0, lt=0.5)]
"""A fraction below one half, which may be traced."""


AggregateFn: TypeAlias = Callable[
    [
        PRNGKeyArray | None,
        Float[Array, "slots d"],
        Float[Array, " slots"],
        Bool[Array, " slots"],
        Any,
    ],
    tuple[Float[Array, " d"], Any],
]
"""``(rng_key, updates, weights, participates, state) -> (update, state)``"""


def _no_state(zero: Float[Array, " d"]) -> Any:
    del zero
    return ()


@dataclasses.dataclass(frozen=True, repr=False)
class Rule(Part):
    """A rule of aggregation, for `robust`.

    Attributes:
      aggregate: ``(rng_key, updates, weights, participates, state) -> (update, state)``. Updates
        are divided by the clients' weights n_k.
      least: the least number of participants. With fewer the model keeps its parameters.
      init: makes the rule's state from a zero vector like an update; ``()`` is an empty state.
      root: the server's own data, as a task whose client 0 has them; then the state is the server's
        own update on them in this round. None means that the server has no data.
    """

    aggregate: AggregateFn
    least: Steps = 1
    init: Callable[[Float[Array, " d"]], Any] = _no_state
    root: Task | None = None


@part
def mean(*, weighted: bool = True) -> Rule:
    """The mean ``sum_i a_i x_i / sum_i a_i``, which is the default of every algorithm.

    It needs the memory of a rule, so use it only to compare with others, or with attacks that need
    all updates.

    Args:
      weighted: whether a_i is the client's weight, rather than 1.

    Example:
      >>> x, here = jnp.array([[1.0, 1.0], [2.0, 4.0]]), jnp.array([True, True])
      >>> mean().aggregate(None, x, jnp.array([3.0, 1.0]), here, ())[0].tolist()
      [1.25, 1.75]
    """

    def aggregate(rng_key: Any, x: Any, weights: Any, here: Any, state: Any) -> Any:
        del rng_key
        return _mean_of(x, here, weights if weighted else 1), state

    return Rule(aggregate)


@part
def median() -> Rule:
    """The median of each coordinate, the mean of the two middle values for an even number.

    Example:
      >>> x = jnp.array([[1.0, 1], [2, 1], [1, 3], [2, 2], [10, -10]])
      >>> median().aggregate(None, x, jnp.ones(5), jnp.ones(5, bool), ())[0].tolist()
      [2.0, 1.0]

    Reference: Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards
    Optimal Statistical Rates" (2018).
    """

    def aggregate(rng_key: Any, x: Any, weights: Any, here: Any, state: Any) -> Any:
        del rng_key, weights
        return _median_of(x, here), state

    return Rule(aggregate)


@part
def trimmed_mean(num_trimmed: Attackers | None = None, *, share: HalfShare | None = None) -> Rule:
    """The mean of each coordinate without its b lowest and its b highest values.

    Args:
      num_trimmed: b. It needs ``n > 2 b`` participants.
      share: beta, for ``b = floor(beta n + 1e-4)``, because in float32 beta n may lie a little
        below a whole number; give it instead of `num_trimmed`.

    Raises:
      ValueError: if both or neither are given, or a number is out of range.

    Example:
      >>> x = jnp.array([[1.0], [2], [5], [9], [-40]])
      >>> trimmed_mean(2).aggregate(None, x, jnp.ones(5), jnp.ones(5, bool), ())[0].tolist()
      [2.0]

    Reference: Yin et al. (2018).
    """
    if (num_trimmed is None) == (share is None):
        given = "neither num_trimmed nor share is" if share is None else "num_trimmed and share are"
        raise ValueError(f"{given} given; give one, such as trimmed_mean(2) for two attackers")

    def aggregate(rng_key: Any, x: Any, weights: Any, here: Any, state: Any) -> Any:
        del rng_key, weights
        n = jnp.sum(here)
        # In float32 beta n may lie a little below a whole number. Add a little.
        most = (n - 1) // 2
        of_share = jnp.minimum(
            jnp.floor(jnp.asarray(0.0 if share is None else share) * n + 1e-4), most
        )
        b: Any = of_share if num_trimmed is None else num_trimmed
        rank = jnp.arange(len(x))[:, None]
        return _mean_of(_sorted(x, here), (rank >= b) & (rank < n - b)), state

    return Rule(aggregate, 1 if num_trimmed is None else 2 * num_trimmed + 1)


@part
def krum(num_attackers: Attackers) -> Rule:
    """Krum: the update with the smallest sum of squared distances to its nearest neighbors.

    ``s_i`` is the sum of ``|x_i - x_j|^2`` over the ``n - f - 2`` nearest others, and the update
    with the least s_i is the aggregate. Some implementations have ``n - f - 1`` neighbors.

    Args:
      num_attackers: f. It needs ``n >= 2 f + 3`` participants.

    Raises:
      ValueError: if `num_attackers` is negative.

    Example:
      >>> x = jnp.array([[1.0, 1], [2, 1], [1, 3], [2, 2], [10, -10]])
      >>> krum(1).aggregate(None, x, jnp.ones(5), jnp.ones(5, bool), ())[0].tolist()
      [2.0, 1.0]

    Reference: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries:
    Byzantine Tolerant Gradient Descent" (2017).
    """
    return multi_krum(num_attackers, num_selected=1)


@part
def multi_krum(
    num_attackers: Attackers, *, num_selected: TracedCount | None = None, weighted: bool = False
) -> Rule:
    """Multi-Krum: the mean of the m updates with the least scores of `krum`.

    Args:
      num_attackers: f. It needs ``n >= 2 f + 3`` participants.
      num_selected: m, at most n; None means ``n - f``.
      weighted: whether the mean has the clients' weights.

    Raises:
      ValueError: if a number is out of range.

    Example:
      >>> x, here = jnp.array([[1.0, 1], [2, 1], [1, 3], [2, 2], [10, -10]]), jnp.ones(5, bool)
      >>> multi_krum(1, num_selected=2).aggregate(None, x, jnp.ones(5), here, ())[0].tolist()
      [1.5, 1.0]

    Reference: Blanchard et al. (2017).
    """

    def aggregate(rng_key: Any, x: Any, weights: Any, here: Any, state: Any) -> Any:
        del rng_key
        n, f = jnp.sum(here), num_attackers
        m = n - f if num_selected is None else num_selected

        def scores(distances: Array) -> Float[Array, "slots 1"]:
            return _krum_scores(distances, here, n - f - 2)[:, None]

        chosen = _nearest(x, here, scores, 1, len(x), m)[0]
        return _mean_of(x, chosen, weights if weighted else 1), state

    return Rule(aggregate, 2 * num_attackers + 3)


@part
def bulyan(num_attackers: Attackers) -> Rule:
    """Bulyan: Krum chooses ``n - 2 f`` updates, whose coordinates are trimmed around the median.

    Krum is applied again and again to the updates that are left. From n' of these it takes the one
    with the least sum over its ``max(1, n' - f - 2)`` nearest others. Each coordinate of the
    aggregate is the mean of the ``n - 4 f`` values of the chosen updates that are nearest to their
    median; if two are equally near, that of the update that was chosen first. Some implementations
    choose all updates by one application of Krum.

    If only one nearest other counts, the two nearest updates have equal sums, and the one in the
    lower slot is taken. The aggregate may therefore depend on the order of the cohort.

    Args:
      num_attackers: f. It needs ``n >= 4 f + 3`` participants.

    Raises:
      ValueError: if `num_attackers` is negative.

    Example:
      >>> x = jnp.array([[1.0, 1], [2, 1], [1, 3], [2, 2], [10, -10], [3, 2], [2, 3]])
      >>> bulyan(1).aggregate(None, x, jnp.ones(7), jnp.ones(7, bool), ())[0].tolist()
      [2.0, 2.0]

    Reference: El Mhamdi, Guerraoui, Rouault, "The Hidden Vulnerability of Distributed Learning in
    Byzantium" (2018).
    """

    def aggregate(rng_key: Any, x: Any, weights: Any, here: Any, state: Any) -> Any:
        del rng_key, weights
        f, theta = num_attackers, jnp.sum(here) - 2 * num_attackers
        distances, slots = _distances(lax.stop_gradient(x), here), jnp.arange(len(x))
        # Sort the others of each update once. Later only note which of them are left.
        others = jnp.where(slots[:, None] == slots, jnp.inf, distances)
        near = argsort_rows(others)
        place = jnp.zeros_like(near).at[near, slots[None]].set(slots[:, None])
        ranked = jnp.take_along_axis(others, near, axis=0)
        is_left = here[near] & (near != slots)
        counts = jnp.cumsum(is_left, axis=0, dtype=jnp.int32)

        def choose(carry: Any, _: None) -> tuple[Any, Array]:
            left, is_left, counts = carry
            number = jnp.maximum(1, jnp.sum(left) - f - 2)
            scores = jnp.sum(jnp.where(is_left & (counts <= number), ranked, 0), axis=0)
            # Infinite scores come before those of updates that are not left.
            finite = jnp.nan_to_num(scores, nan=jnp.inf, posinf=jnp.finfo(scores.dtype).max)
            best = jnp.argmin(jnp.where(left, finite, jnp.inf))
            after = slots[:, None] >= place[best]
            is_left = is_left & (slots[:, None] != place[best])
            return (left & (slots != best), is_left, counts - after), best

        _, order = lax.scan(choose, (here, is_left, counts), length=len(x))
        chosen, rank = x[order], slots
        away = jnp.abs(chosen - _median_of(chosen, rank < theta))
        nearest = argsort_rows(jnp.where((rank < theta)[:, None], away, jnp.inf))
        ranked = jnp.take_along_axis(chosen, nearest, axis=0)
        return _mean_of(ranked, rank < theta - 2 * f), state

    return Rule(aggregate, 4 * num_attackers + 3)


@part
def geometric_median(
    *, num_iterations: Count = 8, smoothing: Positive = 1e-6, weighted: bool = False
) -> Rule:
    """The smoothed geometric median, which minimizes ``sum_i a_i |z - x_i|``, by Weiszfeld's steps.

    ``z <- sum_i b_i x_i / sum_i b_i`` with ``b_i = a_i / max(|z - x_i|, nu)``, starting from 0.

    Args:
      num_iterations: the number of steps.
      smoothing: nu, in the units of the updates; updates closer than nu to z are averaged.
      weighted: whether a_i is the client's weight, rather than 1.

    Raises:
      ValueError: if a number is not positive.

    Example:
      >>> x = jnp.array([[1.0, 1], [2, 1], [1, 3], [2, 2], [10, -10]])
      >>> rule = geometric_median(num_iterations=200)
      >>> z, _ = rule.aggregate(None, x, jnp.ones(5), jnp.ones(5, bool), ())
      >>> [f"{number:.3f}" for number in z]
      ['1.833', '1.229']

    Reference: Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning" (2022).
    """

    def aggregate(rng_key: Any, x: Any, weights: Any, here: Any, state: Any) -> Any:
        del rng_key

        def step(_: Any, z: Array) -> Array:
            b = 1 / jnp.maximum(_norms(x - z), smoothing)
            return _mean_of(x, here, b * weights if weighted else b)

        return lax.fori_loop(0, num_iterations, step, jnp.zeros_like(x[0])), state

    return Rule(aggregate)


@part
def centered_clipping(radius: Positive, *, num_iterations: Count = 1) -> Rule:
    """Centered clipping: the mean of the updates, clipped around the aggregate of the last round.

    ``v <- v + 1/n sum_i min(1, tau / |x_i - v|) (x_i - v)``, L times. The first v is 0, and the
    next round starts from the last v, which is the aggregate.

    Args:
      radius: tau, in the units of the updates.
      num_iterations: L.

    Raises:
      ValueError: if a number is not positive.

    Example:
      >>> x, here = jnp.array([[1.0, 1], [2, 1], [1, 3], [2, 2], [10, -10]]), jnp.ones(5, bool)
      >>> v, _ = centered_clipping(1.0).aggregate(None, x, jnp.ones(5), here, jnp.zeros(2))
      >>> [f"{number:.4f}" for number in v]
      ['0.6664', '0.4206']

    Reference: Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization"
    (2021).
    """

    def aggregate(rng_key: Any, x: Any, weights: Any, here: Any, state: Any) -> Any:
        del rng_key, weights

        def step(_: Any, v: Array) -> Array:
            norms = _norms(x - v)
            factors = jnp.minimum(1, radius / jnp.where(norms > 0, norms, 1))
            return v + _mean_of((x - v) * factors[:, None].astype(x.dtype), here)

        v = lax.fori_loop(0, num_iterations, step, state)
        return v, v

    return Rule(aggregate, init=lambda zero: zero)


@part
def bucketing(rule: Rule, size: Count) -> Rule:
    """Applies a rule to the means of s updates each, in a random order that is drawn every round.

    The last bucket may have fewer updates. The rule gets ``ceil(n / s)`` means, so it must tolerate
    the same number of attackers in fewer updates.

    Args:
      rule: the rule for the means.
      size: s.

    Raises:
      TypeError: if `rule` is no rule.
      ValueError: if `size` is not positive.

    Example:
      >>> x = jnp.array([[1.0, 1], [2, 1], [1, 3], [2, 2]])
      >>> rule, key = bucketing(median(), 4), jax.random.key(0)
      >>> rule.aggregate(key, x, jnp.ones(4), jnp.ones(4, bool), ())[0].tolist()
      [1.5, 1.75]

    Reference: Karimireddy, He, Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via
    Bucketing" (2022).
    """
    check_instance("rule", rule, Rule, "give one, such as median()")

    def aggregate(rng_key: Any, x: Any, weights: Any, here: Any, state: Any) -> Any:
        order_key, rule_key = jax.random.split(rng_key)
        lots = jax.random.uniform(order_key, here.shape, jnp.float32)
        # Participants come first, so the buckets do not depend on the padding.
        bucket, count = _rank(lots, here) // size, -(-len(x) // size)
        filled = jax.ops.segment_sum(here.astype(x.dtype), bucket, count)
        weights = jax.ops.segment_sum(weights, bucket, count)
        sums = jax.ops.segment_sum(jnp.where(here[:, None], x, 0), bucket, count)
        means = sums / jnp.maximum(filled, 1)[:, None]
        return rule.aggregate(rule_key, means, weights, filled > 0, state)

    return rule._replace(aggregate=aggregate, least=size * (rule.least - 1) + 1)


@part
def nearest_neighbor_mixing(rule: Rule, num_attackers: Attackers) -> Rule:
    """Applies a rule to updates that are replaced by the mean of their nearest neighbors.

    ``y_i`` is the mean of the ``n - f`` updates that are nearest to x_i, itself included.

    Args:
      rule: the rule for the means.
      num_attackers: f. It needs ``n > f`` participants, and the rule's minimum.

    Raises:
      TypeError: if `rule` is no rule.
      ValueError: if `num_attackers` is negative.

    Example:
      >>> x = jnp.array([[1.0, 1], [2, 1], [1, 3], [2, 2], [10, -10]])
      >>> rule = nearest_neighbor_mixing(trimmed_mean(1), 1)
      >>> rule.aggregate(None, x, jnp.ones(5), jnp.ones(5, bool), ())[0].tolist()
      [1.5, 1.75]

    Reference: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan, "Fixing by Mixing: A Recipe
    for Optimal Byzantine ML under Heterogeneity" (2023).
    """
    check_instance("rule", rule, Rule, "give one, such as median()")

    def aggregate(rng_key: Any, x: Any, weights: Any, here: Any, state: Any) -> Any:
        number = jnp.sum(here) - num_attackers
        nearest = _nearest(x, here, lambda distances: distances, len(x), 1, number)
        mixed = jnp.matmul(nearest.astype(x.dtype), x, precision=lax.Precision.HIGHEST)
        mixed = mixed / jnp.maximum(number, 1).astype(x.dtype)
        return rule.aggregate(rng_key, jnp.where(here[:, None], mixed, 0), weights, here, state)

    return rule._replace(aggregate=aggregate, least=_larger(num_attackers + 1, rule.least))


@part
def fltrust(root: Task) -> Rule:
    """FLTrust: a mean weighted by the similarity to the server's own update.

    The server trains like a client, on client 0 of a task of its own, and gets the update g. The
    aggregate is ``sum_i t_i (|g| / |x_i|) x_i / sum_i t_i`` with ``t_i = max(0, cos(x_i, g))``, and
    0 if all t_i are 0.

    Args:
      root: the server's data, as a task like the models' own, of which client 0 is used. The data
        are constants of the program, so they should be few.

    Raises:
      TypeError: if `root` is no task.

    Example:
      >>> from fedjax_mm.tasks import quadratic
      >>> x = jnp.array([[1.0, 1], [2, 1], [1, 3], [2, 2], [10, -10]])
      >>> rule, g = fltrust(quadratic(1, 2, mu=0.1)), jnp.array([1.0, 1.0])
      >>> z, _ = rule.aggregate(None, x, jnp.ones(5), jnp.ones(5, bool), g)
      >>> [f"{number:.4f}" for number in z]
      ['0.9367', '0.9888']

    Reference: Cao, Fang, Liu, Gong, "FLTrust: Byzantine-robust Federated Learning via Trust
    Bootstrapping" (2021), section IV.
    """
    check_task(root)

    def aggregate(rng_key: Any, x: Any, weights: Any, here: Any, state: Any) -> Any:
        del rng_key, weights
        g = state
        norm, norms = _norms(g[None])[0], _norms(x)
        units = x / jnp.where(norms > 0, norms, 1)[:, None]
        cosines = jnp.sum(units * (g / jnp.where(norm > 0, norm, 1)), axis=1)
        return norm * _mean_of(units, here, jnp.maximum(0, cosines)), g

    return Rule(aggregate, init=lambda zero: zero, root=root)


def _mean_of(x: Array, chosen: Array, weights: Any = 1) -> Float[Array, " d"]:
    """Mean over the chosen rows, or over the chosen values of each coordinate, or 0 without any."""
    chosen = chosen if chosen.ndim == 2 else chosen[:, None]
    factors = jnp.where(chosen, jnp.reshape(jnp.asarray(weights, x.dtype), (-1, 1)), 0)
    total = jnp.sum(factors, axis=0)
    # Select, because values that are not chosen may be infinite.
    return jnp.sum(factors * jnp.where(chosen, x, 0), axis=0) / jnp.where(total > 0, total, 1)


def _sorted(x: Array, here: Array) -> Float[Array, "slots d"]:
    return sort_rows(jnp.where(here[:, None], x, jnp.inf))


def _median_of(x: Array, here: Array) -> Float[Array, " d"]:
    ranked, n = _sorted(x, here), jnp.sum(here)
    low, high = ranked[jnp.maximum(n - 1, 0) // 2], ranked[n // 2]
    return low / 2 + high / 2  # their sum may overflow


def _norms(x: Array) -> Float[Array, " slots"]:
    """Norms of rows, which do not overflow before the rows do."""
    largest = jnp.max(jnp.abs(x), axis=1)
    scale = jnp.where(largest > 0, largest, 1)
    return scale * root_of(jnp.sum((x / scale[:, None]) ** 2, axis=1))


def _distances(x: Array, here: Array) -> Float[Array, "slots slots"]:
    """Squared distances between participants, and infinity elsewhere."""
    # One row after the other, because all differences take slots times the memory of the updates.
    squares = lax.map(lambda y: jnp.sum((x - y) ** 2, axis=1), x)
    return jnp.where(here[:, None] & here, squares, jnp.inf)


def _nearest(
    x: Array, here: Array, values: Callable[[Array], Array], columns: int, terms: int, number: Any
) -> Bool[Array, "columns slots"]:
    """Marks the participants with the least values in each column, one row for each column.

    The distances are those of a matrix product, unless its rounding may change a mark.

    Args:
      x: the updates.
      here: which slots have a participant.
      values: maps distances ``[slots, slots]`` to values ``[slots, columns]``.
      columns: the number of columns.
      terms: the largest number of distances whose sum is a value.
      number: the number of marks in each column.
    """
    x = lax.stop_gradient(x)
    centered = jnp.where(here[:, None], x - _mean_of(x, here), 0)
    squares = jnp.sum(centered**2, axis=1)
    products = jnp.matmul(centered, centered.T, precision=lax.Precision.HIGHEST)
    distances = squares[:, None] + squares - (products + products.T)  # symmetric to the last bit
    distances = jnp.where(jnp.eye(len(x), dtype=bool), 0, jnp.maximum(distances, 0))
    # Differences decide if updates have a large common part, because the products then cancel, and
    # if values are tied.
    largest = 4 * terms * jnp.max(squares)
    rounding = 2 * jnp.finfo(x.dtype).eps * math.sqrt(x.shape[1]) * largest

    def mark(carry: Any) -> Any:
        is_exact, distances, _, _ = carry
        near = values(jnp.where(here[:, None] & here, distances, jnp.inf))
        chosen = _least(near, here, number)
        last = jnp.max(jnp.where(chosen, near, -jnp.inf), axis=0)
        after = jnp.min(jnp.where(here[:, None] & ~chosen, near, jnp.inf), axis=0)
        is_clear = jnp.all((after - last > rounding) | jnp.isposinf(last))
        is_decided = is_exact | (jnp.isfinite(largest) & is_clear)
        # A loop of at most one step, because `vmap` makes `lax.cond` compute both branches.
        given = is_decided, distances
        is_exact, distances = lax.while_loop(lambda carry: ~carry[0], by_differences, given)
        return is_exact, distances, is_decided, chosen.T

    def by_differences(_: Any) -> Any:
        return jnp.bool_(True), _distances(x, here)

    # A loop of one or two steps, because `mark` would otherwise be compiled twice.
    start = jnp.bool_(False), distances, jnp.bool_(False), jnp.zeros((columns, len(x)), bool)
    return lax.while_loop(lambda carry: ~carry[2], mark, start)[3]


def _krum_scores(distances: Array, here: Array, number: Any) -> Float[Array, " slots"]:
    """Sums of the squared distances to the nearest others."""
    others = jnp.where(jnp.eye(len(here), dtype=bool), jnp.inf, distances)
    is_near = jnp.arange(len(here)) < number
    return jnp.sum(jnp.where(is_near, sort_rows(others).T, 0), axis=1)


def _rank(values: Array, here: Array) -> Array:
    """Ranks of the participants in increasing order of their values, followed by all others."""
    order = jnp.lexsort((values, ~here))
    return jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))


def _least(values: Array, here: Array, number: Any) -> Bool[Array, "slots columns"]:
    """Marks the participants with the least values in each column.

    Values are not negative, and NaNs count as infinite.
    """
    values = jnp.where(here[:, None] & ~jnp.isnan(values), values, jnp.inf)
    k = jnp.clip(len(values) - number + 1, 1, len(values))
    last = jax.vmap(kth_largest, (1, None))(values, k)
    is_below, is_tied = values < last, (values == last) & here[:, None]
    room = number - jnp.sum(is_below, axis=0, dtype=jnp.int32)
    return is_below | (is_tied & (jnp.cumsum(is_tied, axis=0, dtype=jnp.int32) <= room))


def _larger(one: Any, other: Any) -> Any:
    is_known = isinstance(one, int) and isinstance(other, int)
    return max(one, other) if is_known else jnp.maximum(one, other)
