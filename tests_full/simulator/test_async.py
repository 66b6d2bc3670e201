"""Asynchronous training against a NumPy event loop, the law of its delays, and `simulate`."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import advance, fedavg, join_traces, local_sgd, params_of, simulate, sweep
from fedjax_mm.asynchrony import fedast, on_clock, shifted_exponential
from fedjax_mm.base import Assignment, Cohort, keys
from fedjax_mm.sweeps import Grid, Setup
from fedjax_mm.sweeps.devices import layout
from fedjax_mm.tasks import least_squares, quadratic
from tests.helpers import Towards, replay, slow_unless
from tests.simulator.test_async import (
    KEY,
    RATE,
    TASK,
    TWO,
    draws,
    falling,
    fed,
    one_by_one,
    program,
)


def test_delays_depend_on_the_model():
    """Two jobs run at a time, one of length 1 and one of length 3."""
    dispatch = one_by_one(
        24, 2, at_work=1, ratio=1, delay=lambda key, m, k: 1.0 + 2 * m, reallocate=False
    )
    run = jax.jit(lambda: simulate(KEY, TASK, fed(), dispatch, 8)[1])
    assert run().metrics["time"][1:, 0].tolist() == [1, 2, 3, 3, 4, 5, 6, 6]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Heavy(Towards):
    """Client k weighs 2 + k."""

    def weight(self, client):
        return 2.0 + client


def test_the_last_updates_are_kept_without_their_weights():
    """The update of each of the first eight jobs is half of its client's target."""
    task, same = Heavy(jnp.arange(5.0)), lambda key, m, k: 1.0 + 0 * k
    dispatch = fedast(5, 1, at_work=8, ratio=1, delay=same)
    how = {"params": {"w": jnp.zeros(3)}}
    run = jax.jit(lambda: simulate(KEY, task, fedavg(0.5, local_steps=1), dispatch, 1, **how)[0])
    kept = run().assignment.stores[0].recent["w"][0, :, 0]
    np.testing.assert_allclose(np.sort(kept), np.sort(draws(dispatch, 8).client / 2), rtol=1e-6)


def clock_of(state):
    """The clock with its jobs ordered by number, regardless of their places in memory."""
    clock = state.assignment.clock
    order = np.argsort(clock.jobs.number)
    jobs = jax.tree.map(lambda x: x[order], clock.jobs._replace(place=clock.jobs.number))
    return clock._replace(jobs=jobs, place=clock.steps)


