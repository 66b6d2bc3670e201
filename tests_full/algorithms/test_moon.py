"""MOON with own parts, dropout and batch norm: chunks, devices, pauses, seeds and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fedjax_mm import advance, fedavg, local_sgd, moon, simulate
from fedjax_mm.tasks import BatchNormCNN
from tests.algorithms.test_moon import CASES, MU, RATE, ROUNDS, SOME, E, close, local, task_of
from tests.test_wrappers import numbers_of


@pytest.mark.parametrize("name", CASES)
def test_runs_depend_neither_on_chunks_nor_on_devices_nor_on_pauses(name, x64):
    make, wrap = CASES[name]
    parts, key = (make(), wrap(moon(local(), mu=MU)), SOME), jax.random.key(0)
    how = {"params": jax.tree.map(lambda x: x.astype(float), parts[0].init(key))}
    expected, _ = simulate(key, *parts, ROUNDS, **how, client_map="scan")
    for each in ("vmap", 2):
        state, _ = simulate(key, *parts, ROUNDS, **how, client_map=each)
        exact(state, expected)
    first, _ = simulate(key, *parts, 1, **how, client_map="scan")
    exact(advance(first, *parts, ROUNDS - 1, client_map="scan")[0], expected)

    def run(key):
        return simulate(key, *parts, ROUNDS, **how, client_axis="clients")[0]

    mesh = jax.make_mesh((2,), ("clients",), devices=jax.devices()[:2])
    split = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    exact(split(key), expected)


def exact(state, expected):
    close(*map(numbers_of, (state, expected)), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_seeds_do_not_depend_on_their_neighbours(name):
    make, wrap = CASES[name]
    task, algorithm, seeds = make(), wrap(moon(local(), mu=MU)), jnp.arange(50)

    def run(seed):
        return simulate(jax.random.key(seed), task, algorithm, SOME, ROUNDS)[1].metrics

    together = jax.jit(jax.vmap(run))(seeds)
    close(together, jax.jit(lambda seeds: jax.lax.map(run, seeds))(seeds))


def test_gradients_with_dropout_are_those_of_finite_differences(x64):
    make, wrap = CASES["dropout"]
    task = make()

    def loss(rate, seed):
        algorithm = wrap(moon(local_sgd(rate, steps=E), mu=MU))
        key = jax.random.key(seed)
        return simulate(key, task, algorithm, SOME, ROUNDS)[1].metrics["test_loss"][-1].sum()

    of_seeds = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))
    seeds, step = jnp.arange(8), 1e-6
    low, high = (of_seeds(RATE + sign * step, seeds)[0] for sign in (-1, 1))
    found = of_seeds(RATE, seeds)[1]
    # One seed may pass a kink of ReLU or of pooling between the two rates.
    errors = np.abs(found - (high - low) / (2 * step)) / (1e-6 + np.abs(found))
    assert np.median(errors) < 1e-4
    assert np.sum(errors > 1e-3) <= 1


def test_the_included_network_with_batch_norm_has_features():
    task = task_of(BatchNormCNN(3, (3, 4)))
    none, bare, full = (
        simulate(0, task, f, SOME, ROUNDS)[1].metrics["loss"]
        for f in (moon(local(), mu=0.0), fedavg(local()), moon(local(), mu=MU))
    )
    close(none, bare)
    assert np.abs(full - bare).max() > 1e-3
