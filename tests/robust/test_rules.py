"""Rules of robust aggregation against NumPy loops, and their invariants."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm.robust import (
    bucketing,
    bulyan,
    centered_clipping,
    fltrust,
    geometric_median,
    krum,
    mean,
    median,
    multi_krum,
    nearest_neighbor_mixing,
    trimmed_mean,
)
from fedjax_mm.tasks import quadratic
from tests.oracles import robust as oracle

KEY = jax.random.key(3)
ROOT = quadratic(1, 2, mu=0.1)
FIVE = np.array([[1.0, 1], [2, 1], [1, 3], [2, 2], [10, -10]])
SEVEN = np.array([*FIVE.tolist(), [3.0, 2], [2, 3]])

# Rules that tolerate two attackers among 11 updates or more, and their loops. `a` are weights.
RULES = {
    "mean": (mean(), lambda x, a: oracle.mean(x, a)),
    "unweighted mean": (mean(weighted=False), lambda x, a: oracle.mean(x)),
    "median": (median(), lambda x, a: oracle.median(x)),
    "trimmed mean": (trimmed_mean(2), lambda x, a: oracle.trimmed_mean(x, 2)),
    "trimmed share": (
        trimmed_mean(share=0.2),
        lambda x, a: oracle.trimmed_mean(x, int(0.2 * len(x) + 1e-9)),
    ),
    "krum": (krum(2), lambda x, a: oracle.multi_krum(x, 2, 1)),
    "multi-krum": (multi_krum(2), lambda x, a: oracle.multi_krum(x, 2, len(x) - 2)),
    "multi-krum of 3": (
        multi_krum(2, num_selected=3, weighted=True),
        lambda x, a: oracle.multi_krum(x, 2, 3, a),
    ),
    "bulyan": (bulyan(2), lambda x, a: oracle.bulyan(x, 2)),
    "geometric median": (
        geometric_median(),
        lambda x, a: oracle.geometric_median(x, 8, 1e-6),
    ),
    "weighted geometric median": (
        geometric_median(num_iterations=3, smoothing=0.1, weighted=True),
        lambda x, a: oracle.geometric_median(x, 3, 0.1, a),
    ),
    "centered clipping": (
        centered_clipping(0.5, num_iterations=3),
        lambda x, a: oracle.centered_clipping(x, np.zeros(x.shape[1]), 0.5, 3),
    ),
    "mixing": (
        nearest_neighbor_mixing(trimmed_mean(2), 2),
        lambda x, a: oracle.trimmed_mean(oracle.mixed(x, 2), 2),
    ),
    "bucketing": (
        bucketing(median(), 2),
        lambda x, a: oracle.median(oracle.buckets(x, permutation(len(x)), 2)),
    ),
    "fltrust": (fltrust(ROOT), lambda x, a: oracle.fltrust(x, np.ones(x.shape[1]))),
}


def permutation(number):
    """The order of a bucketing's draws with `KEY`, for participants in the first slots."""
    lots = jax.random.uniform(jax.random.split(KEY)[0], (number,), jnp.float32)
    return np.argsort(np.asarray(lots)).tolist()


@partial(jax.jit, static_argnums=0)
def applied(aggregate, x, weights, here, state):
    return aggregate(KEY, x, weights, here, state)[0]


def aggregate(rule, x, weights=None, here=None, state=None):
    x = jnp.asarray(x)
    weights = jnp.ones(len(x)) if weights is None else jnp.asarray(weights)
    here = jnp.ones(len(x), bool) if here is None else jnp.asarray(here)
    if state is None:
        state = rule.init(jnp.zeros(x.shape[1]))
        state = jnp.ones(x.shape[1]) if rule.root is not None else state
    return np.asarray(applied(rule.aggregate, x, weights, here, state))


