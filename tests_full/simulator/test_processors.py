"""Clients that train several models in a round."""

import tomllib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, full_participation, local_sgd, mfa_rand, simulate
from fedjax_mm.assignments.sampling import check_processors, draw_cohort
from fedjax_mm.base import Padded, keys
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.tasks import least_squares
from tests.helpers import NOTHING_TO_SEE, Towards, slow_unless
from tests.oracles import processors as oracle

N, M, K, ROUNDS, SEED, RATE, RIDGE = 7, 4, 6, 12, 5, 0.3, 0.1
SEVERAL = (1, 3, 1, 2, 9, 1, 2)
TARGETS = np.array([1.0, -2.0, 4.0, 0.5, 8.0, -1.0, 3.0])


def cohort_of(assignment, key):
    return assignment.assign(key, 1, (), NOTHING_TO_SEE)[0]


def pairs_of(cohorts):
    """Counts how often each client trains each model, ``[draws, N, M]``."""
    clients, models = np.asarray(cohorts.clients), np.asarray(cohorts.models)
    models = np.broadcast_to(models, clients.shape)
    each = np.zeros((len(clients), N, M), int)
    draw, slot = np.nonzero(clients >= 0)
    np.add.at(each, (draw, clients[draw, slot], models[draw, slot]), 1)
    return each


def keys_of(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


# Whole runs


def drawn(cohort_size):
    """Yields the pairs of client and model, and their lots for all models, of each round."""

    def of_round(t):
        key = keys.assignment_key(keys.round_key(jax.random.key(SEED), t))
        first = draw_cohort(key, N, M, cohort_size)
        shape = len(first.clients), M
        return first.clients, jax.random.bits(keys.processors_key(key), shape, jnp.uint32)

    models = np.asarray(draw_cohort(jax.random.key(0), N, M, cohort_size).models)
    clients, lots = jax.device_get(jax.jit(jax.vmap(of_round))(jnp.arange(1, ROUNDS + 1)))
    for members, words in zip(clients, lots, strict=True):
        there = np.flatnonzero(members >= 0)
        yield [(int(members[i]), int(models[i])) for i in there], words[there].tolist()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("cohort_size", "client_map"),
    [(K, 2), slow_unless(False, N, "vmap"), slow_unless(False, M, "scan")],
)
def test_runs_match_their_loop(cohort_size, client_map):
    """Draws are unbiased, so a client's factor is 1/p with its own p."""
    assignment = mfa_rand(N, M, cohort_size=cohort_size, unbiased=True, processors=SEVERAL)
    algorithm = fedavg(local_sgd(RATE, steps=1), server_scale="1/N")
    start = np.random.default_rng(0).normal(size=(M, 1))
    task = least_squares([np.ones((1, 1))] * N, TARGETS[:, None], ridge=RIDGE)

    @jax.jit
    def run(rng_key, task):
        how = {"params": start, "client_map": client_map}
        state, trace = simulate(rng_key, task, algorithm, assignment, ROUNDS, **how)
        return state.models[0].params, trace.client_updates

    params, updates = run(jax.random.key(SEED), task)
    num_own = np.minimum(SEVERAL, M)
    factors, expected = N * M / (cohort_size * num_own), start
    for t, (first, lots) in enumerate(drawn(cohort_size), start=1):
        trained = oracle.further_models(first, lots, SEVERAL, M)
        expected = oracle.round_of(expected, trained, TARGETS, RIDGE, RATE, factors)
        assert updates[t].tolist() == [len(clients) for clients in trained], t
    np.testing.assert_allclose(params, expected, rtol=0, atol=1e-10)


def test_a_processor_for_each_model_is_full_participation():
    """All clients train every model, regardless of the draw."""
    task, algorithm = Towards(jnp.asarray(TARGETS)), fedavg(RATE, local_steps=2)
    start = {"w": jnp.zeros(3)}

    @jax.jit
    def run(task):
        assignments = mfa_rand(N, M, processors=M), full_participation(N)
        runs = [simulate(0, task, algorithm, each, 3, params=start)[0] for each in assignments]
        return [state.models[0].params["w"] for state in runs]

    several, one = run(task)
    np.testing.assert_allclose(several, np.repeat(one, M, axis=0), rtol=1e-6)


# Draws


@pytest.mark.parametrize("cohort_size", [None, K])
@pytest.mark.parametrize("processors", [1, (1,) * N])
def test_one_processor_per_client_changes_nothing(processors, cohort_size):
    plain = mfa_rand(N, M, cohort_size=cohort_size, unbiased=True)
    same = mfa_rand(N, M, cohort_size=cohort_size, unbiased=True, processors=processors)
    for key in keys_of(3):
        chex.assert_trees_all_equal(cohort_of(same, key), cohort_of(plain, key))


def test_clients_with_one_processor_keep_their_model():
    """Processors of other clients do not change their draw."""
    plain, several = mfa_rand(N, M), mfa_rand(N, M, processors=SEVERAL)
    one = np.array(SEVERAL) == 1
    draw = jax.jit(jax.vmap(lambda key: [cohort_of(each, key) for each in (plain, several)]))
    before, after = map(pairs_of, draw(keys_of(20)))
    np.testing.assert_array_equal(after[:, one], before[:, one])
    assert (after >= before).all()


