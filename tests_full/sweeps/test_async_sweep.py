"""Sweeps of asynchronous runs: agreement with `simulate`, plans, resuming and refusals."""

import dataclasses
import functools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import fedavg, mfa_rand, simulate, sweep, to_dataset
from fedjax_mm.asynchrony import fedast, on_clock, shifted_exponential
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.sweeps import Checkpoints, InterruptedRunError, Setup, Until, progress, state_bytes
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.plan import make_plan
from fedjax_mm.sweeps.program import num_bytes, programs_of
from tests.helpers import Towards, slow_unless
from tests.sweeps.test_checkpoint import signalling, sweep_of

SEED, SEEDS, ROUNDS, EVERY, EACH = 4, 2, 12, 4, 10
AXES = {"learning_rate": [0.05, 0.1], "mean": [1.0, 3.0]}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Noisy(Towards):
    """A task with a metric drawn from the record's key."""

    def metrics(self, rng_key, params):
        return super().metrics(rng_key, params) | {"noise": jax.random.normal(rng_key)}


def parts(learning_rate, mean):
    """Task, algorithm and dispatch with fewer concurrent jobs than arrivals per round."""
    delay = shifted_exponential(6, jnp.stack([jnp.asarray(mean), jnp.asarray(1.0)]))
    dispatch = fedast(6, 2, at_work=(4, 2), ratio=2, delay=delay, arrivals_per_round=EACH)
    task = Noisy(jnp.arange(6.0))
    return task, fedavg(learning_rate, local_steps=2, weighted=False), dispatch


def build(learning_rate, mean):
    return Setup(*parts(learning_rate, mean))


GRID = Grid(build, AXES, ROUNDS, SEEDS, seed=SEED, record_every=EVERY)


@functools.cache
def whole():
    """The uninterrupted sweep."""
    return sweep_of(GRID)


def run_of(parts):
    """Compiles `simulate` as a function of a key and a point."""

    @jax.jit
    def one(key, *point):
        return simulate(key, *parts(*point), ROUNDS, record_every=EVERY)[1]

    return one


def single_runs():
    """Yields the result of `simulate` at every point and seed, run one at a time."""
    one = run_of(parts)
    for rate in AXES["learning_rate"]:
        for mean in AXES["mean"]:
            for number, key in enumerate(seed_keys(SEED, range(SEEDS))):
                at = {"learning_rate": rate, "mean": mean, "seed": number}
                yield at, to_dataset(one(key, rate, mean))


def check_same(result, at, expected):
    """Checks that the sweep's result at a point and seed is that of `simulate`."""
    assert (expected["round"] == result["round"].values).all()
    found = result.sel(at).drop_vars(["diverged", *at])
    assert set(found) == set(expected)
    assert {"time", "steps", "staleness", "at_work", "noise"} <= set(found)
    xr.testing.assert_allclose(found, expected.transpose(*found.dims), rtol=1e-5, atol=1e-6)


def test_every_point_and_seed_equals_a_single_run():
    """All runs share one program, in which every round has the same number of arrivals."""
    result = whole()
    assert len(programs_of(GRID)) == 1
    assert result["round"].values.tolist() == list(range(0, ROUNDS + 1, EVERY))
    runs = list(single_runs())
    for at, expected in runs:
        check_same(result, at, expected)
    assert len({run["time"].values[-1, 0] for _, run in runs}) > len(AXES["mean"])
    assert len(np.unique(result["at_work"])) > 1


def unlike(learning_rate):
    """Three models, the first and the last of which have the same structure."""
    delay = shifted_exponential(6, jnp.array([1.0, 3.0, 2.0]))
    dispatch = fedast(6, 3, at_work=(4, 2, 3), ratio=2, delay=delay, arrivals_per_round=EACH)
    tasks = [Noisy(place + jnp.arange(6.0), dim) for place, dim in enumerate((3, 5, 3))]
    return tasks, fedavg(learning_rate, local_steps=2, weighted=False), dispatch


@functools.cache
def single_runs_of_unlike():
    """Results of `simulate` with both rates and every seed."""
    one, found = run_of(unlike), []
    for rate in AXES["learning_rate"]:
        for number, key in enumerate(seed_keys(SEED, range(SEEDS))):
            found.append(({"learning_rate": rate, "seed": number}, to_dataset(one(key, rate))))
    return found


