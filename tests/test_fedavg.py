"""FedAvg's options and its checks."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fedjax_mm.algorithms.local import train_locally

from fedjax_mm import Quadratic, fedavg, full_participation, mfa_rand, quadratic, simulate
from fedjax_mm.base import Batching
from tests.helpers import Towards, replay


class Heavy(Towards):
    """Client k weighs k + 1."""

    def weight(self, client):
        return (client + 1).astype(jnp.float32)


jax.tree_util.register_dataclass(Heavy, data_fields=["targets"], meta_fields=["dim"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (2 * 4.0 + 4 * 8.0) / 6),
        ({"weighted": False}, (4.0 + 8.0) / 2),
        ({"server_scale": "1/N"}, (2 * 4.0 + 4 * 8.0) / 10),
        ({"server_scale": "1/N", "weighted": False}, (4.0 + 8.0) / 4),
    ],
)
def test_averages(options, expected):
    """A step of rate 1 puts client k at its target, so the model moves to the average."""
    task = Heavy(jnp.array([0.0, 4.0, 100.0, 8.0]))
    state, _ = simulate(
        jax.random.key(0),
        task,
        fedavg(1.0, local_steps=1, **options),
        replay([[[3, 1]]], 4),
        1,
        params={"w": jnp.zeros(3)},
    )
    np.testing.assert_allclose(state.models.params["w"][0], expected, rtol=1e-6)


class HeavyQuadratic(Quadratic):
    """Client k weighs k + 1."""

    def weight(self, client):
        return (client + 1).astype(jnp.float32)


jax.tree_util.register_dataclass(
    HeavyQuadratic,
    data_fields=["mu", "minimizer", "optimum"],
    meta_fields=["num_clients", "block_size"],
)


@pytest.mark.parametrize("server_scale", ["mean", "1/N"])
def test_sparse_updates_are_weighted_like_dense_ones(server_scale):
    """The quadratic's closed form against automatic differentiation."""
    plain = quadratic(5, 2, mu=0.3)
    task = HeavyQuadratic(*(getattr(plain, field.name) for field in dataclasses.fields(plain)))
    sparse, dense = (
        simulate(
            jax.random.key(0),
            task,
            fedavg(0.2, local_steps=3, server_scale=server_scale, local_optimizer=optimizer),
            mfa_rand(5, 2),
            4,
            params=jnp.arange(11.0),
        )[0].models.params
        for optimizer in (optax.sgd, lambda rate: optax.sgd(rate))
    )
    np.testing.assert_allclose(sparse, dense, rtol=1e-5, atol=1e-5)


def test_server_scales_agree_with_full_participation():
    task, assignment = Towards(jnp.arange(5.0)), full_participation(5)
    ends = [
        simulate(
            jax.random.key(0), task, fedavg(0.1, local_steps=2, server_scale=scale), assignment, 4
        )[0].models.params["w"]
        for scale in ("mean", "1/N")
    ]
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be positive"),
        ({"learning_rate": -0.1}, "learning_rate is -0.1"),
        ({"learning_rate": float("inf")}, "learning_rate is inf"),
        ({"learning_rate": jnp.array([0.1, 0.0])}, "learning_rate is"),
        ({"local_steps": 0}, "local_steps is 0"),
        ({"local_steps": 2.5}, "local_steps is 2.5; it must be a positive whole number"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"server_scale": "sum"}, "server_scale is 'sum'; it must be 'mean' or '1/N'"),
    ],
)
def test_wrong_arguments_are_refused_before_compilation(arguments, message):
    with pytest.raises(ValueError, match=message):
        fedavg(**({"learning_rate": 0.1, "local_steps": 5} | arguments))


def test_traced_learning_rates_are_accepted():
    def end(learning_rate):
        algorithm = fedavg(learning_rate, local_steps=1)
        return simulate(jax.random.key(0), Towards(jnp.ones(4)), algorithm, mfa_rand(4, 2), 2)[0]

    assert jax.vmap(end)(jnp.array([0.1, 0.2])).models.params["w"].shape == (2, 2, 3)


@dataclasses.dataclass(frozen=True)
class Layers:
    """The second of three is of a MiB; step t's batch is ``examples[t]``."""

    examples: Any

    def batch(self, rng_key, client, step, how):
        return self.examples[step % len(self.examples)]

    def loss(self, params, batch):
        hidden = jnp.tanh(jnp.tanh(batch @ params["first"]) @ params["second"])
        return jnp.mean((hidden @ params["third"] - params["scalar"]) ** 2)


def test_large_models():
    """Their gradients wait for each other: the same numbers, and parameters are not copied."""
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
        return train_locally(jax.random.key(0), task, jnp.int32(0), params, sgd, 3, how)

    expected = params
    for examples in task.examples:
        gradients = jax.grad(task.loss)(expected, examples)
        expected = jax.tree.map(lambda x, dx: x - 0.01 * dx, expected, gradients)
    program = jax.jit(run).lower(params).compile()
    for name, got in program(params).items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-5, atol=1e-5)
        assert got.size == 0 or np.abs(got - params[name]).max() > 1e-4
    # Once, before the first step: the argument is not the program's to overwrite.
    assert len(re.findall(r"f32\[512,512\]\S* copy\(", program.as_text())) == 1
