"""Batch norm with running statistics against a NumPy loop, and FedBN."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, full_participation, local_sgd, params_of, personal, simulate
from fedjax_mm.data import FederatedData, client_data
from fedjax_mm.tasks import classification

N, DIM, CLASSES, RATE, STEPS = 3, 2, 3, 0.3, 4
COUNTS = [4, 5, 7]
KEYS = ("bias", "kernel", "mean", "scale", "shift", "var")


class Normed(nn.Module):
    """Batch norm, which ignores padding, before logistic regression."""

    @nn.compact
    def __call__(self, x, weights=None):
        is_tested = not self.is_mutable_collection("batch_stats")
        mask = None if weights is None else weights[:, None] > 0
        x = nn.BatchNorm(is_tested, momentum=0.0, name="norm")(x, mask=mask)
        return nn.Dense(CLASSES, name="classes")(x)


def examples():
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(2, 3, (n, DIM)), rng.integers(0, CLASSES, n)) for n in COUNTS]
    return [(x.astype(np.float32).astype(float), y) for x, y in pairs]


def task_of():
    clients = client_data(examples())
    return classification(FederatedData("normed", "synthetic", CLASSES, clients, clients), Normed())


def to_numpy(params):
    both, statistics = params["params"], params["batch_stats"]["norm"]
    found = {**both["classes"], **statistics}
    found |= {"scale": both["norm"]["scale"], "shift": both["norm"]["bias"]}
    return {name: np.asarray(found[name], np.float64) for name in KEYS}


def loss(w, x, y, mean, var):
    normed = (x - mean) / np.sqrt(var + 1e-5) * w["scale"] + w["shift"]
    logits = normed @ w["kernel"] + w["bias"]
    logits = logits - logits.max(1, keepdims=True)
    return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y])


def trained(w, x, y):
    """Local training by central differences; statistics follow those of the batch."""
    w = {name: value.copy() for name, value in w.items()}
    for _ in range(STEPS):
        new = {name: value.copy() for name, value in w.items()}
        for name in ("bias", "kernel", "scale", "shift"):
            for place in np.ndindex(w[name].shape):
                ends = []
                for sign in (1, -1):
                    moved = {key: value.copy() for key, value in w.items()}
                    moved[name][place] += sign * 1e-6
                    ends.append(loss(moved, x, y, x.mean(0), x.var(0)))
                new[name][place] -= RATE * (ends[0] - ends[1]) / 2e-6
        for name, value in (("mean", x.mean(0)), ("var", x.var(0))):
            new[name] = (1 - RATE) * w[name] + RATE * value
        w = new
    return w


def averaged(parts):
    return {key: np.average([w[key] for w in parts], axis=0, weights=COUNTS) for key in parts[0]}


def test_running_statistics_follow_the_batches_and_are_averaged(x64):
    task, algorithm = task_of(), fedavg(local_sgd(RATE, steps=STEPS))
    start = task.init(jax.random.key(1))
    everybody = full_participation(N)
    state, trace = simulate(0, task, algorithm, everybody, 2, params=[start])
    w = to_numpy(start)
    for _ in range(2):
        w = averaged([trained(w, x, y) for x, y in examples()])
    found = to_numpy(params_of(state)[0])
    for name in KEYS:
        np.testing.assert_allclose(found[name], w[name], rtol=1e-6, atol=1e-8, err_msg=name)
    # Metrics use the running statistics.
    losses = [loss(w, x, y, w["mean"], w["var"]) for x, y in examples()]
    expected = np.average(losses, weights=COUNTS)
    np.testing.assert_allclose(trace.metrics["loss"][-1, 0], expected, rtol=1e-6)


def test_fedbn_keeps_all_of_the_norm(x64):
    task, everybody = task_of(), full_participation(N)
    algorithm = personal(fedavg(local_sgd(RATE, steps=STEPS)), where="norm")
    start = task.init(jax.random.key(1))
    state, trace = simulate(0, task, algorithm, everybody, 2, params=[start])
    assert trace.upload_size == trace.download_size == (DIM * CLASSES + CLASSES,)
    own = [to_numpy(start)] * N
    for _ in range(2):
        own = [trained(w, x, y) for w, (x, y) in zip(own, examples(), strict=True)]
        shared = averaged(own)
        own = [w | {name: shared[name] for name in ("bias", "kernel")} for w in own]
    found = to_numpy(params_of(state)[0])
    np.testing.assert_allclose(found["kernel"], shared["kernel"], rtol=1e-6)
    np.testing.assert_array_equal(found["mean"], 0)
    losses = [loss(w, x, y, w["mean"], w["var"]) for w, (x, y) in zip(own, examples(), strict=True)]
    expected = np.average(losses, weights=COUNTS)
    np.testing.assert_allclose(trace.metrics["personal_loss"][-1, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("shift", [-3.0, 0.5])
def test_a_negative_variance_counts_as_0(shift):
    task = task_of()
    params = task.init(jax.random.key(1))
    params["batch_stats"]["norm"]["var"] = jnp.full(DIM, shift)
    found = task.client_loss(params, jnp.int32(0))
    params["batch_stats"]["norm"]["var"] = jnp.full(DIM, max(shift, 0.0))
    assert found == task.client_loss(params, jnp.int32(0))