@pytest.mark.parametrize("client_map", [slow_unless(False, "auto"), "scan"])
def test_models_of_several_structures_equal_single_runs_under_every_client_map(client_map):
    axes = {"learning_rate": AXES["learning_rate"]}
    how = {"seed": SEED, "record_every": EVERY, "client_map": client_map}
    grid = Grid(lambda learning_rate: Setup(*unlike(learning_rate)), axes, ROUNDS, SEEDS, **how)
    result = sweep_of(grid)
    for at, expected in single_runs_of_unlike():
        check_same(result, at, expected)
    assert (result["norm"].diff("model") != 0).all()  # all models differ
    assert (result["at_work"].diff("round") != 0).any()


def test_a_run_stopped_between_records_resumes_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("fedjax_mm.sweeps.execute._GROWTH", 4)  # stop in the middle
    how = Execution([progress(signalling(signal.SIGTERM, 0.1, []))])
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(InterruptedRunError):
        sweep_of(GRID, how._replace(checkpoints=checkpoints))
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        done = checkpoints.load(0).rounds
        assert 0 < done < ROUNDS
        assert done % EVERY  # the staleness since the last record is saved too
        rest = sweep_of(GRID, Execution(checkpoints=checkpoints))
    xr.testing.assert_identical(rest.drop_attrs(), whole().drop_attrs())


def test_synchronous_and_asynchronous_methods_share_a_grid_and_a_target():
    """Both do equally many local trainings per round, under one budget of simulated time."""
    delay = shifted_exponential(6)
    rules = {
        "rounds": on_clock(mfa_rand(6, 2), delay),
        "arrivals": fedast(6, 2, at_work=3, ratio=1, delay=delay, reallocate=False),
    }

    def build(rule):
        algorithm = fedavg(0.1, local_steps=2, weighted=False)
        return Setup(Towards(jnp.arange(6.0)), algorithm, rules[rule])

    until = Until("time", at_least=5.0)
    result = sweep(Grid(build, {"rule": list(rules)}, num_rounds=30, num_seeds=2, until=until))
    assert result["staleness"].sel(rule="rounds").isnull().all()
    ended = result["ended"]
    assert (ended > 0).all()
    assert (ended.sel(rule="arrivals") > ended.sel(rule="rounds")).all()
    for rule in rules:
        for number in range(2):
            at = {"rule": rule, "seed": number}
            last = int(ended.sel(at))
            time, updates = (result[name].sel(at) for name in ("time", "client_updates"))
            assert (time.sel(round=last) >= 5).all()
            assert (time.sel(round=last - 1) < 5).all()
            assert updates.sel(round=last).sum() == 6 * last
    assert (result["idle_rounds"].sel(rule="arrivals") == 0).all()


def test_the_plan_counts_model_versions_before_compiling():
    (program,) = programs_of(GRID)
    given = parts(0.1, 1.0)
    assert num_bytes(program.traced.replica) >= state_bytes(*given)
    outline = make_plan(GRID, compiles=False)
    assert outline.client_updates == 4 * SEEDS * ROUNDS * EACH
    alone = Grid(build, {"learning_rate": [0.1], "mean": [1.0]}, ROUNDS)
    assert (
        make_plan(alone, compiles=False).where.axis == "replicas"
    )  # though there are more devices than runs


def test_splitting_jobs_over_devices_equals_splitting_seeds():
    shared = sweep_of(GRID, Execution(split="clients"))
    assert make_plan(GRID, split="clients", compiles=False).where.axis == "clients"
    for name in whole().data_vars:
        np.testing.assert_allclose(shared[name], whole()[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_dispatch_ratios_have_their_own_programs():
    def build(ratio):
        dispatch = fedast(6, 2, at_work=4, ratio=ratio)
        return Setup(Towards(jnp.arange(6.0)), fedavg(0.1, local_steps=2), dispatch)

    grid = Grid(build, {"ratio": [1, 2]}, num_rounds=2, together=["ratio"])
    assert len(programs_of(grid)) == 2
    xr.testing.assert_equal(sweep(grid), sweep(dataclasses.replace(grid, together=())))


def test_more_arrivals_than_int32_can_count_are_refused():
    words = r"536,870,912 rounds of 10 arrivals are 5,368,709,120 arrivals; at most 2,147,483,647"
    with pytest.raises(ValueError, match=words):
        make_plan(dataclasses.replace(GRID, num_rounds=2**29, record_every=2**29), compiles=False)
