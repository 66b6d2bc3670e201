"""What every rule of robust aggregation must keep: order, translations, and huge updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm.robust import (
    bucketing,
    bulyan,
    centered_clipping,
    geometric_median,
    multi_krum,
    trimmed_mean,
)
from tests.robust.test_rules import KEY, RULES, aggregate, drawn

ROBUST = [name for name in RULES if "mean" not in name or "trimmed" in name]


@pytest.mark.parametrize("name", [name for name in RULES if name != "bucketing"])
def test_neither_order_nor_empty_slots_in_between_matter(name, x64):
    rule, _ = RULES[name]
    x, a = drawn(11)
    order = np.random.default_rng(1).permutation(15)
    some, weights = np.zeros((15, 4)), np.zeros(15)
    some[:11], weights[:11] = x, a
    found = aggregate(rule, some[order], weights[order], (np.arange(15) < 11)[order])
    np.testing.assert_allclose(found, aggregate(rule, x, a), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in RULES if name != "fltrust"])
def test_rules_commute_with_translations(name, x64):
    rule, _ = RULES[name]
    x, a = drawn(11)
    moved = np.array([3.0, -1, 0, 7])
    more = {"state": jnp.asarray(moved)} if name == "centered clipping" else {}
    # Weiszfeld's steps start from 0, and so are no translations before they have converged.
    rule = geometric_median(num_iterations=300) if "geometric" in name else rule
    found = aggregate(rule, x + moved, a, **more) - moved
    np.testing.assert_allclose(found, aggregate(rule, x, a), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", RULES)
def test_equal_updates_are_the_aggregate(name):
    rule, _ = RULES[name]
    rule = centered_clipping(50.0) if name == "centered clipping" else rule
    x = np.tile([3.0, 3.0, 3.0, 3.0], (11, 1))
    wanted = np.ones(4) if name == "fltrust" else x[0]  # of the length of the server's own update
    np.testing.assert_allclose(aggregate(rule, x), wanted, rtol=1e-5)


@pytest.mark.parametrize("size", [1e9, 1e30])
@pytest.mark.parametrize("name", ROBUST)
def test_two_huge_updates_move_no_rule_far(name, size):
    rule, _ = RULES[name]
    rule = bucketing(trimmed_mean(2), 2) if name == "bucketing" else rule
    x, a = drawn(12)
    x[[2, 7]] = [[size, -size, size, size], [-size, size, size, -size]]
    if "geometric" in name:
        rule = geometric_median(num_iterations=50)
    found, honest = aggregate(rule, x, a), np.delete(x, [2, 7], axis=0)
    assert np.all(np.isfinite(found))
    if name in ("centered clipping", "fltrust"):  # at most L tau, and the server's own norm
        assert np.linalg.norm(found) <= {"fltrust": 2.0}.get(name, 1.5) + 1e-5
        return
    away = 1.0 if "geometric" in name else 1e-5
    assert np.all(found >= honest.min(0) - away)
    assert np.all(found <= honest.max(0) + away)
    if name == "krum":
        assert np.min(np.abs(found - honest.astype(np.float32)).max(axis=1)) == 0


def test_the_number_of_attackers_may_be_traced():
    x, a = map(jnp.float32, drawn(12))

    def of(number):
        rules = trimmed_mean(number), multi_krum(number), bulyan(number)
        here = jnp.ones(12, bool)
        return jnp.stack([rule.aggregate(KEY, x, a, here, ())[0] for rule in rules])

    found = jax.jit(jax.vmap(of))(jnp.arange(3))
    for number in range(3):
        rules = trimmed_mean(number), multi_krum(number), bulyan(number)
        np.testing.assert_allclose(found[number], [aggregate(r, x, a) for r in rules], rtol=1e-5)
