"""Networks of many sizes, and rules and compressors, against XLA's sorts and loops in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm.compression import qsgd, random_k, sign, top_k
from fedjax_mm.robust import (
    bucketing,
    bulyan,
    krum,
    median,
    multi_krum,
    nearest_neighbor_mixing,
    trimmed_mean,
)
from tests.oracles import robust as oracle
from tests.oracles import wrappers
from tests.robust.test_selection import check_rows, rows

KEY = jax.random.key(0)
RULES = {
    "median": (median(), oracle.median),
    "trimmed mean": (trimmed_mean(2), lambda x: oracle.trimmed_mean(x, 2)),
    "krum": (krum(2), lambda x: oracle.multi_krum(x, 2, 1)),
    "multi-krum": (multi_krum(2, num_selected=4), lambda x: oracle.multi_krum(x, 2, 4)),
    "mixing": (nearest_neighbor_mixing(median(), 2), lambda x: oracle.median(oracle.mixed(x, 2))),
    "bulyan": (bulyan(2), lambda x: oracle.bulyan(x, 2)),
    "bucketing": (bucketing(median(), 3), None),
}
COMPRESSORS = {"top_k": top_k(0.3), "random_k": random_k(0.3), "qsgd": qsgd(4), "sign": sign()}


def applied(rule, x, here):
    """Aggregate of the present rows, with weights that the rules ignore."""
    return rule.aggregate(KEY, jnp.where(here[:, None], x, 0), jnp.ones(len(x)), here, ())[0]


def by_xla(monkeypatch, function, *args):
    """The result of the form for accelerators, which sorts."""
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        return jax.jit(lambda *args: function(*args))(*args)  # a second trace


@pytest.mark.parametrize("n", [3, 8, 16, 17, 31, 64, 100, 129, 300, 513])
def test_networks_of_all_sizes_are_stable_sorts(n, x64):
    for dtype in ("float32", "float64"):
        check_rows(rows(n, 3, seed=n).astype(dtype))


@pytest.mark.parametrize("name", RULES)
def test_rules_of_all_numbers_of_participants_equal_xla_sorts_and_loops(name, monkeypatch):
    """Integers tie, and the participants stand anywhere among empty slots."""
    rule, loop = RULES[name]
    slots = 40 if name == "bulyan" else 300
    rng, number = np.random.default_rng(0), np.r_[1:41, 53:300:13, 299, 300]
    number = number[number <= slots]
    x = jnp.asarray(rng.integers(-9, 10, (slots, 3)), jnp.float32)
    here = jnp.asarray(np.argsort(rng.random((len(number), slots))) < number[:, None])

    def of_all(here):
        return jax.lax.map(lambda here: applied(rule, x, here), here)

    found = jax.jit(of_all)(here)
    np.testing.assert_array_equal(found, by_xla(monkeypatch, of_all, here))
    assert np.isfinite(found).all()
    for n, some, one in zip(number, here, found, strict=True):
        if loop and n >= rule.least and n in (1, 2, 7, 8, 11, 33, 40, 105, 299, 300):
            np.testing.assert_allclose(one, loop(np.asarray(x[some])), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("d", [1, 2, 3, 17, 64, 100, 300])
@pytest.mark.parametrize("kind", ["tied", "apart", "with NaN"])
def test_any_number_of_coordinates_is_kept_as_by_xla_sorts_and_loops(kind, d, monkeypatch):
    rng, number = np.random.default_rng(d), jnp.arange(1, d + 1)
    vector = np.float32(rng.normal(size=d) * (2.0 if kind == "tied" else 1e3))
    vector = np.round(vector) if kind == "tied" else vector
    if kind == "with NaN":
        vector[rng.random(d) < 0.2] = np.nan
        vector[rng.random(d) < 0.2] = -np.inf

    def of_all(make):
        return jax.vmap(lambda k: make(k / d).compress(KEY, jnp.asarray(vector)))

    for make in (top_k, random_k):
        found = jax.jit(of_all(make))(number)
        np.testing.assert_array_equal(found, by_xla(monkeypatch, of_all(make), number))
    if kind != "with NaN":
        wanted = [wrappers.top_k(vector, k) for k in range(1, d + 1)]
        np.testing.assert_array_equal(jax.jit(of_all(top_k))(number), wanted)


def seeds(number):
    """Updates ``[number, 13, 5]``: apart, tied, equal, far from 0, or with two huge ones."""
    x = np.random.default_rng(0).normal(size=(number, 13, 5))
    x[1::5] = np.round(x[1::5])
    x[2::5] = 1
    x[3::5] += 1e4
    x[4::5, ::6] = 1e30
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("name", [*RULES, *COMPRESSORS])
def test_two_thousand_seeds_select_together_what_each_selects_alone(name):
    """Some take products and others differences, and the loop of a batch is shared."""
    x, compressor = seeds(2000), COMPRESSORS.get(name)

    def of(x):
        if compressor is not None:
            return jax.vmap(lambda v: compressor.compress(KEY, v))(x)
        return applied(RULES[name][0], x, jnp.ones(13, bool))

    together = jax.jit(jax.vmap(of))(x)
    alone = jax.jit(of)
    for seed in (*range(10), 511, 512, 1023, 1024, *range(1990, 2000)):
        np.testing.assert_array_equal(together[seed], alone(x[seed]), str(seed))
        if name == "multi-krum" and seed % 5 < 2:
            wanted = oracle.multi_krum(np.asarray(x[seed]), 2, 4)
            np.testing.assert_allclose(together[seed], wanted, rtol=1e-5, atol=1e-6)
