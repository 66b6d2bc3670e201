"""Every number of every part may be traced: in `jax.jit`, `jax.vmap` and sweeps."""

import functools
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_mm
from fedjax_mm import (
    appealing,
    bandit,
    cfl,
    dma_fl,
    edges,
    fedavg,
    fedfair,
    local_sgd,
    mfa_rand,
    noisy,
    oort,
    reporting,
    sequential,
    simulate,
    soft_clusters,
    variance_reduced,
)
from fedjax_mm.asynchrony import bods, fedast, hinge, on_clock, polynomial, shifted_exponential
from fedjax_mm.availability import (
    available,
    bernoulli,
    dropping,
    finishing,
    markov,
    timetable,
)
from fedjax_mm.base.calls import kinds_of
from fedjax_mm.compression import compressed, qsgd, random_k, top_k
from fedjax_mm.optimizers import fedadagrad, fedadam, fedyogi
from fedjax_mm.privacy import AdaptiveClip, private
from fedjax_mm.robust import (
    alie,
    attacking,
    bulyan,
    centered_clipping,
    gaussian,
    geometric_median,
    ipm,
    krum,
    mean,
    median,
    multi_krum,
    nearest_neighbor_mixing,
    robust,
    scaling,
    sign_flip,
    trimmed_mean,
)
from fedjax_mm.schedules import growing_sample_size, inverse_time, per_frame
from fedjax_mm.sweeps import Grid, Setup
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks import least_squares, requiring
from fedjax_mm.topologies import cloud, merging, mixing
from tests.helpers import Featured
from tests.methods import METHODS

N, M, ROUNDS = 8, 2, 4
FEW = np.arange(N) < 2
ADAPTIVE = AdaptiveClip(quantile=0.5, rate=0.2, count_noise=0.1)


@functools.cache
def task():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(N, 4, 2))
    targets = features.sum(-1) + rng.normal(size=(N, 1))
    return requiring(Featured(least_squares(features, targets, ridge=0.1), N), np.full(N, 0.5))


def trained(rate=0.1, **settings):
    return fedavg(local_sgd(rate, steps=2, **settings))


def by(rule):
    return robust(trained(), rule), mfa_rand(N, 1)


def against(attack):
    return attacking(robust(trained(), mean()), FEW, attack), mfa_rand(N, 1)


def when(law):
    return trained(), available(mfa_rand(N, M), law)


def served(optimizer):
    return fedavg(0.1, local_steps=2, server_optimizer=optimizer), mfa_rand(N, M)


def chosen(assignment):
    return trained(), assignment


def method_row(name):
    row = METHODS[name]
    made = lambda **numbers: (row.build(0.1, 2, **numbers), mfa_rand(N, M))  # noqa: E731
    return made, {key: (0.6 * x, x) for key, x in row.numbers.items()}


def stale(weight):
    dispatch = fedast(N, M, at_work=4, ratio=4, reallocate=False, weight=weight)
    return chosen(dispatch)


SUBTLE = {"soft_clusters", "bandit", "bods", "dma_fl", "krum"}
"""Rows that choose the same clients with both values."""

