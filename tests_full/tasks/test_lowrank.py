"""Low-rank changes of frozen parameters, against a plain loop."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    fedavg,
    full_participation,
    local_sgd,
    params_of,
    personal,
    simulate,
    sweep,
)
from fedjax_mm.data import digits, federate, partition
from fedjax_mm.sweeps import Setup
from fedjax_mm.tasks import (
    MLP,
    classification,
    client_losses,
    low_rank,
    quadratic,
    with_clients,
)
from tests.helpers import labelled_data
from tests.oracles import lowrank as reference

DATA = labelled_data()


@jax.jit
def init(rng_key, x):
    return {"linear": {"W": jax.random.normal(rng_key, (x[0].size, 3))}, "scale": jnp.ones(3)}


@jax.jit
def apply(params, x):
    return x @ params["linear"]["W"] * params["scale"]


class Small(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3))(x))
        return nn.Dense(self.num_classes)(x.mean((1, 2)))


def test_factors_are_trained_as_in_a_plain_loop():
    with jax.enable_x64(True):
        whole = classification(DATA, (init, apply))
        params = whole.init(jax.random.key(3))
        task = low_rank(whole, params, rank=2, scale=1.5)
        first = task.init(jax.random.key(5))
        method = fedavg(local_sgd(0.2, steps=3))
        clients = full_participation(DATA.num_clients)
        state, trace = simulate(0, task, method, clients, 4, params=first)
        (found,) = params_of(state)
        factors = found["linear/W"]
        assert found.keys() == {"linear/W"}
        cuts = np.asarray(DATA.train.offsets)[1:]
        features, labels = (np.split(np.asarray(x), cuts) for x in DATA.train.examples)
        data = [(x.astype(float), y) for x, y in zip(features, labels, strict=True)]
        W, A, B = (
            np.asarray(x, float)
            for x in (params["linear"]["W"], first["linear/W"]["A"], first["linear/W"]["B"])
        )
        A, B = reference.fedavg(W, A, B, 1.5, data, 0.2, steps=3, rounds=4)
        np.testing.assert_allclose(factors["A"], A, rtol=0, atol=1e-9)
        np.testing.assert_allclose(factors["B"], B, rtol=0, atol=1e-9)
        merged = task.merged(found)
        np.testing.assert_allclose(merged["linear"]["W"], W + 1.5 * A @ B, rtol=0, atol=1e-9)
        np.testing.assert_array_equal(merged["scale"], 1)
        assert trace.metrics["loss"][-1, 0] == whole.metrics(None, merged)["loss"]
        np.testing.assert_array_equal(client_losses(task, found), client_losses(whole, merged))


def test_a_network_starts_where_it_was_and_sends_its_factors_alone():
    """Kernels of convolutions are matrices, vectors are frozen, and a client keeps its own B."""
    pool = digits()
    images = federate(pool, partition.iid(pool.train[1], 6), seed=0)
    whole = classification(images, Small(10), scale=1 / 255)
    params = jax.jit(whole.init)(jax.random.key(0))
    task = low_rank(whole, params, rank=2, where=["Conv_0", "Dense_0"])
    start = task.init(jax.random.key(1))
    assert {path: x["A"].shape for path, x in start.items()} == {
        "Conv_0/kernel": (9, 2),
        "Dense_0/kernel": (4, 2),
    }
    jax.tree.map(np.testing.assert_array_equal, task.merged(start), params)
    local = fedavg(local_sgd(0.1, steps=2, batch_size=4))
    for view, method in ((task, local), (with_clients(task, ["loss"]), personal(local, where="B"))):
        _, trace = simulate(0, view, method, full_participation(6), 2)
        assert np.isfinite(trace.metrics["loss"]).all()
    assert trace.upload_size == ((9 + 4) * 2,)  # A alone


def test_scales_share_a_program():
    whole = classification(DATA, MLP(3, hidden=(4,)))
    params = whole.init(jax.random.key(0))

    def build(scale):
        task = low_rank(whole, params, rank=1, scale=scale)
        return Setup(task, fedavg(local_sgd(0.1, steps=2)), full_participation(DATA.num_clients))

    found = sweep(build, {"scale": [0.5, 2.0]}, num_rounds=3, num_seeds=2)
    assert found.loss.sel(round=0).std() < 1e-6 < found.loss.sel(round=3).std("scale").min()


@pytest.mark.parametrize(
    ("task", "change", "error", "words"),
    [
        (None, {}, TypeError, "give one of classification"),
        ("W", {"params": {"W": 1.0}}, ValueError, "params have other names or shapes"),
        ("W", {"where": "bias"}, ValueError, "where has no matrix, but classes/bias"),
        ("W", {"where": "nowhere"}, ValueError, "where has 'nowhere'"),
        ("W", {"rank": 0}, ValueError, "rank is 0"),
        ("W", {"scale": 0.0}, ValueError, "scale is 0.0"),
    ],
)
def test_wrong_arguments_are_refused(task, change, error, words):
    whole = classification(DATA, MLP(3, hidden=(4,)))
    how = {"params": whole.init(jax.random.key(0)), "rank": 1} | change
    with pytest.raises(error, match=words):
        low_rank(whole if task else quadratic(4, 2, mu=0.1), **how)
