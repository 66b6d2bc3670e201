"""IFCA against the paper's loop, and a small version of its synthetic experiment."""

import functools
import tomllib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, ifca, local_sgd, simulate
from fedjax_mm.base import Look, keys
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.tasks import least_squares
from tests.helpers import remembering, slow_unless
from tests.oracles import clusters as oracle

N, M, K, DIM, ROUNDS, SEED, RATE, RIDGE = 7, 3, 4, 4, 30, 5, 0.05, 0.3


def algorithm_of(average, rate, steps=1):
    scale = "1/N" if average == "gradients" else "mean"
    return fedavg(local_sgd(rate, steps=steps), server_scale=scale, weighted=False)


# Whole runs


@functools.cache
def problem():
    """Clients of 1 to 9 examples, in two groups with different targets."""
    rng = np.random.default_rng(0)
    counts = rng.permutation([1, 2, 4, 5, 7, 8, 9])
    X = [rng.normal(size=(n, DIM)) for n in counts]
    targets = [np.full(DIM, 2.0), np.full(DIM, -1.0)]
    y = [x @ targets[i % 2] + rng.normal(size=len(x)) for i, x in enumerate(X)]
    return oracle.Problem(X, y, RIDGE)


def starts():
    """Initial models, the third of which is too far away to get any client."""
    near = np.random.default_rng(2).normal(size=(M - 1, DIM))
    return np.concatenate([near, np.full((1, DIM), 50.0)])


@functools.cache
def cohorts(cohort_size):
    if cohort_size == N:
        return [range(N)] * ROUNDS

    def of_round(t):
        key = keys.assignment_key(keys.round_key(jax.random.key(SEED), t))
        return permutation(key, N, cohort_size)

    return np.asarray(jax.vmap(of_round)(jnp.arange(1, ROUNDS + 1))).tolist()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("average", "steps", "cohort_size"),
    [
        ("models", 3, K),
        ("gradients", 1, K),
        slow_unless(False, "models", 1, N),
        slow_unless(False, "gradients", 1, N),
    ],
)
def test_ifca_matches_the_papers_loop(average, steps, cohort_size):
    size = None if cohort_size == N else cohort_size
    assignment = remembering(ifca(N, M, cohort_size=size, average=average), ROUNDS)
    algorithm = algorithm_of(average, RATE, steps)
    task = least_squares(problem().X, problem().y, ridge=RIDGE)

    @jax.jit
    def program(rng_key, task, start):
        state, _ = simulate(rng_key, task, algorithm, assignment, ROUNDS, params=start)
        return state.models[0].params, state.assignment[1]

    params, rows = program(jax.random.key(SEED), task, starts())
    expected = oracle.run(problem(), starts(), cohorts(cohort_size), RATE, steps, average=average)
    for t in range(ROUNDS):
        found = [[int(i) for i in row if i >= 0] for row in rows[t]]
        assert found == expected.clusters[t], t + 1
    np.testing.assert_allclose(params, expected.theta[-1], rtol=0, atol=1e-10)
    # The third cluster stays empty, and some clients change theirs.
    np.testing.assert_array_equal(params[2], starts()[2])
    joined = {(i, j) for each in expected.clusters for j in range(M) for i in each[j]}
    assert len(joined) > N


# The experiment of the paper


CLIENTS, CLUSTERS, EXAMPLES, SIZE, NOISE = 20, 2, 50, 50, 0.1
FLOOR = NOISE * np.sqrt(SIZE * CLUSTERS / (EXAMPLES * CLIENTS))
LENGTH = 150
MSE_RATE = 0.1  # of the mean squared error, which is twice the loss of `least_squares`
STARTS = 24


