"""Parts computed by executors give the result of the sweep, even if workers die."""

import multiprocessing
import os
import signal
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path

import distributed
import numpy as np
import pytest
import submitit  # imported here, because it keeps the stdout that it finds at its import
import xarray as xr

from fedjax_mm import cli, fedavg, mfa_rr, open_result, run, sweep
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.results.dataset import save_dataset
from fedjax_mm.sweeps import (
    Callback,
    Checkpoints,
    DivergenceError,
    Execution,
    Grid,
    InterruptedRunError,
    RefusedError,
    Saved,
    Setup,
)
from fedjax_mm.sweeps.cluster import TRIES, Part, compute_parts
from fedjax_mm.tasks import quadratic
from fedjax_mm.tools.compiler import SAFE
from tests.helpers import slow_unless


def build(num_models, learning_rate):
    setup = Setup(quadratic(6, 2, mu=0.1), fedavg(learning_rate, local_steps=2), None)
    return setup._replace(assignment=mfa_rr(6, num_models))


def make(**changes):
    axes = {"num_models": [3], "learning_rate": [0.1, 0.2]}
    return Grid(build, axes, num_rounds=3, num_seeds=2, **changes)


class Here:
    """An executor in this process, some calls of which may die or never end."""

    def __init__(self, dies=lambda part, tries: False, endless=None):
        self.dies, self.endless, self.given, self.cancelled = dies, endless, [], 0

    def submit(self, fn, *args):
        part = args[1]
        self.given.append(part)
        job = Job(self)
        if part == self.endless:
            return job
        try:
            if self.dies(part, self.given.count(part)):
                raise ConnectionError("the worker is gone")
            job.set_result(fn(*args))
        except ConnectionError as error:
            job.set_exception(error)
        return job


class Job(Future):
    def __init__(self, executor):
        super().__init__()
        self.executor = executor

    def cancel(self):
        self.executor.cancelled += 1


def empty(part):
    return Saved(0, [], {"part": tuple(part)})


def numbers(computed):
    """The numbers of computed parts, in order."""
    return sorted(Part(*saved.about["part"]) for saved in computed)


def parts(number):
    return [Part(each, number) for each in range(1, number + 1)]


def check_equal(found, expected):
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


# Parts and their workers


def test_a_part_whose_worker_died_is_submitted_again():
    executor = Here(lambda part, tries: tries <= part.number % TRIES)
    ended = []
    pieces = list(compute_parts(empty, parts(5), executor, ended.append))
    assert numbers(pieces) == parts(5)
    assert [executor.given.count(part) for part in parts(5)] == [2, 3, 1, 2, 3]
    assert ended[-1] == 5
    assert ended == sorted(ended)


def test_a_part_whose_workers_keep_dying_is_named():
    executor = Here(lambda part, _: part.number == 2)
    with pytest.raises(ChildProcessError, match=f"part 2/4 was submitted {TRIES} times.*is gone"):
        list(compute_parts(empty, parts(4), executor))
    assert executor.given.count(Part(2, 4)) == TRIES


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError, RefusedError),
        (partial(DivergenceError, partial=None), DivergenceError),
        (OverflowError, RefusedError),
    ],
)
def test_an_error_of_a_part_ends_the_sweep_at_once(error, kind):
    def compute(part):
        if part.number == 2:
            raise error("it is too large")
        return empty(part)

    executor = Here(endless=Part(3, 3))
    with pytest.raises(kind, match=r"part 2/3: (OverflowError: )?it is too large"):
        list(compute_parts(compute, parts(3), executor))
    assert len(executor.given) == 3
    assert executor.cancelled == 1


def test_finished_parts_are_yielded_before_an_error():
    """The first part fails, and the results of the others come before its error."""

    def compute(part):
        if part.number == 1:
            raise ValueError("it is too large")
        return empty(part)

    had = []
    with pytest.raises(RefusedError, match="part 1/3"):
        had.extend(compute_parts(compute, parts(3), Here()))
    pieces = compute_parts(compute, parts(3), Here())
    assert numbers([next(pieces), next(pieces)]) == parts(3)[1:]


