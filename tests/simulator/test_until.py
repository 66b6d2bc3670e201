"""Runs that stop at a target are bitwise equal up to it, in every batch and after a resume."""

import dataclasses
import functools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import Experiment, fedavg, mfa_rand, run, sweep
from fedjax_mm.sweeps import Checkpoints, Execution, InterruptedRunError, Setup, Until, progress
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.program import Given
from fedjax_mm.sweeps.structures import programs_of
from fedjax_mm.tasks import quadratic
from tests.helpers import slow_unless

RATES, SEEDS, ROUNDS = [0.05, 0.1, 0.2], 3, 40


def build(learning_rate):
    algorithm = fedavg(learning_rate, local_steps=2)
    return Setup(quadratic(6, 2, mu=0.05), algorithm, mfa_rand(6, 2))


def swept(execution=None, **options):
    axes = {"learning_rate": RATES}
    return sweep(Grid(build, axes, num_rounds=ROUNDS, num_seeds=SEEDS, **options), execution)


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


def test_a_finished_batch_computes_no_further_segment():
    """All runs meet the target at the start, so only one segment is computed."""
    seen = []

    def report(label, done, total):
        seen.append((label, done))

    execution = Execution(callbacks=[progress(report)])
    result = swept(until=Until("excess_loss", at_most=1e9), execution=execution)
    assert (result.ended == 0).all()
    assert result.excess_loss.isel(round=0).notnull().all()
    assert result.excess_loss.isel(round=slice(1, None)).isnull().all()
    assert (result.client_updates == 0).all()
    computed = [done for label, done in seen if label.startswith("run")]
    assert computed == [0, ROUNDS * SEEDS * len(RATES) * 6]  # one segment


def test_a_target_that_is_never_met_changes_nothing():
    result = swept(until=Until("excess_loss", at_most=-1.0))
    assert (result.ended == -1).all()
    xr.testing.assert_identical(
        result.drop_vars("ended").drop_attrs(deep=False), whole().drop_attrs(deep=False)
    )


def test_at_least_is_met_from_below():
    full = whole()
    result = swept(until=Until("distance", at_least=float(full.distance.min()) / 2))
    assert (result.ended == 0).all()


def test_the_loop_on_the_device_stops_at_a_count():
    until = Until("client_updates", at_least=44)
    (program,) = programs_of(Grid(build, {"learning_rate": RATES}, ROUNDS, SEEDS, until=until))
    runs = SEEDS * len(RATES)
    seeds = program.index[-1].astype(np.int32)
    given = Given(seeds, program.numbers, {}, root=np.uint32(0))
    segment = jax.jit(functools.partial(program.segment, None))
    replica, _ = segment(given, (0, ROUNDS), program.no_replica(runs))
    np.testing.assert_array_equal(replica.total.client_updates, np.full((runs, 2), 45))


def test_a_value_equal_to_the_bound_meets_it():
    values = {"loss": np.array([[0.6], [0.5], [0.4]])}
    assert Until("loss", at_most=0.5).first_record(values) == 1
    assert Until("loss", at_least=0.6).first_record(values) == 0
    exact = {"updates": np.array([[20_000_000], [20_000_001]], np.int32)}  # equal in float32
    for counts in (exact, {"updates": jnp.asarray(exact["updates"])}):
        _, is_met = Until("updates", 20_000_001.0).after((), counts)
        np.testing.assert_array_equal(is_met, [False, True])


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


SETTINGS = {
    "task": {"name": "quadratic", "num_clients": 6, "block_size": 2, "mu": 0.05},
    "num_models": 2,
    "num_rounds": 5,
    "num_seeds": 2,
    "assignment": {"name": "mfa_rand"},
    "algorithms": {"Rand": {"learning_rate": 0.1, "local_steps": 2}},
}


def test_a_file_may_have_a_target():
    result = run(
        Experiment.model_validate(SETTINGS | {"until": {"metric": "loss", "at_most": 1e9}})
    )
    assert (result.ended == 0).all()


@pytest.mark.parametrize(
    ("until", "says"),
    [
        ({"metric": "excess_loss"}, "give one"),
        ({"metric": "excess_loss", "at_least": 1.0, "at_most": 2.0}, "give one"),
        ({"metric": "excess_loss", "at_least": float("nan")}, "finite"),
    ],
)
def test_wrong_targets_are_refused(until, says):
    with pytest.raises(ValueError, match=says):
        Experiment.model_validate(SETTINGS | {"until": until})


def test_a_metric_that_is_not_recorded_is_refused_before_compilation():
    says = "'accuracy'; .* metrics are client_updates, distance, excess_loss, gradients, idle"
    with pytest.raises(ValueError, match=says):
        swept(until=Until("accuracy", at_least=0.9))
    with pytest.raises(ValueError, match="give one"):
        swept(until=Until("loss"))
    with pytest.raises(ValueError, match="client_updates, which grows; give at_least"):
        swept(until=Until("client_updates", at_most=100))
    with pytest.raises(ValueError, match=r"at_least is 1e\+12; counts go up to 2147483647"):
        swept(until=Until("gradients", at_least=1e12))


def test_devices_stop_independently():
    """Each device computes until all of its own runs have stopped."""
    assert jax.device_count() > 1
    until = Until("excess_loss", at_most=target())
    check(swept(until=until, execution=Execution(split="replicas")), whole(), until)
