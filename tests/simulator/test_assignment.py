"""Assignments: partitions, frames, sizes and uniform marginals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_mm import (
    appealing,
    fedavg,
    fedcluster,
    full_participation,
    mfa_rand,
    mfa_rr,
    sequential,
    simulate,
)
from fedjax_mm.base import Assignment, Cohort
from fedjax_mm.tasks import quadratic
from tests.helpers import NOTHING_TO_SEE, roll_out, rounds_of, rows_of, slow_unless
from tests.oracles import multi_model as reference


@st.composite
def sizes(draw):
    """(N, M, K) with 1 <= M <= K <= N."""
    num_clients = draw(
        st.integers(1, 30) | st.sampled_from([129, 169, 200])
    )  # which use another algorithm
    cohort_size = draw(st.integers(1, num_clients))
    return num_clients, draw(st.integers(1, min(cohort_size, 8))), cohort_size


def few(test):
    """Reduces the number of examples, because each one compiles."""
    return pytest.mark.slow(settings(deadline=None, max_examples=25)(test))


# Divisible or not, with one client per group, without padding, of all clients and of few.
some_sizes = pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1), (30, 8, 30), (7, 7, 7), (12, 4, 8), (13, 1, 5), (129, 5, 127), (200, 3, 10)],
)
SEEDS = 20


def roll_outs(assignment, num_rounds, num_seeds=SEEDS):
    """Cohorts of many seeds ``[seeds, T, M, n]``, from one program."""
    seeds = jax.random.split(jax.random.key(8), num_seeds)
    return np.asarray(jax.jit(jax.vmap(lambda key: rounds_of(assignment, key, num_rounds)))(seeds))


def check_mfa_rand(rounds, sizes):
    num_clients, _, cohort_size = sizes
    for groups in rounds:
        reference.check_partition(groups, cohort_size, num_clients)


@some_sizes
def test_mfa_rand_partitions_the_cohort(sizes):
    num_clients, num_models, cohort_size = sizes
    for rounds in roll_outs(mfa_rand(num_clients, num_models, cohort_size=cohort_size), 4):
        check_mfa_rand(rounds, sizes)


@few
@given(sizes(), st.integers(0, 2**31))
def test_mfa_rand_partitions_any_cohort(sizes, seed):
    num_clients, num_models, cohort_size = sizes
    assignment = mfa_rand(num_clients, num_models, cohort_size=cohort_size)
    check_mfa_rand(roll_out(assignment, jax.random.key(seed), 4), sizes)


def check_mfa_rr(rounds, sizes):
    """Every round is a partition, and every frame has each pair once, as in Algorithm 3."""
    num_clients, num_models, cohort_size = sizes
    for first in range(0, 3 * num_models, num_models):
        in_frame = rounds[first : first + num_models]
        reference.check_frame(in_frame, num_models)
        for groups in in_frame:
            reference.check_partition(groups, cohort_size, num_clients)
        # Group j trains model ((j + t - 2) mod M) + 1, so round 1 of a frame lists the groups.
        partition = [in_frame[0][j] for j in range(num_models)]
        for u, groups in enumerate(in_frame):
            expected = reference.mfa_rr_groups(partition, first + 1 + u)
            for m in range(num_models):
                np.testing.assert_array_equal(groups[m], expected[m])


@some_sizes
def test_mfa_rr_frames(sizes):
    num_clients, num_models, cohort_size = sizes
    assignment = mfa_rr(num_clients, num_models, cohort_size=cohort_size)
    for rounds in roll_outs(assignment, 3 * num_models, num_seeds=3):
        check_mfa_rr(rounds, sizes)


@few
@given(sizes(), st.integers(0, 2**31))
def test_any_mfa_rr_frames(sizes, seed):
    num_clients, num_models, cohort_size = sizes
    assignment = mfa_rr(num_clients, num_models, cohort_size=cohort_size)
    check_mfa_rr(roll_out(assignment, jax.random.key(seed), 3 * num_models), sizes)


def check_fedcluster(rounds, num_clients, num_clusters):
    clusters = [visit[0] for visit in rounds[:num_clusters]]
    reference.check_partition(clusters, num_clients, num_clients)
    reference.check_fedcluster(rounds, clusters)


@pytest.mark.parametrize(
    ("num_clients", "num_clusters"), [(1, 1), (30, 8), (7, 7), (12, 4), (13, 1), (29, 5)]
)
def test_fedcluster_visits_every_fixed_cluster(num_clients, num_clusters):
    for rounds in roll_outs(fedcluster(num_clients, num_clusters), 3 * num_clusters):
        check_fedcluster(rounds, num_clients, num_clusters)


@few
@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 2**31))
def test_any_fedcluster_visits_every_fixed_cluster(num_clients, num_clusters, seed):
    num_clusters = min(num_clusters, num_clients)
    rounds = roll_out(fedcluster(num_clients, num_clusters), jax.random.key(seed), 3 * num_clusters)
    check_fedcluster(rounds, num_clients, num_clusters)


def test_fedcluster_reshuffles_its_order():
    rounds = roll_out(fedcluster(24, 6), jax.random.key(0), 60)
    orders = reference.check_fedcluster(rounds, [visit[0] for visit in rounds[:6]])
    assert len({tuple(order) for order in np.reshape(orders, (10, 6))}) > 5


def test_fedcluster_draws_its_clusters():
    firsts = roll_outs(fedcluster(24, 2), 2, num_seeds=10)
    assert len({frozenset(frozenset(visit[0]) for visit in rounds) for rounds in firsts}) == 10


def test_mfa_rand_draws_a_new_partition_every_round():
    """All partitions differ, and two clients meet again as often as by chance."""
    rounds = roll_out(mfa_rand(24, 4), jax.random.key(0), 2000)
    assert len({tuple(map(tuple, np.sort(groups, axis=1))) for groups in rounds}) == 2000
    together = (rounds == 0).any(axis=2) & (rounds == 1).any(axis=2)  # in one group, by model
    met = together.any(axis=1)
    again = (met[1:] & met[:-1]).mean()
    p = (5 / 23) ** 2
    assert abs(again - p) < 4 * np.sqrt(p * (1 - p) / 1999 * 2)  # neighbouring pairs overlap


def test_mfa_rr_draws_a_new_partition_every_frame():
    rounds = roll_out(mfa_rr(24, 4), jax.random.key(0), 20)
    partitions = {frozenset(map(frozenset, rounds[i].tolist())) for i in range(0, 20, 4)}
    assert len(partitions) == 5


def test_mfa_rr_draws_a_new_cohort_every_frame():
    rounds = roll_out(mfa_rr(24, 2, cohort_size=8), jax.random.key(0), 20)
    assert len({frozenset(groups.ravel()) for groups in rounds[::2]}) == 10


def test_mfa_rr_can_redraw_its_cohort_every_round():
    rounds = roll_out(mfa_rr(24, 4, cohort_size=9, redraw="round"), jax.random.key(0), 8)
    for groups in rounds:
        reference.check_partition(groups, 9, 24)
    cohorts = {frozenset(groups.ravel()) for groups in rounds}
    assert len(cohorts) == 8


def test_full_participation_and_sequential():
    np.testing.assert_array_equal(
        roll_out(full_participation(4), jax.random.key(0), 2), np.tile(np.arange(4), (2, 1, 1))
    )
    rounds = roll_out(sequential(3, 2, rounds_per_model=2), jax.random.key(0), 5)
    trained = [[m for m in range(2) if (groups[m] >= 0).all()] for groups in rounds]
    assert trained == [[0], [0], [1], [1], [0]]
    assert all((groups[1 - m[0]] == -1).all() for groups, m in zip(rounds, trained, strict=True))


@pytest.mark.parametrize(
    "assignment",
    [
        slow_unless(False, mfa_rand(12, 5)),
        slow_unless(False, mfa_rand(12, 4)),
        mfa_rand(12, 5, cohort_size=7),
        slow_unless(False, mfa_rr(12, 5)),
        mfa_rr(12, 5, cohort_size=7),
        mfa_rr(12, 5, cohort_size=7, redraw="round"),
        slow_unless(False, mfa_rand(200, 3, cohort_size=10)),
    ],
    ids=lambda a: f"{a.init.__qualname__.split('.')[0]} N={a.num_clients} M={a.num_models}",
)
def test_marginals_are_uniform(assignment):
    """Counts over 20,000 seeds, in the first round of a frame and in a later one.

    Every client trains every model equally often, and every model has every group size equally
    often, within 4 standard errors corrected for the number of cells.
    """
    num_seeds, N, M = 20_000, assignment.num_clients, assignment.num_models
    keys = jax.random.split(jax.random.key(11), num_seeds)

    def two_rounds(key):
        state = assignment.init(jax.random.fold_in(key, 0), NOTHING_TO_SEE)
        first, state = assignment.assign(jax.random.fold_in(key, 1), 1, state, NOTHING_TO_SEE)
        later, _ = assignment.assign(jax.random.fold_in(key, 2), 2, state, NOTHING_TO_SEE)
        return rows_of(first, M), rows_of(later, M)

    for groups in map(np.asarray, jax.jit(jax.vmap(two_rounds))(keys)):
        present = groups >= 0
        cohort_size = int(present[0].sum())
        model = np.broadcast_to(np.arange(M)[:, None], groups.shape)
        pairs = np.bincount((model * N + groups)[present], minlength=M * N)
        p = cohort_size / (N * M)
        z = np.abs(pairs - num_seeds * p) / np.sqrt(num_seeds * p * (1 - p))
        assert z.max() < np.sqrt(16 + 2 * np.log(M * N))
        larger = (present.sum(axis=2) > cohort_size // M).sum(axis=0)  # per model
        p = cohort_size % M / M
        assert (np.abs(larger - num_seeds * p) <= 4.5 * np.sqrt(num_seeds * p * (1 - p))).all()


CLIENTS = np.arange(4, dtype=np.int32)  # NumPy, because nothing is computed
EVENS = np.zeros(4, np.int32)  # a state
COHORT = Cohort.of_rows(CLIENTS.reshape(2, 2))


def evens_first(found, observe=None):
    """An assignment of 4 clients and 2 models whose `assign` returns `found`."""

    def assign(rng_key, round, state, look):
        return found

    return Assignment(4, 2, lambda rng_key, look: EVENS, assign, observe)


def simulated(assignment):
    """Traces a run without computing it, which is enough for refusals."""
    task, algorithm = quadratic(4, 1, mu=1.0), fedavg(0.1, local_steps=1)
    return jax.eval_shape(
        lambda key: simulate(key, task, algorithm, assignment, 1), jax.random.key(0)
    )


def test_wrong_results_of_assign_are_refused_by_name():
    for found, kind, message in [
        (COHORT, TypeError, "returns a Cohort alone; return two from assign"),
        ((CLIENTS, EVENS), TypeError, r"returns as cohort an array of shape \(4,\); return"),
        (CLIENTS, TypeError, r"returns an array of shape \(4,\); return two"),
        (None, TypeError, "returns None; return two"),
        (
            (Cohort([0, 1], EVENS[:2]), EVENS),
            TypeError,
            r"as clients a list of 2; give an array of",
        ),
        (
            (Cohort(CLIENTS * 1.0, EVENS), EVENS),
            TypeError,
            r"as clients .*, float64; give an array of their",
        ),
        (
            (Cohort(CLIENTS.reshape(2, 2), EVENS), EVENS),
            ValueError,
            r"of shape \(2, 2\) and models of shape \(4,\); .* or Cohort.of_rows\(clients",
        ),
        (
            (Cohort(CLIENTS, EVENS[:2]), EVENS),
            ValueError,
            r"of shape \(4,\) and models of shape \(2,",
        ),
        (
            (Cohort(CLIENTS[:0], EVENS[:0]), EVENS),
            ValueError,
            r"no slots; .* the client -1 if nobody",
        ),
        (
            (Cohort(CLIENTS, np.array([0, 1, 2, 0])), EVENS),
            ValueError,
            r"returns models 0 \.\.\. 2; there are 2, with numbers from 0",
        ),
        (
            (Cohort(CLIENTS, EVENS, np.ones(2)), EVENS),
            ValueError,
            r"as scale float\d+\[2\]; give floats of shape \(4,\)",
        ),
        (
            (Cohort(CLIENTS, EVENS, np.ones(4, complex)), EVENS),
            ValueError,
            r"as scale complex\d+\[4\]; give floats",
        ),
        (
            (Cohort(CLIENTS, EVENS, takes_part=np.ones(1, bool)), EVENS),
            ValueError,
            r"as takes_part bool\[1\]; give bools of shape \(4,\)",
        ),
        (
            (Cohort(CLIENTS, EVENS, takes_part=np.ones(4, np.int32)), EVENS),
            ValueError,
            r"as takes_part int32\[4\]; give bools",
        ),
        (
            (Cohort(CLIENTS, EVENS, num_gradients=EVENS), EVENS),
            ValueError,
            r"as num_gradients int32\[4\]; give ints of shape \(2,\)",
        ),
        ((COHORT, ()), ValueError, "a state of another structure than init"),
        ((COHORT, EVENS[:2]), ValueError, r"int32\[2\] in its state where .* int32\[4\]"),
        ((COHORT, EVENS * 0.5), ValueError, r"float\d+\[4\] in its state where .* int32"),
    ]:
        alone = evens_first(found)
        for assignment in (alone, appealing(alone, cohort_size=1)):
            with pytest.raises(kind, match=f"the assignment evens_first .*{message}") as refusal:
                simulated(assignment)
            assert "\n" not in str(refusal.value)


def test_wrong_results_of_observe_are_refused_by_name():
    assignment = evens_first((COHORT, EVENS), lambda *args: EVENS[:1])
    with pytest.raises(ValueError, match=r"evens_first returns from observe int32\[1\] in its sta"):
        simulated(assignment)


def test_assign_may_pass_extra_state_to_observe_and_states_may_be_numbers():
    simulated(evens_first((COHORT, (EVENS, 1)), lambda *args: EVENS))
    alone = evens_first((COHORT, jnp.float32(0.5)))
    simulated(alone._replace(init=lambda rng_key, look: 0))


def ask(rng_key, round, state, look):
    return (COHORT if round == 1 else Cohort(CLIENTS[::-1], EVENS)), state


def count_to(rng_key, round, state, look):
    return Cohort(CLIENTS + sum(range(round)), EVENS), state


def copy_out(rng_key, round, state, look):
    return COHORT, np.asarray(state) + 1


@pytest.mark.parametrize("assign", [ask, count_to, copy_out])
def test_concretization_errors_explain_traced_values(assign):
    with pytest.raises(TypeError) as refusal:
        simulated(evens_first(None)._replace(assign=assign))
    assert any("in assign(rng_key, round, state, look) of" in x for x in refusal.value.__notes__)
    (note,) = [
        note for note in refusal.value.__notes__ if note.startswith("a round is")
    ]  # not JAX's
    assert "compiled once and then serves all rounds" in note
    assert "Instead of `if` use jax.numpy.where" in note


@pytest.mark.parametrize("kind", [np.int8, np.uint32])
def test_the_round_does_not_change_the_type_of_a_state(kind):
    start = evens_first(None)._replace(init=lambda rng_key, look: jnp.zeros((), kind))
    simulated(start._replace(assign=lambda key, t, state, look: (COHORT, state + t)))


def test_metrics_of_an_assignment_have_a_number_for_each_model():
    assignment = full_participation(4)._replace(metrics=lambda state: {"a": jnp.zeros(3)})
    with pytest.raises(
        ValueError, match=r"the metric 'a' of the assignment full_participation has shape"
    ):
        simulated(assignment)


def test_parts_that_are_not_functions_are_refused():
    for part in ["init", "assign", "observe", "metrics"]:
        wrong = full_participation(4)._replace(**{part: 3})
        with pytest.raises(TypeError, match=f"the assignment's {part} is 3; give a function"):
            simulated(wrong)


TWO_MODELS = fedavg(0.1, local_steps=1)


def broken(**functions):
    """FedAvg with changed results of some of its functions."""

    def usual(name):
        return lambda *args: functions[name](getattr(TWO_MODELS, name)(*args))

    return TWO_MODELS._replace(**{name: usual(name) for name in functions})


def test_wrong_results_of_an_algorithm_are_refused_by_name():
    for functions, kind, message in [
        ({"init": lambda two: two[1:]}, TypeError, "from init a tuple of 1; return two: the serv"),
        ({"init": lambda _: jnp.zeros(2)}, TypeError, "from init an array .*; return two"),
        ({"client": lambda two: two[0]}, TypeError, "from client a Contribution; return two"),
        ({"client": lambda two: (two[0].update, ())}, TypeError, "; give a Contribution first"),
        ({"client": lambda two: (two[0], 1)}, ValueError, "from client a state of another struct"),
        ({"server": lambda two: two[0]}, TypeError, "from server an array .*; return two: the pa"),
        (
            {"server": lambda two: (two[0][:1], two[1])},
            ValueError,
            r"from server float\d+\[1\] in its parameters where the model has float\d+\[25\]",
        ),
        ({"server": lambda two: (two[0], 1)}, ValueError, "from server a state of another struct"),
    ]:
        parts = quadratic(6, 4, mu=0.1), broken(**functions), mfa_rand(6, 2)
        with pytest.raises(kind, match=f"the algorithm .*{message}") as refusal:
            jax.eval_shape(functools.partial(simulate, 0, *parts, 1))
        assert "\n" not in str(refusal.value)


def test_a_contribution_may_have_python_numbers():
    def count(two):
        return two[0]._replace(weight=1, num_gradients=3), two[1]

    _, trace = simulate(0, quadratic(6, 4, mu=0.1), broken(client=count), mfa_rand(6, 2), 1)
    assert trace.gradients[-1].tolist() == [9, 9]