def test_at_once_limits_the_number_of_submitted_parts():
    executor = Here()
    pieces = compute_parts(empty, parts(5), executor, at_once=2)
    next(pieces)
    assert executor.given == parts(5)[:2]
    assert len(list(pieces)) == 4


def test_a_sweep_that_cannot_be_pickled_is_refused():
    with pytest.raises(TypeError, match="the sweep cannot be sent to workers: "):
        list(compute_parts(partial(print, iter([]), (x for x in ())), parts(2), Here()))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"executor": 3}, TypeError, r"executor is 3; give an object with submit"),
        ({"num_parts": 0}, ValueError, "num_parts is 0"),
        ({"at_once": 0}, ValueError, "at_once is 0"),
    ],
)
def test_wrong_options_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        sweep(make(), Execution(**{"executor": Here(), **change}))


# Sweeps


def test_joined_parts_equal_the_sweep_and_are_reported():
    told = []
    watch = Callback(on_parts=lambda ended, of: told.append((ended, of)))
    how = Execution(executor=Here(), num_parts=3, callbacks=[watch])
    found, params = sweep(make(), how, keep="params")
    expected, wanted = sweep(make(), keep="params")
    check_equal(found, expected)
    for mine, theirs in zip(params, wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert told[0] == (0, 3)
    assert told[-1] == (3, 3)


SCALE, BUILDS = {"rate": 1.0}, []


def build_scaled(learning_rate):
    BUILDS.append(learning_rate)
    return build(3, SCALE["rate"] * learning_rate)


def test_a_worker_builds_the_grid_of_a_sweep_once(monkeypatch):
    """Parts of a sweep share a grid, and a later sweep notices changes."""
    grid = Grid(build_scaled, {"learning_rate": [0.1, 0.2]}, num_rounds=3)
    sweep(grid)
    once = len(BUILDS)
    how = Execution(executor=Here(), num_parts=2)
    sweep(grid, how)
    assert len(BUILDS) == 3 * once  # here, then in the parent and in the worker
    monkeypatch.setitem(SCALE, "rate", 0.5)
    check_equal(sweep(grid, how), sweep(grid))


def test_finished_parts_are_saved(tmp_path):
    """The third part fails permanently, and the others are not computed again."""
    dying = Here(lambda part, _: part.number == 3)
    with Checkpoints(tmp_path) as saved, pytest.raises(ChildProcessError, match="part 3/3"):
        sweep(make(), Execution(executor=dying, num_parts=3, checkpoints=saved))
    executor = Here()
    with Checkpoints(tmp_path, resume=True) as saved:
        how = Execution(executor=executor, num_parts=3, checkpoints=saved)
        check_equal(sweep(make(), how), sweep(make()))
    assert executor.given == [Part(3, 3)]
    with Checkpoints(tmp_path, resume=True) as saved:
        how = Execution(executor=executor, num_parts=4, checkpoints=saved)
        with pytest.raises(RefusedError, match="parts was 3, is 4"):
            sweep(make(), how)


def test_a_signal_ends_a_sweep_after_saving_its_parts(tmp_path, capsys):
    """The second part sends the signal."""

    def interrupts(part, _):
        if part.number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    with Checkpoints(tmp_path) as saved:
        how = Execution(executor=Here(interrupts), num_parts=3, checkpoints=saved, at_once=1)
        with pytest.raises(InterruptedRunError, match="at 33% and"):
            sweep(make(), how)
    assert "stopping; parts that have ended are saved" in capsys.readouterr().err
    executor = Here()
    with Checkpoints(tmp_path, resume=True) as saved:
        how = Execution(executor=executor, num_parts=3, checkpoints=saved)
        check_equal(sweep(make(), how), sweep(make()))
    assert executor.given == parts(3)[1:]


FILE = {
    "num_models": 2,
    "num_rounds": 3,
    "num_seeds": 2,
    "task": {"name": "quadratic", "num_clients": 6, "block_size": 2},
    "algorithms": {
        "A": {
            "assignment": {"name": "mfa_rand"},
            "learning_rate": {"schedule": "cosine", "start": 0.1},
            "local_steps": 2,
        },
    },
    "axes": {"task.mu": [0.1, 0.2]},
}


@pytest.mark.parametrize(
    "change",
    [slow_unless(not change, change) for change in ({}, {"precision": "float64"})],
)
def test_an_experiment_is_sent_as_its_settings(change):
    experiment = validate(Experiment, FILE | change).with_seeds(4, 2)
    found = run(experiment, Execution(executor=Here(), num_parts=3))
    expected = run(experiment)
    assert found.excess_loss.dtype == expected.excess_loss.dtype
    np.testing.assert_array_equal(found.seed, [4, 5])
    check_equal(found, expected)


# Real executors


SLURM = {
    "sbatch": "echo $@ >> calls; cp $1 script; echo Submitted batch job 7",
    "srun": "",
    "scancel": "",
    "sacct": "echo 'JobID|State|NodeList|'",
}


@pytest.mark.parametrize(("at_once", "most"), [(None, 200), (16, 16)])
def test_slurm_gets_one_job_array_and_the_data_once(tmp_path, monkeypatch, at_once, most):
    for name, code in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    executor = submitit.AutoExecutor("jobs", cluster="slurm")

    def submitted(ended):
        raise InterruptedError

    compute = partial(np.take, np.zeros(250_000, np.float32))
    with pytest.raises(InterruptedError):
        list(compute_parts(compute, parts(200), executor, submitted, at_once))
    assert len(Path("calls").read_text().splitlines()) == 1
    assert f"#SBATCH --array=0-199%{most}\n" in Path("script").read_text()
    pickles = [path.stat().st_size for path in Path("jobs").glob("*.pkl")]
    assert len(pickles) == 200
    assert sum(pickles) < 200_000
    assert not list(Path("jobs").glob("sweep-*"))


class Client(Here):
    """Like Dask's, it accepts results as arguments before they are known."""

    scatter = None

    def submit(self, fn, *args, pure):
        assert not pure
        if fn is not bytes:
            job, part, is_double = args
            return super().submit(fn, job.result(), part, is_double)
        job = Job(self)
        job.set_result(fn(*args))
        return job


def test_dask_gets_the_sweep_as_a_future():
    assert numbers(compute_parts(empty, parts(3), Client())) == parts(3)


def kill_once(path, part):
    """Kills the first worker that computes the second part."""
    if part.number == 2 and not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return empty(part)


@pytest.fixture
def cheap(monkeypatch):
    """Gives workers one device, and the package under test."""
    monkeypatch.setenv("XLA_FLAGS", SAFE)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def test_submitit_repeats_a_part_whose_job_was_killed(cheap, tmp_path):
    executor = submitit.AutoExecutor(folder=tmp_path / "jobs", cluster="local")
    executor.update_parameters(timeout_min=5)
    compute = partial(kill_once, tmp_path / "killed")
    pieces = list(compute_parts(compute, parts(3), executor))
    assert numbers(pieces) == parts(3)
    assert (tmp_path / "killed").exists()


def test_dask_repeats_a_part_whose_worker_was_killed(cheap, tmp_path):
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as here,
        distributed.Client(here) as client,
    ):
        compute = partial(kill_once, tmp_path / "killed")
        pieces = list(compute_parts(compute, parts(3), client))
    assert numbers(pieces) == parts(3)
    assert (tmp_path / "killed").exists()


