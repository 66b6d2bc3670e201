"""Absent clients, lost messages and late clients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    advance,
    fedavg,
    full_participation,
    init,
    local_sgd,
    mfa_rand,
    mfa_rr,
    scaffold,
    simulate,
)
from fedjax_mm.assignments.bandits import bandit
from fedjax_mm.asynchrony import on_clock
from fedjax_mm.availability import (
    available,
    bernoulli,
    cyclic,
    dropping,
    markov,
)
from fedjax_mm.base import Assignment, Cohort, Padded
from tests.availability.test_availability import KEY, ROUNDS, N, close, cohorts, delay, presence
from tests.helpers import Measured, Precise, Towards
from tests.oracles import wrappers as oracle


def test_cyclic_groups_take_turns():
    there = presence(cyclic(5), 10, 12)
    assert (there[:5].sum(0) == 1).all()
    np.testing.assert_array_equal(there[:5], there[5:])
    assert set(there.sum(1)) == {2, 3}
    assert (presence(cyclic(1), 4, 12)).all()
    other = presence(cyclic(5), 10, 12, seed=1)
    assert (there != other).any()


def models_of(cohort):
    """The models ``[rounds, slots]``, which are equal in all rounds."""
    return np.broadcast_to(cohort.models, np.shape(cohort.clients))


@pytest.mark.parametrize(
    ("assignment", "p"),
    [
        (mfa_rand(N, 3, cohort_size=6), 0.3),
        (mfa_rand(N, 3, cohort_size=7), 0.4),
        (mfa_rr(N, 2, cohort_size=8), 0.4),
    ],
    ids=["equal groups", "unequal groups", "frames"],
)
def test_replacements_favour_no_model(assignment, p):
    """Nor do they favour a client if fewer are present than were chosen."""
    found = cohorts(available(assignment, bernoulli(p), when_absent="replace"), 4000)
    clients, models = np.asarray(found.clients), models_of(found)
    for numbers, of in ((assignment.num_models, models), (N, clients)):
        each = np.stack([((of == i) & (clients >= 0)).sum(1) for i in range(numbers)], axis=1)
        gaps = each - each.mean(1, keepdims=True)
        # Frames of M rounds are independent, and rounds within a frame are not.
        gaps = gaps.reshape(-1, 4, numbers).mean(1)
        error = gaps.std(0) / np.sqrt(len(gaps))
        assert (abs(gaps.mean(0)) < 4 * error).all(), gaps.mean(0) / error


def test_rounds_without_present_clients_are_idle():
    nobody = bernoulli(0.0)
    task = Towards(jnp.ones((N, 3)))
    for how in ("skip", "replace"):
        assignment = available(mfa_rand(N, 2), nobody, when_absent=how)
        _, trace = simulate(KEY, task, fedavg(0.1, local_steps=1), assignment, 3)
        assert not trace.gradients.any()
        np.testing.assert_array_equal(trace.idle_rounds[1:], 1)
        np.testing.assert_array_equal(trace.metrics["present"][1:], 0)


def test_probabilities_can_vary_without_recompiling():
    task, algorithm = Towards(jnp.ones((N, 3))), fedavg(0.1, local_steps=1)

    @jax.jit
    def run(p, leaves, q):
        assignment = available(mfa_rand(N, 2), markov(p, leaves))
        return simulate(KEY, task, algorithm, dropping(assignment, q), 5)[1].gradients

    each = jax.vmap(run)(jnp.array([0.1, 0.9]), jnp.array([0.5, 0.1]), jnp.array([0.0, 0.5]))
    alone = [run(0.1, 0.5, 0.0), run(0.9, 0.1, 0.5)]
    np.testing.assert_array_equal(each, alone)
    assert run._cache_size() == 1


def test_a_run_continues_where_it_stopped():
    assignment = dropping(available(mfa_rand(N, 2), markov(0.3, 0.2)), 0.2)
    run = Towards(jnp.ones((N, 3))), fedavg(0.1, local_steps=1), assignment
    whole, trace = simulate(KEY, *run, 10)
    state, _ = simulate(KEY, *run, 4)
    state, later = advance(state, *run, 6)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.random.key_data(whole.rng_key),
        jax.random.key_data(state.rng_key),
    )
    np.testing.assert_array_equal(trace.gradients[5:], later.gradients[1:])
    np.testing.assert_array_equal(whole.models[0].params["w"], state.models[0].params["w"])


@pytest.mark.parametrize("p", [0.25, np.linspace(0, 1, N)])
def test_messages_are_lost_with_the_given_probability(p):
    cohort = cohorts(dropping(mfa_rand(N, 3), jnp.asarray(p)), 2000)
    lost = ~np.asarray(cohort.takes_part)
    for client in range(N):
        mine = lost[np.asarray(cohort.clients) == client]
        share = float(np.broadcast_to(p, N)[client])
        close(mine.mean(), share, np.sqrt(share * (1 - share) / len(mine)) + 1e-12)


def test_lost_messages_cost_gradients_and_change_nothing():
    task, algorithm = Towards(jnp.ones((N, 3))), fedavg(0.1, local_steps=3)
    start = init(KEY, task, algorithm, dropping(mfa_rand(N, 2), 1.0))
    state, trace = simulate(KEY, task, algorithm, dropping(mfa_rand(N, 2), 1.0), 3)
    np.testing.assert_array_equal(state.models[0].params["w"], start.models[0].params["w"])
    plain = simulate(KEY, task, algorithm, mfa_rand(N, 2), 3)[1]
    np.testing.assert_array_equal(trace.gradients, plain.gradients)
    assert not trace.client_updates.any()


def test_clients_of_lost_messages_keep_their_states():
    """Otherwise SCAFFOLD's c would differ from the mean of all c_k."""
    with jax.enable_x64(True):
        task = Precise(jnp.asarray(np.random.default_rng(1).normal(size=(N, 3))))
        assignment = dropping(full_participation(N), 0.5)
        state, _ = simulate(KEY, task, scaffold(local_sgd(0.1, steps=2)), assignment, 8)
        own, server = state.models[0].clients["w"], state.models[0].server["w"]
        assert (np.abs(own) > 0).any()
        np.testing.assert_allclose(own.mean(1), server, rtol=1e-10, atol=1e-14)


