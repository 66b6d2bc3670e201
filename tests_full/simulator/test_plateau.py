"""Early stopping at a plateau, against a plain loop and across a resume."""

import dataclasses
import functools
import signal
from functools import partial

import jax
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import Experiment, run
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.sweeps import Checkpoints, Execution, InterruptedRunError, Until, progress
from fedjax_mm.sweeps.devices import layout
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.program import Block, programs_of
from fedjax_mm.tasks import quadratic
from tests.oracles.plateau import plateau_end
from tests.simulator.test_until import RATES, ROUNDS, SEEDS, SETTINGS, build, swept
from tests_full.simulator.test_until import whole

SLOW = Until("excess_loss", patience=3, mode="min", min_delta=0.001, warmup=2)
"""Some runs stop early, some late, and some never."""


def expected_ends(until, record_every=1):
    """Rounds in which the plain loop stops, from records of runs without a target."""
    values = whole(record_every)[until.metric].transpose(..., "round", "model").astype(float)
    settings = (until.patience, until.mode, until.min_delta, until.warmup)
    ends = [plateau_end(each, *settings) for each in values.values.reshape(-1, *values.shape[-2:])]
    return np.where(np.less(ends, 0), -1, np.multiply(ends, record_every)).reshape(-1, SEEDS)


@functools.cache
def slow():
    """The sweep with the target `SLOW`."""
    return swept(until=SLOW)


def test_random_records_stop_as_in_the_plain_loop():
    rng = np.random.default_rng(0)
    walks = rng.normal(size=(30, 50, 2)).cumsum(0).astype(np.float32)
    walks[rng.random(walks.shape) < 0.1] = np.nan
    ends = []
    for mode in ("min", "max"):
        for patience, min_delta, warmup in [(1, 0.0, 0), (3, 0.0, 4), (2, 0.5, 1), (8, 1.5, 0)]:
            until = Until("x", None, None, patience, mode, min_delta, warmup)
            found = until.first_record({"x": walks})
            loop = [
                plateau_end(each.tolist(), patience, mode, min_delta, warmup)
                for each in walks.swapaxes(0, 1)
            ]
            np.testing.assert_array_equal(found, loop)
            ends += loop
    assert {-1, 2, 9} <= {*ends}


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize(
    ("name", "values", "min_delta", "end"),
    [
        ("1/t", 1 / np.arange(1.0, 200), 0.0, None),
        ("constant", np.ones(40), 0.0, 4),
        ("improved by min_delta", -0.25 * np.arange(40), 0.25, None),
        ("improved by less in one record", -0.25 * np.arange(40), 0.5, None),
        ("improved by less in patience", -0.25 * np.arange(40), 1.0, 4),
        ("NaN", np.full(40, np.nan), 0.0, 3),
        ("infinite", np.full(40, np.inf), 0.0, 3),
    ],
)
def test_known_sequences_stop_as_expected(name, values, min_delta, end, warmup):
    """The first record of a constant is an improvement, but that of NaN is not."""
    until = Until("x", patience=4, mode="min", min_delta=min_delta, warmup=warmup)
    expected = -1 if end is None else end + warmup
    assert until.first_record({"x": values[:, None].astype(np.float32)}) == expected, name
    opposite = dataclasses.replace(until, mode="max")
    assert opposite.first_record({"x": -values[:, None].astype(np.float32)}) == expected, name


def test_all_models_must_be_on_a_plateau_at_once():
    """One model stalls, improves and stalls again, and the other stalls in between and later."""
    one = [5, 5, 5, 4, 3, 2, 2, 2, 2.0]
    other = [5, 4, 3, 2, 2, 2, 1, 1, 1.0]
    values = np.stack([one, other], axis=-1).astype(np.float32)
    until = Until("x", patience=2, mode="min")
    assert until.first_record({"x": values[:, :1]}) == 2
    assert until.first_record({"x": values[:, 1:]}) == 5
    assert until.first_record({"x": values}) == 8


def test_integers_bools_and_bfloat16_are_compared_as_floats():
    until = Until("x", patience=2, mode="max")
    assert until.first_record({"x": np.array([[1], [2], [2], [2]])}) == 3
    assert until.first_record({"x": np.array([[False], [True], [True], [True]])}) == 3
    halves = jax.numpy.array([[1], [1.01], [1.02], [1.02], [1.02]], jax.numpy.bfloat16)
    assert until.first_record({"x": np.asarray(halves)}) == 4


def test_a_run_stops_with_the_plain_loop():
    result, full, ends = slow(), whole(), expected_ends(SLOW)
    assert len(np.unique(ends)) > 2
    assert (ends < 0).any()
    np.testing.assert_array_equal(result.ended, ends)
    is_over = (result.ended >= 0) & (full["round"] > result.ended)
    for name in ("loss", "excess_loss", "distance"):
        xr.testing.assert_equal(result[name], full[name].where(~is_over))


