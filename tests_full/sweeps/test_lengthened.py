"""Finished sweeps go on from their kept state, bit for bit as if they had been longer."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import xarray as xr

from fedjax_mm import fedavg, join_seeds, local_sgd, mfa_rand, mfa_rr, open_result, scaffold, sweep
from fedjax_mm.sweeps import (
    Callback,
    Checkpoints,
    Execution,
    Grid,
    InterruptedRunError,
    RefusedError,
    Setup,
    Until,
    merge,
)
from fedjax_mm.tasks import quadratic
from tests.helpers import Towards
from tests.sweeps.test_checkpoint import wandering
from tests.test_cli import call
from tests_full.sweeps.test_async_sweep import build as asynchronous

RATES = {"learning_rate": [0.05, 0.1]}


def plain(learning_rate):
    return Setup(quadratic(6, 2, mu=0.1), fedavg(learning_rate, local_steps=2), mfa_rr(6, 2))


def stateful(learning_rate):
    local = local_sgd(learning_rate, steps=2)
    return Setup(quadratic(6, 2, mu=0.1), scaffold(local), mfa_rand(6, 2))


def drawn(learning_rate):
    task = Towards(jnp.arange(4.0))
    return Setup(task, fedavg(learning_rate, local_steps=2), wandering(4, 2))


BUILDS = {
    "plain": (plain, {}),
    "client states": (stateful, {"axes": {"learning_rate": [0.01, 0.02]}, "record_every": 4}),
    "keys in states": (drawn, {"record_every": 2}),
    "arrivals": (asynchronous, {"axes": RATES | {"mean": [1.0, 3.0]}, "record_every": 4}),
    "some reach a target": (plain, {"until": Until("excess_loss", at_most=0.008)}),
    "all reach a target": (plain, {"until": Until("excess_loss", at_most=9.0)}),
    "a plateau": (plain, {"until": Until("loss", patience=3, mode="min", min_delta=0.01)}),
}


def make(build, num_rounds, **changes):
    given = {"axes": RATES, "num_rounds": num_rounds, "num_seeds": 3} | changes
    return Grid(**{"build": build} | given)


def keep(grid, directory, **options):
    with Checkpoints(directory, resume=True) as checkpoints:
        how = Execution(checkpoints=checkpoints, **{"keep_state": True} | options)
        result = sweep(grid, how)
        checkpoints.discard()
    return result


def check_alike(found, expected):
    xr.testing.assert_identical(found.drop_attrs(deep=False), expected.drop_attrs(deep=False))


@pytest.mark.parametrize("name", BUILDS)
def test_a_lengthened_sweep_equals_the_whole_one(tmp_path, name):
    """Into two lengths, of which the second goes on from the first in place."""
    build, settings = BUILDS[name]
    keep(make(build, 8, **settings), tmp_path)
    whole = sweep(make(build, 24, **settings))
    check_alike(sweep(make(build, 24, **settings), continue_from=tmp_path), whole)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    middle = keep(make(build, 16, **settings), tmp_path, keep_state=False)
    check_alike(middle, sweep(make(build, 16, **settings)))
    check_alike(keep(make(build, 24, **settings), tmp_path), whole)
    if name == "some reach a target":
        assert len(np.unique(whole.ended >= 0)) == 2


def test_parameters_of_a_lengthened_sweep(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        sweep(make(plain, 4, keep="params"), Execution(checkpoints=checkpoints, keep_state=True))
    found, params = sweep(make(plain, 12, keep="params"), continue_from=tmp_path)
    whole, wanted = sweep(make(plain, 12, keep="params"))
    check_alike(found, whole)
    for mine, theirs in zip(params, wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_lengthening_that_was_stopped_goes_on(tmp_path):
    """The state of the shorter sweep stays until the longer one has ended."""
    keep(make(plain, 4), tmp_path)

    def stop(segment):
        if segment.rounds > 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(InterruptedRunError):
        keep(make(plain, 400), tmp_path, callbacks=[Callback(on_segment=stop)])
    assert {path.name for path in tmp_path.iterdir()} == {"state", "unfinished"}
    with pytest.raises(RefusedError, match="num_rounds was 400, is 40"):
        keep(make(plain, 40), tmp_path)
    check_alike(keep(make(plain, 400), tmp_path), sweep(make(plain, 400)))
    check_alike(keep(make(plain, 400), tmp_path), sweep(make(plain, 400)))  # computes nothing


def decaying(num_rounds):
    """A setup whose rate decays over all rounds, so that a longer run is another one."""

    def build(learning_rate):
        rate = optax.cosine_decay_schedule(learning_rate, num_rounds)
        return Setup(quadratic(6, 2, mu=0.1), fedavg(rate, local_steps=2), mfa_rr(6, 2))

    return build


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (make(plain, 4), "num_rounds is 4, but the state in .* is of 8 rounds"),
        (make(plain, 12, seed=1), "a different run: seed was 0, is 1"),
        (make(plain, 12, record_every=2), "record_every was 1, is 2"),
        (make(plain, 12, until=Until("loss", at_most=0.1)), "until was null"),
        (make(plain, 12, first_seed=3), "first_seed was 0, is 3"),
        (make(decaying(12), 12), "(program|data of) .* schedule over num_rounds"),
    ],
)
def test_another_sweep_does_not_go_on(tmp_path, grid, message):
    before = decaying(8) if "schedule" in message else plain
    keep(make(before, 8), tmp_path)
    with pytest.raises(RefusedError, match=message):
        sweep(grid, continue_from=tmp_path)


def test_a_state_must_have_been_kept(tmp_path):
    with pytest.raises(RefusedError, match="parameters alone are no state: to"):
        sweep(make(plain, 4), continue_from=tmp_path)
    with pytest.raises(RefusedError, match="keep_state needs checkpoints"):
        sweep(make(plain, 4), Execution(keep_state=True))
    with pytest.raises(RefusedError, match="an executor keeps no states"):
        sweep(make(plain, 4), Execution(keep_state=True, executor=ThreadPoolExecutor()))


def test_a_sweep_begun_without_its_state_is_refused(tmp_path):
    def stop(segment):
        if segment.batch:
            os.kill(os.getpid(), signal.SIGTERM)

    def build(learning_rate, mu):  # two programs, hence two batches
        setup = plain(learning_rate)
        return setup if mu == 0.1 else setup._replace(assignment=mfa_rand(6, 2))

    grid = make(build, 4, axes={"learning_rate": [0.1], "mu": [0.1, 0.2]})
    with pytest.raises(InterruptedRunError):
        keep(grid, tmp_path, keep_state=False, callbacks=[Callback(on_segment=stop)])
    with pytest.raises(RefusedError, match="began without keeping its state"):
        keep(grid, tmp_path)
    check_alike(keep(grid, tmp_path, keep_state=False), sweep(grid))


def test_parts_are_lengthened(tmp_path):
    short, long = make(plain, 4), make(plain, 12)
    for part in ("1/2", "2/2"):
        sweep(short, Execution(keep_state=True), part=part, out=tmp_path)
    check_alike(merge(tmp_path, short), sweep(short))
    with pytest.raises(ValueError, match="num_rounds was 4, is 12"):
        merge(tmp_path, long)
    for part in ("1/2", "2/2"):
        sweep(long, part=part, out=tmp_path)
    check_alike(merge(tmp_path, long), sweep(long))
    with pytest.raises(RefusedError, match="num_rounds is 4, but the state"):
        sweep(short, part="1/2", out=tmp_path)


def test_seeds_are_joined_with_their_manifest():
    first, later = sweep(make(plain, 4)), sweep(make(plain, 4, num_seeds=2, first_seed=3))
    found, whole = join_seeds(first, later), sweep(make(plain, 4, num_seeds=5))
    check_alike(found, whole)
    about, wanted = found.attrs["manifest"], whole.attrs["manifest"]
    assert {**about, "wall_seconds": 0} == {**wanted, "wall_seconds": 0}
    assert about["wall_seconds"]["run"] > first.attrs["manifest"]["wall_seconds"]["run"]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (make(plain, 4, first_seed=4), "ends with seed 2, and the next begins with seed 4"),
        (make(plain, 4, seed=1, first_seed=3), "different runs: seed was 0, is 1"),
        (make(plain, 8, first_seed=3), "round"),
    ],
)
def test_other_results_are_not_joined(grid, message):
    with pytest.raises(ValueError, match=message):
        join_seeds(sweep(make(plain, 4)), sweep(grid))


FILE = """\
num_models = 2
num_rounds = 4
num_seeds = 2
[task]
name = "quadratic"
num_clients = 6
block_size = 2
[algorithms.A]
assignment = { name = "mfa_rr" }
learning_rate = 0.1
local_steps = 2
[axes]
task.mu = [0.1, 0.2]
"""


def test_a_command_lengthens_its_result(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grid.toml").write_text(FILE)
    longer, run = ("--set", "num_rounds=12"), ("run", "grid.toml", "--out")
    assert call(*run, "whole", *longer).code == 0
    assert call(*run, "mine").code == 0
    code, _, said = call(*run, "mine", *longer, "--resume")
    assert code == 2
    assert "has 4 rounds, but their final state was not kept; parameters alone are no" in said
    assert call(*run, "mine", "--keep-state", "--overwrite").code == 0
    for words, message in {
        (*longer,): "num_rounds was 4, is 12",
        ("--set", "num_rounds=2", "--resume"): "has 4 rounds, and num_rounds is 2",
        (*longer, "--resume", "--set", "num_seeds=3"): "has 2 seeds from 0 on",
        ("--first-seed", "2"): "adds to no parameters and to no state",
        (*longer, "--resume", "--executor", "dask"): "keeps no states",
    }.items():
        code, _, said = call(*run, "mine", *words)
        assert (code, message in said) == (2, True), said
    assert call(*run, "mine", *longer, "--resume").code == 0
    check_alike(open_result("mine/grid"), open_result("whole/grid"))
    assert open_result("mine/grid").attrs["manifest"]["config"]["num_rounds"] == 12
    assert "is complete" in call(*run, "mine", *longer, "--resume").out
    assert call(*run, "mine", "--overwrite").code == 0
    assert not (tmp_path / "mine/grid/state").exists()