def drawn(n, d=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) + np.arange(d), rng.uniform(1, 3, n)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_its_loop_and_padding_changes_nothing(name, x64):
    rule, loop = RULES[name]
    for n in (11, 12):
        x, a = drawn(n, seed=n)
        here = np.arange(15) < n
        padded = np.zeros((15, 4)), np.zeros(15)
        padded[0][:n], padded[1][:n] = x, a
        found = aggregate(rule, *padded, here)
        np.testing.assert_allclose(found, loop(x, a), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(aggregate(rule, x, a), found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_distances_do_not_cancel(offset):
    """With ``|x|^2 + |y|^2 - 2 x y`` in float32 the honest distances are 0 or -32 at 1e4."""
    found = aggregate(multi_krum(1, num_selected=2), FIVE + offset)
    np.testing.assert_array_equal(found, np.array([1.5, 1.0], np.float32) + np.float32(offset))


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (mean(), (3.2, -0.6)),
        (median(), (2, 1)),
        (trimmed_mean(1), (1.666667, 1.333333)),
        (krum(1), (2, 1)),
        (multi_krum(1, num_selected=2), (1.5, 1)),
        (multi_krum(1, num_selected=3), (1.666667, 1.333333)),
        (multi_krum(1), (1.5, 1.75)),
        (geometric_median(num_iterations=400), (1.832699, 1.229353)),
        (geometric_median(num_iterations=1, smoothing=0.1), (1.758473, 1.109874)),
        (geometric_median(num_iterations=2, smoothing=0.1), (1.818852, 1.189115)),
        (geometric_median(num_iterations=3, smoothing=0.1), (1.835591, 1.208666)),
        (nearest_neighbor_mixing(trimmed_mean(1), 1), (1.5, 1.75)),
        (centered_clipping(1.0), (0.666395, 0.420601)),
        (centered_clipping(1.0, num_iterations=3), (1.541962, 1.100873)),
        (centered_clipping(10.0), (2.614214, -0.014214)),
        (fltrust(ROOT), (0.936741, 0.988782)),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_numbers_of_five_updates(rule, wanted, x64):
    np.testing.assert_allclose(aggregate(rule, FIVE), wanted, atol=1e-6)


def test_numbers_that_need_more(x64):
    """Bulyan of seven updates, weights at a data point, and a bucketing in the order of slots."""
    assert [i + 1 for i in oracle.bulyan_picks(SEVEN, 1)] == [4, 2, 7, 1, 3]
    np.testing.assert_allclose(aggregate(bulyan(1), SEVEN), (2, 2), atol=1e-12)
    once = oracle.bulyan(SEVEN, 1, [i - 1 for i in (4, 2, 7, 6, 1)])
    np.testing.assert_allclose(once, (2, 1.666667), atol=1e-6)
    heavy = geometric_median(num_iterations=200, weighted=True)
    np.testing.assert_allclose(aggregate(heavy, FIVE, [1, 1, 1, 1, 2]), (2, 1), atol=1e-5)
    np.testing.assert_allclose(
        oracle.median(oracle.buckets(FIVE, range(5), 2)), (1.5, 1), atol=1e-12
    )
    assert krum_scores() == [3, 2, 6, 3, 387]


def krum_scores():
    return oracle.krum_scores(FIVE, 2)


def test_without_attackers_rules_are_the_mean(x64):
    x, _ = drawn(9)
    for rule in (trimmed_mean(0), multi_krum(0), bulyan(0), nearest_neighbor_mixing(mean(), 0)):
        np.testing.assert_allclose(aggregate(rule, x), x.mean(0), rtol=1e-12)


@pytest.mark.parametrize("n", [1, 2])
def test_one_and_two_updates(n, x64):
    x, here = FIVE[:4], np.arange(4) < n
    for rule in (
        median(),
        trimmed_mean(0),
        bucketing(mean(), 2),
        nearest_neighbor_mixing(mean(), 0),
    ):
        found = aggregate(rule, np.where(here[:, None], x, 0), here=here)
        np.testing.assert_allclose(found, x[:n].mean(0), rtol=1e-6)


def test_the_needed_numbers_are_those_of_the_rules():
    rules = (median(), trimmed_mean(2), krum(2), bulyan(2), bucketing(krum(1), 3))
    assert [rule.least for rule in rules] == [1, 5, 7, 11, 13]
    assert nearest_neighbor_mixing(krum(1), 6).least == 7