# A factory's numbers with two values each, and a run that they are in.
ROWS = {name: method_row(name) for name in METHODS if METHODS[name].numbers} | {
    "local_sgd": (
        lambda learning_rate, **numbers: (
            fedavg(local_sgd(learning_rate, **numbers)),
            mfa_rand(N, M),
        ),
        {
            "learning_rate": (0.1, 0.2),
            "steps": (1, 3),
            "momentum": (0.5, 0.9),
            "weight_decay": (0.1, 0.5),
            "clip": (0.2, 0.5),
        },
    ),
    "fedavg": (
        lambda local, local_steps: (fedavg(local, local_steps=local_steps), mfa_rand(N, M)),
        {"local": (0.1, 0.2), "local_steps": (1, 3)},
    ),
    "prsgd": (
        lambda steps: (METHODS["prsgd"].factory(local_sgd(0.1, steps=steps)), mfa_rand(N, M)),
        {"steps": (1, 3)},
    ),
    "maxfl": (
        lambda tuning_steps, **more: (
            METHODS["maxfl"].factory(local_sgd(0.1, steps=2), tuning_steps=tuning_steps, **more),
            mfa_rand(N, M),
        ),
        method_row("maxfl")[1] | {"tuning_steps": (1, 3)},
    ),
    "noisy": (
        lambda noise: (noisy(trained(), FEW, noise=noise), mfa_rand(N, M)),
        {"noise": (0.5, 1.0)},
    ),
    "private": (
        lambda **numbers: (private(trained(), **numbers), mfa_rand(N, M)),
        {"clip": (0.1, 0.5), "noise_multiplier": (0.5, 1.0), "clients_per_round": (3.0, 4.0)},
    ),
    "private examples": (
        lambda **numbers: (private(trained(), per="example", **numbers), mfa_rand(N, M)),
        {"clip": (0.1, 0.5), "noise_multiplier": (0.5, 1.0)},
    ),
    "AdaptiveClip": (
        lambda **numbers: (
            private(
                trained(),
                clip=0.1,
                noise_multiplier=1.0,
                clients_per_round=4.0,
                adaptive=AdaptiveClip(**numbers),
            ),
            mfa_rand(N, M),
        ),
        {"quantile": (0.3, 0.5), "rate": (0.2, 0.3), "count_noise": (0.7, 0.9)},
    ),
    "top_k": (
        lambda share: (compressed(trained(), top_k(share)), mfa_rand(N, M)),
        {"share": (0.5, 1.0)},
    ),
    "random_k": (
        lambda share: (compressed(trained(), random_k(share)), mfa_rand(N, M)),
        {"share": (0.5, 1.0)},
    ),
    "qsgd": (
        lambda levels: (compressed(trained(), qsgd(levels)), mfa_rand(N, M)),
        {"levels": (2, 4)},
    ),
    "trimmed_mean": (lambda num_trimmed: by(trimmed_mean(num_trimmed)), {"num_trimmed": (1, 2)}),
    "trimmed_mean share": (lambda share: by(trimmed_mean(share=share)), {"share": (0.15, 0.3)}),
    "krum": (lambda num_attackers: by(krum(num_attackers)), {"num_attackers": (1, 2)}),
    "multi_krum": (
        lambda **numbers: by(multi_krum(**numbers)),
        {"num_attackers": (1, 2), "num_selected": (2, 3)},
    ),
    "bulyan": (lambda num_attackers: by(bulyan(num_attackers)), {"num_attackers": (0, 1)}),
    "geometric_median": (
        lambda smoothing: by(geometric_median(smoothing=smoothing)),
        {"smoothing": (1e-3, 1.0)},
    ),
    "centered_clipping": (lambda radius: by(centered_clipping(radius)), {"radius": (0.05, 0.1)}),
    "nearest_neighbor_mixing": (
        lambda num_attackers: by(nearest_neighbor_mixing(median(), num_attackers)),
        {"num_attackers": (1, 2)},
    ),
    "sign_flip": (lambda factor: against(sign_flip(factor)), {"factor": (1.0, 2.0)}),
    "scaling": (lambda factor: against(scaling(factor)), {"factor": (1.0, 2.0)}),
    "gaussian": (lambda deviation: against(gaussian(deviation)), {"deviation": (1.0, 2.0)}),
    "alie": (lambda z: against(alie(z)), {"z": (1.0, 2.0)}),
    "ipm": (lambda factor: against(ipm(factor)), {"factor": (1.0, 2.0)}),
    "appealing": (
        lambda from_round: chosen(appealing(mfa_rand(N, M), cohort_size=2, from_round=from_round)),
        {"from_round": (1, 3)},
    ),
    "bandit": (
        lambda discount: chosen(bandit(N, M, cohort_size=4, discount=discount)),
        {"discount": (0.5, 0.9)},
    ),
    "fedfair": (
        lambda **numbers: chosen(fedfair(N, M, **numbers)),
        {"alpha": (1.0, 30.0), "memory": (0.1, 0.9)},
    ),
    "oort": (
        lambda **numbers: chosen(
            oort(N, M, cohort_size=4, durations=np.arange(1.0, N + 1), **numbers)
        ),
        {
            "exploration": (0.5, 0.9),
            "exploration_decay": (0.9, 0.98),
            "least_exploration": (0.1, 0.2),
            "uncertainty": (0.1, 0.3),
            "preferred_duration": (2.0, 3.0),
        },
    ),
    "sequential": (
        lambda rounds_per_model: chosen(sequential(N, M, rounds_per_model=rounds_per_model)),
        {"rounds_per_model": (1, 2)},
    ),
    "dma_fl": (
        lambda **numbers: chosen(dma_fl(N, M, cohort_size=4, **numbers)),
        {"threshold": (0.1, 0.5), "weight": (0.5, 1.0)},
    ),
    "variance_reduced": (
        lambda expected_trainings: chosen(
            variance_reduced(N, M, expected_trainings=expected_trainings)
        ),
        {"expected_trainings": (2.0, 4.0)},
    ),
    "on_clock": (
        lambda deadline: chosen(
            on_clock(mfa_rand(N, M), shifted_exponential(N, 1.0), deadline=deadline)
        ),
        {"deadline": (0.8, 1.5)},
    ),
    "polynomial": (lambda exponent: stale(polynomial(exponent)), {"exponent": (0.5, 1.0)}),
    "hinge": (
        lambda **numbers: stale(hinge(**numbers)),
        {"slope": (1.0, 2.0), "free": (0.0, 1.0)},
    ),
    "shifted_exponential": (
        lambda **numbers: chosen(
            on_clock(mfa_rand(N, M), shifted_exponential(N, **numbers), deadline=1.5)
        ),
        {
            "mean": (0.5, 1.0),
            "shift": (0.1, 0.2),
            "slow_factor": (1.5, 2.0),
            "fast_factor": (0.3, 0.5),
        },
    ),
    "bods": (
        lambda alpha: chosen(bods(N, M, cohort_size=4, alpha=alpha)),
        {"alpha": (0.2, 0.7)},
    ),
    "finishing": (
        lambda at_most, every: chosen(
            finishing(mfa_rand(N, M), "loss", at_most=at_most, every=every)
        ),
        {"at_most": (0.1, 3.0), "every": (1, 2)},
    ),
    "finishing at_least": (
        lambda at_least: chosen(finishing(mfa_rand(N, M), "loss", at_least=at_least)),
        {"at_least": (0.1, 3.0)},
    ),
    "bernoulli": (lambda probability: when(bernoulli(probability)), {"probability": (0.5, 0.9)}),
    "markov": (
        lambda **numbers: when(markov(**numbers)),
        {"comes": (0.5, 0.9), "leaves": (0.1, 0.4)},
    ),
    "timetable": (
        lambda period: when(timetable((((0.0, 1.0),), ((1.0, 3.0),)) * (N // 2), period=period)),
        {"period": (3.0, 4.0)},
    ),
    "mixing": (
        lambda **numbers: chosen(mixing(edges(N, M), cloud("clients"), **numbers)),
        {"lost": (0.1, 0.6), "every": (1, 3)},
    ),
    "merging": (lambda distance: chosen(merging(edges(N, M), distance)), {"distance": (1e-6, 9.0)}),
    "cfl": (
        lambda **numbers: (reporting(trained()), cfl(N, M, **numbers)),
        {"eps_1": (0.001, 9.0), "eps_2": (0.1, 0.01)},
    ),
    "soft_clusters": (
        lambda temperature: chosen(soft_clusters(N, M, temperature=temperature)),
        {"temperature": (0.1, 2.0)},
    ),
    "dropping": (
        lambda probability: chosen(dropping(mfa_rand(N, M), probability)),
        {"probability": (0.1, 0.5)},
    ),
    "fedadagrad": (
        lambda **numbers: served(fedadagrad(**numbers)),
        {
            "learning_rate": (0.01, 0.1),
            "b1": (0.0, 0.5),
            "tau": (1e-3, 1e-2),
            "initial_accumulator_value": (0.01, 0.1),
        },
    ),
    "fedadam": (
        lambda **numbers: served(fedadam(**numbers)),
        {
            "learning_rate": (0.01, 0.1),
            "b1": (0.5, 0.9),
            "b2": (0.9, 0.99),
            "tau": (1e-3, 1e-2),
            "initial_accumulator_value": (0.01, 0.1),
        },
    ),
    "fedyogi": (
        lambda **numbers: served(fedyogi(**numbers)),
        {
            "learning_rate": (0.01, 0.1),
            "b1": (0.5, 0.9),
            "b2": (0.9, 0.99),
            "tau": (1e-3, 1e-2),
            "initial_accumulator_value": (0.01, 0.1),
        },
    ),
    "inverse_time": (
        lambda **numbers: (trained(inverse_time(**numbers)), mfa_rand(N, M)),
        {"beta": (0.5, 1.0), "gamma": (5.0, 9.0)},
    ),
    "per_frame": (
        lambda num_models: (
            trained(per_frame(inverse_time(1.0, 1.0), num_models)),
            mfa_rand(N, M),
        ),
        {"num_models": (1, 2)},
    ),
    "growing_sample_size": (
        lambda **numbers: (
            trained(
                batch_size=growing_sample_size(
                    inverse_time(1.0, 5.0),
                    num_examples=4,
                    local_steps=2,
                    noise=(0.0, 1.0),
                    **numbers,
                )
            ),
            mfa_rand(N, M),
        ),
        {"gradient_bound": (1.0, 2.0), "growth": (1.0, 20.0)},
    ),
}


def test_every_number_of_every_factory_is_in_the_table():
    folder = Path(fedjax_mm.__file__).parent
    for path in folder.rglob("*.py"):
        for name in re.findall(r"^@part\ndef (\w+)", path.read_text(), re.MULTILINE):
            module = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
            factory = getattr(__import__(module, fromlist=[name]), name)
            listed = {
                key
                for row in (name, f"{name} share", f"{name} at_least")
                if row in ROWS
                for key in ROWS[row][1]
            }
            for each in inspect.signature(factory, eval_str=True).parameters.values():
                is_number = any(
                    x.dims == () for x in kinds_of(each.annotation) if hasattr(x, "dims")
                )
                assert not is_number or each.name in listed, (name, each.name)


def result(name, numbers):
    made, _ = ROWS[name]
    algorithm, assignment = made(**numbers)
    state, trace = simulate(0, task(), algorithm, assignment, ROUNDS)
    return state.models[0], trace.client_updates, trace.metrics["loss"]


@pytest.mark.parametrize("name", ROWS)
def test_traced_numbers_give_the_results_of_known_ones(name):
    """Under `jax.jit` of `jax.vmap`, against programs in which the numbers are constants."""
    task()  # made here, because tracers must not be cached
    values = ROWS[name][1]
    low, high = ({key: x[i] for key, x in values.items()} for i in range(2))
    both = {key: jnp.asarray(x) for key, x in values.items()}
    found = jax.jit(jax.vmap(lambda numbers: result(name, numbers)))(both)
    expected = jax.jit(lambda: (result(name, low), result(name, high)))()
    for i in range(2):
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected[i]), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=2e-5, atol=2e-6)
    different = zip(*map(jax.tree.leaves, expected), strict=True)
    matters = any(not np.allclose(x, y, rtol=1e-6, equal_nan=True) for x, y in different)
    assert matters or name in SUBTLE


@pytest.mark.parametrize("name", ROWS)
def test_numbers_on_axes_share_a_program(name):
    make, values = ROWS[name]
    ints = {key: [*x] for key, x in values.items() if isinstance(x[0], int)}

    def build(which, **given):
        numbers = {key: low + which * (high - low) for key, (low, high) in values.items()}
        return Setup(task(), *make(**(numbers | given)))

    grid = Grid(build, {"which": [0.0, 1.0], **ints}, ROUNDS, together=[*ints])
    assert len(programs_of(grid, print)) == 1
