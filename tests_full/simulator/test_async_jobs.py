"""A sweep over targets and arrivals of asynchronous jobs."""

import jax
import numpy as np
import xarray as xr

from fedjax_mm import simulate, sweep, to_dataset
from fedjax_mm.metrics import completion
from fedjax_mm.sweeps import Grid, Setup
from fedjax_mm.sweeps.program import programs_of
from tests.simulator.test_async_jobs import ALGORITHM, ARRIVALS, ROUNDS, TARGETS, TASK, jobs_at


def test_a_sweep_over_targets_and_arrivals_is_one_program_and_knows_completion_times():
    def build(target, late):
        return Setup(TASK, ALGORITHM, jobs_at(TARGETS[0] + target, ARRIVALS[late]))

    axes = {"target": [0.0, 0.001], "late": [0, 1]}
    grid = Grid(build, axes, ROUNDS, record_every=2)
    assert len(programs_of(grid)) == 1
    result, key = sweep(grid).isel(seed=0), jax.random.fold_in(jax.random.key(0), 0)
    jobs = build(0.001, 0).assignment
    _, alone = simulate(key, TASK, ALGORITHM, jobs, ROUNDS, record_every=2)
    expected, here = to_dataset(alone), result.sel(target=0.001, late=0)
    np.testing.assert_array_equal(here.active, expected.active)
    np.testing.assert_allclose(here.loss, expected.loss, rtol=1e-5)
    target = xr.DataArray(np.asarray(TARGETS[0]) + 0.001, dims="model")
    found, timed = (
        completion(expected, "excess_loss", at_most=target, clock=clock)
        for clock in ("round", "time")
    )
    last = expected.isel(round=-1)
    assert last.finished_at[0] == found.finished_at[0]
    ends = expected.time.isel(model=0).sel(round=int(last.finished_at[0]))
    assert timed.completion_time[0] == timed.finished_at[0] == ends