# Commands

TOML = """\
num_models = 2
num_rounds = 3
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
[executor]
name = "submitit"
cluster = "local"
num_parts = 2
folder = "jobs"
parameters = { timeout_min = 5 }
"""


def call(*words):
    with pytest.raises(SystemExit) as end:
        cli.main(["--no-cache", *map(str, words)])
    return end.value.code


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "grid.toml"
    path.write_text(TOML)
    return path


@pytest.mark.slow
def test_all_executors_compute_the_same_result(cheap, file):
    """One sweep is computed at once, in seven parts, and by three executors."""
    axes = 'learning_rate = [0.05, 0.1]\nassignment.name = ["mfa_rr", "mfa_rand"]\n'
    settings = TOML.replace("[executor]", f"{axes}[executor]").replace("seeds = 2", "seeds = 5")
    file.write_text(settings.replace("num_parts = 2", "num_parts = 7"))
    assert call("sweep", file, "--out", "once") == 0
    for number in range(1, 8):
        assert call("sweep", file, "--out", "parts", "--part", f"{number}/7") == 0
    assert call("merge", "parts/grid") == 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        found = run(file, Execution(executor=pool, num_parts=7))
    Path("pool/grid").mkdir(parents=True)
    save_dataset(found, Path("pool/grid/result.nc"))
    assert call("sweep", file, "--out", "submitit", "--executor", "submitit") == 0
    dask = file.with_name("dask") / "grid.toml"
    dask.parent.mkdir()
    dask.write_text(file.read_text().partition("[executor]")[0])
    words = ["--executor", "dask", "--set", "executor={ name = 'dask', num_parts = 7 }"]
    assert call("sweep", dask, "--out", "dask", *words) == 0
    expected = open_result("once/grid")
    assert expected.sizes["seed"] == 5
    for place in ("parts", "pool", "submitit", "dask"):
        found = open_result(f"{place}/grid")
        assert found.attrs["manifest"]["parts"] == 7
        for name in ("config", "seed", "versions"):
            assert found.attrs["manifest"][name] == expected.attrs["manifest"][name]
        plain = found.drop_attrs(deep=False)
        xr.testing.assert_allclose(plain, expected.drop_attrs(deep=False), rtol=1e-6)
        print(place, "equal bit by bit:", plain.identical(expected.drop_attrs(deep=False)))
        assert not Path(f"{place}/grid/unfinished").exists()


