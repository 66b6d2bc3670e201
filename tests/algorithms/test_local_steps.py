"""Gradient functions that get the key and the number of a local step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import averaging, local_sgd, mfa_rr, simulate
from fedjax_mm.base import keys
from fedjax_mm.local import StepGradient, loss_and_gradient
from tests.helpers import Bowls

pytestmark = pytest.mark.usefixtures("x64")

E, N, T = 3, 2, 4  # steps, clients and models, rounds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shown(Bowls):
    """Shows the parameters, one for each local step of a round."""

    def init(self, rng_key):
        return jnp.zeros(E)

    def metrics(self, rng_key, params):
        return {"params": params}


def bits(rng_key):
    return jax.random.bits(rng_key, (), jnp.uint32).astype(float)


def changed(seed, change):
    """What every step adds, ``[rounds, models, steps]``, if one client trains each model."""
    local = local_sgd(1.0, steps=E)

    def train(context):
        @StepGradient
        def gradient_fn(step, params, batch):
            loss, _ = loss_and_gradient(context.task)(params, batch)
            return loss, -jnp.zeros(E).at[step.number].set(change(step))

        return local.train(context, gradient_fn=gradient_fn)

    algorithm = averaging(train, num_gradients=E)
    _, trace = simulate(seed, Shown.of([0.0] * N), algorithm, mfa_rr(N, N), T)
    return np.diff(trace.metrics["params"], axis=0)


def test_no_two_steps_clients_models_rounds_or_seeds_share_a_key():
    """Nor is one of them a key by which batches and dropped units are drawn."""
    found = np.stack([changed(seed, lambda step: bits(step.rng_key)) for seed in (0, 1)])
    assert found.shape == (2, T, N, E)
    assert len(np.unique(found)) == found.size
    pairs = jnp.arange(N * N, dtype=jnp.int32)
    for t in range(1, T + 1):
        of_round = keys.round_key(jax.random.key(0), t)
        for own in keys.slot_keys(of_round, pairs // N, pairs % N, N):
            others = [own, *(jax.random.fold_in(own, step) for step in range(E))]
            assert not {float(bits(key)) for key in others} & set(found.ravel())


def test_steps_are_numbered_from_0_in_every_round():
    found = changed(0, lambda step: 1.0 + step.number)
    np.testing.assert_array_equal(found, np.broadcast_to([1.0, 2.0, 3.0], found.shape))
