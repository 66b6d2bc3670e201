"""Schedulers of jobs, and allocations by statistics of clients and models."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    dma_fl,
    fedavg,
    fedfair,
    mdh,
    mfa_rr,
    scheduled,
    sequential,
    simulate,
)
from fedjax_mm.assignments.fairness import chances, rarities
from fedjax_mm.assignments.rotating import homogeneity
from fedjax_mm.assignments.scheduling import Supply, reserved
from fedjax_mm.availability import arriving, finishing
from fedjax_mm.base import Look, Padded
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.tasks import least_squares
from tests.oracles.scheduling import Drifting, bayesian, check_in, mdh_sizes, venn_plan

N, M = 30, 5
TASK = least_squares([jnp.eye(2)] * N, [jnp.full(2, 1.0 + k) for k in range(N)], ridge=0.1)


def nested(counts):
    """Rows of classes of which each is part of the one before."""
    return np.repeat(np.tril(np.ones((len(counts),) * 2, bool)).T, counts, axis=1)


SUPPLIES = {
    "all": np.ones((M, N), bool),
    "disjoint": np.repeat(np.eye(M, dtype=bool), N // M, axis=1),
    "nested": nested([10, 8, 6, 4, 2]),
    "two of each class": nested([15, 9, 6])[[0, 0, 1, 1, 2]],
    "overlapping": np.random.default_rng(0).random((M, N)) < 0.6,
}
DEMANDS = [[3, 9, 4, 2, 1], [5, 5, 5, 5, 5], [12, 1, 8, 9, 2], [40, 3, 3, 3, 3]]


def rounds_of(assignment, number):
    """The clients and models of each round."""
    key, found = jax.random.key(1), []
    state = assignment.init(key, Look())
    for t in range(1, number + 1):
        cohort, state = assignment.assign(jax.random.fold_in(key, t), t, state, Look())
        is_there = np.asarray(cohort.clients) >= 0
        clients, models = np.asarray(cohort.clients)[is_there], np.asarray(cohort.models)[is_there]
        found.append(dict(zip(clients.tolist(), models.tolist(), strict=True)))
    return found


CASES = [*itertools.product(("srsf", "venn", "fifo", "las"), SUPPLIES, DEMANDS)]
QUICK = CASES[::7]
"""Every policy, supply and demand. The others are in `tests_full`."""


@pytest.mark.parametrize(("policy", "supply", "demand"), QUICK, ids=str)
def test_clients_are_served_as_one_after_another(policy, supply, demand):
    eligible = SUPPLIES[supply]
    assignment = scheduled(N, M, demand=demand, policy=policy, eligible=eligible)
    served = np.zeros(M, int)
    for t, found in enumerate(rounds_of(assignment, 3), start=1):
        order = permutation(jax.random.fold_in(jax.random.key(1), t), N, N).tolist()
        # SRSF serves by the demand of the request, which is the order of the remaining demands if
        # every client may serve every model.
        key = {"fifo": [1] * M, "las": served, "srsf": demand}.get(policy)
        rule = "by key" if policy == "srsf" else policy
        expected = check_in(order, eligible, demand, rule, key)
        mine = [found.get(k) for k in order]
        assert mine == expected
        assert all(eligible[m][k] for k, m in found.items())
        sizes = np.bincount(list(found.values()), minlength=M)
        assert (sizes <= demand).all()
        served += sizes


@pytest.mark.parametrize("supply", ["all", "disjoint"])
def test_venn_is_srsf_where_nobody_is_scarcer(supply):
    both = [
        rounds_of(scheduled(N, M, demand=DEMANDS[0], policy=policy, eligible=SUPPLIES[supply]), 3)
        for policy in ("venn", "srsf")
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("queues", "plan", "sizes"),
    [
        ([[20, 50], [15], [10, 30]], [0, 1, 2], [60, 30, 10]),
        ([[5, 10, 15, 20, 25, 30], [60], [10, 30]], [0, 0, 2], [90, 0, 10]),
        ([[5, 10, 15, 20, 25, 30], [60], []], [0, 0, 0], [100, 0, 0]),
        ([[], [15], []], [0, 1, 1], [60, 40, 0]),
    ],
)
def test_plans_of_the_worked_examples(queues, plan, sizes):
    counts, types = [60, 30, 10], [frozenset(range(i + 1)) for i in range(3)]
    owner, left = venn_plan(dict(zip(types, counts, strict=True)), dict(enumerate(queues)))
    assert [owner[s] for s in types] == plan
    assert [left[e] for e in range(3)] == sizes
    models = [e for e, queue in enumerate(queues) for _ in queue or [0]]
    lacks = jnp.array([d for queue in queues for d in queue or [0]])
    supply = Supply.of(nested(counts)[models])
    found, number = reserved(supply, lacks)
    # Classes are numbered from the scarcest one on, and types in the order of their columns.
    assert [2 - int(found[supply.type_of[k]]) for k in (0, 60, 90)] == plan
    assert number[::-1].tolist() == sizes


def test_plans_are_those_of_the_loop_and_keep_scarce_clients():
    for seed in range(10):
        rng = np.random.default_rng(seed)
        eligible = rng.random((6, 40)) < rng.uniform(0.3, 0.9)
        lacks = rng.integers(0, 12, 6)
        supply = Supply.of(eligible)
        found, sizes = reserved(supply, jnp.asarray(lacks))
        columns = [frozenset(np.nonzero(column)[0]) for column in supply.has.T]
        queues = {e: [int(d) for d in lacks[supply.class_of == e] if d] for e in range(len(sizes))}
        owner, left = venn_plan(dict(zip(columns, supply.counts.tolist(), strict=True)), queues)
        assert found.tolist() == [owner.get(s, len(sizes)) for s in columns]
        assert sizes.tolist() == [left[e] for e in range(len(sizes))]
        first = np.where(supply.has.any(0), supply.has.argmax(0), len(sizes))
        assert (np.asarray(found) >= first).all()  # types only move to larger classes


def test_jobs_are_served_in_the_order_of_their_arrival_and_alone_once_others_finished():
    eligible, demand = np.ones((3, N), bool), [20, 20, 20]
    jobs = arriving(scheduled(N, 3, demand=demand, policy="fifo", eligible=eligible), [2, 0, 1])
    sizes = [
        [sum(m == model for m in r.values()) for model in range(3)] for r in rounds_of(jobs, 4)
    ]
    assert sizes == [[0, 20, 0], [0, 20, 10], [0, 20, 10], [0, 20, 10]]
    _, trace = simulate(
        0,
        TASK,
        fedavg(0.1, local_steps=1),
        finishing(scheduled(N, 3, demand=demand, policy="srsf"), "loss", at_most=[1e9, -1.0, -1.0]),
        2,
    )
    assert trace.client_updates[1:].tolist() == [[0, 20, 10]] * 2


def test_clients_of_a_finished_model_serve_an_overlapping_one_under_venn():
    eligible = np.zeros((2, 15), bool)
    eligible[0, :10] = eligible[1, 5:] = True
    jobs = scheduled(15, 2, demand=[5, 10], policy="venn", eligible=eligible)
    first, second = rounds_of(arriving(jobs, [1, 0]), 2)
    assert sorted(first.values()) == [1] * 10
    assert sum(m == 0 for m in second.values()) == 5


def test_a_random_order_is_drawn_once_and_differs_between_seeds():
    assignment = scheduled(N, M, demand=N, policy="random")
    found = rounds_of(assignment, 4)
    assert len({tuple(sorted(set(r.values()))) for r in found}) == 1
    firsts = {int(jnp.argmin(assignment.init(jax.random.key(s), Look()).lot)) for s in range(60)}
    assert firsts == set(range(M))


def test_sequential_models_give_way_when_they_finish_and_when_others_arrive():
    def turns(assignment, number=7):
        return [next(iter(set(r.values())), None) for r in rounds_of(assignment, number)]

    plain = sequential(N, 3, rounds_per_model=2)
    assert turns(plain) == turns(arriving(plain, [0, 0, 0])) == [0, 0, 1, 1, 2, 2, 0]
    assert turns(arriving(plain, [0, 4, 1])) == [0, 0, 2, 2, 0, 0, 1]
    assert turns(arriving(plain, [3, 3, 9]), 8) == [None] * 3 + [0, 0, 1, 1, 0]
    jobs = finishing(sequential(N, 3, rounds_per_model=99), "loss", at_most=[1e9, -1.0, -1.0])
    _, trace = simulate(0, TASK, fedavg(0.1, local_steps=1), jobs, 3)
    assert trace.client_updates[1:].tolist() == [[0, N, 0]] * 3


def test_groups_that_are_never_redrawn_rotate_for_ever_and_cohorts_come_from_all_of_them():
    found = rounds_of(mfa_rr(N, 3, redraw="never"), 7)
    for t in range(4):
        assert found[t] == found[t + 3] != found[t + 1]
    assert sorted(sum(m == i for m in found[0].values()) for i in range(3)) == [10] * 3
    models = {k: (found[0][k] + t) % 3 for t in (1,) for k in range(N)}
    assert found[1] == models
    drawn = rounds_of(mfa_rr(N, 3, redraw="never", cohort_size=7), 7)
    assert all(len(r) == 7 for r in drawn)
    assert drawn[0].keys() != drawn[3].keys()
    groups = [{k: (m - t) % 3 for k, m in r.items()} for t, r in enumerate(drawn)]
    merged = {}
    for group in groups:
        assert all(merged.setdefault(k, m) == m for k, m in group.items())


@pytest.mark.parametrize("number", [3, 4])
def test_models_with_the_larger_groups_of_one_partition_are_drawn(number):
    """Seven clients in three or four groups, one larger or three, in round 1 of 3000 seeds."""

    def sizes(num_models, **given):
        assignment, look = mfa_rr(7, num_models, redraw="never"), Look(**given)
        return jax.vmap(
            lambda key: assignment.assign(key, 1, assignment.init(key, look), look)[0].sizes(4)
        )(jax.random.split(jax.random.key(0), 3000))

    found = np.asarray(sizes(number))
    np.testing.assert_array_equal(sizes(Padded(4, number)), found)
    np.testing.assert_array_equal(sizes(4, active=lambda: jnp.arange(4) < number), found)
    least, larger = 7 // number, 7 % number
    assert (np.sort(found[:, :number]) == [least] * (number - larger) + [least + 1] * larger).all()
    p = larger / number
    share = (found[:, :number] > least).mean(0)
    assert np.all(np.abs(share - p) < 4 * np.sqrt(p * (1 - p) / 3000))


@pytest.mark.parametrize(
    ("decay", "beta", "histories", "expected"),
    [
        (1.0, 3.0, [[0, 0]], [[0.757576, 0.242424]]),
        (1.0, 3.0, [[1, 1]], [[0.925926, 0.074074]]),
        (0.5, 1.0, [[1, 1], []], [[0.666667, 0.333333], [0.5, 0.5]]),
    ],
)
def test_clients_rarely_draw_the_models_that_they_trained(decay, beta, histories, expected):
    accuracy = [0.5, 0.8]
    np.testing.assert_allclose(bayesian(histories, 2, decay, beta, accuracy), expected, rtol=1e-5)
    counts = np.zeros((len(histories), 2))
    for k, history in enumerate(histories):
        for had in history:
            counts[k] = decay * counts[k] + 1 + (np.arange(2) == had)
    lack = 100 * (1 - jnp.array(accuracy))
    p = chances(lack, beta, rarity=rarities(jnp.asarray(counts, jnp.float32)))
    np.testing.assert_allclose(p, expected, rtol=1e-5)


def test_the_memory_of_fair_clients_counts_their_rounds():
    look, key = Look(metric=lambda *names: jnp.array([1.0, 2.0])), jax.random.key(0)
    assignment, state = fedfair(4, 2, cohort_size=2, memory=0.5), None
    state, histories = assignment.init(key, Look()), [[] for _ in range(4)]
    for t in range(1, 6):
        cohort, state = assignment.assign(jax.random.fold_in(key, t), t, state, look)
        had = dict(zip(cohort.clients.tolist(), cohort.models.tolist(), strict=True))
        for k, history in enumerate(histories):
            history.append(had.get(k))
    expected = bayesian(histories, 2, 0.5, 3.0, [0.5, 0.8])
    p = chances(100 * (1 - jnp.array([0.5, 0.8])), 3.0, rarity=rarities(state))
    np.testing.assert_allclose(p, expected, rtol=1e-5)


def test_heterogeneous_models_take_turns():
    for flags in [[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 1]]:
        for cohort_size, at_once in ((8, 1), (11, 2)):
            how = {"heterogeneous": np.array(flags, bool), "from_round": 4, "at_once": at_once}
            assignment = mdh(20, 4, cohort_size=cohort_size, **how)
            for t, found in enumerate(rounds_of(assignment, 9)):
                sizes = np.bincount(list(found.values()), minlength=4).tolist()
                assert sizes == mdh_sizes(t, flags, cohort_size, 3, at_once)
                assert sum(sizes) == cohort_size


def test_turns_and_homogeneity_of_the_worked_examples():
    assert mdh_sizes(50, [0, 1, 0, 1], 8) == [2, 4, 2, 0]
    assert mdh_sizes(51, [0, 1, 0, 1], 8) == [2, 0, 2, 4]
    rows = [(10, 0, 0, 0), (5, 5, 0, 0), (3, 3, 2, 2), (5, 5, 5, 5), (97, 1, 1, 1)]
    assert [homogeneity(np.array([row])) for row in rows] == [0.25, 0.5, 0.75, 1, 0.625]
    assert homogeneity(np.array(rows[:2] + rows[3:4])) == pytest.approx((2.5 + 5 + 20) / 40)


def test_clients_that_drifted_are_drawn_with_three_times_the_weight():
    assignment, oracle = dma_fl(4, 2, cohort_size=2), Drifting()
    state = assignment.init(jax.random.key(0), Look())
    told = [((0, 1), (1.0, 2.0)), ((2, 1), (1.0, 2.2)), ((0, 2), (1.04, 0.9)), ((3, 1), (1, 2.3))]
    for t, (clients, losses) in enumerate(told, start=1):
        cohort, _ = assignment.assign(jax.random.key(t), t, state, Look())
        cohort = type(cohort)(jnp.array(clients, jnp.int32), cohort.models)
        state = assignment.observe(t, cohort, {"loss": jnp.array(losses)}, state)
        for m, (k, loss) in enumerate(zip(clients, losses, strict=True)):
            oracle.observe(m, k, loss)
    weights = [oracle.weights(m, range(4)) for m in range(2)]
    assert weights == [[1, 1, 1, 1], [1, 1, 1, 1]]
    grew = np.array([[oracle.grew.get((m, k), 0.0) for k in range(4)] for m in range(2)])
    np.testing.assert_allclose(state.grew, grew, atol=1e-6)
    state = state._replace(grew=state.grew.at[0, 3].set(0.06))
    draws = jax.vmap(lambda key: assignment.assign(key, 9, state, Look())[0].clients)(
        jax.random.split(jax.random.key(0), 6000)
    )
    assert (draws[:, 0] != draws[:, 1]).all()
    assert np.mean(draws[:, 0] == 3) == pytest.approx(3 / 6, abs=4 * np.sqrt(0.25 / 6000))
    second = np.mean(draws[:, 1] == 3)  # uniform over the three that the first model left
    assert second == pytest.approx(0.5 / 3, abs=4 * np.sqrt(0.15 / 6000))
