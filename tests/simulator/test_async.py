"""Asynchronous training against a NumPy event loop, the law of its delays, and `simulate`."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mm import fedavg, fednova, local_sgd, params_of, simulate
from fedjax_mm.asynchrony import fedast, hinge, on_clock, polynomial, shifted_exponential
from fedjax_mm.asynchrony.dispatch import draws_of
from fedjax_mm.base import Assignment, Batching, Cohort, keys
from fedjax_mm.compression import compressed, qsgd
from fedjax_mm.privacy import private
from fedjax_mm.simulator.asynchronous import relative_variance
from fedjax_mm.tasks import least_squares, quadratic, with_metrics
from tests.helpers import replay, slow_unless
from tests.oracles import asynchronous as oracle
from tests.oracles import multi_model as reference
from tests.simulator.test_oracle import regression, row_numbers

KEY = jax.random.key(5)


one_by_one = functools.partial(fedast, arrivals_per_round=1)


N, NUM_STEPS, RATE, SERVER_RATE = 7, 3, 0.02, 0.8


STALE = {  # FedBuff, FedAsync, dropped updates, and all at once
    "FedBuff": {"weight": polynomial(0.5)},
    "FedAsync": {"weight": hinge(2.0, free=1), "sends": "model"},
    "dropped": {"drop_after": 2},
    "all, reallocated": {"weight": polynomial(1.0), "drop_after": 1, "sends": "model"},
}


CASES = {  # R_m, ratio, whether R_m changes, arrivals, whether models are stacked
    "FedBuff": ((7,), 3, False, 60, True),
    "FedAsync": ((5, 4), 5, False, 60, True),
    "dropped": ((9, 2, 4), 4, False, 80, True),
    "all, reallocated": ((12, 9), 3, True, 120, False),
    "one model": ((7,), 3, False, 80, True),
    "fully asynchronous": ((5, 4), 5, False, 80, True),
    "unequal": ((9, 2, 4), 3, False, 80, True),
    "reallocated": ((6, 6, 6), 2, True, 200, True),
    "different structures, reallocated": ((25, 3), 3, True, 200, False),
}


FACTORS = {  # in plain Python
    "FedBuff": {"weight": lambda s: (1 + s) ** -0.5},
    "FedAsync": {"weight": lambda s: 1 if s <= 1 else 1 / (1 + 2 * (s - 1))},
    "all, reallocated": {"weight": lambda s: 1 / (1 + s)},
}


QUICK = {"unequal", "dropped"}  # the rest is slow
TOGETHER = {"different structures, reallocated", *STALE}


def draws(dispatch, count):
    """The clients and the delays of the first jobs."""
    return jax.device_get(jax.jit(lambda: draws_of(dispatch, KEY, jnp.arange(count)))())


def drawn_rows(store, client, how):
    """The rows of each job's steps, ``[jobs, steps, B]``."""

    def rows(number, client, step):
        key = keys.training_key(keys.job_key(KEY, number))
        return store.take(store.batch(key, client, step, how)[0])

    over = jax.vmap(jax.vmap(rows, (None, None, 0)), (0, 0, None))
    return jax.device_get(jax.jit(over)(jnp.arange(len(client)), client, jnp.arange(NUM_STEPS)))


def falling(t):
    """The rate of a job, by the number of its model's next step."""
    return 0.2 / (1 + t)


def fed(server_rate=SERVER_RATE, rate=RATE, **local):
    """FedAvg of equally weighted clients."""
    local = local_sgd(rate, **{"steps": NUM_STEPS} | local)
    return fedavg(local, weighted=False, server_optimizer=optax.sgd(server_rate))


@functools.cache
def regressions(num_models, alike):
    """Features and targets of each model's clients, with equal shapes if `alike`."""
    data = [regression(N, seed=m) for m in range(num_models)]
    if not alike:
        return data
    rng = np.random.default_rng(3)
    return [tuple([x + rng.normal(size=x.shape) for x in each] for each in data[0]) for _ in data]


def itself(params):
    """A metric. All tasks share it, because different functions would change their structure."""
    return params


def models_of(trace, model, name):
    """Values of one metric of a model in every record after the first."""
    return np.asarray(trace.metrics[name])[1:, model]


@functools.cache
def start_of(name):
    return list(np.random.default_rng(2).normal(size=(len(CASES[name][0]), 4)))


