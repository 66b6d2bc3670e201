"""FedAvg's options and its checks."""

import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mm import fedavg, full_participation, local_sgd, mfa_rand, simulate
from fedjax_mm.base import Batching, ClientContext, Cohort
from fedjax_mm.local import train_locally
from fedjax_mm.tasks import least_squares, quadratic
from tests.algorithms.test_fedavg import (
    EVERY_AVERAGE,
    HeavyQuadratic,
    averages,
    expected_averages,
)
from tests.helpers import Towards, roll_out
from tests.oracles import multi_model as reference


def test_averages():
    """A step of rate 1 moves client k to its target, so the model moves to the average."""
    ends = averages()([3, 1, -1])
    expected = [(2 * 4.0 + 4 * 8.0) / each for each in (6, 10)]
    expected += [(4.0 + 8.0) / each for each in (2, 4)]
    np.testing.assert_allclose(ends, expected, rtol=1e-6)
    np.testing.assert_allclose(ends, expected_averages([3, 1], [1, 1]), rtol=1e-6)


@pytest.mark.parametrize("client_map", ["vmap", 2, "scan"])
def test_scales_multiply_weights(client_map):
    """Padding has no scale, at any position. A common scale changes only the 1/N average."""
    average, clients = averages(client_map), [-1, 3, 1]
    each = average(clients, [np.nan, 0.5, 3.0])
    np.testing.assert_allclose(each, expected_averages([3, 1], [0.5, 3.0]), rtol=1e-6)
    one, same = average(clients, [np.nan, 1.0, 1.0]), average(clients, [1e9, 2.5, 2.5])
    np.testing.assert_allclose(one, averages()(clients), rtol=1e-6)
    factors = [2.5 if options["server_scale"] == "1/N" else 1.0 for options in EVERY_AVERAGE]
    np.testing.assert_allclose(same, np.array(factors) * one, rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_the_mean_training_loss_is_reported():
    """Averages the losses before each step, for full batches and for two epochs."""
    rng = np.random.default_rng(0)
    features = [rng.normal(size=(n, 2)) for n in (5, 2)]
    targets = [rng.normal(size=n) for n in (5, 2)]
    task = least_squares(features, targets, ridge=0.3)
    data, start = reference.LeastSquares(features, targets, 0.3), np.array([1.0, -2.0])
    key = jax.random.key(6)
    options = [{"steps": 3}, {"epochs": 2, "batch_size": 2}]
    algorithms = [fedavg(local_sgd(0.1, **each)) for each in options]

    @jax.jit
    def send(client):
        local = ClientContext(key, 1, task, client, jnp.asarray(start))
        sent = [each.client(local, each.init(task, start)[0], ())[0] for each in algorithms]
        batches = [task.batch(key, client, jnp.int32(i), Batching(2, "epochs")) for i in range(6)]
        return [each.report["loss"] for each in sent], batches

    for k in range(2):
        reported, batches = send(jnp.int32(k))
        steps = 2 * -(-len(targets[k]) // 2)
        drawn = [
            [int(row) - 5 * k for row, weight in zip(*batch, strict=True) if weight > 0]
            for batch in batches[:steps]
        ]
        assert sorted(itertools.chain(*drawn[: steps // 2])) == list(range(len(targets[k])))
        for loss, rows in zip(reported, ([range(len(targets[k]))] * 3, drawn), strict=True):
            w, losses = start, []
            for batch in map(list, rows):
                residuals = features[k][batch] @ w - targets[k][batch]
                losses.append(0.5 * np.mean(residuals**2) + 0.5 * 0.3 * w @ w)
                w = w - 0.1 * reference.least_squares_gradient(data, k, w, batch)
            assert loss == pytest.approx(np.mean(losses), rel=1e-12)


@pytest.mark.parametrize("server_scale", ["mean", "1/N"])
def test_sparse_updates_are_weighted_like_dense_ones(server_scale):
    """Compares the quadratic's closed form with automatic differentiation."""
    plain = quadratic(5, 2, mu=0.3)
    task = HeavyQuadratic(*(getattr(plain, field.name) for field in dataclasses.fields(plain)))
    groups = roll_out(mfa_rand(5, 2), jax.random.key(1), 4)
    scale = jnp.linspace(0.5, 2.0, groups[0].size).reshape(groups[0].shape)

    def assign(rng_key, round, state, look):
        return Cohort.of_rows(jnp.asarray(groups)[round - 1], scale), state

    assignment = full_participation(5)._replace(num_models=2, assign=assign)

    @functools.partial(jax.jit, static_argnums=0)
    def end(optimizer):
        local = local_sgd(0.2, steps=3, optimizer=optimizer)
        algorithm = fedavg(local, server_scale=server_scale)
        how = {"params": jnp.arange(11.0)}
        return (
            simulate(jax.random.key(0), task, algorithm, assignment, 4, **how)[0].models[0].params
        )

    sparse, dense = end(optax.sgd), end(lambda rate: optax.sgd(rate))
    np.testing.assert_allclose(sparse, dense, rtol=1e-5, atol=1e-5)


def test_server_scales_agree_with_full_participation():
    ends = averages()([2, 0, 3, 1])
    np.testing.assert_allclose(ends[::2], ends[1::2], rtol=1e-6)


def test_traced_learning_rates_are_accepted():
    @jax.jit
    @jax.vmap
    def end(learning_rate):
        algorithm = fedavg(learning_rate, local_steps=1)
        return simulate(jax.random.key(0), Towards(jnp.ones(4)), algorithm, mfa_rand(4, 2), 2)[0]

    assert end(jnp.array([0.1, 0.2])).models[0].params["w"].shape == (2, 2, 3)


@dataclasses.dataclass(frozen=True)
class Layers:
    """Three layers, of which the second has one MiB. The batch of step t is ``examples[t]``."""

    examples: Any

    def batch(self, rng_key, client, step, how):
        return self.examples[step % len(self.examples)]

    def loss(self, params, batch):
        hidden = jnp.tanh(jnp.tanh(batch @ params["first"]) @ params["second"])
        return jnp.mean((hidden @ params["third"] - params["scalar"]) ** 2)


def test_gradients_of_large_models_are_computed_in_turn():
    """The results are the same, and parameters are not copied."""
    keys = jax.random.split(jax.random.key(3), 4)
    params = {
        "first": jax.random.normal(keys[0], (4, 512)),
        "second": 0.05 * jax.random.normal(keys[1], (512, 512)),
        "third": 0.05 * jax.random.normal(keys[2], (512, 1)),
        "scalar": jnp.float32(1),
        "nothing": jnp.zeros((0, 3)),
    }
    task = Layers(jax.random.normal(keys[3], (3, 20, 4)))

    def run(params):
        sgd, how = optax.sgd(0.01), Batching(20)
        local = ClientContext(jax.random.key(0), 1, task, jnp.int32(0), params)
        return train_locally(local, sgd, 3, how)

    expected, losses, gradient = params, [], jax.jit(jax.value_and_grad(task.loss))
    for examples in task.examples:
        loss, gradients = gradient(expected, examples)
        losses.append(float(loss))
        expected = jax.tree.map(lambda x, dx: x - 0.01 * dx, expected, gradients)
    program = jax.jit(run).lower(params).compile()
    trained, loss = program(params)
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)
    for name, got in trained.items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-5, atol=1e-5)
        assert got.size == 0 or np.abs(got - params[name]).max() > 1e-4
    # One copy before the first step, because the program does not own its argument.
    assert len(re.findall(r"f32\[512,512\]\S* copy\(", program.as_text())) == 1
