"""Models that arrive and finish during asynchronous runs, against a NumPy event loop."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import advance, fedavg, init, params_of, simulate
from fedjax_mm.asynchrony import fedast, shifted_exponential
from fedjax_mm.asynchrony.lifetimes import given_up, made_room
from fedjax_mm.availability import arriving, finishing
from fedjax_mm.base import keys
from fedjax_mm.tasks import quadratic, with_metrics
from tests.helpers import slow_unless
from tests.oracles import asynchronous as oracle
from tests.simulator.test_async import KEY, SERVER_RATE, N, fed, problems_of

NEVER = 0.0
CASES = {  # R_m, ratio, whether R_m changes, arrivals per round, rounds, `every`, targets, arrivals
    "one finishes": ((5, 4, 3), 2, False, 5, 20, 1, [NEVER, 2.2, NEVER], None),
    "two arrive": ((5, 4, 3), 3, False, 4, 16, 1, [NEVER] * 3, [0, 9, 4]),
    "all finish": ((5, 3, 4), 2, False, 6, 24, 2, [3.0, 2.5, 2.8], None),
    "nobody at first": ((3, 4, 5), 2, False, 7, 20, 1, [2.6, NEVER, 3.0], [3, 11, 3]),
    "reallocated": ((6, 6, 6), 2, True, 9, 40, 3, [NEVER, 1.7, NEVER], [0, 0, 7]),
    "different structures": ((9, 3), 2, True, 5, 20, 1, [2.3, NEVER], [0, 4]),
}
QUICK = {"nobody at first", "reallocated"}


def dispatch_of(name):
    at_work, ratio, reallocate, per_round, *_ = CASES[name]
    delay = shifted_exponential(N, 1.0 + 0.5 * np.arange(len(at_work)))
    how = {"ratio": ratio, "delay": delay, "reallocate": reallocate}
    return fedast(N, len(at_work), at_work=at_work, arrivals_per_round=per_round, **how)


def jobs_of(name):
    *_, every, targets, arrivals = CASES[name]
    jobs = finishing(dispatch_of(name), "size", at_most=targets, every=every)
    return jobs if arrivals is None else arriving(jobs, arrivals)


def size(params):
    return params @ params


def order_of(num_models, t, m):
    """The models in the order in which the active ones get what remains of a finished model's."""
    key = keys.leaving_key(keys.assignment_key(keys.round_key(KEY, t)), jnp.int32(m))
    return jax.random.permutation(key, num_models).tolist()


@functools.cache
def start_of(name):
    return list(np.random.default_rng(2).normal(size=(len(CASES[name][0]), 4)))


def simulated(name, record_every):
    *_, num_rounds, _, _, _ = CASES[name]
    at_work, _, _, per_round, *_ = CASES[name]
    num_jobs = 4 * sum(at_work) + per_round * num_rounds
    tasks, train, drawn = problems_of(dispatch_of(name), len(at_work) > 2, num_jobs)
    tasks = [with_metrics(task, {"size": size}) for task in tasks]
    how = {"record_every": record_every, "params": start_of(name)}

    @jax.jit
    def run(tasks):
        return simulate(KEY, tasks, fed(batch_size=2), jobs_of(name), num_rounds, **how)

    return jax.device_get(run(tasks)), train, drawn


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [slow_unless(name in QUICK, name) for name in CASES])
def test_finishes_and_arrivals_match_the_event_loop(name):
    at_work, ratio, reallocate, per_round, num_rounds, every, targets, arrivals = CASES[name]
    (state, trace), train, drawn = simulated(name, 1)
    came, rounds = oracle.fedast(
        train,
        start_of(name),
        at_work,
        ratio,
        drawn.client.item,
        lambda *place: drawn.delay.item(*place),
        num_rounds,
        SERVER_RATE,
        reallocate,
        per_round=per_round,
        arrivals=arrivals,
        meets=lambda m, w: w @ w <= targets[m],
        every=every,
        order_of=functools.partial(order_of, len(at_work)),
    )
    found = trace.metrics
    np.testing.assert_array_equal(found["active"], [each.active for each in rounds])
    np.testing.assert_array_equal(found["finished_at"], [each.finished_at for each in rounds])
    if arrivals:
        np.testing.assert_array_equal(found["arrived_at"], [each.arrived_at for each in rounds])
    np.testing.assert_array_equal(found["at_work"], [each.targets for each in rounds])
    np.testing.assert_array_equal(trace.client_updates, [each.arrived for each in rounds])
    np.testing.assert_array_equal(found["steps"], [each.steps for each in rounds])
    np.testing.assert_allclose(found["time"][:, 0], [each.time for each in rounds], rtol=1e-12)
    models = [each.models for each in rounds]
    np.testing.assert_allclose(found["w"], models, rtol=0, atol=1e-10)
    total = np.nansum(found["staleness"] * trace.client_updates)
    assert total == pytest.approx(sum(each.staleness for each in came))
    jobs = state.assignment.clock.jobs
    if rounds[-1].working:
        assert dict(zip(jobs.number.tolist(), jobs.model.tolist(), strict=True)) == (
            rounds[-1].working
        )
    changes = len({tuple(each.active) for each in rounds})
    assert changes > 1
    assert (trace.gradients == trace.client_updates * 3).all()