def data_of(distance, seed):
    """Two equal clusters with targets r Bernoulli(1/2)^d, and starts Bernoulli(1/2)^d."""
    rng = np.random.default_rng(seed)
    targets = distance * rng.binomial(1, 0.5, (CLUSTERS, SIZE)).astype(float)
    X = rng.normal(size=(CLIENTS, EXAMPLES, SIZE))
    noise = NOISE * rng.normal(size=(CLIENTS, EXAMPLES))
    y = np.einsum("ind,id->in", X, np.repeat(targets, CLIENTS // CLUSTERS, axis=0)) + noise
    return X, y, targets, rng.binomial(1, 0.5, (STARTS, CLUSTERS, SIZE)).astype(float)


@functools.cache
def experiment(average):
    """Compiles one program for all data."""
    chex.clear_trace_counter()
    assignment = ifca(CLIENTS, CLUSTERS, average=average)
    algorithm = algorithm_of(average, 2 * MSE_RATE)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def program(task, starts):
        def one(start):
            state, trace = simulate(
                0, task, algorithm, assignment, LENGTH, params=start, record_every=LENGTH
            )
            return state.models[0].params, trace.client_updates[-1] / LENGTH

        return jax.vmap(one)(starts)

    return program


def outcome(distance, seed, average="gradients"):
    """Parameters, errors from the nearest and the matched targets, and mean cluster sizes."""
    X, y, targets, starts = data_of(distance, seed)
    params, sizes = experiment(average)(least_squares(list(X), list(y), ridge=1e-9), starts)
    errors = np.linalg.norm(np.asarray(params)[:, :, None] - targets, axis=-1)
    matched = np.minimum(errors[:, 0, 0] + errors[:, 1, 1], errors[:, 0, 1] + errors[:, 1, 0]) / 2
    return params, errors.min(2).mean(1), matched, np.asarray(sizes)


@pytest.mark.usefixtures("x64")
def test_some_starts_find_the_clusters_and_the_others_collapse():
    """Starts with errors below 0.6 s find both clusters, up to the statistical error."""
    params, errors, matched, sizes = outcome(1.0, 0)
    is_found = errors < 0.6 * NOISE
    # Half of the starts, within 4 standard errors of the binomial law.
    assert abs(is_found.sum() - STARTS / 2) < 4 * np.sqrt(STARTS / 4)
    assert 0 < is_found.sum() < STARTS
    np.testing.assert_allclose(np.median(errors[is_found]), FLOOR, rtol=0.15)
    np.testing.assert_allclose(matched[is_found], errors[is_found], rtol=1e-12)
    assert errors[~is_found].min() > 2.5
    # In runs that collapse, one model has nearly all clients.
    assert sizes[~is_found].max(1).min() > 0.8 * CLIENTS
    assert sizes[is_found].max(1).max() < 0.8 * CLIENTS
    X, y, _, starts = data_of(1.0, 0)
    problem = oracle.Problem(list(X), list(y), 1e-9)
    everybody = [range(CLIENTS)] * LENGTH
    for start, found in list(zip(starts, params, strict=True))[:3]:
        how = {"rate": 2 * MSE_RATE, "num_steps": 1, "average": "gradients"}
        expected = oracle.run(problem, start, everybody, **how)
        np.testing.assert_allclose(found, expected.theta[-1], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_near_clusters_are_not_found():
    """At r = 0.1 the targets are nearer to each other than to any start."""
    _, errors, _, sizes = outcome(0.1, 1)
    assert (errors > 0.6 * NOISE).all()
    assert sizes.max(1).min() > 0.8 * CLIENTS


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_fewer_starts_collapse_if_models_are_averaged():
    """The steps of a small cluster are then as large as those of a large one."""
    found = [outcome(1.0, 0, average)[1] < 0.6 * NOISE for average in ("gradients", "models")]
    assert found[0].sum() + 4 < found[1].sum()


# Choices


def choices(losses, **how):
    cohort, _ = ifca(losses.shape[1], len(losses), **how).assign(
        jax.random.key(0), 1, (), Look(losses=lambda: jnp.asarray(losses))
    )
    return dict(zip(cohort.clients.tolist(), cohort.models.tolist(), strict=True)), cohort


def test_ties_go_to_the_first_model_and_nobody_joins_a_diverged_one():
    losses = np.array(
        [[np.nan, 2.0, 1.0, np.nan], [3.0, 2.0, np.nan, np.nan], [5.0, 1.0, 1.0, 0.0]]
    )
    found, cohort = choices(losses)
    assert found == {0: 1, 1: 2, 2: 0, 3: 2}
    assert cohort.scale is None
    assert cohort.models.dtype == jnp.int32


def test_scales_turn_the_division_by_n_into_one_by_the_cohort_size():
    _, cohort = choices(np.ones((2, 6)), cohort_size=4, average="gradients")
    np.testing.assert_array_equal(cohort.scale, [1.5] * 4)
    assert cohort.scale.weak_type


def test_cohorts_are_uniform():
    """Frequencies are within 4 standard errors, and no cohort repeats a client."""
    assignment, look = ifca(N, M, cohort_size=K), Look(losses=lambda: jnp.zeros((M, N)))
    seeds = jax.random.split(jax.random.key(0), 5000)
    draw = jax.jit(jax.vmap(lambda key: assignment.assign(key, 1, (), look)[0].clients))
    clients = np.asarray(draw(seeds))
    assert (np.diff(np.sort(clients, axis=1), axis=1) > 0).all()
    counts = np.bincount(clients.ravel(), minlength=N)
    p = K / N
    assert np.abs(counts - 5000 * p).max() < 4 * np.sqrt(5000 * p * (1 - p))


QUADRATIC = 'name = "quadratic", num_clients = 6, block_size = 2, mu = 0.1, start = "normal"'
FILE = """
num_models = 2
num_rounds = 2
num_seeds = 1
task = { name = "digits", num_clients = 6 }
assignment = { name = "ifca", cohort_size = 4 }

[algorithms.IFCA]
weighted = false
learning_rate = 0.1
local_steps = 1

[algorithms.gradients]
weighted = false
server_scale = "1/N"
assignment = { name = "ifca", average = "gradients" }
learning_rate = 0.1
local_steps = 1
"""


def test_a_file_has_all_settings():
    """Reads the cohort size of one algorithm and the average of the other."""
    experiment = validate(Experiment, tomllib.loads(FILE))
    look = Look(losses=lambda: jnp.zeros((2, 6)))
    tables = [each.assignment or experiment.assignment for each in experiment.algorithms.values()]
    cohorts = [each.build(6, 2).assign(jax.random.key(0), 1, (), look)[0] for each in tables]
    assert [len(cohort.clients) for cohort in cohorts] == [4, 6]
    assert [cohort.scale is None for cohort in cohorts] == [True, False]


def test_equal_starts_are_refused_in_a_file():
    text = FILE.replace('name = "digits", num_clients = 6', QUADRATIC)
    with pytest.raises(ValueError, match="ifca sends all clients to one model if models start eq"):
        validate(Experiment, tomllib.loads(text))
    one = validate(Experiment, tomllib.loads(text.replace("num_models = 2", "num_models = 1")))
    assert one.num_models == 1