def problems_of(dispatch, alike, num_jobs):
    """The tasks, the local training of the event loop, and the draws of the first jobs."""
    data = regressions(dispatch.num_models, alike)
    tasks = [with_metrics(least_squares(*each, ridge=0.3), {"w": itself}) for each in data]
    problems = [reference.LeastSquares(*each, 0.3) for each in data]
    drawn, how = draws(dispatch, num_jobs), Batching(2)
    rows = [
        drawn_rows(
            dataclasses.replace(task.task.data, examples=row_numbers(targets)), drawn.client, how
        )
        for task, (_, targets) in zip(tasks, data, strict=True)
    ]

    def train(m, k, w, number, t):
        local = reference.full_gradient_steps(
            lambda w, e: reference.least_squares_gradient(problems[m], k, w, rows[m][number, e]),
            w,
            RATE,
            NUM_STEPS,
        )
        return local - w

    return tasks, train, drawn


@functools.cache
def event_loop(name):
    """The tasks, and all arrivals of the NumPy event loop."""
    at_work, ratio, reallocate, num_arrivals, alike = CASES[name]
    num_jobs = sum(at_work) + num_arrivals
    tasks, train, drawn = problems_of(dispatch_of(name), alike, num_jobs)
    arrivals, _ = oracle.fedast(
        train,
        start_of(name),
        at_work,
        ratio,
        drawn.client.item,
        lambda *place: drawn.delay.item(*place),
        num_arrivals,
        SERVER_RATE,
        reallocate,
        **FACTORS.get(name, {}),
        **{key: x for key, x in STALE.get(name, {}).items() if key != "weight"},
    )
    return tasks, arrivals


def dispatch_of(name):
    at_work, ratio, reallocate, *_ = CASES[name]
    delay = shifted_exponential(N, 1.0 + 0.5 * np.arange(len(at_work)))
    how = {"ratio": ratio, "delay": delay, "reallocate": reallocate, **STALE.get(name, {})}
    return one_by_one(N, len(at_work), at_work=at_work, **how)


def simulated(name, client_map, record_every):
    """The state and the trace of a run with minibatches."""
    how = {"client_map": client_map, "record_every": record_every, "params": start_of(name)}

    @jax.jit
    def run(tasks):
        return simulate(KEY, tasks, fed(batch_size=2), dispatch_of(name), CASES[name][3], **how)

    return jax.device_get(run(event_loop(name)[0]))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [slow_unless(name in TOGETHER, name) for name in CASES])
def test_batched_arrivals_match_the_event_loop(name):
    """The longest batches have more updates than reallocation remembers."""
    at_work, _, reallocate, num_arrivals, alike = CASES[name]
    every, (_, expected) = num_arrivals // 4, event_loop(name)
    state, together = simulated(name, 12, every)
    assert len(state.models) == (1 if alike else len(at_work))
    for m in range(len(at_work)):
        for i in range(1, 5):
            so_far = expected[: i * every]
            left = so_far[-1].models[m]
            np.testing.assert_allclose(together.metrics["w"][i, m], left, rtol=0, atol=1e-10)
            stale = [each.staleness for each in so_far[-every:] if each.model == m]
            assert together.metrics["staleness"][i, m] == pytest.approx(np.mean(stale))
        if reallocate:
            store = state.assignment.stores[0 if alike else m]
            kept, wanted = store.recent[m if alike else 0], expected[-1].recent[m]
            order = (len([each for each in expected if each.model == m]) + np.arange(8)) % 8
            np.testing.assert_allclose(kept[order], wanted, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [slow_unless(name in QUICK, name) for name in CASES])
def test_every_arrival_matches_the_event_loop(name):
    """Compares times, steps, models and staleness."""
    at_work, _, reallocate, *_ = CASES[name]
    (_, expected), (_, trace) = event_loop(name), simulated(name, "vmap", 1)
    times = [each.time for each in expected]
    np.testing.assert_allclose(models_of(trace, 0, "time"), times, rtol=1e-12)
    came = np.argmax(trace.client_updates[1:], axis=1)
    assert came.tolist() == [each.model for each in expected]
    for m in range(len(at_work)):
        np.testing.assert_array_equal(
            models_of(trace, m, "steps"), [each.steps[m] for each in expected]
        )
        np.testing.assert_array_equal(
            models_of(trace, m, "at_work"), [each.targets[m] for each in expected]
        )
        np.testing.assert_allclose(
            models_of(trace, m, "w"), [each.models[m] for each in expected], rtol=0, atol=1e-10
        )
    staleness = np.nansum(trace.metrics["staleness"][1:], axis=1)
    assert staleness.tolist() == [each.staleness for each in expected]
    assert (len({tuple(each.targets) for each in expected}) > 1) == reallocate


def test_a_relative_variance_is_about_the_mean():
    """The mean of (1, 0) and (3, 4) is (2, 2), at a squared distance of 5 from both."""
    updates = {"one": jnp.array([1.0, 3.0]), "two": jnp.array([[0.0], [4.0]])}
    assert relative_variance(updates) == 5 / 8


def test_jobs_are_drawn_from_all_clients():
    assert {*draws(TWO, 1000).client.tolist()} == {*range(24)}


