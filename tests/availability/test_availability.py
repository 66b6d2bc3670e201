"""Absent clients, lost messages and late clients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import ditto, fedavg, full_participation, init, local_sgd, mfa_rand, mfa_rr, simulate
from fedjax_mm.asynchrony import on_clock
from fedjax_mm.availability import (
    available,
    bernoulli,
    cyclic,
    dropping,
    markov,
    share_of_examples,
    timetable,
)
from fedjax_mm.base import Look, keys
from tests.helpers import Precise, Towards
from tests.oracles import wrappers as oracle

N, ROUNDS = 12, 30


KEY = jax.random.key(3)


def presence(law, num_rounds, num_clients, seed=0):
    """Presence of each client in each round, ``bool[rounds, clients]``."""

    def step(state, t):
        is_there, state = law.step(jax.random.fold_in(KEY, t), t, state, num_clients)
        return state, is_there

    start = law.init(jax.random.key(seed), num_clients)
    rounds = jnp.arange(1, num_rounds + 1)
    return np.asarray(jax.jit(lambda state: jax.lax.scan(step, state, rounds)[1])(start))


def close(found, expected, error):
    """Asserts equality within four standard errors."""
    assert abs(found - expected) < 4 * error, (found, expected, error)


@pytest.mark.parametrize("p", [0.3, tuple(np.linspace(0.1, 0.9, 40))])
def test_bernoulli(p):
    law = bernoulli(jnp.asarray(p) if isinstance(p, tuple) else p)
    there = presence(law, 4000, 40)
    share = np.broadcast_to(p, 40)
    error = np.sqrt(share * (1 - share) / 4000)
    assert (abs(there.mean(0) - share) < 4.5 * error).all()
    variance = np.sum(share * (1 - share))  # of the number of present clients
    close(there.sum(1).var(), variance, variance * np.sqrt(2 / 4000))


def test_markov():
    """With p_on = 0.2 and p_off = 0.1: shares, autocorrelation and mean lengths of spells."""
    there = presence(markov(0.2, 0.1), 3000, 60).astype(float)
    p, r = 2 / 3, 0.7
    error = np.sqrt(p * (1 - p) / there.size * (1 + r) / (1 - r))
    close(there.mean(), p, error)
    close(there[0].mean(), p, np.sqrt(p * (1 - p) / 60))
    for h in (1, 3):
        both = np.mean((there[h:] - p) * (there[:-h] - p)) / (p * (1 - p))
        close(both, r**h, 3 / np.sqrt(there.size))
    changes = np.diff(there, axis=0)
    spells = there[:-1].sum() / (changes < 0).sum(), (1 - there[:-1]).sum() / (changes > 0).sum()
    np.testing.assert_allclose(spells, (10, 5), rtol=0.05)


def test_a_timetable_is_followed():
    """Intervals are half-open and repeat after the period."""
    table = [[(0, 2), (5, 6)], [], [(3, 6)]]
    there = presence(timetable(table, period=6), 12, 3)
    rows = [[t for t in range(12) if row[t]] for row in there.T]
    assert rows == [[0, 1, 5, 6, 7, 11], [], [3, 4, 5, 9, 10, 11]]
    np.testing.assert_allclose(timetable(table, period=6).share, [0.5, 0, 0.5])
    assert not presence(timetable(table), 12, 3)[6:].any()


def test_probabilities_may_depend_on_the_examples():
    n = [1.0, 4.0, 2.0]
    np.testing.assert_allclose(share_of_examples(n, 0.5), [0.5, 1, np.sqrt(0.5)])
    np.testing.assert_allclose(share_of_examples(n, -1), [1, 0.25, 0.5])
    np.testing.assert_allclose(share_of_examples(n, 0), 1)


def cohorts(assignment, num_rounds=ROUNDS, key=KEY):
    def step(state, t):
        one = keys.assignment_key(keys.round_key(key, t))
        cohort, state = assignment.assign(one, t, state, Look())
        return state, cohort

    start = assignment.init(keys.assignment_key(keys.round_key(key, 0)), Look())
    rounds = jnp.arange(1, num_rounds + 1)
    return jax.jit(lambda: jax.lax.scan(step, start, rounds)[1])()


# Client k is absent in every fourth round.
PARTS = [[(0, k % 4), (k % 4 + 1, 4)] for k in range(N)]


TABLE = timetable([[pair for pair in each if pair[0] < pair[1]] for each in PARTS], period=4)


THERE = np.array([[t % 4 != k % 4 for k in range(N)] for t in range(ROUNDS)])


@pytest.mark.parametrize(
    "assignment", [mfa_rand(N, 3), mfa_rr(N, 3, cohort_size=7)], ids=["R", "RR"]
)
def test_absent_clients_are_skipped(assignment):
    """The others still train the same models."""
    before, after = cohorts(assignment), cohorts(available(assignment, TABLE))
    stays = np.take_along_axis(THERE, np.maximum(before.clients, 0), axis=1)
    np.testing.assert_array_equal(after.clients, np.where(stays, before.clients, -1))
    np.testing.assert_array_equal(after.models, before.models)


def test_absent_clients_are_replaced():
    """Replacements are present clients, drawn uniformly until none is left."""
    assignment, law = mfa_rand(N, 2, cohort_size=6), bernoulli(0.6)
    before = cohorts(assignment, 3000)
    after = cohorts(available(assignment, law, when_absent="replace"), 3000)
    there = np.array(jax.vmap(lambda t: law.step(_draw_key(t), t, (), N)[0])(jnp.arange(1, 3001)))
    clients = np.asarray(after.clients)
    chosen = clients >= 0
    assert np.take_along_axis(there, np.maximum(clients, 0), axis=1)[chosen].all()
    for mine in clients:
        mine = mine[mine >= 0]
        assert len(set(mine)) == len(mine)
    np.testing.assert_array_equal(chosen.sum(1), np.minimum(6, there.sum(1)))
    stays = np.take_along_axis(there, np.maximum(before.clients, 0), axis=1)
    np.testing.assert_array_equal(clients[stays], before.clients[stays])
    counts = np.bincount(clients[chosen], minlength=N)
    mean = counts.mean()
    assert (abs(counts - mean) < 4 * np.sqrt(mean)).all()


def _draw_key(t):
    one = keys.assignment_key(keys.round_key(KEY, t))
    return jax.random.split(keys.wrapper_key(one, 0))[0]


def test_nothing_is_nan_before_round_1():
    assignment, task = available(mfa_rand(N, 2), bernoulli(0.5)), Towards(jnp.ones((N, 3)))
    with jax.debug_nans(True):
        _, trace = simulate(KEY, task, fedavg(0.1, local_steps=1), assignment, 2)
    np.testing.assert_array_equal(trace.metrics["present"][0], -1)


def test_scales_for_absence_are_unbiased():
    """The mean step over many seeds is that of full participation."""
    p = jnp.linspace(0.2, 1.0, N)
    targets = jnp.arange(float(N * 3)).reshape(N, 3)
    task, algorithm = Towards(targets), fedavg(0.5, local_steps=1, server_scale="1/N")
    assignment = available(full_participation(N), bernoulli(p), unbiased=True)
    start = {"w": jnp.zeros((1, 3))}

    def step(seed):
        state, _ = simulate(seed, task, algorithm, assignment, 1, params=start)
        return state.models[0].params["w"][0]

    moved = np.asarray(jax.jit(jax.vmap(step))(jnp.arange(4000)))
    expected = 0.5 * targets.mean(0)
    error = moved.std(0) / np.sqrt(len(moved))
    assert (abs(moved.mean(0) - expected) < 4 * error).all()


@pytest.mark.parametrize("num_groups", [4, 5])
def test_unequal_groups_are_unbiased_in_every_round(num_groups):
    """Over seeds, the mean scale of 6 clients is 1 in each round of a cycle."""
    assignment = available(full_participation(6), cyclic(num_groups), unbiased=True)

    def factors(seed):
        found = cohorts(assignment, num_groups, jax.random.key(seed))
        return jnp.where(found.clients >= 0, found.scale, 0).mean(1)

    mean = np.asarray(jax.jit(jax.vmap(factors))(jnp.arange(2000)))
    error = mean.std(0) / np.sqrt(len(mean))
    assert (abs(mean.mean(0) - 1) < 4 * error).all(), mean.mean(0)


def test_runs_with_absent_clients_match_the_oracle():
    with jax.enable_x64(True):
        targets = np.random.default_rng(0).normal(size=(N, 3))
        assignment = available(full_participation(N), TABLE)
        algorithm, task = fedavg(0.3, local_steps=2), Precise(jnp.asarray(targets))
        _, trace = simulate(KEY, task, algorithm, assignment, ROUNDS)
        groups = [list(np.flatnonzero(row)) for row in THERE]
        models = oracle.fedavg(np.ones(3), targets, 0.3, 2, groups)
        norms = [np.sqrt(np.sum(w**2)) for w in models]
        np.testing.assert_allclose(trace.metrics["norm"][:, 0], norms, rtol=1e-10)
        np.testing.assert_array_equal(trace.metrics["present"][1:, 0], THERE.sum(1))


def delay(rng_key, model, client):
    """A deterministic delay with ties."""
    return jnp.asarray(1.0 + client % 3 + model, float)


def test_two_wrappers_of_one_kind_draw_independently():
    twice = available(available(full_participation(200), bernoulli(0.5)), bernoulli(0.5))
    share = np.mean(np.asarray(cohorts(twice).clients) >= 0)
    close(share, 0.25, np.sqrt(0.25 * 0.75 / (200 * ROUNDS)))
    twice = dropping(dropping(full_participation(200), 0.5), 0.5)
    share = np.mean(np.asarray(cohorts(twice).takes_part))
    close(share, 0.25, np.sqrt(0.25 * 0.75 / (200 * ROUNDS)))


def test_lost_messages_are_not_among_the_first():
    lost = jnp.array([1.0] * 6 + [0.0] * 6)
    clock = on_clock(dropping(full_participation(N), lost), delay, first=6)
    np.testing.assert_array_equal(cohorts(clock).takes_part, [[False] * 6 + [True] * 6] * ROUNDS)


def test_shares_of_a_timetable_count_whole_rounds():
    law = timetable([[(0, 0.5)], [(0.5, 1)], [(0.5, 2.5)]], period=3)
    there = presence(law, 30, 3)
    np.testing.assert_allclose(law.share, there.mean(0), rtol=1e-6)
    assert np.isnan(timetable([[(0, 0.5)]], period=1.5).share).all()


def test_replacing_late_clients_is_refused():
    late = on_clock(mfa_rand(N, 2), delay, deadline=1.5)
    with pytest.raises(ValueError, match="make them so outside, as in dropping"):
        cohorts(available(late, bernoulli(0.5), when_absent="replace"))


def test_clients_of_lost_messages_keep_their_personal_models():
    task = Towards(jnp.ones((N, 3)))
    assignment = dropping(full_participation(N), jnp.array([1.0] + [0.0] * (N - 1)))
    algorithm = ditto(local_sgd(0.1, steps=1), lam=0.5)
    state, _ = simulate(KEY, task, algorithm, assignment, 3)
    start = init(KEY, task, algorithm, assignment)
    moved = abs(state.models[0].clients["w"] - start.models[0].clients["w"])[0].sum(1) > 0
    np.testing.assert_array_equal(moved, [False] + [True] * (N - 1))
