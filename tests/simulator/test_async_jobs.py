"""Models that arrive and finish during asynchronous runs, against a NumPy event loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import advance, fedavg, params_of, simulate, sweep, to_dataset
from fedjax_mm.asynchrony import fedast, shifted_exponential
from fedjax_mm.asynchrony.lifetimes import given_up, made_room
from fedjax_mm.availability import arriving, finishing
from fedjax_mm.base import keys
from fedjax_mm.metrics import completion
from fedjax_mm.sweeps import Grid, Setup
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks import quadratic, with_metrics
from tests.helpers import slow_unless
from tests.oracles import asynchronous as oracle
from tests.simulator.test_async import KEY, SERVER_RATE, N, fed, problems_of

NEVER = 0.0
CASES = {  # R_m, ratio, whether R_m changes, arrivals per round, rounds, `every`, targets, arrivals
    "one finishes": ((6, 4, 2), 2, False, 5, 20, 1, [NEVER, 2.2, NEVER], None),
    "two arrive": ((5, 4, 3), 3, False, 4, 16, 1, [NEVER] * 3, [0, 9, 4]),
    "all finish": ((5, 3, 4), 2, False, 6, 24, 2, [3.0, 2.5, 2.8], None),
    "nobody at first": ((3, 4, 5), 2, False, 7, 20, 1, [2.6, NEVER, 3.0], [3, 11, 3]),
    "reallocated": ((6, 6, 6), 2, True, 9, 40, 3, [NEVER, 1.7, NEVER], [0, 0, 7]),
    "different structures": ((9, 3), 2, True, 5, 20, 1, [2.3, NEVER], [0, 4]),
}
QUICK = {"one finishes", "nobody at first", "reallocated"}


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
    """The models in the order in which those at work get what remains of a finished model's."""
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
