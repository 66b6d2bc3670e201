"""Models that arrive and finish: their clients, their ends, and the draws that do not change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import (
    advance,
    bandit,
    fedavg,
    fedfair,
    ifca,
    local_sgd,
    mdh,
    mfa_rand,
    mfa_rr,
    oort,
    params_of,
    power_of_choice,
    scheduled,
    sequential,
    simulate,
    stalevr,
    sweep,
    to_dataset,
    variance_reduced,
)
from fedjax_mm.assignments.variance_reduced import optimal_probabilities
from fedjax_mm.availability import arriving, available, bernoulli, finishing
from fedjax_mm.base import Contribution, Look, Padded
from fedjax_mm.metrics import completion, time_to_target
from fedjax_mm.sweeps import Grid, Setup
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks import least_squares, quadratic
from fedjax_mm.tasks.least_squares import LeastSquares
from tests.oracles.jobs import completed, rotation_spread

N, M, ROUNDS = 12, 3, 8
XS, YS = [jnp.eye(2)] * N, [jnp.full(2, 1.0 + k) for k in range(N)]
TASK = least_squares(XS, YS, ridge=0.1)
COUNTING = fedavg(0.1, local_steps=1)._replace(
    client=lambda context, server, client: (
        Contribution(
            jax.tree.map(jnp.ones_like, context.params), jnp.float32(1), jnp.int32(1), {"loss": 1.0}
        ),
        client,
    ),
    server=lambda context: (
        jax.tree.map(jnp.add, context.params, context.total.update),
        context.server_state,
    ),
)
"""An algorithm whose parameters count a model's trainings."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counted(LeastSquares):
    """A task with the number of trainings as a metric."""

    def init(self, rng_key):
        return jnp.zeros(2)

    def metrics(self, rng_key, params):
        return {"trainings": params[0]}


COUNTED = Counted(**{field.name: getattr(TASK, field.name) for field in dataclasses.fields(TASK)})

ASSIGNMENTS = {
    "MFA-Rand": mfa_rand(N, M),
    "MFA-Rand of a cohort": mfa_rand(N, M, cohort_size=7, unbiased=True),
    "MFA-Rand with processors": mfa_rand(N, M, processors=2),
    "MFA-RR": mfa_rr(N, M),
    "MFA-RR, new partitions": mfa_rr(N, M, redraw="round"),
    "LVR": variance_reduced(N, M, expected_trainings=5),
    "GVR": variance_reduced(N, M, expected_trainings=5, by="update"),
    "one by one": sequential(N, M, rounds_per_model=1),
    "MFA-RR, one partition": mfa_rr(N, M, redraw="never"),
    "Venn": scheduled(N, M, demand=[4, 5, 6], policy="venn"),
    "power-of-choice": power_of_choice(N, M, cohort_size=7, candidates=8),
    "Oort": oort(N, M, cohort_size=7),
    "FedFairMMFL": fedfair(N, M),
    "FedFairMMFL, memory": fedfair(N, M, memory=0.5),
    "FedFairMMFL, alpha 1": fedfair(N, M, alpha=1.0),
    **{
        f"bandit: {policy}": bandit(N, M, cohort_size=6, policy=policy)
        for policy in ("random", "weighted-sum", "pareto", "rank-list")
    },
}
QUICK = ["MFA-Rand", "MFA-RR", "LVR", "Venn", "Oort", "FedFairMMFL", "bandit: pareto"]
"""One of each kind of draw. The others are in `tests_full`."""
MDH = {"cohort_size": 6, "heterogeneous": [True] * M}
TARGETS = [-1.0, 23.0, 1e9]
"""Losses that are never met, met after some rounds, and met at the start."""


def trained(assignment, rounds=ROUNDS, algorithm=None, seed=0):
    algorithm = algorithm or fedavg(0.05, local_steps=2)
    return simulate(jax.random.key(seed), TASK, algorithm, assignment, rounds)