def test_lost_reports_are_not_observed():
    def observe(t, cohort, reports, state):
        assert set(reports) == {"loss"}
        there = jnp.asarray(cohort.clients) >= 0
        told = jnp.sum((reports["loss"] != 0) & ~there)
        return state + jnp.array([jnp.sum(there), told])

    clients = jnp.arange(N, dtype=jnp.int32)[None]
    counting = Assignment(
        N,
        1,
        lambda key, look: jnp.zeros(2, int),
        lambda key, t, state, look: (Cohort.of_rows(clients), state),
        observe,
    )
    task, algorithm = Measured(jnp.ones((N, 3))), fedavg(0.1, local_steps=1)
    state, trace = simulate(KEY, task, algorithm, dropping(counting, 0.5), 20)
    assert state.assignment.tolist() == [int(trace.client_updates.sum()), 0]
    assert 0 < state.assignment[0] < 20 * N


def test_bandits_learn_with_absent_clients():
    task = Measured(jnp.ones((N, 3)))
    assignment = available(bandit(N, 2, cohort_size=N), bernoulli(0.5))
    _, trace = simulate(KEY, task, fedavg(0.1, local_steps=1), assignment, 5)
    np.testing.assert_array_equal(trace.gradients[1:].sum(1), trace.metrics["present"][1:, 0])


@pytest.mark.parametrize(
    ("first", "deadline"), [(2, None), (None, 2.5), (2, 2.5), (20, 1.5), (1, 100.0)]
)
def test_late_clients_do_not_take_part(first, deadline):
    assignment = mfa_rand(N, 2, cohort_size=9)
    before = cohorts(assignment)
    clock = on_clock(assignment, delay, first=first, deadline=deadline)
    after = cohorts(clock)
    time = 0.0
    models = models_of(before)
    for t in range(ROUNDS):
        taken, longest = set(), 0.0
        for model in range(2):
            mine = np.asarray(before.clients[t])[models[t] == model]
            mine = [int(k) for k in mine if k >= 0]
            times = [1.0 + k % 3 + model for k in mine]
            for k, at, place in zip(mine, times, oracle.places(times, mine), strict=True):
                if place >= (first or N):
                    continue
                longest = max(longest, min(at, deadline or np.inf))
                if at <= (deadline or np.inf):
                    taken.add((k, model))
        time += longest
        found = np.asarray(after.takes_part[t]) & (np.asarray(after.clients[t]) >= 0)
        pairs = zip(after.clients[t][found], models[t][found], strict=True)
        assert {(int(k), int(m)) for k, m in pairs} == taken
    task, algorithm = Towards(jnp.ones((N, 3))), fedavg(0.1, local_steps=1)
    _, trace = simulate(KEY, task, algorithm, clock, ROUNDS)
    assert trace.metrics["time"][-1, 0] == pytest.approx(time)
    np.testing.assert_array_equal(trace.gradients.sum(), ROUNDS * 9)


def test_lost_messages_do_not_depend_on_the_static_bound_of_models():
    one, padded = (dropping(mfa_rand(7, m), 0.5) for m in (3, Padded(5, 3)))

    def lost(assignment):
        found = cohorts(assignment)
        models = models_of(found)
        rows = [(found.clients, models, found.takes_part)]
        return [
            {
                (int(k), int(m)): bool(p)
                for k, m, p in zip(*(np.asarray(x)[t] for x in row), strict=True)
                if k >= 0
            }
            for row in rows
            for t in range(ROUNDS)
        ]

    assert lost(one) == lost(padded)