TASK = quadratic(24, 2, mu=0.05)


TWO = one_by_one(24, 2, at_work=(8, 4), ratio=2)


@functools.cache
def program(dispatch, num_arrivals, record_every, client_map="auto"):
    """A compiled run of the quadratic."""

    def run(rng_key):
        how = {"record_every": record_every, "client_map": client_map}
        return simulate(rng_key, TASK, fed(1.0, rate=falling), dispatch, num_arrivals, **how)

    return jax.jit(run)


@pytest.mark.parametrize("shift", [slow_unless(False, 0.0), 2.0])
def test_full_buffers_and_equal_delays_make_rounds(shift):
    """All R_m jobs arrive at the same moment, and the next ones begin after the server's step."""
    at_work, num_rounds = (4, 6), 5
    delay = shifted_exponential(24, 0.0, shift=shift, slow=0.0, fast=0.0)
    dispatch = one_by_one(24, 2, at_work=at_work, ratio=1, delay=delay, reallocate=False)
    num_jobs = sum(at_work)
    state, trace = program(dispatch, num_rounds * num_jobs, num_jobs)(KEY)
    drawn = draws(dispatch, num_rounds * num_jobs).client.reshape(num_rounds, num_jobs)
    groups = np.full((num_rounds, 2, 6), -1)
    groups[:, 0, :4], groups[:, 1] = drawn[:, :4], drawn[:, 4:]
    rounds = on_clock(replay(groups, 24), delay)
    expected, records = jax.jit(
        lambda: simulate(KEY, TASK, fed(1.0, rate=falling), rounds, num_rounds)
    )()
    chex.assert_trees_all_close(params_of(state), params_of(expected), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(trace.metrics["steps"][:, 0], range(num_rounds + 1))
    assert np.nanmax(trace.metrics["staleness"]) == 0
    delays = shift * np.arange(1, num_rounds + 1)
    np.testing.assert_allclose(records.metrics["time"][1:, 0], delays, rtol=1e-6)
    np.testing.assert_allclose(trace.metrics["time"][1:, 0], delays, rtol=1e-6)


def test_padding_of_a_list_takes_no_time():
    """A slot is padding if its client or its model is -1."""
    listed = Cohort(jnp.array([3, -1]), jnp.array([-1, 1]))
    waiting = Assignment(
        24, 2, lambda rng_key, look: (), lambda rng_key, t, state, look: (listed, state)
    )
    delay = shifted_exponential(24, 0.0, shift=1.0)
    clock = on_clock(waiting, delay)
    _, state = jax.jit(lambda: clock.assign(KEY, 1, clock.init(KEY, None), None))()
    assert state.own == 0


def test_concretization_errors_explain_traced_values():
    task = with_metrics(TASK, {"large": lambda params: 1.0 if params[0] > 1 else 0.0})
    with pytest.raises(TypeError) as refusal:
        jax.eval_shape(lambda key: simulate(key, task, fed(), TWO, 2), KEY)
    (note,) = [note for note in refusal.value.__notes__ if "compiled once and" in note]
    assert note.startswith("the record of a round is compiled once and then serves all rounds")


def test_a_metric_with_a_reserved_name_is_refused():
    task = with_metrics(TASK, {"staleness": lambda params: params[0]})
    with pytest.raises(ValueError, match="'staleness', like one that all runs record; rename it"):
        simulate(KEY, task, fed(), TWO, 2)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: private(f, clip=1.0, noise_multiplier=0.1, clients_per_round=2),
        lambda f: compressed(f, qsgd(4)),
    ],
    ids=["private", "compressed"],
)
def test_wrapped_algorithms_run_asynchronously(wrap):
    def run(key):
        algorithm, dispatch = wrap(fedavg(0.1, local_steps=1)), fedast(6, 2, at_work=2, ratio=1)
        return simulate(key, quadratic(6, 2, mu=0.1), algorithm, dispatch, 2)

    jax.eval_shape(run, jax.random.key(0))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"weight": 0.5}, "weight is 0.5; give a function of the staleness"),
        ({"weight": lambda s: s}, r"weight returns int32\[\]; return one real number"),
        ({"drop_after": -1}, "drop_after is -1; it must"),
        ({"sends": "gradient"}, "sends is 'gradient'; it must be"),
        ({"weight": polynomial(0.5)}, "but the algorithm sends more"),
    ],
)
def test_wrong_treatments_of_stale_updates_are_refused(how, words):
    """FedNova sends two parts, of which a weight would change the wrong one."""
    task, algorithm = quadratic(6, 2, mu=0.1), fednova(local_sgd(0.1, steps=2))
    with pytest.raises((TypeError, ValueError), match=words):
        simulate(KEY, task, algorithm, fedast(6, 1, at_work=2, ratio=1, **how), 1)
