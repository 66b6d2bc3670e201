"""Running statistics of batch norm as parameters, and FedBN, against a plain loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_mm import (
    fedavg,
    full_participation,
    local_sgd,
    personal,
    simulate,
)
from fedjax_mm.data import FederatedData, client_data
from fedjax_mm.tasks import BatchNormCNN, classification

pytestmark = pytest.mark.usefixtures("x64")
N, T, E, RATE = 3, 3, 2, 0.3
RNG = np.random.default_rng(0)
X = [RNG.normal(k, 1 + k, size=(n, 2)) for k, n in enumerate((4, 2, 5))]
Y = [RNG.integers(0, 2, len(x)) for x in X]


class Normed(nn.Module):
    """Softmax regression on normalized inputs."""

    in_training_only: bool = True

    @nn.compact
    def __call__(self, x, weights=None):
        frozen = self.in_training_only and not self.is_mutable_collection("batch_stats")
        used = None if weights is None else (weights > 0)[:, None]
        norm = nn.BatchNorm(frozen, momentum=0.0, param_dtype=float, name="norm")
        x = norm(x, mask=used)
        return nn.Dense(2, param_dtype=float, name="classes")(x)


def task_of(**options):
    clients = client_data(list(zip(X, Y, strict=True)))
    data = FederatedData("three", "synthetic", 2, clients, clients)
    return classification(data, Normed(**options))


def flat(params):
    """As one dict of arrays by path."""
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.array(x) for p, x in paths}


def gradient(p, k):
    """Gradient of the cross-entropy with the batch's statistics, and v - b for the running ones."""
    x, y, eps = X[k], Y[k], 1e-5
    mean, var = x.mean(0), x.var(0)
    z = (x - mean) / np.sqrt(var + eps)
    h = z * p["params/norm/scale"] + p["params/norm/bias"]
    logits = h @ p["params/classes/kernel"] + p["params/classes/bias"]
    share = np.exp(logits - logits.max(1, keepdims=True))
    away = (share / share.sum(1, keepdims=True) - np.eye(2)[y]) / len(x)
    back = away @ p["params/classes/kernel"].T
    return {
        "params/norm/scale": (back * z).sum(0),
        "params/norm/bias": back.sum(0),
        "params/classes/kernel": h.T @ away,
        "params/classes/bias": away.sum(0),
        "batch_stats/norm/mean": p["batch_stats/norm/mean"] - mean,
        "batch_stats/norm/var": p["batch_stats/norm/var"] - var,
    }


def loop(start, is_own):
    """FedAvg with full gradients, in which clients keep their own arrays."""
    w, own = dict(start), [dict(start) for _ in X]
    for _ in range(T):
        trained = []
        for k in range(N):
            p = {name: own[k][name] if is_own(name) else w[name] for name in w}
            for _ in range(E):
                g = gradient(p, k)
                p = {name: p[name] - RATE * g[name] for name in p}
            trained.append(p)
        own, n = trained, [len(x) for x in X]
        w = {
            name: w[name] if is_own(name) else np.average([p[name] for p in own], 0, weights=n)
            for name in w
        }
    return w, [{name: (p if is_own(name) else w)[name] for name in w} for p in own]


@pytest.mark.parametrize("is_fedbn", [False, True])
@pytest.mark.parametrize("client_map", ["vmap", "scan"])
def test_runs_match_their_loop(is_fedbn, client_map):
    """Batches are padded to the largest client, so statistics must ignore rows of weight 0."""
    task, plain = task_of(), fedavg(local_sgd(RATE, steps=E))
    algorithm = personal(plain, where="norm") if is_fedbn else plain
    start = jax.tree.map(lambda x: x.astype(float), task.init(jax.random.key(0)))
    how = {"params": start, "client_map": client_map}
    state, trace = simulate(0, task, algorithm, full_participation(N), T, **how)
    models = jax.tree.map(lambda x: x[0], state.models[0])
    w, own = loop(flat(start), lambda name: is_fedbn and "/norm/" in name)
    for name, x in flat(models.params).items():
        np.testing.assert_allclose(x, w[name], rtol=1e-7, atol=1e-9, err_msg=name)
    if is_fedbn:
        assert trace.upload_size == (6,), "kernel and bias of the last layer"
        for k in range(N):
            mine = jax.tree.map(lambda x, k=k: x[k], models.clients)
            for name, x in flat(algorithm.personal(models.params, mine)).items():
                np.testing.assert_allclose(x, own[k][name], rtol=1e-7, atol=1e-9, err_msg=name)


def test_evaluation_uses_running_statistics():
    """Losses do not depend on other examples, and a negative variance counts as 0."""
    task = task_of()
    params = task.init(jax.random.key(0))
    both = task.evaluate(params, task.train, per_client=True)["loss"]
    one = [task.client_loss(params, jnp.int32(k)) for k in range(N)]
    np.testing.assert_allclose(both, one, rtol=1e-6)
    small = dataclasses.replace(task, block_size=1)
    np.testing.assert_allclose(
        small.evaluate(params, task.train)["loss"],
        task.evaluate(params, task.train)["loss"],
        rtol=1e-6,
    )
    params["batch_stats"]["norm"]["var"] = -np.ones(2)
    assert np.isfinite(task.client_loss(params, jnp.int32(0)))


def test_a_module_that_always_changes_statistics_is_refused():
    with pytest.raises(ValueError, match="module Normed changes its batch_stats in evaluation"):
        task_of(in_training_only=False)


def test_rows_of_weight_0_change_nothing_in_the_included_network():
    """Neither the other rows' logits, nor the statistics of the batch."""
    module, x = BatchNormCNN(3, (4, 5)), jnp.asarray(RNG.normal(size=(4, 8, 6, 1)))
    variables = module.init(jax.random.key(0), x)
    padded = jnp.concatenate([x, 9 * x[:2]])
    weights = jnp.array([1.0, 1, 1, 1, 0, 0])
    alone, moved = module.apply(variables, x, mutable=["batch_stats"])
    logits, others = module.apply(variables, padded, weights, mutable=["batch_stats"])
    np.testing.assert_allclose(logits[:4], alone, rtol=1e-9)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), others, moved)
    first = moved["batch_stats"]["block1"]["norm"]
    kernel = variables["params"]["block1"]["convolution"]["kernel"]
    features = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(first["mean"], features.mean((0, 1, 2)), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(first["var"], features.var((0, 1, 2)), rtol=1e-5)


TABLE = {"learning_rate": 0.1, "local_steps": 5, "batch_size": 8}
FILE = {
    "task": {"name": "digits", "num_clients": 5, "test_fraction": 0.3, "model": "batch_norm_cnn"},
    "num_models": 1,
    "num_rounds": 3,
    "num_seeds": 1,
    "assignment": {"name": "mfa_rand"},
    "algorithms": {"FedBN": TABLE | {"personal": {"where": "norm"}}},
}