@pytest.mark.parametrize("cohort_size", [N, slow_unless(False, K)])
def test_every_client_draws_its_models_uniformly(cohort_size):
    """Pairs, and sets of two models, are within 4 standard errors corrected for the cells."""
    num_draws = 20_000
    assignment = mfa_rand(N, M, cohort_size=cohort_size, processors=SEVERAL)
    each = pairs_of(
        jax.jit(jax.vmap(lambda key: cohort_of(assignment, key)))(keys_of(num_draws, 1))
    )
    num_own = np.minimum(SEVERAL, M)
    assert each.max() == 1  # different models
    in_cohort = each.any(2)
    np.testing.assert_array_equal(in_cohort.sum(1), cohort_size)
    np.testing.assert_array_equal(
        each.sum(2)[in_cohort], np.broadcast_to(num_own, (num_draws, N))[in_cohort]
    )
    assert each.any(1).all()  # no model is idle, because each has its group
    check_frequencies(each.mean(0), (cohort_size / N * num_own / M)[:, None], num_draws)
    client = SEVERAL.index(2)
    both = np.array(
        [(each[:, client, a] & each[:, client, b]).mean() for a in range(M) for b in range(a)]
    )
    check_frequencies(both, cohort_size / N / (M * (M - 1) / 2), num_draws)


def check_frequencies(found, p, num_draws):
    p = np.broadcast_to(p, found.shape)
    bound = np.sqrt(p * (1 - p) / num_draws * (16 + 2 * np.log(found.size)))
    assert (np.abs(found - p) <= bound).all()


@pytest.mark.parametrize(
    ("cohort_size", "processors", "slots"),
    [(N, SEVERAL, 14), (N, 2, 14), (5, SEVERAL, 12), (N, M, 28), (N, 100, 28)],
)
def test_a_cohort_has_a_slot_for_every_possible_training(cohort_size, processors, slots):
    """Padding comes last, so that its chunks can be skipped."""
    assignment = mfa_rand(N, M, cohort_size=cohort_size, processors=processors)
    for key in keys_of(3):
        clients = np.asarray(cohort_of(assignment, key).clients)
        assert len(clients) == slots
        assert (np.diff((clients >= 0).astype(int)) <= 0).all()


def test_a_traced_number_of_models_bounds_trainings_and_compiles_once():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def draw(number):
        assignment = mfa_rand(N, Padded(M, number), unbiased=True, processors=SEVERAL)
        return jax.vmap(lambda key: cohort_of(assignment, key))(keys_of(50))

    chex.clear_trace_counter()
    for number in (1, 3, M):
        cohorts = draw(number)
        each, num_own = pairs_of(cohorts), np.minimum(SEVERAL, number)
        assert (each[..., number:] == 0).all()
        np.testing.assert_array_equal(each.sum(2), np.broadcast_to(num_own, (50, N)))
        there = np.asarray(cohorts.clients) >= 0
        factors = (number / num_own)[np.asarray(cohorts.clients)]
        np.testing.assert_allclose(np.asarray(cohorts.scale)[there], factors[there], rtol=1e-6)


def test_seeds_do_not_depend_on_the_precision():
    assignment, key = mfa_rand(N, M, processors=SEVERAL), jax.random.key(2)
    single = cohort_of(assignment, key)
    with jax.enable_x64(True):
        double = cohort_of(assignment, key)
    assert single.clients.tolist() == double.clients.tolist()
    assert single.models.tolist() == double.models.tolist()
    assert {x.dtype for x in (double.clients, double.models)} == {np.dtype("int32")}


FILE = """
num_models = 2
num_rounds = 3
num_seeds = 1
task = { num_clients = 4, block_size = 2, mu = 0.1 }

[algorithms.same]
assignment = { name = "mfa_rand", processors = 2 }
learning_rate = 0.1
local_steps = 1

[algorithms.own]
assignment = { name = "mfa_rand", processors = [1, 2, 1, 2] }
learning_rate = 0.1
local_steps = 1
"""


def test_a_file_has_one_number_or_one_for_each_client():
    grid = grid_of(validate(Experiment, tomllib.loads(FILE)))
    setups = [grid.setup(point, 0) for point in grid.points]
    slots = [len(cohort_of(each.assignment, jax.random.key(0)).clients) for each in setups]
    assert slots == [8, 6]
    with pytest.raises(ValueError, match="processors are 4; give one number, or 5, one each"):
        validate(Experiment, tomllib.loads(FILE.replace("num_clients = 4", "num_clients = 5")))


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        (0, "processors is 0; it must be a positive whole number"),
        (1.5, "processors is 1.5"),
        (None, "processors is None"),
        ((1, 2), "processors are 2; give one number, or 7, one each"),
        ((1,) * 6 + (0,), r"processors\[6\] is 0"),
        (np.ones(8, int), "processors are 8"),
    ],
)
def test_wrong_processors_are_refused(processors, message):
    with pytest.raises(ValueError, match=message):
        check_processors(processors, N)
    with pytest.raises(ValueError, match=message):
        mfa_rand(N, M, processors=processors)