def counted(assignment, rounds=10):
    _, trace = simulate(jax.random.key(0), COUNTED, COUNTING, assignment, rounds)
    return to_dataset(trace)


@pytest.mark.parametrize("make", [mfa_rand, mfa_rr], ids=["MFA-Rand", "MFA-RR"])
@pytest.mark.parametrize(("arrivals", "expected"), [([0, 0, 0], [2, 4, 5]), ([0, 0, 2], [2, 3, 5])])
def test_freed_clients_are_dealt_again(make, arrivals, expected):
    needs = [8.0, 16.0, 24.0]
    jobs = arriving(finishing(make(N, M), "trainings", at_least=needs), arrivals)
    result = counted(jobs)
    found = completion(result, "trainings", at_least=xr.DataArray(needs, dims="model"))
    assert found.finished_at.values.tolist() == expected
    share = completed(needs, N, arrivals, lambda size, at_work: size // len(at_work))
    assert share == expected
    np.testing.assert_array_equal(found.completion_time, np.subtract(expected, arrivals))
    assert found.mean_completion_time == np.mean(np.subtract(expected, arrivals))
    assert (found.makespan, found.finished_share) == (5, 1)
    last = result.isel(round=-1)
    np.testing.assert_array_equal(last.finished_at, expected)
    np.testing.assert_array_equal(last.arrived_at, arrivals)
    first = result.isel(round=0)
    np.testing.assert_array_equal(first.active, np.array(arrivals) == 0)
    assert result.client_updates.isel(round=-1).sum() == N * 5
    assert result.idle_rounds.isel(round=-1).sum() == 0


@pytest.mark.parametrize("name", QUICK)
def test_models_that_are_done_are_frozen_and_the_others_get_their_clients(name):
    jobs = finishing(ASSIGNMENTS[name], "loss", at_most=TARGETS, every=2)
    _, trace = trained(jobs)
    active = trace.metrics["active"]
    np.testing.assert_array_equal(active[1:, 2], 0)
    np.testing.assert_array_equal(active[:, 0], 1)
    ends = int(trace.metrics["finished_at"][-1, 1])
    assert ends in (2, 4, 6)
    np.testing.assert_array_equal(active[:, 1], np.arange(ROUNDS + 1) <= ends)
    np.testing.assert_array_equal(trace.client_updates * (active == 0), 0)
    np.testing.assert_array_equal(trace.gradients * (active == 0), 0)
    np.testing.assert_array_equal(trace.idle_rounds * (active == 0), 0)
    loss = trace.metrics["loss"]
    assert loss[ends, 1] <= TARGETS[1]
    assert (loss[:ends:2, 1] > TARGETS[1]).all()
    np.testing.assert_array_equal(loss[ends:, 1], loss[ends, 1])
    np.testing.assert_array_equal(loss[:, 2], loss[0, 2])
    if name.startswith(("MFA", "FedFair")) and "processors" not in name:
        np.testing.assert_array_equal(trace.client_updates.sum(1)[1:], 7 if "cohort" in name else N)
    assert trace.client_updates[1 + ends :, 0].sum() > 0


@pytest.mark.parametrize("name", QUICK)
def test_targets_that_are_never_met_change_nothing(name):
    jobs = finishing(ASSIGNMENTS[name], "loss", at_most=-1.0)
    same = arriving(ASSIGNMENTS[name], [0] * M)
    (found, trace), (expected, without) = trained(jobs), trained(same)
    jax.tree.map(np.testing.assert_array_equal, params_of(found), params_of(expected))
    _, plain = trained(ASSIGNMENTS[name])
    for other in (without, plain):
        np.testing.assert_array_equal(trace.client_updates, other.client_updates)
        np.testing.assert_array_equal(trace.gradients, other.gradients)
        np.testing.assert_allclose(trace.metrics["loss"], other.metrics["loss"], rtol=1e-5)


@pytest.mark.parametrize("name", QUICK)
def test_no_model_trains_if_all_have_met_their_targets_or_none_has_arrived(name):
    for jobs in (
        finishing(ASSIGNMENTS[name], "loss", at_most=1e9),
        arriving(ASSIGNMENTS[name], [99] * M),
    ):
        state, trace = trained(jobs, 3)
        assert trace.client_updates.sum() == 0
        assert trace.gradients.sum() == 0
        assert np.isfinite(jax.tree.leaves(params_of(state))[0]).all()


@pytest.mark.parametrize("name", ["LVR"])
def test_jobs_resume_exactly_and_targets_and_arrivals_can_be_vmapped(name):
    algorithm = fedavg(0.05, local_steps=2)

    def run(target, arrivals, rounds=ROUNDS):
        jobs = finishing(ASSIGNMENTS[name], "loss", at_most=target)
        return simulate(jax.random.key(0), TASK, algorithm, arriving(jobs, arrivals), rounds)

    targets, arrivals = jnp.array([19.0, -1.0]), jnp.array([[0, 2, 3], [1, 0, 0]])
    _, together = jax.vmap(run)(targets, arrivals)
    for i in range(2):
        _, alone = run(targets[i], arrivals[i])
        np.testing.assert_array_equal(together.client_updates[i], alone.client_updates)
        np.testing.assert_allclose(together.metrics["loss"][i], alone.metrics["loss"], rtol=1e-5)
        np.testing.assert_array_equal(
            together.metrics["arrived_at"][i, -1], np.asarray(arrivals[i])
        )
    half, _ = run(targets[0], arrivals[0], 4)
    jobs = arriving(finishing(ASSIGNMENTS[name], "loss", at_most=targets[0]), arrivals[0])
    resumed, _ = advance(half, TASK, algorithm, jobs, ROUNDS - 4)
    jax.tree.map(
        np.testing.assert_array_equal,
        params_of(resumed),
        params_of(run(targets[0], arrivals[0])[0]),
    )


def test_a_sweep_over_targets_and_arrivals_is_one_program_and_equals_simulate():
    algorithm, arrivals = fedavg(0.05, local_steps=2), {1.0: [0, 2, 3], 2.0: [1, 0, 0]}

    def build(target, late, expected):
        rule = variance_reduced(N, M, expected_trainings=expected)
        rule = finishing(rule, "loss", at_most=target)
        return Setup(TASK, algorithm, arriving(rule, jnp.array(arrivals[late])))

    axes = {"target": [19.0, 21.0], "late": [*arrivals], "expected": [4.0, 6.0]}
    grid = Grid(build, axes, ROUNDS)
    assert len(programs_of(grid)) == 1
    result, key = sweep(grid).isel(seed=0), jax.random.fold_in(jax.random.key(0), 0)
    for i in (0, -1):
        each = {name: values[i] for name, values in axes.items()}
        _, alone = simulate(key, TASK, algorithm, build(**each).assignment, ROUNDS)
        here = result.sel(each).transpose("round", "model", ...)
        np.testing.assert_array_equal(here.active, alone.metrics["active"])
        np.testing.assert_allclose(here.loss, alone.metrics["loss"], rtol=1e-5)


def trainings_of(assignment, rounds):
    """The model that each client trains in each round, or -1, and the number of cut frames."""
    state, found = assignment.init(jax.random.key(0), Look()), []
    for t in range(1, rounds + 1):
        cohort, state = assignment.assign(jax.random.key(t), t, state, Look())
        rows = np.full(N, -1)
        is_there = np.asarray(cohort.clients) >= 0
        rows[np.asarray(cohort.clients)[is_there]] = np.asarray(cohort.models)[is_there]
        found.append(rows)
    return np.array(found), int(assignment.metrics(state)["frames_cut"][0])


def test_a_cut_frame_ends_at_once_and_a_frame_that_waits_ends_as_it_was():
    arrivals = [0, 0, 4]  # in the second of two rounds' frames
    cut, number = trainings_of(arriving(mfa_rr(N, M), arrivals), 10)
    assert number == 0  # the arrival falls on the end of a frame
    cut, number = trainings_of(arriving(mfa_rr(N, M), [0, 0, 3]), 9)
    assert number == 1
    assert (np.arange(3) == np.sort(cut[3:6], axis=0).T).all()  # a frame of three from round 4 on
    spread, most = rotation_spread(cut, number)
    assert spread <= most
    waits, number = trainings_of(arriving(mfa_rr(N, M, on_change="wait"), [0, 0, 3]), 7)
    assert number == 0
    assert set(waits[3]) == {0, 1}
    assert (np.arange(2) == np.sort(waits[2:4], axis=0).T).all()
    assert (np.arange(3) == np.sort(waits[4:7], axis=0).T).all()


def test_groups_of_finished_models_are_idle_until_a_frame_that_waits_ends():
    jobs = finishing(mfa_rr(N, M, on_change="wait"), "trainings", at_least=[4.0, 99.0, 99.0])
    updates = counted(jobs, 6).client_updates.diff("round")
    assert updates.values.tolist() == [[4, 4, 4], *[[0, 4, 4]] * 2, *[[0, 6, 6]] * 3]


def test_bandits_open_with_the_models_of_round_1_and_explore_new_ones_first():
    jobs = arriving(bandit(N, M, cohort_size=6), [0, 9, 4])
    updates = np.asarray(trained(jobs, 5)[1].client_updates)
    assert updates[1].tolist() == [N, 0, 0]
    assert updates[2:5].tolist() == [[6, 0, 0]] * 3
    assert updates[5].tolist() == [3, 0, 3]


def test_probabilities_without_a_model_are_those_of_the_others():
    sizes = jnp.array([[1.0, 2.0, 3.0, 4.0], [4.0, 1.0, 1.0, 2.0]])
    both = np.array([[1, 2, 3, 4], [4, 1, 1, 2]]) / 9
    np.testing.assert_allclose(optimal_probabilities(sizes, 2.0), both, rtol=1e-6)
    one = optimal_probabilities(sizes.at[1].set(0.0), 2.0)
    np.testing.assert_allclose(one, [[0.2, 0.4, 0.6, 0.8], [0.0] * 4], rtol=1e-6)


@pytest.mark.parametrize("every", [1, 2])
def test_a_model_that_meets_its_target_on_arrival_takes_no_time(every):
    jobs = arriving(finishing(mfa_rand(N, M), "loss", at_most=[-9.0, 1e9, -9.0]), [0, 2, 0])
    algorithm = fedavg(0.05, local_steps=2)
    _, trace = simulate(0, TASK, algorithm, jobs, 8, record_every=every)
    found = completion(
        to_dataset(trace), "loss", at_most=xr.DataArray([-9.0, 1e9, -9.0], dims="model")
    )
    np.testing.assert_array_equal(found.finished_at, trace.metrics["finished_at"][-1])
    assert found.completion_time[1] == 0
    assert trace.client_updates[:, 1].sum() == 0


def test_models_that_are_left_have_all_clients_in_equal_parts():
    active = jnp.array([True, False, True, False])
    look = Look(lambda: jnp.ones((4, N)), weights=lambda: jnp.ones((4, N)), active=lambda: active)
    for assignment in (
        mfa_rr(N, 4, redraw="never"),
        power_of_choice(N, 4, cohort_size=8, candidates=3),
    ):
        state = assignment.init(jax.random.key(0), look)
        for t in (1, 2):
            cohort, state = assignment.assign(jax.random.key(t), t, state, look)
            sizes = np.asarray(cohort.sizes(4))
            assert sizes.tolist() in ([6, 0, 6, 0], [4, 0, 4, 0])


def test_other_wrappers_may_be_inside():
    inside = finishing(available(mfa_rr(N, M), bernoulli(1.0)), "loss", at_most=TARGETS)
    plain = finishing(mfa_rr(N, M), "loss", at_most=TARGETS)
    (_, found), (_, expected) = trained(inside), trained(plain)
    np.testing.assert_array_equal(found.client_updates, expected.client_updates)
    np.testing.assert_array_equal(found.metrics["active"], expected.metrics["active"])
    assert (found.metrics["present"][1:] == N).all()


def test_servers_of_finished_models_do_not_step_while_those_of_idle_models_do():
    """The model that finishes has another structure, so it is in a stack of its own."""
    tasks = [quadratic(N, size, mu=0.1) for size in (2, 3, 2)]

    starts = [jnp.ones(task.dim) for task in tasks]
    algorithm = stalevr(local_sgd(0.05, steps=2))

    def losses(target):
        jobs = finishing(mfa_rand(N, M, unbiased=True), "loss", at_most=[-9.0, target, -9.0])
        absent = available(jobs, bernoulli(0.3))
        _, trace = simulate(0, tasks, algorithm, absent, 6, params=starts)
        return np.asarray(trace.metrics["loss"])

    loss = losses(losses(-9.0)[2, 1] + 1e-4)
    assert loss[2, 1] < loss[0, 1]
    assert (loss[2:, 1] == loss[2, 1]).all()
    assert (np.diff(loss[2:, 0]) != 0).all()


def test_jobs_that_cannot_be_run_are_refused():
    for make, words in [
        (lambda: trained(finishing(mdh(N, M, **MDH), "loss", at_most=1)), r"mdh\("),
        (lambda: trained(arriving(ifca(N, M), [0] * M)), "can leave models out"),
        (lambda: trained(arriving(mfa_rr(N, Padded(M, 2)), [0] * M)), "num_models is padded"),
        (lambda: finishing(mfa_rand(N, M), "loss"), "give one of them"),
        (lambda: finishing(mfa_rand(N, M), "loss", at_most=1, at_least=1), "give one of them"),
        (lambda: finishing(mfa_rand(N, M), "loss", at_most=[1, 2]), "give one number, or 3"),
        (lambda: finishing(arriving(mfa_rand(N, M), [0] * M), "loss", at_most=1), "arriving"),
        (lambda: arriving(mfa_rand(N, M), [0, 1]), "give one number, or 3"),
        (lambda: arriving(mfa_rand(N, M), 3), "give a list of 3 rounds"),
        (lambda: arriving(mfa_rand(N, M), [0, 1, -2]), "not be negative"),
        (lambda: trained(finishing(mfa_rand(N, M), "accuracy", at_least=1)), "accuracy"),
    ]:
        with pytest.raises(ValueError, match=words):
            make()


def test_times_to_a_target_are_those_of_the_clock_and_never_clipped():
    values = [[0.1, np.nan, 0.9], [0.7, 0.2, 0.9], [0.6, 0.3, 0.9]]
    dims = ("round", "model")
    result = xr.Dataset(
        {
            "accuracy": (dims, values),
            "time": (dims, [[0.0] * 3, [5.0] * 3, [7.0] * 3]),
            "arrived_at": (dims, [[0, 0, np.nan], [0, 0, 10], [0, 0, 10]]),
        },
        {"round": [0, 10, 20]},
    )
    found = completion(result, "accuracy", at_least=0.5)
    np.testing.assert_array_equal(found.finished_at, [10, np.nan, 10])
    np.testing.assert_array_equal(found.completion_time, [10, np.nan, 0])
    assert found.mean_completion_time == 5
    assert found.finished_share == pytest.approx(2 / 3)
    assert np.isnan(found.makespan)
    timed = completion(result, "accuracy", at_least=0.5, clock="time")
    np.testing.assert_array_equal(timed.completion_time, [5, np.nan, 0])
    with pytest.raises(ValueError, match="no 'loss', but accuracy"):
        time_to_target(result, "loss", at_most=1)
    with pytest.raises(ValueError, match="give one of them"):
        time_to_target(result, "accuracy")
