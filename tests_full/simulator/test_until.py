"""Runs that stop at a target are bitwise equal up to it, in every batch and after a resume."""

import dataclasses
import functools
import signal

import jax
import numpy as np
import pytest
import xarray as xr

from fedjax_mm.sweeps import Checkpoints, Execution, InterruptedRunError, Until, progress
from tests.helpers import slow_unless
from tests.simulator.test_until import ROUNDS, swept


@functools.cache
def whole(record_every=1):
    return swept(record_every=record_every)


@functools.cache
def target(record_every=1):
    """A value that some runs reach early, some late, and some never."""
    last = whole(record_every).excess_loss.max("model").isel(round=-1)
    return float(last.quantile(0.7))


def check(result, full, until):
    """A run equals the whole run up to its end, and has no records after it."""
    met = (full[until.metric] <= until.at_most).all("model")
    expected = xr.where(met.any("round"), full["round"].isel(round=met.argmax("round")), -1)
    np.testing.assert_array_equal(result.ended, expected)
    assert len(np.unique(expected)) > 2  # they end at different rounds
    assert (expected < 0).any()  # and some never
    is_over = (expected >= 0) & (full["round"] > expected)
    for name in ("loss", "excess_loss", "distance"):
        np.testing.assert_array_equal(result[name].isnull(), is_over.broadcast_like(full[name]))
        kept = xr.where(is_over, 0, result[name]).transpose(*full[name].dims)
        same = xr.where(is_over, 0, full[name]).transpose(*full[name].dims)
        np.testing.assert_array_equal(kept, same)
    end = xr.where(expected < 0, ROUNDS, expected)
    for name in ("client_updates", "gradients", "idle_rounds", "parameters_up"):
        stands = full[name].sel(round=np.minimum(full["round"], end))
        np.testing.assert_array_equal(result[name].transpose(*stands.dims), stands)
    assert (result.diverged == -1).all()


@pytest.mark.parametrize("record_every", [slow_unless(False, 1), 4])
def test_records_up_to_the_target_are_unchanged(record_every):
    until = Until("excess_loss", at_most=target(record_every))
    check(swept(until=until, record_every=record_every), whole(record_every), until)


@pytest.mark.parametrize("record_every", [1, slow_unless(False, 4)])
def test_a_run_may_stop_at_a_count(record_every):
    """Counts are cumulative, and 3 clients train each model in every round."""
    result = swept(until=Until("client_updates", at_least=44), record_every=record_every)
    end = {1: 15, 4: 16}[record_every]
    assert (result.ended == end).all()
    assert (result.client_updates.isel(round=-1) == 3 * end).all()
    before = slice(0, end)
    xr.testing.assert_equal(
        result.excess_loss.sel(round=before), whole(record_every).excess_loss.sel(round=before)
    )
    assert result.excess_loss.sel(round=slice(end + 1, None)).isnull().all()


def test_a_target_that_is_never_met_changes_nothing():
    result = swept(until=Until("excess_loss", at_most=-1.0))
    assert (result.ended == -1).all()
    xr.testing.assert_identical(
        result.drop_vars("ended").drop_attrs(deep=False), whole().drop_attrs(deep=False)
    )


def test_resuming_across_an_end_changes_nothing(tmp_path):
    until = Until("excess_loss", at_most=target())
    expected, done = swept(until=until), []

    def stop(label, so_far, total):
        if so_far > 0 and not done:
            done.append(so_far)
            signal.raise_signal(signal.SIGINT)

    with Checkpoints(tmp_path / "saved") as saved, pytest.raises(InterruptedRunError):
        swept(
            until=until,
            execution=Execution(checkpoints=saved, callbacks=[progress(stop)], save_every=0),
        )
    with Checkpoints(tmp_path / "saved", resume=True) as saved:
        result = swept(until=until, execution=Execution(checkpoints=saved))
    xr.testing.assert_identical(result.drop_attrs(deep=False), expected.drop_attrs(deep=False))
    with (
        Checkpoints(tmp_path / "saved", resume=True) as saved,
        pytest.raises(ValueError, match="until"),
    ):
        swept(until=dataclasses.replace(until, at_most=0.0), execution=Execution(checkpoints=saved))


def test_devices_stop_independently():
    """Each device computes until all of its own runs have stopped."""
    assert jax.device_count() > 1
    until = Until("excess_loss", at_most=target())
    check(swept(until=until, execution=Execution(split="replicas")), whole(), until)


def test_at_least_is_met_from_below():
    full = whole()
    result = swept(until=Until("distance", at_least=float(full.distance.min()) / 2))
    assert (result.ended == 0).all()
