"""Networks of many sizes, and selection by distances, against XLA's sorts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm.robust import multi_krum
from tests.oracles import robust as oracle
from tests.robust.test_selection import check_rows, rows


@pytest.mark.parametrize("n", [3, 8, 16, 17, 31, 64, 100, 129, 300, 513])
def test_networks_of_all_sizes_are_stable_sorts(n, x64):
    for dtype in ("float32", "float64"):
        check_rows(rows(n, 3, seed=n).astype(dtype))


@pytest.mark.parametrize("kind", ["apart", "tied", "equal", "far", "huge"])
def test_replicas_choose_alone_what_they_choose_together(kind):
    """Some replicas take products and others differences, and the loop of a batch is shared."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 13, 5))
    x[::2] = {
        "apart": lambda x: 2 * x,
        "tied": np.round,
        "equal": lambda x: 0 * x + 1,
        "far": lambda x: x + 1e4,
        "huge": lambda x: np.where(np.arange(13)[:, None] % 6 == 0, 1e30, x),
    }[kind](x[::2])
    x = jnp.asarray(x, jnp.float32)

    def of(x):
        rule, here = multi_krum(2, num_selected=4), jnp.ones(13, bool)
        return rule.aggregate(None, x, jnp.ones(13), here, ())[0]

    together = jax.jit(jax.vmap(of))(x)
    for one, found in zip(x, together, strict=True):
        np.testing.assert_array_equal(jax.jit(of)(one), found)
        if kind in ("apart", "tied"):
            wanted = oracle.multi_krum(np.asarray(one), 2, 4)
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
