"""Assignments with a clock, and asynchronous runs, in an experiment file."""

import optax
import pytest
import xarray as xr

from fedjax_mm import Experiment, fedavg, mfa_rand, run, sweep
from fedjax_mm.asynchrony import bods, device_time, fedast, on_clock, shifted_exponential
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.sweeps import Grid, Setup
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks import quadratic

LOCAL = {"learning_rate": 0.1, "local_steps": 2}
SERVER = {"name": "sgd", "learning_rate": 1.0}
JOBS = {"name": "fedast", "at_work": 6, "ratio": 2, "delay": {"mean": 2.0, "slow": 0.5}}
ROUNDS = {"name": "mfa_rand", "delay": {"mean": 2.0, "slow": 0.5}}


def experiment(**changes):
    settings = {
        "task": {"name": "quadratic", "num_clients": 8, "block_size": 2, "mu": 0.1},
        "num_models": 2,
        "num_rounds": 4,
        "num_seeds": 2,
        "algorithms": {
            "jobs": LOCAL | {"weighted": False, "server_optimizer": SERVER, "assignment": JOBS},
            "rounds": LOCAL | {"assignment": ROUNDS},
        },
    }
    return validate(Experiment, settings | changes)


def by_hand(algorithm, mean=2.0):
    task, delay = quadratic(8, 2, mu=0.1), shifted_exponential(8, mean, slow=0.5)
    if algorithm == "rounds":
        method = fedavg(0.1, local_steps=2)
        return Setup(task, method, on_clock(mfa_rand(8, 2), delay))
    method = fedavg(0.1, local_steps=2, weighted=False, server_optimizer=optax.sgd(1.0))
    return Setup(task, method, fedast(8, 2, at_work=6, ratio=2, delay=delay))


def test_a_file_describes_asynchronous_runs_and_clocks():
    result = run(experiment())
    expected = sweep(Grid(by_hand, {"algorithm": ["jobs", "rounds"]}, num_rounds=4, num_seeds=2))
    xr.testing.assert_equal(result, expected)
    assert result.staleness.sel(algorithm="jobs").isel(round=-1).notnull().all()
    assert (result.time.isel(round=-1) > 0).all()


@pytest.mark.slow
def test_bods_in_a_file_plans_by_simulated_times():
    """The file's delays drive both the planning and the clock."""
    table = {
        "name": "bods",
        "cohort_size": 3,
        "alpha": 0.5,
        "learn": "time",
        "delay": {"mean": 2.0},
    }
    result = run(experiment(algorithms={"A": LOCAL | {"assignment": table}}))

    def by_hand():
        law = shifted_exponential(8, 2.0)
        assignment = bods(8, 2, cohort_size=3, alpha=0.5, learn="time", delay=law)
        return Setup(quadratic(8, 2, mu=0.1), fedavg(0.1, local_steps=2), assignment)

    expected = sweep(Grid(by_hand, {}, num_rounds=4, num_seeds=2))
    xr.testing.assert_equal(result.isel(algorithm=0, drop=True), expected)


def test_a_file_describes_devices():
    sizes = {"steps": [2, 4], "flops": 1e6, "bytes_down": 36.0, "bytes_up": [36.0, 9.0]}
    rates = {"speed": 1e9, "down": 2e3, "up": [1e3] * 8, "bandwidth_spread": 0.5}
    delays = {"name": "device_time", **sizes, **rates}
    rounds = {"A": LOCAL | {"assignment": {"name": "mfa_rand", "delay": delays}}}
    result = run(experiment(algorithms=rounds, axes={"assignment.delay.down": [1e3, 2e3]}))
    assert (result.time.sel(down=1e3) > result.time.sel(down=2e3)).isel(round=-1).all()

    def by_hand():
        rule = on_clock(mfa_rand(8, 2), device_time(8, **sizes, **rates))
        return Setup(quadratic(8, 2, mu=0.1), fedavg(0.1, local_steps=2), rule)

    expected = sweep(Grid(by_hand, {}, num_rounds=4, num_seeds=2))
    found = result.sel(down=2e3).isel(algorithm=0, drop=True).drop_vars("down")
    xr.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_parameters_of_delays_are_axes_of_one_program():
    swept = experiment(axes={"assignment.delay.mean": [1.0, 2.0]})
    assert len(programs_of(grid_of(swept))) == 2  # one for each algorithm
    time = run(swept).time.isel(round=-1)
    xr.testing.assert_equal(time.sel(mean=2.0, drop=True), run(experiment()).time.isel(round=-1))
    assert (time.sel(mean=1.0) < time.sel(mean=2.0)).all()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (JOBS | {"at_work": 0}, "at_work"),
        (JOBS | {"at_work": [3, 3, 3]}, "at_work has 3 numbers; give one for all models"),
        (JOBS | {"ratio": 20}, "at_work is 12 in all, fewer than ratio = 20"),
        (JOBS | {"delay": {"men": 1.0}}, "delay.men = 1.0: unknown key, did you mean 'mean'?"),
        (JOBS | {"delay": {"mean": -1.0}}, "mean is -1"),
        (JOBS | {"delay": {"name": "device_tim"}}, "device_time"),
        (
            JOBS | {"appealing": {"cohort_size": 2}},
            "appealing is not for fedast, which draws clients one by one",
        ),
        (
            {"name": "bods", "cohort_size": 3, "appealing": {"cohort_size": 2}},
            "appealing is not for bods, which plans with all its clients",
        ),
        ({"name": "bods", "cohort_size": 5}, "cohort_size is 5, 10 clients for 2 models"),
    ],
)
def test_wrong_tables_are_refused(table, message):
    algorithms = {"A": LOCAL | {"assignment": table}}
    with pytest.raises(ValueError, match=message):
        experiment(algorithms=algorithms, requirement={"num_steps": 2})