@pytest.mark.parametrize(("record_every", "client_map"), [(1, "scan"), slow_unless(False, 40, 3)])
def test_results_do_not_depend_on_batches_of_arrivals_and_nothing_recompiles(
    record_every, client_map
):
    whole = jax.device_get(program(TWO, 120, 40)(KEY))
    assert len({*whole[1].metrics["at_work"][:, 0]}) > 1  # R_m changes during the run
    run = program(TWO, 120, record_every, client_map)
    state, trace = jax.device_get(run(KEY))
    chex.assert_trees_all_equal(clock_of(state), clock_of(whole[0]))
    chex.assert_trees_all_close(params_of(state), params_of(whole[0]), rtol=1e-5, atol=1e-7)
    for name in ("time", "steps", "at_work"):
        records = trace.metrics[name][:: 40 // record_every]
        np.testing.assert_array_equal(records, whole[1].metrics[name])
    np.testing.assert_array_equal(trace.gradients.sum(0), whole[1].gradients.sum(0))
    run(jax.random.key(6))
    assert run._cache_size() == 1


def test_a_continued_run_equals_the_whole_run():
    whole, trace = program(TWO, 120, 40)(KEY)
    state, first = program(TWO, 80, 40)(KEY)
    go_on = jax.jit(
        lambda state: advance(state, TASK, fed(1.0, rate=falling), TWO, 40, record_every=40)
    )
    state, later = go_on(state)
    chex.assert_trees_all_equal(state, whole)
    chex.assert_trees_all_equal(join_traces(first, later), trace)
    assert trace.round.tolist() == [0, 40, 80, 120]


@functools.cache
def unequal_epochs(client_map, client_axis=None):
    """A run on one or two devices in which clients take 1 to 4 steps and R_m changes."""
    rng, counts = np.random.default_rng(1), [3, 8, 5, 2, 7, 4, 6, 1]
    data = [[rng.normal(size=(n, *more)) for n in counts] for more in ((2,), ())]
    task = least_squares(*data, ridge=0.3)
    algorithm = fedavg(local_sgd(RATE, epochs=1, batch_size=2), weighted=False)
    dispatch = one_by_one(8, 2, at_work=(12, 6), ratio=2)
    how = {"client_map": client_map, "client_axis": client_axis, "record_every": 60}
    run = functools.partial(simulate, KEY, task, algorithm, dispatch, 120, **how)
    if client_axis is None:
        return jax.device_get(jax.jit(run)())
    where = layout(1, jax.devices()[:2], axis="clients")
    return jax.device_get(jax.jit(where.over(run, (), None))())


@pytest.mark.parametrize(
    ("client_map", "client_axis"),
    [(3, "clients"), slow_unless(False, "scan", None), slow_unless(False, "vmap", None)],
)
def test_jobs_of_unequal_length_do_not_depend_on_client_map_and_devices(client_map, client_axis):
    state, trace = unequal_epochs(client_map, client_axis)
    one, alone = unequal_epochs("auto")
    assert len({*alone.metrics["at_work"][:, 0]}) > 1
    chex.assert_trees_all_equal(clock_of(state), clock_of(one))
    chex.assert_trees_all_close(trace, alone, rtol=1e-5, atol=1e-6)


def test_vmapped_seeds_equal_single_runs():
    seeds = jax.random.split(KEY, 3)
    together = jax.device_get(jax.jit(jax.vmap(program(TWO, 120, 40).__wrapped__))(seeds))
    for i, seed in enumerate(seeds):
        alone, beside = (
            jax.device_get(program(TWO, 120, 40)(seed)),
            jax.tree.map(lambda x, i=i: x[i], together),
        )
        chex.assert_trees_all_equal(clock_of(alone[0]), clock_of(beside[0]))
        chex.assert_trees_all_close(alone[1], beside[1], rtol=1e-5, atol=1e-6)


def means(values):
    """The mean over seeds, and four standard errors."""
    values = np.asarray(values, float)
    return values.mean(0), 4 * values.std(0, ddof=1) / np.sqrt(len(values))


@functools.cache
def many(dispatch, num_arrivals, record_every, num_seeds=32):
    """The metrics and the counts of updates of many seeds. The models do not matter."""
    seeds = jax.random.split(jax.random.key(1), num_seeds)

    def run(rng_key):
        task, algorithm = quadratic(24, 1, mu=0.1), fed(1.0, rate=0.1, steps=1)
        how = {"record_every": record_every, "client_map": "vmap"}
        trace = simulate(rng_key, task, algorithm, dispatch, num_arrivals, **how)[1]
        kept = {name: trace.metrics[name] for name in ("time", "staleness", "steps")}
        return kept, trace.client_updates

    return jax.device_get(jax.jit(jax.vmap(run))(seeds))


def test_arrival_rates_are_running_jobs_over_mean_delay():
    """The mean delay is 1.5 times the mean of the exponential part."""
    at_work, mean_delays = np.array([8, 6, 4]), 1.5 * np.array([1.0, 3.0, 0.5])
    delay = shifted_exponential(24, mean_delays / 1.5)
    dispatch = one_by_one(24, 3, at_work=at_work, ratio=4, delay=delay, reallocate=False)
    metrics, updates = many(dispatch, 1200, 600)
    rates = at_work / mean_delays
    duration, error = means(metrics["time"][:, 2, 0] - metrics["time"][:, 1, 0])
    assert abs(duration - 600 / rates.sum()) < error
    shares, errors = means(updates[:, 2] / 600)
    assert (np.abs(shares - rates / rates.sum()) < errors).all()
    steps, errors = means((metrics["steps"][:, 2] - metrics["steps"][:, 1]) / updates[:, 2])
    assert (np.abs(steps - 1 / np.ceil(at_work / 4)) < errors + 1 / 100).all()


def arrivals_during_a_job(draw, num_others, size=20_000):
    """Counts the arrivals during one job if each arrival starts another job at once."""
    own = draw(size)
    counts, largest = np.zeros(size, int), draw(10 * size)
    for _ in range(num_others):
        # The rest of a running job. A random moment falls into long jobs more often.
        met = RNG.choice(largest, size, p=largest / largest.sum())
        time = met * RNG.random(size)
        while (time < own).any():
            counts += time < own
            time = time + draw(size)
    return counts


RNG = np.random.default_rng(0)


FACTORS = np.repeat([1.3, 1.0, 0.7], [6, 12, 6])


LAWS = {
    "exponential": (
        {"shift": 0.0, "slow": 0.0, "fast": 0.0},
        lambda size: RNG.exponential(size=size),
    ),
    "shifted": ({}, lambda size: RNG.choice(FACTORS, size) * (0.5 + RNG.exponential(size=size))),
}


@pytest.mark.parametrize("law", [slow_unless(law == "shifted", law) for law in LAWS])
def test_staleness_follows_the_law_of_the_delays(law):
    """With one model and buffers of one update, staleness counts the arrivals during a job."""
    options, draw = LAWS[law]
    num_jobs, num_arrivals = 6, 400
    delay = shifted_exponential(24, **options)
    dispatch = one_by_one(24, 1, at_work=num_jobs, ratio=num_jobs, delay=delay, reallocate=False)
    staleness = many(dispatch, num_arrivals, 1)[0]["staleness"][:, 101:, 0]
    average, error = means(staleness.mean(1))
    assert abs(average - (num_jobs - 1)) < error + 0.02  # the stalest jobs are still running
    expected = arrivals_during_a_job(draw, num_jobs - 1)
    for value in range(12):
        share, error = means((staleness == value).mean(1))
        other = (expected == value).mean()
        assert abs(share - other) < error + 4 * np.sqrt(other / len(expected)), value
        if law == "exponential":  # each job is the next with equal probability
            geometric = (1 - 1 / num_jobs) ** value / num_jobs
            assert abs(share - geometric) < error, value


def test_a_round_lasts_as_long_as_its_slowest_client():
    """Cohorts have padding, one of them has no clients, and a sweep records the time, too."""
    groups = np.array([[[3, -1], [5, 8]], [[-1, 2], [9, 9]], [[-1, -1], [-1, -1]]])
    delay = shifted_exponential(24, np.array([1.0, 3.0]))
    rounds = on_clock(replay(groups, 24), delay)

    def longest(t):
        each = keys.model_keys(
            keys.delays_key(keys.assignment_key(keys.round_key(KEY, t))), jnp.arange(2)
        )
        return max(
            (
                delay(keys.client_key(each[m], jnp.int32(k)), jnp.int32(m), jnp.int32(k))
                for m in range(2)
                for k in groups[t - 1, m]
                if k >= 0
            ),
            default=0.0,
        )

    time = jax.jit(lambda: simulate(KEY, TASK, fed(), rounds, 3)[1].metrics["time"])()
    expected = np.cumsum([0.0, *(longest(t) for t in (1, 2, 3))])
    np.testing.assert_allclose(time, np.stack([expected] * 2, 1), rtol=1e-6)
    result = sweep(
        Grid(lambda rate: Setup(TASK, fed(rate=rate), rounds), {"rate": [0.1, 0.2]}, num_rounds=3)
    )
    assert result["time"].dims == ("rate", "seed", "round", "model")
    assert (np.diff(result["time"].values, axis=2)[:, :, :2] > 0).all()
    assert (result["time"].isel(rate=0) == result["time"].isel(rate=1)).all()


def test_the_clock_passes_on_observations_and_metrics():
    def observe(round, cohort, reports, state):
        told = jnp.where(cohort.clients >= 0, 1 + reports["loss"], 0)
        return state + told.reshape(2, 2).sum(1)

    counting = Assignment(
        24,
        2,
        lambda rng_key, look: jnp.zeros(2),
        lambda rng_key, t, state, look: (Cohort.of_rows(jnp.array([[1, 2], [3, -1]])), state),
        observe,
        lambda state: {"seen": state},
    )
    delay = shifted_exponential(24, 0.0, shift=1.0, slow=0.0, fast=0.0)
    alone = simulate(KEY, TASK, fed(), counting, 3)[1].metrics
    timed = simulate(KEY, TASK, fed(), on_clock(counting, delay), 3)[1].metrics
    assert timed["time"][:, 1].tolist() == [0, 1, 2, 3]
    assert (np.diff(alone["seen"], axis=0) != 0).all()
    np.testing.assert_array_equal(timed["seen"], alone["seen"])


@pytest.mark.parametrize("delay", [jnp.nan, jnp.inf])
def test_nothing_waits_for_a_job_that_never_ends(delay):
    def draw(rng_key, model, client):
        return jnp.where(client == 0, delay, 1.0 + client % 3)

    dispatch = one_by_one(24, 2, at_work=12, ratio=3, delay=draw, reallocate=False)
    state, trace = simulate(KEY, TASK, fed(), dispatch, 60, record_every=60)
    jobs = state.assignment.clock.jobs
    assert np.isfinite(trace.metrics["time"][-1]).all()
    assert set(np.asarray(jobs.client)[~np.isfinite(jobs.finish)]) <= {0}
    assert not np.isnan(jobs.finish).any()  # NaN cannot be ordered
    # Ties are broken by the order in which jobs are stored, which is the order of their starts.
    assert (np.diff(jobs.number) > 0).all()


def test_jobs_that_never_end_arrive_if_there_are_no_others():
    """They arrive in the order of their starts, in batches of any size."""

    def run(record_every):
        never = one_by_one(
            24, 2, at_work=6, ratio=3, delay=lambda key, m, k: jnp.inf + 0 * k, reallocate=False
        )
        return simulate(KEY, TASK, fed(), never, 12, record_every=record_every)[0]

    one, many = run(1), run(12)
    chex.assert_trees_all_equal(clock_of(one), clock_of(many))
    assert one.assignment.clock.jobs.number.tolist() == list(range(12, 24))