def dealt(counts, leaves, active, arrives):
    """R_m after some models have left and others have arrived, with the oracle's R_m."""
    given = given_up(jnp.array(counts), jnp.array(leaves), jnp.array(active), KEY)
    found = made_room(given, jnp.array(arrives), jnp.array(active), sum(counts))
    expected, models = list(counts), range(len(counts))
    for m in models:
        if leaves[m]:
            there = [i for i in models if active[i]]
            order = jax.random.permutation(keys.leaving_key(KEY, jnp.int32(m)), len(counts))
            expected = oracle.give_up(expected, m, there, order.tolist())
    assert given.tolist() == expected
    there = [i for i in models if active[i]]
    for m in models:
        if arrives[m]:
            expected = oracle.make_room(expected, m, there, sum(counts))
            there.append(m)
    return found.tolist(), expected


def test_jobs_are_dealt_by_the_rules():
    """No job is lost, and models leave and arrive one after another."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        kind = rng.integers(0, 3, 6)  # stays, leaves, arrives
        counts = np.where(kind == 2, 0, rng.integers(1, 30, 6)).tolist()
        found, expected = dealt(counts, kind == 1, kind == 0, kind == 2)
        assert found == expected
        assert sum(found) == (sum(counts) if (kind != 1).any() else 0)


def test_a_finished_model_leaves_its_jobs_in_proportion_and_the_rest_by_lot():
    leaves, active = jnp.array([False, True, False]), jnp.array([True, False, True])

    def after(*counts):
        each = jax.random.split(KEY, 20)
        found = jax.vmap(lambda key: given_up(jnp.array(counts), leaves, active, key))(each)
        return {tuple(x) for x in found.tolist()}

    assert after(6, 4, 2) == {(9, 0, 3)}
    assert after(5, 4, 3) == {(8, 0, 4), (7, 0, 5)}


TASK, ALGORITHM, ROUNDS = quadratic(12, 2, mu=0.1), fedavg(0.1, local_steps=2), 8
PLAIN = fedast(12, 3, at_work=(4, 2, 3), ratio=1, reallocate=False, arrivals_per_round=10)


def run(dispatch, rounds=ROUNDS, record_every=1):
    return simulate(KEY, TASK, ALGORITHM, dispatch, rounds, record_every=record_every)


def assert_same(one, other):
    chex.assert_trees_all_equal(one, other)


def test_targets_that_are_never_met_change_nothing():
    (state, trace), (plain, expected) = run(finishing(PLAIN, "loss", at_most=-9.0)), run(PLAIN)
    assert_same(params_of(state), params_of(plain))
    assert_same(trace.client_updates, expected.client_updates)
    assert_same(trace.gradients, expected.gradients)
    assert_same({name: trace.metrics[name] for name in expected.metrics}, expected.metrics)
    assert (trace.metrics["active"] == 1).all()


def test_nothing_is_trained_if_all_targets_are_met_or_no_model_arrives():
    for jobs in (finishing(PLAIN, "loss", at_most=9.0), arriving(PLAIN, [99, 98, 99])):
        _, trace = run(jobs)
        assert trace.gradients.sum() == trace.client_updates.sum() == 0
        assert (trace.metrics["time"] == 0).all()
        assert (trace.metrics["at_work"][1:] == 0).all()
        assert (trace.metrics["loss"] == trace.metrics["loss"][0]).all()


def jobs_at(target, arrivals):
    return arriving(finishing(PLAIN, "excess_loss", at_most=target, every=2), arrivals)


TARGETS, ARRIVALS = jnp.array([[0.01, -1.0, 0.002], [-1.0] * 3]), jnp.array([[0, 0, 3], [4, 3, 3]])


def test_targets_and_arrivals_can_be_vmapped_and_runs_resume_bit_for_bit():
    together = jax.vmap(lambda *given: run(jobs_at(*given))[1])(TARGETS, ARRIVALS)
    for i in range(2):
        jobs = jobs_at(TARGETS[i], ARRIVALS[i])
        state, alone = run(jobs)
        for name in ("active", "at_work", "finished_at", "arrived_at", "steps"):
            assert_same(together.metrics[name][i], alone.metrics[name])
        assert_same(together.client_updates[i], alone.client_updates)
        np.testing.assert_allclose(together.metrics["loss"][i], alone.metrics["loss"], rtol=1e-5)
        half, _ = run(jobs, 4)
        assert_same(advance(half, TASK, ALGORITHM, jobs, ROUNDS - 4)[0], state)
    active, finished = together.metrics["active"][0], together.metrics["finished_at"][0, -1]
    ends = int(finished[0])
    assert np.isfinite(ends)
    assert ends < ROUNDS
    assert_same(active[:, 0], np.arange(ROUNDS + 1) <= ends)
    assert_same(active[:, 2], np.arange(ROUNDS + 1) > 3)
    losses = together.metrics["loss"][0, :, 0]
    assert (losses[ends:] == losses[ends]).all()


def test_jobs_that_cannot_be_run_are_refused():
    for make, words in [
        (lambda: finishing(arriving(PLAIN, [0, 0, 1]), "loss", at_most=1), "after their arrival"),
        (lambda: finishing(PLAIN, "loss", at_most=[1, 2]), "give one number, or 3"),
        (lambda: arriving(PLAIN, [0, 1]), "give one number, or 3"),
        (lambda: run(finishing(PLAIN, "accuracy", at_least=1)), "looks at the metric 'accuracy'"),
        (lambda: arriving(fedast(9, 2, at_work=20_000, ratio=1), [0, 1]), "give fewer jobs"),
        (
            lambda: advance(
                init(KEY, TASK, ALGORITHM, PLAIN), TASK, ALGORITHM, jobs_at(0.1, [0, 0, 1]), 2
            ),
            "state has",
        ),
    ]:
        with pytest.raises(ValueError, match=words):
            make()
