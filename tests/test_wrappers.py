"""Neutral wrappers change nothing, gradients are right, runs resume, and seeds are independent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fedjax_mm import (
    advance,
    fedavg,
    mfa_rand,
    noisy,
    params_of,
    personal,
    simulate,
)
from fedjax_mm.asynchrony import on_clock, shifted_exponential
from fedjax_mm.availability import arriving, available, bernoulli, dropping, finishing
from fedjax_mm.compression import compressed, random_k, top_k
from fedjax_mm.privacy import private
from fedjax_mm.robust import attacking, bucketing, centered_clipping, ipm, mean, median, robust
from fedjax_mm.tasks import quadratic

N, M, ROUNDS = 6, 2, 3
EVENS = np.arange(N) % 2 == 0


def hidden(algorithm, clip, noise):
    return private(algorithm, clip=clip, noise_multiplier=noise, clients_per_round=N / M)


def nothing(path):
    return False


# Wrappers of an algorithm and an assignment, with a neutral and with another setting.
WRAPPERS = {
    "available": (
        lambda f, a: (f, available(a, bernoulli(1.0))),
        lambda f, a: (f, available(a, bernoulli(0.6))),
    ),
    "replaced": (
        lambda f, a: (f, available(a, bernoulli(1.0), when_absent="replace")),
        lambda f, a: (f, available(a, bernoulli(0.6), when_absent="replace")),
    ),
    "dropping": (
        lambda f, a: (f, dropping(a, 0.0)),
        lambda f, a: (f, dropping(a, 0.4)),
    ),
    "on a clock": (
        lambda f, a: (f, on_clock(a, shifted_exponential(N))),
        lambda f, a: (f, on_clock(a, shifted_exponential(N), first=2)),
    ),
    "jobs": (
        lambda f, a: (f, arriving(finishing(a, "loss", at_most=-9.0), [0] * M)),
        lambda f, a: (f, arriving(finishing(a, "loss", at_most=[-9.0, -0.001]), [1, 0])),
    ),
    "noisy": (
        lambda f, a: (noisy(f, EVENS, noise=0.0), a),
        lambda f, a: (noisy(f, EVENS, noise=0.5), a),
    ),
    "personal": (
        lambda f, a: (personal(f, nothing), a),
        lambda f, a: (personal(f, nothing, own_steps=1), a),
    ),
    "compressed": (
        lambda f, a: (compressed(f, top_k(1.0)), a),
        lambda f, a: (compressed(f, random_k(0.6)), a),
    ),
    "private": (
        lambda f, a: (hidden(f, 1e6, 0.0), a),
        lambda f, a: (hidden(f, 0.05, 0.3), a),
    ),
    "robust": (
        lambda f, a: (robust(f, mean()), a),
        lambda f, a: (attacking(robust(f, bucketing(median(), 2)), EVENS, ipm(0.5)), a),
    ),
    "all of them": (
        lambda f, a: (
            robust(hidden(compressed(noisy(f, EVENS, noise=0.0), top_k(1.0)), 1e6, 0.0), mean()),
            on_clock(dropping(available(a, bernoulli(1.0)), 0.0), shifted_exponential(N)),
        ),
        lambda f, a: (
            robust(
                hidden(compressed(noisy(f, EVENS, noise=0.5), random_k(0.6)), 0.05, 0.3),
                centered_clipping(0.1),
            ),
            on_clock(dropping(available(a, bernoulli(0.8)), 0.2), shifted_exponential(N), first=2),
        ),
    ),
}


def trained(wrap):
    """A function from seed and learning rate to the models after three rounds."""

    task = quadratic(N, 3, mu=0.1)

    def run(seed, rate):
        algorithm, assignment = wrap(fedavg(rate, local_steps=2, weighted=False), mfa_rand(N, M))
        return params_of(simulate(jax.random.key(seed), task, algorithm, assignment, ROUNDS)[0])

    return run


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_neutral_wrapper_changes_no_draw_and_no_model(name):
    neutral, _ = WRAPPERS[name]
    bare, wrapped = (
        jax.jit(jax.vmap(trained(wrap), (0, None)))(jnp.arange(8), 0.2)
        for wrap in (lambda f, a: (f, a), neutral)
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), wrapped, bare)


QUICK = ("private", "all of them")


@pytest.mark.parametrize("name", QUICK)
def test_gradients_are_those_of_finite_differences(name, x64):
    run = trained(WRAPPERS[name][1])

    def loss(rate, seed):
        return sum(jnp.sum((x - 1) ** 2) for x in jax.tree.leaves(run(seed, rate)))

    of_seeds = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))
    seeds, step = jnp.arange(64), 1e-5
    low, high = (of_seeds(0.2 + sign * step, seeds)[0] for sign in (-1, 1))
    found = of_seeds(0.2, seeds)[1]
    np.testing.assert_allclose(found, (high - low) / (2 * step), rtol=1e-4, atol=1e-7)
    assert np.ptp(found) > 0


@pytest.mark.parametrize("name", ["all of them"])
def test_seeds_do_not_depend_on_their_neighbours(name):
    run, seeds = trained(WRAPPERS[name][1]), jnp.arange(2000)
    together = jax.jit(jax.vmap(run, (0, None)))(seeds, 0.2)
    alone = jax.jit(lambda seeds: jax.lax.map(lambda seed: run(seed, 0.2), seeds))(seeds)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), together, alone
    )


@pytest.mark.parametrize("name", ["all of them"])
def test_runs_resume_exactly_and_split_over_two_devices(name):
    algorithm, assignment = WRAPPERS[name][1](fedavg(0.2, local_steps=2), mfa_rand(N, M))
    parts, key = (quadratic(N, 3, mu=0.1), algorithm, assignment), jax.random.key(0)
    # XLA drops loops of one round, and then rounds other sums.
    expected, _ = simulate(key, *parts, 5)
    first, _ = simulate(key, *parts, 2)
    resumed, _ = advance(first, *parts, 3)
    jax.tree.map(np.testing.assert_array_equal, *map(numbers_of, (resumed, expected)))

    def run(key):
        return simulate(key, *parts, 5, client_axis="clients")[0]

    mesh = jax.make_mesh((2,), ("clients",), devices=jax.devices()[:2])
    split = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6),
        *map(numbers_of, (split(key), expected)),
    )


def numbers_of(state):
    return state._replace(rng_key=jax.random.key_data(state.rng_key))