def test_final_parameters_are_those_at_the_stop():
    result, (params, *_) = swept(until=SLOW, keep="params")
    last = result.distance.sel(round=result.ended.where(result.ended >= 0, ROUNDS), model=1)
    distance = np.linalg.norm(params - quadratic(6, 2, mu=0.05).minimizer, axis=-1)
    np.testing.assert_allclose(distance, last, rtol=1e-5)


def test_the_loop_on_the_device_stops_with_the_last_run():
    """Later records keep the values with which they were allocated."""
    until = Until("excess_loss", patience=2, mode="max")
    ends = expected_ends(until)
    (program,) = programs_of(Grid(build, {"learning_rate": RATES}, ROUNDS, SEEDS, until=until))
    block = Block(*program.shape, 0)
    given, _, state = program.inputs(layout(1), block, 0)
    segment = jax.jit(partial(program.segment, None, block))
    replica, records = segment(given, (0, ROUNDS), state)
    assert 1 < ends.min() <= ends.max() < ROUNDS
    assert replica.has_ended.all()
    (written,) = np.nonzero(np.any(records.metrics["loss"], axis=(1, 2)))
    assert written.max() == ends.max()
    np.testing.assert_array_equal(until.first_record(records.metrics), ends.ravel())


def test_patience_counts_records_instead_of_rounds():
    until = dataclasses.replace(SLOW, patience=2, min_delta=0.003)
    result, ends = swept(until=until, record_every=4), expected_ends(until, 4)
    assert len(np.unique(ends)) > 2
    np.testing.assert_array_equal(result.ended, ends)


def test_patience_continues_after_a_resume(tmp_path, monkeypatch):
    """Each segment has one round, and the interrupt comes before any run has stopped."""
    monkeypatch.setattr("fedjax_mm.sweeps.execute._SEGMENT_SECONDS", 0)
    expected, stopped = slow(), []

    def stop(label, done, total):
        if done > 0.4 * total and not stopped:
            stopped.append(done / total)
            signal.raise_signal(signal.SIGINT)

    def saved_sweep(callbacks=(), **how):
        with Checkpoints(tmp_path / "saved", **how) as checkpoints:
            execution = Execution(checkpoints=checkpoints, callbacks=callbacks)
            return swept(execution, until=SLOW)

    with pytest.raises(InterruptedRunError):
        saved_sweep([progress(stop)])
    assert 0 < stopped[0] * ROUNDS < expected.ended.where(expected.ended >= 0).min()
    result = saved_sweep(resume=True)
    xr.testing.assert_identical(result.drop_attrs(deep=False), expected.drop_attrs(deep=False))
    with (
        Checkpoints(tmp_path / "saved", resume=True) as checkpoints,
        pytest.raises(ValueError, match="patience was 3, is 4"),
    ):
        swept(Execution(checkpoints=checkpoints), until=dataclasses.replace(SLOW, patience=4))


def test_a_file_may_have_a_plateau_as_target():
    until = {"metric": "loss", "patience": 2, "mode": "min", "min_delta": 1e9, "warmup": 1}
    result = run(Experiment.model_validate(SETTINGS | {"until": until}))
    assert (result.ended == 3).all()
    axes = {"learning_rate": [0.1, 0.2]}
    result = run(Experiment.model_validate(SETTINGS | {"until": until, "axes": axes}))
    assert (result.ended == 3).all()
    assert result.attrs["manifest"]["config"]["until"]["patience"] == 2


@pytest.mark.parametrize(
    ("until", "says"),
    [
        ({"patience": 2}, 'give "min" if smaller'),
        ({"patience": 0, "mode": "min"}, "patience = 0"),
        ({"patience": 2.5, "mode": "min"}, "patience = 2.5"),
        ({"patience": 2, "mode": "auto"}, "mode = 'auto'"),
        ({"patience": 2, "mode": "min", "min_delta": -1.0}, "min_delta = -1"),
        ({"patience": 2, "mode": "min", "min_delta": float("inf")}, "min_delta = inf"),
        ({"patience": 2, "mode": "min", "warmup": -1}, "warmup = -1"),
        ({"patience": 2, "mode": "min", "at_most": 1.0}, "at_most = 1.0 and patience = 2"),
        ({"at_most": 1.0, "warmup": 3}, "warmup = 3, which is for a plateau"),
    ],
)
def test_wrong_plateaus_of_files_are_refused(until, says):
    with pytest.raises(ValueError, match=says):
        validate(Experiment, SETTINGS | {"until": {"metric": "loss"} | until})