@pytest.mark.slow
def test_a_reproduction_is_computed_by_an_executor(cheap, file):
    words = ["reproduce", "mfa-fig3", "--rounds", "5", "--seeds", "3", "--set", "num_models=3"]
    by = ["--executor", "submitit", "--set", "executor.cluster=local"]
    assert call(*words, "--out", "once") in (0, 3)
    assert call(*words, *by, "--set", "executor.num_parts=2", "--out", "jobs-out") in (0, 3)
    found, expected = open_result("jobs-out/mfa-fig3"), open_result("once/mfa-fig3")
    assert found.attrs["manifest"]["parts"] == 2
    xr.testing.assert_allclose(found.drop_attrs(), expected.drop_attrs(), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--executor", "submitit", "--part", "1/2"], "computes all parts, and --part one"),
        (["--executor", "slurm"], "--executor is 'slurm'; choose from submitit, dask"),
        (
            ["--executor", "dask"],
            "--executor is 'dask', but the file has executor.name = 'submitit'",
        ),
        (["--set", "executor.clutser=local"], "executor.clutser = 'local': unknown key"),
        (
            ["--executor", "submitit", "--set", "executor.parameters.speed=3"],
            "executor.parameters: ",
        ),
    ],
)
def test_wrong_executors_are_refused(file, capsys, options, message):
    assert call("sweep", file, *options) == 2
    assert message in capsys.readouterr().err
    if "parameters" not in options[-1]:  # only submitit checks its parameters
        assert call("sweep", file, *options, "--dry-run") == 2


def test_executor_settings_need_no_table_in_the_file(file, capsys):
    file.write_text(file.read_text().partition("[executor]")[0])
    local = ["--set", "executor.cluster=local", "--set", "executor.num_parts=3"]
    assert call("sweep", file, "--dry-run", "--executor", "submitit", *local) == 0
    assert "3 parts, which submitit computes" in capsys.readouterr().err
    assert call("sweep", file, "--dry-run", *local) == 2
    assert "needs an executor; give --executor NAME" in capsys.readouterr().err
    assert call("sweep", file, "--executor", "submitit") == 2  # this machine has no Slurm
    assert "executor.cluster = 'local'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("executor.clutser=local", "executor.clutser = 'local': unknown key"),
        ("executor.num_parts=0", "executor.num_parts = 0: "),
    ],
)
def test_wrong_executors_of_a_reproduction_are_refused(tmp_path, capsys, setting, message):
    words = ["reproduce", "mfa-fig3", "--out", tmp_path, "--set", setting]
    assert call(*words, "--executor", "submitit") == 2
    assert message in capsys.readouterr().err
    assert call(*words) == 2
    assert "executor" in capsys.readouterr().err
    assert call(*words[:-2], "--executor", "slurm") == 2
    assert "--executor is 'slurm'; choose from submitit, dask" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
